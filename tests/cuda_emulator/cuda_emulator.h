// CUDA C++ for a host compiler: the part of the language and runtime that the kernels use, run on the CPU.
//
// The threads of a block are fibres, 32 lanes to a warp; blocks run one after another. A thread runs until it
// reaches a barrier, a warp collective, an atomic or a fence, so a missing barrier shows under some schedules
// only: run a kernel under several (see Settings). Shared memory holds NaN bytes (0xFF) when a block starts.
//
// A launch that breaks CUDA's rules is stopped and reported by cudaGetLastError() and cudaGetErrorString(),
// with the source lines concerned, and the emulator goes on to serve the next launch:
//   cudaErrorInvalidConfiguration, cudaErrorInvalidValue   sizes that no device accepts
//   cudaErrorLaunchFailure    divergent barrier, exited thread, mismatched collective, deadlock, trap
//   cudaErrorLaunchTimeout    more steps (collectives, barriers, atomics, fences) than Settings::step_limit
// Stricter than hardware on purpose: all threads of a block meet at one __syncthreads() in the source, none
// having exited; a mask names only lanes that exist and still run; lanes of a mask meet in one place in the
// source.
//
// Under AddressSanitizer shared arrays have red zones. A loop that waits without any step can't be
// interrupted. Not modelled: __activemask, cooperative groups, textures, constant memory, streams (a launch
// runs at once).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <driver_types.h>
#include <math.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <type_traits>

namespace dlmkern::emulator {

using Site = std::source_location;

enum class Order { forward = 0, reverse = 1, random = 2 };

struct Settings {
  // The order in which blocks, and the threads of a block, take turns. `random` shuffles anew at every round
  // and also switches threads at atomics and fences.
  Order order = Order::forward;
  std::uint64_t seed = 0;
  // Steps that one launch may take before it counts as spinning.
  std::uint64_t step_limit = std::uint64_t{1} << 26;
};
inline Settings settings;

// The indices of the running thread.
struct Coordinates {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
inline Coordinates coordinates{};

inline constexpr unsigned kWarpSize = 32;

inline unsigned lane_index() {
  const auto& [thread, block, size, grid] = coordinates;
  return (thread.x + size.x * (thread.y + size.y * thread.z)) % kWarpSize;
}

// ---- What the scheduler (cuda_emulator.cpp) does for a running thread -------------------------------------

struct BarrierVotes {
  unsigned count, threads;  // threads with a true predicate; all threads
};

// Waits for every thread of the block.
BarrierVotes barrier(const char* name, bool predicate, const Site& site);

// Waits for every lane of `mask` and returns the 32 lanes' values; those outside the mask are NaN bytes.
// Valid until the calling thread's next step.
const std::uint64_t* exchange(const char* name, unsigned mask, std::uint64_t value, const Site& site);

// A point where other threads may run; counts towards the step limit.
void step(const Site& site);

// Stops the launch.
[[noreturn]] void trap(const char* reason, const Site& site);

void* dynamic_shared_memory();

// A static shared array: one instance for each place in the source, placed anew in every block.
class SharedArray {
 public:
  constexpr SharedArray(std::size_t size, std::size_t alignment, Site site)
      : size_(size), alignment_(alignment), site_(site) {}
  void* address() { return block_ == current_block ? address_ : place(); }

  inline static std::uint64_t current_block = 0;  // counts the blocks of all launches

 private:
  void* place();

  std::size_t size_, alignment_;
  Site site_;
  std::uint64_t block_ = 0;
  void* address_ = nullptr;
};

// ---- Launches ---------------------------------------------------------------------------------------------

struct LaunchShape {
  dim3 grid, block;
  std::size_t shared_bytes;
};

void launch(const LaunchShape& shape, const void* kernel, void (*run_thread)(const void*),
            const void* context);

template <class... Parameters>
class Launcher {
 public:
  Launcher(void (*kernel)(Parameters...), LaunchShape shape) : kernel_(kernel), shape_(shape) {}

  void operator()(std::type_identity_t<Parameters>... arguments) const {
    static_assert((std::is_trivially_copyable_v<Parameters> && ...), "kernel arguments are copied as bytes");
    static_assert((sizeof(Parameters) + ... + 0) <= 4096, "kernel arguments are limited to 4 KB");
    const auto body = [&] { kernel_(arguments...); };
    const auto run_thread = [](const void* context) { (*static_cast<const decltype(body)*>(context))(); };
    launch(shape_, reinterpret_cast<const void*>(kernel_), run_thread, &body);
  }

 private:
  void (*kernel_)(Parameters...);
  LaunchShape shape_;
};

// ---- The runtime's functions ------------------------------------------------------------------------------

inline constexpr int kMultiprocessors = 4;

cudaError_t take_last_error();
const char* describe(cudaError_t error);  // of the calling thread's latest failed launch, in detail
cudaError_t allow_dynamic_shared(const void* kernel, int bytes);

template <class... Parameters>
cudaError_t set_function_attribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
  return allow_dynamic_shared(reinterpret_cast<const void*>(kernel), value);
}

inline cudaError_t get_device(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t get_device_attribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0 || attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = kMultiprocessors;
  return cudaSuccess;
}

inline cudaError_t fill_memory(void* address, int byte, std::size_t size, cudaStream_t) {
  std::memset(address, byte, size);
  return cudaSuccess;
}

// ---- Values as 64-bit words -------------------------------------------------------------------------------

template <class T>
std::uint64_t to_word(T value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}

template <class T>
T from_word(std::uint64_t word) {
  T value;
  std::memcpy(static_cast<void*>(&value), &word, sizeof(T));
  return value;
}

template <class T, class... Choices>
concept OneOf = (std::same_as<T, Choices> || ...);

template <class T>
concept Shufflable = OneOf<T, int, unsigned, long, unsigned long, long long, unsigned long long, float,
                           double, __half, __nv_bfloat16, __half2, __nv_bfloat162>;

// The lanes that a shuffle of a given width lets a lane read.
struct Segment {
  int first, last;
};

// The value of lane `source(lane, segment)`.
template <class T, class Source>
T shuffle(const char* name, unsigned mask, T value, int width, const Site& site, Source source) {
  if (width < 1 || width > 32 || !std::has_single_bit(static_cast<unsigned>(width))) {
    trap("the width of a shuffle must be a power of two up to 32", site);
  }
  const std::uint64_t* values = exchange(name, mask, to_word(value), site);
  const int lane = static_cast<int>(lane_index());
  const int first = lane & -width;
  return from_word<T>(values[source(lane, Segment{first, first + width - 1})]);
}

template <class Combine>
unsigned fold(const char* name, unsigned mask, unsigned value, const Site& site, Combine combine) {
  const std::uint64_t* values = exchange(name, mask, value, site);
  unsigned remaining = mask & (mask - 1);
  auto result = static_cast<unsigned>(values[std::countr_zero(mask)]);
  for (; remaining; remaining &= remaining - 1) {
    result = combine(result, static_cast<unsigned>(values[std::countr_zero(remaining)]));
  }
  return result;
}

template <class T, class Update>
T atomic(T* address, const Site& site, Update update) {
  step(site);
  const T old = *address;
  *address = update(old);
  return old;
}

}  // namespace dlmkern::emulator

// ---- The language -----------------------------------------------------------------------------------------

#undef __launch_bounds__
#define __launch_bounds__(...)

#undef __shared__  // the toolkit's headers define it as nothing, which would make it a local variable
#define __shared__ static_assert(false, "declare shared memory with DLMKERN_SHARED or DLMKERN_DYNAMIC_SHARED")

#define DLMKERN_LAUNCH(kernel, grid, block, shared_bytes, stream) \
  (static_cast<void>(stream),                                     \
   dlmkern::emulator::Launcher(kernel, {dim3(grid), dim3(block), static_cast<std::size_t>(shared_bytes)}))

#define DLMKERN_SHARED(type, name)                                                               \
  using name##_shared_type = type;                                                               \
  static constinit dlmkern::emulator::SharedArray name##_shared_array(                           \
      sizeof(name##_shared_type), alignof(name##_shared_type), std::source_location::current()); \
  auto& name = *static_cast<name##_shared_type*>(name##_shared_array.address())

#define DLMKERN_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(dlmkern::emulator::dynamic_shared_memory())

#define DLMKERN_UNROLL
#define DLMKERN_NO_UNROLL

#define threadIdx (dlmkern::emulator::coordinates.thread)
#define blockIdx (dlmkern::emulator::coordinates.block)
#define blockDim (dlmkern::emulator::coordinates.block_size)
#define gridDim (dlmkern::emulator::coordinates.grid_size)

inline constexpr int warpSize = dlmkern::emulator::kWarpSize;

using std::max;
using std::min;

#define DLMKERN_EMULATOR_SITE const dlmkern::emulator::Site& site = dlmkern::emulator::Site::current()

// ---- Barriers ---------------------------------------------------------------------------------------------

inline void __syncthreads(DLMKERN_EMULATOR_SITE) { dlmkern::emulator::barrier("__syncthreads", false, site); }

inline int __syncthreads_count(int predicate, DLMKERN_EMULATOR_SITE) {
  return static_cast<int>(dlmkern::emulator::barrier("__syncthreads_count", predicate != 0, site).count);
}

inline int __syncthreads_or(int predicate, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::barrier("__syncthreads_or", predicate != 0, site).count != 0;
}

inline int __syncthreads_and(int predicate, DLMKERN_EMULATOR_SITE) {
  const auto [count, threads] = dlmkern::emulator::barrier("__syncthreads_and", predicate != 0, site);
  return count == threads;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, DLMKERN_EMULATOR_SITE) {
  dlmkern::emulator::exchange("__syncwarp", mask, 0, site);
}

inline void __threadfence(DLMKERN_EMULATOR_SITE) { dlmkern::emulator::step(site); }
inline void __threadfence_block(DLMKERN_EMULATOR_SITE) { dlmkern::emulator::step(site); }
inline void __nanosleep(unsigned, DLMKERN_EMULATOR_SITE) { dlmkern::emulator::step(site); }
[[noreturn]] inline void __trap(DLMKERN_EMULATOR_SITE) { dlmkern::emulator::trap("__trap()", site); }

// ---- Warp collectives -------------------------------------------------------------------------------------

template <dlmkern::emulator::Shufflable T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, DLMKERN_EMULATOR_SITE) {
  const auto from = [=](int, dlmkern::emulator::Segment segment) {
    return segment.first + (source & (width - 1));
  };
  return dlmkern::emulator::shuffle("__shfl_sync", mask, value, width, site, from);
}

// In the next three a lane whose source lies outside its segment reads its own value, and the hardware takes
// the distance modulo 32.
template <dlmkern::emulator::Shufflable T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, DLMKERN_EMULATOR_SITE) {
  const auto from = [=](int lane, dlmkern::emulator::Segment segment) {
    const int source = lane - static_cast<int>(delta % 32);
    return source >= segment.first ? source : lane;
  };
  return dlmkern::emulator::shuffle("__shfl_up_sync", mask, value, width, site, from);
}

template <dlmkern::emulator::Shufflable T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, DLMKERN_EMULATOR_SITE) {
  const auto from = [=](int lane, dlmkern::emulator::Segment segment) {
    const int source = lane + static_cast<int>(delta % 32);
    return source <= segment.last ? source : lane;
  };
  return dlmkern::emulator::shuffle("__shfl_down_sync", mask, value, width, site, from);
}

// An xor may also read from the segments below its own.
template <dlmkern::emulator::Shufflable T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, DLMKERN_EMULATOR_SITE) {
  const auto from = [=](int lane, dlmkern::emulator::Segment segment) {
    const int source = lane ^ (lane_mask & 31);
    return source <= segment.last ? source : lane;
  };
  return dlmkern::emulator::shuffle("__shfl_xor_sync", mask, value, width, site, from);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, DLMKERN_EMULATOR_SITE) {
  const std::uint64_t* values = dlmkern::emulator::exchange("__ballot_sync", mask, predicate != 0, site);
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) ballot |= static_cast<unsigned>(values[lane]) << lane;
  }
  return ballot;
}

inline int __any_sync(unsigned mask, int predicate, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::fold("__any_sync", mask, predicate != 0, site, std::bit_or<unsigned>()) != 0;
}

inline int __all_sync(unsigned mask, int predicate, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::fold("__all_sync", mask, predicate != 0, site, std::bit_and<unsigned>()) != 0;
}

template <dlmkern::emulator::Shufflable T>
unsigned __match_any_sync(unsigned mask, T value, DLMKERN_EMULATOR_SITE) {
  const std::uint64_t word = dlmkern::emulator::to_word(value);
  const std::uint64_t* values = dlmkern::emulator::exchange("__match_any_sync", mask, word, site);
  unsigned matches = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) && values[lane] == word) matches |= 1u << lane;
  }
  return matches;
}

template <dlmkern::emulator::OneOf<int, unsigned> T>
T __reduce_add_sync(unsigned mask, T value, DLMKERN_EMULATOR_SITE) {
  return static_cast<T>(dlmkern::emulator::fold("__reduce_add_sync", mask, static_cast<unsigned>(value), site,
                                                std::plus<unsigned>()));
}

template <dlmkern::emulator::OneOf<int, unsigned> T>
T __reduce_min_sync(unsigned mask, T value, DLMKERN_EMULATOR_SITE) {
  return static_cast<T>(dlmkern::emulator::fold(
      "__reduce_min_sync", mask, static_cast<unsigned>(value), site,
      [](unsigned a, unsigned b) { return static_cast<T>(b) < static_cast<T>(a) ? b : a; }));
}

template <dlmkern::emulator::OneOf<int, unsigned> T>
T __reduce_max_sync(unsigned mask, T value, DLMKERN_EMULATOR_SITE) {
  return static_cast<T>(dlmkern::emulator::fold(
      "__reduce_max_sync", mask, static_cast<unsigned>(value), site,
      [](unsigned a, unsigned b) { return static_cast<T>(a) < static_cast<T>(b) ? b : a; }));
}

inline unsigned __reduce_and_sync(unsigned mask, unsigned value, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::fold("__reduce_and_sync", mask, value, site, std::bit_and<unsigned>());
}

inline unsigned __reduce_or_sync(unsigned mask, unsigned value, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::fold("__reduce_or_sync", mask, value, site, std::bit_or<unsigned>());
}

// ---- Atomics ----------------------------------------------------------------------------------------------

template <dlmkern::emulator::OneOf<int, unsigned, unsigned long long, float, double> T>
T atomicAdd(T* address, std::type_identity_t<T> value, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::atomic(address, site, [=](T old) -> T {
    if constexpr (std::same_as<T, int>) {
      return static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(value));  // wraps
    } else {
      return old + value;
    }
  });
}

template <dlmkern::emulator::OneOf<int, unsigned, long long, unsigned long long> T>
T atomicMin(T* address, std::type_identity_t<T> value, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::atomic(address, site, [=](T old) { return std::min(old, value); });
}

template <dlmkern::emulator::OneOf<int, unsigned, long long, unsigned long long> T>
T atomicMax(T* address, std::type_identity_t<T> value, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::atomic(address, site, [=](T old) { return std::max(old, value); });
}

template <dlmkern::emulator::OneOf<int, unsigned, unsigned long long> T>
T atomicOr(T* address, std::type_identity_t<T> value, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::atomic(address, site, [=](T old) { return old | value; });
}

template <dlmkern::emulator::OneOf<int, unsigned, unsigned long long> T>
T atomicAnd(T* address, std::type_identity_t<T> value, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::atomic(address, site, [=](T old) { return old & value; });
}

template <dlmkern::emulator::OneOf<int, unsigned, unsigned long long, float> T>
T atomicExch(T* address, std::type_identity_t<T> value, DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::atomic(address, site, [=](T) { return value; });
}

template <dlmkern::emulator::OneOf<int, unsigned, unsigned long long> T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value,
            DLMKERN_EMULATOR_SITE) {
  return dlmkern::emulator::atomic(address, site, [=](T old) { return old == expected ? value : old; });
}

#undef DLMKERN_EMULATOR_SITE

// ---- Arithmetic and memory --------------------------------------------------------------------------------

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}

inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __int_as_float(int value) { return std::bit_cast<float>(value); }
inline float __uint_as_float(unsigned value) { return std::bit_cast<float>(value); }

inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline double __longlong_as_double(long long value) { return std::bit_cast<double>(value); }

inline int __popc(unsigned value) { return std::popcount(value); }
inline int __popcll(unsigned long long value) { return std::popcount(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }

// The C library declares functions of these names, so macros stand in front of them.
#define __expf(value) ::expf(value)
#define __logf(value) ::logf(value)

// Never contracted with a neighbouring sum.
inline double __dmul_rn(double a, double b) { return a * b; }

// ---- The runtime ------------------------------------------------------------------------------------------

// Macros, not functions of the same name: a process that also loads the real runtime keeps its own symbols.
#define cudaGetLastError dlmkern::emulator::take_last_error
#define cudaGetErrorString dlmkern::emulator::describe
#define cudaFuncSetAttribute dlmkern::emulator::set_function_attribute
#define cudaGetDevice dlmkern::emulator::get_device
#define cudaDeviceGetAttribute dlmkern::emulator::get_device_attribute
#define cudaMemsetAsync dlmkern::emulator::fill_memory
