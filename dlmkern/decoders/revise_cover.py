"""COVER's revision rule (arXiv:2602.06161): verify some tokens while drafting others, in one forward pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmkern import ops
from dlmkern.decoders import _check
from dlmkern.decoders.revise import Revision, RevisionRule, Verification
from dlmkern.decoders.sampling import SEED_STREAM, uniform
from dlmkern.decoders.state import State
from dlmkern.decoders.unmask import Candidates, Selection
from dlmkern.graph import layer_choice
from dlmkern.ops.cover_seeds import COMBINATIONS, SUSPECTS

SEEDS_BY = ("stability", "uncertainty", "random")
VERIFY = ("override", "masked", "exact")


@dataclass(frozen=True)
class COVER(RevisionRule):
    """Cache-override verification.

    Each pass masks a few seeds among the block's committed tokens. All other positions see them as they were
    in the last pass, so nothing is lost for them, and the seeds are predicted anew: a prediction that is the
    token keeps it, another one of confidence `tau_replace` or more replaces it, and else the seed is masked
    again. See `ops.cover_attention`, `ops.cover_seeds` and `ops.cover_verify`.

    A token may be a seed once a pass has shown it, which fills the cache; after being one, once `cooldown`
    passes have, as the cache keeps its older keys and values meanwhile; and as long as it has been masked
    again less than `max_remasks` times. Seeds are tokens that were committed with doubt (1 - probability, at
    the commit or at the last verification), that masked positions attend to, and that do not themselves
    attend to what has just changed, as their cached state would be stale. Where the paper, as far as it is
    known here, leaves a quantity open, it is an argument; docs/cover.md tells what was measured.

    Args:
        tau_replace: see above; above 1 nothing is replaced.
        max_remasks: how often a position may be masked again. A block of n positions takes at most
            `(1 + max_remasks) n` steps.
        cooldown: at least 1.
        most: seeds a step, at most. None: only the paper's `ceil(sqrt(n_t pi_t))` bounds them.
        combine, suspects: how seeds are scored and counted, see `ops.cover_seeds`.
        seeds_by: "stability", all of the above; "uncertainty", doubt alone; "random".
        layers: whose attention tells what attends to what: a share of the layers, the last ones, or their
            indices, which the attribute holds as a frozenset.
        verify: "override", the method; "masked", without the cache: all positions see the seeds masked;
            "exact", an oracle: each seed is predicted by a pass of its own in which it alone is masked.
        override_layers: the share of the layers, the last ones, in which other positions see the seeds'
            cached state. In the layers before they see masks. From the first such layer on, the token leaks
            to its own prediction through the other positions, so a smaller share verifies more honestly, but
            drafts from less context.
        recheck: a seed whose prediction is another token is verified once more, in the next pass and hidden
            from all positions there, and that verdict counts. With "override" only.
    """

    tau_replace: float = 0.9999
    max_remasks: int = 2
    cooldown: int = 1
    most: int | None = None
    combine: str = "product"
    suspects: str = "mean"
    seeds_by: str = "stability"
    layers: float | Collection[int] = 1.0
    verify: str = "override"
    override_layers: float = 1.0
    recheck: bool = False

    def __post_init__(self) -> None:
        _check.number("tau_replace", self.tau_replace)
        _check.positive_int("max_remasks", self.max_remasks)
        _check.positive_int("cooldown", self.cooldown)
        if self.most is not None:
            _check.positive_int("most", self.most)
        for name, choices in (
            ("combine", COMBINATIONS),
            ("suspects", SUSPECTS),
            ("seeds_by", SEEDS_BY),
            ("verify", VERIFY),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        object.__setattr__(self, "layers", layer_choice(self.layers))
        _check.probability("override_layers", self.override_layers)
        if not isinstance(self.recheck, bool):
            raise ValueError(f"recheck must be a bool, got {self.recheck!r}")
        if self.verify != "override" and (self.override_layers != 1 or self.recheck):
            raise ValueError(f'override_layers and recheck go with verify = "override", got {self.verify!r}')

    @property
    def view(self) -> str:
        return self.verify

    @property
    def view_layers(self) -> float:
        return self.override_layers

    def attention_layers(self) -> float | Collection[int] | None:
        return self.layers if self.seeds_by == "stability" else None

    def patience(self, length: Tensor) -> Tensor:
        return (1 + self.max_remasks) * length  # more than it takes, as each step fills a mask

    def start(self, state: State) -> tuple[Tensor, ...]:
        # By position: passes that have shown the token; how often it was masked again; doubt.
        count = torch.zeros_like(state.ids)
        return count, count, torch.zeros_like(state.confidence)

    def revise(
        self, candidates: Candidates, selection: Selection, verification: Verification, state: State
    ) -> Revision:
        place = candidates.position.clamp(max=state.ids.shape[1] - 1)
        shown, remasks, doubt = (x.gather(1, place) for x in state.memory)
        seeds = candidates.committed & state.seeds.gather(1, place)
        verdict = ops.cover_verify(
            candidates.current,
            verification.token,
            verification.confidence,
            seeds,
            remasks,
            tau_replace=self.tau_replace,
            max_remasks=self.max_remasks,
        )
        remask, replace = verdict == ops.Verdict.REMASK, verdict == ops.Verdict.REPLACE
        again = torch.zeros_like(seeds)
        if self.recheck:
            again = (remask | replace) & ~state.hidden.gather(1, place)
            remask, replace = remask & ~again, replace & ~again

        changed = selection.selected | replace | remask
        shown = torch.where(seeds, 1 - self.cooldown, shown + 1)
        shown = torch.where(changed | ~candidates.committed, 0, shown)
        remasks = remasks + remask
        probability = torch.where(replace, verification.confidence, verification.present)
        probability = torch.where(seeds, probability, candidates.confidence)
        doubt = torch.where(seeds | selection.selected, 1 - probability, doubt)

        eligible = candidates.committed & (shown >= 1) & (remasks < self.max_remasks)  # none of `again`
        masked = (candidates.masked & ~selection.selected) | remask
        choice = self._choose(candidates, state, doubt, eligible, masked, changed)
        inside = candidates.masked | candidates.committed
        target = torch.where(inside, place, state.ids.shape[1] - 1)
        memory = tuple(
            old.scatter(1, target, new)
            for old, new in zip(state.memory, (shown, remasks, doubt), strict=True)
        )
        return Revision(remask, replace, choice | again, again, memory)

    def _choose(
        self,
        candidates: Candidates,
        state: State,
        doubt: Tensor,
        eligible: Tensor,
        masked: Tensor,
        changed: Tensor,
    ) -> Tensor:
        influence = drift = None
        if self.seeds_by == "random":
            seed, step = state.seed.unsqueeze(1), state.nfe.unsqueeze(1)
            doubt = uniform(seed, candidates.position, step, SEED_STREAM)
        elif self.seeds_by == "stability":
            assert candidates.graph is not None  # its node i is position i of the block
            attention = candidates.graph.scores.double()
            influence = torch.einsum("bij,bi->bj", attention, masked.double())
            drift = torch.einsum("bij,bj->bi", attention, changed.double())
        return ops.cover_seeds(
            doubt,
            influence,
            drift,
            eligible,
            combine=self.combine,
            suspects=self.suspects,
            most=self.most,
        ).seeds
