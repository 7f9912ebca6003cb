// One launch and one pass, with a block for the key of a position and another for its value, over all heads.
//
// Keys and values are read and written once: 4 H d elements a position, 6 H d with drift, which also reads
// what is overwritten. The heads share a row of each table in the first-level cache. Arithmetic is
// negligible, so memory is the bound: for H d = 4096 in bfloat16, 32 KB a position (48 KB with drift). A
// block of 32 positions, 1 MB, takes 0.3 us at 3.3 TB/s, less than the launch: there it is the single launch
// that counts, and the vectors of 16 bytes for a prompt of thousands.
#include "check_ops.h"
#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;

// N elements that a thread reads or writes at once.
template <class T, int N>
struct alignas(N * sizeof(T)) Chunk {
  T values[N];
};

// The d numbers of a position for each head, which are contiguous if N is more than 1.
template <class T, int N>
struct Heads {
  T* data;
  int64_t head_stride, stride;

  using Piece = Chunk<std::remove_const_t<T>, N>;

  __device__ T* address(int h, int e) const { return data + (h * head_stride + (N == 1 ? e * stride : e)); }
  __device__ Piece read(int h, int e) const { return *reinterpret_cast<const Piece*>(address(h, e)); }
  __device__ void write(int h, int e, const Piece& piece) const {
    *reinterpret_cast<Piece*>(address(h, e)) = piece;
  }
};

// Sums over the old and the new numbers of a position. In float64, the squares of narrower numbers neither
// overflow nor vanish.
struct Drift {
  double product, old_square, new_square, change_square;

  template <class T, int N>
  __device__ void add(const Chunk<T, N>& old_chunk, const Chunk<T, N>& new_chunk) {
    DLMKERN_UNROLL
    for (int k = 0; k < N; ++k) {
      const double old_value = widen(old_chunk.values[k]), new_value = widen(new_chunk.values[k]);
      const double change = new_value - old_value;
      product += old_value * new_value;
      old_square += old_value * old_value;
      new_square += new_value * new_value;
      change_square += change * change;
    }
  }

  __device__ void add(const Drift& other) {
    product += other.product;
    old_square += other.old_square;
    new_square += other.new_square;
    change_square += other.change_square;
  }

  __device__ double cosine() const { return product / (sqrt(old_square) * sqrt(new_square)); }
  __device__ double distance() const { return sqrt(change_square) / sqrt(old_square); }
};

// The sums of the block's threads together, for thread 0. All threads.
__device__ Drift sum_over_block(Drift drift) {
  DLMKERN_SHARED(Drift[kThreads / kWarp], of_warp);
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const auto from = [&](double value) { return __shfl_down_sync(kAllLanes, value, offset); };
    drift.add(
        {from(drift.product), from(drift.old_square), from(drift.new_square), from(drift.change_square)});
  }
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = drift;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) drift.add(of_warp[warp]);
  }
  return drift;
}

// A position's row of cos or sin, of which all heads read the same.
template <int N, class Real>
__device__ auto table_row(const Tensor<const Real>& table, int64_t p) {
  constexpr int kPart = N * sizeof(Real) <= kVectorBytes ? N : kVectorBytes / sizeof(Real);
  return Heads<const Real, kPart>{table.address(p), 0, table.stride[1]};
}

// Turns the pairs (low, high) of columns e and e + half. The halves of a row of cos or sin may differ.
template <class T, int N, int kPart>
__device__ void rotate(const Heads<const Wide<T>, kPart>& cos, const Heads<const Wide<T>, kPart>& sin, int e,
                       int half, Chunk<T, N>& low, Chunk<T, N>& high) {
  DLMKERN_UNROLL
  for (int first = 0; first < N; first += kPart) {
    const auto cos_low = cos.read(0, e + first), cos_high = cos.read(0, e + half + first);
    const auto sin_low = sin.read(0, e + first), sin_high = sin.read(0, e + half + first);
    DLMKERN_UNROLL
    for (int k = 0; k < kPart; ++k) {
      T &x = low.values[first + k], &y = high.values[first + k];
      const Wide<T> turned_x = widen(x) * cos_low.values[k] - widen(y) * sin_low.values[k];
      const Wide<T> turned_y = widen(y) * cos_high.values[k] + widen(x) * sin_high.values[k];
      x = static_cast<T>(turned_x);
      y = static_cast<T>(turned_y);
    }
  }
}

template <class T>
struct Arguments {
  Tensor<T> k_cache, v_cache;
  Tensor<const T> k, v;
  Tensor<const int64_t> positions;
  Tensor<const Wide<T>> cos, sin;
  Tensor<float> drift;
  int64_t n, L;
  int H, d;
};

// N is 1 for what can't be read by vectors.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) kv_block_write(Arguments<T> a) {
  const bool is_value = blockIdx.x % 2 != 0;
  const int64_t row = blockIdx.x / 2, b = row / a.n, i = row % a.n;
  const int64_t p = a.positions(b, i);
  const auto write_drift = [&](double cosine, double distance) {
    if (!a.drift || threadIdx.x != 0) return;
    a.drift(is_value ? 2 : 0, b, i) = static_cast<float>(cosine);
    a.drift(is_value ? 3 : 1, b, i) = static_cast<float>(distance);
  };
  if (p < 0 || p >= a.L) return write_drift(NAN, NAN);

  const Tensor<T>& cache = is_value ? a.v_cache : a.k_cache;
  const Tensor<const T>& fresh = is_value ? a.v : a.k;
  const Heads<T, N> to{cache.address(b, 0, p), cache.stride[1], cache.stride[3]};
  const Heads<const T, N> from{fresh.address(b, 0, i), fresh.stride[1], fresh.stride[3]};
  Drift drift{};
  const auto put = [&](int h, int e, const Chunk<T, N>& chunk) {
    if (a.drift) drift.add(to.read(h, e), chunk);
    to.write(h, e, chunk);
  };
  // Calls body(h, e) for the chunks in the first `width` columns of every head.
  const auto each_chunk = [&](int width, auto body) {
    const int chunks = width / N;
    for (int task = threadIdx.x; task < a.H * chunks; task += blockDim.x) {
      body(task / chunks, task % chunks * N);
    }
  };
  if (is_value || !a.cos) {
    each_chunk(a.d, [&](int h, int e) { put(h, e, from.read(h, e)); });
  } else {
    const auto cos = table_row<N>(a.cos, p), sin = table_row<N>(a.sin, p);
    const int half = a.d / 2;
    each_chunk(half, [&](int h, int e) {
      Chunk<T, N> low = from.read(h, e), high = from.read(h, e + half);
      rotate(cos, sin, e, half, low, high);
      put(h, e, low);
      put(h, e + half, high);
    });
  }
  if (!a.drift) return;
  drift = sum_over_block(drift);
  write_drift(drift.cosine(), drift.distance());
}

// Whether every row begins at a multiple of a vector and is contiguous.
bool is_aligned(const dlmkern_view* view, size_t element_bytes) {
  const int last = view->ndim - 1;
  if (view->stride[last] != 1 || reinterpret_cast<uintptr_t>(view->data) % kVectorBytes != 0) return false;
  for (int axis = 0; axis < last; ++axis) {
    if (view->stride[axis] * static_cast<int64_t>(element_bytes) % kVectorBytes != 0) return false;
  }
  return true;
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cuda_kv_block_write(const dlmkern_view* k_cache, const dlmkern_view* v_cache,
                                           const dlmkern_view* k, const dlmkern_view* v,
                                           const dlmkern_view* positions, const dlmkern_view* cos,
                                           const dlmkern_view* sin, const dlmkern_view* drift, void* stream) {
  DLMKERN_TRY(check_kv_block_write(k_cache, v_cache, k, v, positions, cos, sin, drift));
  const int64_t B = k->shape[0], H = k->shape[1], n = k->shape[2], d = k->shape[3], L = k_cache->shape[2];
  if (B == 0 || n == 0) return DLMKERN_OK;
  if (!rows_fit_grid(B, n) || !fits_grid(2 * B * n) || !fits_grid(H * d + kThreads))
    return DLMKERN_ERROR_SHAPE;

  return with_float_type(k_cache->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Arguments<T> arguments{tensor_of<T>(k_cache),
                                 tensor_of<T>(v_cache),
                                 tensor_of<const T>(k),
                                 tensor_of<const T>(v),
                                 tensor_of<const int64_t>(positions),
                                 tensor_of<const Wide<T>>(cos),
                                 tensor_of<const Wide<T>>(sin),
                                 tensor_of<float>(drift),
                                 n,
                                 L,
                                 static_cast<int>(H),
                                 static_cast<int>(d)};
    constexpr int kVector = kVectorBytes / sizeof(T);
    bool by_vectors = d % (cos == nullptr ? kVector : 2 * kVector) == 0;
    for (const dlmkern_view* view : {k_cache, v_cache, k, v}) by_vectors &= is_aligned(view, sizeof(T));
    for (const dlmkern_view* view : {cos, sin}) {
      if (view != nullptr) by_vectors &= is_aligned(view, sizeof(Wide<T>));
    }
    const int64_t tasks = divide_up<int64_t>(H * d / (by_vectors ? kVector : 1), kWarp) * kWarp;
    const auto threads = static_cast<unsigned>(min(max(tasks, int64_t{kWarp}), int64_t{kThreads}));
    const auto kernel = by_vectors ? kv_block_write<T, kVector> : kv_block_write<T, 1>;
    DLMKERN_LAUNCH(kernel, static_cast<unsigned>(2 * B * n), threads, 0, static_cast<cudaStream_t>(stream))
    (arguments);
    return launch_result();
  });
}
