// The instruction set in use and its vector loops.
#pragma once

#include "simd/row_kernels.h"

namespace dlmkern {

// The loops for float32, bfloat16 or float16 rows.
const RowKernels& row_kernels(int32_t dtype);

}  // namespace dlmkern
