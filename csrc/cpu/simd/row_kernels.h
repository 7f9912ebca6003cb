// The vector loops over a piece of a row. row_kernels.cpp is compiled once per instruction set; isa.cpp picks
// one.
#pragma once

#include <cstdint>

namespace dlmkern {

// Sums over some v of a row x and of prev, with d_v = x_v - max, e_v = exp(d_v) and d'_v = prev_v - prev_max.
struct RowSums {
  double mass = 0;       // of e_v
  double energy = 0;     // of e_v d_v
  double cross = 0;      // of e_v (d_v - d'_v)
  double prev_mass = 0;  // of exp(d'_v)
};

struct Range {
  float min, max;  // NaN is not counted
};

// Which of RowSums a loop fills, besides the mass.
enum Wanted : unsigned { kMass = 0, kEnergy = 1, kCross = 2, kEnergyAndCross = 3 };

// The sums of a piece are float32 in each lane, so pieces must not be longer than this.
constexpr int64_t kPiece = 2048;

// The lowest logit below prev's maximum for which the vector loops are exact enough.
constexpr float kPrevDepth = 1e4f;

// For one dtype; rows are contiguous, pointers need no alignment, n may be 0 unless noted.
struct RowKernels {
  float (*max)(const void* x, int64_t n);         // NaN is not counted; -inf for n = 0
  float (*max_or_nan)(const void* x, int64_t n);  // NaN if the row has one
  Range (*range)(const void* x, int64_t n);
  int64_t (*find)(const void* x, int64_t n, float value);        // the first v with x_v == value, or n
  int64_t (*find_above)(const void* x, int64_t n, float limit);  // the first v with x_v > limit or NaN, or n
  double (*mass_below)(const void* x, int64_t n, float max, float limit);  // sum of e_v over x_v < limit
  // By Wanted. No NaN or +inf is assumed away: NaN in x gives NaN sums. Needs n <= kPiece, finite max and
  // prev_max, and prev_v > prev_max - kPrevDepth.
  RowSums (*sums[4])(const void* x, const void* prev, int64_t n, float max, float prev_max);
};

struct RowKernelTable {
  RowKernels float32, bfloat16, float16;
};

namespace portable {
extern const RowKernelTable kTable;
}
namespace avx2 {
extern const RowKernelTable kTable;
}
namespace avx512 {
extern const RowKernelTable kTable;
}
namespace avx512_on_avx2 {  // only in test builds: the loops of AVX-512's width in AVX2's instructions
extern const RowKernelTable kTable;
}

}  // namespace dlmkern
