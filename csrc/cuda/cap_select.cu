#include "greedy.h"

namespace dlmkern {
namespace {

template <class T>
struct Arguments {
  Tensor<const T> input;  // logits if there is a logsumexp, else probabilities
  Tensor<const int64_t> token;
  RealTensor logsumexp;
  Tensor<const uint8_t> mask;
  Tensor<const double> tau_low, tau_high, gamma;
  bool strict;
  Tensor<uint8_t> selected;
  RealTensor confidence;
  int n;
  int64_t V;
  void* workspace;

  __device__ double log_probability(int64_t b, int i, int64_t v) const {
    const double x = widen(input(b, i, v));
    return logsumexp ? x - logsumexp.read(b, i) : log(x);
  }

  // p_i(token_i), NaN without such a token.
  __device__ double confidence_of(int64_t b, int i) const {
    const int64_t v = token(b, i);
    if (v < 0 || v >= V) return NAN;
    const double x = widen(input(b, i, v));
    return logsumexp ? exp(x - logsumexp.read(b, i)) : x;
  }
};

struct Best {
  double confidence;
  int position;

  __device__ void take(Best other) {
    if (other.position < 0) return;
    const bool better = position < 0 || other.confidence > confidence ||
                        (other.confidence == confidence && other.position < position);
    if (better) *this = other;
  }
};

// The best of the block's threads, for thread 0.
__device__ Best best_of_block(Best best) {
  DLMKERN_SHARED(Best[kGreedyThreads / kWarp], of_warp);
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const double confidence = __shfl_down_sync(kAllLanes, best.confidence, offset);
    const int position = __shfl_down_sync(kAllLanes, best.position, offset);
    best.take({confidence, position});
  }
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kGreedyThreads / kWarp; ++warp) best.take(of_warp[warp]);
  }
  return best;
}

// A block for each sequence.
template <class T>
__global__ void __launch_bounds__(kGreedyThreads) cap_select(Arguments<T> a) {
  DLMKERN_DYNAMIC_SHARED(unsigned char, shared);
  const Greedy greedy = greedy_of_block(a.n, a.workspace, shared);
  const int64_t b = blockIdx.x;
  const double tau_low = a.tau_low(b), tau_high = a.tau_high(b), gamma = a.gamma(b);

  Best best{-INFINITY, -1};
  greedy.start([&](int i) {
    const double c = a.confidence_of(b, i);
    a.confidence.write(c, b, i);
    const bool open = !isnan(c) && (!a.mask || a.mask(b, i));
    if (open) best.take({c, i});
    const bool candidate = open && c >= tau_low;
    const bool unchecked = candidate && c >= tau_high && !a.strict;
    greedy.priority[i] = candidate && !unchecked ? c : NAN;
    return unchecked;
  });
  greedy.run([&](int i, int j) {
    return a.log_probability(b, i, a.token(b, j)) + a.log_probability(b, j, a.token(b, i)) > gamma;
  });
  best = best_of_block(best);
  for (int i = threadIdx.x; i < a.n; i += kGreedyThreads) a.selected(b, i) = greedy.is_in(i);
  __syncthreads();
  if (threadIdx.x == 0 && best.position >= 0) a.selected(b, best.position) = 1;
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" size_t dlmkern_cuda_cap_select_workspace(int64_t B, int64_t n, int64_t) {
  return Greedy::workspace_bytes(B, n);
}

extern "C" int dlmkern_cuda_cap_select(const dlmkern_view* input, const dlmkern_view* token,
                                       const dlmkern_view* logsumexp, const dlmkern_view* mask,
                                       const dlmkern_view* tau_low, const dlmkern_view* tau_high,
                                       const dlmkern_view* gamma, int strict, const dlmkern_view* selected,
                                       const dlmkern_view* confidence, void* workspace,
                                       size_t workspace_bytes, void* stream) {
  DLMKERN_TRY(check_rows(input));
  const int64_t B = input->shape[0], n = input->shape[1], V = input->shape[2];
  DLMKERN_TRY(check_input(token, kInt64, {B, n}));
  DLMKERN_TRY(check_optional_input(logsumexp, kReal, {B, n}));
  DLMKERN_TRY(check_optional_input(mask, kBool, {B, n}));
  DLMKERN_TRY(check_input(tau_low, kFloat64, {B}));
  DLMKERN_TRY(check_input(tau_high, kFloat64, {B}));
  DLMKERN_TRY(check_input(gamma, kFloat64, {B}));
  if (strict != 0 && strict != 1) return DLMKERN_ERROR_VALUE;
  DLMKERN_TRY(check_output(selected, kBool, {B, n}));
  DLMKERN_TRY(check_optional_output(confidence, kReal, {B, n}));
  if (B == 0 || n == 0) return DLMKERN_OK;
  if (!fits_grid(B) || !fits_grid(n)) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_workspace(workspace, workspace_bytes, Greedy::workspace_bytes(B, n)));
  return with_float_type(input->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Arguments<T> arguments{tensor_of<const T>(input),
                                 tensor_of<const int64_t>(token),
                                 real_tensor_of(logsumexp),
                                 tensor_of<const uint8_t>(mask),
                                 tensor_of<const double>(tau_low),
                                 tensor_of<const double>(tau_high),
                                 tensor_of<const double>(gamma),
                                 strict == 1,
                                 tensor_of<uint8_t>(selected),
                                 real_tensor_of(confidence),
                                 static_cast<int>(n),
                                 V,
                                 workspace};
    DLMKERN_LAUNCH(cap_select<T>, static_cast<unsigned>(B), kGreedyThreads, greedy_shared_bytes(n),
                   static_cast<cudaStream_t>(stream))
    (arguments);
    return launch_result();
  });
}
