#include <cmath>

#include "check.h"
#include "parallel.h"
#include "tensor.h"

namespace dlmkern {
namespace {

// log q(v): the previous snapshot's log-probability of v, or its floor.
double previous_logp(const dlmkern_view& ids, const dlmkern_view& logp, const dlmkern_view& floor, int64_t b,
                     int64_t i, int64_t v) {
  for (int64_t r = 0; r < ids.shape[2]; ++r) {
    if (read_int64(ids, b, i, r) == v) return read_float(logp, b, i, r);
  }
  return read_float(floor, b, i);
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_topk_kl(const dlmkern_view* ids, const dlmkern_view* logp,
                                   const dlmkern_view* prev_ids, const dlmkern_view* prev_logp,
                                   const dlmkern_view* prev_floor, const dlmkern_view* kl) {
  DLMKERN_TRY(check_input(ids, kInt64, {kAnySize, kAnySize, kAnySize}));
  const int64_t B = ids->shape[0], n = ids->shape[1], k = ids->shape[2];
  DLMKERN_TRY(check_input(logp, kFloat64, {B, n, k}));
  DLMKERN_TRY(check_input(prev_ids, kInt64, {B, n, kAnySize}));
  DLMKERN_TRY(check_input(prev_logp, kFloat64, {B, n, prev_ids->shape[2]}));
  DLMKERN_TRY(check_input(prev_floor, kFloat64, {B, n}));
  DLMKERN_TRY(check_output(kl, kFloat64, {B, n}));
  const bool worth = B * n * k * prev_ids->shape[2] > kParallelWork;
#pragma omp parallel for collapse(2) if (worth)
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int64_t r = 0; r < k; ++r) {
        const double lp = read_float(*logp, b, i, r);
        const double p = std::exp(lp);
        if (p == 0) continue;
        sum += p * (lp - previous_logp(*prev_ids, *prev_logp, *prev_floor, b, i, read_int64(*ids, b, i, r)));
      }
      write_float(*kl, sum, b, i);
    }
  }
  return DLMKERN_OK;
}
