"""cover_verify: what becomes of COVER's seeds, position by position."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Launch, run

NONE, KEEP, REPLACE, REMASK = map(tl.constexpr, range(4))  # the verdicts, as in dlmkern.h
_BLOCK = 256


@triton.jit(do_not_specialize=["count", "max_remasks"])
def cover_verify_kernel(
    confidence_ptr,
    token_ptr,
    predicted_ptr,
    seed_ptr,
    remask_ptr,
    verdict_ptr,
    count,
    tau_replace: tl.float64,
    max_remasks: tl.int64,
    BLOCK: tl.constexpr,
):
    """Tile ``program_id(0)`` of all positions of all sequences."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    confidence = tl.load(confidence_ptr + i, mask=inside, other=0.0).to(tl.float64)
    token = tl.load(token_ptr + i, mask=inside, other=0)
    predicted = tl.load(predicted_ptr + i, mask=inside, other=0)
    seed = tl.load(seed_ptr + i, mask=inside, other=0) != 0
    remasks = tl.load(remask_ptr + i, mask=inside, other=0)
    verdict = tl.where(remasks < max_remasks, REMASK, KEEP)
    verdict = tl.where(confidence >= tl.full((), tau_replace, tl.float64), REPLACE, verdict)
    verdict = tl.where(predicted == token, KEEP, verdict)
    tl.store(verdict_ptr + i, tl.where(seed, verdict, NONE).to(tl.int64), mask=inside)


def plan(
    confidence: torch.Tensor,
    token: torch.Tensor,
    predicted: torch.Tensor,
    seeds: torch.Tensor,
    remasks: torch.Tensor,
    tau_replace: float,
    max_remasks: int,
) -> tuple[list[Launch], torch.Tensor]:
    """Kernel launches and the verdicts that they write."""
    verdict = torch.empty(token.shape, dtype=torch.int64, device=token.device)
    count = token.numel()
    if count == 0:
        return [], verdict
    arguments = {
        "confidence_ptr": confidence.contiguous(),
        "token_ptr": token.contiguous(),
        "predicted_ptr": predicted.contiguous(),
        "seed_ptr": seeds.contiguous(),
        "remask_ptr": remasks.contiguous(),
        "verdict_ptr": verdict,
        "count": count,
        "tau_replace": tau_replace,
        "max_remasks": max_remasks,
        "BLOCK": _BLOCK,
    }
    return [Launch(cover_verify_kernel, (triton.cdiv(count, _BLOCK),), arguments, 4)], verdict


def cover_verify(
    confidence: torch.Tensor,
    token: torch.Tensor,
    predicted: torch.Tensor,
    seeds: torch.Tensor,
    remasks: torch.Tensor,
    tau_replace: float,
    max_remasks: int,
) -> torch.Tensor:
    """Verdicts, int64 [B, n]: 0 none, 1 keep, 2 replace, 3 mask again.

    confidence: [B, n] float32 or float64. token, predicted, remasks: [B, n] int64. seeds: [B, n] bool; where
    it is not set, there is no verdict. A token is kept if it is predicted; else replaced at a confidence of
    tau_replace or more, in float64; else masked again if it has been fewer than max_remasks times; else kept.
    """
    launches, verdict = plan(confidence, token, predicted, seeds, remasks, tau_replace, max_remasks)
    run(launches, token.device)
    return verdict
