#include <cmath>
#include <limits>
#include <vector>

#include "check_ops.h"
#include "parallel.h"
#include "tensor.h"

namespace dlmkern {
namespace {

// A row's numbers one after the other: where they are, or else copied to `buffer`.
template <class T>
const T* consecutive(const T* row, int64_t stride, int64_t size, T* buffer) {
  if (stride == 1) return row;
  for (int64_t j = 0; j < size; ++j) buffer[j] = load(row + j * stride);
  return buffer;
}

template <class T>
void write_row(T* row, int64_t stride, int64_t size, const T* values) {
  if (stride == 1 && size > 0) {
    std::memcpy(row, values, static_cast<size_t>(size) * sizeof(T));
  } else {
    for (int64_t j = 0; j < size; ++j) store(row + j * stride, load(values + j));
  }
}

// Turns a key: element j pairs with j + size / 2.
template <class T>
void rotate(const T* x, const Wide<T>* cos, const Wide<T>* sin, int64_t size, T* __restrict y) {
  const int64_t half = size / 2;
  for (int64_t j = 0; j < half; ++j) {
    const Wide<T> first = static_cast<Wide<T>>(to_double(load(x + j)));
    const Wide<T> second = static_cast<Wide<T>>(to_double(load(x + half + j)));
    y[j] = rounded<T>(first * load(cos + j) - second * load(sin + j));
    y[half + j] = rounded<T>(second * load(cos + half + j) + first * load(sin + half + j));
  }
}

// The sums that drift is made of, over the numbers of one position; in lanes, so that they become vectors.
struct Moments {
  static constexpr int kLanes = 4;
  double before[kLanes] = {}, after[kLanes] = {}, both[kLanes] = {}, moved[kLanes] = {};

  template <class T>
  void add(const T* old_row, const T* new_row, int64_t size) {
    int64_t j = 0;
    for (; j + kLanes <= size; j += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) add_one(lane, old_row + j, new_row + j);
    }
    for (int lane = 0; j + lane < size; ++lane) add_one(lane, old_row + j, new_row + j);
  }

  template <class T>
  void add_one(int lane, const T* old_row, const T* new_row) {
    const double x = to_double(load(old_row + lane)), y = to_double(load(new_row + lane));
    before[lane] += x * x;
    after[lane] += y * y;
    both[lane] += x * y;
    moved[lane] += (y - x) * (y - x);
  }

  static double sum(const double* x) { return (x[0] + x[1]) + (x[2] + x[3]); }
  double cosine() const { return sum(both) / (std::sqrt(sum(before)) * std::sqrt(sum(after))); }
  double distance() const { return std::sqrt(sum(moved)) / std::sqrt(sum(before)); }
};

struct Arguments {
  const dlmkern_view &k_cache, &v_cache, &k, &v, &positions;
  const dlmkern_view *cos, *sin, *drift;
};

// Working memory of a thread, for rows that do not lie consecutively and for turned keys.
template <class T>
struct Buffers {
  T *old_row, *given, *turned;
  Wide<T>* cos;
  Wide<T>* sin;
};

template <class T>
void write_position(const Arguments& a, int64_t b, int64_t i, const Buffers<T>& buffers) {
  const int64_t H = a.k.shape[1], d = a.k.shape[3], p = read_int64(a.positions, b, i);
  if (p < 0 || p >= a.k_cache.shape[2]) {
    if (a.drift == nullptr) return;
    for (int64_t part = 0; part < 4; ++part) {
      write_float(*a.drift, std::numeric_limits<double>::quiet_NaN(), part, b, i);
    }
    return;
  }
  const auto table_row = [&](const dlmkern_view* table, Wide<T>* buffer) -> const Wide<T>* {
    if (table == nullptr || H == 0) return nullptr;  // without heads there is no key, and no buffer
    return consecutive(address_of<Wide<T>>(*table, p), table->stride[1], d, buffer);
  };
  const Wide<T>* const cos = table_row(a.cos, buffers.cos);
  const Wide<T>* const sin = table_row(a.sin, buffers.sin);
  const auto write = [&](const dlmkern_view& cache, const dlmkern_view& source, bool turn, int64_t part) {
    Moments moments;
    for (int64_t h = 0; h < H; ++h) {
      T* const place = address_of<T>(cache, b, h, p);
      const T* row = consecutive(address_of<T>(source, b, h, i), source.stride[3], d, buffers.given);
      if (turn) {
        rotate(row, cos, sin, d, buffers.turned);
        row = buffers.turned;
      }
      if (a.drift != nullptr) moments.add(consecutive(place, cache.stride[3], d, buffers.old_row), row, d);
      write_row(place, cache.stride[3], d, row);
    }
    if (a.drift == nullptr) return;
    write_float(*a.drift, moments.cosine(), part, b, i);
    write_float(*a.drift, moments.distance(), part + 1, b, i);
  };
  write(a.k_cache, a.k, cos != nullptr, 0);
  write(a.v_cache, a.v, false, 2);
}

template <class T>
void run(const Arguments& a) {
  const int64_t B = a.k.shape[0], H = a.k.shape[1], n = a.k.shape[2];
  const int64_t d = H == 0 ? 0 : a.k.shape[3];
  const bool worth = B * n > 1 && B * H * n * d > kParallelWork;
  const int64_t threads = worth ? thread_count() : 1;
  std::vector<T> rows(static_cast<size_t>(threads * 3 * d));
  std::vector<Wide<T>> tables(static_cast<size_t>(a.cos == nullptr ? 0 : threads * 2 * d));
#pragma omp parallel for schedule(static) num_threads(threads) if (worth)
  for (int64_t r = 0; r < B * n; ++r) {
    T* const row = rows.data() + thread_index() * 3 * d;
    Wide<T>* const table = tables.data() + thread_index() * 2 * d;
    write_position<T>(a, r / n, r % n, {row, row + d, row + 2 * d, table, table + d});
  }
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_kv_block_write(const dlmkern_view* k_cache, const dlmkern_view* v_cache,
                                          const dlmkern_view* k, const dlmkern_view* v,
                                          const dlmkern_view* positions, const dlmkern_view* cos,
                                          const dlmkern_view* sin, const dlmkern_view* drift) {
  DLMKERN_TRY(check_kv_block_write(k_cache, v_cache, k, v, positions, cos, sin, drift));
  return guarded([&] {
    const Arguments arguments{*k_cache, *v_cache, *k, *v, *positions, cos, sin, drift};
    with_float_type(k_cache->dtype,
                    [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(arguments); });
    return DLMKERN_OK;
  });
}
