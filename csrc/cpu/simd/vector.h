// Vectors of floats in GCC's and Clang's vector extensions: one source for every width. Everything is static,
// so that no symbol of an object for a new instruction set can replace one of the portable objects at link
// time.
#pragma once

#include <cstdint>
#include <cstring>

#include "dtype.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace dlmkern {
namespace DLMKERN_ISA {

typedef float Floats __attribute__((vector_size(DLMKERN_VECTOR_BYTES)));
typedef double Doubles __attribute__((vector_size(DLMKERN_VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(DLMKERN_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(DLMKERN_VECTOR_BYTES)));

constexpr int kLanes = DLMKERN_VECTOR_BYTES / 4;
constexpr int kPair = 2 * kLanes;

// kPair consecutive numbers, in an order that depends only on their type.
struct Pair {
  Floats x, y;
};

static inline Floats splat(float value) { return value - Floats{}; }

// The larger or the smaller of two; if either is NaN, the second. Compilers don't see that the conditional
// operator on vectors is x86's instruction for it. (Some AVX-512 intrinsics have a mask because GCC 12 warns
// inside the plain ones.)
#if defined(__AVX512F__) && DLMKERN_VECTOR_BYTES == 64
static inline Floats larger(Floats a, Floats b) {
  return (Floats)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
}
static inline Floats smaller(Floats a, Floats b) {
  return (Floats)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
}
#elif defined(__AVX__) && DLMKERN_VECTOR_BYTES == 32
static inline Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
static inline Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
#elif defined(__SSE2__) && DLMKERN_VECTOR_BYTES == 16
static inline Floats larger(Floats a, Floats b) { return (Floats)_mm_max_ps((__m128)a, (__m128)b); }
static inline Floats smaller(Floats a, Floats b) { return (Floats)_mm_min_ps((__m128)a, (__m128)b); }
#else
static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
static inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
#endif
static inline Doubles larger(Doubles a, Doubles b) { return a > b ? a : b; }

template <class Vector>
static inline Vector load_vector(const void* address) {
  Vector value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

static inline Pair load_pair(const float* address) {
  return {load_vector<Floats>(address), load_vector<Floats>(address + kLanes)};
}

// A little-endian word holds two numbers: the even ones come out in x, the odd ones in y.
static inline Pair load_pair(const BFloat16* address) {
  const Words words = load_vector<Words>(address);
  return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
}

#if defined(__F16C__) && DLMKERN_VECTOR_BYTES == 32
static inline Pair load_pair(const Float16* address) {
  const auto* const halves = reinterpret_cast<const __m128i*>(address);
  return {(Floats)_mm256_cvtph_ps(_mm_loadu_si128(halves)),
          (Floats)_mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
#elif defined(__AVX512F__) && DLMKERN_VECTOR_BYTES == 64
static inline Pair load_pair(const Float16* address) {
  const auto* const halves = reinterpret_cast<const __m256i*>(address);
  return {(Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(halves)),
          (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(halves + 1))};
}
#else
// `bits` holds a float16 in the upper half of each word.
static inline Floats widen_half(Ints bits) {
  const Ints moved =
      (bits >> 3) & (Ints)(Words{} + 0x8fffe000u);          // sign, exponent and fraction in their places
  const Ints special = (moved & 0x7fffffff) >= 0x0f800000;  // infinity or NaN
  const Floats scaled = (Floats)moved * 0x1p112f;           // corrects the bias, for subnormal numbers too
  return (Floats)((Ints)scaled | (special & 0x7f800000));
}

static inline Pair load_pair(const Float16* address) {
  const Words words = load_vector<Words>(address);
  return {widen_half((Ints)(words << 16)), widen_half((Ints)(words & 0xffff0000u))};
}
#endif

static inline float reduce_max(Floats value) {
  float result = value[0];
  for (int lane = 1; lane < kLanes; ++lane) result = value[lane] > result ? value[lane] : result;
  return result;
}

static inline float reduce_min(Floats value) {
  float result = value[0];
  for (int lane = 1; lane < kLanes; ++lane) result = value[lane] < result ? value[lane] : result;
  return result;
}

static inline double reduce_add(Floats value) {
  double result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result += static_cast<double>(value[lane]);
  return result;
}

static inline bool any(Ints mask) {
  typedef int64_t Longs __attribute__((vector_size(DLMKERN_VECTOR_BYTES)));
  const Longs longs = (Longs)mask;
  int64_t result = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) result |= longs[lane];
  return result != 0;
}

// Below this exp is taken as exp(-87) = 1.6e-38, the last that is not subnormal.
constexpr float kExpFloor = -87.0f;

// exp(d) for kExpFloor <= d <= 0, relative error below 2e-7 + 2e-8 |d|; exactly 1 at 0. NaN stays NaN.
//
// exp(d) = 2^n 2^f with n = round(d log2 e). Adding 1.5 * 2^23 rounds, and leaves n in the low bits of the
// sum. 2^f on
// [-1/2, 1/2] is a polynomial fitted for least relative error with a constant term of one.
static inline Floats exp_of(Floats d) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kRound = 0x1.8p23f;
  const Floats shifted = d * kLog2E + kRound;
  const Floats f = d * kLog2E - (shifted - kRound);
  Floats p = splat(0x1.5bd97cp-10f);
  p = p * f + 0x1.3ce8b2p-7f;
  p = p * f + 0x1.c6b6dap-5f;
  p = p * f + 0x1.ebf9c2p-3f;
  p = p * f + 0x1.62e42ap-1f;
  p = p * f + 1.0f;
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

}  // namespace DLMKERN_ISA
}  // namespace dlmkern
