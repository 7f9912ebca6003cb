#include <algorithm>
#include <cmath>
#include <vector>

#include "candidate.h"
#include "check_ops.h"
#include "parallel.h"
#include "tensor.h"

namespace dlmkern {
namespace {

bool passes(int rule, double p, double c, double rank) {
  switch (rule) {
    case DLMKERN_RULE_THRESHOLD:
      return rank == 1 || c >= p;
    case DLMKERN_RULE_FACTOR:
      return rank == 1 || (rank + 1) * (1 - c) < p;
    case DLMKERN_RULE_SCHEDULE:
      return rank <= p;
    default:
      return rank == 1 || c >= 1 - p / (rank + 1);
  }
}

// One sequence. `candidates` is scratch for n entries.
void select_sequence(const dlmkern_view& confidence, const dlmkern_view* mask, double p, int rule,
                     const dlmkern_view& selected, int64_t b, Candidate* candidates) {
  Candidate* end = candidates;
  for (int64_t i = 0; i < confidence.shape[1]; ++i) {
    const double c = read_float(confidence, b, i);
    write_bool(selected, false, b, i);
    if (std::isnan(c) || (mask != nullptr && !read_bool(*mask, b, i))) continue;
    *end++ = {c, i};
  }
  if (rule != DLMKERN_RULE_THRESHOLD) {
    std::sort(candidates, end, goes_first);
  } else if (candidates != end) {
    std::swap(*candidates, *std::min_element(candidates, end, goes_first));  // only the first rank matters
  }
  const int64_t m = end - candidates;
  int64_t count = 0;
  for (int64_t r = 0; r < m; ++r) {
    if (!passes(rule, p, candidates[r].priority, static_cast<double>(r + 1))) continue;
    write_bool(selected, true, b, candidates[r].index);
    ++count;
  }
  // The official scan cannot tell that it stopped at the last rank from that everything passed.
  if (rule == DLMKERN_RULE_FACTOR_OFFICIAL && m > 0 && count == m - 1) {
    write_bool(selected, true, b, candidates[m - 1].index);
  }
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_confidence_select(const dlmkern_view* confidence, const dlmkern_view* mask,
                                             const dlmkern_view* parameter, int rule,
                                             const dlmkern_view* selected) {
  DLMKERN_TRY(check_confidence_select(confidence, mask, parameter, rule, selected));
  const int64_t B = confidence->shape[0], n = confidence->shape[1];
  if (n == 0) return DLMKERN_OK;
  return guarded([&] {
    std::vector<Candidate> candidates(static_cast<size_t>(B * n));
    const bool worth = B > 1 && B * n > kParallelWork / 8;
#pragma omp parallel for if (worth)
    for (int64_t b = 0; b < B; ++b) {
      select_sequence(*confidence, mask, read_float(*parameter, b), rule, *selected, b,
                      candidates.data() + b * n);
    }
    return DLMKERN_OK;
  });
}
