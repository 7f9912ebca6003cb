#include "row_kernels.h"

#include <limits>

#include "vector.h"

namespace dlmkern {
namespace DLMKERN_ISA {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float lowest(const float*) { return -kInfinity; }
BFloat16 lowest(const BFloat16*) { return {0xff80}; }
Float16 lowest(const Float16*) { return {0xfc00}; }

template <class T>
float load_one(const T* address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return to_float(value);
}

// The last numbers of a row, filled up with -inf.
template <class T>
Pair load_tail(const T* x, int64_t count) {
  T filled[kPair];
  for (T& value : filled) value = lowest(x);
  std::memcpy(filled, x, static_cast<size_t>(count) * sizeof(T));
  return load_pair(filled);
}

template <class T>
float max(const void* row, int64_t n) {
  const T* const x = static_cast<const T*>(row);
  Floats a = splat(-kInfinity), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 2 * kPair <= n; i += 2 * kPair) {
    const Pair first = load_pair(x + i), second = load_pair(x + i + kPair);
    a = larger(first.x, a);
    b = larger(first.y, b);
    c = larger(second.x, c);
    d = larger(second.y, d);
  }
  for (; i < n; i += kPair) {
    const Pair pair = n - i >= kPair ? load_pair(x + i) : load_tail(x + i, n - i);
    a = larger(pair.x, a);
    b = larger(pair.y, b);
  }
  return reduce_max(larger(larger(a, b), larger(c, d)));
}

template <class T>
float max_or_nan(const void* row, int64_t n) {
  const T* const x = static_cast<const T*>(row);
  Floats a = splat(-kInfinity), b = a;
  Ints nan_a = {}, nan_b = {};
  for (int64_t i = 0; i < n; i += kPair) {
    const Pair pair = n - i >= kPair ? load_pair(x + i) : load_tail(x + i, n - i);
    a = larger(pair.x, a);
    b = larger(pair.y, b);
    nan_a |= pair.x != pair.x;
    nan_b |= pair.y != pair.y;
  }
  return any(nan_a | nan_b) ? std::numeric_limits<float>::quiet_NaN() : reduce_max(larger(a, b));
}

template <class T>
Range range(const void* row, int64_t n) {
  const T* const x = static_cast<const T*>(row);
  Floats max_x = splat(-kInfinity), max_y = max_x, min_x = splat(kInfinity), min_y = min_x;
  int64_t i = 0;
  for (; i + kPair <= n; i += kPair) {
    const Pair pair = load_pair(x + i);
    max_x = larger(pair.x, max_x);
    max_y = larger(pair.y, max_y);
    min_x = smaller(pair.x, min_x);
    min_y = smaller(pair.y, min_y);
  }
  Range result = {reduce_min(smaller(min_x, min_y)), reduce_max(larger(max_x, max_y))};
  for (; i < n; ++i) {
    const float value = load_one(x + i);
    result.max = value > result.max ? value : result.max;
    result.min = value < result.min ? value : result.min;
  }
  return result;
}

// The first v for which test(x_v) holds, or n. `test` works on vectors and on numbers.
template <class T, class Test>
int64_t find_first(const T* x, int64_t n, Test test) {
  constexpr int64_t kStep = 4 * kPair;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    Ints found = {};
    for (int64_t j = i; j < i + kStep; j += kPair) {
      const Pair pair = load_pair(x + j);
      found |= test(pair.x) | test(pair.y);
    }
    if (any(found)) break;
  }
  for (; i < n; ++i) {
    if (test(load_one(x + i))) return i;
  }
  return n;
}

template <class T>
int64_t find(const void* row, int64_t n, float value) {
  return find_first(static_cast<const T*>(row), n, [=](auto x) { return x == value; });
}

template <class T>
int64_t find_above(const void* row, int64_t n, float limit) {
  return find_first(static_cast<const T*>(row), n, [=](auto x) { return !(x <= limit); });
}

// Sums are taken over blocks first: float32 loses less in 32 and then 2048 / kBlock additions than in all of
// them.
constexpr int64_t kBlock = 16 * kPair;

template <class T>
double mass_below(const void* row, int64_t n, float max, float limit) {
  const T* const x = static_cast<const T*>(row);
  const auto mass = [&](Floats v) {
    const Floats e = exp_of(larger(splat(kExpFloor), v - max));
    return (Floats)((Ints)e & (v < limit));
  };
  double total = 0;
  for (int64_t piece = 0; piece < n; piece += kPiece) {
    const int64_t end = piece + kPiece < n ? piece + kPiece : n;
    Floats sum = {};
    for (int64_t block = piece; block < end; block += kBlock) {
      const int64_t block_end = block + kBlock < end ? block + kBlock : end;
      Floats block_sum = {};
      for (int64_t i = block; i < block_end; i += kPair) {
        const Pair pair = end - i >= kPair ? load_pair(x + i) : load_tail(x + i, end - i);
        block_sum += mass(pair.x);
        block_sum += mass(pair.y);
      }
      sum += block_sum;
    }
    total += reduce_add(sum);
  }
  return total;
}

// Accumulates RowSums lane by lane.
template <unsigned kWanted>
struct Accumulator {
  Floats mass = {}, energy = {}, cross = {}, prev_mass = {};

  void add(Floats x, Floats prev, Floats max, Floats prev_max) {
    // larger() hands on a NaN in its second argument.
    const Floats d = larger(splat(kExpFloor), x - max);
    const Floats e = exp_of(d);
    mass += e;
    if constexpr ((kWanted & kEnergy) != 0) energy += e * d;
    if constexpr ((kWanted & kCross) != 0) {
      const Floats prev_d = prev - prev_max;
      cross += e * (d - prev_d);
      prev_mass += exp_of(larger(splat(kExpFloor), prev_d));
    }
  }

  void join(const Accumulator& block) {
    mass += block.mass;
    if constexpr ((kWanted & kEnergy) != 0) energy += block.energy;
    if constexpr ((kWanted & kCross) != 0) {
      cross += block.cross;
      prev_mass += block.prev_mass;
    }
  }
};

// Asks for the same place of the next piece: the loops over the sums are bound by arithmetic, and the memory
// would be idle.
template <class T>
void prefetch(const T* address) {
  __builtin_prefetch(
      reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(address) + kPiece * sizeof(T)));
}

template <class T, unsigned kWanted>
RowSums sums(const void* row, const void* prev_row, int64_t n, float max, float prev_max) {
  constexpr bool kHasPrev = (kWanted & kCross) != 0;
  const T* const x = static_cast<const T*>(row);
  const T* const prev = static_cast<const T*>(prev_row);
  const Floats max_v = splat(max), prev_max_v = splat(prev_max);
  Accumulator<kWanted> sum;
  int64_t i = 0;
  while (i + kPair <= n) {
    const int64_t block_end = i + kBlock < n ? i + kBlock : n;
    Accumulator<kWanted> block;  // one for both halves of a pair: a second would not fit in AVX2's registers
    for (; i + kPair <= block_end; i += kPair) {
      prefetch(x + i);
      if (kHasPrev) prefetch(prev + i);
      const Pair pair = load_pair(x + i);
      const Pair prev_pair = kHasPrev ? load_pair(prev + i) : Pair{};
      block.add(pair.x, prev_pair.x, max_v, prev_max_v);
      block.add(pair.y, prev_pair.y, max_v, prev_max_v);
    }
    sum.join(block);
  }
  if (i < n) {
    const Pair pair = load_tail(x + i, n - i);
    Pair prev_pair = kHasPrev ? load_tail(prev + i, n - i) : Pair{};
    // The filling has to be finite here, or 0 * inf would enter the cross term.
    prev_pair.x = larger(prev_max_v - kPrevDepth, prev_pair.x);
    prev_pair.y = larger(prev_max_v - kPrevDepth, prev_pair.y);
    sum.add(pair.x, prev_pair.x, max_v, prev_max_v);
    sum.add(pair.y, prev_pair.y, max_v, prev_max_v);
  }
  RowSums result;
  result.mass = reduce_add(sum.mass);
  result.energy = reduce_add(sum.energy);
  result.cross = reduce_add(sum.cross);
  result.prev_mass = reduce_add(sum.prev_mass);
  return result;
}

template <class T>
constexpr RowKernels kernels_of() {
  return {max<T>,
          max_or_nan<T>,
          range<T>,
          find<T>,
          find_above<T>,
          mass_below<T>,
          {sums<T, kMass>, sums<T, kEnergy>, sums<T, kCross>, sums<T, kEnergyAndCross>}};
}

}  // namespace

extern const RowKernelTable kTable = {kernels_of<float>(), kernels_of<BFloat16>(), kernels_of<Float16>()};

}  // namespace DLMKERN_ISA
}  // namespace dlmkern
