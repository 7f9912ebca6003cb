// Three kernels: degrees and peaks, 32 rows a block; edges, a tile of 32 x 32 a block; the scan, a sequence a
// block. What they hand on lies in the workspace, as the scan wants it. No product meets a sum, so nothing
// can be fused into one rounding.
#include <cfloat>

#include "check_ops.h"
#include "greedy.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = kWarp;
constexpr int kLines = kTile / (kThreads / kWarp);  // of a tile, for each warp
constexpr double kLeastPeak = 1e-8;

struct Arguments {
  RealTensor scores, confidence;
  Tensor<const uint8_t> valid;
  Tensor<const double> tau, certain, late;
  bool symmetric;
  Tensor<uint8_t> selected;
  int n;
  void* workspace;
  double* peak;  // [B, n], in the workspace

  __device__ bool is_candidate(int64_t b, int i) const {
    return i < n && (!valid || valid(b, i)) && isfinite(confidence.read(b, i));
  }

  __device__ double score(int64_t b, int i, int j) const {
    const double x = scores.read(b, i, j);
    return fabs(x) <= FLT_MAX ? x : 0;
  }

  __device__ Greedy greedy(int64_t b) const { return Greedy(greedy_workspace(n, workspace, b), n); }
};

// The weights of 32 rows and 32 columns of a sequence, 0 for what is no pair of candidates.
struct Weights {
  double (&of_column)[kTile][kTile + 1];  // a column's rows follow each other

  // All threads, and they have to meet before the tile is loaded anew.
  __device__ void load(const Arguments& a, int64_t b, int rows_from, int columns_from) const {
    const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * kLines;
    const unsigned rows = __ballot_sync(kAllLanes, a.is_candidate(b, rows_from + lane));
    const unsigned columns = __ballot_sync(kAllLanes, a.is_candidate(b, columns_from + lane));
    const auto score = [&](int row, int column, bool mirrored) -> double {
      const int i = rows_from + row, j = columns_from + column;
      if (i == j || !(rows >> row & 1) || !(columns >> column & 1)) return 0;
      return mirrored ? a.score(b, j, i) : a.score(b, i, j);
    };
    // Lanes read along rows of the scores both times; all reads come before the first barrier.
    double mirrored[kLines];
    DLMKERN_UNROLL for (int k = 0; k < kLines; ++k) {
      of_column[lane][first + k] = score(first + k, lane, false);
      mirrored[k] = score(lane, first + k, true);
    }
    __syncthreads();
    DLMKERN_UNROLL for (int k = 0; k < kLines; ++k) {
      double& weight = of_column[first + k][lane];  // so far a score
      weight = (weight + mirrored[k]) / 2;
    }
    __syncthreads();
  }
};

__global__ void __launch_bounds__(kThreads) measure_rows(Arguments a) {
  DLMKERN_SHARED(double[kTile][kTile + 1], tile);
  const Weights weights{tile};
  const int tiles = divide_up(a.n, kTile);
  const int64_t b = blockIdx.x / tiles;
  const int from = blockIdx.x % tiles * kTile, i = from + static_cast<int>(threadIdx.x);
  double degree = 0, peak = kLeastPeak;
  for (int columns_from = 0; columns_from < a.n; columns_from += kTile) {
    weights.load(a, b, from, columns_from);
    if (threadIdx.x < kTile) {
      for (int j = 0; j < kTile; ++j) {
        const double weight = weights.of_column[j][threadIdx.x];
        degree += weight;
        peak = max(peak, weight);
      }
    }
    __syncthreads();
  }
  if (threadIdx.x >= kTile || i >= a.n) return;
  a.peak[b * a.n + i] = peak;
  const double c = a.confidence.read(b, i);
  const bool scanned = a.is_candidate(b, i) && !(c >= a.certain(b));
  a.greedy(b).priority[i] = scanned ? degree * c : NAN;
}

__global__ void __launch_bounds__(kThreads) find_edges(Arguments a) {
  DLMKERN_SHARED(double[kTile][kTile + 1], tile);
  const Weights weights{tile};
  const int tiles = divide_up(a.n, kTile);
  const int column_tile = blockIdx.x % tiles;
  const int64_t b = blockIdx.x / tiles / tiles;
  const int from = blockIdx.x / tiles % tiles * kTile, columns_from = column_tile * kTile;
  weights.load(a, b, from, columns_from);
  const Greedy greedy = a.greedy(b);
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * kLines, j = columns_from + lane;
  const double tau = a.tau(b);
  const double* peak = a.peak + b * a.n;
  const double peak_of_column = j < a.n ? peak[j] : kLeastPeak;
  for (int row = first; row < first + kLines && from + row < a.n; ++row) {
    const int i = from + row;
    const double weight = weights.of_column[lane][row];
    const bool edge = weight / peak[i] > tau || (a.symmetric && weight / peak_of_column > tau);
    const unsigned bits = __ballot_sync(kAllLanes, edge);
    if (lane == 0) greedy.blockers[static_cast<int64_t>(i) * greedy.words + column_tile] = bits;
  }
}

// There are few sequences, so a multiprocessor has room for all the registers of its one block.
__global__ void __launch_bounds__(kGreedyThreads, 1) select(Arguments a) {
  DLMKERN_DYNAMIC_SHARED(uint4, shared);
  const int64_t b = blockIdx.x;
  const Greedy greedy = greedy_of_block(a.n, a.workspace, shared);
  if (Greedy::is_shared(a.n)) {
    const auto* found = static_cast<const uint4*>(greedy_workspace(a.n, a.workspace, b));
    const int size = static_cast<int>(Greedy::bytes(a.n) / sizeof(uint4));
    for (int k = threadIdx.x; k < size; k += kGreedyThreads) shared[k] = found[k];
    __syncthreads();
  }
  greedy.start([](int) { return false; });
  greedy.run();
  const double enough = fmin(a.certain(b), a.late(b));  // NaN only if both are
  for (int i = threadIdx.x; i < a.n; i += kGreedyThreads) {
    const double c = a.confidence.read(b, i);
    a.selected(b, i) = greedy.is_in(i) || (a.is_candidate(b, i) && c >= enough);
  }
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" size_t dlmkern_cuda_dapd_select_workspace(int64_t B, int64_t M) {
  if (B <= 0 || M <= 0) return 0;
  if (!fits_grid(M)) return kTooManyBytes;
  return product(static_cast<size_t>(B), Greedy::bytes(M) + static_cast<size_t>(M) * sizeof(double));
}

extern "C" int dlmkern_cuda_dapd_select(const dlmkern_view* scores, const dlmkern_view* confidence,
                                        const dlmkern_view* valid, const dlmkern_view* tau,
                                        const dlmkern_view* certain, const dlmkern_view* late, int symmetric,
                                        const dlmkern_view* selected, void* workspace, size_t workspace_bytes,
                                        void* stream) {
  DLMKERN_TRY(check_dapd_select(scores, confidence, valid, tau, certain, late, symmetric, selected));
  const int64_t B = confidence->shape[0], M = confidence->shape[1];
  if (B == 0 || M == 0) return DLMKERN_OK;
  const int64_t tiles = divide_up<int64_t>(M, kTile);
  if (!fits_grid(M) || !fits_grid(B * tiles * tiles)) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_workspace(workspace, workspace_bytes, dlmkern_cuda_dapd_select_workspace(B, M)));
  auto* const peak = reinterpret_cast<double*>(static_cast<char*>(workspace) + B * Greedy::bytes(M));
  const Arguments arguments{real_tensor_of(scores),
                            real_tensor_of(confidence),
                            tensor_of<const uint8_t>(valid),
                            tensor_of<const double>(tau),
                            tensor_of<const double>(certain),
                            tensor_of<const double>(late),
                            symmetric == 1,
                            tensor_of<uint8_t>(selected),
                            static_cast<int>(M),
                            workspace,
                            peak};
  const auto on = static_cast<cudaStream_t>(stream);
  DLMKERN_LAUNCH(measure_rows, static_cast<unsigned>(B * tiles), kThreads, 0, on)(arguments);
  DLMKERN_LAUNCH(find_edges, static_cast<unsigned>(B * tiles * tiles), kThreads, 0, on)(arguments);
  DLMKERN_LAUNCH(select, static_cast<unsigned>(B), kGreedyThreads, greedy_shared_bytes(M), on)
  (arguments);
  return launch_result();
}
