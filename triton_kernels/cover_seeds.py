"""cover_seeds: the tokens that COVER verifies next, exactly as the reference, in float64.

One program a sequence scores its positions; another adds the scores up in order of index, which decides how
many seeds there are, and takes the best, one after the other. They are at most the root of n, rounded up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .independent_set import best_candidate
from .launch import Launch, one_program, run


@triton.jit
def _number(pointer, i, known):
    """Positions i of an argument in float64, 0 without one, and which of them are finite."""
    x = tl.zeros(i.shape, tl.float64)
    if pointer is not None:
        x = tl.load(pointer + i, mask=known, other=0.0).to(tl.float64)
    return x, tl.abs(x) < float("inf")


@triton.jit
def _share(x, ok):
    """x divided by its largest, over the positions that take part."""
    x = tl.where(ok & (x > 0.0), x, 0.0)
    largest = tl.max(x, 0)
    return x / tl.where(largest > 0.0, largest, 1.0)


@triton.jit(do_not_specialize=["n"])
def seed_scores_kernel(
    uncertainty_ptr,
    influence_ptr,
    drift_ptr,
    eligible_ptr,
    score_ptr,
    known_ptr,
    n,
    ADDITIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The scores of sequence ``program_id(0)``, and how many of its positions take part."""
    batch = tl.program_id(0).to(tl.int64)
    i = batch * n + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < n
    uncertainty, ok = _number(uncertainty_ptr, i, inside)
    influence, finite = _number(influence_ptr, i, inside)
    ok &= inside & finite
    drift, finite = _number(drift_ptr, i, inside)
    ok &= finite
    if eligible_ptr is not None:
        ok &= tl.load(eligible_ptr + i, mask=inside, other=0) != 0

    # No product is added to anything: there is nothing to fuse.
    score = _share(uncertainty, ok)
    if influence_ptr is not None:
        factor = _share(influence, ok)
        score = score + factor if ADDITIVE else score * factor
    if drift_ptr is not None:
        factor = 1.0 - _share(drift, ok)
        score = score + factor if ADDITIVE else score * factor
    tl.store(score_ptr + i, tl.where(ok, score, 0.0), mask=inside)
    tl.store(known_ptr + batch, tl.sum(ok.to(tl.int32), 0))


@triton.jit(do_not_specialize=["n"])
def cover_seeds_kernel(
    score_ptr,
    known_ptr,
    most_ptr,
    seed_ptr,
    n,
    ABOVE_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The seeds of sequence ``program_id(0)``."""
    batch = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    score_ptr += batch * n
    total = tl.full((), 0.0, tl.float64)
    for j in range(n):  # one after the other: the order of a sum over a tile is not known
        total += tl.load(score_ptr + j)
    score = tl.load(score_ptr + i, mask=i < n, other=0.0)
    if ABOVE_MEAN:
        mean = total / tl.maximum(tl.load(known_ptr + batch), 1).to(tl.float64)
        suspects = tl.sum((score > mean).to(tl.int32), 0).to(tl.float64)
    else:
        largest = tl.max(score, 0)
        suspects = total / tl.where(largest > 0.0, largest, 1.0)

    most = tl.load(most_ptr + batch)
    candidate = score > 0.0
    seed = tl.zeros((BLOCK,), tl.int1)
    rank = tl.full((), 0, tl.int64)
    j = best_candidate(score, candidate, i, BLOCK)
    while (j < BLOCK) & (rank < most) & ((rank * rank).to(tl.float64) < suspects):
        seed |= i == j
        candidate &= i != j
        rank += 1
        j = best_candidate(score, candidate, i, BLOCK)
    tl.store(seed_ptr + batch * n + i, seed, mask=i < n)


def plan(
    uncertainty: torch.Tensor,
    influence: torch.Tensor | None,
    drift: torch.Tensor | None,
    eligible: torch.Tensor | None,
    most: torch.Tensor,
    additive: bool,
    above_mean: bool,
) -> tuple[list[Launch], tuple[torch.Tensor, torch.Tensor]]:
    """Kernel launches, in order, and the tensors (seeds, score) that they write."""
    B, n = uncertainty.shape
    device = uncertainty.device
    seeds = torch.empty((B, n), dtype=torch.bool, device=device)
    score = torch.empty((B, n), dtype=torch.float64, device=device)
    if B * n == 0:
        return [], (seeds, score)
    block, num_warps = one_program(n)
    shared = {
        "score_ptr": score,
        "known_ptr": torch.empty((B,), dtype=torch.int32, device=device),
        "n": n,
        "BLOCK": block,
    }
    rate = {
        "uncertainty_ptr": uncertainty.contiguous(),
        "influence_ptr": None if influence is None else influence.contiguous(),
        "drift_ptr": None if drift is None else drift.contiguous(),
        "eligible_ptr": None if eligible is None else eligible.contiguous(),
        "ADDITIVE": additive,
    }
    choose = {"most_ptr": most.contiguous(), "seed_ptr": seeds, "ABOVE_MEAN": above_mean}
    launches = [
        Launch(seed_scores_kernel, (B,), shared | rate, num_warps),
        Launch(cover_seeds_kernel, (B,), shared | choose, num_warps),
    ]
    return launches, (seeds, score)


def cover_seeds(
    uncertainty: torch.Tensor,
    influence: torch.Tensor | None,
    drift: torch.Tensor | None,
    eligible: torch.Tensor | None,
    most: torch.Tensor,
    additive: bool,
    above_mean: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds, bool [B, n], and the scores that they were chosen by, float64 [B, n].

    uncertainty, influence, drift: [B, n] float32 or float64; None leaves influence or drift out of the score.
    eligible: [B, n] bool, None for all; with what is not finite in any of them, a position does not take part
    and has a score of 0. most: [B] int64, at most so many seeds. The score is the product, additive the sum,
    of uncertainty, influence and 1 - drift, each argument divided by its largest. The first ceil(sqrt(x)) by
    falling score are seeds, ties to the lower index: x is the sum of the scores divided by the largest, or,
    above_mean, how many exceed their mean.
    """
    launches, outputs = plan(uncertainty, influence, drift, eligible, most, additive, above_mean)
    run(launches, uncertainty.device)
    return outputs
