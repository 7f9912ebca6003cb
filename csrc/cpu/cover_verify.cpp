#include "check_ops.h"
#include "parallel.h"
#include "tensor.h"

using namespace dlmkern;

extern "C" int dlmkern_cpu_cover_verify(const dlmkern_view* confidence, const dlmkern_view* token,
                                        const dlmkern_view* predicted, const dlmkern_view* seeds,
                                        const dlmkern_view* remasks, double tau_replace, int64_t max_remasks,
                                        const dlmkern_view* verdict) {
  DLMKERN_TRY(
      check_cover_verify(confidence, token, predicted, seeds, remasks, tau_replace, max_remasks, verdict));
  const int64_t B = token->shape[0], n = token->shape[1];
  const auto judge = [&](int64_t b, int64_t i) {
    if (!read_bool(*seeds, b, i)) return DLMKERN_VERDICT_NONE;
    if (read_int64(*predicted, b, i) == read_int64(*token, b, i)) return DLMKERN_VERDICT_KEEP;
    if (read_float(*confidence, b, i) >= tau_replace) return DLMKERN_VERDICT_REPLACE;
    return read_int64(*remasks, b, i) < max_remasks ? DLMKERN_VERDICT_REMASK : DLMKERN_VERDICT_KEEP;
  };
  const bool worth = B > 1 && B * n > kParallelWork;
#pragma omp parallel for if (worth)
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < n; ++i) write_int64(*verdict, judge(b, i), b, i);
  }
  return DLMKERN_OK;
}
