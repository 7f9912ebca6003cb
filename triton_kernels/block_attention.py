"""block_attention: the queries of a block over a cache of keys and values (flash attention).

The query heads that share a key head are more queries of it: a program takes a tile of those rows and walks
the keys with an online softmax in float32, so that a key is loaded once for all of them. Where the tiles are
few, the keys are split as well (flash decoding), and a second kernel weighs the parts by their lse.

Exponentials are powers of 2: scores carry a factor log2(e), and lse is turned into nats at the end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .attention import check_heads, key_count, online_softmax, padded, split_count
from .dtypes import dot_operand, narrow
from .launch import Launch, run

_LEAST_KEYS = 128  # of a split: by reasoning, fewer are read faster than the parts are merged
_STRIDES = tuple(
    f"{name}_stride_{axis}" for name, axes in (("q", "bhnd"), ("k", "bhld"), ("v", "bhld")) for axis in axes
)


class Config(NamedTuple):
    """How the work is cut: tiles of ``rows`` queries by ``keys``; ``splits`` programs share the keys."""

    lanes: int  # head size, padded to what tl.dot takes
    rows: int
    keys: int
    num_warps: int
    splits: int


def config(sequences: int, rows: int, length: int, d: int, element_size: int) -> Config:
    """The configuration for ``sequences`` key heads, each with ``rows`` queries and ``length`` keys."""
    lanes = padded(d)
    if element_size >= 4:  # no matrix units: a thread multiplies what it holds in registers
        tile, keys, num_warps = 16, 16, 4 if lanes <= 64 else 8
    else:
        tile, keys, num_warps = min(padded(rows), 64 if lanes <= 128 else 32), 32, 4
    programs = sequences * triton.cdiv(rows, tile)
    return Config(lanes, tile, keys, num_warps, split_count(programs, length // _LEAST_KEYS))


@triton.jit(do_not_specialize=["n", "L"])
def block_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    length_ptr,
    out_ptr,
    lse_ptr,
    n,
    L,
    kv_heads,
    groups,
    scale,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    q_stride_d,
    k_stride_b,
    k_stride_h,
    k_stride_l,
    k_stride_d,
    v_stride_b,
    v_stride_h,
    v_stride_l,
    v_stride_d,
    D: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Tile ``program_id(0)`` of the queries of all key heads, over part ``program_id(1)`` of the keys."""
    tiles = tl.cdiv(groups * n, ROWS)
    head = (tl.program_id(0) // tiles).to(tl.int64)  # of all key heads of all sequences
    batch, kv_head = head // kv_heads, head % kv_heads
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    known = row < groups * n
    lane, column = tl.arange(0, LANES), tl.arange(0, KEYS)
    in_head = lane < D

    q_ptr += batch * q_stride_b + kv_head * groups * q_stride_h
    q_offset = (row // n).to(tl.int64) * q_stride_h + (row % n).to(tl.int64) * q_stride_n
    q_tile = q_ptr + q_offset[:, None] + lane[None, :].to(tl.int64) * q_stride_d
    q = dot_operand(tl.load(q_tile, mask=known[:, None] & in_head[None, :], other=0.0))

    length = key_count(length_ptr, batch, L)
    part = tl.cdiv(tl.cdiv(length, KEYS), tl.num_programs(1)) * KEYS
    first = tl.program_id(1) * part
    stop = tl.minimum(first + part, length)

    k_ptr += batch * k_stride_b + kv_head * k_stride_h
    v_ptr += batch * v_stride_b + kv_head * v_stride_h
    k_lanes = k_ptr + lane[:, None].to(tl.int64) * k_stride_d
    v_lanes = v_ptr + lane[None, :].to(tl.int64) * v_stride_d
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, LANES), tl.float32)
    for start in range(first, stop, KEYS):
        key = (start + column).to(tl.int64)
        inside = key < stop
        k_tile = k_lanes + key[None, :] * k_stride_l
        k = dot_operand(tl.load(k_tile, mask=in_head[:, None] & inside[None, :], other=0.0))
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, -float("inf"))
        weight, shrink, peak, total = online_softmax(score, peak, total)
        v_tile = v_lanes + key[:, None] * v_stride_l
        v = dot_operand(tl.load(v_tile, mask=inside[:, None] & in_head[None, :], other=0.0))
        weight = dot_operand(narrow(weight, v_ptr.dtype.element_ty))
        weighted = tl.dot(weight, v, weighted * shrink[:, None], input_precision="ieee")

    out_row = (head * groups * n + row) * tl.num_programs(1) + tl.program_id(1)
    out = narrow(weighted / tl.where(total == 0.0, 1.0, total)[:, None], out_ptr.dtype.element_ty)
    out_tile = out_ptr + out_row[:, None] * D + lane[None, :]
    tl.store(out_tile, out, mask=known[:, None] & in_head[None, :])
    tl.store(lse_ptr + out_row, (peak + tl.log2(total)) * 0.6931471805599453, mask=known)


@triton.jit(do_not_specialize=["splits"])
def merge_splits_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    splits,
    D: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Weigh the parts of query ``program_id(0)``."""
    row = tl.program_id(0).to(tl.int64)
    lane, k = tl.arange(0, LANES), row * splits + tl.arange(0, SPLITS)
    part_lse = tl.load(part_lse_ptr + k, mask=k < (row + 1) * splits, other=-float("inf"))
    part_tile = part_ptr + k[:, None] * D + lane[None, :]
    used = part_lse != -float("inf")
    part = tl.load(part_tile, mask=used[:, None] & (lane < D)[None, :], other=0.0)
    peak = tl.max(part_lse, 0)
    weight = tl.exp(part_lse - tl.where(peak == -float("inf"), 0.0, peak))
    total = tl.sum(weight, 0)
    out = tl.sum(weight[:, None] * part, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * D + lane, narrow(out, out_ptr.dtype.element_ty), mask=lane < D)
    tl.store(lse_ptr + row, peak + tl.log(total))


def merge_splits(part: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Launch:
    """What weighs parts [rows, splits, d] by their lse [rows, splits] into contiguous out and lse."""
    rows, splits, d = part.shape
    return Launch(
        merge_splits_kernel,
        (rows,),
        {
            "part_ptr": part,
            "part_lse_ptr": part_lse,
            "out_ptr": out,
            "lse_ptr": lse,
            "splits": splits,
            "D": d,
            "LANES": padded(d),
            "SPLITS": triton.next_power_of_2(splits),
        },
        1,
    )


def plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None, scale: float
) -> tuple[list[Launch], tuple[torch.Tensor, torch.Tensor]]:
    """Kernel launches, in order, and the tensors (out, lse) that they write."""
    check_heads(q)
    B, Hq, n, d = q.shape
    kv_heads, L = k.shape[1:3]
    out = torch.empty((B, Hq, n, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, Hq, n), dtype=torch.float32, device=q.device)
    if B * Hq * n == 0:
        return [], (out, lse)

    groups = Hq // kv_heads
    cut = config(B * kv_heads, groups * n, L, d, q.element_size())
    part, part_lse = out, lse
    if cut.splits > 1:
        part = torch.empty((B * Hq * n, cut.splits, d), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((B * Hq * n, cut.splits), dtype=torch.float32, device=q.device)
    attend = Launch(
        block_attention_kernel,
        (B * kv_heads * triton.cdiv(groups * n, cut.rows), cut.splits),
        {
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "length_ptr": None if lengths is None else lengths.contiguous(),
            "out_ptr": part,
            "lse_ptr": part_lse,
            "n": n,
            "L": L,
            "kv_heads": kv_heads,
            "groups": groups,
            "scale": scale * math.log2(math.e),
            **dict(zip(_STRIDES, (*q.stride(), *k.stride(), *v.stride()), strict=True)),
            "D": d,
            "LANES": cut.lanes,
            "ROWS": cut.rows,
            "KEYS": cut.keys,
        },
        cut.num_warps,
    )
    if cut.splits == 1:
        return [attend], (out, lse)
    return [attend, merge_splits(part, part_lse, out, lse)], (out, lse)


def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (the dtype of q) [B, Hq, n, d] and lse, log sum exp(scale q k), float32 [B, Hq, n].

    q: [B, Hq, n, d] float16, bfloat16 or float32, else TypeError; d at most 256, else ValueError. k, v:
    [B, Hkv, L, d] of the same dtype; query head h goes with key head h // (Hq // Hkv). lengths: [B] int64,
    sequence b has keys [0, lengths[b]), None for all L; without keys the results are 0 and -inf. Products
    are summed in float32; those of float16 and bfloat16 run on the matrix units, with the softmax's weights
    rounded to that dtype.
    """
    launches, outputs = plan(q, k, v, lengths, scale)
    run(launches, q.device)
    return outputs
