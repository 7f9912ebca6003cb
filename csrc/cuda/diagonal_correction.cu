// One launch, a block for 256 rows of a head. It reads their seeds and places, 9 bytes a row that all heads
// find in the second-level cache, and is done if there is nothing to correct: 128 blocks for 1024 rows and 32
// heads, one for each multiprocessor. A warp corrects a row, which reads six rows of d numbers and writes
// one: for d = 128 in bfloat16 1.8 KB, or 57 KB for a seed of 32 heads. 16 seeds take 0.3 us at 3.3 TB/s, so
// it is the launch and the few round trips to memory that count.
//
// Rows whose closed form is not to be trusted are computed anew by the whole block, its warps taking turns at
// the keys: 2 length d numbers, 0.5 MB for 1024 keys. The host need not know which rows these are.
#include "check_ops.h"
#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = kThreads;  // of a block
constexpr int kPerLane = 4;  // sums of values that a lane holds: with more columns the keys are walked again
constexpr int kColumns = kPerLane * kWarp;

template <class T>
struct Arguments {
  Tensor<T> out;
  Tensor<Wide<T>> lse;
  Tensor<const T> q, k, v, k_cached, v_cached;
  Tensor<const uint8_t> seeds;
  Tensor<const int64_t> lengths, positions;
  int64_t heads, groups, n, L, d;
  int shift;
  double scale, recompute_below;

  __device__ int64_t end_of(int64_t b) const { return lengths ? min(max(lengths(b), int64_t{0}), L) : L; }

  // The column of the seed that row i predicts, -1 for none.
  __device__ int64_t column_of(int64_t b, int64_t i) const {
    const int64_t s = i + shift;
    if (s >= n || !seeds(b, s)) return -1;
    const int64_t place = positions ? positions(b, s) : s;
    return place >= 0 && place < end_of(b) ? place : -1;
  }
};

template <class Real>
__device__ Real sum_over_warp(Real x) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

// The numbers of a row of any of the tensors.
template <class T>
struct Line {
  T* data;
  int64_t stride;

  __device__ T& operator[](int64_t e) const { return data[e * stride]; }
};

// A query, and the column that it alone sees.
template <class T>
struct Row {
  const Arguments<T>& a;
  int64_t b, h, i, column;

  using Real = Wide<T>;

  static __device__ int lane() { return static_cast<int>(threadIdx.x % kWarp); }

  template <class Element>
  __device__ Line<Element> line(const Tensor<Element>& of, int64_t head, int64_t place) const {
    return {of.address(b, head, place), of.stride[3]};
  }
  __device__ Line<const T> query() const { return line(a.q, h, i); }
  __device__ Line<const T> own(const Tensor<const T>& fresh) const {
    return line(fresh, h / a.groups, i + a.shift);
  }
  __device__ Line<const T> cached(const Tensor<const T>& cache) const {
    return line(cache, h / a.groups, column);
  }

  // What this query sees at a place.
  __device__ Line<const T> seen(const Tensor<const T>& fresh, const Tensor<const T>& cache,
                                int64_t place) const {
    if (place == column) return own(fresh);
    return line(a.positions || a.seeds(b, place) ? cache : fresh, h / a.groups, place);
  }

  // By a warp. Whether the closed form could be trusted; if not, nothing is written.
  __device__ bool correct() const {
    const auto x = query(), k_cached = cached(a.k_cached), k_own = own(a.k);
    double with_cached = 0, with_own = 0;
    for (int64_t e = lane(); e < a.d; e += kWarp) {
      const double each = widen(x[e]);
      with_cached += each * widen(k_cached[e]);
      with_own += each * widen(k_own[e]);
    }
    const double before = a.lse(b, h, i);
    const double weight = exp(a.scale * sum_over_warp(with_cached) - before);
    const double gap = a.scale * sum_over_warp(with_own) - before;  // log b
    // Both terms divided by exp(top), so that neither overflows.
    const double top = fmax(gap, 0.0), small = exp(-top), gained = exp(gap - top);
    const double r = (1 - weight) * small + gained;
    if (!(r > a.recompute_below * small)) return false;
    const double keeps = small / r, loses = weight * small / r, gains = gained / r;
    const auto out = line(a.out, h, i);
    const auto v_cached = cached(a.v_cached), v_own = own(a.v);
    for (int64_t e = lane(); e < a.d; e += kWarp) {
      const double value = keeps * widen(out[e]) - loses * widen(v_cached[e]) + gains * widen(v_own[e]);
      out[e] = static_cast<T>(static_cast<Real>(value));
    }
    if (lane() == 0) a.lse(b, h, i) = static_cast<Real>(before + top + log(r));
    return true;
  }
};

// What is subtracted from scores. Without a key there is nothing to subtract from.
template <class Real>
__device__ Real base_of(Real peak) {
  return peak == -INFINITY ? 0 : peak;
}

// Softmax over some keys, and the mean of some columns of their values, both without the division. All but
// `means` is the same in all lanes of a warp.
template <class T>
struct Softmax {
  using Real = Wide<T>;
  static constexpr int kKeys = sizeof(Real) == sizeof(float) ? 4 : 2;  // that a warp scores together

  Real peak = -INFINITY, total = 0;
  Real means[kPerLane] = {};

  // Takes the keys from `first` on, as far as there are any. By a warp.
  __device__ void take(const Row<T>& row, int64_t first, int64_t end, int64_t from_column) {
    const Arguments<T>& a = row.a;
    const auto x = row.query();
    Line<const T> key[kKeys];
    DLMKERN_UNROLL
    for (int t = 0; t < kKeys; ++t) key[t] = row.seen(a.k, a.k_cached, min(first + t, end - 1));
    Real score[kKeys] = {};
    for (int64_t e = Row<T>::lane(); e < a.d; e += kWarp) {
      const Real each = widen(x[e]);
      DLMKERN_UNROLL
      for (int t = 0; t < kKeys; ++t) score[t] += each * widen(key[t][e]);
    }
    const Real before = peak;
    DLMKERN_UNROLL
    for (int t = 0; t < kKeys; ++t) {
      score[t] = static_cast<Real>(a.scale) * sum_over_warp(score[t]);
      if (first + t < end) peak = max(peak, score[t]);
    }
    const Real base = base_of(peak), shrinks = exp(before - base);
    total *= shrinks;
    DLMKERN_UNROLL
    for (int c = 0; c < kPerLane; ++c) means[c] *= shrinks;
    DLMKERN_UNROLL
    for (int t = 0; t < kKeys; ++t) {
      if (first + t >= end) break;
      const Real weight = exp(score[t] - base);
      total += weight;
      const auto value = row.seen(a.v, a.v_cached, first + t);
      DLMKERN_UNROLL
      for (int c = 0; c < kPerLane; ++c) {
        const int64_t e = from_column + c * kWarp + Row<T>::lane();
        if (e < a.d) means[c] += weight * widen(value[e]);
      }
    }
  }
};

// What the warps have gathered, for the block to put together.
template <class Real>
struct Gathered {
  Real peak[kWarps], total[kWarps], means[kWarps][kColumns];
};

// By the block.
template <class T>
__device__ void compute_anew(const Row<T>& row, Gathered<Wide<T>>& gathered) {
  using Real = Wide<T>;
  constexpr int kKeys = Softmax<T>::kKeys;
  const Arguments<T>& a = row.a;
  const int64_t end = a.end_of(row.b);
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  for (int64_t from_column = 0; from_column < a.d; from_column += kColumns) {
    Softmax<T> softmax;
    for (int64_t first = warp * kKeys; first < end; first += kWarps * kKeys) {
      softmax.take(row, first, end, from_column);
    }
    __syncthreads();  // the threads are done with what was gathered before
    gathered.peak[warp] = softmax.peak;
    gathered.total[warp] = softmax.total;
    DLMKERN_UNROLL
    for (int c = 0; c < kPerLane; ++c) gathered.means[warp][c * kWarp + Row<T>::lane()] = softmax.means[c];
    __syncthreads();
    Real peak = -INFINITY, total = 0, mean = 0;
    for (const Real each : gathered.peak) peak = max(peak, each);
    const int column = static_cast<int>(threadIdx.x) % kColumns;
    for (int w = 0; w < kWarps; ++w) {
      const Real share = exp(gathered.peak[w] - base_of(peak));
      total += gathered.total[w] * share;
      mean += gathered.means[w][column] * share;
    }
    const int64_t e = from_column + column;
    if (static_cast<int>(threadIdx.x) == column && e < a.d) {
      row.line(a.out, row.h, row.i)[e] = static_cast<T>(total == 0 ? Real{0} : mean / total);
    }
    if (threadIdx.x == 0) a.lse(row.b, row.h, row.i) = peak + log(total);
  }
}

// Some of the block's rows, a bit for each.
using Rows = unsigned[kRows / kWarp];

template <class Body>
__device__ void each_row(const Rows& rows, Body body) {
  for (int word = 0; word < kRows / kWarp; ++word) {
    for (unsigned left = rows[word]; left != 0; left &= left - 1) body(word * kWarp + __ffs(left) - 1);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) diagonal_correction(Arguments<T> a) {
  DLMKERN_SHARED(Rows, chosen);
  DLMKERN_SHARED(Rows, anew);
  DLMKERN_SHARED(Gathered<Wide<T>>, gathered);
  const int64_t tiles = divide_up<int64_t>(a.n, kRows);
  const int64_t b = blockIdx.x / tiles / a.heads, h = blockIdx.x / tiles % a.heads;
  const int64_t first = blockIdx.x % tiles * kRows;
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  const unsigned bits = __ballot_sync(kAllLanes, a.column_of(b, first + threadIdx.x) >= 0);
  if (lane == 0) {
    chosen[warp] = bits;
    anew[warp] = 0;
  }
  if (!__syncthreads_or(bits != 0)) return;

  const auto row_of = [&](int r) { return Row<T>{a, b, h, first + r, a.column_of(b, first + r)}; };
  int turn = 0;
  each_row(chosen, [&](int r) {
    if (turn++ % kWarps != warp || row_of(r).correct()) return;
    if (lane == 0) atomicOr(&anew[r / kWarp], 1u << (r % kWarp));
  });
  __syncthreads();
  each_row(anew, [&](int r) { compute_anew(row_of(r), gathered); });
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cuda_diagonal_correction(const dlmkern_view* out, const dlmkern_view* lse,
                                                const dlmkern_view* q, const dlmkern_view* k,
                                                const dlmkern_view* v, const dlmkern_view* k_cached,
                                                const dlmkern_view* v_cached, const dlmkern_view* seeds,
                                                const dlmkern_view* lengths, const dlmkern_view* positions,
                                                int shift, double scale, double recompute_below,
                                                void* stream) {
  DLMKERN_TRY(check_diagonal_correction(out, lse, q, k, v, k_cached, v_cached, seeds, lengths, positions,
                                        shift, scale, recompute_below));
  const int64_t B = q->shape[0], heads = q->shape[1], n = q->shape[2], d = q->shape[3];
  if (B == 0 || heads == 0 || n == 0) return DLMKERN_OK;
  const int64_t tiles = divide_up<int64_t>(n, kRows);
  if (!fits_grid(B * heads * tiles)) return DLMKERN_ERROR_SHAPE;
  return with_float_type(q->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Arguments<T> arguments{tensor_of<T>(out),
                                 tensor_of<Wide<T>>(lse),
                                 tensor_of<const T>(q),
                                 tensor_of<const T>(k),
                                 tensor_of<const T>(v),
                                 tensor_of<const T>(k_cached),
                                 tensor_of<const T>(v_cached),
                                 tensor_of<const uint8_t>(seeds),
                                 tensor_of<const int64_t>(lengths),
                                 tensor_of<const int64_t>(positions),
                                 heads,
                                 heads / k->shape[1],
                                 n,
                                 k_cached->shape[2],
                                 d,
                                 shift,
                                 scale,
                                 recompute_below};
    DLMKERN_LAUNCH(diagonal_correction<T>, static_cast<unsigned>(B * heads * tiles), kThreads, 0,
                   static_cast<cudaStream_t>(stream))
    (arguments);
    return launch_result();
  });
}
