"""independent_set: greedy maximal independent set in order of priority, one program a matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Launch, one_program, run


@triton.jit
def best_candidate(priority, candidate, i, BLOCK: tl.constexpr):
    """Index of the candidate of highest priority, the lowest at a tie; BLOCK if there is none."""
    best = tl.max(tl.where(candidate, priority, -float("inf")), 0)
    return tl.min(tl.where(candidate & (priority == best), i, BLOCK), 0)


@triton.jit
def _next(waiting, priority, candidate, i, BLOCK: tl.constexpr):
    """The first position that waits, else the best candidate; BLOCK once neither is left."""
    first = tl.min(tl.where(waiting, i, BLOCK), 0)
    return tl.where(first < BLOCK, first, best_candidate(priority, candidate, i, BLOCK))


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
):
    """The set of matrix ``program_id(0)``: take the best candidate, drop what it rules out, repeat."""
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

    waiting = selected  # in, but the candidates have not been tested against it yet
    j = _next(waiting, priority, candidate, i, BLOCK)
    while j < BLOCK:
        selected |= i == j
        waiting &= i != j
        candidate &= i != j
        candidate &= tl.load(row_ptr + j.to(tl.int64) * stride_j, mask=candidate, other=0) == 0
        j = _next(waiting, priority, candidate, i, BLOCK)
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
    block, num_warps = one_program(n)
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
    }
    return [Launch(independent_set_kernel, (B,), arguments, num_warps)], selected


def independent_set(
    conflict: torch.Tensor,
    priority: torch.Tensor,
    eligible: torch.Tensor | None,
    preselected: torch.Tensor | None,
) -> torch.Tensor:
    """Selection, bool [B, n].

    conflict: [B, n, n] bool. priority: [B, n] float. eligible, preselected: [B, n] bool. A candidate joins
    unless its row of conflict is set at a position that is in; higher priority first, then the lower index.
    NaN is no candidate. preselected positions are in from the start.
    """
    launches, selected = plan(conflict, priority, eligible, preselected)
    run(launches, conflict.device)
    return selected
