// A block for each row. One thread adds the scores in order of the index, a chain of n additions that rounds
// as on every backend. The k best are found without sorting: the k-th largest score is built bit by bit, the
// most significant first, each by counting how many scores reach it. That takes up to 63 passes over scores
// that lie in the first-level cache, and ends with the first number that k of them reach. The same search,
// over the index, divides a tie.
#include "check_ops.h"
#include "views.h"

namespace dlmkern {
namespace {

constexpr int kThreads = 1024;
constexpr int kAtOnce = 8;  // terms of the sum that are read before they are added
constexpr int kScoreBits = 63;
constexpr int kParts = 3, kDrift = 2;

using Bits = unsigned long long;

// Of numbers that are not negative, the bits have the same order.
__device__ Bits bits_of(double x) { return static_cast<Bits>(__double_as_longlong(x)); }
__device__ double from_bits(Bits x) { return __longlong_as_double(static_cast<long long>(x)); }

struct Arguments {
  RealTensor parts[kParts];  // uncertainty, influence, drift
  Tensor<const uint8_t> eligible;
  Tensor<const int64_t> most;
  bool additive, above_mean;
  Tensor<uint8_t> seeds;
  Tensor<double> score;
  int n;

  __device__ bool takes_part(int64_t b, int i) const {
    if (eligible && !eligible(b, i)) return false;
    for (const RealTensor& part : parts) {
      if (part && !isfinite(part.read(b, i))) return false;
    }
    return true;
  }

  __device__ double read(int part, int64_t b, int i) const {
    const double x = parts[part].read(b, i);
    return x > 0 ? x : 0;
  }

  // Of a position that takes part. `largest` are the parts' largest numbers.
  __device__ double score_of(int64_t b, int i, const Bits* largest) const {
    double score = 0;
    for (int part = 0; part < kParts; ++part) {
      if (!parts[part]) continue;
      const double share = largest[part] > 0 ? read(part, b, i) / from_bits(largest[part]) : 0;
      const double factor = part == kDrift ? 1 - share : share;
      // A product is not to meet the sum over positions in one rounding.
      score = part == 0 ? factor : additive ? score + factor : __dmul_rn(score, factor);
    }
    return score;
  }

  // Calls body(i) for the thread's positions, and as often in every thread: i may lie beyond the last.
  template <class Body>
  __device__ void each_position(Body body) const {
    for (int first = 0; first < n; first += blockDim.x) body(first + static_cast<int>(threadIdx.x));
  }

  // At how many positions `condition` holds. All threads.
  template <class Condition>
  __device__ int count(Condition condition) const {
    int found = 0;
    each_position([&](int i) { found += __syncthreads_count(i < n && condition(i)); });
    return found;
  }

  // A number of that many bits which `wanted` positions reach, or, if there is none, the largest that more
  // do. All threads.
  template <class Reaches>
  __device__ Bits bisect(int bits, int wanted, Reaches reaches) const {
    Bits number = 0;
    for (Bits bit = Bits{1} << (bits - 1); bit != 0; bit >>= 1) {
      const int found = count([&](int i) { return reaches(i, number | bit); });
      if (found >= wanted) number |= bit;
      if (found == wanted) break;
    }
    return number;
  }
};

// Raises `*most` to the largest value of the block's threads. All threads.
__device__ void raise(Bits* most, Bits value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  if (threadIdx.x % kWarp == 0) atomicMax(most, value);
}

__global__ void __launch_bounds__(kThreads, 1) cover_seeds(Arguments a) {
  DLMKERN_SHARED(Bits[kParts + 1], largest);  // of the parts, and the largest score
  DLMKERN_SHARED(double[kThreads], tile);
  DLMKERN_SHARED(double, sum);
  const int64_t b = blockIdx.x;
  if (threadIdx.x <= kParts) largest[threadIdx.x] = 0;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  for (int part = 0; part < kParts; ++part) {
    if (!a.parts[part]) continue;
    double most = 0;
    a.each_position([&](int i) {
      if (i < a.n && a.takes_part(b, i)) most = max(most, a.read(part, b, i));
    });
    raise(&largest[part], bits_of(most));
  }
  __syncthreads();

  a.each_position([&](int i) {
    const double score = i < a.n && a.takes_part(b, i) ? a.score_of(b, i, largest) : 0;
    if (i < a.n) a.score(b, i) = score;
    tile[threadIdx.x] = score;
    raise(&largest[kParts], bits_of(score));
    __syncthreads();
    if (threadIdx.x == 0) {
      double total = sum;
      for (unsigned j = 0; j < blockDim.x; j += kAtOnce) {
        double terms[kAtOnce];
        DLMKERN_UNROLL
        for (int k = 0; k < kAtOnce; ++k) terms[k] = tile[j + k];
        DLMKERN_UNROLL
        for (int k = 0; k < kAtOnce; ++k) total += terms[k];
      }
      sum = total;
    }
    __syncthreads();
  });

  // From here on a thread reads only the scores that it has written.
  double suspects = 0;
  if (a.above_mean) {
    const int candidates = a.count([&](int i) { return a.takes_part(b, i); });
    const double mean = sum / max(candidates, 1);
    suspects = a.count([&](int i) { return a.score(b, i) > mean; });
  } else if (largest[kParts] > 0) {
    suspects = sum / from_bits(largest[kParts]);
  }
  const int64_t most = a.most(b);
  const int wanted = a.count([&](int rank) {
    return rank < most && static_cast<double>(static_cast<int64_t>(rank) * rank) < suspects;
  });
  const Bits least = a.bisect(kScoreBits, wanted, [&](int i, Bits x) { return bits_of(a.score(b, i)) >= x; });
  // The lower of two indices goes first, so it is the distance from the last that counts.
  const auto is_among = [&](int i, Bits distance) {
    const Bits score = bits_of(a.score(b, i));
    return score > least || (score == least && static_cast<Bits>(a.n - 1 - i) >= distance);
  };
  const Bits distance = a.bisect(kWarp - __clz(a.n), wanted, is_among);
  a.each_position([&](int i) {
    if (i < a.n) a.seeds(b, i) = a.score(b, i) > 0 && is_among(i, distance);
  });
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cuda_cover_seeds(const dlmkern_view* uncertainty, const dlmkern_view* influence,
                                        const dlmkern_view* drift, const dlmkern_view* eligible,
                                        const dlmkern_view* most, int additive, int above_mean,
                                        const dlmkern_view* seeds, const dlmkern_view* score, void* stream) {
  DLMKERN_TRY(
      check_cover_seeds(uncertainty, influence, drift, eligible, most, additive, above_mean, seeds, score));
  const int64_t B = uncertainty->shape[0], n = uncertainty->shape[1];
  if (B == 0 || n == 0) return DLMKERN_OK;
  if (!fits_grid(B) || !fits_grid(n + kThreads)) return DLMKERN_ERROR_SHAPE;
  const Arguments arguments{{real_tensor_of(uncertainty), real_tensor_of(influence), real_tensor_of(drift)},
                            tensor_of<const uint8_t>(eligible),
                            tensor_of<const int64_t>(most),
                            additive == 1,
                            above_mean == 1,
                            tensor_of<uint8_t>(seeds),
                            tensor_of<double>(score),
                            static_cast<int>(n)};
  const auto threads = static_cast<unsigned>(min(divide_up<int64_t>(n, kWarp) * kWarp, int64_t{kThreads}));
  DLMKERN_LAUNCH(cover_seeds, static_cast<unsigned>(B), threads, 0, static_cast<cudaStream_t>(stream))
  (arguments);
  return launch_result();
}
