#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "candidate.h"
#include "check.h"
#include "parallel.h"
#include "tensor.h"

namespace dlmkern {
namespace {

struct Arguments {
  const dlmkern_view &input, &token;
  const dlmkern_view *logsumexp, *mask;
  const dlmkern_view &tau_low, &tau_high, &gamma;
  bool strict;
  const dlmkern_view& selected;
  const dlmkern_view* confidence;

  // log p_i(v) of sequence b.
  template <class T>
  double log_probability(int64_t b, int64_t i, int64_t v) const {
    const double x = row_of<T>(input, b, i)[v];
    return logsumexp != nullptr ? x - read_float(*logsumexp, b, i) : std::log(x);
  }

  // p_i(token_i), NaN without a token.
  template <class T>
  double confidence_of(int64_t b, int64_t i) const {
    const int64_t v = read_int64(token, b, i);
    if (v < 0 || v >= input.shape[2]) return std::numeric_limits<double>::quiet_NaN();
    const double x = row_of<T>(input, b, i)[v];
    return logsumexp != nullptr ? std::exp(x - read_float(*logsumexp, b, i)) : x;
  }

  template <class T>
  bool conflicts(int64_t b, int64_t i, int64_t j, double limit) const {
    const double d =
        log_probability<T>(b, i, read_int64(token, b, j)) + log_probability<T>(b, j, read_int64(token, b, i));
    return d > limit;
  }
};

// One sequence. `candidates` and `in` are scratch for n entries each.
template <class T>
void select_sequence(const Arguments& a, int64_t b, Candidate* candidates, int64_t* in) {
  const int64_t n = a.input.shape[1];
  const double tau_low = read_float(a.tau_low, b), tau_high = read_float(a.tau_high, b);
  const double gamma = read_float(a.gamma, b);
  Candidate* end = candidates;
  Candidate best = {-std::numeric_limits<double>::infinity(), -1};
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double c = a.confidence_of<T>(b, i);
    if (a.confidence != nullptr) write_float(*a.confidence, c, b, i);
    write_bool(a.selected, false, b, i);
    if (std::isnan(c) || (a.mask != nullptr && !read_bool(*a.mask, b, i))) continue;
    if (best.index < 0 || c > best.priority) best = {c, i};
    if (!(c >= tau_low)) continue;
    if (c >= tau_high && !a.strict) {
      in[count++] = i;
    } else {
      *end++ = {c, i};
    }
  }
  std::sort(candidates, end, goes_first);
  for (const Candidate* c = candidates; c != end; ++c) {
    const bool blocked = std::any_of(in, in + count, [&](int64_t j) {  //
      return a.conflicts<T>(b, c->index, j, gamma);
    });
    if (!blocked) in[count++] = c->index;
  }
  for (int64_t k = 0; k < count; ++k) write_bool(a.selected, true, b, in[k]);
  if (best.index >= 0) write_bool(a.selected, true, b, best.index);
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_cap_select(const dlmkern_view* input, const dlmkern_view* token,
                                      const dlmkern_view* logsumexp, const dlmkern_view* mask,
                                      const dlmkern_view* tau_low, const dlmkern_view* tau_high,
                                      const dlmkern_view* gamma, int strict, const dlmkern_view* selected,
                                      const dlmkern_view* confidence) {
  DLMKERN_TRY(check_rows(input));
  const int64_t B = input->shape[0], n = input->shape[1];
  DLMKERN_TRY(check_input(token, kInt64, {B, n}));
  DLMKERN_TRY(check_optional_input(logsumexp, kReal, {B, n}));
  DLMKERN_TRY(check_optional_input(mask, kBool, {B, n}));
  DLMKERN_TRY(check_input(tau_low, kFloat64, {B}));
  DLMKERN_TRY(check_input(tau_high, kFloat64, {B}));
  DLMKERN_TRY(check_input(gamma, kFloat64, {B}));
  if (strict != 0 && strict != 1) return DLMKERN_ERROR_VALUE;
  DLMKERN_TRY(check_output(selected, kBool, {B, n}));
  DLMKERN_TRY(check_optional_output(confidence, kReal, {B, n}));
  if (n == 0) return DLMKERN_OK;
  return guarded([&] {
    const Arguments arguments{*input,    *token, logsumexp,   mask,      *tau_low,
                              *tau_high, *gamma, strict == 1, *selected, confidence};
    std::vector<Candidate> candidates(static_cast<size_t>(B * n));
    std::vector<int64_t> in(static_cast<size_t>(B * n));
    const bool worth = B > 1 && B * n * n > kParallelWork / 8;
    with_float_type(input->dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
#pragma omp parallel for if (worth)
      for (int64_t b = 0; b < B; ++b) {
        select_sequence<T>(arguments, b, candidates.data() + b * n, in.data() + b * n);
      }
    });
    return DLMKERN_OK;
  });
}
