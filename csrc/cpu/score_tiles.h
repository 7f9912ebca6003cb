// What the ops that multiply queries and keys tile by tile share.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <type_traits>

#include "isa.h"
#include "parallel.h"

namespace dlmkern {

// A multiple of every instruction set's rows. That many queries and a panel of keys fit in the first cache.
constexpr int64_t kTileRows = 36;
constexpr int64_t kBlockPanels = 16;  // of keys, whose scores are joined to the sums at once
constexpr int64_t kLineBytes = 64;    // of a cache
constexpr double kParallelProducts = 64 * kParallelWork;  // fewer are left to one thread

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Uninitialised numbers that begin a cache line.
template <class Scalar>
class Scratch {
 public:
  void allocate(std::initializer_list<int64_t> shape) {
    int64_t bytes = sizeof(Scalar);
    for (const int64_t size : shape) {
      if (__builtin_mul_overflow(bytes, size, &bytes)) throw std::bad_alloc();
    }
    data_.reset(static_cast<Scalar*>(operator new(static_cast<size_t>(bytes), kAlignment)));
  }
  Scalar* operator+(int64_t offset) const { return data_.get() + offset; }

 private:
  static constexpr std::align_val_t kAlignment{kLineBytes};
  struct Free {
    void operator()(Scalar* data) const { operator delete(data, kAlignment); }
  };
  std::unique_ptr<Scalar, Free> data_;
};

// After check_isa().
template <class Scalar>
const ScoreKernels<Scalar>& score_kernels_of() {
  if constexpr (std::is_same_v<Scalar, double>) {
    return score_kernels().float64;
  } else {
    return score_kernels().float32;
  }
}

}  // namespace dlmkern
