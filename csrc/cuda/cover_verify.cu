#include "check_ops.h"
#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 256;

struct Arguments {
  RealTensor confidence;
  Tensor<const int64_t> token, predicted;
  Tensor<const uint8_t> seeds;
  Tensor<const int64_t> remasks;
  double tau_replace;
  int64_t max_remasks;
  Tensor<int64_t> verdict;
  int64_t B, n;

  __device__ dlmkern_verdict judge(int64_t b, int64_t i) const {
    if (!seeds(b, i)) return DLMKERN_VERDICT_NONE;
    if (predicted(b, i) == token(b, i)) return DLMKERN_VERDICT_KEEP;
    if (confidence.read(b, i) >= tau_replace) return DLMKERN_VERDICT_REPLACE;
    return remasks(b, i) < max_remasks ? DLMKERN_VERDICT_REMASK : DLMKERN_VERDICT_KEEP;
  }
};

// A thread for each position.
__global__ void __launch_bounds__(kThreads) cover_verify(Arguments a) {
  const int64_t position = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t b = position / a.n, i = position % a.n;
  if (b < a.B) a.verdict(b, i) = a.judge(b, i);
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cuda_cover_verify(const dlmkern_view* confidence, const dlmkern_view* token,
                                         const dlmkern_view* predicted, const dlmkern_view* seeds,
                                         const dlmkern_view* remasks, double tau_replace, int64_t max_remasks,
                                         const dlmkern_view* verdict, void* stream) {
  DLMKERN_TRY(
      check_cover_verify(confidence, token, predicted, seeds, remasks, tau_replace, max_remasks, verdict));
  const int64_t B = token->shape[0], n = token->shape[1];
  if (B == 0 || n == 0) return DLMKERN_OK;
  const int64_t blocks = divide_up<int64_t>(B * n, kThreads);
  if (!fits_grid(blocks)) return DLMKERN_ERROR_SHAPE;
  const Arguments arguments{real_tensor_of(confidence),
                            tensor_of<const int64_t>(token),
                            tensor_of<const int64_t>(predicted),
                            tensor_of<const uint8_t>(seeds),
                            tensor_of<const int64_t>(remasks),
                            tau_replace,
                            max_remasks,
                            tensor_of<int64_t>(verdict),
                            B,
                            n};
  DLMKERN_LAUNCH(cover_verify, static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream))
  (arguments);
  return launch_result();
}
