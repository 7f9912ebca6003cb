// token_stats gives the normaliser; then a block for each row finds the k-th largest logit by radix
// selection, eight bits of its key at a time, writes what reaches it, and sorts that in place.
#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kDigits = 256;

// Keys order like the logits; the two zeros are equal.
__device__ unsigned key_of(float x) {
  const unsigned bits = __float_as_uint(x == 0 ? 0.f : x);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ unsigned long long key_of(double x) {
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(x == 0 ? 0. : x));
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

template <class T>
using Key = decltype(key_of(Wide<T>{}));

template <class T>
struct Arguments {
  Tensor<const T> logits;
  int64_t banned;
  const int64_t* token;     // [rows], -1 for a row without a distribution
  const double* logsumexp;  // [rows]
  Tensor<int64_t> ids;
  Tensor<double> logp, floor;
  int64_t n, V, k;
};

// The row that a block works on.
template <class T>
struct Row {
  const T* data;
  int64_t stride, V, banned;

  __device__ bool has(int64_t v) const { return v < V && v != banned; }
  __device__ Wide<T> operator[](int64_t v) const { return widen(data[v * stride]); }
};

// The k-th largest key, and how many of the logits that have it belong to the k largest.
template <class T>
struct Threshold {
  Key<T> key;
  unsigned ties;
};

template <class T>
__device__ Threshold<T> find_threshold(const Row<T>& row, int64_t k) {
  DLMKERN_SHARED(unsigned[kDigits], histogram);
  DLMKERN_SHARED(Threshold<T>, found);
  Threshold<T> threshold{0, static_cast<unsigned>(k)};
  Key<T> known = 0;  // the bits of the key that are settled
  for (int shift = 8 * sizeof known - 8; shift >= 0; shift -= 8) {
    for (int digit = threadIdx.x; digit < kDigits; digit += kThreads) histogram[digit] = 0;
    __syncthreads();
    for (int64_t first = 0; first < row.V; first += kThreads) {
      const int64_t v = first + threadIdx.x;
      const Key<T> key = row.has(v) ? key_of(row[v]) : 0;
      const bool counts = row.has(v) && (key & known) == threshold.key;
      const unsigned lanes = __ballot_sync(kAllLanes, counts);
      if (!counts) continue;
      // Logits share their leading bits: one addition for all lanes of a digit.
      const auto digit = static_cast<unsigned>(key >> shift & (kDigits - 1));
      const unsigned peers = __match_any_sync(lanes, digit);
      if (threadIdx.x % kWarp == static_cast<unsigned>(__ffs(static_cast<int>(peers)) - 1)) {
        atomicAdd(&histogram[digit], static_cast<unsigned>(__popc(peers)));
      }
    }
    __syncthreads();
    for (int digit = threadIdx.x; digit < kDigits; digit += kThreads) {
      unsigned above = 0;
      for (int d = digit + 1; d < kDigits; ++d) above += histogram[d];
      if (above < threshold.ties && threshold.ties <= above + histogram[digit]) {
        found = {threshold.key | static_cast<Key<T>>(digit) << shift, threshold.ties - above};
      }
    }
    __syncthreads();
    threshold = found;
    known |= static_cast<Key<T>>(kDigits - 1) << shift;
  }
  return threshold;
}

// How many threads of the block before this one have a true predicate. All threads.
__device__ unsigned count_before(bool predicate) {
  DLMKERN_SHARED(unsigned[kWarps], of_warp);
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned votes = __ballot_sync(kAllLanes, predicate);
  if (lane == 0) of_warp[warp] = static_cast<unsigned>(__popc(votes));
  __syncthreads();
  auto before = static_cast<unsigned>(__popc(votes & ((1u << lane) - 1)));
  for (unsigned w = 0; w < warp; ++w) before += of_warp[w];
  __syncthreads();
  return before;
}

__device__ double sum_over_block(double value) {
  DLMKERN_SHARED(double[kWarps], of_warp);
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += of_warp[w];
  return sum;
}

// Where a block puts the k largest logits; they become log-probabilities once they are sorted.
struct Snapshot {
  int64_t* ids;
  double* logp;
  int64_t ids_stride, logp_stride, k;

  __device__ int64_t& id(int64_t r) const { return ids[r * ids_stride]; }
  __device__ double& log_probability(int64_t r) const { return logp[r * logp_stride]; }

  // Bitonic sort in which every comparison puts what goes first at the lower place, so that places from k on,
  // which would hold what goes last, need not exist. All threads.
  __device__ void sort() const {
    for (int64_t size = 2; size < 2 * k; size *= 2) {
      for (int64_t stride = size - 1; stride > 0; stride = stride == size - 1 ? size / 4 : stride / 2) {
        for (int64_t r = threadIdx.x; r < k; r += kThreads) {
          const int64_t other = r ^ stride;
          if (other > r && other < k && goes_first(other, r)) swap(r, other);
        }
        __syncthreads();
      }
    }
  }

 private:
  __device__ bool goes_first(int64_t r, int64_t s) const {
    const double a = log_probability(r), b = log_probability(s);
    return a > b || (a == b && id(r) < id(s));
  }

  __device__ void swap(int64_t r, int64_t s) const {
    const int64_t v = id(r);
    const double x = log_probability(r);
    id(r) = id(s);
    log_probability(r) = log_probability(s);
    id(s) = v;
    log_probability(s) = x;
  }
};

// Two blocks on a multiprocessor leave enough registers.
template <class T>
__global__ void __launch_bounds__(kThreads, 2) topk_snapshot(Arguments<T> a) {
  DLMKERN_SHARED(unsigned, taken);
  const int64_t b = blockIdx.x / a.n, i = blockIdx.x % a.n;
  const Snapshot snapshot{a.ids.address(b, i), a.logp.address(b, i), a.ids.stride[2], a.logp.stride[2], a.k};
  if (a.token[blockIdx.x] < 0) {
    for (int64_t r = threadIdx.x; r < a.k; r += kThreads) {
      snapshot.id(r) = -1;
      snapshot.log_probability(r) = NAN;
    }
    if (threadIdx.x == 0) a.floor(b, i) = NAN;
    return;
  }
  const Row<T> row{a.logits.address(b, i), a.logits.stride[2], a.V, a.banned};
  const double logsumexp = a.logsumexp[blockIdx.x];
  const Threshold<T> threshold = find_threshold(row, a.k);

  if (threadIdx.x == 0) taken = 0;
  __syncthreads();
  double tail = 0;
  unsigned ties = 0;
  for (int64_t first = 0; first < a.V; first += kThreads) {
    const int64_t v = first + threadIdx.x;
    const Wide<T> x = row.has(v) ? row[v] : -INFINITY;
    const Key<T> key = key_of(x);
    const bool tie = row.has(v) && key == threshold.key;
    const auto ties_here = static_cast<unsigned>(__syncthreads_count(tie));
    const bool among_first =
        ties_here > 0 && ties < threshold.ties && ties + count_before(tie) < threshold.ties;
    ties += ties_here;
    if (!row.has(v)) continue;
    if (key > threshold.key || (tie && among_first)) {
      const unsigned r = atomicAdd(&taken, 1u);
      snapshot.id(r) = v;
      snapshot.log_probability(r) = x;
    } else {
      tail += exp(x - logsumexp);
    }
  }
  tail = sum_over_block(tail);
  snapshot.sort();
  for (int64_t r = threadIdx.x; r < a.k; r += kThreads) snapshot.log_probability(r) -= logsumexp;
  if (threadIdx.x == 0) {
    const int64_t others = a.V - (a.banned >= 0) - a.k;
    a.floor(b, i) = log(fmax(tail, 1e-12) / static_cast<double>(max(others, int64_t{1})));
  }
}

// The workspace: logsumexp and token of every row, then what token_stats needs.
size_t bytes_of_rows(int64_t B, int64_t n) {
  return static_cast<size_t>(divide_up<int64_t>(B * n * 8, 256) * 256);
}

dlmkern_view view_of_rows(void* data, dlmkern_dtype dtype, int64_t B, int64_t n) {
  return {data, dtype, 2, {B, n, 0}, {n, 1, 0}};
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" size_t dlmkern_cuda_topk_snapshot_workspace(int64_t B, int64_t n, int64_t V) {
  if (B <= 0 || n <= 0 || V <= 0) return 0;
  if (!rows_fit_grid(B, n)) return kTooManyBytes;
  return 2 * bytes_of_rows(B, n) + dlmkern_cuda_token_stats_workspace(B, n, V);
}

extern "C" int dlmkern_cuda_topk_snapshot(const dlmkern_view* logits, int64_t banned_token,
                                          const dlmkern_view* ids, const dlmkern_view* logp,
                                          const dlmkern_view* floor, void* workspace, size_t workspace_bytes,
                                          void* stream) {
  DLMKERN_TRY(check_rows(logits));
  const int64_t B = logits->shape[0], n = logits->shape[1], V = logits->shape[2];
  if (banned_token < -1 || banned_token >= V) return DLMKERN_ERROR_VALUE;
  DLMKERN_TRY(check_output(ids, kInt64, {B, n, kAnySize}));
  const int64_t k = ids->shape[2];
  if (k < 1 || k > V - (banned_token >= 0)) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_output(logp, kFloat64, {B, n, k}));
  DLMKERN_TRY(check_output(floor, kFloat64, {B, n}));
  if (B == 0 || n == 0) return DLMKERN_OK;
  if (!rows_fit_grid(B, n) || !fits_grid(V)) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_workspace(workspace, workspace_bytes, dlmkern_cuda_topk_snapshot_workspace(B, n, V)));

  char* const memory = static_cast<char*>(workspace);
  const size_t half = bytes_of_rows(B, n);
  const dlmkern_view logsumexp = view_of_rows(memory, DLMKERN_FLOAT64, B, n);
  const dlmkern_view token = view_of_rows(memory + half, DLMKERN_INT64, B, n);
  DLMKERN_TRY(dlmkern_cuda_token_stats(logits, nullptr, nullptr, banned_token, &token, nullptr, &logsumexp,
                                       nullptr, nullptr, memory + 2 * half, workspace_bytes - 2 * half,
                                       stream));
  return with_float_type(logits->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Arguments<T> arguments{tensor_of<const T>(logits),
                                 banned_token,
                                 static_cast<const int64_t*>(token.data),
                                 static_cast<const double*>(logsumexp.data),
                                 tensor_of<int64_t>(ids),
                                 tensor_of<double>(logp),
                                 tensor_of<double>(floor),
                                 n,
                                 V,
                                 k};
    DLMKERN_LAUNCH(topk_snapshot<T>, static_cast<unsigned>(B * n), kThreads, 0,
                   static_cast<cudaStream_t>(stream))
    (arguments);
    return launch_result();
  });
}
