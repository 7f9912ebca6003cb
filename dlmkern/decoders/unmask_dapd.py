"""DAPD's unmasking rule (arXiv:2603.12996): commit together what does not attend to each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmkern import ops
from dlmkern.decoders import _check
from dlmkern.decoders.state import Reason, State
from dlmkern.decoders.unmask import Candidates, Selection, UnmaskingRule
from dlmkern.graph import layer_choice


@dataclass(frozen=True)
class DAPD(UnmaskingRule):
    """Dependency-aware parallel decoding: an independent set of the block's masked positions.

    The weight of two positions is how much they attend to each other, in the mean over the heads of the last
    layers. Each pass goes through the positions by falling `sum of weights x confidence` and commits those
    without an edge to what it has committed; see `ops.dapd_select`. With `m` of the answer's `G` tokens still
    masked, there is an edge from a candidate to another position if their weight exceeds
    `tau_min + (tau_max - tau_min) (1 - m / G)` times the candidate's largest.

    With a KV cache, the weights are those of the block's fresh queries and keys; outside the block, stale
    keys take their share of the softmax. With guidance, they are those of the half that sees the prompt.

    Args:
        variant: "staged": in the second half of the answer, all of confidence `late` or more are committed
            too. "direct": all of confidence `certain` or more are committed at any time, and block no other.
        tau_min, tau_max: see above.
        layers: whose attention counts: a share of the layers, the last ones, or their indices, which the
            attribute holds as a frozenset.
        certain, late: the confidences of `variant`.
        late_from: the committed share of the answer from which on a row is in its second half.
        late_graph: False: in the second half, commit what reaches `late`, and the best; look at no attention.
            So the paper says; its code goes on with the graph.
        symmetric: an edge from either side counts, not only from the candidate's.
        delayed_token_id: positions that would commit this token, say the end of sequence, wait until all
            masked positions of the block would. None: none waits. On a long open answer, confident ends of
            sequence can otherwise fill the tail at once.
        compat: None: `certain` is compared in float32. "official": in the dtype of the logits, where in
            bfloat16 a probability of 0.998 is 1.
    """

    variant: str = "staged"
    tau_min: float = 0.01
    tau_max: float = 0.15
    layers: float | Collection[int] = 0.3
    certain: float = 1.0
    late: float = 0.9
    late_from: float = 0.5
    late_graph: bool = True
    symmetric: bool = False
    delayed_token_id: int | None = None
    compat: str | None = None

    def __post_init__(self) -> None:
        if self.variant not in ("staged", "direct"):
            raise ValueError(f'variant must be "staged" or "direct", got {self.variant!r}')
        _check.finite_number("tau_min", self.tau_min)
        _check.finite_number("tau_max", self.tau_max)
        if math.isinf(self.tau_max - self.tau_min):
            raise ValueError(f"tau_max - tau_min must be finite, got {self.tau_max!r} - {self.tau_min!r}")
        if self.tau_min > self.tau_max:
            raise ValueError(
                f"tau_min must not exceed tau_max, got tau_min = {self.tau_min!r} and "
                f"tau_max = {self.tau_max!r}"
            )
        object.__setattr__(self, "layers", layer_choice(self.layers))
        _check.probability("certain", self.certain)
        _check.probability("late", self.late)
        _check.probability("late_from", self.late_from)
        for name in ("late_graph", "symmetric"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.delayed_token_id is not None:
            _check.token_id("delayed_token_id", self.delayed_token_id)
        _check.compat(self.compat)

    def attention_layers(self, progress: Sequence[float]) -> float | Collection[int] | None:
        if self._drops_graph and all(share >= self.late_from for share in progress):
            return None
        return self.layers

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        masked = self._due(candidates)
        left = state.end - (state.block_start + state.block_length) + candidates.masked.sum(-1)
        progress = 1 - left.double() / (state.end - state.prompt_length)
        if candidates.graph is None:
            selected = ops.confidence_select(
                confidence=candidates.confidence, mask=masked, tau=self.late
            ).selected
        else:
            selected = self._independent(candidates, masked, progress)
        is_late = (progress >= self.late_from).unsqueeze(1)
        if self.variant == "staged":
            sure = is_late & (candidates.confidence >= self.late)
        else:
            sure = candidates.confidence.to(self._certain_dtype(candidates)) >= self.certain
        otherwise = torch.where(is_late & self._drops_graph, Reason.FORCED, Reason.INDEPENDENT)
        return Selection(selected, torch.where(sure, Reason.THRESHOLD, otherwise).to(torch.int8))

    @property
    def _drops_graph(self) -> bool:
        return self.variant == "staged" and not self.late_graph

    def _due(self, candidates: Candidates) -> Tensor:
        """The masked positions that need not wait."""
        if self.delayed_token_id is None:
            return candidates.masked
        first = candidates.masked & (candidates.token != self.delayed_token_id)
        return torch.where(first.any(-1, keepdim=True), first, candidates.masked)

    def _independent(self, candidates: Candidates, masked: Tensor, progress: Tensor) -> Tensor:
        assert candidates.graph is not None
        positions, scores = candidates.graph
        columns = positions - candidates.position[:, :1]
        node = columns.clamp(min=0)
        chosen = ops.dapd_select(
            scores,
            candidates.confidence.gather(1, node),
            (columns >= 0) & masked.gather(1, node),
            self.tau_min + (self.tau_max - self.tau_min) * progress,
            variant=self.variant,
            progress=progress,
            certain=self.certain,
            late=self.late,
            symmetric=self.symmetric,
            certain_dtype=self._certain_dtype(candidates),
            late_from=self.late_from,
            late_graph=self.late_graph,
        )
        # One column more, for what is not chosen.
        n = masked.shape[1]
        selected = masked.new_zeros((masked.shape[0], n + 1))
        return selected.scatter(1, torch.where(chosen, node, n), True)[:, :n]

    def _certain_dtype(self, candidates: Candidates) -> torch.dtype:
        return candidates.logits.dtype if self.compat == "official" else torch.float32
