"""Dream's unmasking rule (Ye et al., arXiv:2508.15487), and what Fast-dLLM added to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlmkern import ops
from dlmkern.decoders import _check
from dlmkern.decoders.sampling import REMASKING_STREAM, uniform
from dlmkern.decoders.state import Reason, State
from dlmkern.decoders.unmask import Candidates, Score, Selection, UnmaskingRule

_STATISTICS = {
    "origin": "confidence",
    "maskgit_plus": "confidence",
    "topk_margin": "margin",
    "entropy": "negative entropy",
    "confidence_threshold": "confidence",
}


@dataclass(frozen=True)
class DreamSchedule(UnmaskingRule):
    """Dream's rule: how many tokens a step commits follows from the time, which runs from 1 to `eps`.

    With `S` steps a block and `t_i = 1 - (1 - eps) i / S`, step `i` commits `m (1 - t_{i+1} / t_i)` of the
    `m` masked positions, rounded down, and the last one all. A step may commit nothing.

    Args:
        alg: which positions are committed. "origin": random ones, each with probability `1 - t_{i+1} / t_i`.
            "maskgit_plus", "topk_margin", "entropy": those of the largest confidence, margin between the two
            likeliest tokens, or negative entropy. "confidence_threshold" (Fast-dLLM) ignores the time: all of
            confidence `tau` or more, and the best. All of these are those of the distribution from which
            tokens are drawn.
        steps: steps for the whole answer, a multiple of the number of blocks. None: as many steps a block as
            it has positions.
        eps: the last time.
        alg_temp: randomness of the choice: the positions are drawn without replacement from `softmax(score /
            alg_temp)`. None or 0: the best are taken.
        tau: with "confidence_threshold".
        compat: None, or "official" for what the official code does with "confidence_threshold" outside
            blocks: until step `i` it commits at most `(i + 1) gen_length / steps` tokens, so that only few
            steps make it fast.
    """

    alg: str = "entropy"
    steps: int | None = None
    eps: float = 1e-3
    alg_temp: float | None = None
    tau: float = 0.9
    compat: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.alg, str) or self.alg not in _STATISTICS:
            raise ValueError(f"alg must be one of {', '.join(_STATISTICS)}, got {self.alg!r}")
        if self.steps is not None:
            _check.positive_int("steps", self.steps)
        _check.number("eps", self.eps)
        if not 0 < self.eps < 1:
            raise ValueError(f"eps must lie in (0, 1), got {self.eps!r}")
        if self.alg_temp is not None:
            _check.finite_number_from_zero("alg_temp", self.alg_temp)
        _check.probability("tau", self.tau)
        _check.compat(self.compat)

    @property
    def counts_steps(self) -> bool:
        return self.alg != "confidence_threshold" or self._is_capped()

    def check(self, gen_length: int, blocks: int | None) -> None:
        if self.steps is None:
            return
        blocks = _check.known_blocks(blocks)
        if self.steps % blocks:
            raise ValueError(
                f"steps must be a multiple of the number of blocks, {blocks}, got steps = {self.steps}"
            )
        if self._is_capped() and (blocks != 1 or gen_length % self.steps):
            raise ValueError(
                'alg = "confidence_threshold" with compat = "official" needs one block and steps that divide '
                f"gen_length; got {blocks} blocks, gen_length = {gen_length}, steps = {self.steps}"
            )

    def score(self) -> Score:
        return Score(_STATISTICS[self.alg], transformed=True)

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        if self.alg == "confidence_threshold":
            return self._sure(candidates, state)
        share = self._share(state, blocks)
        if self.alg == "origin":
            selected = candidates.masked & (_noise(candidates, state) < share.unsqueeze(1))
        else:
            masks = candidates.masked.sum(-1)
            quota = (masks.to(share.dtype) * share).to(torch.int64)
            score = candidates.score
            if self.alg_temp:
                # Adding Gumbel noise and taking the best is drawing without replacement.
                score = score / self.alg_temp - (-_noise(candidates, state).clamp(min=2.0**-54).log()).log()
            selected = ops.confidence_select(
                confidence=score, mask=candidates.masked, rule="schedule", count=quota
            ).selected
        return Selection(selected, torch.full_like(selected, Reason.SCHEDULED, dtype=torch.int8))

    def _share(self, state: State, blocks: int | None) -> Tensor:
        """The share of the masks that each row commits in this step, `[B]`."""
        if self.steps is None or blocks is None:
            span = 1 - self.eps
            share = span / (state.block_length.to(torch.float64) - span * state.block_step)
            return torch.where(state.block_step >= state.block_length - 1, 1.0, share)
        # In float32 and by this function, like the official code, whose rounding decides.
        times = torch.linspace(1, self.eps, self.steps // blocks + 1, device=state.block_step.device)
        shares = 1 - times[1:] / times[:-1]
        shares[-1:] = 1
        return shares[state.block_step.clamp(max=len(shares) - 1)]

    def _is_capped(self) -> bool:
        return self.alg == "confidence_threshold" and self.compat == "official" and self.steps is not None

    def _sure(self, candidates: Candidates, state: State) -> Selection:
        score, masked = candidates.score, candidates.masked
        selected = ops.confidence_select(confidence=score, mask=masked, tau=self.tau).selected
        if self._is_capped():
            assert self.steps is not None
            length = state.block_length
            due = torch.minimum((state.block_step + 1) * (length // self.steps), length)
            cap = due - (length - masked.sum(-1))
            selected &= ops.confidence_select(
                confidence=score, mask=masked, rule="schedule", count=cap
            ).selected
        reason = torch.where(score >= self.tau, Reason.THRESHOLD, Reason.FORCED)
        return Selection(selected, reason.to(torch.int8))


def _noise(candidates: Candidates, state: State) -> Tensor:
    return uniform(state.seed.unsqueeze(1), candidates.position, state.nfe.unsqueeze(1), REMASKING_STREAM)
