#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 128;

struct Arguments {
  RealTensor kl, entropy;
  Tensor<const int64_t> remaining;
  Tensor<const double> lam;
  Tensor<const int64_t> l_min, l_max;
  bool reflect;
  Tensor<int64_t> length;
  int64_t W;
  double* workspace;
};

__device__ bool sorts_before(double a, int64_t i, double b, int64_t j) {
  if (isnan(a) || isnan(b)) return isnan(a) == isnan(b) ? i < j : isnan(b);
  return a < b || (a == b && i < j);
}

// A row's window, smoothed, and the order statistics that normalise it.
struct Window {
  double* values;  // [w]
  double* quartiles;
  int64_t w;

  __device__ void smooth(const RealTensor& x, int64_t b, bool reflect) const {
    const auto at = [&](int64_t k) {
      if (k >= 0 && k < w) return x.read(b, k);
      return reflect ? x.read(b, k < 0 ? 0 : w - 1) : 0.0;
    };
    for (int64_t k = threadIdx.x; k < w; k += kThreads) {
      values[k] = ((at(k - 1) + at(k)) + at(k + 1)) / 3.0;
    }
  }

  // The q-th of `quartiles` is the floor(q (w - 1) / 4)-th smallest value.
  __device__ void rank() const {
    for (int64_t k = threadIdx.x; k < w; k += kThreads) {
      int64_t rank = 0;
      for (int64_t j = 0; j < w; ++j) rank += sorts_before(values[j], j, values[k], k);
      for (int q = 1; q <= 3; ++q) {
        if (rank == q * (w - 1) / 4) quartiles[q] = values[k];
      }
    }
  }

  __device__ double normalised(int64_t k) const {
    const double range = fabs(quartiles[3] - quartiles[1]);
    return (values[k] - quartiles[2]) / (range < 1e-15 ? 1e-15 : range);  // NaN stays
  }
};

// A block for each row.
__global__ void __launch_bounds__(kThreads) depga_block(Arguments a) {
  DLMKERN_DYNAMIC_SHARED(double, shared);
  DLMKERN_SHARED(double[2][4], quartiles);
  DLMKERN_SHARED(unsigned long long, leading);
  const int64_t b = blockIdx.x;
  const int64_t R = a.remaining(b), l_min = a.l_min(b), l_max = a.l_max(b);
  if (R < l_min) {
    if (threadIdx.x == 0) a.length(b) = R;
    return;
  }
  const int64_t w = min(min(a.W, l_max), R);
  double* const memory = a.workspace != nullptr ? a.workspace + b * 2 * a.W : shared;
  const Window influence{memory, quartiles[0], w}, uncertainty{memory + a.W, quartiles[1], w};
  if (threadIdx.x == 0) leading = static_cast<unsigned long long>(w);
  influence.smooth(a.kl, b, a.reflect);
  uncertainty.smooth(a.entropy, b, a.reflect);
  __syncthreads();
  influence.rank();
  uncertainty.rank();
  __syncthreads();
  const double lam = a.lam(b);
  for (int64_t k = threadIdx.x; k < w; k += kThreads) {
    // Not fused into one rounding: the sign of the score must be the one that every backend finds.
    const double score = influence.normalised(k) - __dmul_rn(lam, uncertainty.normalised(k));
    if (!(score >= 0)) {
      atomicMin(&leading, static_cast<unsigned long long>(k));
      break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) a.length(b) = min(min(max(static_cast<int64_t>(leading), l_min), l_max), R);
}

size_t bytes_of_row(int64_t W) { return product(static_cast<size_t>(W), 2 * sizeof(double)); }

bool is_shared(int64_t W) { return bytes_of_row(W) <= kSharedBytes; }

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" size_t dlmkern_cuda_depga_block_workspace(int64_t B, int64_t W) {
  return B <= 0 || W <= 0 || is_shared(W) ? 0 : product(static_cast<size_t>(B), bytes_of_row(W));
}

extern "C" int dlmkern_cuda_depga_block(const dlmkern_view* kl, const dlmkern_view* entropy,
                                        const dlmkern_view* remaining, const dlmkern_view* lam,
                                        const dlmkern_view* l_min, const dlmkern_view* l_max, int reflect,
                                        const dlmkern_view* length, void* workspace, size_t workspace_bytes,
                                        void* stream) {
  DLMKERN_TRY(check_input(kl, kReal, {kAnySize, kAnySize}));
  const int64_t B = kl->shape[0], W = kl->shape[1];
  DLMKERN_TRY(check_input(entropy, kReal, {B, W}));
  DLMKERN_TRY(check_input(remaining, kInt64, {B}));
  DLMKERN_TRY(check_input(lam, kFloat64, {B}));
  DLMKERN_TRY(check_input(l_min, kInt64, {B}));
  DLMKERN_TRY(check_input(l_max, kInt64, {B}));
  if (reflect != 0 && reflect != 1) return DLMKERN_ERROR_VALUE;
  DLMKERN_TRY(check_output(length, kInt64, {B}));
  if (B == 0) return DLMKERN_OK;
  if (!fits_grid(B)) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_workspace(workspace, workspace_bytes, dlmkern_cuda_depga_block_workspace(B, W)));
  const Arguments arguments{real_tensor_of(kl),
                            real_tensor_of(entropy),
                            tensor_of<const int64_t>(remaining),
                            tensor_of<const double>(lam),
                            tensor_of<const int64_t>(l_min),
                            tensor_of<const int64_t>(l_max),
                            reflect == 1,
                            tensor_of<int64_t>(length),
                            W,
                            is_shared(W) ? nullptr : static_cast<double*>(workspace)};
  DLMKERN_LAUNCH(depga_block, static_cast<unsigned>(B), kThreads, is_shared(W) ? bytes_of_row(W) : 0,
                 static_cast<cudaStream_t>(stream))
  (arguments);
  return launch_result();
}
