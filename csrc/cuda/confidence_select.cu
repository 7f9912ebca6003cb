// A block for each row sorts it by confidence, after which a position's rank is its place. The bitonic
// network takes n log^2 n steps and needs no scratch but the order; it lies in shared memory up to about 4000
// positions, beyond that in the workspace.
#include "check_ops.h"
#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kMostPositions = int64_t{1} << 30;

struct Arguments {
  RealTensor confidence;
  Tensor<const uint8_t> mask;
  Tensor<const double> parameter;
  int rule;
  Tensor<uint8_t> selected;
  int n;
  void* workspace;
};

// The positions of a row by falling confidence.
struct Ranking {
  double* confidence;  // [n], NaN for what is no candidate
  int* order;          // [slots], slots being a power of two; in the end the candidates come first
  int n;
  unsigned slots;

  static __host__ __device__ unsigned slots_for(int n) {
    unsigned slots = 1;
    while (slots < static_cast<unsigned>(n)) slots *= 2;
    return slots;
  }

  static __host__ __device__ size_t bytes(int n) {
    const size_t used = n * sizeof(double) + slots_for(n) * sizeof(int);
    return divide_up<size_t>(used, 256) * 256;
  }

  static __host__ __device__ bool is_shared(int n) { return bytes(n) <= kSharedBytes; }

  __device__ Ranking(void* memory, int n) : n(n), slots(slots_for(n)) {
    confidence = static_cast<double*>(memory);
    order = reinterpret_cast<int*>(confidence + n);
  }

  // NaN for the slots beyond the row, too.
  __device__ double confidence_of(int i) const { return i < n ? confidence[i] : NAN; }

  // A total order: the same whatever the schedule.
  __device__ bool goes_before(int i, int j) const {
    const double a = confidence_of(i), b = confidence_of(j);
    if (isnan(a) || isnan(b)) return isnan(a) == isnan(b) ? i < j : isnan(b);
    return a > b || (a == b && i < j);
  }

  // All threads.
  __device__ void sort() const {
    for (unsigned slot = threadIdx.x; slot < slots; slot += blockDim.x) order[slot] = static_cast<int>(slot);
    __syncthreads();
    for (unsigned run = 2; run <= slots; run *= 2) {
      for (unsigned distance = run / 2; distance > 0; distance /= 2) {
        for (unsigned pair = threadIdx.x; pair < slots / 2; pair += blockDim.x) {
          const unsigned low = 2 * pair - pair % distance, high = low + distance;
          const int i = order[low], j = order[high];
          const bool forwards = (low & run) == 0;  // every other run is sorted backwards
          if (goes_before(j, i) == forwards) {
            order[low] = j;
            order[high] = i;
          }
        }
        __syncthreads();
      }
    }
  }
};

__device__ bool passes(int rule, int rank, double c, double parameter) {
  switch (rule) {
    case DLMKERN_RULE_THRESHOLD:
      return rank == 1 || c >= parameter;
    case DLMKERN_RULE_FACTOR:
      return rank == 1 || (rank + 1.0) * (1 - c) < parameter;
    case DLMKERN_RULE_SCHEDULE:
      return rank <= parameter;
    default:
      return rank == 1 || c >= 1 - parameter / (rank + 1.0);
  }
}

__global__ void __launch_bounds__(kThreads) confidence_select(Arguments a) {
  DLMKERN_DYNAMIC_SHARED(unsigned char, shared);
  const int64_t b = blockIdx.x;
  unsigned char* const in_workspace = static_cast<unsigned char*>(a.workspace) + b * Ranking::bytes(a.n);
  const Ranking ranking(Ranking::is_shared(a.n) ? shared : in_workspace, a.n);
  for (int i = threadIdx.x; i < a.n; i += blockDim.x) {
    ranking.confidence[i] = !a.mask || a.mask(b, i) ? a.confidence.read(b, i) : NAN;
  }
  ranking.sort();

  const double parameter = a.parameter(b);
  int candidates = 0, passing = 0;
  for (int first = 0; first < a.n; first += blockDim.x) {
    const int place = first + static_cast<int>(threadIdx.x);
    bool candidate = false, pass = false;
    if (place < a.n) {
      const int i = ranking.order[place];
      const double c = ranking.confidence[i];
      candidate = !isnan(c);
      pass = candidate && passes(a.rule, place + 1, c, parameter);
      a.selected(b, i) = pass;
    }
    candidates += __syncthreads_count(candidate);
    passing += __syncthreads_count(pass);
  }
  const bool all = a.rule == DLMKERN_RULE_FACTOR_OFFICIAL && passing == candidates - 1;
  if (all && threadIdx.x == 0) a.selected(b, ranking.order[candidates - 1]) = 1;
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" size_t dlmkern_cuda_confidence_select_workspace(int64_t B, int64_t n) {
  if (B <= 0 || n <= 0) return 0;
  if (n > kMostPositions) return kTooManyBytes;
  const int positions = static_cast<int>(n);
  return Ranking::is_shared(positions) ? 0 : product(static_cast<size_t>(B), Ranking::bytes(positions));
}

extern "C" int dlmkern_cuda_confidence_select(const dlmkern_view* confidence, const dlmkern_view* mask,
                                              const dlmkern_view* parameter, int rule,
                                              const dlmkern_view* selected, void* workspace,
                                              size_t workspace_bytes, void* stream) {
  DLMKERN_TRY(check_confidence_select(confidence, mask, parameter, rule, selected));
  const int64_t B = confidence->shape[0], n = confidence->shape[1];
  if (B == 0 || n == 0) return DLMKERN_OK;
  if (!fits_grid(B) || n > kMostPositions) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_workspace(workspace, workspace_bytes, dlmkern_cuda_confidence_select_workspace(B, n)));
  const int positions = static_cast<int>(n);
  const Arguments arguments{real_tensor_of(confidence),
                            tensor_of<const uint8_t>(mask),
                            tensor_of<const double>(parameter),
                            rule,
                            tensor_of<uint8_t>(selected),
                            positions,
                            workspace};
  // A small row is sorted by a warp or a few, whose barriers are quick.
  const unsigned threads = min(max(Ranking::slots_for(positions) / 2, unsigned{kWarp}), unsigned{kThreads});
  const size_t shared_bytes = Ranking::is_shared(positions) ? Ranking::bytes(positions) : 0;
  DLMKERN_LAUNCH(confidence_select, static_cast<unsigned>(B), threads, shared_bytes,
                 static_cast<cudaStream_t>(stream))
  (arguments);
  return launch_result();
}
