// The CUDA half of the C API in a build without CUDA.
#include "dlmkern.h"

#define UNAVAILABLE(name, ...) \
  extern "C" int name(__VA_ARGS__) { return DLMKERN_ERROR_UNAVAILABLE; }
#define NO_WORKSPACE(name, ...) \
  extern "C" size_t name(__VA_ARGS__) { return 0; }

#define VIEW const dlmkern_view*

extern "C" int dlmkern_has_cuda(void) { return 0; }

NO_WORKSPACE(dlmkern_cuda_token_stats_workspace, int64_t, int64_t, int64_t)
UNAVAILABLE(dlmkern_cuda_token_stats, VIEW, VIEW, VIEW, int64_t, VIEW, VIEW, VIEW, VIEW, VIEW, void*, size_t,
            void*)

NO_WORKSPACE(dlmkern_cuda_conflict_matrix_workspace, int64_t, int64_t, int64_t)
UNAVAILABLE(dlmkern_cuda_conflict_matrix, VIEW, VIEW, VIEW, VIEW, void*, size_t, void*)

NO_WORKSPACE(dlmkern_cuda_independent_set_workspace, int64_t, int64_t, int64_t)
UNAVAILABLE(dlmkern_cuda_independent_set, VIEW, VIEW, VIEW, VIEW, VIEW, void*, size_t, void*)

NO_WORKSPACE(dlmkern_cuda_cap_select_workspace, int64_t, int64_t, int64_t)
UNAVAILABLE(dlmkern_cuda_cap_select, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, int, VIEW, VIEW, void*, size_t,
            void*)

NO_WORKSPACE(dlmkern_cuda_topk_snapshot_workspace, int64_t, int64_t, int64_t)
UNAVAILABLE(dlmkern_cuda_topk_snapshot, VIEW, int64_t, VIEW, VIEW, VIEW, void*, size_t, void*)
UNAVAILABLE(dlmkern_cuda_topk_kl, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, void*)

UNAVAILABLE(dlmkern_cuda_confidence_select, VIEW, VIEW, VIEW, int, VIEW, void*)
UNAVAILABLE(dlmkern_cuda_kv_block_write, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, void*)
UNAVAILABLE(dlmkern_cuda_cover_seeds, VIEW, VIEW, VIEW, VIEW, VIEW, int, int, VIEW, VIEW, void*)
UNAVAILABLE(dlmkern_cuda_cover_verify, VIEW, VIEW, VIEW, VIEW, VIEW, double, int64_t, VIEW, void*)
UNAVAILABLE(dlmkern_cuda_diagonal_correction, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, int,
            double, double, void*)

NO_WORKSPACE(dlmkern_cuda_dapd_select_workspace, int64_t, int64_t)
UNAVAILABLE(dlmkern_cuda_dapd_select, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, int, VIEW, void*, size_t, void*)

NO_WORKSPACE(dlmkern_cuda_depga_block_workspace, int64_t, int64_t)
UNAVAILABLE(dlmkern_cuda_depga_block, VIEW, VIEW, VIEW, VIEW, VIEW, VIEW, int, VIEW, void*, size_t, void*)
