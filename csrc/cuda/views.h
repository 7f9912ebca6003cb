// What the device sees of a dlmkern_view, and the few things that every launcher does.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "check.h"
#include "dlmkern_cuda.h"

namespace dlmkern {

// Up to four dimensions with strides in elements; data is null for an argument that was left out.
template <class T>
struct Tensor {
  T* data;
  int64_t stride[4];

  __device__ T* address(int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) const {
    return data + (i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3]);
  }
  __device__ T& operator()(int64_t i, int64_t j = 0, int64_t k = 0) const { return *address(i, j, k); }
  __device__ explicit operator bool() const { return data != nullptr; }
};

template <class T>
Tensor<T> tensor_of(const dlmkern_view* view) {
  Tensor<T> tensor{};
  if (view == nullptr) return tensor;
  tensor.data = static_cast<T*>(view->data);
  for (int axis = 0; axis < view->ndim; ++axis) tensor.stride[axis] = view->stride[axis];
  return tensor;
}

// A float32 or float64 tensor of the few numbers of a position; computed with in float64.
struct RealTensor {
  Tensor<float> single;
  Tensor<double> twice;

  __device__ explicit operator bool() const { return single || twice; }
  __device__ double read(int64_t i, int64_t j = 0, int64_t k = 0) const {
    return single ? single(i, j, k) : twice(i, j, k);
  }
  __device__ void write(double value, int64_t i, int64_t j = 0) const {
    if (single) single(i, j) = static_cast<float>(value);
    if (twice) twice(i, j) = value;
  }
};

inline RealTensor real_tensor_of(const dlmkern_view* view) {
  RealTensor tensor{};
  if (view == nullptr) return tensor;
  if (view->dtype == DLMKERN_FLOAT32) tensor.single = tensor_of<float>(view);
  if (view->dtype == DLMKERN_FLOAT64) tensor.twice = tensor_of<double>(view);
  return tensor;
}

// Arithmetic never happens in a 16-bit type.
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }

// What an element becomes: float, or double for a double.
template <class T>
using Wide = decltype(widen(T{}));

// Calls body with a null pointer of the element type.
template <class Body>
int with_float_type(int dtype, Body body) {
  switch (dtype) {
    case DLMKERN_FLOAT64:
      return body(static_cast<double*>(nullptr));
    case DLMKERN_FLOAT32:
      return body(static_cast<float*>(nullptr));
    case DLMKERN_BFLOAT16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    default:
      return body(static_cast<__half*>(nullptr));
  }
}

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;
// Dynamic shared memory that every device gives a block without being asked, some of the 48 KB left for fixed
// arrays.
constexpr size_t kSharedBytes = 47 * 1024;

template <class T>
__host__ __device__ constexpr T divide_up(T a, T b) {
  return (a + b - 1) / b;
}

inline bool fits_grid(int64_t blocks) { return blocks <= std::numeric_limits<int32_t>::max(); }

inline bool rows_fit_grid(int64_t B, int64_t n) { return fits_grid(B) && fits_grid(n) && fits_grid(B * n); }

// A number of bytes that no workspace has stands for one that can't be computed.
constexpr size_t kTooManyBytes = std::numeric_limits<size_t>::max();

inline size_t product(size_t a, size_t b) {
  size_t result;
  return __builtin_mul_overflow(a, b, &result) ? kTooManyBytes : result;
}

inline int check_workspace(const void* workspace, size_t bytes, size_t needed) {
  if (needed == 0) return DLMKERN_OK;
  const bool aligned = reinterpret_cast<uintptr_t>(workspace) % 256 == 0;
  return workspace != nullptr && aligned && bytes >= needed ? DLMKERN_OK : DLMKERN_ERROR_WORKSPACE;
}

inline int launch_result() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? DLMKERN_OK : DLMKERN_ERROR_CUDA - static_cast<int>(error);
}

}  // namespace dlmkern
