"""attention_graph: the mean over heads of softmax attention between some positions, without the map.

The log sum exp of a query's scores, where it is not given, comes first: the query heads that share a key head
are more queries of it, as in block_attention, and a program walks the keys for a tile of them. Then a program
takes a tile of `out` and walks the heads. Where the tiles are few, keys and heads are split over programs; a
kernel each puts the parts together, in order, so that the result does not depend on which came first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .attention import check_heads, key_count, padded, split_count
from .dtypes import dot_operand
from .launch import Launch, run

_LEAST_KEYS = 256  # of a split: by reasoning, fewer are read faster than the parts are merged
_MERGED = 128  # rows that a program merges
_STRIDES = tuple(f"{name}_stride_{axis}" for name, axes in (("q", "bhnd"), ("k", "bhld")) for axis in axes)
_LSE_STRIDES = ("lse_stride_b", "lse_stride_h", "lse_stride_n")
_OUT_STRIDES = ("out_stride_b", "out_stride_i", "out_stride_j")


class Config(NamedTuple):
    """How the work is cut."""

    lanes: int  # head size, padded to what tl.dot takes
    rows: int  # queries of a tile of scores, whose log sum exp is wanted
    keys: int
    tile: int  # positions along each side of a tile of out
    num_warps: int
    key_splits: int  # programs that share the keys
    head_splits: int  # programs that share the heads


def config(B: int, Hq: int, Hkv: int, M: int, L: int, d: int, element_size: int) -> Config:
    """The configuration for M of the L positions of each of B sequences."""
    lanes = padded(d)
    most, num_warps = 64 if lanes <= 128 else 32, 4
    if element_size == 4:  # no matrix units: a thread multiplies what it holds in registers
        most, num_warps = 32 if lanes <= 64 else 16, 8
    rows, tile = (min(padded(x), most) for x in (Hq // Hkv * M, M))
    key_splits = split_count(B * Hkv * triton.cdiv(Hq // Hkv * M, rows), L // _LEAST_KEYS)
    head_splits = split_count(B * triton.cdiv(M, tile) ** 2, Hq)
    return Config(lanes, rows, most, tile, num_warps, key_splits, head_splits)


@triton.jit
def _members(position_ptr, row_ptr, i, known, length, n):
    """Of positions i of a sequence: place of the key, row of the query, and whether they are not padding."""
    place = tl.load(position_ptr + i, mask=known, other=-1)
    row = tl.load(row_ptr + i, mask=known, other=-1)
    return place, row, (place >= 0) & (place < length) & (row >= 0) & (row < n)


@triton.jit(do_not_specialize=["n", "L", "M"])
def row_lse_kernel(
    q_ptr,
    k_ptr,
    position_ptr,
    row_ptr,
    length_ptr,
    lse_ptr,
    n,
    L,
    M,
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
    D: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Tile ``program_id(0)`` of the queries of all key heads, over part ``program_id(1)`` of the keys."""
    tiles = tl.cdiv(groups * M, ROWS)
    head = (tl.program_id(0) // tiles).to(tl.int64)  # of all key heads of all sequences
    batch, kv_head = head // kv_heads, head % kv_heads
    query = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    known = query < groups * M
    length = key_count(length_ptr, batch, L)
    _, row, real = _members(position_ptr + batch * M, row_ptr + batch * M, query % M, known, length, n)
    lane, column = tl.arange(0, LANES), tl.arange(0, KEYS)
    in_head = lane < D

    q_ptr += batch * q_stride_b + kv_head * groups * q_stride_h
    q_offset = (query // M).to(tl.int64) * q_stride_h + row * q_stride_n
    q_tile = q_ptr + q_offset[:, None] + lane[None, :].to(tl.int64) * q_stride_d
    q = dot_operand(tl.load(q_tile, mask=real[:, None] & in_head[None, :], other=0.0))

    length = tl.where(tl.max(real.to(tl.int32), 0) > 0, length, 0)  # padding alone has no keys
    part = tl.cdiv(tl.cdiv(length, KEYS), tl.num_programs(1)) * KEYS
    first = tl.program_id(1) * part
    stop = tl.minimum(first + part, length)
    k_lanes = k_ptr + batch * k_stride_b + kv_head * k_stride_h + lane[:, None].to(tl.int64) * k_stride_d
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(first, stop, KEYS):
        key = (start + column).to(tl.int64)
        inside = key < stop
        k_tile = k_lanes + key[None, :] * k_stride_l
        k = dot_operand(tl.load(k_tile, mask=in_head[:, None] & inside[None, :], other=0.0))
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(tl.abs(new_peak) == float("inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(score - base[:, None]), 1)
        peak = new_peak
    out_row = (head * groups * M + query) * tl.num_programs(1) + tl.program_id(1)
    tl.store(lse_ptr + out_row, peak + tl.log(total), mask=known)


@triton.jit(do_not_specialize=["rows"])
def merge_lse_kernel(part_ptr, lse_ptr, rows, splits, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """Tile ``program_id(0)`` of all rows, each of the parts of one query."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, SPLITS)
    mask = (row < rows)[:, None] & (part < splits)[None, :]
    lse = tl.load(part_ptr + row[:, None] * splits + part[None, :], mask=mask, other=-float("inf"))
    peak = tl.max(lse, 1)
    base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    total = tl.sum(tl.exp(lse - base[:, None]), 1)
    tl.store(lse_ptr + row, base + tl.log(total), mask=row < rows)


@triton.jit
def _tile(position_ptr, row_ptr, length_ptr, n, L, M, TILE: tl.constexpr):
    """Tile ``program_id(0)`` of all the tiles of all matrices, row by row.

    Its sequence, rows i and columns j, row i's query and column j's key, and which rows and columns are real.
    """
    tiles = tl.cdiv(M, TILE)
    tile = tl.program_id(0)
    batch = (tile // (tiles * tiles)).to(tl.int64)
    i = (tile // tiles % tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    j = (tile % tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    length = key_count(length_ptr, batch, L)
    position_ptr += batch * M
    row_ptr += batch * M
    _, row, real_i = _members(position_ptr, row_ptr, i, i < M, length, n)
    place, _, real_j = _members(position_ptr, row_ptr, j, j < M, length, n)
    return batch, i, j, row, place, real_i, real_j


@triton.jit(do_not_specialize=["n", "L", "M"])
def entries_kernel(
    q_ptr,
    k_ptr,
    position_ptr,
    row_ptr,
    length_ptr,
    lse_ptr,
    part_ptr,
    n,
    L,
    M,
    heads,
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
    lse_stride_b,
    lse_stride_h,
    lse_stride_n,
    LSE_OF_ROWS: tl.constexpr,
    D: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Tile ``program_id(0)``, from part ``program_id(1)`` of the heads.

    LSE_OF_ROWS: lse has the rows of q, else those of out.
    """
    batch, i, _, row, place, real_i, real_j = _tile(position_ptr, row_ptr, length_ptr, n, L, M, TILE)
    lane = tl.arange(0, LANES)
    in_head = lane < D
    q_offset = row[:, None] * q_stride_n + lane[None, :].to(tl.int64) * q_stride_d
    k_offset = place[None, :] * k_stride_l + lane[:, None].to(tl.int64) * k_stride_d
    q_tile = q_ptr + batch * q_stride_b + q_offset
    k_tile = k_ptr + batch * k_stride_b + k_offset
    if LSE_OF_ROWS:
        lse_rows = lse_ptr + batch * lse_stride_b + row * lse_stride_n
    else:
        lse_rows = lse_ptr + batch * lse_stride_b + i * lse_stride_n

    share = tl.cdiv(heads, tl.num_programs(1))
    first = tl.program_id(1) * share
    some = (tl.max(real_i.to(tl.int32), 0) > 0) & (tl.max(real_j.to(tl.int32), 0) > 0)
    stop = tl.where(some, tl.minimum(first + share, heads), first)
    total = tl.zeros((TILE, TILE), tl.float32)
    for h in range(first, stop):
        head, kv_head = tl.cast(h, tl.int64), tl.cast(h // groups, tl.int64)
        q = tl.load(q_tile + head * q_stride_h, mask=real_i[:, None] & in_head[None, :], other=0.0)
        k = tl.load(k_tile + kv_head * k_stride_h, mask=in_head[:, None] & real_j[None, :], other=0.0)
        lse = tl.load(lse_rows + head * lse_stride_h, mask=real_i, other=0.0)
        score = tl.dot(dot_operand(q), dot_operand(k), input_precision="ieee") * scale
        total += tl.exp(score - lse[:, None])
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    cell = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(part_ptr + part * TILE * TILE + cell, total / tl.cast(heads, tl.float32))


@triton.jit(do_not_specialize=["n", "L", "M"])
def add_parts_kernel(
    part_ptr,
    position_ptr,
    row_ptr,
    length_ptr,
    out_ptr,
    n,
    L,
    M,
    parts,
    out_stride_b,
    out_stride_i,
    out_stride_j,
    TILE: tl.constexpr,
):
    """Tile ``program_id(0)``, from all parts of the heads."""
    batch, i, j, _, _, real_i, real_j = _tile(position_ptr, row_ptr, length_ptr, n, L, M, TILE)
    real = real_i[:, None] & real_j[None, :]
    cell = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    part_ptr += tl.program_id(0).to(tl.int64) * parts * TILE * TILE
    total = tl.zeros((TILE, TILE), tl.float32)
    for part in range(parts):
        total += tl.load(part_ptr + part * TILE * TILE + cell, mask=real, other=0.0)
    out_tile = out_ptr + batch * out_stride_b + i[:, None] * out_stride_i + j[None, :] * out_stride_j
    tl.store(out_tile, tl.load(out_tile, mask=real, other=0.0) + total, mask=real)


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor | None,
    lengths: torch.Tensor | None,
    lse: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
) -> tuple[list[Launch], None]:
    """Kernel launches, in order; they write to out."""
    check_heads(q)
    B, Hq, n, d = q.shape
    Hkv, L = k.shape[1:3]
    M = positions.shape[1]
    if B * Hq * n * L * M == 0:
        return [], None

    cut = config(B, Hq, Hkv, M, L, d, q.element_size())
    positions = positions.contiguous()
    of_sequence = {
        "position_ptr": positions,
        "row_ptr": positions if rows is None else rows.contiguous(),
        "length_ptr": None if lengths is None else lengths.contiguous(),
        "n": n,
        "L": L,
        "M": M,
    }
    of_head = {
        "q_ptr": q,
        "k_ptr": k,
        "groups": Hq // Hkv,
        "scale": scale,
        **dict(zip(_STRIDES, (*q.stride(), *k.stride()), strict=True)),
        "D": d,
        "LANES": cut.lanes,
    }
    launches = []
    base = lse
    if base is None:
        base = torch.empty((B, Hq, M), dtype=torch.float32, device=q.device)
        launches += _row_lse(cut, base, Hkv, of_sequence, of_head)
    tiles = B * triton.cdiv(M, cut.tile) ** 2
    part = torch.empty((tiles, cut.head_splits, cut.tile, cut.tile), dtype=torch.float32, device=q.device)
    entries = {
        "lse_ptr": base,
        "heads": Hq,
        **dict(zip(_LSE_STRIDES, base.stride(), strict=True)),
        "LSE_OF_ROWS": lse is not None,
    }
    add = {"out_ptr": out, "parts": cut.head_splits, **dict(zip(_OUT_STRIDES, out.stride(), strict=True))}
    of_part = of_sequence | {"part_ptr": part, "TILE": cut.tile}
    launches += [
        Launch(entries_kernel, (tiles, cut.head_splits), of_part | of_head | entries, cut.num_warps),
        Launch(add_parts_kernel, (tiles,), of_part | add, cut.num_warps),
    ]
    return launches, None


def _row_lse(
    cut: Config, lse: torch.Tensor, Hkv: int, of_sequence: dict[str, Any], of_head: dict[str, Any]
) -> list[Launch]:
    """The launches that write lse [B, Hq, M]."""
    B, Hq, M = lse.shape
    part = lse
    if cut.key_splits > 1:
        part = torch.empty((B * Hq * M, cut.key_splits), dtype=torch.float32, device=lse.device)
    rows = Launch(
        row_lse_kernel,
        (B * Hkv * triton.cdiv(Hq // Hkv * M, cut.rows), cut.key_splits),
        of_sequence | of_head | {"lse_ptr": part, "kv_heads": Hkv, "ROWS": cut.rows, "KEYS": cut.keys},
        cut.num_warps,
    )
    if cut.key_splits == 1:
        return [rows]
    merge = {
        "part_ptr": part,
        "lse_ptr": lse,
        "rows": B * Hq * M,
        "splits": cut.key_splits,
        "ROWS": _MERGED,
        "SPLITS": triton.next_power_of_2(cut.key_splits),
    }
    return [rows, Launch(merge_lse_kernel, (triton.cdiv(B * Hq * M, _MERGED),), merge, 4)]


def attention_graph(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor | None,
    lengths: torch.Tensor | None,
    lse: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    """out[b, i, j] += mean_h exp(scale q_hi k_hj - lse_hi), in place.

    q: [B, Hq, n, d] float16, bfloat16 or float32, else TypeError; d at most 256, else ValueError. k:
    [B, Hkv, L, d] of the same dtype; query head h goes with key head h // (Hq // Hkv). positions, rows:
    [B, M] int64, place of the key and row of the query of each position; outside [0, lengths[b]) or [0, n)
    it is padding, and what out has for it stays. rows None: the position itself, n = L. lengths: [B] int64,
    None for all L. lse: [B, Hq, n] float32, log sum exp(scale q k) over the keys, None to compute it. out:
    [B, M, M] float32. Products are summed in float32; those of float16 and bfloat16 run on the matrix units.
    """
    launches, _ = plan(q, k, positions, rows, lengths, lse, scale, out)
    run(launches, q.device)
