// A block for each row ranks its positions by counting who goes before, a thread a position, n^2 comparisons
// of confidences that lie in shared memory a tile at a time. That is more work than sorting, but one pass
// with few barriers: for the tens to hundreds of positions of a block being decoded it is the launch that
// counts.
#include "check_ops.h"
#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 512;

struct Arguments {
  RealTensor confidence;
  Tensor<const uint8_t> mask;
  Tensor<const double> parameter;
  int rule;
  Tensor<uint8_t> selected;
  int n;

  // NaN for what is no candidate.
  __device__ double read(int64_t b, int i) const {
    return i < n && (!mask || mask(b, i)) ? confidence.read(b, i) : NAN;
  }
};

__device__ bool passes(int rule, int rank, double c, double parameter) {
  switch (rule) {
    case DLMKERN_RULE_THRESHOLD:
      return rank == 1 || c >= parameter;
    case DLMKERN_RULE_FACTOR:
      return rank == 1 || (rank + 1.0) * (1 - c) < parameter;
    case DLMKERN_RULE_SCHEDULE:
      return rank <= parameter;
    default:
      return rank == 1 || c >= 1 - parameter / (rank + 1.0);
  }
}

__global__ void __launch_bounds__(kThreads) confidence_select(Arguments a) {
  DLMKERN_SHARED(double[kThreads], tile);
  const int64_t b = blockIdx.x;
  const double parameter = a.parameter(b);
  int candidates = 0, passing = 0;
  int last_rank = 0, last = 0;  // among the thread's own positions
  for (int first = 0; first < a.n; first += blockDim.x) {
    const int i = first + static_cast<int>(threadIdx.x);
    const double c = a.read(b, i);
    int rank = 1;
    for (int start = 0; start < a.n; start += blockDim.x) {
      tile[threadIdx.x] = a.read(b, start + static_cast<int>(threadIdx.x));
      __syncthreads();
      const int size = min(a.n - start, static_cast<int>(blockDim.x));
      for (int j = 0; j < size; ++j) rank += tile[j] > c || (tile[j] == c && start + j < i);
      __syncthreads();
    }
    const bool candidate = !isnan(c);
    const bool pass = candidate && passes(a.rule, rank, c, parameter);
    if (i < a.n) a.selected(b, i) = pass;
    if (candidate && rank > last_rank) {
      last_rank = rank;
      last = i;
    }
    candidates += __syncthreads_count(candidate);
    passing += __syncthreads_count(pass);
  }
  // The official scan cannot tell that it stopped at the last rank from that everything passed.
  const bool all = a.rule == DLMKERN_RULE_FACTOR_OFFICIAL && passing == candidates - 1;
  if (all && last_rank == candidates) a.selected(b, last) = 1;
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cuda_confidence_select(const dlmkern_view* confidence, const dlmkern_view* mask,
                                              const dlmkern_view* parameter, int rule,
                                              const dlmkern_view* selected, void* stream) {
  DLMKERN_TRY(check_confidence_select(confidence, mask, parameter, rule, selected));
  const int64_t B = confidence->shape[0], n = confidence->shape[1];
  if (B == 0 || n == 0) return DLMKERN_OK;
  if (!fits_grid(B) || !fits_grid(n + kThreads)) return DLMKERN_ERROR_SHAPE;
  const Arguments arguments{real_tensor_of(confidence),         tensor_of<const uint8_t>(mask),
                            tensor_of<const double>(parameter), rule,
                            tensor_of<uint8_t>(selected),       static_cast<int>(n)};
  const auto threads = static_cast<unsigned>(min(divide_up<int64_t>(n, kWarp) * kWarp, int64_t{kThreads}));
  DLMKERN_LAUNCH(confidence_select, static_cast<unsigned>(B), threads, 0, static_cast<cudaStream_t>(stream))
  (arguments);
  return launch_result();
}
