#pragma once

#include <cstdint>

namespace dlmkern {

// Rows of up to this many logits, and those of float64 logits, are scanned in float64: there is little time
// to win, and confidences that lie close together can be told apart digit by digit.
constexpr int64_t kShortRow = 1024;

}  // namespace dlmkern
