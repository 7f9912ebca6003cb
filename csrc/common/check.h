// Validation that every entry point of the C API shares. Functions return DLMKERN_OK or an error code.
#pragma once

#include <initializer_list>
#include <new>
#include <stdexcept>

#include "dlmkern.h"

// Leaves the enclosing function with the first error.
#define DLMKERN_TRY(expression)                                       \
  do {                                                                \
    if (const int dlmkern_error = (expression)) return dlmkern_error; \
  } while (false)

namespace dlmkern {

constexpr unsigned dtype_bit(int dtype) { return 1u << dtype; }

constexpr unsigned kReal = dtype_bit(DLMKERN_FLOAT64) | dtype_bit(DLMKERN_FLOAT32);
constexpr unsigned kFloat = kReal | dtype_bit(DLMKERN_BFLOAT16) | dtype_bit(DLMKERN_FLOAT16);
constexpr unsigned kFloat64 = dtype_bit(DLMKERN_FLOAT64);
constexpr unsigned kFloat32 = dtype_bit(DLMKERN_FLOAT32);
constexpr unsigned kInt64 = dtype_bit(DLMKERN_INT64);
constexpr unsigned kBool = dtype_bit(DLMKERN_BOOL);

constexpr int64_t kAnySize = -1;

// The most elements that a view may span, so that sizes and the bytes of a workspace are computed without
// overflow.
constexpr int64_t kMostElements = int64_t{1} << 56;

// An input that must be there, with one of `dtypes` and this shape.
inline int check_input(const dlmkern_view* view, unsigned dtypes, std::initializer_list<int64_t> shape) {
  if (view == nullptr) return DLMKERN_ERROR_NULL;
  if (view->ndim != static_cast<int32_t>(shape.size())) return DLMKERN_ERROR_SHAPE;
  int64_t elements = 1;
  int axis = 0;
  for (const int64_t size : shape) {
    if (view->shape[axis] < 0 || view->stride[axis] < 0) return DLMKERN_ERROR_SHAPE;
    if (size != kAnySize && view->shape[axis] != size) return DLMKERN_ERROR_SHAPE;
    if (__builtin_mul_overflow(elements, view->shape[axis], &elements)) return DLMKERN_ERROR_SHAPE;
    ++axis;
  }
  if (elements > kMostElements) return DLMKERN_ERROR_SHAPE;
  if (view->dtype < DLMKERN_FLOAT64 || view->dtype > DLMKERN_BOOL) return DLMKERN_ERROR_DTYPE;
  if ((dtype_bit(view->dtype) & dtypes) == 0) return DLMKERN_ERROR_DTYPE;
  if (view->data == nullptr && elements != 0) return DLMKERN_ERROR_NULL;
  return DLMKERN_OK;
}

inline int check_optional_input(const dlmkern_view* view, unsigned dtypes,
                                std::initializer_list<int64_t> shape) {
  return view == nullptr ? DLMKERN_OK : check_input(view, dtypes, shape);
}

// As an input, and no two elements may share an address by a stride of zero.
inline int check_output(const dlmkern_view* view, unsigned dtypes, std::initializer_list<int64_t> shape) {
  DLMKERN_TRY(check_input(view, dtypes, shape));
  bool empty = false, shared = false;
  for (int axis = 0; axis < view->ndim; ++axis) {
    empty |= view->shape[axis] == 0;
    shared |= view->shape[axis] > 1 && view->stride[axis] == 0;
  }
  return shared && !empty ? DLMKERN_ERROR_SHAPE : DLMKERN_OK;
}

inline int check_optional_output(const dlmkern_view* view, unsigned dtypes,
                                 std::initializer_list<int64_t> shape) {
  return view == nullptr ? DLMKERN_OK : check_output(view, dtypes, shape);
}

// Logits or probabilities: [B, n, V] float with V >= 1.
inline int check_rows(const dlmkern_view* view) {
  DLMKERN_TRY(check_input(view, kFloat, {kAnySize, kAnySize, kAnySize}));
  return view->shape[2] >= 1 ? DLMKERN_OK : DLMKERN_ERROR_SHAPE;
}

// Runs `body` and turns a failed allocation into an error code: no exception may leave the C API.
template <class Body>
int guarded(Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return DLMKERN_ERROR_MEMORY;
  } catch (const std::length_error&) {
    return DLMKERN_ERROR_MEMORY;
  }
}

}  // namespace dlmkern
