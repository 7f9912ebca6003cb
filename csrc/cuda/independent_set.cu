#include "greedy.h"

namespace dlmkern {
namespace {

struct Arguments {
  Tensor<const uint8_t> conflict;
  RealTensor priority;
  Tensor<const uint8_t> eligible, preselected;
  Tensor<uint8_t> selected;
  int n;
  void* workspace;
};

// A block for each sequence.
__global__ void __launch_bounds__(kGreedyThreads) independent_set(Arguments a) {
  DLMKERN_DYNAMIC_SHARED(unsigned char, shared);
  const Greedy greedy = greedy_of_block(a.n, a.workspace, shared);
  const int64_t b = blockIdx.x;
  greedy.start([&](int i) {
    const bool preselected = a.preselected && a.preselected(b, i);
    const bool candidate = !preselected && (!a.eligible || a.eligible(b, i));
    greedy.priority[i] = candidate ? a.priority.read(b, i) : NAN;
    return preselected;
  });
  greedy.run([&](int i, int j) { return a.conflict(b, i, j) != 0; });
  for (int i = threadIdx.x; i < a.n; i += kGreedyThreads) a.selected(b, i) = greedy.is_in(i);
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" size_t dlmkern_cuda_independent_set_workspace(int64_t B, int64_t n, int64_t) {
  return Greedy::workspace_bytes(B, n);
}

extern "C" int dlmkern_cuda_independent_set(const dlmkern_view* conflict, const dlmkern_view* priority,
                                            const dlmkern_view* eligible, const dlmkern_view* preselected,
                                            const dlmkern_view* selected, void* workspace,
                                            size_t workspace_bytes, void* stream) {
  DLMKERN_TRY(check_input(conflict, kBool, {kAnySize, kAnySize, kAnySize}));
  const int64_t B = conflict->shape[0], n = conflict->shape[1];
  if (conflict->shape[2] != n) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_input(priority, kReal, {B, n}));
  DLMKERN_TRY(check_optional_input(eligible, kBool, {B, n}));
  DLMKERN_TRY(check_optional_input(preselected, kBool, {B, n}));
  DLMKERN_TRY(check_output(selected, kBool, {B, n}));
  if (B == 0 || n == 0) return DLMKERN_OK;
  if (!fits_grid(B) || !fits_grid(n)) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_workspace(workspace, workspace_bytes, Greedy::workspace_bytes(B, n)));
  const Arguments arguments{tensor_of<const uint8_t>(conflict),
                            real_tensor_of(priority),
                            tensor_of<const uint8_t>(eligible),
                            tensor_of<const uint8_t>(preselected),
                            tensor_of<uint8_t>(selected),
                            static_cast<int>(n),
                            workspace};
  DLMKERN_LAUNCH(independent_set, static_cast<unsigned>(B), kGreedyThreads, greedy_shared_bytes(n),
                 static_cast<cudaStream_t>(stream))
  (arguments);
  return launch_result();
}
