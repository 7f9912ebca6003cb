#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "candidate.h"
#include "check_ops.h"
#include "parallel.h"
#include "tensor.h"

namespace dlmkern {
namespace {

constexpr int64_t kTile = 16;  // of float32 a cache line
constexpr double kLeastPeak = 1e-8;

struct Arguments {
  const dlmkern_view &scores, &confidence;
  const dlmkern_view* valid;
  const dlmkern_view &tau, &certain, &late;
  bool symmetric;
  const dlmkern_view& selected;
};

// The graph between the candidates of one sequence, which are numbered by rising position. The arrays are
// scratch for M entries each.
template <class T>
struct Graph {
  const T* scores;
  int64_t row_stride, column_stride;
  int64_t* position;
  double* degree;
  double* peak;

  double score(int64_t i, int64_t j) const {
    const double x = to_double(load(scores + position[i] * row_stride + position[j] * column_stride));
    return std::abs(x) <= std::numeric_limits<float>::max() ? x : 0;
  }

  double weight(int64_t i, int64_t j) const { return (score(i, j) + score(j, i)) / 2; }

  bool edge(int64_t i, int64_t j, double tau, bool symmetric) const {
    const double w = weight(i, j);
    return w / peak[i] > tau || (symmetric && w / peak[j] > tau);
  }

  // Degrees and peaks of m candidates, a pair of mirrored tiles at a time: every score is read once, along
  // its row. The tiles come in an order in which each degree meets its terms by rising j.
  void measure(int64_t m) const {
    std::fill_n(degree, m, 0.0);
    std::fill_n(peak, m, kLeastPeak);
    for (int64_t i = 0; i < m; i += kTile) {
      for (int64_t j = i; j < m; j += kTile) {
        measure_tile(i, std::min(kTile, m - i), j, std::min(kTile, m - j));
      }
    }
  }

 private:
  void measure_tile(int64_t i0, int64_t rows, int64_t j0, int64_t columns) const {
    double weights[kTile][kTile];  // to begin with, scores
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) weights[i][j] = score(i0 + i, j0 + j);
    }
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = 0; i < rows; ++i) {
        const double w = i0 + i == j0 + j ? 0 : (weights[i][j] + score(j0 + j, i0 + i)) / 2;
        if (i0 != j0) weights[i][j] = w;
        add(i0 + i, w);
      }
    }
    if (i0 == j0) return;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) add(j0 + j, weights[i][j]);
    }
  }

  void add(int64_t i, double weight) const {
    degree[i] += weight;
    peak[i] = std::max(peak[i], weight);
  }
};

// One sequence. `scanned` and `taken` are scratch for M entries each.
template <class T>
void select_sequence(const Arguments& a, const Graph<T>& graph, int64_t b, Candidate* scanned,
                     int64_t* taken) {
  int64_t m = 0;
  for (int64_t i = 0; i < a.confidence.shape[1]; ++i) {
    write_bool(a.selected, false, b, i);
    if (a.valid != nullptr && !read_bool(*a.valid, b, i)) continue;
    if (std::isfinite(read_float(a.confidence, b, i))) graph.position[m++] = i;
  }
  graph.measure(m);
  const double tau = read_float(a.tau, b), certain = read_float(a.certain, b), late = read_float(a.late, b);
  Candidate* end = scanned;
  for (int64_t i = 0; i < m; ++i) {
    const double c = read_float(a.confidence, b, graph.position[i]);
    if (c >= certain || c >= late) write_bool(a.selected, true, b, graph.position[i]);
    if (!(c >= certain)) *end++ = {graph.degree[i] * c, i};
  }
  std::sort(scanned, end, goes_first);
  int64_t count = 0;
  for (const Candidate* next = scanned; next != end; ++next) {
    const bool blocked = std::any_of(taken, taken + count, [&](int64_t j) {  //
      return graph.edge(next->index, j, tau, a.symmetric);
    });
    if (blocked) continue;
    taken[count++] = next->index;
    write_bool(a.selected, true, b, graph.position[next->index]);
  }
}

template <class T>
void select(const Arguments& a) {
  const int64_t B = a.confidence.shape[0], M = a.confidence.shape[1];
  const auto size = static_cast<size_t>(B * M);
  std::vector<int64_t> position(size), taken(size);
  std::vector<double> degree(size), peak(size);
  std::vector<Candidate> scanned(size);
  const bool worth = B > 1 && B * M * M > kParallelWork;
#pragma omp parallel for if (worth)
  for (int64_t b = 0; b < B; ++b) {
    const int64_t first = b * M;
    const Graph<T> graph{address_of<T>(a.scores, b, 0), a.scores.stride[1],    a.scores.stride[2],
                         position.data() + first,       degree.data() + first, peak.data() + first};
    select_sequence(a, graph, b, scanned.data() + first, taken.data() + first);
  }
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_dapd_select(const dlmkern_view* scores, const dlmkern_view* confidence,
                                       const dlmkern_view* valid, const dlmkern_view* tau,
                                       const dlmkern_view* certain, const dlmkern_view* late, int symmetric,
                                       const dlmkern_view* selected) {
  DLMKERN_TRY(check_dapd_select(scores, confidence, valid, tau, certain, late, symmetric, selected));
  if (confidence->shape[1] == 0) return DLMKERN_OK;
  return guarded([&] {
    const Arguments arguments{*scores, *confidence, valid, *tau, *certain, *late, symmetric == 1, *selected};
    if (scores->dtype == DLMKERN_FLOAT64) {
      select<double>(arguments);
    } else {
      select<float>(arguments);
    }
    return DLMKERN_OK;
  });
}
