"""independent_set: greedy maximal independent set in order of priority, one program a matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Launch, run, tile_of

_TILE = 2048  # numbers in a tile of the matrix, when a block of columns is read at once


@triton.jit
def best_candidate(priority, candidate, i, BLOCK: tl.constexpr):
    """Index of the candidate of highest priority, the lowest at a tie; BLOCK if there is none."""
    best = tl.max(tl.where(candidate, priority, -float("inf")), 0)
    return tl.min(tl.where(candidate & (priority == best), i, BLOCK), 0)


@triton.jit(do_not_specialize=["n"])
def independent_set_kernel(
    conflict_ptr,
    priority_ptr,
    eligible_ptr,
    preselected_ptr,
    selected_ptr,
    n,
    stride_b,
    stride_i,
    stride_j,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The set of matrix ``program_id(0)``: take the best candidate, drop those whose row conflicts with it, repeat."""
    batch = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n
    row_ptr = conflict_ptr + batch * stride_b + i.to(tl.int64) * stride_i
    priority = tl.load(priority_ptr + batch * n + i, mask=inside, other=float("nan")).to(tl.float64)
    candidate = priority == priority
    if eligible_ptr is not None:
        candidate &= tl.load(eligible_ptr + batch * n + i, mask=inside, other=0) != 0

    selected = tl.zeros((BLOCK,), tl.int1)
    if preselected_ptr is not None:
        selected = tl.load(preselected_ptr + batch * n + i, mask=inside, other=0) != 0
        candidate &= selected == 0
        for first in range(0, n, COLUMNS):
            j = first + tl.arange(0, COLUMNS)
            chosen = tl.load(preselected_ptr + batch * n + j, mask=j < n, other=0) != 0
            pointer = row_ptr[:, None] + j.to(tl.int64)[None, :] * stride_j
            conflict = tl.load(pointer, mask=inside[:, None] & chosen[None, :], other=0) != 0
            candidate &= tl.max(conflict.to(tl.int32), 1) == 0

    best = best_candidate(priority, candidate, i, BLOCK)
    while best < BLOCK:
        selected |= i == best
        candidate &= i != best
        candidate &= tl.load(row_ptr + best.to(tl.int64) * stride_j, mask=candidate, other=0) == 0
        best = best_candidate(priority, candidate, i, BLOCK)
    tl.store(selected_ptr + batch * n + i, selected, mask=inside)


def plan(
    conflict: torch.Tensor,
    priority: torch.Tensor,
    eligible: torch.Tensor | None,
    preselected: torch.Tensor | None,
) -> tuple[list[Launch], torch.Tensor]:
    """Kernel launches and the selection that they write."""
    B, n = priority.shape
    selected = torch.empty((B, n), dtype=torch.bool, device=conflict.device)
    if B * n == 0:
        return [], selected
    block, num_warps = tile_of(n, smallest=32, per_warp=64)
    stride_b, stride_i, stride_j = conflict.stride()
    arguments = {
        "conflict_ptr": conflict,
        "priority_ptr": priority.contiguous(),
        "eligible_ptr": None if eligible is None else eligible.contiguous(),
        "preselected_ptr": None if preselected is None else preselected.contiguous(),
        "selected_ptr": selected,
        "n": n,
        "stride_b": stride_b,
        "stride_i": stride_i,
        "stride_j": stride_j,
        "BLOCK": block,
        "COLUMNS": max(_TILE // block, 1),
    }
    return [Launch(independent_set_kernel, (B,), arguments, num_warps)], selected


def independent_set(
    conflict: torch.Tensor,
    priority: torch.Tensor,
    eligible: torch.Tensor | None,
    preselected: torch.Tensor | None,
) -> torch.Tensor:
    """Selection, bool [B, n], of conflict [B, n, n] bool and priority [B, n]; eligible and preselected are [B, n] bool.

    A candidate joins unless its row of conflict is set at a position that is in; higher priority first, ties to the lower
    index, NaN never. preselected positions are in from the start.
    """
    launches, selected = plan(conflict, priority, eligible, preselected)
    run(launches, conflict.device)
    return selected
