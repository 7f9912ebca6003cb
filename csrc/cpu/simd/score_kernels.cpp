#include "score_kernels.h"

#include <algorithm>
#include <limits>

#include "vector.h"

namespace dlmkern {
namespace DLMKERN_ISA {

namespace {

// A tile has two vectors of scores in each of its rows. AVX-512 has 32 registers, the others 16.
constexpr int64_t kRows = DLMKERN_VECTOR_BYTES == 64 ? 12 : 6;

template <class Vector>
constexpr int64_t kWidth = sizeof(Vector) / sizeof(Vector{}[0]);

template <class Vector>
void store_vector(void* address, Vector value) {
  std::memcpy(address, &value, sizeof value);
}

// exp(d) for any d, but exp(-87) for what is less.
Floats exp_of_any(Floats d) {
  constexpr float kLimit = 88.72f;  // just before infinity
  const Floats e = exp_of(smaller(splat(kLimit), larger(splat(kExpFloor), d)));
  return e + (Floats)((d > kLimit) & 0x7f800000);
}

Doubles exp_of_any(Doubles d) {
  for (int lane = 0; lane < kWidth<Doubles>; ++lane) d[lane] = __builtin_exp(d[lane]);
  return d;
}

template <class Vector, class Scalar>
void tile(const Scalar* queries, const Scalar* keys, int64_t size, Scalar* scores, int64_t stride) {
  Vector left[kRows] = {}, right[kRows] = {};
  for (int64_t k = 0; k < size; ++k) {
    const Vector x = load_vector<Vector>(keys), y = load_vector<Vector>(keys + kWidth<Vector>);
#pragma GCC unroll 12
    for (int64_t i = 0; i < kRows; ++i) {
      left[i] += queries[i] * x;
      right[i] += queries[i] * y;
    }
    queries += kRows;
    keys += 2 * kWidth<Vector>;
  }
#pragma GCC unroll 12
  for (int64_t i = 0; i < kRows; ++i) {
    store_vector(scores + i * stride, left[i]);
    store_vector(scores + i * stride + kWidth<Vector>, right[i]);
  }
}

template <class Vector, class Scalar>
Scalar max(const Scalar* scores, int64_t n) {
  Vector a = Vector{} - std::numeric_limits<Scalar>::infinity(), b = a;
  for (int64_t j = 0; j < n; j += 2 * kWidth<Vector>) {
    a = larger(load_vector<Vector>(scores + j), a);
    b = larger(load_vector<Vector>(scores + j + kWidth<Vector>), b);
  }
  const Vector both = larger(a, b);
  Scalar result = both[0];
  for (int lane = 1; lane < kWidth<Vector>; ++lane) result = both[lane] > result ? both[lane] : result;
  return result;
}

template <class Vector, class Scalar>
double mass(const Scalar* scores, int64_t n, Scalar shift) {
  Vector a = {}, b = {};
  for (int64_t j = 0; j < n; j += 2 * kWidth<Vector>) {
    a += exp_of_any(load_vector<Vector>(scores + j) - shift);
    b += exp_of_any(load_vector<Vector>(scores + j + kWidth<Vector>) - shift);
  }
  double result = 0;
  for (int lane = 0; lane < kWidth<Vector>; ++lane) result += static_cast<double>(a[lane] + b[lane]);
  return result;
}

template <class Vector, class Scalar>
void add_weights(const Scalar* scores, int64_t n, Scalar shift, Scalar factor, Scalar* weights) {
  for (int64_t j = 0; j < n; j += kWidth<Vector>) {
    const Vector e = exp_of_any(load_vector<Vector>(scores + j) - shift);
    store_vector(weights + j, load_vector<Vector>(weights + j) + factor * e);
  }
}

template <class Vector, class Scalar>
constexpr ScoreKernels<Scalar> kernels_of() {
  static_assert(std::max(kRows, 2 * kWidth<Vector>) <= kMaxPanelWidth);
  return {kRows,
          2 * kWidth<Vector>,
          tile<Vector, Scalar>,
          max<Vector, Scalar>,
          mass<Vector, Scalar>,
          add_weights<Vector, Scalar>};
}

}  // namespace

extern const ScoreKernelTable kScoreTable = {kernels_of<Floats, float>(), kernels_of<Doubles, double>()};

}  // namespace DLMKERN_ISA
}  // namespace dlmkern
