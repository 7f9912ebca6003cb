"""Revision rules: which committed tokens of the block are taken back or replaced in this step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern import ops
from dlmkern.decoders import _check
from dlmkern.decoders.state import State
from dlmkern.decoders.unmask import Candidates, Selection

VIEWS = ("plain", "masked", "override", "exact", "shadow")


class Verification(NamedTuple):
    """What the model predicts in the places of the block's positions; `token`, `confidence` and `present` are
    all `[B, n]`."""

    token: Tensor
    """int64: the likeliest token."""
    confidence: Tensor
    """float64: its probability."""
    present: Tensor
    """float64: the probability of the token that is there; it means nothing at masked positions.

    All three are leave-one-out, that is, the model was not shown the token, where `RevisionRule.view`
    says so. If a pass verifies some position with "exact" or "shadow", they are 0 at all others."""


class Revision(NamedTuple):
    """What to do with tokens: `remask`, `replace`, `seeds` and `hidden` are bool `[B, n]`, and nothing is
    done outside the block. What the step itself commits may be masked again, but not replaced."""

    remask: Tensor
    """bool: positions to mask again."""
    replace: Tensor
    """bool: positions that get `Verification.token`; none of `remask`."""
    seeds: Tensor
    """bool: positions to verify in the next forward pass."""
    hidden: Tensor
    """bool: those of `seeds` for which the view "override" is "masked"."""
    memory: tuple[Tensor, ...]
    """For `State.memory`."""


class RevisionRule(ABC):
    """One of the four choices that make a decoder. Rules inherit from this class.

    A block ends with the step that leaves no mask in it. Whatever a rule does, a block of n positions takes
    at most `patience(n) + n` steps: after `patience(n)` of them nothing is masked again.

    A rule that takes back what has become unlikely:

        class Doubt(RevisionRule):
            def revise(self, candidates, selection, verification, state):
                remask = candidates.committed & (verification.present < 0.1)
                nothing = torch.zeros_like(remask)
                return Revision(remask, replace=nothing, seeds=nothing, hidden=nothing, memory=())
    """

    @property
    def view(self) -> str:
        """How a forward pass shows the committed tokens. What it verifies, and predicts leave-one-out, are
        the seeds (`State.seeds`), if not said otherwise.

        - "plain": as they are; seeds change nothing, and nothing is leave-one-out.
        - "masked": seeds are masked.
        - "override": seeds are masked, and in the attention layers all positions but those that predict them
          see their keys and values of the last pass (`ops.cover_attention`). It takes a model of
          `dlmkern.models`.
        - "exact": as they are, and for each seed there is one more pass in which it alone is masked.
        - "shadow": as they are, beside a copy of the block, all masks, of which each position sees everything
          but its own original. All committed tokens are verified. It takes a model of `dlmkern.models`.
        """
        return "plain"

    @property
    def view_layers(self) -> float:
        """Of "override": the share of the layers, the last ones, in which it holds."""
        return 1.0

    def attention_layers(self) -> float | Collection[int] | None:
        """The layers whose attention `Candidates.graph` is the mean of, over all positions of the block; as
        in `UnmaskingRule.attention_layers`. None: no graph is wanted."""
        return None

    def patience(self, length: Tensor) -> Tensor:
        """After how many steps in blocks of these lengths, int64 `[B]`, nothing is masked again; so many as
        the block has positions, unless a rule says otherwise."""
        return length

    def start(self, state: State) -> tuple[Tensor, ...]:
        """What to keep in `State.memory` at the beginning: tensors `[B, ...]`, by position `[B, L + 1]`."""
        return ()

    @abstractmethod
    def revise(
        self, candidates: Candidates, selection: Selection, verification: Verification, state: State
    ) -> Revision:
        """Choose; reads nothing on the host, as `.item()` or `if tensor` would. `state` is that before the
        step, `selection` what it commits."""


@dataclass(frozen=True)
class WINO(RevisionRule):
    """WINO (arXiv:2507.18578): every committed token of the block is verified in each step.

    Tokens with a leave-one-out probability below `tau_back` are masked again in a step that commits more than
    one token; of those, fewer than the step before has committed, the least probable first.

    Args:
        tau_back: see above.
    """

    tau_back: float = 0.9

    def __post_init__(self) -> None:
        _check.probability("tau_back", self.tau_back)

    @property
    def view(self) -> str:
        return "shadow"

    def start(self, state: State) -> tuple[Tensor, ...]:
        return (torch.zeros_like(state.nfe),)  # commits of the last step; a block opens without commits

    def revise(
        self, candidates: Candidates, selection: Selection, verification: Verification, state: State
    ) -> Revision:
        (last,) = state.memory
        commits = selection.selected.sum(-1)
        doubted = candidates.committed & (verification.present < self.tau_back)
        count = doubted.sum(-1)
        count = torch.where(commits > 1, torch.where(count < last, count, last - 1), 0)
        remask = ops.confidence_select(
            confidence=-verification.present, mask=doubted, rule="schedule", count=count.clamp(min=0)
        ).selected
        nothing = torch.zeros_like(remask)
        return Revision(remask, nothing, nothing, nothing, (commits,))


@dataclass(frozen=True)
class Saber(RevisionRule):
    """Saber's backtracking (arXiv:2510.18165): the tokens that have lost most confidence are taken back.

    A step that commits k tokens and leaves a mask in the block masks `min(max(n // 2, ceil(k / 8)), k - 1)`
    positions again, those of the block where the largest probability has fallen most since the last pass;
    what the step itself commits counts among them. It counts as 0 before the first pass that predicts it.

    Args:
        n: the least number of commits a step of `MeanThreshold`, which goes with it.
    """

    n: int = 2

    def __post_init__(self) -> None:
        _check.positive_int("n", self.n)

    def start(self, state: State) -> tuple[Tensor, ...]:
        return (torch.zeros_like(state.confidence),)  # by position: the largest probability of the last pass

    def revise(
        self, candidates: Candidates, selection: Selection, verification: Verification, state: State
    ) -> Revision:
        (last,) = state.memory
        commits = selection.selected.sum(-1)
        filled = (candidates.masked & ~selection.selected).sum(-1) == 0
        count = torch.minimum((commits + 7).div(8, rounding_mode="floor").clamp(min=self.n // 2), commits - 1)
        place = torch.where(candidates.predicted, candidates.position, state.ids.shape[1] - 1)
        remask = ops.confidence_select(
            confidence=last.gather(1, place) - verification.confidence,
            mask=candidates.committed | selection.selected,
            rule="schedule",
            count=torch.where(filled, 0, count.clamp(min=0)),
        ).selected
        nothing = torch.zeros_like(remask)
        return Revision(remask, nothing, nothing, nothing, (last.scatter(1, place, verification.confidence),))
