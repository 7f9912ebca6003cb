// One read of the logits. A row is cut into splits, with a block for each. A warp keeps one running maximum,
// and its lanes keep sums relative to it, so that a raise of the maximum is rare and what lies far below it
// can be skipped. Where a row has several splits, a second, small kernel merges their results in a fixed
// order.
#include "short_row.h"
#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int64_t kMinSplit = 4096;      // elements, below which a block isn't worth its start
constexpr int64_t kTargetBlocks = 1024;  // enough to fill a large GPU several times

// Terms below exp(-kNegligible) of the largest are left out: 2^18 of them change a sum, which is at least 1,
// by less than 1.2e-12 (in a short row by less than 1e-31). They are kept where the earlier logit is more
// than kDeep below its maximum, since the logarithm of its probability weighs them.
template <class Real>
constexpr float kNegligible = std::is_same_v<Real, float> ? 40.f : 80.f;
constexpr float kDeep = 1024.f;

__device__ float exp_of_term(float x) { return __expf(x); }
__device__ double exp_of_term(double x) { return exp(x); }

// How far a maximum rises, as a number <= 0; 0 from nothing, when there is nothing to rescale.
template <class Real>
__device__ Real shift_between(Real old_max, Real new_max) {
  return old_max > -INFINITY ? old_max - new_max : Real{0};
}

// Sums over some of a row's terms e_v = exp(x_v - max), y being the earlier logits. The best term, 1, is left
// out of `rest`: added to it, it would hide the digits in which confidences near one differ.
template <class Real>
struct Sums {
  Real rest;        // e_v
  Real weighted;    // e_v (x_v - max)
  Real divergence;  // e_v ((x_v - max) - (y_v - prev_max))
  Real prev_sum;    // exp(y_v - prev_max)
  bool has_best;    // whether the best term is one of these

  // Makes the sums relative to higher maxima. A best term that is outdone becomes one of the rest.
  __device__ void rebase(Real shift, Real prev_shift, bool still_best) {
    const Real scale = exp(shift);
    const Real sum = rest + (has_best ? Real{1} : Real{0});
    divergence = scale * (divergence + sum * (shift - prev_shift));
    weighted = scale * (weighted + sum * shift);
    rest = scale * (still_best ? rest : sum);
    has_best = has_best && still_best;
    prev_sum *= exp(prev_shift);
  }

  __device__ void add(const Sums& other) {
    rest += other.rest;
    weighted += other.weighted;
    divergence += other.divergence;
    prev_sum += other.prev_sum;
    has_best = has_best || other.has_best;
  }
};

__device__ Sums<double> sum_over_warp(Sums<double> sums) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sums.rest += __shfl_xor_sync(kAllLanes, sums.rest, offset);
    sums.weighted += __shfl_xor_sync(kAllLanes, sums.weighted, offset);
    sums.divergence += __shfl_xor_sync(kAllLanes, sums.divergence, offset);
    sums.prev_sum += __shfl_xor_sync(kAllLanes, sums.prev_sum, offset);
  }
  return sums;
}

// What is known about a part of a row.
struct Partial {
  double max, prev_max;  // -inf without a term
  int64_t best;          // the lowest index of the maximum
  Sums<double> sums;
  bool prev_zero;  // some y_v is -inf where x_v is not

  __device__ void merge(Partial other) {
    const bool stays = max > other.max || (max == other.max && best < other.best);
    const double new_max = fmax(max, other.max), new_prev_max = fmax(prev_max, other.prev_max);
    sums.rebase(shift_between(max, new_max), shift_between(prev_max, new_prev_max), stays);
    other.sums.rebase(shift_between(other.max, new_max), shift_between(other.prev_max, new_prev_max), !stays);
    sums.add(other.sums);
    best = stays ? best : other.best;
    max = new_max;
    prev_max = new_prev_max;
    prev_zero = prev_zero || other.prev_zero;
  }
};

__device__ Partial shuffle_down(const Partial& p, int offset) {
  const auto from = [&](auto value) { return __shfl_down_sync(kAllLanes, value, offset); };
  const Sums<double> sums{from(p.sums.rest), from(p.sums.weighted), from(p.sums.divergence),
                          from(p.sums.prev_sum), from(static_cast<int>(p.sums.has_best)) != 0};
  return {from(p.max), from(p.prev_max), from(p.best), sums, from(static_cast<int>(p.prev_zero)) != 0};
}

// ---- Reading a row
// -----------------------------------------------------------------------------------------

// A lane holds N elements of a row at a time: 32 bytes of one or two rows. Arithmetic in float64 needs many
// registers, and short rows little speed.
template <class T, class Real, bool kHasPrev>
constexpr int kElements = std::is_same_v<Real, float> ? (kHasPrev ? 16 : 32) / sizeof(T) : 1;

// The lanes of a warp read a tile of N vectors or fewer each.
template <class T, int N>
struct Row {
  static constexpr int kTile = N * kWarp;
  static constexpr int kVector = N < 16 / static_cast<int>(sizeof(T)) ? N : 16 / static_cast<int>(sizeof(T));

  struct alignas(kVector * sizeof(T)) Vector {
    T values[kVector];
  };

  const T* data;
  int64_t stride, V;

  // How many elements the last boundary of a vector lies before the row; 0 for rows that aren't read by
  // vectors.
  __device__ int offset() const {
    const auto bytes = reinterpret_cast<uintptr_t>(data) % sizeof(Vector);
    return stride == 1 && bytes % sizeof(T) == 0 ? static_cast<int>(bytes / sizeof(T)) : 0;
  }

  // The place in a tile of the lane's e-th element.
  static __device__ int place(int e) {
    return (e / kVector * kWarp + static_cast<int>(threadIdx.x % kWarp)) * kVector + e % kVector;
  }

  // Reads the tile that begins at index `first`, with -inf outside the row and for the banned token.
  __device__ void read(int64_t first, int64_t banned, Wide<T> (&x)[N]) const {
    const bool whole = first >= 0 && first + kTile <= V;
    if (whole && stride == 1 && reinterpret_cast<uintptr_t>(data + first) % sizeof(Vector) == 0) {
      DLMKERN_UNROLL
      for (int e = 0; e < N; e += kVector) {
        const Vector vector = *reinterpret_cast<const Vector*>(data + first + place(e));
        DLMKERN_UNROLL
        for (int k = 0; k < kVector; ++k) x[e + k] = widen(vector.values[k]);
      }
    } else {
      DLMKERN_UNROLL
      for (int e = 0; e < N; ++e) {
        const int64_t v = first + place(e);
        x[e] = v >= 0 && v < V ? widen(data[v * stride]) : -INFINITY;
      }
    }
    if (banned >= first && banned < first + kTile) {
      DLMKERN_UNROLL
      for (int e = 0; e < N; ++e) {
        if (first + place(e) == banned) x[e] = -INFINITY;
      }
    }
  }
};

// ---- One warp's part of a row
// ------------------------------------------------------------------------------

template <class Value>
__device__ Value max_over_warp(Value value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = fmax(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// A lane's view of what its warp has read. The maxima and `best` are the same in all lanes.
template <class T, class Real, bool kHasPrev>
struct Scan {
  static constexpr int N = kElements<T, Real, kHasPrev>;
  using TheRow = Row<T, N>;
  using Value = Wide<T>;

  Value max = -INFINITY, prev_max = -INFINITY;
  int64_t best = -1;
  Sums<Real> sums{};
  bool prev_zero = false;

  // Takes a tile; x is used up. All lanes.
  __device__ void take(int64_t first, Value (&x)[N], const Value (&y)[N]) {
    if (__all_sync(kAllLanes, is_negligible(x, y))) return;
    Value top = -INFINITY, prev_top = -INFINITY;
    DLMKERN_UNROLL
    for (int e = 0; e < N; ++e) {
      top = fmax(top, x[e]);
      if constexpr (kHasPrev) prev_top = fmax(prev_top, y[e]);
    }
    if (__any_sync(kAllLanes, top > max || prev_top > prev_max)) raise(first, top, prev_top, x, y);
    add(x, y);
  }

  __device__ Partial result() const {
    const Sums<double> lane{static_cast<double>(sums.rest), static_cast<double>(sums.weighted),
                            static_cast<double>(sums.divergence), static_cast<double>(sums.prev_sum),
                            best >= 0};
    return {max, prev_max, best, sum_over_warp(lane), __any_sync(kAllLanes, prev_zero) != 0};
  }

 private:
  // A NaN isn't.
  __device__ bool is_negligible(const Value (&x)[N], const Value (&y)[N]) const {
    const Value limit = max - kNegligible<Real>;
    bool negligible = true;
    DLMKERN_UNROLL
    for (int e = 0; e < N; ++e) {
      negligible = negligible && x[e] <= limit;
      if constexpr (kHasPrev) {
        negligible = negligible && y[e] <= prev_max - kNegligible<Real> && y[e] >= prev_max - kDeep;
      }
    }
    return negligible;
  }

  __device__ void raise(int64_t first, Value top, Value prev_top, Value (&x)[N], const Value (&y)[N]) {
    const Value old_max = max, old_prev_max = prev_max;
    max = fmax(max, max_over_warp(top));
    if constexpr (kHasPrev) prev_max = fmax(prev_max, max_over_warp(prev_top));
    const bool still_best = max == old_max;
    sums.rebase(shift_between<Real>(old_max, max), shift_between<Real>(old_prev_max, prev_max), still_best);
    if (still_best) return;

    unsigned place = TheRow::kTile;
    DLMKERN_UNROLL
    for (int e = N - 1; e >= 0; --e) {
      if (x[e] == max) place = TheRow::place(e);
    }
    const unsigned best_place = __reduce_min_sync(kAllLanes, place);
    best = first + best_place;
    sums.has_best = place == best_place;
    if (!sums.has_best) return;
    bool found = false;
    DLMKERN_UNROLL
    for (int e = 0; e < N; ++e) {
      if (found || x[e] != max) continue;
      found = true;
      x[e] = -INFINITY;  // accounted for here
      if constexpr (kHasPrev) {
        sums.divergence -= log_ratio_to_prev_max(y[e]);
        prev_zero = prev_zero || y[e] == -INFINITY;
      }
    }
  }

  // A finite stand-in for -inf: its product with a term of 0 must be 0, and with another term it doesn't
  // matter, because prev_zero decides.
  __device__ Real log_ratio_to_prev_max(Value y) const {
    const Real ratio = Real{y} - (prev_max > -INFINITY ? Real{prev_max} : Real{0});
    return ratio == -INFINITY ? Real{-1e30f} : ratio;
  }

  __device__ void add(const Value (&x)[N], const Value (&y)[N]) {
    const Real base = max > -INFINITY ? Real{max} : Real{0};
    const Real prev_base = prev_max > -INFINITY ? Real{prev_max} : Real{0};
    DLMKERN_UNROLL
    for (int e = 0; e < N; ++e) {
      const Real log_ratio = Real{x[e]} - base;
      const Real term = exp_of_term(log_ratio);
      const Real finite_log_ratio =
          log_ratio < Real{-1e4f} ? Real{-1e4f} : log_ratio;  // its term is 0 already
      sums.rest += term;
      sums.weighted += term * finite_log_ratio;
      if constexpr (kHasPrev) {
        sums.prev_sum += exp_of_term(Real{y[e]} - prev_base);
        sums.divergence += term * (finite_log_ratio - log_ratio_to_prev_max(y[e]));
        prev_zero = prev_zero || (y[e] == -INFINITY && x[e] > -INFINITY);
      }
    }
  }
};

// ---- The kernels
// -------------------------------------------------------------------------------------------

struct Outputs {
  Tensor<int64_t> token;
  RealTensor confidence, logsumexp, entropy, kl;

  __device__ void write(const Partial& p, bool has_prev, int64_t b, int64_t i) const {
    const Sums<double>& s = p.sums;
    const bool defined = p.max > -INFINITY && p.max < INFINITY && !isnan(s.rest);
    const bool prev_defined =
        has_prev && p.prev_max > -INFINITY && p.prev_max < INFINITY && !isnan(s.prev_sum);
    const double sum = 1 + s.rest, log_sum = log1p(s.rest);
    if (token) token(b, i) = defined ? p.best : -1;
    confidence.write(defined ? 1 / sum : NAN, b, i);
    logsumexp.write(defined ? p.max + log_sum : NAN, b, i);
    entropy.write(defined ? log_sum - s.weighted / sum : NAN, b, i);
    const double divergence = p.prev_zero ? INFINITY : s.divergence / sum - log_sum + log(s.prev_sum);
    kl.write(defined && prev_defined ? divergence : NAN, b, i);
  }
};

// What both kernels are told.
struct Job {
  Tensor<const int64_t> prev_rows;
  int64_t n, m, V, banned;  // m rows of earlier logits
  unsigned splits;
  Partial* partials;  // [rows, splits] if there are several splits
  Outputs outputs;

  // The row of earlier logits that belongs to a position, -1 for none.
  __device__ int64_t prev_row(int64_t b, int64_t i) const {
    const int64_t row = prev_rows ? prev_rows(b, i) : i;
    return row >= 0 && row < m ? row : -1;
  }
};

// Four blocks on a multiprocessor leave enough registers.
template <class T, class Real, bool kHasPrev>
__global__ void __launch_bounds__(kThreads, 4)
    scan_rows(Job job, Tensor<const T> logits, Tensor<const T> prev_logits) {
  DLMKERN_SHARED(Partial[kWarps], of_warp);
  const unsigned split = blockIdx.x % job.splits;
  const int64_t row_index = blockIdx.x / job.splits, b = row_index / job.n, i = row_index % job.n;
  const int warp = static_cast<int>(threadIdx.x / kWarp);

  using TheScan = Scan<T, Real, kHasPrev>;
  using TheRow = typename TheScan::TheRow;
  const TheRow row{logits.address(b, i), logits.stride[2], job.V};
  // A row without an earlier one is compared with itself, and the result discarded.
  const int64_t prev_row = kHasPrev ? job.prev_row(b, i) : -1;
  const TheRow prev =
      prev_row >= 0 ? TheRow{prev_logits.address(b, prev_row), prev_logits.stride[2], job.V} : row;

  const int64_t tiles = divide_up<int64_t>(row.offset() + job.V, TheRow::kTile);
  const int64_t end = tiles * (split + 1) / job.splits;
  TheScan scan;
  for (int64_t tile = tiles * split / job.splits + warp; tile < end; tile += kWarps) {
    const int64_t first = tile * TheRow::kTile - row.offset();
    Wide<T> x[TheScan::N], y[TheScan::N];
    row.read(first, job.banned, x);
    if constexpr (kHasPrev) prev.read(first, job.banned, y);
    scan.take(first, x, y);
  }

  const Partial of_this_warp = scan.result();
  if (threadIdx.x % kWarp == 0) of_warp[warp] = of_this_warp;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Partial result = of_warp[0];
  DLMKERN_NO_UNROLL
  for (int w = 1; w < kWarps; ++w) result.merge(of_warp[w]);
  if (job.splits == 1) {
    job.outputs.write(result, prev_row >= 0, b, i);
  } else {
    job.partials[blockIdx.x] = result;
  }
}

// A warp for each row.
__global__ void __launch_bounds__(kWarp) merge_splits(Job job) {
  const int64_t row = blockIdx.x, b = row / job.n, i = row % job.n;
  Partial result{-INFINITY, -INFINITY, -1, {}, false};
  for (unsigned split = threadIdx.x; split < job.splits; split += kWarp) {
    result.merge(job.partials[row * job.splits + split]);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) result.merge(shuffle_down(result, offset));
  if (threadIdx.x == 0) job.outputs.write(result, job.prev_row(b, i) >= 0, b, i);
}

int64_t splits_of_row(int64_t rows, int64_t V) {
  const int64_t wanted = divide_up(kTargetBlocks, rows), most = divide_up(V, kMinSplit);
  return wanted < most ? wanted : most;
}

template <class T, class Real>
void scan(const Job& job, const dlmkern_view* logits, const dlmkern_view* prev_logits, unsigned blocks,
          cudaStream_t stream) {
  const auto kernel = job.m > 0 ? scan_rows<T, Real, true> : scan_rows<T, Real, false>;
  DLMKERN_LAUNCH(kernel, blocks, kThreads, 0, stream)
  (job, tensor_of<const T>(logits), tensor_of<const T>(prev_logits));
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" size_t dlmkern_cuda_token_stats_workspace(int64_t B, int64_t n, int64_t V) {
  if (B <= 0 || n <= 0 || V <= 0) return 0;
  if (!rows_fit_grid(B, n)) return kTooManyBytes;
  const int64_t splits = splits_of_row(B * n, V);
  return splits == 1 ? 0 : static_cast<size_t>(B * n * splits) * sizeof(Partial);
}

extern "C" int dlmkern_cuda_token_stats(const dlmkern_view* logits, const dlmkern_view* prev_logits,
                                        const dlmkern_view* prev_rows, int64_t banned_token,
                                        const dlmkern_view* token, const dlmkern_view* confidence,
                                        const dlmkern_view* logsumexp, const dlmkern_view* entropy,
                                        const dlmkern_view* kl, void* workspace, size_t workspace_bytes,
                                        void* stream) {
  DLMKERN_TRY(check_rows(logits));
  const int64_t B = logits->shape[0], n = logits->shape[1], V = logits->shape[2];
  DLMKERN_TRY(check_optional_input(prev_logits, dtype_bit(logits->dtype), {B, prev_rows ? kAnySize : n, V}));
  if (prev_rows != nullptr && prev_logits == nullptr) return DLMKERN_ERROR_NULL;
  DLMKERN_TRY(check_optional_input(prev_rows, kInt64, {B, n}));
  if (banned_token < -1 || banned_token >= V) return DLMKERN_ERROR_VALUE;
  DLMKERN_TRY(check_optional_output(token, kInt64, {B, n}));
  for (const dlmkern_view* output : {confidence, logsumexp, entropy, kl}) {
    DLMKERN_TRY(check_optional_output(output, kReal, {B, n}));
  }
  if (B == 0 || n == 0) return DLMKERN_OK;
  if (!rows_fit_grid(B, n)) return DLMKERN_ERROR_SHAPE;
  const int64_t splits = splits_of_row(B * n, V);  // one where there are many rows
  DLMKERN_TRY(check_workspace(workspace, workspace_bytes, dlmkern_cuda_token_stats_workspace(B, n, V)));

  // Without earlier rows, or without a use for them, every position has none.
  const int64_t m = kl != nullptr && prev_logits != nullptr ? prev_logits->shape[1] : 0;
  const Job job{tensor_of<const int64_t>(prev_rows),
                n,
                m,
                V,
                banned_token,
                static_cast<unsigned>(splits),
                static_cast<Partial*>(workspace),
                {tensor_of<int64_t>(token), real_tensor_of(confidence), real_tensor_of(logsumexp),
                 real_tensor_of(entropy), real_tensor_of(kl)}};
  const auto rows = static_cast<unsigned>(B * n);
  const auto queue = static_cast<cudaStream_t>(stream);
  with_float_type(logits->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using Fast = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const auto chosen = V <= kShortRow ? scan<T, double> : scan<T, Fast>;
    chosen(job, logits, prev_logits, rows * job.splits, queue);
    return 0;
  });
  DLMKERN_TRY(launch_result());
  if (splits == 1) return DLMKERN_OK;
  DLMKERN_LAUNCH(merge_splits, rows, kWarp, 0, queue)(job);
  return launch_result();
}
