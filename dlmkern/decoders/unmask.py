"""Unmasking rules: which positions of the block are committed in this step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern import ops
from dlmkern.decoders import _check
from dlmkern.decoders.sampling import REMASKING_STREAM, uniform
from dlmkern.decoders.state import Reason, State


class Graph(NamedTuple):
    """How much positions of the block attend to each other in this forward pass: the masked ones, or, for a
    revision rule, all."""

    positions: Tensor
    """int64 `[B, M]`, in order; -1 is padding."""
    scores: Tensor
    """`[B, M, M]`: row by row what `ops.attention_graph` gives, the mean over some layers."""


class Candidates(NamedTuple):
    """The block's positions and what the forward pass predicts for them; `n` covers the longest block."""

    logits: Tensor
    """`[B, n, V]`."""
    token: Tensor
    """int64 `[B, n]`: the token that the position would commit."""
    confidence: Tensor
    """float64 `[B, n]`: its probability at temperature 1."""
    score: Tensor
    """float64 `[B, n]`: what `UnmaskingRule.score` asks for; NaN where the confidence is."""
    logsumexp: Tensor
    """float64 `[B, n]`, of the logits, as the probabilities are normalised."""
    masked: Tensor
    """bool `[B, n]`: positions of the block that are still masked."""
    committed: Tensor
    """bool `[B, n]`: positions of the block that are not."""
    predicted: Tensor
    """bool `[B, n]`: those of the block; where blocks grow, also the rest of the answer. What is said of
    other positions means nothing."""
    position: Tensor
    """int64 `[B, n]`. Where `predicted` is false it may lie past what `State` holds."""
    current: Tensor
    """int64 `[B, n]`: the token that is there, or the mask; means nothing beyond the block."""
    graph: Graph | None = None
    """Where `UnmaskingRule.attention_layers` or that of the revision rule asks for it. Beside the positions
    of the block it may hold some that follow the block."""


class Selection(NamedTuple):
    """What to commit; both `[B, n]`."""

    selected: Tensor
    """bool, among the masked positions. In a row that has one, a rule that does not count its steps selects
    at least one."""
    reason: Tensor
    """int8: a `Reason`, meaningful where selected."""


class Score(NamedTuple):
    """A number a position that says how sure the model is of its token."""

    statistic: str = "confidence"
    """"confidence", the probability of the token to commit; "margin", by how much the likeliest token is
    likelier than the second; "negative entropy", in nats."""
    transformed: bool = False
    """Whether it is that of the distribution from which tokens are drawn, with its temperature, top-p and
    top-k, or of the model's."""


class UnmaskingRule(ABC):
    """One of the four choices that make a decoder. Rules inherit from this class."""

    @property
    def counts_steps(self) -> bool:
        """Whether it spreads a block's positions over a number of steps, which revision would upset."""
        return False

    def check(self, gen_length: int, blocks: int | None) -> None:  # noqa: B027
        """Raise ValueError if the rule cannot fill this many tokens in that many blocks (None: unknown)."""

    def score(self) -> Score:
        """What the rule ranks positions by."""
        return Score()

    def attention_layers(self, progress: Sequence[float]) -> float | Collection[int] | None:
        """The layers whose attention `Candidates.graph` is the mean of: the share of the last ones, or their
        indices; None: no graph is wanted. `progress` is the committed share of each row's answer."""
        return None

    @abstractmethod
    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        """Choose; reads nothing on the host. `state` is that of the block, `blocks` as in `check`."""


@dataclass(frozen=True)
class OnePerStep(UnmaskingRule):
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

    @property
    def counts_steps(self) -> bool:
        return self.steps is not None

    def check(self, gen_length: int, blocks: int | None) -> None:
        if self.steps is None:
            return
        blocks = _check.known_blocks(blocks)
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
        selected = ops.confidence_select(
            confidence=noise, mask=candidates.masked, rule="schedule", count=quota
        ).selected
        return Selection(selected, torch.full_like(selected, Reason.SCHEDULED, dtype=torch.int8))


@dataclass(frozen=True)
class Threshold(UnmaskingRule):
    """Fast-dLLM's rule (arXiv:2505.22618, algorithm 1): all of confidence `tau` or more, and the best.

    Args:
        tau: see above.
        most: of those that pass, only so many of the most confident a step. None: all.
    """

    tau: float = 0.9
    most: int | None = None

    def __post_init__(self) -> None:
        _check.probability("tau", self.tau)
        if self.most is not None:
            _check.positive_int("most", self.most)

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        confidence, masked = candidates.confidence, candidates.masked
        selected = ops.confidence_select(confidence=confidence, mask=masked, tau=self.tau).selected
        if self.most is not None:
            selected = ops.confidence_select(
                confidence=confidence, mask=selected, rule="schedule", count=self.most
            ).selected
        sure = confidence >= self.tau
        return Selection(selected, torch.where(sure, Reason.THRESHOLD, Reason.FORCED).to(torch.int8))


@dataclass(frozen=True)
class WideThreshold(UnmaskingRule):
    """WINO's draft (arXiv:2507.18578, "wide in"): all above a low threshold, within a cap, and the best.

    Args:
        tau: the confidence to exceed.
        share, least, most: at most `share` of the block's masked positions a step, rounded down, but up to
            `least` in any case and never more than `most`.
    """

    tau: float = 0.6
    share: float = 0.7
    least: int = 5
    most: int = 20

    def __post_init__(self) -> None:
        _check.probability("tau", self.tau)
        _check.probability("share", self.share)
        _check.positive_int("least", self.least)
        _check.positive_int("most", self.most)
        if self.least > self.most:
            raise ValueError(
                f"least must not exceed most, got least = {self.least!r} and most = {self.most!r}"
            )

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        sure = candidates.masked & (candidates.confidence > self.tau)
        cap = (self.share * candidates.masked.sum(-1).double()).long().clamp(self.least, self.most)
        count = torch.minimum(sure.sum(-1), cap).clamp(min=1)
        selected = ops.confidence_select(
            confidence=candidates.confidence, mask=candidates.masked, rule="schedule", count=count
        ).selected
        return Selection(selected, torch.where(sure, Reason.THRESHOLD, Reason.FORCED).to(torch.int8))


@dataclass(frozen=True)
class MeanThreshold(UnmaskingRule):
    """Saber's draft (arXiv:2510.18165): all above the mean confidence of what is committed, and the best `n`.

    The mean is over the probabilities that the row's generated tokens had when they were committed; 1 as long
    as there are none.

    Args:
        n: the least number of commits a step, as far as there are masks.
        compat: None, or "official" to keep the confidence of tokens that were masked again in the mean until
            their positions are committed anew.
    """

    n: int = 2
    compat: str | None = None

    def __post_init__(self) -> None:
        _check.positive_int("n", self.n)
        _check.compat(self.compat)

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        counted = ~state.confidence.isnan()
        if self.compat is None:
            counted = counted & (state.step_map >= 0)
        counted = counted[:, :-1]
        # One after the other on a CPU, so that padding does not change how the sum is rounded.
        total = torch.where(counted, state.confidence[:, :-1], 0.0).cumsum(-1)[:, -1]
        number = counted.sum(-1)
        mean = torch.where(number > 0, total / number.clamp(min=1), 1.0).unsqueeze(1)
        sure = candidates.masked & (candidates.confidence > mean)
        selected = ops.confidence_select(
            confidence=candidates.confidence,
            mask=candidates.masked,
            rule="schedule",
            count=sure.sum(-1).clamp(min=self.n),
        ).selected
        return Selection(selected, torch.where(sure, Reason.THRESHOLD, Reason.FORCED).to(torch.int8))


@dataclass(frozen=True)
class Factor(UnmaskingRule):
    """Fast-dLLM's rule without a threshold (arXiv:2505.22618, section 3.3).

    With confidences `c_1 >= c_2 >= ...`, it commits the first `n` positions for the largest `n` with
    `(n + 1) (1 - c_n) < factor`, and always the first. At `factor = 1`, theorem 1 says that greedy decoding
    of these positions at once gives the same tokens as one after the other.

    Args:
        factor: larger values commit more.
        compat: None, or "official" for the rule of the official code: `<=` in place of `<`, and if only the
            least confident position fails, it is committed all the same (see `ops.confidence_select`).
    """

    factor: float = 1.0
    compat: str | None = None

    def __post_init__(self) -> None:
        _check.number("factor", self.factor)
        if self.factor <= 0:
            raise ValueError(f"factor must be positive, got {self.factor!r}")
        _check.compat(self.compat)

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        selected = ops.confidence_select(
            confidence=candidates.confidence,
            mask=candidates.masked,
            rule="factor",
            factor=self.factor,
            compat=self.compat,
        ).selected
        # The best one passes on its own if 2 (1 - c) < factor; if not, nothing else can.
        alone = 2 * (1 - candidates.confidence) >= self.factor
        forced = alone & (selected.sum(-1, keepdim=True) == 1)
        return Selection(selected, torch.where(forced, Reason.FORCED, Reason.FACTOR).to(torch.int8))


@dataclass(frozen=True)
class CAP(UnmaskingRule):
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
        _check.probability("tau_low", self.tau_low)
        _check.number("tau_high", self.tau_high)
        _check.number("gamma", self.gamma)
        if self.tau_low > self.tau_high:
            raise ValueError(
                f"tau_low must not exceed tau_high, got tau_low = {self.tau_low!r} and "
                f"tau_high = {self.tau_high!r}"
            )
        if not isinstance(self.strict, bool):
            raise ValueError(f"strict must be a bool, got {self.strict!r}")

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
