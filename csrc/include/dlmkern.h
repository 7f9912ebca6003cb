/* SPDX-License-Identifier: Apache-2.0
 *
 * dlmkern: kernels for decoding masked diffusion language models. The C API.
 *
 * Conventions
 * -----------
 * - Every tensor is a dlmkern_view: a pointer, a dtype, sizes and strides in elements. Nothing has to be
 *   contiguous; strides may be zero (a broadcast view) but outputs must not overlap themselves or any input.
 * - Shapes are written [B, n, V]: B sequences, n positions of each, V logits a position. B, n and V may be 0
 *   or 1, except that V >= 1.
 * - "float" stands for float64, float32, bfloat16 or float16 unless a function says otherwise. Statistics are
 *   written as float32 or float64, whichever dtype the output view has. Booleans are one byte, 0 or 1.
 * - Functions return DLMKERN_OK or a negative error code and then have written nothing. A CUDA failure is
 *   returned as DLMKERN_ERROR_CUDA - (int)cudaError. No function aborts, throws or keeps a pointer.
 * - dlmkern_cpu_* run on the calling thread and OpenMP's threads, and return when they are done.
 *   dlmkern_cuda_* take device pointers, enqueue on `stream` (a cudaStream_t; NULL is the default stream) of
 *   the current device and return at once; they neither allocate nor synchronise, so they may be captured in
 *   a CUDA graph. Scratch memory comes from the caller: `workspace` must hold at least
 *   dlmkern_cuda_<op>_workspace(B, n, V) bytes, aligned to 256, and may be reused once the call has run on
 *   the stream. A size of 0 means that NULL will do.
 *
 * Distributions
 * -------------
 * A row of V logits x defines p_v = exp(x_v) / sum_u exp(x_u). -inf is a banned token: p_v = 0.
 * Where a logsumexp is handed in, log p_v is x_v - logsumexp in float64: logits beyond 1e10 lose its digits.
 * A row that holds a NaN or +inf, or nothing but -inf, defines no distribution: its token is -1 and its
 * statistics are NaN.
 */
#ifndef DLMKERN_H
#define DLMKERN_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define DLMKERN_API __declspec(dllexport)
#else
#define DLMKERN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dlmkern_dtype {
  DLMKERN_FLOAT64 = 0,
  DLMKERN_FLOAT32 = 1,
  DLMKERN_BFLOAT16 = 2,
  DLMKERN_FLOAT16 = 3,
  DLMKERN_INT64 = 4,
  DLMKERN_BOOL = 5
} dlmkern_dtype;

typedef struct dlmkern_view {
  void* data;
  int32_t dtype; /* a dlmkern_dtype */
  int32_t ndim;  /* 1 to 4 */
  int64_t shape[4];
  int64_t stride[4]; /* in elements, not negative */
} dlmkern_view;

enum {
  DLMKERN_OK = 0,
  DLMKERN_ERROR_NULL = -1,        /* a required pointer is NULL */
  DLMKERN_ERROR_SHAPE = -2,       /* sizes that do not fit together, a negative size or stride, V == 0 */
  DLMKERN_ERROR_DTYPE = -3,       /* a dtype that the function does not take */
  DLMKERN_ERROR_VALUE = -4,       /* a scalar out of its range */
  DLMKERN_ERROR_WORKSPACE = -5,   /* workspace missing, too small or not aligned to 256 bytes */
  DLMKERN_ERROR_UNAVAILABLE = -6, /* this build or this machine has no such backend */
  DLMKERN_ERROR_MEMORY = -7,      /* the host could not allocate scratch memory */
  DLMKERN_ERROR_CUDA = -1000      /* DLMKERN_ERROR_CUDA - cudaError */
};

DLMKERN_API const char* dlmkern_version(void);
DLMKERN_API const char* dlmkern_error_string(int code); /* one English sentence; never NULL */

/* The instruction set that the CPU kernels use: "avx512", "avx2" or "portable". The best one that the machine
 * has is taken at the first call, unless the environment variable DLMKERN_CPU_ISA names another. */
DLMKERN_API const char* dlmkern_cpu_isa(void);
/* Switches to another instruction set; DLMKERN_ERROR_VALUE if the name is unknown, DLMKERN_ERROR_UNAVAILABLE
 * if this machine or build lacks it. */
DLMKERN_API int dlmkern_cpu_set_isa(const char* name);

/* 1 if the CUDA functions are compiled in, else 0: then they return DLMKERN_ERROR_UNAVAILABLE. */
DLMKERN_API int dlmkern_has_cuda(void);

/* -----------------------------------------------------------------------------------------------------------
 * token_stats: one read of the logits gives, for each position, its best token and what is known about it.
 *
 *   logits       [B, n, V] float
 *   prev_logits  [B, m, V] same dtype, or NULL: the logits of an earlier step
 *   prev_rows    [B, n] int64, or NULL (then m == n and row i goes with row i): which row of prev_logits
 *                belongs to each position; a value outside [0, m) means none, and its kl is NaN
 *   banned_token a token left out of both distributions, as if its logit were -inf; -1 for none
 *
 * Outputs, each [B, n]; any may be NULL, and need not be computed then:
 *   token        int64    argmax; the lowest index wins a tie
 *   confidence   float32|float64  p_token
 *   logsumexp    float32|float64  log sum_v exp(x_v), in nats
 *   entropy      float32|float64  -sum_v p_v log p_v, in nats
 *   kl           float32|float64  KL(p || p_prev) in nats: p_v == 0 adds 0; p_prev_v == 0 < p_v gives +inf
 *                                 (zero means a logit of -inf, not an underflow); NaN without prev_logits
 * float64 outputs resolve confidences near one that float32 would round together.
 */
DLMKERN_API int dlmkern_cpu_token_stats(const dlmkern_view* logits, const dlmkern_view* prev_logits,
                                        const dlmkern_view* prev_rows, int64_t banned_token,
                                        const dlmkern_view* token, const dlmkern_view* confidence,
                                        const dlmkern_view* logsumexp, const dlmkern_view* entropy,
                                        const dlmkern_view* kl);
DLMKERN_API size_t dlmkern_cuda_token_stats_workspace(int64_t B, int64_t n, int64_t V);
DLMKERN_API int dlmkern_cuda_token_stats(const dlmkern_view* logits, const dlmkern_view* prev_logits,
                                         const dlmkern_view* prev_rows, int64_t banned_token,
                                         const dlmkern_view* token, const dlmkern_view* confidence,
                                         const dlmkern_view* logsumexp, const dlmkern_view* entropy,
                                         const dlmkern_view* kl, void* workspace, size_t workspace_bytes,
                                         void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * conflict_matrix: how likely positions i and j predict each other's token (DepCap, equation of D_ij).
 *
 *   logits     [B, n, V] float
 *   token      [B, n] int64; a value outside [0, V) makes its row and column NaN
 *   logsumexp  [B, n] float32|float64, of the same rows
 *   conflict   [B, n, n] float32, out: D_ij = log p_i(token_j) + log p_j(token_i), added in float64,
 *              symmetric to the bit; the diagonal is 2 log p_i(token_i)
 */
DLMKERN_API int dlmkern_cpu_conflict_matrix(const dlmkern_view* logits, const dlmkern_view* token,
                                            const dlmkern_view* logsumexp, const dlmkern_view* conflict);
DLMKERN_API size_t dlmkern_cuda_conflict_matrix_workspace(int64_t B, int64_t n, int64_t V);
DLMKERN_API int dlmkern_cuda_conflict_matrix(const dlmkern_view* logits, const dlmkern_view* token,
                                             const dlmkern_view* logsumexp, const dlmkern_view* conflict,
                                             void* workspace, size_t workspace_bytes, void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * independent_set: greedy maximal independent set in order of priority.
 *
 *   conflict     [B, n, n] bool: conflict[i, j] says that i must not join while j is in. The candidate's row
 *                is what is tested, so an asymmetric matrix is a directed graph. The diagonal is ignored.
 *   priority     [B, n] float32|float64: higher first, ties to the lower index; NaN is never a candidate,
 *                -inf may be
 *   eligible     [B, n] bool, or NULL for all
 *   preselected  [B, n] bool, or NULL for none: in from the start, eligible or not, not tested against each
 *                other
 *   selected     [B, n] bool, out: preselected and every candidate that had no conflict with what was in
 *                before it
 */
DLMKERN_API int dlmkern_cpu_independent_set(const dlmkern_view* conflict, const dlmkern_view* priority,
                                            const dlmkern_view* eligible, const dlmkern_view* preselected,
                                            const dlmkern_view* selected);
DLMKERN_API size_t dlmkern_cuda_independent_set_workspace(int64_t B, int64_t n, int64_t V);
DLMKERN_API int dlmkern_cuda_independent_set(const dlmkern_view* conflict, const dlmkern_view* priority,
                                             const dlmkern_view* eligible, const dlmkern_view* preselected,
                                             const dlmkern_view* selected, void* workspace,
                                             size_t workspace_bytes, void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * cap_select: one commit step of CAP-Decoding (DepCap). Conflicts are gathered from the input as the greedy
 * scan needs them; no matrix is stored.
 *
 *   input      [B, n, V] float: logits if logsumexp is given, probabilities if it is NULL
 *   token      [B, n] int64: the token that each position would commit; outside [0, V) means never selected
 *   logsumexp  [B, n] float32|float64 of the logits, or NULL
 *   mask       [B, n] bool, or NULL for all: positions that may be committed
 *   tau_low, tau_high, gamma   [B] float64 each
 *   strict     0: the positions at or above tau_high are committed together, unchecked (the published
 *              algorithm); 1: they are scanned first but must be free of conflicts among themselves too
 *   selected   [B, n] bool, out
 *   confidence [B, n] float32|float64, out, may be NULL: p_i(token_i), at every position
 *
 * With c_i = p_i(token_i) and D as in conflict_matrix, all in float64: the candidates are the masked i with
 * c_i >= tau_low; those with c_i >= tau_high go in; then the others by falling c_i (ties to the lower index)
 * unless D_ij > gamma for some j that is in; last, the masked position of highest c_i (lowest index at a tie)
 * goes in whatever its confidence, so that a row with anything left to commit always commits something.
 * Positions of NaN confidence are never selected.
 */
DLMKERN_API int dlmkern_cpu_cap_select(const dlmkern_view* input, const dlmkern_view* token,
                                       const dlmkern_view* logsumexp, const dlmkern_view* mask,
                                       const dlmkern_view* tau_low, const dlmkern_view* tau_high,
                                       const dlmkern_view* gamma, int strict, const dlmkern_view* selected,
                                       const dlmkern_view* confidence);
DLMKERN_API size_t dlmkern_cuda_cap_select_workspace(int64_t B, int64_t n, int64_t V);
DLMKERN_API int dlmkern_cuda_cap_select(const dlmkern_view* input, const dlmkern_view* token,
                                        const dlmkern_view* logsumexp, const dlmkern_view* mask,
                                        const dlmkern_view* tau_low, const dlmkern_view* tau_high,
                                        const dlmkern_view* gamma, int strict, const dlmkern_view* selected,
                                        const dlmkern_view* confidence, void* workspace,
                                        size_t workspace_bytes, void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * topk_snapshot, topk_kl: DepCap's official truncated KL. A snapshot keeps the k likeliest tokens of each
 * position and spreads the rest of the mass evenly over the other tokens.
 *
 *   logits       [B, n, V] float
 *   banned_token as in token_stats; with one, V below is the number of the other tokens
 *   ids          [B, n, k] int64, out: by falling logit, ties to the lower id; 1 <= k <= V
 *   logp         [B, n, k] float64, out: their log-probabilities (full-vocabulary logsumexp)
 *   floor        [B, n] float64, out: log(max(1 - sum_k p, 1e-12) / max(V - k, 1)), the tail summed in
 *                float64
 * A row without a distribution has ids -1 and NaN elsewhere.
 *
 *   topk_kl:     kl [B, n] float64, out: sum over the current ids v of p(v) (log p(v) - log q(v)), where log
 *                q(v) is the previous snapshot's log-probability of v, or its floor if v is not among its
 *                ids. p(v) == 0 adds 0. It has no term for the tail, so it can be slightly negative.
 */
DLMKERN_API int dlmkern_cpu_topk_snapshot(const dlmkern_view* logits, int64_t banned_token,
                                          const dlmkern_view* ids, const dlmkern_view* logp,
                                          const dlmkern_view* floor);
DLMKERN_API size_t dlmkern_cuda_topk_snapshot_workspace(int64_t B, int64_t n, int64_t V);
DLMKERN_API int dlmkern_cuda_topk_snapshot(const dlmkern_view* logits, int64_t banned_token,
                                           const dlmkern_view* ids, const dlmkern_view* logp,
                                           const dlmkern_view* floor, void* workspace, size_t workspace_bytes,
                                           void* stream);
DLMKERN_API int dlmkern_cpu_topk_kl(const dlmkern_view* ids, const dlmkern_view* logp,
                                    const dlmkern_view* prev_ids, const dlmkern_view* prev_logp,
                                    const dlmkern_view* prev_floor, const dlmkern_view* kl);
DLMKERN_API int dlmkern_cuda_topk_kl(const dlmkern_view* ids, const dlmkern_view* logp,
                                     const dlmkern_view* prev_ids, const dlmkern_view* prev_logp,
                                     const dlmkern_view* prev_floor, const dlmkern_view* kl, void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * depga_block: the length of the next block (DepCap, DepGA-Block).
 *
 *   kl, entropy  [B, W] float32|float64: influence of the last block and entropy, from the block's first
 *                position on
 *   remaining    [B] int64: positions of the sequence from there on, R >= 0
 *   lam          [B] float64, weight of the entropy
 *   l_min, l_max [B] int64, 1 <= l_min <= l_max
 *   reflect      0: zero padding of the smoothing window (official); 1: the edge positions are repeated
 *   length       [B] int64, out
 *
 * In float64, over the row's window w = min(W, l_max, R); what lies beyond it is not read:
 *   smoothing    x'_k = ((x_{k-1} + x_k) + x_{k+1}) / 3
 *   x~           = (x' - median) / max(|q3 - q1|, 1e-15); median is the floor((w - 1) / 2)-th smallest
 *                  (0-based), q1 and q3 the floor(0.25 (w - 1))-th and floor(0.75 (w - 1))-th; NaN sorts last
 *   S_k          = kl~_k - lam * entropy~_k
 *   L            = number of leading k with S_k >= 0 (a NaN ends the block)
 *   length       = R if R < l_min, else min(max(L, l_min), l_max, R)
 */
DLMKERN_API int dlmkern_cpu_depga_block(const dlmkern_view* kl, const dlmkern_view* entropy,
                                        const dlmkern_view* remaining, const dlmkern_view* lam,
                                        const dlmkern_view* l_min, const dlmkern_view* l_max, int reflect,
                                        const dlmkern_view* length);
DLMKERN_API size_t dlmkern_cuda_depga_block_workspace(int64_t B, int64_t W);
DLMKERN_API int dlmkern_cuda_depga_block(const dlmkern_view* kl, const dlmkern_view* entropy,
                                         const dlmkern_view* remaining, const dlmkern_view* lam,
                                         const dlmkern_view* l_min, const dlmkern_view* l_max, int reflect,
                                         const dlmkern_view* length, void* workspace, size_t workspace_bytes,
                                         void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * confidence_select: which positions a confidence rule commits (Fast-dLLM, LLaDA).
 *
 *   confidence [B, n] float32|float64
 *   mask       [B, n] bool, or NULL for all: positions that may be committed
 *   parameter  [B] float64: p of the rule
 *   rule       a dlmkern_rule
 *   selected   [B, n] bool, out
 *
 * In float64. The candidates are the m masked positions whose confidence c is not NaN; r is a candidate's
 * rank by falling confidence, from 1 on, ties to the lower index.
 */
typedef enum dlmkern_rule {
  DLMKERN_RULE_THRESHOLD = 0,      /* r == 1 or c >= p */
  DLMKERN_RULE_FACTOR = 1,         /* r == 1 or (r + 1)(1 - c) < p */
  DLMKERN_RULE_SCHEDULE = 2,       /* r <= p */
  DLMKERN_RULE_FACTOR_OFFICIAL = 3 /* r == 1 or c >= 1 - p / (r + 1); all m if only the last rank fails */
} dlmkern_rule;

DLMKERN_API int dlmkern_cpu_confidence_select(const dlmkern_view* confidence, const dlmkern_view* mask,
                                              const dlmkern_view* parameter, int rule,
                                              const dlmkern_view* selected);
DLMKERN_API int dlmkern_cuda_confidence_select(const dlmkern_view* confidence, const dlmkern_view* mask,
                                               const dlmkern_view* parameter, int rule,
                                               const dlmkern_view* selected, void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * kv_block_write: keys and values of a block into their places in the cache, in place.
 *
 *   k_cache, v_cache  [B, H, L, d] float, in and out
 *   k, v              [B, H, n, d] same dtype
 *   positions         [B, n] int64: the place of each; outside [0, L) it is skipped. Two equal positions in a
 *                     row leave either.
 *   cos, sin          [P, d] float64 for float64 caches, else float32; P >= L, d even; or both NULL: row p
 *                     turns a key at position p, k_i cos_i - k_{i+d/2} sin_i for i < d/2 and
 *                     k_i cos_i + k_{i-d/2} sin_i for the others, computed in the dtype of the tables and
 *                     rounded once to that of the cache
 *   drift             [4, B, n] float32, out, or NULL: the cosine of the old and the new key, the distance
 *                     |new - old| / |old|, and both for the value, over all H d numbers of a position, as the
 *                     cache's dtype holds them; NaN where the position is skipped
 */
DLMKERN_API int dlmkern_cpu_kv_block_write(const dlmkern_view* k_cache, const dlmkern_view* v_cache,
                                           const dlmkern_view* k, const dlmkern_view* v,
                                           const dlmkern_view* positions, const dlmkern_view* cos,
                                           const dlmkern_view* sin, const dlmkern_view* drift);
DLMKERN_API int dlmkern_cuda_kv_block_write(const dlmkern_view* k_cache, const dlmkern_view* v_cache,
                                            const dlmkern_view* k, const dlmkern_view* v,
                                            const dlmkern_view* positions, const dlmkern_view* cos,
                                            const dlmkern_view* sin, const dlmkern_view* drift, void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * attention_graph: how much some positions attend to each other, the mean over heads (DAPD). The attention
 * map [B, Hq, L, L] is never stored. On GPUs it needs the matrix units and is left to Triton.
 *
 *   q          [B, Hq, n, d] float, d >= 1
 *   k          [B, Hkv, L, d] same dtype; Hkv divides Hq, query head h goes with key head h / (Hq / Hkv)
 *   positions  [B, M] int64: the place of each position's key
 *   rows       [B, M] int64: the row of q with its query; or NULL, then it is the place, and n == L
 *   lengths    [B] int64: the keys of a sequence end there, whatever lies beyond; NULL for L.
 *              Below 0 is 0, and above L is L
 *   lse        [B, Hq, n] float64 for float64 q, else float32: log sum exp(scale q k) over the keys,
 *              in nats; or NULL, then it is computed
 *   scale      finite
 *   out        [B, M, M] float64 for float64 q, else float32, in and out
 *
 * Positions with a place outside [0, length) or a row outside [0, n) are padding. For all others
 * out_ij += 1/Hq sum_h exp(scale q_h,row(i) k_h,place(j) - lse_h,row(i)); nothing else is written. Products
 * and sums have the dtype of out. In float32, exp of anything below -87 is exp(-87) = 2e-38.
 */
DLMKERN_API int dlmkern_cpu_attention_graph(const dlmkern_view* q, const dlmkern_view* k,
                                            const dlmkern_view* positions, const dlmkern_view* rows,
                                            const dlmkern_view* lengths, const dlmkern_view* lse,
                                            double scale, const dlmkern_view* out);

/* -----------------------------------------------------------------------------------------------------------
 * dapd_select: one commit step of DAPD, an independent set of the graph that attention draws.
 *
 *   scores      [B, M, M] float32|float64: attention as attention_graph adds it up, to any scale
 *   confidence  [B, M] float32|float64
 *   valid       [B, M] bool, or NULL for all: positions that may be committed
 *   tau, certain, late  [B] float64 each
 *   symmetric   0: an edge is tested from the candidate's side (official); 1: from either side
 *   selected    [B, M] bool, out
 *
 * In float64. w(x) is x, or 0 if float32 can't hold it (beyond its largest number, infinite or NaN). The
 * candidates are the valid positions of finite confidence c; a pair of them has the weight s_ij:
 *   s_ij     = (w(scores_ij) + w(scores_ji)) / 2 for i != j, else 0
 *   degree_i = sum_j s_ij, added in order of j
 *   edge_ij  = s_ij / max(max_j s_ij, 1e-8) > tau; if symmetric, edge_ij or edge_ji
 * Candidates with c >= certain go in. The others are scanned by falling degree_i c_i, ties to the lower
 * index, and each is taken unless edge_ij for some j that the scan has taken; the certain ones block nobody.
 * Last, the candidates with c >= late go in. No comparison with NaN holds.
 */
DLMKERN_API int dlmkern_cpu_dapd_select(const dlmkern_view* scores, const dlmkern_view* confidence,
                                        const dlmkern_view* valid, const dlmkern_view* tau,
                                        const dlmkern_view* certain, const dlmkern_view* late, int symmetric,
                                        const dlmkern_view* selected);
DLMKERN_API size_t dlmkern_cuda_dapd_select_workspace(int64_t B, int64_t M);
DLMKERN_API int dlmkern_cuda_dapd_select(const dlmkern_view* scores, const dlmkern_view* confidence,
                                         const dlmkern_view* valid, const dlmkern_view* tau,
                                         const dlmkern_view* certain, const dlmkern_view* late, int symmetric,
                                         const dlmkern_view* selected, void* workspace,
                                         size_t workspace_bytes, void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * diagonal_correction: what the queries of COVER's seeds gather without their own tokens, in place. The same
 * in one attention, cover_attention, needs the matrix units and is left to Triton.
 *
 *   out         [B, Hq, n, d] float, d >= 1, in and out: attention over the keys that all queries see
 *   lse         [B, Hq, n] float64 for float64 out, else float32, in and out: its log-sum-exp, in nats
 *   q           [B, Hq, n, d] the dtype of out
 *   k, v        [B, Hkv, n, d] same dtype, of this pass; Hkv divides Hq, query head h goes with key head
 *               h / (Hq / Hkv)
 *   k_cached, v_cached  [B, Hkv, L, d] same dtype
 *   seeds       [B, n] bool: the rows of k and v that are seeds
 *   lengths     [B] int64: the keys of a sequence end there, whatever lies beyond; NULL for L. Below 0 is 0,
 *               and above L is L
 *   positions   [B, n] int64, or NULL. NULL: n == L, row i is at place i, and the keys and values that all
 *               queries see are those of the caches at seeds and those of k and v elsewhere. Else the place
 *               of each row, and all queries see the caches
 *   shift       0 or 1: row i is corrected if row s = i + shift is a seed, in the column c = place(s)
 *   scale       finite
 *   recompute_below  at least 0, infinity included
 *
 * Nothing is done where s >= n or c lies outside [0, length). With a = exp(scale q_i k_cached_c - lse_i),
 * b = exp(scale q_i k_s - lse_i) and r = 1 - a + b, in float64:
 *   out_i = (out_i - a v_cached_c + b v_s) / r,  lse_i += log r,
 * or, unless r > recompute_below, both from the keys, with k_s and v_s in the place of column c. Its scores
 * and sums are float32 or better.
 */
DLMKERN_API int dlmkern_cpu_diagonal_correction(const dlmkern_view* out, const dlmkern_view* lse,
                                                const dlmkern_view* q, const dlmkern_view* k,
                                                const dlmkern_view* v, const dlmkern_view* k_cached,
                                                const dlmkern_view* v_cached, const dlmkern_view* seeds,
                                                const dlmkern_view* lengths, const dlmkern_view* positions,
                                                int shift, double scale, double recompute_below);
DLMKERN_API int dlmkern_cuda_diagonal_correction(const dlmkern_view* out, const dlmkern_view* lse,
                                                 const dlmkern_view* q, const dlmkern_view* k,
                                                 const dlmkern_view* v, const dlmkern_view* k_cached,
                                                 const dlmkern_view* v_cached, const dlmkern_view* seeds,
                                                 const dlmkern_view* lengths, const dlmkern_view* positions,
                                                 int shift, double scale, double recompute_below,
                                                 void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * cover_seeds: the committed tokens that COVER verifies next.
 *
 *   uncertainty       [B, n] float32|float64
 *   influence, drift  [B, n] float32|float64, or NULL: left out of the score
 *   eligible          [B, n] bool, or NULL for all
 *   most              [B] int64: at most that many seeds
 *   additive          0: the score is u g (1 - d); 1: (u + g) + (1 - d); left to right
 *   above_mean        0: t = sum of scores / largest score; 1: t = number of scores above their mean
 *   seeds             [B, n] bool, out
 *   score             [B, n] float64, out
 *
 * In float64. The eligible positions with finite arguments take part, m of them; all others have a score of 0
 * and are no seeds. u, g and d are max(x, 0) / max over those that take part, or 0 where that maximum is. The
 * sum of scores is added in order of the index, and their mean is that sum / m. By falling score, ties to the
 * lower index, the position of rank r, from 0 on, is a seed if r * r < t, which makes ceil(sqrt(t)) seeds,
 * r < most and its score exceeds 0.
 */
DLMKERN_API int dlmkern_cpu_cover_seeds(const dlmkern_view* uncertainty, const dlmkern_view* influence,
                                        const dlmkern_view* drift, const dlmkern_view* eligible,
                                        const dlmkern_view* most, int additive, int above_mean,
                                        const dlmkern_view* seeds, const dlmkern_view* score);
DLMKERN_API int dlmkern_cuda_cover_seeds(const dlmkern_view* uncertainty, const dlmkern_view* influence,
                                         const dlmkern_view* drift, const dlmkern_view* eligible,
                                         const dlmkern_view* most, int additive, int above_mean,
                                         const dlmkern_view* seeds, const dlmkern_view* score, void* stream);

/* -----------------------------------------------------------------------------------------------------------
 * cover_verify: what becomes of the tokens that COVER has verified.
 *
 *   confidence   [B, n] float32|float64: probability of `predicted`
 *   token        [B, n] int64: what is there
 *   predicted    [B, n] int64: the likeliest without it
 *   seeds        [B, n] bool
 *   remasks      [B, n] int64: how often the position was masked again
 *   tau_replace  not NaN
 *   max_remasks  at least 0
 *   verdict      [B, n] int64, out: a dlmkern_verdict
 */
typedef enum dlmkern_verdict {
  DLMKERN_VERDICT_NONE = 0,    /* no seed */
  DLMKERN_VERDICT_KEEP = 1,    /* predicted == token, or none of the two below */
  DLMKERN_VERDICT_REPLACE = 2, /* predicted != token and confidence >= tau_replace */
  DLMKERN_VERDICT_REMASK = 3   /* predicted != token, less confidence, and remasks < max_remasks */
} dlmkern_verdict;

DLMKERN_API int dlmkern_cpu_cover_verify(const dlmkern_view* confidence, const dlmkern_view* token,
                                         const dlmkern_view* predicted, const dlmkern_view* seeds,
                                         const dlmkern_view* remasks, double tau_replace, int64_t max_remasks,
                                         const dlmkern_view* verdict);
DLMKERN_API int dlmkern_cuda_cover_verify(const dlmkern_view* confidence, const dlmkern_view* token,
                                          const dlmkern_view* predicted, const dlmkern_view* seeds,
                                          const dlmkern_view* remasks, double tau_replace,
                                          int64_t max_remasks, const dlmkern_view* verdict, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* DLMKERN_H */
