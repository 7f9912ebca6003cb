#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "check_ops.h"
#include "score_tiles.h"
#include "tensor.h"

// The rows that predict a seed are listed, and each is corrected from what it is. Those that this would cost
// too many digits are left, and computed anew in tiles of rows of one key head: block by block of keys come
// the scores, the weights and their mean of the values. What is computed for a row does not depend on its
// tile, and each row belongs to one thread: the result is the same for any number of threads.

namespace dlmkern {
namespace {

struct Arguments {
  const dlmkern_view &out, &lse, &q, &k, &v, &k_cached, &v_cached, &seeds;
  const dlmkern_view *lengths, *positions;
  int shift;
  double scale, recompute_below;

  int64_t query_heads() const { return q.shape[1]; }
  int64_t group() const { return q.shape[1] / k.shape[1]; }  // of query heads with one key head
  int64_t size() const { return q.shape[3]; }                // of a head
  int64_t end(int64_t b) const {
    const int64_t L = k_cached.shape[2];
    return lengths == nullptr ? L : std::clamp<int64_t>(read_int64(*lengths, b), 0, L);
  }
};

// A row of `out` that is to be corrected.
struct Target {
  int64_t b, head, row;
  int64_t seed;    // the row of k and v that takes the place of
  int64_t column;  // this key and value
  bool anew;       // it is to be computed from the keys
};

// Sequence after sequence, and head after head in each.
std::vector<Target> list_targets(const Arguments& a) {
  const int64_t B = a.q.shape[0], n = a.q.shape[2];
  std::vector<Target> targets, of_head;
  for (int64_t b = 0; b < B; ++b) {
    of_head.clear();
    const int64_t end = a.end(b);
    for (int64_t seed = a.shift; seed < n; ++seed) {
      if (!read_bool(a.seeds, b, seed)) continue;
      const int64_t column = a.positions == nullptr ? seed : read_int64(*a.positions, b, seed);
      if (column >= 0 && column < end) of_head.push_back({b, 0, seed - a.shift, seed, column, false});
    }
    for (int64_t head = 0; head < a.query_heads(); ++head) {
      for (Target& target : of_head) target.head = head;
      targets.insert(targets.end(), of_head.begin(), of_head.end());
    }
  }
  return targets;
}

template <class T>
Row<T> row_of_head(const dlmkern_view& view, int64_t b, int64_t head, int64_t i) {
  return {address_of<T>(view, b, head, i), view.stride[3]};
}

// A row's numbers one after the other, as they are computed with: where they are, or else in `buffer`.
template <class T>
const Wide<T>* widened(Row<T> row, int64_t size, Wide<T>* buffer) {
  if (row.stride == 1) {
    if constexpr (std::is_same_v<T, Wide<T>>) return row.data;
    for (int64_t j = 0; j < size; ++j) buffer[j] = widen(load(row.data + j));
  } else {
    for (int64_t j = 0; j < size; ++j) buffer[j] = widen(load(row.data + j * row.stride));
  }
  return buffer;
}

// In lanes, so that the sums become vectors.
template <class Scalar>
double dot(const Scalar* x, const Scalar* y, int64_t size) {
  constexpr int64_t kLanes = 8;
  double sums[kLanes] = {};
  const auto product = [&](int64_t j) {
    return static_cast<double>(load(x + j)) * static_cast<double>(load(y + j));
  };
  int64_t j = 0;
  for (; j + kLanes <= size; j += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += product(j + lane);
  }
  for (; j < size; ++j) sums[j % kLanes] += product(j);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// All memory is allocated before anything is written.
template <class T>
class DiagonalCorrection {
  using Scalar = Wide<T>;
  static constexpr Scalar kInfinity = std::numeric_limits<Scalar>::infinity();
  static constexpr int64_t kBuffers = 6;  // of a widened row each

 public:
  DiagonalCorrection(const Arguments& a, std::vector<Target>& targets)
      : a_(a),
        kernels_(score_kernels_of<Scalar>()),
        size_(a.size()),
        block_(kBlockPanels * kernels_.columns),
        width_(round_up(size_, kernels_.columns)),
        targets_(targets) {
    const double numbers = static_cast<double>(size_) * static_cast<double>(targets.size());
    threads_ = numbers > kParallelWork ? thread_count() : 1;
    tiles_.reserve(targets.size() + 1);
    buffers_.allocate({threads_, kBuffers, size_});
    queries_.allocate({threads_, kTileRows, size_});
    keys_.allocate({threads_, kernels_.columns, size_});
    values_.allocate({threads_, block_, width_});
    scores_.allocate({threads_, kTileRows, block_});
    weights_.allocate({threads_, kTileRows, block_});
    sums_.allocate({threads_, kTileRows, width_});
  }

  void run() {
    const int64_t count = static_cast<int64_t>(targets_.size());
#pragma omp parallel for schedule(static) num_threads(threads_) if (threads_ > 1)
    for (int64_t i = 0; i < count; ++i) targets_[i].anew = !correct(targets_[i]);
    targets_.erase(
        std::remove_if(targets_.begin(), targets_.end(), [](const Target& target) { return !target.anew; }),
        targets_.end());
    list_tiles();
    const int64_t tiles = static_cast<int64_t>(tiles_.size()) - 1;
    const int64_t threads = threads_for_tiles();
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < tiles; ++i) recompute(targets_.data() + tiles_[i], tiles_[i + 1] - tiles_[i]);
  }

 private:
  // Whether it could be done from what the row is.
  bool correct(const Target& target) const {
    const auto& [b, head, row, seed, column, anew] = target;
    const int64_t key_head = head / a_.group();
    Scalar* buffer = buffers_ + thread_index() * kBuffers * size_;
    const auto read = [&](const dlmkern_view& view, int64_t view_head, int64_t i) {
      const Scalar* const numbers = widened(row_of_head<T>(view, b, view_head, i), size_, buffer);
      buffer += size_;
      return numbers;
    };
    const Scalar* const q = read(a_.q, head, row);
    Scalar* const lse = address_of<Scalar>(a_.lse, b, head, row);
    const double before = static_cast<double>(load(lse));
    const double weight = std::exp(a_.scale * dot(q, read(a_.k_cached, key_head, column), size_) - before);
    const double gap = a_.scale * dot(q, read(a_.k, key_head, seed), size_) - before;  // log b
    // Both of 1 - a and b divided by exp(top), so that neither overflows.
    const double top = std::max(gap, 0.0), small = std::exp(-top), other = std::exp(gap - top);
    const double r = (1 - weight) * small + other;
    if (!(r > a_.recompute_below * small)) return false;

    const Scalar* const cached = read(a_.v_cached, key_head, column);
    const Scalar* const own = read(a_.v, key_head, seed);
    const Scalar* const out = read(a_.out, head, row);
    T* const address = address_of<T>(a_.out, b, head, row);
    const int64_t stride = a_.out.stride[3];
    const double kept = small / r, taken = weight * small / r, given = other / r;
    for (int64_t j = 0; j < size_; ++j) {
      const double value = kept * static_cast<double>(load(out + j)) -
                           taken * static_cast<double>(load(cached + j)) +
                           given * static_cast<double>(load(own + j));
      store(address + j * stride, rounded<T>(static_cast<Scalar>(value)));
    }
    store(lse, static_cast<Scalar>(before + top + std::log(r)));
    return true;
  }

  // tiles_[i] becomes the first target of tile i, and the last number the end of all.
  void list_tiles() {
    const int64_t count = static_cast<int64_t>(targets_.size());
    const int64_t most = std::min(kTileRows, round_up(ceil_div(count, thread_count()), kernels_.rows));
    const auto together = [&](const Target& x, const Target& y) {
      return x.b == y.b && x.head / a_.group() == y.head / a_.group();
    };
    for (int64_t i = 0; i < count; ++i) {
      const bool joins =
          !tiles_.empty() && i - tiles_.back() < most && together(targets_[tiles_.back()], targets_[i]);
      if (!joins) tiles_.push_back(i);
    }
    tiles_.push_back(count);
  }

  int64_t threads_for_tiles() const {
    double products = 0;
    for (const Target& target : targets_) products += static_cast<double>(a_.end(target.b));
    return products * static_cast<double>(size_) > kParallelProducts ? threads_ : 1;
  }

  // The largest score of a row and the sum of exp(score - max).
  struct RowSum {
    Scalar max;
    double sum;
  };

  // Computes some targets of one key head from the keys.
  void recompute(const Target* targets, int64_t count) const {
    const int64_t thread = thread_index(), b = targets->b, key_head = targets->head / a_.group();
    Scalar* const queries = queries_ + thread * kTileRows * size_;
    double* const means = sums_ + thread * kTileRows * width_;
    RowSum rows[kTileRows];
    std::fill(queries, queries + round_up(count, kernels_.rows) * size_, Scalar{0});
    for (int64_t i = 0; i < count; ++i) rows[i] = begin_row(targets[i], i, queries, means + i * width_);

    const int64_t end = a_.end(b);
    for (int64_t first = 0; first < end; first += block_) {
      const int64_t keys = std::min(block_, end - first);
      score_block(b, key_head, first, keys, queries, count);
      weigh_block(targets, count, first, keys, rows, means);
      read_values(b, key_head, first, keys);
      add_block(count, keys, means);
    }

    for (int64_t i = 0; i < count; ++i) {
      const auto& [sequence, head, row, seed, column, anew] = targets[i];
      T* const out = address_of<T>(a_.out, sequence, head, row);
      for (int64_t j = 0; j < size_; ++j) {
        const double mean = means[i * width_ + j] / rows[i].sum;
        store(out + j * a_.out.stride[3], rounded<T>(static_cast<Scalar>(mean)));
      }
      const double lse = static_cast<double>(rows[i].max) + std::log(rows[i].sum);
      store(address_of<Scalar>(a_.lse, sequence, head, row), static_cast<Scalar>(lse));
    }
  }

  // Packs a row's query and lets its sums begin with its own key and value.
  RowSum begin_row(const Target& target, int64_t i, Scalar* queries, double* mean) const {
    const auto& [b, head, row, seed, column, anew] = target;
    const int64_t key_head = head / a_.group();
    Scalar* const buffer = buffers_ + thread_index() * kBuffers * size_;
    const Scalar* const q = widened(row_of_head<T>(a_.q, b, head, row), size_, buffer);
    const Scalar* const k = widened(row_of_head<T>(a_.k, b, key_head, seed), size_, buffer + size_);
    const Scalar* const v = widened(row_of_head<T>(a_.v, b, key_head, seed), size_, buffer + 2 * size_);
    const int64_t lane = i % kernels_.rows;
    Scalar* const panel = queries + (i - lane) * size_ + lane;
    for (int64_t j = 0; j < size_; ++j) {
      panel[j * kernels_.rows] = load(q + j) * static_cast<Scalar>(a_.scale);
      mean[j] = static_cast<double>(load(v + j));
    }
    std::fill(mean + size_, mean + width_, 0.0);
    return {static_cast<Scalar>(a_.scale * dot(q, k, size_)), 1};
  }

  // What all queries see at a place: a row of the cache, or of this pass. Meanwhile a later one is asked for:
  // they are too short and too scattered for the processor to foresee.
  Row<T> shared_row(const dlmkern_view& cached, const dlmkern_view& fresh, int64_t b, int64_t key_head,
                    int64_t place) const {
    const auto row_at = [&](int64_t i) {
      const bool from_cache = a_.positions != nullptr || read_bool(a_.seeds, b, i);
      return row_of_head<T>(from_cache ? cached : fresh, b, key_head, i);
    };
    constexpr int64_t kAhead = 4, kOfLine = kLineBytes / sizeof(T);
    const Row<T> later = row_at(std::min(place + kAhead, cached.shape[2] - 1));
    for (int64_t j = 0; j < size_; j += kOfLine) __builtin_prefetch(later.data + j * later.stride);
    return row_at(place);
  }

  // The scores of a block of keys, row after row.
  void score_block(int64_t b, int64_t key_head, int64_t first, int64_t keys, const Scalar* queries,
                   int64_t count) const {
    const int64_t thread = thread_index(), rows = kernels_.rows, columns = kernels_.columns;
    Scalar* const buffer = buffers_ + thread * kBuffers * size_;
    Scalar* const panel = keys_ + thread * columns * size_;
    Scalar* const scores = scores_ + thread * kTileRows * block_;
    for (int64_t j = 0; j < keys; j += columns) {
      const int64_t real = std::min(columns, keys - j);
      if (real < columns) std::fill(panel, panel + columns * size_, Scalar{0});
      for (int64_t column = 0; column < real; ++column) {
        const Row<T> row = shared_row(a_.k_cached, a_.k, b, key_head, first + j + column);
        const Scalar* const key = widened(row, size_, buffer);
        for (int64_t l = 0; l < size_; ++l) panel[l * columns + column] = load(key + l);
      }
      for (int64_t i = 0; i < count; i += rows) {
        kernels_.tile(queries + i * size_, panel, size_, scores + i * block_ + j, block_);
      }
    }
  }

  // Joins a block's scores to the rows' sums, and packs its weights.
  void weigh_block(const Target* targets, int64_t count, int64_t first, int64_t keys, RowSum* rows,
                   double* means) const {
    const int64_t lanes = kernels_.rows, padded = round_up(keys, kernels_.columns);
    Scalar* const scores = scores_ + thread_index() * kTileRows * block_;
    Scalar* const packed = weights_ + thread_index() * kTileRows * block_;
    std::fill(packed, packed + round_up(count, lanes) * block_, Scalar{0});
    for (int64_t i = 0; i < count; ++i) {
      Scalar* const row = scores + i * block_;
      const int64_t replaced = targets[i].column - first;
      const bool here = replaced >= 0 && replaced < keys;
      if (here) row[replaced] = -kInfinity;
      std::fill(row + keys, row + padded, -kInfinity);
      auto& [max, sum] = rows[i];
      const Scalar block_max = kernels_.max(row, padded);
      if (block_max > max) {
        const double factor = std::exp(static_cast<double>(max) - static_cast<double>(block_max));
        for (int64_t j = 0; j < size_; ++j) means[i * width_ + j] *= factor;
        sum *= factor;
        max = block_max;
      }
      sum += kernels_.mass(row, padded, max);
      Scalar weights[kBlockPanels * kMaxPanelWidth] = {};
      kernels_.add_weights(row, padded, max, 1, weights);
      if (here) weights[replaced] = 0;
      Scalar* const panel = packed + (i - i % lanes) * block_ + i % lanes;
      for (int64_t j = 0; j < keys; ++j) panel[j * lanes] = weights[j];
    }
  }

  // Packs a block's values into panels, of which each has some numbers of every value.
  void read_values(int64_t b, int64_t key_head, int64_t first, int64_t keys) const {
    const int64_t columns = kernels_.columns;
    Scalar* const buffer = buffers_ + thread_index() * kBuffers * size_;
    Scalar* const values = values_ + thread_index() * block_ * width_;
    for (int64_t i = 0; i < keys; ++i) {
      const Row<T> row = shared_row(a_.v_cached, a_.v, b, key_head, first + i);
      const Scalar* const value = widened(row, size_, buffer);
      for (int64_t j = 0; j < width_; j += columns) {
        Scalar* const part = values + j * block_ + i * columns;
        const int64_t real = std::min(columns, size_ - j);
        for (int64_t l = 0; l < real; ++l) part[l] = load(value + j + l);
        std::fill(part + real, part + columns, Scalar{0});
      }
    }
  }

  // Adds a block's weighted values to the means.
  void add_block(int64_t count, int64_t keys, double* means) const {
    const int64_t rows = kernels_.rows, columns = kernels_.columns;
    const Scalar* const weights = weights_ + thread_index() * kTileRows * block_;
    const Scalar* const values = values_ + thread_index() * block_ * width_;
    Scalar* const products = scores_ + thread_index() * kTileRows * block_;  // the scores have served
    for (int64_t j = 0; j < width_; j += columns) {
      for (int64_t i = 0; i < count; i += rows) {
        kernels_.tile(weights + i * block_, values + j * block_, keys, products, columns);
        for (int64_t row = 0; row < std::min(rows, count - i); ++row) {
          double* const mean = means + (i + row) * width_ + j;
          for (int64_t l = 0; l < columns; ++l) mean[l] += static_cast<double>(products[row * columns + l]);
        }
      }
    }
  }

  const Arguments& a_;
  const ScoreKernels<Scalar>& kernels_;
  const int64_t size_;   // of a head
  const int64_t block_;  // of keys
  const int64_t width_;  // of a row's sums: full panels of the head's numbers
  int64_t threads_;
  std::vector<Target>& targets_;
  std::vector<int64_t> tiles_;
  Scratch<Scalar> buffers_, queries_, keys_, values_, scores_, weights_;
  Scratch<double> sums_;
};

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_diagonal_correction(const dlmkern_view* out, const dlmkern_view* lse,
                                               const dlmkern_view* q, const dlmkern_view* k,
                                               const dlmkern_view* v, const dlmkern_view* k_cached,
                                               const dlmkern_view* v_cached, const dlmkern_view* seeds,
                                               const dlmkern_view* lengths, const dlmkern_view* positions,
                                               int shift, double scale, double recompute_below) {
  DLMKERN_TRY(check_diagonal_correction(out, lse, q, k, v, k_cached, v_cached, seeds, lengths, positions,
                                        shift, scale, recompute_below));
  DLMKERN_TRY(check_isa());
  if (q->shape[1] == 0) return DLMKERN_OK;
  return guarded([&] {
    const Arguments arguments{*out,   *lse,    *q,        *k,    *v,    *k_cached,      *v_cached,
                              *seeds, lengths, positions, shift, scale, recompute_below};
    std::vector<Target> targets = list_targets(arguments);
    if (targets.empty()) return DLMKERN_OK;
    with_float_type(q->dtype, [&](auto* type) {
      DiagonalCorrection<std::remove_pointer_t<decltype(type)>>(arguments, targets).run();
    });
    return DLMKERN_OK;
  });
}
