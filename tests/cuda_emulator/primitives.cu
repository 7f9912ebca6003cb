// One small kernel for each thing the emulator offers; test_emulator.py compares them with their definitions.
#include <string>

#include "dlmkern_cuda.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Call {
  unsigned mask;
  int operand;
  int width;
};

// out[t] = operation(in[t]) for the lanes of the mask.
template <class Operation>
__global__ void apply_in_warp(Operation operation, Call call, const int* in, int* out) {
  if (call.mask >> threadIdx.x & 1) out[threadIdx.x] = static_cast<int>(operation(in[threadIdx.x], call));
}

template <class Operation>
__global__ void apply_in_block(Operation operation, const int* in, int* out) {
  out[threadIdx.x] = static_cast<int>(operation(in[threadIdx.x]));
}

// Every thread applies the update to one cell and keeps the value it found there.
template <class T, class Update>
__global__ void update_cell(Update update, const T* in, T* cell, T* found) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  found[i] = update(cell, in[i]);
}

template <class Operation>
int warp(Operation operation, Call call, const int* in, int* out) {
  DLMKERN_LAUNCH(apply_in_warp<Operation>, 1, 32, 0, nullptr)(operation, call, in, out);
  return cudaGetLastError();
}

template <class Operation>
int block(Operation operation, int threads, const int* in, int* out) {
  DLMKERN_LAUNCH(apply_in_block<Operation>, 1, threads, 0, nullptr)(operation, in, out);
  return cudaGetLastError();
}

template <class T, class Update>
int update(Update update, const void* in, void* cell, void* found) {
  const auto kernel = update_cell<T, Update>;
  DLMKERN_LAUNCH(kernel, 2, 48, 0, nullptr)
  (update, static_cast<const T*>(in), static_cast<T*>(cell), static_cast<T*>(found));
  return cudaGetLastError();
}

template <class T>
int update_any(const std::string& name, const void* in, void* cell, void* found) {
  if (name == "add") return update<T>([](T* p, T v) { return atomicAdd(p, v); }, in, cell, found);
  if constexpr (!std::is_same_v<T, double>) {
    if (name == "exch") return update<T>([](T* p, T v) { return atomicExch(p, v); }, in, cell, found);
  }
  if constexpr (std::is_integral_v<T>) {
    if (name == "min") return update<T>([](T* p, T v) { return atomicMin(p, v); }, in, cell, found);
    if (name == "max") return update<T>([](T* p, T v) { return atomicMax(p, v); }, in, cell, found);
    if (name == "or") return update<T>([](T* p, T v) { return atomicOr(p, v); }, in, cell, found);
    if (name == "and") return update<T>([](T* p, T v) { return atomicAnd(p, v); }, in, cell, found);
    if (name == "cas") {  // an addition by compare-and-swap
      const auto add = [](T* p, T v) {
        T seen = *p, expected;
        do {
          expected = seen;
          seen = atomicCAS(p, expected, expected + v);
        } while (seen != expected);
        return seen;
      };
      return update<T>(add, in, cell, found);
    }
  }
  return -1;
}

__global__ void write_indices(uint3* threads, uint3* blocks) {
  const unsigned in_block = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned i = block * (blockDim.x * blockDim.y * blockDim.z) + in_block;
  threads[i] = threadIdx;
  blocks[i] = blockIdx;
}

// Copies shared memory out as the block finds it, then leaves values behind.
__global__ void dump_shared(float* found) {
  DLMKERN_SHARED(float[32], fixed);
  DLMKERN_DYNAMIC_SHARED(float, sized);
  const unsigned t = threadIdx.x;
  found[blockIdx.x * 64 + t] = fixed[t];
  found[blockIdx.x * 64 + 32 + t] = sized[t];
  fixed[t] = sized[t] = 1.f;
}

__global__ void reverse_in_shared(const float* in, float* out) {
  DLMKERN_DYNAMIC_SHARED(float, buffer);
  buffer[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

__global__ void fill_shared_beyond_limit(float* out) {
  DLMKERN_SHARED(float[48 * 256], first);
  DLMKERN_SHARED(float[1], second);
  first[0] = second[0] = 1.f;
  out[0] = first[0] + second[0];
}

__global__ void convert(const float* in, __half* half, __nv_bfloat16* brain, float* back) {
  const unsigned t = threadIdx.x;
  half[t] = __float2half(in[t]);
  brain[t] = __float2bfloat16(in[t]);
  back[2 * t] = __half2float(half[t]);
  back[2 * t + 1] = __bfloat162float(brain[t]);
}

__global__ void copy_vectors(const float4* in, float4* out) { out[threadIdx.x] = __ldg(in + threadIdx.x); }

__global__ void shuffle_types(double* doubles, float* halves) {
  const int t = static_cast<int>(threadIdx.x);
  doubles[t] = __shfl_xor_sync(0xffffffffu, 0.1 * t, 1);
  halves[t] = __half2float(__shfl_xor_sync(0xffffffffu, __float2half(0.5f * static_cast<float>(t)), 1));
}

__global__ void evaluate(const float* in, float* out) {
  const float x = in[threadIdx.x];
  out[4 * threadIdx.x] = __expf(x);
  out[4 * threadIdx.x + 1] = __logf(fabsf(x));
  out[4 * threadIdx.x + 2] = exp2f(x);
  out[4 * threadIdx.x + 3] = __int_as_float(__float_as_int(x)) + __uint_as_float(__float_as_uint(x));
}

__global__ void do_nothing() {}

__global__ void count_rounds(int rounds, int* out) {
  int sum = 0;
  for (int r = 0; r < rounds; ++r) {
    __syncthreads();
    sum += __shfl_xor_sync(0xffffffffu, r, 1);
  }
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

}  // namespace

EXPORT int warp_primitive(const char* name_, unsigned mask, int operand, int width, const int* in, int* out) {
  const std::string name = name_;
  const Call call{mask, operand, width};
  using std::uint32_t;
  if (name == "shfl")
    return warp([](int v, Call c) { return __shfl_sync(c.mask, v, c.operand, c.width); }, call, in, out);
  if (name == "shfl_up")
    return warp([](int v, Call c) { return __shfl_up_sync(c.mask, v, c.operand, c.width); }, call, in, out);
  if (name == "shfl_down")
    return warp([](int v, Call c) { return __shfl_down_sync(c.mask, v, c.operand, c.width); }, call, in, out);
  if (name == "shfl_xor")
    return warp([](int v, Call c) { return __shfl_xor_sync(c.mask, v, c.operand, c.width); }, call, in, out);
  if (name == "ballot")
    return warp([](int v, Call c) { return __ballot_sync(c.mask, v & 1); }, call, in, out);
  if (name == "any") return warp([](int v, Call c) { return __any_sync(c.mask, v & 1); }, call, in, out);
  if (name == "all") return warp([](int v, Call c) { return __all_sync(c.mask, v & 1); }, call, in, out);
  if (name == "match_any")
    return warp([](int v, Call c) { return __match_any_sync(c.mask, v); }, call, in, out);
  if (name == "add") return warp([](int v, Call c) { return __reduce_add_sync(c.mask, v); }, call, in, out);
  if (name == "min") return warp([](int v, Call c) { return __reduce_min_sync(c.mask, v); }, call, in, out);
  if (name == "max") return warp([](int v, Call c) { return __reduce_max_sync(c.mask, v); }, call, in, out);
  if (name == "min_unsigned")
    return warp([](int v, Call c) { return __reduce_min_sync(c.mask, uint32_t(v)); }, call, in, out);
  if (name == "max_unsigned")
    return warp([](int v, Call c) { return __reduce_max_sync(c.mask, uint32_t(v)); }, call, in, out);
  if (name == "or")
    return warp([](int v, Call c) { return __reduce_or_sync(c.mask, uint32_t(v)); }, call, in, out);
  if (name == "and")
    return warp([](int v, Call c) { return __reduce_and_sync(c.mask, uint32_t(v)); }, call, in, out);
  return -1;
}

EXPORT int block_primitive(const char* name_, int threads, const int* in, int* out) {
  const std::string name = name_;
  if (name == "count") return block([](int v) { return __syncthreads_count(v); }, threads, in, out);
  if (name == "or") return block([](int v) { return __syncthreads_or(v); }, threads, in, out);
  if (name == "and") return block([](int v) { return __syncthreads_and(v); }, threads, in, out);
  return -1;
}

EXPORT int atomic_primitive(const char* name, const char* type_, const void* in, void* cell, void* found) {
  const std::string type = type_;
  if (type == "int32") return update_any<int>(name, in, cell, found);
  if (type == "uint32") return update_any<unsigned>(name, in, cell, found);
  if (type == "uint64") return update_any<unsigned long long>(name, in, cell, found);
  if (type == "float32") return update_any<float>(name, in, cell, found);
  if (type == "float64") return update_any<double>(name, in, cell, found);
  return -1;
}

EXPORT int indices(const unsigned* grid, const unsigned* block, uint3* threads, uint3* blocks) {
  DLMKERN_LAUNCH(write_indices, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), 0,
                 nullptr)
  (threads, blocks);
  return cudaGetLastError();
}

EXPORT int shared_as_found(int blocks, float* found) {
  DLMKERN_LAUNCH(dump_shared, blocks, 32, 32 * sizeof(float), nullptr)(found);
  return cudaGetLastError();
}

EXPORT int reverse(int threads, const float* in, float* out) {
  DLMKERN_LAUNCH(reverse_in_shared, 1, threads, threads * sizeof(float), nullptr)(in, out);
  return cudaGetLastError();
}

EXPORT int too_much_static_shared(float* out) {
  DLMKERN_LAUNCH(fill_shared_beyond_limit, 1, 1, 0, nullptr)(out);
  return cudaGetLastError();
}

EXPORT int conversions(const float* in, void* half, void* brain, float* back) {
  DLMKERN_LAUNCH(convert, 1, 32, 0, nullptr)
  (in, static_cast<__half*>(half), static_cast<__nv_bfloat16*>(brain), back);
  return cudaGetLastError();
}

EXPORT int vectors(const void* in, void* out) {
  DLMKERN_LAUNCH(copy_vectors, 1, 8, 0, nullptr)(static_cast<const float4*>(in), static_cast<float4*>(out));
  return cudaGetLastError();
}

EXPORT int shuffled_types(double* doubles, float* halves) {
  DLMKERN_LAUNCH(shuffle_types, 1, 32, 0, nullptr)(doubles, halves);
  return cudaGetLastError();
}

EXPORT int functions(const float* in, float* out) {
  DLMKERN_LAUNCH(evaluate, 1, 32, 0, nullptr)(in, out);
  return cudaGetLastError();
}

EXPORT int launch(const unsigned* grid, const unsigned* block, std::size_t shared_bytes, int allowed_bytes) {
  if (allowed_bytes >= 0) {
    const auto error =
        cudaFuncSetAttribute(do_nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed_bytes);
    if (error != cudaSuccess) return error;
  }
  DLMKERN_LAUNCH(do_nothing, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]),
                 shared_bytes, nullptr)
  ();
  return cudaGetLastError();
}

EXPORT int rounds(int blocks, int threads, int rounds, int* out) {
  DLMKERN_LAUNCH(count_rounds, blocks, threads, 0, nullptr)(rounds, out);
  return cudaGetLastError();
}
