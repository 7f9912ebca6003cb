// When a loop is worth OpenMP's threads. A parallel region costs some microseconds, so small ops stay on
// their thread.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace dlmkern {

constexpr int64_t kParallelWork = 32768;  // elements read

inline int64_t thread_count() {
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

inline int64_t thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

}  // namespace dlmkern
