// Positions in the order in which a selection considers them.
#pragma once

#include <cstdint>

namespace dlmkern {

struct Candidate {
  double priority;  // not NaN
  int64_t index;
};

inline bool goes_first(const Candidate& a, const Candidate& b) {
  return a.priority > b.priority || (a.priority == b.priority && a.index < b.index);
}

}  // namespace dlmkern
