// Kernels with one bug each, and the same kernels without it (kFixed). The comment "BUG name" marks the line
// that a report must name. Built as a library for the emulator's own checks, as a program (main) for the
// sanitizers'.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "dlmkern_cuda.h"

namespace {

constexpr int kThreads = 64;
constexpr unsigned kAllLanes = 0xffffffffu;

template <bool kFixed>
__global__ void divergent_barrier(float* out) {
  if (kFixed || threadIdx.x < 32) {
    __syncthreads();  // BUG divergent_barrier
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1.f;
}

template <bool kFixed>
__global__ void skipped_barrier(float* out) {
  if (kFixed || threadIdx.x != 5) __syncthreads();  // BUG skipped_barrier
  out[threadIdx.x] = 1.f;
}

template <bool kFixed>
__global__ void exited_lane(float* out) {
  if (!kFixed && threadIdx.x == 7) return;
  out[threadIdx.x] = __shfl_xor_sync(kAllLanes, 1.f, 1);  // BUG exited_lane
}

template <bool kFixed>
__global__ void missing_lane(float* out) {                            // of 48 threads the last warp has 16
  __syncwarp(kFixed && threadIdx.x >= 32 ? 0x0000ffffu : kAllLanes);  // BUG missing_lane
  out[threadIdx.x] = 1.f;
  if (threadIdx.x < 16) out[48 + threadIdx.x] = 1.f;
}

template <bool kFixed>
__global__ void foreign_mask(float* out) {
  const unsigned mask = threadIdx.x % 32 < 16 || !kFixed ? 0x0000ffffu : 0xffff0000u;
  out[threadIdx.x] = static_cast<float>(__any_sync(mask, 1));  // BUG foreign_mask
}

template <bool kFixed>
__global__ void mismatched_collective(float* out) {
  float x = 1.f;
  if (kFixed || threadIdx.x % 2 == 0) {
    x = __shfl_xor_sync(kAllLanes, x, 2);  // BUG mismatched_collective
  } else {
    x = __shfl_down_sync(kAllLanes, x, 2);
  }
  out[threadIdx.x] = x;
}

template <bool kFixed>
__global__ void mismatched_mask(float* out) {
  const unsigned mask = kFixed || threadIdx.x % 2 == 0 ? kAllLanes : 0xaaaaaaaau;
  out[threadIdx.x] = static_cast<float>(__any_sync(mask, 1));  // BUG mismatched_mask
}

template <bool kFixed>
__global__ void deadlock(float* out) {
  if (!kFixed && threadIdx.x == 3) {
    __syncwarp();  // BUG deadlock
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1.f;
}

template <bool kFixed>
__global__ void spinning(float* out, int* flag) {
  if (threadIdx.x == 0) {
    while (atomicAdd(flag, 0) == 0) {  // BUG spinning
    }
  } else if (threadIdx.x == 1 && kFixed) {
    atomicExch(flag, 1);
  }
  out[threadIdx.x] = 1.f;
}

template <bool kFixed>
__global__ void trapped(float* out) {
  if (!kFixed && threadIdx.x == 9) __trap();  // BUG trapped
  out[threadIdx.x] = 1.f;
}

// Wrong results rather than broken rules: every thread should read 1 from its neighbour.
template <bool kFixed>
__global__ void missing_barrier(float* out) {
  DLMKERN_SHARED(float[kThreads], buffer);
  buffer[threadIdx.x] = 1.f;
  if (kFixed) __syncthreads();
  out[threadIdx.x] = buffer[(threadIdx.x + 1) % kThreads];
}

template <bool kFixed>
__global__ void missing_warp_barrier(float* out) {
  DLMKERN_SHARED(float[kThreads], buffer);
  buffer[threadIdx.x] = 1.f;
  if (kFixed) __syncwarp();
  out[threadIdx.x] = buffer[threadIdx.x ^ 1];
}

template <bool kFixed>
__global__ void unwritten_shared(float* out) {
  DLMKERN_SHARED(float[kThreads], buffer);
  if (kFixed || threadIdx.x != 0) buffer[threadIdx.x] = 1.f;
  __syncthreads();
  out[threadIdx.x] = buffer[kThreads - 1 - threadIdx.x];
}

template <bool kFixed>
__global__ void lost_update(float* out, int* counter) {
  if (kFixed) {
    atomicAdd(counter, 1);
  } else {
    const int seen = *counter;
    __threadfence();
    *counter = seen + 1;
  }
  __syncthreads();
  out[threadIdx.x] = *counter == kThreads ? 1.f : 0.f;
}

// For the sanitizers.
template <bool kFixed>
__global__ void static_shared_out_of_bounds(float* out) {
  DLMKERN_SHARED(float[kThreads], buffer);
  DLMKERN_SHARED(float[kThreads], other);
  float* cells = buffer;               // a pointer, whose bounds only red zones can tell
  cells[threadIdx.x + !kFixed] = 1.f;  // BUG static_shared_out_of_bounds
  other[threadIdx.x] = 1.f;
  out[threadIdx.x] = other[threadIdx.x];
}

template <bool kFixed>
__global__ void dynamic_shared_out_of_bounds(float* out) {
  DLMKERN_DYNAMIC_SHARED(float, buffer);
  buffer[threadIdx.x + !kFixed] = 1.f;  // BUG dynamic_shared_out_of_bounds
  out[threadIdx.x] = 1.f;
}

template <bool kFixed>
__global__ void global_out_of_bounds(float* out) {
  out[threadIdx.x + !kFixed] = 1.f;  // BUG global_out_of_bounds
  if (!kFixed) out[threadIdx.x] = 1.f;
}

template <bool kFixed>
__global__ void misaligned_vector(float* out) {
  const auto* vector = reinterpret_cast<const float2*>(out + 2 * (threadIdx.x / 4) + !kFixed);
  const float2 pair = *vector;  // BUG misaligned_vector
  out[threadIdx.x] = pair.x == 2.f && pair.y == 2.f ? 0.f : 1.f;
}

template <bool kFixed>
cudaError_t run(const std::string& name, float* out) {
  int cell = 0;
  const auto simple = [&](void (*kernel)(float*), int threads = kThreads) {
    DLMKERN_LAUNCH(kernel, 1, threads, kThreads * sizeof(float), nullptr)(out);
    return cudaGetLastError();
  };
  const auto with_cell = [&](void (*kernel)(float*, int*)) {
    DLMKERN_LAUNCH(kernel, 1, kThreads, 0, nullptr)(out, &cell);
    return cudaGetLastError();
  };
  if (name == "divergent_barrier") return simple(divergent_barrier<kFixed>);
  if (name == "skipped_barrier") return simple(skipped_barrier<kFixed>);
  if (name == "exited_lane") return simple(exited_lane<kFixed>);
  if (name == "missing_lane") return simple(missing_lane<kFixed>, 48);
  if (name == "foreign_mask") return simple(foreign_mask<kFixed>);
  if (name == "mismatched_collective") return simple(mismatched_collective<kFixed>);
  if (name == "mismatched_mask") return simple(mismatched_mask<kFixed>);
  if (name == "deadlock") return simple(deadlock<kFixed>);
  if (name == "spinning") return with_cell(spinning<kFixed>);
  if (name == "trapped") return simple(trapped<kFixed>);
  if (name == "missing_barrier") return simple(missing_barrier<kFixed>);
  if (name == "missing_warp_barrier") return simple(missing_warp_barrier<kFixed>);
  if (name == "unwritten_shared") return simple(unwritten_shared<kFixed>);
  if (name == "lost_update") return with_cell(lost_update<kFixed>);
  if (name == "static_shared_out_of_bounds") return simple(static_shared_out_of_bounds<kFixed>);
  if (name == "dynamic_shared_out_of_bounds") return simple(dynamic_shared_out_of_bounds<kFixed>);
  if (name == "global_out_of_bounds") return simple(global_out_of_bounds<kFixed>);
  if (name == "misaligned_vector") return simple(misaligned_vector<kFixed>);
  return cudaErrorInvalidValue;
}

}  // namespace

// out: kThreads floats; a run without a bug sets all of them to 1.
extern "C" __attribute__((visibility("default"))) int planted_bug(const char* name, int fixed, float* out) {
  return fixed ? run<true>(name, out) : run<false>(name, out);
}

int main(int argc, char** argv) {
  if (argc != 4) return EXIT_FAILURE;
  dlmkern::emulator::settings.order = static_cast<dlmkern::emulator::Order>(std::atoi(argv[3]));
  std::vector<float> out(kThreads);
  const int error = planted_bug(argv[1], std::string(argv[2]) == "fixed", out.data());
  if (error) std::fprintf(stderr, "%s\n", cudaGetErrorString(static_cast<cudaError_t>(error)));
  for (const float value : out) {
    if (value != 1.f) return EXIT_FAILURE;
  }
  return error ? EXIT_FAILURE : EXIT_SUCCESS;
}
