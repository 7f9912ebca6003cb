#include <algorithm>
#include <cmath>
#include <vector>

#include "candidate.h"
#include "check_ops.h"
#include "parallel.h"
#include "tensor.h"

namespace dlmkern {
namespace {

struct Arguments {
  const dlmkern_view& uncertainty;
  const dlmkern_view *influence, *drift, *eligible;
  const dlmkern_view& most;
  bool additive, above_mean;
  const dlmkern_view &seeds, &score;

  bool takes_part(int64_t b, int64_t i) const {
    if (eligible != nullptr && !read_bool(*eligible, b, i)) return false;
    for (const dlmkern_view* part : {&uncertainty, influence, drift}) {
      if (part != nullptr && !std::isfinite(read_float(*part, b, i))) return false;
    }
    return true;
  }
};

double without_sign(double x) { return x > 0 ? x : 0; }

// One part of the score in one sequence, relative to the largest among those that take part.
class Share {
 public:
  Share(const dlmkern_view* part, int64_t b) : part_(part), b_(b) {}

  explicit operator bool() const { return part_ != nullptr; }

  void measure(int64_t i) {
    if (part_ != nullptr) largest_ = std::max(largest_, read_float(*part_, b_, i));
  }

  double of(int64_t i) const { return largest_ > 0 ? without_sign(read_float(*part_, b_, i)) / largest_ : 0; }

 private:
  const dlmkern_view* part_;
  int64_t b_;
  double largest_ = 0;
};

// How many seeds there are to be: the ranks r with r * r < suspects, and no more than `most`.
int64_t count_seeds(double suspects, int64_t most, int64_t candidates) {
  int64_t count = 0;
  while (count < candidates && count < most && static_cast<double>(count * count) < suspects) ++count;
  return count;
}

// One sequence. `candidates` is scratch for n entries.
void choose(const Arguments& a, int64_t b, Candidate* candidates) {
  const int64_t n = a.uncertainty.shape[1];
  Share uncertainty(&a.uncertainty, b), influence(a.influence, b), drift(a.drift, b);
  Candidate* end = candidates;
  for (int64_t i = 0; i < n; ++i) {
    write_bool(a.seeds, false, b, i);
    write_float(a.score, 0, b, i);
    if (!a.takes_part(b, i)) continue;
    for (Share* share : {&uncertainty, &influence, &drift}) share->measure(i);
    *end++ = {0, i};
  }
  double total = 0, largest = 0;
  for (Candidate* c = candidates; c != end; ++c) {
    double score = uncertainty.of(c->index);
    const auto combine = [&](double factor) { score = a.additive ? score + factor : score * factor; };
    if (influence) combine(influence.of(c->index));
    if (drift) combine(1 - drift.of(c->index));
    write_float(a.score, score, b, c->index);
    c->priority = score;
    total += score;
    largest = std::max(largest, score);
  }
  const int64_t m = end - candidates;
  if (!(largest > 0)) return;
  double suspects = total / largest;
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
    const Arguments arguments{*uncertainty,  influence,       drift,  eligible, *most,
                              additive == 1, above_mean == 1, *seeds, *score};
    std::vector<Candidate> candidates(static_cast<size_t>(B * n));
    const bool worth = B > 1 && B * n > kParallelWork / 8;
#pragma omp parallel for if (worth)
    for (int64_t b = 0; b < B; ++b) choose(arguments, b, candidates.data() + b * n);
    return DLMKERN_OK;
  });
}
