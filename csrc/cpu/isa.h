// The instruction set in use and its vector loops.
#pragma once

#include "simd/row_kernels.h"
#include "simd/score_kernels.h"

namespace dlmkern {

// An error if the environment asks for an instruction set that is not to be had.
int check_isa();

// The loops for float32, bfloat16 or float16 rows; after check_isa().
const RowKernels& row_kernels(int32_t dtype);

// The loops over scores; after check_isa().
const ScoreKernelTable& score_kernels();

}  // namespace dlmkern
