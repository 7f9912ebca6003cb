"""cover_attention: what COVER's seeds predict and what all others see, every key and value read once.

As block_attention, but for the seeds. First they are listed. The walk over the keys of this pass leaves them
out, and then takes those that are listed from the cache. The softmax of a row that predicts a seed starts
with the seed's own column, as this pass has it, and the walk skips it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .attention import LARGEST_HEAD, check_size, key_count, online_softmax
from .block_attention import config, merge_splits
from .dtypes import dot_operand, narrow, wide
from .launch import Launch, one_program, run

_STRIDES = tuple(
    f"{name}_stride_{axis}"
    for name in ("q", "k", "v", "k_cached", "v_cached")
    for axis in ("bhnd" if name == "q" else "bhld")
)


@triton.jit(do_not_specialize=["L"])
def list_seeds_kernel(seed_ptr, length_ptr, column_ptr, count_ptr, L, BLOCK: tl.constexpr):
    """The columns of sequence ``program_id(0)`` that are seeds, in order, and how many there are."""
    batch = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < key_count(length_ptr, batch, L)
    seed = tl.load(seed_ptr + batch * L + i, mask=inside, other=0) != 0
    before = tl.cumsum(seed.to(tl.int32), 0) - 1
    tl.store(column_ptr + batch * L + before, i, mask=seed)
    tl.store(count_ptr + batch, tl.sum(seed.to(tl.int32), 0))


@triton.jit(do_not_specialize=["L", "shift"])
def cover_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cached_ptr,
    v_cached_ptr,
    seed_ptr,
    column_ptr,
    count_ptr,
    length_ptr,
    out_ptr,
    lse_ptr,
    L,
    shift,
    kv_heads,
    groups,
    scale: tl.float64,
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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Tile ``program_id(0)`` of the queries of all key heads, over part ``program_id(1)`` of the keys."""
    tiles = tl.cdiv(groups * L, ROWS)
    head = (tl.program_id(0) // tiles).to(tl.int64)  # of all key heads of all sequences
    batch, kv_head = head // kv_heads, head % kv_heads
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    known = row < groups * L
    lane, column = tl.arange(0, LANES), tl.arange(0, KEYS)
    in_head = lane < D

    q_ptr += batch * q_stride_b + kv_head * groups * q_stride_h
    q_offset = (row // L).to(tl.int64) * q_stride_h + (row % L).to(tl.int64) * q_stride_n
    q_tile = q_ptr + q_offset[:, None] + lane[None, :].to(tl.int64) * q_stride_d
    q = dot_operand(tl.load(q_tile, mask=known[:, None] & in_head[None, :], other=0.0))

    length = key_count(length_ptr, batch, L)
    part = tl.cdiv(tl.cdiv(length, KEYS), tl.num_programs(1)) * KEYS
    first = tl.program_id(1) * part
    stop = tl.minimum(first + part, length)

    seed_ptr += batch * L
    column_ptr += batch * L
    k_ptr += batch * k_stride_b + kv_head * k_stride_h
    v_ptr += batch * v_stride_b + kv_head * v_stride_h
    k_cached_ptr += batch * k_cached_stride_b + kv_head * k_cached_stride_h
    v_cached_ptr += batch * v_cached_stride_b + kv_head * v_cached_stride_h

    # Of each row, the seed that it predicts, -1 for none: its score and its value come first.
    own = (row % L + shift).to(tl.int64)
    verified = known & (own < length)
    verified &= tl.load(seed_ptr + own, mask=verified, other=0) != 0
    own = tl.where(verified, own, -1)
    verified &= tl.program_id(1) == 0  # one part of the keys brings it along
    own_mask = verified[:, None] & in_head[None, :]
    own_k_tile = k_ptr + own[:, None] * k_stride_l + lane[None, :].to(tl.int64) * k_stride_d
    own_k = wide(tl.load(own_k_tile, mask=own_mask, other=0.0))
    factor = tl.full((), scale, own_k.dtype)
    peak = tl.where(verified, tl.sum(wide(q) * own_k, 1) * factor, -float("inf"))
    total = (peak != -float("inf")).to(own_k.dtype)
    own_v_tile = v_ptr + own[:, None] * v_stride_l + lane[None, :].to(tl.int64) * v_stride_d
    weighted = wide(tl.load(own_v_tile, mask=own_mask, other=0.0))

    new_tiles = tl.cdiv(tl.maximum(stop - first, 0), KEYS)
    count = tl.where(tl.program_id(1) == 0, tl.load(count_ptr + batch), 0)
    for tile in range(new_tiles + tl.cdiv(count, KEYS)):
        old = tile >= new_tiles  # the seeds that are listed
        entry = (tile - new_tiles) * KEYS + column
        listed = old & (entry < count)
        key = tl.load(column_ptr + entry, mask=listed, other=0)
        key = tl.where(old, key, first + tile * KEYS + column).to(tl.int64)
        new = (key < stop) & (old == 0)
        seed = tl.load(seed_ptr + key, mask=new, other=0) != 0
        here = listed | (new & (seed == 0))

        k_lane = lane.to(tl.int64) * tl.where(old, k_cached_stride_d, k_stride_d)
        k_row = key * tl.where(old, k_cached_stride_l, k_stride_l)
        k_tile = tl.where(old, k_cached_ptr, k_ptr) + k_row[None, :] + k_lane[:, None]
        k = dot_operand(tl.load(k_tile, mask=in_head[:, None] & here[None, :], other=0.0))
        score = tl.dot(q, k, input_precision="ieee", out_dtype=own_k.dtype) * factor
        seen = here[None, :] & (key[None, :] != own[:, None])
        weight, shrink, peak, total = online_softmax(tl.where(seen, score, -float("inf")), peak, total)
        v_lane = lane.to(tl.int64) * tl.where(old, v_cached_stride_d, v_stride_d)
        v_row = key * tl.where(old, v_cached_stride_l, v_stride_l)
        v_tile = tl.where(old, v_cached_ptr, v_ptr) + v_row[:, None] + v_lane[None, :]
        v = dot_operand(tl.load(v_tile, mask=here[:, None] & in_head[None, :], other=0.0))
        weight = dot_operand(narrow(weight, v_ptr.dtype.element_ty))
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weight, v, weighted, input_precision="ieee", out_dtype=own_k.dtype)

    out_row = (head * groups * L + row) * tl.num_programs(1) + tl.program_id(1)
    out = narrow(weighted / tl.where(total == 0.0, 1.0, total)[:, None], out_ptr.dtype.element_ty)
    out_tile = out_ptr + out_row[:, None] * D + lane[None, :]
    tl.store(out_tile, out, mask=known[:, None] & in_head[None, :])
    tl.store(lse_ptr + out_row, (peak + tl.log2(total)) * 0.6931471805599453, mask=known)


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cached: torch.Tensor,
    v_cached: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor | None,
    shift: int,
    scale: float,
) -> tuple[list[Launch], tuple[torch.Tensor, torch.Tensor]]:
    """Kernel launches, in order, and the tensors (out, lse) that they write."""
    check_size(q, LARGEST_HEAD if q.dtype != torch.float64 else LARGEST_HEAD // 2)
    B, Hq, L, d = q.shape
    kv_heads = k.shape[1]
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty((B, Hq, L, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, Hq, L), dtype=sums, device=q.device)
    if B * Hq * L == 0:
        return [], (out, lse)

    groups = Hq // kv_heads
    cut = config(B * kv_heads, groups * L, L, d, q.element_size())
    part, part_lse = out, lse
    if cut.splits > 1:
        part = torch.empty((B * Hq * L, cut.splits, d), dtype=sums, device=q.device)
        part_lse = torch.empty((B * Hq * L, cut.splits), dtype=sums, device=q.device)
    strides = (s for x in (q, k, v, k_cached, v_cached) for s in x.stride())
    seen = {
        # Beside narrower numbers, Triton's products of float64 do not compile.
        "seed_ptr": seeds.int() if q.dtype == torch.float64 else seeds.contiguous(),
        "column_ptr": torch.empty((B, L), dtype=torch.int32, device=q.device),
        "count_ptr": torch.empty((B,), dtype=torch.int32, device=q.device),
        "length_ptr": None if lengths is None else lengths.contiguous(),
        "L": L,
    }
    block, num_warps = one_program(L)
    listed = Launch(list_seeds_kernel, (B,), seen | {"BLOCK": block}, num_warps)
    attend = Launch(
        cover_attention_kernel,
        (B * kv_heads * triton.cdiv(groups * L, cut.rows), cut.splits),
        seen
        | {
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "k_cached_ptr": k_cached,
            "v_cached_ptr": v_cached,
            "out_ptr": part,
            "lse_ptr": part_lse,
            "shift": shift,
            "kv_heads": kv_heads,
            "groups": groups,
            "scale": scale * math.log2(math.e),
            **dict(zip(_STRIDES, strides, strict=True)),
            "D": d,
            "LANES": cut.lanes,
            "ROWS": cut.rows,
            "KEYS": cut.keys,
        },
        cut.num_warps,
    )
    if cut.splits == 1:
        return [listed, attend], (out, lse)
    return [listed, attend, merge_splits(part, part_lse, out, lse)], (out, lse)


def cover_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cached: torch.Tensor,
    v_cached: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor | None,
    shift: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (the dtype of q) [B, Hq, L, d] and lse, log sum exp(scale q k), float32 (float64) [B, Hq, L].

    q: [B, Hq, L, d] float; d at most 256, of float64 128, else ValueError. k, v, k_cached, v_cached:
    [B, Hkv, L, d] of the same dtype; query head h goes with key head h // (Hq // Hkv). seeds: [B, L] bool,
    the columns that are those of k_cached and v_cached; but row i sees column i + shift as k and v have it.
    lengths: [B] int64, sequence b has keys [0, lengths[b]), None for all L; without keys the results are 0
    and -inf. Products are summed in float32, those of float64 in float64; those of float16 and bfloat16 run
    on the matrix units, with the softmax's weights, but for that of a row's own seed, rounded to that dtype.
    """
    launches, outputs = plan(q, k, v, k_cached, v_cached, seeds, lengths, shift, scale)
    run(launches, q.device)
    return outputs
