// Access to the elements of a dlmkern_view on the host. Nothing here assumes an aligned pointer.
#pragma once

#include <cstring>
#include <type_traits>

#include "dlmkern.h"
#include "dtype.h"

namespace dlmkern {

inline double to_double(double value) { return value; }
template <class T>
double to_double(T value) {
  return static_cast<double>(to_float(value));
}

// What numbers of type T are computed in: double for double, float for the others.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
Wide<T> widen(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return to_float(value);
  }
}

template <class T>
T rounded(Wide<T> value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return round_to<T>(value);
  }
}

template <class T>
T load(const T* address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

template <class T>
T* address_of(const dlmkern_view& view, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  int64_t offset = i * view.stride[0];
  if (view.ndim > 1) offset += j * view.stride[1];
  if (view.ndim > 2) offset += k * view.stride[2];
  if (view.ndim > 3) offset += l * view.stride[3];
  return static_cast<T*>(view.data) + offset;
}

template <class T>
struct DtypeOf;
template <>
struct DtypeOf<double> {
  static constexpr int32_t value = DLMKERN_FLOAT64;
};
template <>
struct DtypeOf<float> {
  static constexpr int32_t value = DLMKERN_FLOAT32;
};
template <>
struct DtypeOf<BFloat16> {
  static constexpr int32_t value = DLMKERN_BFLOAT16;
};
template <>
struct DtypeOf<Float16> {
  static constexpr int32_t value = DLMKERN_FLOAT16;
};

// Calls `body` with a null pointer of the element type that a float view has.
template <class Body>
decltype(auto) with_float_type(int32_t dtype, Body&& body) {
  switch (dtype) {
    case DLMKERN_FLOAT64:
      return body(static_cast<double*>(nullptr));
    case DLMKERN_FLOAT32:
      return body(static_cast<float*>(nullptr));
    case DLMKERN_BFLOAT16:
      return body(static_cast<BFloat16*>(nullptr));
    default:
      return body(static_cast<Float16*>(nullptr));
  }
}

// The few numbers of a position are read and written one at a time, in float64, from float64 or float32.
inline double read_float(const dlmkern_view& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  if (view.dtype == DLMKERN_FLOAT64) return load(address_of<double>(view, i, j, k));
  return static_cast<double>(load(address_of<float>(view, i, j, k)));
}

inline int64_t read_int64(const dlmkern_view& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  return load(address_of<int64_t>(view, i, j, k));
}

inline bool read_bool(const dlmkern_view& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  return *address_of<uint8_t>(view, i, j, k) != 0;
}

template <class T>
void store(T* address, T value) {
  std::memcpy(address, &value, sizeof value);
}

inline void write_float(const dlmkern_view& view, double value, int64_t i, int64_t j = 0, int64_t k = 0) {
  if (view.dtype == DLMKERN_FLOAT64) {
    store(address_of<double>(view, i, j, k), value);
  } else {
    store(address_of<float>(view, i, j, k), static_cast<float>(value));
  }
}

inline void write_int64(const dlmkern_view& view, int64_t value, int64_t i, int64_t j = 0, int64_t k = 0) {
  store(address_of<int64_t>(view, i, j, k), value);
}

inline void write_bool(const dlmkern_view& view, bool value, int64_t i, int64_t j = 0, int64_t k = 0) {
  *address_of<uint8_t>(view, i, j, k) = value ? 1 : 0;
}

// A strided row of V logits.
template <class T>
struct Row {
  const T* data;
  int64_t stride;

  double operator[](int64_t v) const { return to_double(load(data + v * stride)); }
};

template <class T>
Row<T> row_of(const dlmkern_view& view, int64_t b, int64_t i) {
  return {address_of<T>(view, b, i), view.stride[2]};
}

}  // namespace dlmkern
