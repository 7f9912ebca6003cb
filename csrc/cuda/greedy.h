// Greedy selection in one sequence, by one block: what independent_set, cap_select and dapd_select
// have in common.
#pragma once

#include "views.h"

namespace dlmkern {

constexpr int kGreedyThreads = 512;

// The block's working memory for n positions. It lies in shared memory if it fits there, else in the
// workspace.
struct Greedy {
  double* priority;    // [n], NaN for what is no candidate
  uint32_t* in;        // a bit for each position: selected so far
  uint32_t* blockers;  // [n] rows of such bits: what keeps a candidate out if it is in
  int* order;          // [n], candidates by falling priority
  int n, words;

  static __host__ __device__ size_t bytes(int64_t n) {
    const int64_t words = divide_up<int64_t>(n, 32);
    const int64_t used = n * 8 + (words + n * words + n) * 4;
    return static_cast<size_t>(divide_up<int64_t>(used, 256) * 256);
  }

  static __host__ __device__ bool is_shared(int64_t n) { return bytes(n) <= kSharedBytes; }

  // Bytes of workspace for B sequences.
  static size_t workspace_bytes(int64_t B, int64_t n) {
    if (B <= 0 || n <= 0) return 0;
    if (!fits_grid(n)) return kTooManyBytes;
    return is_shared(n) ? 0 : product(static_cast<size_t>(B), bytes(n));
  }

  __device__ Greedy(void* memory, int n) : n(n), words(divide_up(n, 32)) {
    priority = static_cast<double*>(memory);
    in = reinterpret_cast<uint32_t*>(priority + n);
    blockers = in + words;
    order = reinterpret_cast<int*>(blockers + static_cast<int64_t>(n) * words);
  }

  __device__ bool is_in(int i) const { return in[i / 32] >> (i % 32) & 1; }
  __device__ bool is_candidate(int i) const { return !isnan(priority[i]); }

  // Ties go to the lower index.
  __device__ bool goes_before(int i, int j) const {
    return priority[i] > priority[j] || (priority[i] == priority[j] && i < j);
  }

  // Calls body(i) once for every position; body returns whether the position is in from the start. All
  // threads.
  template <class Body>
  __device__ void start(Body body) const {
    const unsigned lane = threadIdx.x % kWarp;
    for (int word = threadIdx.x / kWarp; word < words; word += kGreedyThreads / kWarp) {
      const int i = word * 32 + lane;
      const unsigned bits = __ballot_sync(kAllLanes, i < n && body(i));
      if (lane == 0) in[word] = bits;
    }
    __syncthreads();
  }

  // Adds the candidates one by one, by falling priority, unless conflict(i, j) for some j that is in. All
  // threads.
  template <class Conflict>
  __device__ void run(Conflict conflict) const {
    find_blockers(conflict);
    run();
  }

  // As above, for blockers that are already filled in; bits of non-candidates do no harm.
  __device__ void run() const {
    const int candidates = sort_candidates();
    __syncthreads();
    if (threadIdx.x < kWarp) scan(candidates);
    __syncthreads();
  }

 private:
  __device__ int sort_candidates() const {
    int candidates = 0;
    for (int first = 0; first < n; first += kGreedyThreads) {
      const int i = first + threadIdx.x;
      const bool candidate = i < n && is_candidate(i);
      candidates += __syncthreads_count(candidate);
      if (!candidate) continue;
      int rank = 0;
      for (int j = 0; j < n; ++j) rank += goes_before(j, i);
      order[rank] = i;
    }
    return candidates;
  }

  template <class Conflict>
  __device__ void find_blockers(Conflict conflict) const {
    const unsigned lane = threadIdx.x % kWarp;
    const int64_t tasks = static_cast<int64_t>(n) * words;
    for (int64_t task = threadIdx.x / kWarp; task < tasks; task += kGreedyThreads / kWarp) {
      const int i = static_cast<int>(task / words);
      if (!is_candidate(i)) continue;
      const int j = static_cast<int>(task % words) * 32 + lane;
      // What comes later can't keep i out, which spares half of the conflicts.
      const bool matters = j < n && j != i && (is_in(j) || goes_before(j, i));
      const unsigned bits = __ballot_sync(kAllLanes, matters && conflict(i, j));
      if (lane == 0) blockers[task] = bits;
    }
  }

  // By the first warp. A word of `in` is read and written by one lane alone.
  __device__ void scan(int candidates) const {
    const int lane = threadIdx.x;
    for (int rank = 0; rank < candidates; ++rank) {
      const int i = order[rank];
      const uint32_t* row = blockers + static_cast<int64_t>(i) * words;
      bool blocked = false;
      for (int word = lane; word < words; word += kWarp) blocked |= (row[word] & in[word]) != 0;
      if (!__any_sync(kAllLanes, blocked) && lane == i / 32 % kWarp) in[i / 32] |= 1u << (i % 32);
    }
  }
};

// The part of a workspace that is a sequence's.
__device__ inline void* greedy_workspace(int n, void* workspace, int64_t b) {
  return static_cast<char*>(workspace) + b * Greedy::bytes(n);
}

// The working memory of the calling block.
__device__ inline Greedy greedy_of_block(int n, void* workspace, void* shared) {
  return Greedy(Greedy::is_shared(n) ? shared : greedy_workspace(n, workspace, blockIdx.x), n);
}

inline size_t greedy_shared_bytes(int64_t n) { return Greedy::is_shared(n) ? Greedy::bytes(n) : 0; }

}  // namespace dlmkern
