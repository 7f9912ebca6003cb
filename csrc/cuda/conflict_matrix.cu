#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Arguments {
  Tensor<const T> logits;
  Tensor<const int64_t> token;
  RealTensor logsumexp;
  Tensor<float> conflict;
  int64_t B, n, V;

  // log p_i(token_j), NaN without such a token.
  __device__ double log_probability(int64_t b, int64_t i, int64_t j) const {
    const int64_t v = token(b, j);
    if (v < 0 || v >= V) return NAN;
    return static_cast<double>(widen(logits(b, i, v))) - logsumexp.read(b, i);
  }
};

// A thread for each pair; the sum of two float64 numbers does not depend on their order, so half of them will
// do.
template <class T>
__global__ void __launch_bounds__(kThreads) conflict_matrix(Arguments<T> a) {
  const int64_t pair = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t j = pair % a.n, i = pair / a.n % a.n, b = pair / a.n / a.n;
  if (b >= a.B || j < i) return;
  const auto d = static_cast<float>(a.log_probability(b, i, j) + a.log_probability(b, j, i));
  a.conflict(b, i, j) = d;
  a.conflict(b, j, i) = d;
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" size_t dlmkern_cuda_conflict_matrix_workspace(int64_t, int64_t, int64_t) { return 0; }

extern "C" int dlmkern_cuda_conflict_matrix(const dlmkern_view* logits, const dlmkern_view* token,
                                            const dlmkern_view* logsumexp, const dlmkern_view* conflict,
                                            void*, size_t, void* stream) {
  DLMKERN_TRY(check_rows(logits));
  const int64_t B = logits->shape[0], n = logits->shape[1], V = logits->shape[2];
  DLMKERN_TRY(check_input(token, kInt64, {B, n}));
  DLMKERN_TRY(check_input(logsumexp, kReal, {B, n}));
  DLMKERN_TRY(check_output(conflict, kFloat32, {B, n, n}));
  if (B == 0 || n == 0) return DLMKERN_OK;
  const int64_t blocks = divide_up<int64_t>(B * n * n, kThreads);
  if (!fits_grid(blocks)) return DLMKERN_ERROR_SHAPE;
  return with_float_type(logits->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Arguments<T> arguments{tensor_of<const T>(logits),
                                 tensor_of<const int64_t>(token),
                                 real_tensor_of(logsumexp),
                                 tensor_of<float>(conflict),
                                 B,
                                 n,
                                 V};
    DLMKERN_LAUNCH(conflict_matrix<T>, static_cast<unsigned>(blocks), kThreads, 0,
                   static_cast<cudaStream_t>(stream))
    (arguments);
    return launch_result();
  });
}
