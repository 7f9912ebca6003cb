// Scans a row of logits: in float64, as the definition reads, or in pieces with the vector loops.
#pragma once

#include <algorithm>

#include "isa.h"
#include "row_stats.h"
#include "short_row.h"
#include "tensor.h"

namespace dlmkern {

// What a scan has to find besides the best token.
struct ScanRequest {
  bool mass = false;        // confidence, logsumexp and everything below
  bool energy = false;      // entropy
  bool cross = false;       // kl; needs the previous row
  bool in_float64 = false;  // no vector loops
};

template <class T>
class RowScanner {
 public:
  // `prev` is not read unless request.cross.
  RowScanner(Row<T> row, Row<T> prev, ScanRequest request)
      : row_(row), prev_(prev), request_(request), kernels_(row_kernels(DtypeOf<T>::value)) {}

  // The logits v with begin <= v < end.
  RowScan scan(int64_t begin, int64_t end) {
    scan_ = RowScan{};
    for (int64_t piece = begin; piece < end && !scan_.undefined; piece += kPiece) {
      const int64_t piece_end = std::min(piece + kPiece, end);
      if constexpr (!std::is_same_v<T, double>) {
        if (!request_.in_float64) {
          add_piece(piece, piece_end);
          continue;
        }
      }
      add_piece_in_float64(piece, piece_end);
    }
    return scan_;
  }

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();

  bool cross() const { return request_.cross && !scan_.prev_undefined; }

  void add_piece_in_float64(int64_t begin, int64_t end) {
    double best = scan_.best, prev_best = scan_.prev_best;
    int64_t token = -1;
    for (int64_t v = begin; v < end; ++v) {
      const double x = row_[v];
      if (std::isnan(x) || x == kInfinity) {
        scan_.undefined = true;
        return;
      }
      if (x > best) best = x, token = v;
      if (cross()) {
        const double y = prev_[v];
        scan_.prev_undefined = std::isnan(y) || y == kInfinity;
        if (y > prev_best) prev_best = y;
      }
    }
    if (token >= 0) scan_.raise(best, token, request_.cross ? prev_[token] : 0);
    if (prev_best > scan_.prev_best) scan_.raise_prev(prev_best);
    if (request_.mass) add_sums_in_float64(begin, end);
  }

  void add_sums_in_float64(int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      const double y = cross() ? prev_[v] : 0;
      if (cross() && y != -kInfinity) scan_.prev_mass += std::exp(y - scan_.prev_best);
      const double x = row_[v];
      if (v == scan_.token || x == -kInfinity) continue;
      const double d = x - scan_.best;
      const double e = std::exp(d);
      scan_.rest += e;
      if (cross() && y == -kInfinity) scan_.infinite_kl = true;
      if (e == 0) continue;
      scan_.energy += e * d;
      if (cross() && y != -kInfinity) scan_.cross += e * (d - (y - scan_.prev_best));
    }
    scan_.undefined |= std::isnan(scan_.rest);
  }

  void add_piece(int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    const T* const x = contiguous(row_, begin, n, row_copy_);
    const float best = request_.mass ? kernels_.max(x, n) : kernels_.max_or_nan(x, n);
    if (std::isnan(best) || best == kInfinity) {
      scan_.undefined = true;
      return;
    }
    if (best > scan_.best) {
      const int64_t v = begin + kernels_.find(x, n, best);
      scan_.raise(best, v, request_.cross ? prev_[v] : 0);
    }
    if (!request_.mass) return;

    bool plain = best != -kInfinity;
    const T* prev = nullptr;
    if (cross()) {
      prev = contiguous(prev_, begin, n, prev_copy_);
      const Range range = kernels_.range(prev, n);
      scan_.prev_undefined = range.max == kInfinity;
      if (range.max > scan_.prev_best) scan_.raise_prev(range.max);
      plain = plain && range.min > scan_.prev_best - kPrevDepth;
    }
    if (!plain) {
      add_sums_in_float64(begin, end);
      return;
    }
    // The best token has no part in the sums.
    const int64_t at = scan_.token - begin;
    if (at < 0 || at >= n) {
      add_sums(x, prev, 0, n);
    } else {
      add_sums(x, prev, 0, at);
      add_sums(x, prev, at + 1, n);
      if (cross()) scan_.prev_mass += std::exp(scan_.prev_at_token - scan_.prev_best);
    }
    scan_.undefined |= std::isnan(scan_.rest);
  }

  void add_sums(const T* x, const T* prev, int64_t begin, int64_t end) {
    const unsigned wanted = (request_.energy ? kEnergy : kMass) | (cross() ? kCross : kMass);
    const RowSums sums =
        kernels_.sums[wanted](x + begin, cross() ? prev + begin : nullptr, end - begin,
                              static_cast<float>(scan_.best), static_cast<float>(scan_.prev_best));
    scan_.rest += sums.mass;
    scan_.energy += sums.energy;
    scan_.cross += sums.cross;
    scan_.prev_mass += sums.prev_mass;
  }

  static const T* contiguous(const Row<T>& row, int64_t begin, int64_t n, T* copy) {
    if (row.stride == 1) return row.data + begin;
    for (int64_t i = 0; i < n; ++i) copy[i] = load(row.data + (begin + i) * row.stride);
    return copy;
  }

  const Row<T> row_, prev_;
  const ScanRequest request_;
  const RowKernels& kernels_;
  RowScan scan_;
  T row_copy_[kPiece], prev_copy_[kPiece];
};

}  // namespace dlmkern
