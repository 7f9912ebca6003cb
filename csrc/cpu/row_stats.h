// What a scan over part of a row has learnt, how two parts are joined, and the statistics at the end.
//
// Sums are kept relative to the largest logit seen, and without that logit's own term of one: with R the sum
// of the others, the confidence is 1 / (1 + R), which R = 1e-9 still resolves where 1 + R in float32 would
// not.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace dlmkern {

// With m = best, d_v = x_v - m, e_v = exp(d_v), and y, m' = prev_best, d'_v = y_v - m' for the previous
// logits.
struct RowScan {
  double best = -std::numeric_limits<double>::infinity();
  int64_t token = -1;
  double rest = 0;    // sum of e_v over v != token
  double energy = 0;  // sum of e_v d_v
  double cross = 0;   // sum of e_v (d_v - d'_v) over v != token

  double prev_best = -std::numeric_limits<double>::infinity();
  double prev_mass = 0;      // sum of exp(d'_v) over all v
  double prev_at_token = 0;  // y_token

  bool undefined = false;       // NaN or +inf among the logits
  bool prev_undefined = false;  // or among the previous ones
  bool infinite_kl = false;     // a token other than the best has p > 0 where the previous p is zero

  // Makes a larger logit the reference. The old best becomes one of the rest.
  void raise(double value, int64_t v, double prev_value) {
    if (token >= 0) {
      const double shift = best - value;
      const double scale = std::exp(shift);
      const double mass = 1 + rest;
      if (prev_at_token == -std::numeric_limits<double>::infinity()) {
        infinite_kl = true;
      } else {
        cross -= prev_at_token - prev_best;  // the old best's own term, e = 1 and d = 0
      }
      // exp() may be zero where the shift is huge; 0 * inf must not turn up.
      energy = scale == 0 ? 0 : scale * (energy + shift * mass);
      cross = scale == 0 ? 0 : scale * (cross + shift * mass);
      rest = scale * mass;
    }
    best = value;
    token = v;
    prev_at_token = prev_value;
  }

  void raise_prev(double value) {
    if (prev_mass > 0) {
      const double shift = prev_best - value;
      prev_mass *= std::exp(shift);
      cross -= shift * rest;
    }
    prev_best = value;
  }

  // Joins the scan of the part of the row that follows.
  void join(RowScan next) {
    undefined |= next.undefined;
    prev_undefined |= next.prev_undefined;
    infinite_kl |= next.infinite_kl;
    if (undefined) return;
    if (next.prev_best > prev_best) {
      raise_prev(next.prev_best);
    } else if (prev_best > next.prev_best) {
      next.raise_prev(prev_best);
    }
    prev_mass += next.prev_mass;
    if (next.token < 0) return;
    if (next.best > best) {
      raise(next.best, next.token, next.prev_at_token);
    } else {
      next.raise(best, token, prev_at_token);
      infinite_kl |= next.infinite_kl;
    }
    rest += next.rest;
    energy += next.energy;
    cross += next.cross;
  }

  bool defined() const { return !undefined && token >= 0; }
  double confidence() const { return 1 / (1 + rest); }
  double logsumexp() const { return best + std::log1p(rest); }
  double entropy() const { return std::log1p(rest) - energy / (1 + rest); }
  double kl() const {
    if (prev_undefined || !(prev_mass > 0)) return std::numeric_limits<double>::quiet_NaN();
    if (infinite_kl || prev_at_token == -std::numeric_limits<double>::infinity()) {
      return std::numeric_limits<double>::infinity();
    }
    const double mean = (cross - (prev_at_token - prev_best)) / (1 + rest);
    return mean - std::log1p(rest) + std::log(prev_mass);
  }
};

}  // namespace dlmkern
