"""Changes of dtype that the interpreter, which keeps bfloat16 as integers, gets right as well."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def wide(x):
    """x in float32, or in float64 if it is."""
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    return x


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """x, as wide makes it, in dtype, rounded to the nearest."""
    if INTERPRETED and dtype == tl.bfloat16:  # it would cut the lower half off
        bits = x.to(tl.uint32, bitcast=True)
        rounded = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot_operand(x):
    """x as tl.dot takes it: the dtype of the matrix units when compiled, as wide in the interpreter."""
    if INTERPRETED:
        x = wide(x)
    return x
