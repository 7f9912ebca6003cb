"""kv_block_write: keys and values of a block into their places in the cache, in one launch.

A program writes the keys, or the values, of one position: a few heads of it, or all where their drift is to
be summed up. A row of d numbers is handled as two halves, the partners that the rotary embedding turns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dtypes import narrow, wide
from .launch import Launch, run

_TILE = 1024  # numbers in the tile of half rows that a program holds at a time
_STRIDES = tuple(
    f"{tensor}_stride_{axis}"
    for tensor, axes in (
        ("k_cache", "bhld"),
        ("v_cache", "bhld"),
        ("k", "bhnd"),
        ("v", "bhnd"),
        ("cos", "ld"),
        ("sin", "ld"),
    )
    for axis in axes
)


@triton.jit
def _table_row(table_ptr, known, lane, half, d, stride_d):
    """Both halves of a row of a rotary table."""
    low = tl.load(table_ptr + lane * stride_d, mask=known & (lane < half), other=0.0)
    high = tl.load(table_ptr + (half + lane) * stride_d, mask=known & (half + lane < d), other=0.0)
    return low[None, :], high[None, :]


@triton.jit
def _write(
    cache_ptr,
    new_ptr,
    cos_ptr,
    sin_ptr,
    drift_ptr,
    known,
    H,
    d,
    half,
    cache_stride_h,
    cache_stride_d,
    stride_h,
    stride_d,
    cos_stride_d,
    sin_stride_d,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Write the row of every head; the pointers are to that of head 0 and, for the drift, to the cosine."""
    lane = tl.arange(0, HALF).to(tl.int64)
    zero = tl.full((), 0.0, tl.float64)
    product, old_square, new_square, move_square = zero, zero, zero, zero
    for first in range(tl.program_id(1) * HEADS, H, tl.num_programs(1) * HEADS):
        head = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        inside = known & (head < H)
        in_low, in_high = inside & (lane < half)[None, :], inside & (half + lane < d)[None, :]
        source, target = new_ptr + head * stride_h, cache_ptr + head * cache_stride_h
        target_low = target + lane[None, :] * cache_stride_d
        target_high = target + (half + lane)[None, :] * cache_stride_d
        new_low = tl.load(source + lane[None, :] * stride_d, mask=in_low, other=0.0)
        new_high = tl.load(source + (half + lane)[None, :] * stride_d, mask=in_high, other=0.0)
        if cos_ptr is not None:
            x, y = wide(new_low), wide(new_high)
            cos_low, cos_high = _table_row(cos_ptr, known, lane, half, d, cos_stride_d)
            sin_low, sin_high = _table_row(sin_ptr, known, lane, half, d, sin_stride_d)
            new_low = narrow(x * cos_low - y * sin_low, cache_ptr.dtype.element_ty)
            new_high = narrow(y * cos_high + x * sin_high, cache_ptr.dtype.element_ty)
        if drift_ptr is not None:
            old_low = wide(tl.load(target_low, mask=in_low, other=0.0)).to(tl.float64)
            old_high = wide(tl.load(target_high, mask=in_high, other=0.0)).to(tl.float64)
            x, y = wide(new_low).to(tl.float64), wide(new_high).to(tl.float64)
            product += tl.sum(old_low * x + old_high * y)
            old_square += tl.sum(old_low * old_low + old_high * old_high)
            new_square += tl.sum(x * x + y * y)
            x, y = x - old_low, y - old_high
            move_square += tl.sum(x * x + y * y)
        tl.store(target_low, new_low, mask=in_low)
        tl.store(target_high, new_high, mask=in_high)
    if drift_ptr is not None:  # 0 / 0, NaN, where the position is skipped
        norm = tl.sqrt(old_square)
        tl.store(drift_ptr, product / (norm * tl.sqrt(new_square)))
        tl.store(drift_ptr + tl.num_programs(0), tl.sqrt(move_square) / norm)


@triton.jit(do_not_specialize=["n", "L"])
def kv_block_write_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    drift_ptr,
    n,
    L,
    H,
    d,
    half,
    k_cache_stride_b,
    k_cache_stride_h,
    k_cache_stride_l,
    k_cache_stride_d,
    v_cache_stride_b,
    v_cache_stride_h,
    v_cache_stride_l,
    v_cache_stride_d,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    k_stride_d,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    v_stride_d,
    cos_stride_l,
    cos_stride_d,
    sin_stride_l,
    sin_stride_d,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Position ``program_id(0)`` of all rows; its keys if ``program_id(2)`` is 0, else its values."""
    row = tl.program_id(0).to(tl.int64)
    batch, i = row // n, row % n
    place = tl.load(position_ptr + row)
    known = (place >= 0) & (place < L)
    if drift_ptr is not None:
        drift_ptr += row + tl.program_id(2) * 2 * tl.num_programs(0)
    if tl.program_id(2) == 0:
        if cos_ptr is not None:
            cos_ptr += place * cos_stride_l
            sin_ptr += place * sin_stride_l
        _write(
            k_cache_ptr + batch * k_cache_stride_b + place * k_cache_stride_l,
            k_ptr + batch * k_stride_b + i * k_stride_n,
            cos_ptr,
            sin_ptr,
            drift_ptr,
            known,
            H,
            d,
            half,
            k_cache_stride_h,
            k_cache_stride_d,
            k_stride_h,
            k_stride_d,
            cos_stride_d,
            sin_stride_d,
            HEADS,
            HALF,
        )
    else:
        _write(
            v_cache_ptr + batch * v_cache_stride_b + place * v_cache_stride_l,
            v_ptr + batch * v_stride_b + i * v_stride_n,
            None,
            None,
            drift_ptr,
            known,
            H,
            d,
            half,
            v_cache_stride_h,
            v_cache_stride_d,
            v_stride_h,
            v_stride_d,
            0,
            0,
            HEADS,
            HALF,
        )


def plan(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    drift: bool,
) -> tuple[list[Launch], torch.Tensor]:
    """Kernel launches and the drift that they write besides the caches."""
    B, H, n, d = k.shape
    moved = torch.empty((4, B, n) if drift else (0,), dtype=torch.float32, device=k.device)
    if B * n == 0:
        return [], moved
    half = (d + 1) // 2
    half_block = triton.next_power_of_2(max(half, 1))
    heads = min(triton.next_power_of_2(max(H, 1)), max(_TILE // half_block, 1))
    tables = (0, 0, 0, 0) if cos is None or sin is None else (*cos.stride(), *sin.stride())
    strides = (*k_cache.stride(), *v_cache.stride(), *k.stride(), *v.stride(), *tables)
    arguments = {
        "k_cache_ptr": k_cache,
        "v_cache_ptr": v_cache,
        "k_ptr": k,
        "v_ptr": v,
        "position_ptr": positions.contiguous(),
        "cos_ptr": cos,
        "sin_ptr": sin,
        "drift_ptr": moved if drift else None,
        "n": n,
        "L": k_cache.shape[2],
        "H": H,
        "d": d,
        "half": half,
        **dict(zip(_STRIDES, strides, strict=True)),
        "HEADS": heads,
        "HALF": half_block,
    }
    grid = (B * n, 1 if drift else triton.cdiv(H, heads), 2)
    num_warps = min(max(heads * half_block // 256, 1), 4)
    return [Launch(kv_block_write_kernel, grid, arguments, num_warps)], moved


def kv_block_write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    drift: bool,
) -> torch.Tensor:
    """The drift, float32 [4, B, n], or [0] without; k_cache and v_cache are written in place.

    k_cache, v_cache: [B, H, L, d] float. k, v: [B, H, n, d] of the same dtype. positions: [B, n] int64, the
    place of each; outside [0, L) it is skipped. cos, sin: [P, d] float64 for float64 keys, float32 for the
    others, P >= L and d even: row p turns a key at position p, element i with i + d / 2, in the dtype of the
    tables. The drift is cosine and distance |new - old| / |old| of the keys, then of the values, over all H d
    numbers of a position as the caches hold them; NaN where it is skipped.
    """
    launches, moved = plan(k_cache, v_cache, k, v, positions, cos, sin, drift)
    run(launches, k.device)
    return moved
