#include <algorithm>
#include <vector>

#include "check.h"
#include "parallel.h"
#include "row_scan.h"

namespace dlmkern {
namespace {

struct Entry {
  double logit;
  int64_t id;
};

bool goes_first(const Entry& a, const Entry& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// The k best logits of a row, best first, in `heap`; false if the row has a NaN or +inf. A heap keeps the
// worst of them at its front, and once it is full only what exceeds that one is looked at: later ids lose a
// tie.
template <class T>
bool find_best(const Row<T>& row, int64_t V, int64_t banned, int64_t k, Entry* heap) {
  const RowKernels& kernels = row_kernels(DtypeOf<T>::value);
  int64_t size = 0;
  for (int64_t v = 0; v < V; ++v) {
    if constexpr (!std::is_same_v<T, double>) {
      if (size == k && row.stride == 1) {
        v += kernels.find_above(row.data + v, V - v, static_cast<float>(heap[0].logit));
        if (v == V) break;
      }
    }
    const double x = row[v];
    if (v == banned) continue;
    if (std::isnan(x) || x == std::numeric_limits<double>::infinity()) return false;
    if (size < k) {
      heap[size++] = {x, v};
      std::push_heap(heap, heap + size, goes_first);
    } else if (x > heap[0].logit) {
      std::pop_heap(heap, heap + k, goes_first);
      heap[k - 1] = {x, v};
      std::push_heap(heap, heap + k, goes_first);
    }
  }
  std::sort_heap(heap, heap + k, goes_first);
  return true;
}

// The sum of exp(x_v - max) over the logits below `limit`, the banned one left out.
template <class T>
double mass_below(const Row<T>& row, int64_t V, int64_t banned, double max, double limit) {
  if constexpr (!std::is_same_v<T, double>) {
    if (V > kShortRow && row.stride == 1) {
      const RowKernels& kernels = row_kernels(DtypeOf<T>::value);
      const auto part = [&](int64_t begin, int64_t end) {
        return kernels.mass_below(row.data + begin, end - begin, static_cast<float>(max),
                                  static_cast<float>(limit));
      };
      return banned < 0 ? part(0, V) : part(0, banned) + part(banned + 1, V);
    }
  }
  double mass = 0;
  for (int64_t v = 0; v < V; ++v) {
    const double x = row[v];
    if (v != banned && x < limit) mass += std::exp(x - max);
  }
  return mass;
}

// How many logits equal `value`, the banned one left out.
template <class T>
int64_t count_equal(const Row<T>& row, int64_t V, int64_t banned, double value) {
  int64_t count = 0;
  for (int64_t v = 0; v < V; ++v) {
    if constexpr (!std::is_same_v<T, double>) {
      if (row.stride == 1) {
        v += row_kernels(DtypeOf<T>::value).find(row.data + v, V - v, static_cast<float>(value));
        if (v == V) break;
      }
    }
    count += v != banned && row[v] == value;
  }
  return count;
}

template <class T>
void snapshot_row(const Row<T>& row, int64_t V, int64_t banned, Entry* best, int64_t b, int64_t i,
                  const dlmkern_view& ids, const dlmkern_view& logp, const dlmkern_view& floor) {
  const int64_t k = ids.shape[2];
  const double nan = std::numeric_limits<double>::quiet_NaN();
  if (!find_best(row, V, banned, k, best) || best[0].logit == -std::numeric_limits<double>::infinity()) {
    for (int64_t r = 0; r < k; ++r) {
      write_int64(ids, -1, b, i, r);
      write_float(logp, nan, b, i, r);
    }
    write_float(floor, nan, b, i);
    return;
  }
  // The tail is summed by itself: as 1 - sum_k p it would drown in rounding.
  const double max = best[0].logit, limit = best[k - 1].logit;
  double tail = mass_below(row, V, banned, max, limit);
  const int64_t ties =
      count_equal(row, V, banned, limit) -
      std::count_if(best, best + k, [&](const Entry& entry) { return entry.logit == limit; });
  if (ties > 0) tail += static_cast<double>(ties) * std::exp(limit - max);
  double rest = tail;
  for (int64_t r = k - 1; r > 0; --r) rest += std::exp(best[r].logit - max);
  const double lse = max + std::log1p(rest);
  for (int64_t r = 0; r < k; ++r) {
    write_int64(ids, best[r].id, b, i, r);
    write_float(logp, best[r].logit - lse, b, i, r);
  }
  const int64_t others = std::max<int64_t>(V - (banned >= 0 ? 1 : 0) - k, 1);
  write_float(floor, std::log(std::max(tail / (1 + rest), 1e-12) / static_cast<double>(others)), b, i);
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_topk_snapshot(const dlmkern_view* logits, int64_t banned_token,
                                         const dlmkern_view* ids, const dlmkern_view* logp,
                                         const dlmkern_view* floor) {
  DLMKERN_TRY(check_rows(logits));
  const int64_t B = logits->shape[0], n = logits->shape[1], V = logits->shape[2];
  if (banned_token < -1 || banned_token >= V) return DLMKERN_ERROR_VALUE;
  DLMKERN_TRY(check_output(ids, kInt64, {B, n, kAnySize}));
  const int64_t k = ids->shape[2];
  if (k < 1 || k > V - (banned_token >= 0 ? 1 : 0)) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_output(logp, kFloat64, {B, n, k}));
  DLMKERN_TRY(check_output(floor, kFloat64, {B, n}));
  DLMKERN_TRY(check_isa());
  return guarded([&] {
    const int64_t rows = B * n;
    std::vector<Entry> best(static_cast<size_t>(rows * k));
    with_float_type(logits->dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
#pragma omp parallel for schedule(static) if (rows * V > kParallelWork)
      for (int64_t r = 0; r < rows; ++r) {
        snapshot_row<T>(row_of<T>(*logits, r / n, r % n), V, banned_token, best.data() + r * k, r / n, r % n,
                        *ids, *logp, *floor);
      }
    });
    return DLMKERN_OK;
  });
}
