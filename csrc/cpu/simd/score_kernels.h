// The vector loops of attention scores. score_kernels.cpp is compiled once per instruction set; isa.cpp picks
// one.
#pragma once

#include <cstdint>

namespace dlmkern {

constexpr int64_t kMaxPanelWidth = 64;

// For float or double. Matrices come in panels: a panel of w vectors of some size holds the first number of
// each, then the second of each, and so on.
template <class Scalar>
struct ScoreKernels {
  // Of a tile of scores: as many as keep its sums in registers, and at most kMaxPanelWidth.
  int64_t rows, columns;
  // scores[i * stride + j] is the product of query i and key j, from panels of `rows` queries and `columns`
  // keys.
  void (*tile)(const Scalar* queries, const Scalar* keys, int64_t size, Scalar* scores, int64_t stride);

  // For the others n is a multiple of `columns`.
  Scalar (*max)(const Scalar* scores, int64_t n);  // NaN is not counted
  // The sum of exp(score - shift). Float sums are float in each lane, so n is to be small.
  double (*mass)(const Scalar* scores, int64_t n, Scalar shift);
  // weights[j] += factor exp(scores[j] - shift)
  void (*add_weights)(const Scalar* scores, int64_t n, Scalar shift, Scalar factor, Scalar* weights);
};

struct ScoreKernelTable {
  ScoreKernels<float> float32;
  ScoreKernels<double> float64;
};

namespace portable {
extern const ScoreKernelTable kScoreTable;
}
namespace avx2 {
extern const ScoreKernelTable kScoreTable;
}
namespace avx512 {
extern const ScoreKernelTable kScoreTable;
}
namespace avx512_on_avx2 {  // only in test builds: the loops of AVX-512's width in AVX2's instructions
extern const ScoreKernelTable kScoreTable;
}

}  // namespace dlmkern
