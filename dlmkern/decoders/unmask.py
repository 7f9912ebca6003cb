"""Unmasking rules: which positions of the block are committed in this step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dlmkern import ops
from dlmkern.decoders import _check
from dlmkern.decoders.sampling import REMASKING_STREAM, uniform
from dlmkern.decoders.state import Reason, State


class Candidates(NamedTuple):
    """The block's positions and what the forward pass predicts for them; `n` covers the longest block."""

    logits: Tensor
    """`[B, n, V]`."""
    token: Tensor
    """int64 `[B, n]`: the token that the position would commit."""
    confidence: Tensor
    """float64 `[B, n]`: its probability at temperature 1."""
    logsumexp: Tensor
    """float64 `[B, n]`, of the logits, as the probabilities are normalised."""
    masked: Tensor
    """bool `[B, n]`: positions of the block that are still masked."""
    position: Tensor
    """int64 `[B, n]`."""


class Selection(NamedTuple):
    """What to commit; both `[B, n]`."""

    selected: Tensor
    """bool, at least one masked position in each row that has one."""
    reason: Tensor
    """int8: a `Reason`, meaningful where selected."""


class UnmaskingRule(Protocol):
    """One of the four choices that make a decoder."""

    def check(self, gen_length: int, blocks: int | None) -> None:
        """Raise ValueError if the rule cannot fill this many tokens in that many blocks (None: unknown)."""

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        """Choose; reads nothing on the host. `state` is that of the block, `blocks` as in `check`."""


@dataclass(frozen=True)
class OnePerStep:
    """LLaDA's own rule (arXiv:2502.09992, low-confidence remasking): a fixed number of commits a step.

    Args:
        steps: forward passes for the whole answer, at least one a block and at most one a token. They are
            split evenly over the blocks, and a block's positions evenly over its steps; what is left over
            goes to the first. None: one token a step.
        remasking: "low_confidence" commits the most confident positions, "random" random ones.
    """

    steps: int | None = None
    remasking: str = "low_confidence"

    def __post_init__(self) -> None:
        if self.steps is not None:
            _check.positive_int("steps", self.steps)
        if self.remasking not in ("low_confidence", "random"):
            raise ValueError(f'remasking must be "low_confidence" or "random", got {self.remasking!r}')

    def check(self, gen_length: int, blocks: int | None) -> None:
        if self.steps is None:
            return
        if blocks is None:
            raise ValueError("steps needs blocks whose number is known beforehand; leave it out")
        if not blocks <= self.steps <= gen_length:
            raise ValueError(
                f"steps must lie between the number of blocks, {blocks}, and gen_length, {gen_length}; "
                f"got {self.steps}"
            )

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        if self.steps is None or blocks is None:
            quota = torch.ones_like(state.block_length)
        else:
            steps, more = divmod(self.steps, blocks)
            block_steps = steps + (state.blocks_opened <= more)
            # A block that is shorter than its steps takes fewer of them.
            block_steps = torch.minimum(block_steps, state.block_length)
            extra = state.block_step < state.block_length % block_steps
            quota = state.block_length // block_steps + extra
        if self.remasking == "random":
            noise = uniform(
                state.seed.unsqueeze(1), candidates.position, state.nfe.unsqueeze(1), REMASKING_STREAM
            )
        else:
            noise = candidates.confidence
        order = torch.where(candidates.masked, noise, -torch.inf).argsort(
            dim=-1, descending=True, stable=True
        )
        first = torch.arange(order.shape[1], device=order.device) < quota.unsqueeze(1)
        selected = torch.zeros_like(candidates.masked).scatter(1, order, first)
        return Selection(selected, torch.full_like(selected, Reason.SCHEDULED, dtype=torch.int8))


@dataclass(frozen=True)
class Threshold:
    """Fast-dLLM's rule (arXiv:2505.22618, algorithm 1): all of confidence `tau` or more, and the best."""

    tau: float = 0.9

    def __post_init__(self) -> None:
        _check.number("tau", self.tau)
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must lie in [0, 1], got {self.tau!r}")

    def check(self, gen_length: int, blocks: int | None) -> None:
        pass

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        sure = candidates.confidence >= self.tau
        best = torch.where(candidates.masked, candidates.confidence, -torch.inf).argmax(-1, keepdim=True)
        selected = (candidates.masked & sure).scatter(1, best, True)
        return Selection(selected, torch.where(sure, Reason.THRESHOLD, Reason.FORCED).to(torch.int8))


@dataclass(frozen=True)
class CAP:
    """CAP-Decoding (DepCap, arXiv:2604.15750, algorithm 1): commit together what does not conflict.

    See `ops.cap_select`.

    Args:
        tau_low: least confidence of a candidate, in `[0, 1]`.
        tau_high: from this confidence on candidates are committed whatever they conflict with; above 1 none
            is.
        gamma: two candidates conflict if `log p_i(token_j) + log p_j(token_i)` exceeds it.
        strict: test the high tier for conflicts too.
    """

    tau_low: float = 0.8
    tau_high: float = 0.95
    gamma: float = -16.0
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("tau_low", "tau_high", "gamma"):
            _check.number(name, getattr(self, name))
        if not 0 <= self.tau_low <= 1:
            raise ValueError(f"tau_low must lie in [0, 1], got {self.tau_low!r}")
        if self.tau_low > self.tau_high:
            raise ValueError(
                f"tau_low must not exceed tau_high, got tau_low = {self.tau_low!r} and "
                f"tau_high = {self.tau_high!r}"
            )
        if not isinstance(self.strict, bool):
            raise ValueError(f"strict must be a bool, got {self.strict!r}")

    def check(self, gen_length: int, blocks: int | None) -> None:
        pass

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        chosen = ops.cap_select(
            logits=candidates.logits,
            token=candidates.token,
            logsumexp=candidates.logsumexp,
            mask=candidates.masked,
            tau_low=self.tau_low,
            tau_high=self.tau_high,
            gamma=self.gamma,
            strict=self.strict,
            return_stats=True,
        )
        assert isinstance(chosen, ops.CapSelection)
        reason = torch.where(chosen.confidence >= self.tau_low, Reason.CONFLICT_FREE, Reason.FORCED)
        reason = torch.where(chosen.confidence >= self.tau_high, Reason.HIGH_TIER, reason)
        return Selection(chosen.selected, reason.to(torch.int8))
