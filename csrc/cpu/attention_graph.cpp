#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "check.h"
#include "score_tiles.h"
#include "tensor.h"

// A matrix product whose scores never reach main memory. The keys of some heads are packed into panels; then
// every thread takes a tile of rows through all those heads: block by block of keys, it computes the scores,
// joins them to the rows' maxima and sums, and keeps those of the wanted keys, which come first. What is
// computed for a row does not depend on its tile, and each row belongs to one thread: the result is the same
// for any number of threads.

namespace dlmkern {
namespace {

constexpr int64_t kPackedBytes = 4 << 20;  // about so many of keys are packed at once

int64_t size_of(const std::vector<int64_t>& list) { return static_cast<int64_t>(list.size()); }

struct Arguments {
  const dlmkern_view &q, &k, &positions;
  const dlmkern_view *rows, *lengths, *lse;
  double scale;
  const dlmkern_view& out;
};

// What of a sequence is not padding.
class Selection {
 public:
  Selection(int64_t L, int64_t M) : column_of_(static_cast<size_t>(L)) {
    keys.reserve(static_cast<size_t>(L));
    for (auto* const list : {&entries, &rows, &columns}) list->reserve(static_cast<size_t>(M));
  }

  // Allocates nothing.
  void select(const Arguments& a, int64_t b) {
    const int64_t n = a.q.shape[2], L = a.k.shape[2], M = a.positions.shape[1];
    const int64_t end = a.lengths == nullptr ? L : std::clamp<int64_t>(read_int64(*a.lengths, b), 0, L);
    for (auto* const list : {&entries, &rows, &columns, &keys}) list->clear();
    std::fill(column_of_.begin(), column_of_.end(), -1);
    for (int64_t i = 0; i < M; ++i) {
      const int64_t place = read_int64(a.positions, b, i);
      const int64_t row = a.rows == nullptr ? place : read_int64(*a.rows, b, i);
      if (place < 0 || place >= end || row < 0 || row >= n) continue;
      add_key(place);
      entries.push_back(i);
      rows.push_back(row);
      columns.push_back(column_of_[place]);
    }
    wanted = static_cast<int64_t>(keys.size());
    if (a.lse != nullptr) return;
    for (int64_t place = 0; place < end; ++place) add_key(place);
  }

  std::vector<int64_t> entries;  // those of `positions`
  std::vector<int64_t> rows;     // of q, one an entry
  std::vector<int64_t> columns;  // of the scores, one an entry
  std::vector<int64_t> keys;     // the place of every column's key: the entries' come first, each once
  int64_t wanted = 0;            // how many these are

 private:
  void add_key(int64_t place) {
    if (column_of_[place] >= 0) return;
    column_of_[place] = static_cast<int64_t>(keys.size());
    keys.push_back(place);
  }

  std::vector<int64_t> column_of_;  // every place's, -1 for none
};

// Fills a panel with the first rows of a matrix that `rows` names, times `scale`, and with zeros. Meanwhile
// those of the next panel are asked for: they are too short and too scattered for the processor to foresee.
template <class T>
void pack(const T* matrix, const int64_t* stride, const int64_t* rows, int64_t count, int64_t width,
          int64_t size, Wide<T> scale, Wide<T>* panel) {
  constexpr int64_t kOfLine = kLineBytes / sizeof(T);
  const T *row[kMaxPanelWidth], *next[kMaxPanelWidth];
  const int64_t following = std::clamp<int64_t>(count - width, 0, width);
  count = std::min(count, width);
  for (int64_t i = 0; i < count; ++i) row[i] = matrix + rows[i] * stride[0];
  for (int64_t i = 0; i < following; ++i) next[i] = matrix + rows[width + i] * stride[0];
  for (int64_t j = 0; j < size; ++j, panel += width) {
    if (j % kOfLine == 0) {
      for (int64_t i = 0; i < following; ++i) __builtin_prefetch(next[i] + j * stride[1]);
    }
    for (int64_t i = 0; i < count; ++i) panel[i] = widen(load(row[i] + j * stride[1])) * scale;
    std::fill(panel + count, panel + width, Wide<T>{0});
  }
}

// The largest score of a row and the sum of exp(score - max). One infinite score makes the sum infinite.
template <class Scalar>
struct RowSum {
  static constexpr Scalar kInfinity = std::numeric_limits<Scalar>::infinity();
  static constexpr Scalar kLargest = std::numeric_limits<Scalar>::max();

  Scalar max = -kInfinity;
  double sum = 0;

  void add(const ScoreKernels<Scalar>& kernels, const Scalar* scores, int64_t n) {
    const Scalar block_max = kernels.max(scores, n);
    if (block_max > max) {
      sum *= std::exp(static_cast<double>(max) - static_cast<double>(block_max));
      max = block_max;
    }
    sum += kernels.mass(scores, n, std::clamp(max, -kLargest, kLargest));
  }

  Scalar shift() const { return std::min(max, kLargest); }  // -inf stays: there is no distribution then
};

// All memory is allocated before anything is written. Then sequence follows sequence; rows are its entries,
// in order, and a head's packed keys lie panel after panel.
template <class T>
class AttentionGraph {
  using Scalar = Wide<T>;

 public:
  AttentionGraph(const Arguments& a, const ScoreKernels<Scalar>& kernels)
      : a_(a), kernels_(kernels), size_(a.q.shape[3]), selection_(a.k.shape[2], a.positions.shape[1]) {
    const int64_t L = a.k.shape[2], M = a.positions.shape[1], columns = kernels.columns;
    const int64_t wanted = std::min(L, M), keys = a.lse == nullptr ? L : wanted;  // at most
    const double products = static_cast<double>(a.q.shape[1]) * M * keys * size_;
    threads_ = products > kParallelProducts ? thread_count() : 1;
    tile_rows_ = std::min(kTileRows, round_up(ceil_div(M, threads_), kernels.rows));
    block_ = kBlockPanels * columns;
    stride_ = round_up(wanted, block_) + block_ + columns;  // a power of two would be bad for the cache
    head_size_ = round_up(keys, columns) * size_;
    const double head_bytes = static_cast<double>(head_size_) * sizeof(Scalar);
    heads_at_once_ = std::clamp<int64_t>(kPackedBytes / head_bytes, 1, a.k.shape[1]);
    keys_.allocate({heads_at_once_, head_size_});
    queries_.allocate({threads_, tile_rows_, size_});
    scores_.allocate({threads_, tile_rows_, stride_});
    weights_.allocate({threads_, tile_rows_, stride_});
  }

  void add_sequence(int64_t b) {
    selection_.select(a_, b);
    const int64_t rows = size_of(selection_.rows);
    if (rows == 0) return;
    const int64_t panels = ceil_div(size_of(selection_.keys), kernels_.columns);
    for (int64_t first = 0; first < a_.k.shape[1]; first += heads_at_once_) {
      const int64_t heads = std::min(heads_at_once_, a_.k.shape[1] - first);
#pragma omp parallel for schedule(static) num_threads(threads_) if (threads_ > 1)
      for (int64_t i = 0; i < heads * panels; ++i) {
        pack_keys(b, first + i / panels, i % panels, keys_ + i / panels * head_size_);
      }
#pragma omp parallel for schedule(dynamic) num_threads(threads_) if (threads_ > 1)
      for (int64_t row = 0; row < rows; row += tile_rows_) {
        add_tile(b, row, std::min(tile_rows_, rows - row), first, heads);
      }
    }
  }

 private:
  void pack_keys(int64_t b, int64_t head, int64_t panel, Scalar* packed) const {
    const int64_t first = panel * kernels_.columns;
    pack(address_of<T>(a_.k, b, head), a_.k.stride + 2, selection_.keys.data() + first,
         size_of(selection_.keys) - first, kernels_.columns, size_, Scalar{1}, packed + first * size_);
  }

  // Adds some key heads' share to `count` rows of `out`.
  void add_tile(int64_t b, int64_t first_row, int64_t count, int64_t first_head, int64_t heads) const {
    const int64_t scratch_row = thread_index() * tile_rows_;
    Scalar* const queries = queries_ + scratch_row * size_;
    Scalar* const scores = scores_ + scratch_row * stride_;
    Scalar* const weights = weights_ + scratch_row * stride_;
    const int64_t* const rows = selection_.rows.data() + first_row;
    const int64_t query_heads = a_.q.shape[1], group = query_heads / a_.k.shape[1];
    const int64_t width = round_up(selection_.wanted, kernels_.columns);

    std::fill(weights, weights + count * stride_, Scalar{0});
    for (int64_t h = 0; h < heads * group; ++h) {
      const int64_t head = first_head * group + h;
      for (int64_t i = 0; i < count; i += kernels_.rows) {
        pack(address_of<T>(a_.q, b, head), a_.q.stride + 2, rows + i, count - i, kernels_.rows, size_,
             static_cast<Scalar>(a_.scale), queries + i * size_);
      }
      RowSum<Scalar> sums[kTileRows];
      score_tile(queries, keys_ + h / group * head_size_, count, scores, sums);
      for (int64_t i = 0; i < count; ++i) {
        Scalar shift = sums[i].shift();
        double sum = sums[i].sum;
        if (a_.lse != nullptr) {
          shift = load(address_of<Scalar>(*a_.lse, b, head, rows[i]));
          sum = 1;
        }
        const auto share = static_cast<Scalar>(1 / (sum * static_cast<double>(query_heads)));
        kernels_.add_weights(scores + i * stride_, width, shift, share, weights + i * stride_);
      }
    }
    for (int64_t i = 0; i < count; ++i) add_row(b, first_row + i, weights + i * stride_);
  }

  // Computes a head's scores, keeps those of the wanted keys, and sums up all of them unless `lse` is given.
  void score_tile(const Scalar* queries, const Scalar* keys, int64_t count, Scalar* scores,
                  RowSum<Scalar>* sums) const {
    const int64_t rows = kernels_.rows, columns = kernels_.columns, all = size_of(selection_.keys);
    const int64_t kept = round_up(selection_.wanted, block_);
    for (int64_t first = 0; first < all; first += block_) {
      const int64_t width = std::min(block_, round_up(all - first, columns));
      Scalar* const block = scores + std::min(first, kept);  // those that are not kept take turns
      for (int64_t j = 0; j < width; j += columns) {
        for (int64_t i = 0; i < count; i += rows) {
          kernels_.tile(queries + i * size_, keys + (first + j) * size_, size_, block + i * stride_ + j,
                        stride_);
        }
      }
      if (a_.lse != nullptr) continue;
      for (int64_t i = 0; i < count; ++i) {
        Scalar* const row = block + i * stride_;
        std::fill(row + std::min(width, all - first), row + width, -RowSum<Scalar>::kInfinity);
        sums[i].add(kernels_, row, width);
      }
    }
  }

  void add_row(int64_t b, int64_t row, const Scalar* weights) const {
    Scalar* const out = address_of<Scalar>(a_.out, b, selection_.entries[row]);
    const int64_t *const entries = selection_.entries.data(), *const columns = selection_.columns.data();
    const int64_t stride = a_.out.stride[2], count = size_of(selection_.entries);
    for (int64_t j = 0; j < count; ++j) {
      Scalar* const address = out + entries[j] * stride;
      store(address, load(address) + weights[columns[j]]);
    }
  }

  const Arguments& a_;
  const ScoreKernels<Scalar>& kernels_;
  const int64_t size_;  // of a head
  Selection selection_;
  int64_t threads_, tile_rows_;
  int64_t block_;          // of keys, in columns of scores
  int64_t stride_;         // between rows of scores, and of weights
  int64_t head_size_;      // of its packed keys
  int64_t heads_at_once_;  // key heads whose keys are packed at once
  Scratch<Scalar> keys_, queries_, scores_, weights_;
};

int check(const dlmkern_view* q, const dlmkern_view* k, const dlmkern_view* positions,
          const dlmkern_view* rows, const dlmkern_view* lengths, const dlmkern_view* lse, double scale,
          const dlmkern_view* out) {
  DLMKERN_TRY(check_input(q, kFloat, {kAnySize, kAnySize, kAnySize, kAnySize}));
  const int64_t B = q->shape[0], Hq = q->shape[1], n = q->shape[2], d = q->shape[3];
  DLMKERN_TRY(check_input(k, dtype_bit(q->dtype), {B, kAnySize, kAnySize, d}));
  const int64_t Hkv = k->shape[1], L = k->shape[2];
  if (d < 1 || (Hkv == 0 ? Hq != 0 : Hq % Hkv != 0)) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_input(positions, kInt64, {B, kAnySize}));
  const int64_t M = positions->shape[1];
  DLMKERN_TRY(check_optional_input(rows, kInt64, {B, M}));
  if (rows == nullptr && n != L) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_optional_input(lengths, kInt64, {B}));
  const unsigned arithmetic = q->dtype == DLMKERN_FLOAT64 ? kFloat64 : kFloat32;
  DLMKERN_TRY(check_optional_input(lse, arithmetic, {B, Hq, n}));
  if (!std::isfinite(scale)) return DLMKERN_ERROR_VALUE;
  return check_output(out, arithmetic, {B, M, M});
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_attention_graph(const dlmkern_view* q, const dlmkern_view* k,
                                           const dlmkern_view* positions, const dlmkern_view* rows,
                                           const dlmkern_view* lengths, const dlmkern_view* lse, double scale,
                                           const dlmkern_view* out) {
  DLMKERN_TRY(check(q, k, positions, rows, lengths, lse, scale, out));
  DLMKERN_TRY(check_isa());
  const int64_t B = positions->shape[0], M = positions->shape[1];
  if (B == 0 || M == 0 || q->shape[1] == 0 || q->shape[2] == 0 || k->shape[2] == 0) return DLMKERN_OK;
  return guarded([&] {
    const Arguments arguments{*q, *k, *positions, rows, lengths, lse, scale, *out};
    with_float_type(q->dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      AttentionGraph<T> graph(arguments, score_kernels_of<Wide<T>>());
      for (int64_t b = 0; b < B; ++b) graph.add_sequence(b);
    });
    return DLMKERN_OK;
  });
}
