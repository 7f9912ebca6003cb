"""A decoder: the choices that make a method."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dlmkern.decoders import _check
from dlmkern.decoders.blocks import BlockSchedule
from dlmkern.decoders.cache import Cache, DualCache, find_cache
from dlmkern.decoders.revise import VIEWS, RevisionRule
from dlmkern.decoders.unmask import UnmaskingRule


@dataclass(frozen=True)
class Decoder:
    """How a masked answer is filled in: four choices, which combine freely but for what `Raises` names.

    Args:
        blocks: where blocks end: `FixedBlocks`, `WholeSequence` or `DepGABlocks`.
        unmask: what a step commits: `OnePerStep`, `Threshold`, `WideThreshold`, `MeanThreshold`, `Factor`,
            `CAP`, `DAPD`, `DreamSchedule` or another `UnmaskingRule`.
        revise: how committed tokens are taken back: `COVER`, `WINO`, `Saber` or another `RevisionRule`. None:
            never.
        cache: which keys and values are reused: `NoCache`, `PrefixCache` or `DualCache`, or None, "prefix" or
            "dual" for these with their default settings, which the attribute then holds. The last two need a
            model of `dlmkern.models`.
        cfg_scale: unsupervised classifier-free guidance (LLaDA, arXiv:2502.09992, appendix A.2): the logits
            become `u + (cfg_scale + 1) * (c - u)`, `c` with the prompt shown and `u` with it masked. Both are
            computed in one forward pass of twice the rows, which counts once. 0: none.
        compat: None, or "official" to do as the official code of LLaDA, Dream, Fast-dLLM, DepCap, DAPD,
            WINO and Saber does where that is harmless. Probabilities are normalised over the mask token and
            the padded vocabulary rows too, though these are never committed. With a cache and a model whose
            logits are shifted (Dream), the pass that opens a block commits the block's first token, whatever
            its confidence, and nothing else, and later passes do not compute the position before the block.
            The rules `Factor`, `MeanThreshold`, `DreamSchedule` and `DAPD` have a `compat` of their own; the
            presets set both.

    Raises:
        ValueError: a choice is not one of the above. Or two do not go together: a revision rule needs an
            unmasking rule that does not count its steps, and the same layers if both look at attention; WINO
            needs blocks that do not grow, and growing blocks no `DualCache`, which computes nothing beyond
            the block.
    """

    blocks: BlockSchedule
    unmask: UnmaskingRule
    revise: RevisionRule | None = None
    cache: Cache | str | None = None
    cfg_scale: float = 0.0
    compat: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.blocks, type) or not hasattr(self.blocks, "open"):
            raise ValueError(f"blocks must be an object with a method open(), got {self.blocks!r}")
        if not isinstance(self.unmask, UnmaskingRule):
            raise ValueError(f"unmask must be an UnmaskingRule, got {self.unmask!r}")
        if self.revise is not None:
            self._check_revise(self.revise)
        object.__setattr__(self, "cache", find_cache(self.cache))
        if isinstance(self.cache, DualCache) and self.blocks.looks_ahead:
            raise ValueError(f"blocks that grow go without a cache or with a PrefixCache, got {self.cache!r}")
        _check.finite_number_from_zero("cfg_scale", self.cfg_scale)
        _check.compat(self.compat)

    def attention_layers(self, progress: Sequence[float]) -> float | Collection[int] | None:
        """The layers of which the attention is wanted; see `UnmaskingRule` and `RevisionRule`."""
        layers = self.unmask.attention_layers(progress)
        return layers if layers is not None or self.revise is None else self.revise.attention_layers()

    def _check_revise(self, revise: RevisionRule) -> None:
        if not isinstance(revise, RevisionRule):
            raise ValueError(f"revise must be a RevisionRule or None, got {revise!r}")
        if revise.view not in VIEWS:
            raise ValueError(f"revise must have a view of {', '.join(VIEWS)}, got {revise.view!r}")
        if revise.view == "shadow" and self.blocks.looks_ahead:
            raise ValueError(f"revise: {revise!r} needs blocks that do not grow, got {self.blocks!r}")
        if self.unmask.counts_steps:
            raise ValueError(f"revise needs an unmask that does not count its steps, got {self.unmask!r}")
        layers, wanted = self.unmask.attention_layers([0.0]), revise.attention_layers()
        if layers is not None and wanted is not None and layers != wanted:
            raise ValueError(
                f"unmask and revise must look at the same layers, got layers = {layers!r} and {wanted!r}"
            )
