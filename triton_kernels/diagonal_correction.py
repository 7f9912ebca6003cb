"""diagonal_correction: what the queries of COVER's seeds gather without their own tokens, in place.

A program looks at one query. If that predicts no seed, it is done. Else it takes the closed form, in float64:
a row of d numbers or two. Where that would lose digits, it walks the keys for this query.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention import LARGEST_HEAD, check_size, key_count
from .dtypes import narrow, wide
from .launch import Launch, run

_TILE_BYTES = 16384  # of the tile of keys that a program holds, in float32 or float64
_NUM_WARPS = 4
_STRIDES = tuple(
    f"{name}_stride_{axis}"
    for name, axes in (
        ("out", "bhnd"),
        ("lse", "bhn"),
        ("q", "bhnd"),
        ("k", "bhnd"),
        ("v", "bhnd"),
        ("k_cached", "bhld"),
        ("v_cached", "bhld"),
    )
    for axis in axes
)


@triton.jit
def _product(x, y):
    """Of two rows, in float64."""
    return tl.sum(wide(x).to(tl.float64) * wide(y).to(tl.float64), 0)


@triton.jit
def _walk(
    q,
    k_lanes,
    v_lanes,
    k_stride,
    v_stride,
    in_head,
    seed_ptr,
    SEEDS: tl.constexpr,
    length,
    skipped,
    factor,
    peak,
    total,
    weighted,
    KEYS: tl.constexpr,
):
    """One query's softmax after more columns: all, or with seed_ptr the seeds (SEEDS = 1) or the rest (0)."""
    for start in range(0, length, KEYS):
        key = (start + tl.arange(0, KEYS)).to(tl.int64)
        seen = (key < length) & (key != skipped)
        if seed_ptr is not None:
            seen &= (tl.load(seed_ptr + key, mask=seen, other=0) != 0) == SEEDS
        mask = seen[:, None] & in_head[None, :]
        k = wide(tl.load(k_lanes[None, :] + key[:, None] * k_stride, mask=mask, other=0.0))
        score = tl.where(seen, tl.sum(q[None, :] * k, 1) * factor, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 0))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weight, shrink = tl.exp(score - base), tl.exp(peak - base)
        total = total * shrink + tl.sum(weight, 0)
        v = wide(tl.load(v_lanes[None, :] + key[:, None] * v_stride, mask=mask, other=0.0))
        weighted = weighted * shrink + tl.sum(weight[:, None] * v, 0)
        peak = new_peak
    return peak, total, weighted


@triton.jit(do_not_specialize=["n", "L", "shift"])
def diagonal_correction_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_cached_ptr,
    v_cached_ptr,
    seed_ptr,
    length_ptr,
    position_ptr,
    n,
    L,
    shift,
    groups,
    scale: tl.float64,
    recompute_below: tl.float64,
    out_stride_b,
    out_stride_h,
    out_stride_n,
    out_stride_d,
    lse_stride_b,
    lse_stride_h,
    lse_stride_n,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    q_stride_d,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    k_stride_d,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    v_stride_d,
    k_cached_stride_b,
    k_cached_stride_h,
    k_cached_stride_l,
    k_cached_stride_d,
    v_cached_stride_b,
    v_cached_stride_h,
    v_cached_stride_l,
    v_cached_stride_d,
    D: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Row ``program_id(0)`` of all sequences, query head ``program_id(1)``."""
    batch = (tl.program_id(0) // n).to(tl.int64)
    row = (tl.program_id(0) % n).to(tl.int64)
    shown = row + shift  # the row that shows what this one predicts
    seed_ptr += batch * n
    verified = tl.load(seed_ptr + shown, mask=shown < n, other=0) != 0
    place = shown
    if position_ptr is not None:
        place = tl.load(position_ptr + batch * n + shown, mask=shown < n, other=-1)
    length = key_count(length_ptr, batch, L)
    if (verified == 0) | (place < 0) | (place >= length):
        return

    head, kv_head = tl.program_id(1).to(tl.int64), (tl.program_id(1) // groups).to(tl.int64)
    lane = tl.arange(0, LANES).to(tl.int64)
    in_head = lane < D
    out_ptr += batch * out_stride_b + head * out_stride_h + row * out_stride_n
    lse_ptr += batch * lse_stride_b + head * lse_stride_h + row * lse_stride_n
    q_ptr += batch * q_stride_b + head * q_stride_h + row * q_stride_n
    k_ptr += batch * k_stride_b + kv_head * k_stride_h
    v_ptr += batch * v_stride_b + kv_head * v_stride_h
    k_cached_ptr += batch * k_cached_stride_b + kv_head * k_cached_stride_h
    v_cached_ptr += batch * v_cached_stride_b + kv_head * v_cached_stride_h

    q = wide(tl.load(q_ptr + lane * q_stride_d, mask=in_head, other=0.0))
    own_k = wide(tl.load(k_ptr + shown * k_stride_n + lane * k_stride_d, mask=in_head, other=0.0))
    own_v = wide(tl.load(v_ptr + shown * v_stride_n + lane * v_stride_d, mask=in_head, other=0.0))
    old_k_row = k_cached_ptr + place * k_cached_stride_l + lane * k_cached_stride_d
    old_v_row = v_cached_ptr + place * v_cached_stride_l + lane * v_cached_stride_d
    old_k = tl.load(old_k_row, mask=in_head, other=0.0)
    before = tl.load(lse_ptr).to(tl.float64)
    tl.debug_barrier()  # every warp reads it, and decides by it, before one of them replaces it
    factor = tl.full((), scale, tl.float64)
    a = tl.exp(_product(q, old_k) * factor - before)
    gap = _product(q, own_k) * factor - before  # log b
    # Both of 1 - a and b divided by exp(top), so that neither overflows.
    top = tl.where(gap > 0.0, gap, 0.0)
    small, b = tl.exp(-top), tl.exp(gap - top)
    r = (1.0 - a) * small + b
    if r > recompute_below * small:
        small, b = small / r, b / r
        old_out = tl.load(out_ptr + lane * out_stride_d, mask=in_head, other=0.0)
        old_v = wide(tl.load(old_v_row, mask=in_head, other=0.0)).to(tl.float64)
        closed = small * wide(old_out).to(tl.float64) - a * small * old_v + b * own_v.to(tl.float64)
        out, lse = closed.to(q.dtype), (before + top + tl.log(r)).to(q.dtype)
    else:  # the softmax starts with the seed's own column, which the walks then skip
        factor_of_q = factor.to(q.dtype)
        peak = tl.sum(q * own_k, 0) * factor_of_q
        total = (peak != -float("inf")).to(q.dtype)
        k_lanes, v_lanes = k_cached_ptr + lane * k_cached_stride_d, v_cached_ptr + lane * v_cached_stride_d
        some = seed_ptr if position_ptr is None else None
        peak, total, weighted = _walk(
            q, k_lanes, v_lanes, k_cached_stride_l, v_cached_stride_l, in_head,
            some, 1, length, place, factor_of_q, peak, total, own_v, KEYS,
        )  # fmt: skip
        if position_ptr is None:  # the caches hold the seeds alone
            k_lanes, v_lanes = k_ptr + lane * k_stride_d, v_ptr + lane * v_stride_d
            peak, total, weighted = _walk(
                q, k_lanes, v_lanes, k_stride_n, v_stride_n, in_head,
                seed_ptr, 0, length, place, factor_of_q, peak, total, weighted, KEYS,
            )  # fmt: skip
        out, lse = weighted / tl.where(total == 0.0, 1.0, total), peak + tl.log(total)
    tl.store(out_ptr + lane * out_stride_d, narrow(out, out_ptr.dtype.element_ty), mask=in_head)
    tl.store(lse_ptr, lse)


def plan(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cached: torch.Tensor,
    v_cached: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor | None,
    positions: torch.Tensor | None,
    shift: int,
    scale: float,
    recompute_below: float,
) -> tuple[list[Launch], None]:
    """Kernel launches; they write to out and lse."""
    check_size(q, LARGEST_HEAD)
    B, Hq, n, d = q.shape
    kv_heads, L = k_cached.shape[1:3]
    if B * Hq * n * L == 0:
        return [], None
    lanes: int = triton.next_power_of_2(d)
    strides = (s for x in (out, lse, q, k, v, k_cached, v_cached) for s in x.stride())
    arguments = {
        "out_ptr": out,
        "lse_ptr": lse,
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "k_cached_ptr": k_cached,
        "v_cached_ptr": v_cached,
        "seed_ptr": seeds.contiguous(),
        "length_ptr": None if lengths is None else lengths.contiguous(),
        "position_ptr": None if positions is None else positions.contiguous(),
        "n": n,
        "L": L,
        "shift": shift,
        "groups": Hq // kv_heads,
        "scale": scale,
        "recompute_below": recompute_below,
        **dict(zip(_STRIDES, strides, strict=True)),
        "D": d,
        "LANES": lanes,
        "KEYS": _TILE_BYTES // (max(lanes, 32) * lse.element_size()),
    }
    return [Launch(diagonal_correction_kernel, (B * n, Hq), arguments, _NUM_WARPS)], None


def diagonal_correction(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cached: torch.Tensor,
    v_cached: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor | None,
    positions: torch.Tensor | None,
    shift: int,
    scale: float,
    recompute_below: float,
) -> None:
    """Makes cover_attention of attention over the columns that all queries see, out and lse, in place.

    out: [B, Hq, n, d] float; d at most 256, else ValueError. lse: [B, Hq, n] float32 (float64). q: as out.
    k, v: [B, Hkv, n, d] of the same dtype; query head h goes with key head h // (Hq // Hkv). k_cached,
    v_cached: [B, Hkv, L, d]. seeds: [B, n] bool, rows of k and v. lengths: [B] int64, sequence b has keys
    [0, lengths[b]), None for all L. positions: [B, n] int64, the place of each row in the caches, which hold
    all keys; None for the row itself, and caches that are read at seeds only. Row i predicts what row
    i + shift shows. Where that is a seed within the keys, its column becomes that of k and v. Where this
    divides the row by less than recompute_below, it is computed from the keys, in float32 or float64.
    """
    launches, _ = plan(
        out, lse, q, k, v, k_cached, v_cached, seeds, lengths, positions, shift, scale, recompute_below
    )
    run(launches, out.device)
