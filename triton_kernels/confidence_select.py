"""confidence_select: which positions a confidence rule commits, from ranks by counting, in float64.

A program ranks one tile of positions: it counts, tile by tile, the candidates that come before each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Launch, one_program, run

THRESHOLD, FACTOR, SCHEDULE, FACTOR_OFFICIAL = map(tl.constexpr, range(4))  # the rules, as in dlmkern.h
_MOST = 64  # positions that a program ranks


@triton.jit
def _candidates(confidence_ptr, mask_ptr, i, n):
    """Confidences of positions i in float64; NaN, which no comparison counts, where there is no candidate."""
    inside = i < n
    confidence = tl.load(confidence_ptr + i, mask=inside, other=float("nan")).to(tl.float64)
    if mask_ptr is not None:
        open_ = tl.load(mask_ptr + i, mask=inside, other=0) != 0
        confidence = tl.where(open_, confidence, float("nan"))
    return confidence


@triton.jit(do_not_specialize=["n"])
def confidence_select_kernel(
    confidence_ptr,
    mask_ptr,
    parameter_ptr,
    selected_ptr,
    n,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tile ``program_id(1)`` of sequence ``program_id(0)``."""
    batch = tl.program_id(0).to(tl.int64)
    confidence_ptr += batch * n
    if mask_ptr is not None:
        mask_ptr += batch * n
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    confidence = _candidates(confidence_ptr, mask_ptr, i, n)

    rank = tl.full((BLOCK,), 1, tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = _candidates(confidence_ptr, mask_ptr, j, n)[None, :]
        tied = (other == confidence[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(((other > confidence[:, None]) | tied).to(tl.int32), 1)

    parameter = tl.load(parameter_ptr + batch)
    if RULE == THRESHOLD:
        passed = confidence >= parameter
    elif RULE == FACTOR:
        passed = (rank + 1).to(tl.float64) * (1.0 - confidence) < parameter
    elif RULE == SCHEDULE:
        passed = rank.to(tl.float64) <= parameter
    else:
        passed = confidence >= 1.0 - parameter / (rank + 1).to(tl.float64)
    if RULE != SCHEDULE:
        passed |= rank == 1
    tl.store(selected_ptr + batch * n + i, passed & (confidence == confidence), mask=i < n)


@triton.jit(do_not_specialize=["n"])
def last_rank_kernel(confidence_ptr, mask_ptr, selected_ptr, n, BLOCK: tl.constexpr):
    """FACTOR_OFFICIAL: where one candidate is left over, the last in rank goes in as well."""
    batch = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    if mask_ptr is not None:
        mask_ptr += batch * n
    confidence = _candidates(confidence_ptr + batch * n, mask_ptr, i, n)
    candidate = confidence == confidence
    selected = tl.load(selected_ptr + batch * n + i, mask=i < n, other=0) != 0
    left = tl.sum((candidate & (selected == 0)).to(tl.int32), 0)
    lowest = tl.min(tl.where(candidate, confidence, float("inf")), 0)
    last = tl.max(tl.where(candidate & (confidence == lowest), i, -1), 0)
    tl.store(selected_ptr + batch * n + i, selected | (i == tl.where(left == 1, last, -1)), mask=i < n)


def plan(
    confidence: torch.Tensor, mask: torch.Tensor | None, parameter: torch.Tensor, rule: int
) -> tuple[list[Launch], torch.Tensor]:
    """Kernel launches, in order, and the selection that they write."""
    B, n = confidence.shape
    selected = torch.empty((B, n), dtype=torch.bool, device=confidence.device)
    if B * n == 0:
        return [], selected
    arguments = {
        "confidence_ptr": confidence.contiguous(),
        "mask_ptr": None if mask is None else mask.contiguous(),
        "selected_ptr": selected,
        "n": n,
    }
    whole, num_warps = one_program(n)
    block = min(whole, _MOST)
    rank = Launch(
        confidence_select_kernel,
        (B, triton.cdiv(n, block)),
        arguments | {"parameter_ptr": parameter.contiguous(), "RULE": rule, "BLOCK": block},
        block // 8,
    )
    if rule != FACTOR_OFFICIAL:
        return [rank], selected
    return [rank, Launch(last_rank_kernel, (B,), arguments | {"BLOCK": whole}, num_warps)], selected


def confidence_select(
    confidence: torch.Tensor, mask: torch.Tensor | None, parameter: torch.Tensor, rule: int
) -> torch.Tensor:
    """Selection, bool [B, n].

    confidence: [B, n] float32 or float64; NaN is no candidate. mask: [B, n] bool, positions that may be
    committed; None for all. parameter: [B] float64, p below. rule: with c a candidate's confidence and r its
    rank by falling confidence, from 1 on, ties to the lower index,

    0 threshold         r == 1 or c >= p
    1 factor            r == 1 or (r + 1) (1 - c) < p
    2 schedule          r <= p
    3 factor, official  r == 1 or c >= 1 - p / (r + 1); if that leaves one candidate over, the last rank too
    """
    launches, selected = plan(confidence, mask, parameter, rule)
    run(launches, confidence.device)
    return selected
