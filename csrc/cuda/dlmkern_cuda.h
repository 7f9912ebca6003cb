// What every CUDA source includes. It has two lives: under nvcc it is the CUDA runtime; with DLMKERN_EMULATE
// the same sources are compiled by a host C++ compiler against the emulator in tests/cuda_emulator.
//
// What a host compiler can't parse, or would warn of, is written with macros:
//
//   DLMKERN_LAUNCH(kernel, grid, block, shared_bytes, stream)(arguments...);
//   DLMKERN_SHARED(float[8], sums);            // __shared__ float sums[8];
//   DLMKERN_DYNAMIC_SHARED(float, buffer);     // float* buffer: the launch's shared_bytes
//   DLMKERN_UNROLL for (...)                   // #pragma unroll; DLMKERN_NO_UNROLL: unroll 1
//
// A grid of size zero is a launch error in CUDA; launchers return before it.
#pragma once

#ifdef DLMKERN_EMULATE

#include "cuda_emulator.h"

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#define DLMKERN_LAUNCH(kernel, grid, block, shared_bytes, stream) \
  kernel<<<grid, block, shared_bytes, stream>>>

// The alias lets an array type be written before the name.
#define DLMKERN_SHARED(type, name) \
  using name##_shared_type = type; \
  __shared__ name##_shared_type name

#define DLMKERN_DYNAMIC_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char dlmkern_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(dlmkern_dynamic_shared)

#define DLMKERN_UNROLL _Pragma("unroll")
#define DLMKERN_NO_UNROLL _Pragma("unroll 1")

#endif
