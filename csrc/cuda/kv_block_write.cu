// One launch, one pass: a block of threads for the key of each position and one for its value, over all
// heads.
//
// A position of H heads costs 4 H d elements of traffic, keys and values read and written, and 6 H d with
// drift, which reads what is overwritten; the rotation adds two rows of the tables, which its heads share in
// the first-level cache. Arithmetic is negligible, so memory is the bound: 32 KB a position for H d = 4096 in
// bfloat16 (48 KB with drift), 1 MB for 32 positions. That takes 0.3 us at 3.3 TB/s, less than the launch;
// what counts for a block of a decoder's step is that there is one launch, and for a prompt the vectors of 16
// bytes.
#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 512;
constexpr int kVectorBytes = 16;

// N elements that one thread reads or writes at once.
template <class T, int N>
struct alignas(N * sizeof(T) < kVectorBytes ? N * sizeof(T) : kVectorBytes) Chunk {
  T values[N];
};

template <int N, class T>
__device__ Chunk<T, N> read(const T* address) {
  return *reinterpret_cast<const Chunk<T, N>*>(address);
}

template <class T, int N>
__device__ void write(T* address, const Chunk<T, N>& chunk) {
  *reinterpret_cast<Chunk<T, N>*>(address) = chunk;
}

// What compares an old row with the new one.
template <class Real>
struct Drift {
  Real product, old_square, new_square, change_square;

  template <class T, int N>
  __device__ void add(const Chunk<T, N>& old_chunk, const Chunk<T, N>& new_chunk) {
    DLMKERN_UNROLL
    for (int k = 0; k < N; ++k) {
      const Real old_value = widen(old_chunk.values[k]), new_value = widen(new_chunk.values[k]);
      const Real change = new_value - old_value;
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

  __device__ float cosine() const {
    return static_cast<float>(product / (sqrt(old_square) * sqrt(new_square)));
  }
  __device__ float distance() const { return static_cast<float>(sqrt(change_square) / sqrt(old_square)); }
};

// The sum over the block's threads, for thread 0. All threads.
template <class Real>
__device__ Drift<Real> sum_over_block(Drift<Real> drift) {
  DLMKERN_SHARED(Drift<Real>[kThreads / kWarp], of_warp);
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const auto from = [&](Real value) { return __shfl_down_sync(kAllLanes, value, offset); };
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

// The rotation of the pairs (low, high) by row p of the tables, from column e on; the halves of a table may
// differ. Computed in the wider of the two dtypes.
template <class Real, class T, int N>
__device__ void rotate(const Tensor<Real>& cos, const Tensor<Real>& sin, int64_t p, int e, int half,
                       Chunk<T, N>& low, Chunk<T, N>& high) {
  const auto cos_low = read<N>(cos.address(p, e)), cos_high = read<N>(cos.address(p, e + half));
  const auto sin_low = read<N>(sin.address(p, e)), sin_high = read<N>(sin.address(p, e + half));
  DLMKERN_UNROLL
  for (int k = 0; k < N; ++k) {
    const auto x = widen(low.values[k]), y = widen(high.values[k]);
    low.values[k] = static_cast<T>(x * cos_low.values[k] - y * sin_low.values[k]);
    high.values[k] = static_cast<T>(y * cos_high.values[k] + x * sin_high.values[k]);
  }
}

template <class T>
struct Arguments {
  Tensor<T> k_cache, v_cache;
  Tensor<const T> k, v;
  Tensor<const int64_t> positions;
  RealTensor cos, sin;
  Tensor<float> drift;
  int64_t n, L;
  int H, d;
};

// N is 1 for what can't be read by vectors.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, 2) kv_block_write(Arguments<T> a) {
  const bool is_value = blockIdx.x % 2 != 0;
  const int64_t row = blockIdx.x / 2, b = row / a.n, i = row % a.n;
  const int64_t p = a.positions(b, i);
  const auto write_drift = [&](float cosine, float distance) {
    if (!a.drift || threadIdx.x != 0) return;
    a.drift(is_value ? 2 : 0, b, i) = cosine;
    a.drift(is_value ? 3 : 1, b, i) = distance;
  };
  if (p < 0 || p >= a.L) return write_drift(NAN, NAN);

  const Tensor<T> cache = is_value ? a.v_cache : a.k_cache;
  const Tensor<const T> fresh = is_value ? a.v : a.k;
  const bool rotated = a.cos && !is_value;
  const int half = a.d / 2, chunks = (rotated ? half : a.d) / N;  // in a head
  Drift<Wide<T>> drift{};
  for (int task = threadIdx.x; task < a.H * chunks; task += blockDim.x) {
    const int h = task / chunks, e = task % chunks * N;
    T* const place = cache.address(b, h, p, e);
    auto low = read<N>(fresh.address(b, h, i, e));
    if (!rotated) {
      if (a.drift) drift.add(read<N>(place), low);
      write(place, low);
      continue;
    }
    T* const high_place = cache.address(b, h, p, e + half);
    auto high = read<N>(fresh.address(b, h, i, e + half));
    if (a.cos.single) {
      rotate(a.cos.single, a.sin.single, p, e, half, low, high);
    } else {
      rotate(a.cos.twice, a.sin.twice, p, e, half, low, high);
    }
    if (a.drift) {
      drift.add(read<N>(place), low);
      drift.add(read<N>(high_place), high);
    }
    write(place, low);
    write(high_place, high);
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
  DLMKERN_TRY(check_output(k_cache, kFloat, {kAnySize, kAnySize, kAnySize, kAnySize}));
  const int64_t B = k_cache->shape[0], H = k_cache->shape[1], L = k_cache->shape[2], d = k_cache->shape[3];
  const unsigned dtype = dtype_bit(k_cache->dtype);
  DLMKERN_TRY(check_output(v_cache, dtype, {B, H, L, d}));
  DLMKERN_TRY(check_input(k, dtype, {B, H, kAnySize, d}));
  const int64_t n = k->shape[2];
  DLMKERN_TRY(check_input(v, dtype, {B, H, n, d}));
  DLMKERN_TRY(check_input(positions, kInt64, {B, n}));
  if ((cos == nullptr) != (sin == nullptr)) return DLMKERN_ERROR_NULL;
  if (cos != nullptr) {
    DLMKERN_TRY(check_input(cos, kReal, {kAnySize, d}));
    DLMKERN_TRY(check_input(sin, dtype_bit(cos->dtype), {cos->shape[0], d}));
    if (cos->shape[0] < L || d % 2 != 0) return DLMKERN_ERROR_SHAPE;
  }
  DLMKERN_TRY(check_optional_output(drift, kFloat32, {4, B, n}));
  if (B == 0 || n == 0) return DLMKERN_OK;
  if (!rows_fit_grid(B, n) || !fits_grid(2 * B * n) || !fits_grid(H * d)) return DLMKERN_ERROR_SHAPE;

  return with_float_type(k_cache->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Arguments<T> arguments{tensor_of<T>(k_cache),
                                 tensor_of<T>(v_cache),
                                 tensor_of<const T>(k),
                                 tensor_of<const T>(v),
                                 tensor_of<const int64_t>(positions),
                                 real_tensor_of(cos),
                                 real_tensor_of(sin),
                                 tensor_of<float>(drift),
                                 n,
                                 L,
                                 static_cast<int>(H),
                                 static_cast<int>(d)};
    constexpr int kVector = kVectorBytes / sizeof(T);
    bool by_vectors = d % (cos == nullptr ? kVector : 2 * kVector) == 0;
    for (const dlmkern_view* view : {k_cache, v_cache, k, v}) by_vectors &= is_aligned(view, sizeof(T));
    for (const dlmkern_view* view : {cos, sin}) {
      if (view == nullptr) continue;
      by_vectors &= is_aligned(view, view->dtype == DLMKERN_FLOAT32 ? sizeof(float) : sizeof(double));
    }
    const int64_t tasks = divide_up<int64_t>(H * d / (by_vectors ? kVector : 1), kWarp) * kWarp;
    const auto threads = static_cast<unsigned>(min(max(tasks, int64_t{kWarp}), int64_t{kThreads}));
    const auto kernel = by_vectors ? kv_block_write<T, kVector> : kv_block_write<T, 1>;
    DLMKERN_LAUNCH(kernel, static_cast<unsigned>(2 * B * n), threads, 0, static_cast<cudaStream_t>(stream))
    (arguments);
    return launch_result();
  });
}
