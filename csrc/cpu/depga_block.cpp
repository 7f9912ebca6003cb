#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "tensor.h"

namespace dlmkern {
namespace {

// Smooths and normalises the first w values of a row; `sorted` is scratch of the same size.
void normalise(const dlmkern_view& values, int64_t b, int64_t w, bool reflect, double* out, double* sorted) {
  const auto at = [&](int64_t k) {
    if (k >= 0 && k < w) return read_float(values, b, k);
    return reflect ? read_float(values, b, k < 0 ? 0 : w - 1) : 0.0;
  };
  for (int64_t k = 0; k < w; ++k) out[k] = ((at(k - 1) + at(k)) + at(k + 1)) / 3.0;

  std::copy(out, out + w, sorted);
  std::sort(sorted, sorted + w,
            [](double a, double b) { return a < b || (std::isnan(b) && !std::isnan(a)); });
  const double median = sorted[(w - 1) / 2];
  const double q1 = sorted[(w - 1) / 4];      // floor(0.25 (w - 1))
  const double q3 = sorted[3 * (w - 1) / 4];  // floor(0.75 (w - 1))
  const double range = std::fabs(q3 - q1);
  const double scale = range < 1e-15 ? 1e-15 : range;  // NaN stays
  for (int64_t k = 0; k < w; ++k) out[k] = (out[k] - median) / scale;
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_depga_block(const dlmkern_view* kl, const dlmkern_view* entropy,
                                       const dlmkern_view* remaining, const dlmkern_view* lam,
                                       const dlmkern_view* l_min, const dlmkern_view* l_max, int reflect,
                                       const dlmkern_view* length) {
  DLMKERN_TRY(check_input(kl, kReal, {kAnySize, kAnySize}));
  const int64_t B = kl->shape[0], W = kl->shape[1];
  DLMKERN_TRY(check_input(entropy, kReal, {B, W}));
  DLMKERN_TRY(check_input(remaining, kInt64, {B}));
  DLMKERN_TRY(check_input(lam, kFloat64, {B}));
  DLMKERN_TRY(check_input(l_min, kInt64, {B}));
  DLMKERN_TRY(check_input(l_max, kInt64, {B}));
  if (reflect != 0 && reflect != 1) return DLMKERN_ERROR_VALUE;
  DLMKERN_TRY(check_output(length, kInt64, {B}));
  for (int64_t b = 0; b < B; ++b) {
    const int64_t low = read_int64(*l_min, b);
    if (read_int64(*remaining, b) < 0 || low < 1 || read_int64(*l_max, b) < low) return DLMKERN_ERROR_VALUE;
  }
  return guarded([&] {
    std::vector<double> influence(static_cast<size_t>(W)), uncertainty(influence), sorted(influence);
    for (int64_t b = 0; b < B; ++b) {
      const int64_t R = read_int64(*remaining, b);
      const int64_t low = read_int64(*l_min, b), high = read_int64(*l_max, b);
      if (R < low) {
        write_int64(*length, R, b);
        continue;
      }
      const int64_t w = std::min({W, high, R});
      int64_t L = 0;
      if (w > 0) {
        normalise(*kl, b, w, reflect == 1, influence.data(), sorted.data());
        normalise(*entropy, b, w, reflect == 1, uncertainty.data(), sorted.data());
        const double weight = read_float(*lam, b);
        while (L < w && influence[L] - weight * uncertainty[L] >= 0) ++L;
      }
      write_int64(*length, std::min({std::max(L, low), high, R}), b);
    }
    return DLMKERN_OK;
  });
}
