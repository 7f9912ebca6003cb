#include <algorithm>
#include <cmath>
#include <vector>

#include "candidate.h"
#include "check.h"
#include "parallel.h"
#include "tensor.h"

namespace dlmkern {
namespace {

// True if the candidate's row of the conflict matrix meets the selection; `in` holds 0 or 0xff for each
// position.
bool conflicts(const dlmkern_view& conflict, int64_t b, int64_t i, const uint8_t* in) {
  const int64_t n = conflict.shape[2], stride = conflict.stride[2];
  const uint8_t* row = address_of<uint8_t>(conflict, b, i);
  unsigned met = 0;
  if (stride == 1) {
    for (int64_t j = 0; j < n; ++j) met |= row[j] & in[j];
  } else {
    for (int64_t j = 0; j < n && met == 0; ++j) met |= row[j * stride] & in[j];
  }
  return met != 0;
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_independent_set(const dlmkern_view* conflict, const dlmkern_view* priority,
                                           const dlmkern_view* eligible, const dlmkern_view* preselected,
                                           const dlmkern_view* selected) {
  DLMKERN_TRY(check_input(conflict, kBool, {kAnySize, kAnySize, kAnySize}));
  const int64_t B = conflict->shape[0], n = conflict->shape[1];
  if (conflict->shape[2] != n) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_input(priority, kReal, {B, n}));
  DLMKERN_TRY(check_optional_input(eligible, kBool, {B, n}));
  DLMKERN_TRY(check_optional_input(preselected, kBool, {B, n}));
  DLMKERN_TRY(check_output(selected, kBool, {B, n}));
  if (n == 0) return DLMKERN_OK;
  return guarded([&] {
    std::vector<Candidate> all_candidates(static_cast<size_t>(B * n));
    std::vector<uint8_t> all_in(static_cast<size_t>(B * n));
    const bool worth = B > 1 && B * n * n > kParallelWork;
#pragma omp parallel for if (worth)
    for (int64_t b = 0; b < B; ++b) {
      Candidate* const candidates = all_candidates.data() + b * n;
      uint8_t* const in = all_in.data() + b * n;
      Candidate* end = candidates;
      for (int64_t i = 0; i < n; ++i) {
        const double value = read_float(*priority, b, i);
        if (preselected != nullptr && read_bool(*preselected, b, i)) {
          in[i] = 0xff;
        } else if (!std::isnan(value) && (eligible == nullptr || read_bool(*eligible, b, i))) {
          *end++ = {value, i};
        }
      }
      std::sort(candidates, end, goes_first);
      for (const Candidate* c = candidates; c != end; ++c) {
        if (!conflicts(*conflict, b, c->index, in)) in[c->index] = 0xff;
      }
      for (int64_t i = 0; i < n; ++i) write_bool(*selected, in[i] != 0, b, i);
    }
    return DLMKERN_OK;
  });
}
