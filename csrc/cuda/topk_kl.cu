#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 128;

struct Arguments {
  Tensor<const int64_t> ids;
  Tensor<const double> logp;
  Tensor<const int64_t> prev_ids;
  Tensor<const double> prev_logp, prev_floor;
  Tensor<double> kl;
  int64_t rows, n, k, prev_k;

  // log q(v): the previous snapshot's log-probability of v, or its floor.
  __device__ double previous_logp(int64_t b, int64_t i, int64_t v) const {
    for (int64_t r = 0; r < prev_k; ++r) {
      if (prev_ids(b, i, r) == v) return prev_logp(b, i, r);
    }
    return prev_floor(b, i);
  }
};

// A warp for each position. Eight blocks on a multiprocessor leave enough registers.
__global__ void __launch_bounds__(kThreads, 8) topk_kl(Arguments a) {
  const int64_t row = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / kWarp;
  if (row >= a.rows) return;  // the whole warp
  const int64_t b = row / a.n, i = row % a.n;
  double sum = 0;
  for (int64_t r = threadIdx.x % kWarp; r < a.k; r += kWarp) {
    const double log_probability = a.logp(b, i, r), p = exp(log_probability);
    if (p != 0) sum += p * (log_probability - a.previous_logp(b, i, a.ids(b, i, r)));
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  if (threadIdx.x % kWarp == 0) a.kl(b, i) = sum;
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cuda_topk_kl(const dlmkern_view* ids, const dlmkern_view* logp,
                                    const dlmkern_view* prev_ids, const dlmkern_view* prev_logp,
                                    const dlmkern_view* prev_floor, const dlmkern_view* kl, void* stream) {
  DLMKERN_TRY(check_input(ids, kInt64, {kAnySize, kAnySize, kAnySize}));
  const int64_t B = ids->shape[0], n = ids->shape[1], k = ids->shape[2];
  DLMKERN_TRY(check_input(logp, kFloat64, {B, n, k}));
  DLMKERN_TRY(check_input(prev_ids, kInt64, {B, n, kAnySize}));
  DLMKERN_TRY(check_input(prev_logp, kFloat64, {B, n, prev_ids->shape[2]}));
  DLMKERN_TRY(check_input(prev_floor, kFloat64, {B, n}));
  DLMKERN_TRY(check_output(kl, kFloat64, {B, n}));
  if (B == 0 || n == 0) return DLMKERN_OK;
  const int64_t blocks = divide_up<int64_t>(B * n * kWarp, kThreads);
  if (!fits_grid(blocks)) return DLMKERN_ERROR_SHAPE;
  const Arguments arguments{tensor_of<const int64_t>(ids),
                            tensor_of<const double>(logp),
                            tensor_of<const int64_t>(prev_ids),
                            tensor_of<const double>(prev_logp),
                            tensor_of<const double>(prev_floor),
                            tensor_of<double>(kl),
                            B * n,
                            n,
                            k,
                            prev_ids->shape[2]};
  DLMKERN_LAUNCH(topk_kl, static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream))
  (arguments);
  return launch_result();
}
