"""dapd_select: one commit step of DAPD, exactly as the reference, in float64.

No matrix is stored: the weight of a pair comes from its two scores whenever it is needed. One kernel adds up
degrees, a program for a few positions; then a program a sequence takes the best candidate, drops those with
an edge to it, and repeats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .independent_set import best_candidate
from .launch import Launch, one_program, run

_ROWS, _COLUMNS = 64, 8  # of the tiles of weights that a program adds up
_NUM_WARPS = 4  # of it; with fewer some compilers spill

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)  # of a score
_LEAST_PEAK = tl.constexpr(1e-8)


@triton.jit
def _candidate(confidence_ptr, valid_ptr, i, known):
    """Confidence of positions i in float64, and which of them are candidates; the pointers are a row's."""
    confidence = tl.load(confidence_ptr + i, mask=known, other=float("nan")).to(tl.float64)
    candidate = tl.abs(confidence) < float("inf")
    if valid_ptr is not None:
        candidate &= tl.load(valid_ptr + i, mask=known, other=0) != 0
    return confidence, candidate


@triton.jit
def _score(pointer, pair):
    """0 for what float32 cannot hold."""
    score = tl.load(pointer, mask=pair, other=0.0).to(tl.float64)
    return tl.where(tl.abs(score) <= _LARGEST, score, 0.0)


@triton.jit
def _weight(score_ptr, i, j, stride_i, stride_j, pair):
    """Where pair, else 0. Between its product and a sum lies a choice, so that they are not fused."""
    weight = (
        _score(score_ptr + i * stride_i + j * stride_j, pair)
        + _score(score_ptr + j * stride_i + i * stride_j, pair)
    ) * 0.5
    return tl.where(pair, weight, 0.0)


@triton.jit(do_not_specialize=["M"])
def degree_kernel(
    score_ptr,
    confidence_ptr,
    valid_ptr,
    priority_ptr,
    peak_ptr,
    M,
    stride_b,
    stride_i,
    stride_j,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """degree c and the largest weight of tile ``program_id(1)`` of sequence ``program_id(0)``."""
    batch = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    score_ptr += batch * stride_b
    confidence_ptr += batch * M
    if valid_ptr is not None:
        valid_ptr += batch * M
    confidence, candidate = _candidate(confidence_ptr, valid_ptr, i, i < M)
    column = tl.arange(0, COLUMNS)
    degree = tl.zeros((ROWS,), tl.float64)
    peak = tl.full((ROWS,), _LEAST_PEAK, tl.float64)
    for start in range(0, M, COLUMNS):
        j = (start + column).to(tl.int64)
        _, other = _candidate(confidence_ptr, valid_ptr, j, j < M)
        pair = candidate[:, None] & other[None, :] & (i[:, None] != j[None, :])
        weight = _weight(score_ptr, i[:, None], j[None, :], stride_i, stride_j, pair)
        peak = tl.maximum(peak, tl.max(weight, 1))
        for k in range(COLUMNS):  # one after the other: the order of a sum over the tile is not known
            degree += tl.sum(tl.where(column[None, :] == k, weight, 0.0), 1)
    tl.store(priority_ptr + batch * M + i, degree * confidence, mask=i < M)
    tl.store(peak_ptr + batch * M + i, peak, mask=i < M)


@triton.jit(do_not_specialize=["M"])
def dapd_select_kernel(
    score_ptr,
    confidence_ptr,
    valid_ptr,
    tau_ptr,
    certain_ptr,
    late_ptr,
    priority_ptr,
    peak_ptr,
    selected_ptr,
    M,
    stride_b,
    stride_i,
    stride_j,
    SYMMETRIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The selection of sequence ``program_id(0)``."""
    batch = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < M
    score_ptr += batch * stride_b
    confidence_ptr += batch * M
    if valid_ptr is not None:
        valid_ptr += batch * M
    confidence, candidate = _candidate(confidence_ptr, valid_ptr, i, inside)
    certain = candidate & (confidence >= tl.load(certain_ptr + batch))
    selected = certain | (candidate & (confidence >= tl.load(late_ptr + batch)))
    candidate &= certain == 0

    peak_ptr += batch * M
    priority = tl.load(priority_ptr + batch * M + i, mask=candidate, other=0.0)
    peak = tl.load(peak_ptr + i, mask=candidate, other=1.0)
    tau = tl.load(tau_ptr + batch)
    j = best_candidate(priority, candidate, i, BLOCK)
    while j < BLOCK:
        selected |= i == j
        candidate &= i != j
        weight = _weight(score_ptr, i.to(tl.int64), j.to(tl.int64), stride_i, stride_j, candidate)
        edge = weight / peak > tau
        if SYMMETRIC:
            edge |= weight / tl.load(peak_ptr + j) > tau
        candidate &= edge == 0
        j = best_candidate(priority, candidate, i, BLOCK)
    tl.store(selected_ptr + batch * M + i, selected, mask=inside)


def plan(
    scores: torch.Tensor,
    confidence: torch.Tensor,
    valid: torch.Tensor | None,
    tau: torch.Tensor,
    certain: torch.Tensor,
    late: torch.Tensor,
    symmetric: bool,
) -> tuple[list[Launch], torch.Tensor]:
    """Kernel launches, in order, and the selection that they write."""
    B, M = confidence.shape
    selected = torch.empty((B, M), dtype=torch.bool, device=scores.device)
    if B * M == 0:
        return [], selected
    stride_b, stride_i, stride_j = scores.stride()
    shared = {
        "score_ptr": scores,
        "confidence_ptr": confidence.contiguous(),
        "valid_ptr": None if valid is None else valid.contiguous(),
        "priority_ptr": torch.empty((B, M), dtype=torch.float64, device=scores.device),
        "peak_ptr": torch.empty((B, M), dtype=torch.float64, device=scores.device),
        "M": M,
        "stride_b": stride_b,
        "stride_i": stride_i,
        "stride_j": stride_j,
    }
    block, num_warps = one_program(M)
    select = {
        "tau_ptr": tau.contiguous(),
        "certain_ptr": certain.contiguous(),
        "late_ptr": late.contiguous(),
        "selected_ptr": selected,
        "SYMMETRIC": symmetric,
        "BLOCK": block,
    }
    tile = {"ROWS": _ROWS, "COLUMNS": _COLUMNS}
    launches = [
        Launch(degree_kernel, (B, triton.cdiv(M, _ROWS)), shared | tile, _NUM_WARPS),
        Launch(dapd_select_kernel, (B,), shared | select, num_warps),
    ]
    return launches, selected


def dapd_select(
    scores: torch.Tensor,
    confidence: torch.Tensor,
    valid: torch.Tensor | None,
    tau: torch.Tensor,
    certain: torch.Tensor,
    late: torch.Tensor,
    symmetric: bool,
) -> torch.Tensor:
    """Selection, bool [B, M], of DAPD.

    scores: [B, M, M] float. confidence: [B, M] float, not finite where there is no candidate. valid: [B, M]
    bool, positions that may be committed; None for all. tau, certain, late: [B] float64. Of the candidates,
    those at or above certain or late are in; the others below certain join by falling degree times
    confidence, ties to the lower index, unless they have an edge to one that joined. symmetric: edges count
    from either side.
    """
    launches, selected = plan(scores, confidence, valid, tau, certain, late, symmetric)
    run(launches, scores.device)
    return selected
