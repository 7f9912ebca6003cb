#include <algorithm>
#include <cmath>
#include <vector>

#include "candidate.h"
#include "check_ops.h"
#include "parallel.h"
#include "tensor.h"

namespace dlmkern {
namespace {

constexpr int kParts = 3, kDrift = 2;

struct Arguments {
  const dlmkern_view* parts[kParts];  // uncertainty, influence, drift
  const dlmkern_view* eligible;
  const dlmkern_view& most;
  bool additive, above_mean;
  const dlmkern_view &seeds, &score;
};

// Scratch for one sequence of n positions, of which those that take part move to the front. A part that is
// left out stays 0.
struct Scratch {
  double* parts[kParts];
  Candidate* candidates;

  bool is_finite(int64_t i) const {
    return std::all_of(parts, parts + kParts, [=](const double* part) { return std::isfinite(part[i]); });
  }
};

template <class T>
void read_row(const dlmkern_view& view, int64_t b, double* out) {
  const T* row = address_of<T>(view, b);
  for (int64_t i = 0; i < view.shape[1]; ++i) out[i] = load(row + i * view.stride[1]);
}

// How many seeds there are to be: the ranks r with r * r < suspects, and no more than `most`.
int64_t count_seeds(double suspects, int64_t most, int64_t candidates) {
  int64_t count = 0;
  while (count < candidates && count < most && static_cast<double>(count * count) < suspects) ++count;
  return count;
}

void choose(const Arguments& a, int64_t b, const Scratch& scratch) {
  const int64_t n = a.seeds.shape[1];
  Candidate* const candidates = scratch.candidates;
  for (int part = 0; part < kParts; ++part) {
    const dlmkern_view* view = a.parts[part];
    if (view == nullptr) continue;
    const auto read = view->dtype == DLMKERN_FLOAT64 ? read_row<double> : read_row<float>;
    read(*view, b, scratch.parts[part]);
  }
  int64_t m = 0;
  double largest[kParts] = {};
  for (int64_t i = 0; i < n; ++i) {
    write_bool(a.seeds, false, b, i);
    write_float(a.score, 0, b, i);
    if (a.eligible != nullptr && !read_bool(*a.eligible, b, i)) continue;
    if (!scratch.is_finite(i)) continue;
    for (int part = 0; part < kParts; ++part) {
      const double x = scratch.parts[part][i];
      scratch.parts[part][m] = x > 0 ? x : 0;
      largest[part] = std::max(largest[part], x);
    }
    candidates[m++] = {0, i};
  }
  double total = 0, largest_score = 0;
  for (int64_t j = 0; j < m; ++j) {
    const auto share = [&](int part) {
      return largest[part] > 0 ? scratch.parts[part][j] / largest[part] : 0;
    };
    double score = share(0);
    for (int part = 1; part < kParts; ++part) {
      if (a.parts[part] == nullptr) continue;
      const double factor = part == kDrift ? 1 - share(part) : share(part);
      score = a.additive ? score + factor : score * factor;
    }
    candidates[j].priority = score;
    write_float(a.score, score, b, candidates[j].index);
    total += score;
    largest_score = std::max(largest_score, score);
  }
  if (largest_score == 0) return;
  Candidate* const end = candidates + m;
  double suspects = total / largest_score;
  if (a.above_mean) {
    const double mean = total / static_cast<double>(m);
    suspects = static_cast<double>(
        std::count_if(candidates, end, [=](const Candidate& c) { return c.priority > mean; }));
  }
  Candidate* const last = candidates + count_seeds(suspects, read_int64(a.most, b), m);
  std::nth_element(candidates, last, end, goes_first);
  for (const Candidate* c = candidates; c != last; ++c) {
    if (c->priority > 0) write_bool(a.seeds, true, b, c->index);
  }
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_cover_seeds(const dlmkern_view* uncertainty, const dlmkern_view* influence,
                                       const dlmkern_view* drift, const dlmkern_view* eligible,
                                       const dlmkern_view* most, int additive, int above_mean,
                                       const dlmkern_view* seeds, const dlmkern_view* score) {
  DLMKERN_TRY(
      check_cover_seeds(uncertainty, influence, drift, eligible, most, additive, above_mean, seeds, score));
  const int64_t B = uncertainty->shape[0], n = uncertainty->shape[1];
  if (n == 0) return DLMKERN_OK;
  return guarded([&] {
    const Arguments arguments{
        {uncertainty, influence, drift}, eligible, *most, additive == 1, above_mean == 1, *seeds, *score};
    const int64_t size = B * n;
    std::vector<double> parts(static_cast<size_t>(kParts * size));
    std::vector<Candidate> candidates(static_cast<size_t>(size));
    const bool worth = B > 1 && size > kParallelWork / 8;
#pragma omp parallel for if (worth)
    for (int64_t b = 0; b < B; ++b) {
      double* const own = parts.data() + b * n;
      choose(arguments, b, {{own, own + size, own + 2 * size}, candidates.data() + b * n});
    }
    return DLMKERN_OK;
  });
}
