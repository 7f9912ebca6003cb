"""A decoder: the choices that make a method."""

from __future__ import annotations

from dataclasses import dataclass

from dlmkern.decoders import _check
from dlmkern.decoders.blocks import BlockSchedule
from dlmkern.decoders.cache import Cache, find_cache
from dlmkern.decoders.unmask import UnmaskingRule


@dataclass(frozen=True)
class Decoder:
    """How a masked answer is filled in: four choices, of which any combination works.

    Args:
        blocks: where blocks end: `FixedBlocks`, `WholeSequence` or `DepGABlocks`.
        unmask: what a step commits: `OnePerStep`, `Threshold`, `Factor`, `CAP`, `DAPD` or
            `DreamSchedule`.
        revise: how committed tokens are taken back. None, the only choice so far: never.
        cache: which keys and values are reused: `NoCache`, `PrefixCache` or `DualCache`, or None, "prefix" or
            "dual" for these with their default settings, which the attribute then holds. The last two need a
            model of `dlmkern.models`.
        cfg_scale: unsupervised classifier-free guidance (LLaDA, arXiv:2502.09992, appendix A.2): the logits
            become `u + (cfg_scale + 1) * (c - u)`, `c` with the prompt shown and `u` with it masked. Both are
            computed in one forward pass of twice the rows, which counts once. 0: none.
        compat: None, or "official" to do as the official code of LLaDA, Dream, Fast-dLLM, DepCap and DAPD
            does where that is harmless. Probabilities are normalised over the mask token and the padded
            vocabulary rows too, though these are never committed. With a cache and a model whose logits are
            shifted (Dream), the pass that opens a block commits the block's first token, whatever its
            confidence, and nothing else, and later passes do not compute the position before the block. The
            rules `Factor`, `DreamSchedule` and `DAPD` have a `compat` of their own; the presets set both.

    Raises:
        ValueError: a choice is not one of the above.
    """

    blocks: BlockSchedule
    unmask: UnmaskingRule
    revise: None = None
    cache: Cache | str | None = None
    cfg_scale: float = 0.0
    compat: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.blocks, type) or not hasattr(self.blocks, "open"):
            raise ValueError(f"blocks must be an object with a method open(), got {self.blocks!r}")
        if not isinstance(self.unmask, UnmaskingRule):
            raise ValueError(f"unmask must be an UnmaskingRule, got {self.unmask!r}")
        if self.revise is not None:
            raise ValueError(f"revise must be None, got {self.revise!r}")
        object.__setattr__(self, "cache", find_cache(self.cache))
        _check.finite_number_from_zero("cfg_scale", self.cfg_scale)
        _check.compat(self.compat)
