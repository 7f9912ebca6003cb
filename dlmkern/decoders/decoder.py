"""A decoder: the choices that make a method."""

from __future__ import annotations

from dataclasses import dataclass

from dlmkern.decoders import _check
from dlmkern.decoders.blocks import BlockSchedule
from dlmkern.decoders.unmask import UnmaskingRule


@dataclass(frozen=True)
class Decoder:
    """How a masked answer is filled in: four choices, of which any combination works.

    Args:
        blocks: where blocks end: `FixedBlocks`, `WholeSequence` or `DepGABlocks`.
        unmask: what a step commits: `OnePerStep`, `Threshold` or `CAP`.
        revise: how committed tokens are taken back. None, the only choice so far: never.
        cache: which keys and values are reused. None, the only choice so far: every forward pass computes
            all.
        cfg_scale: unsupervised classifier-free guidance (LLaDA, arXiv:2502.09992, appendix A.2): the logits
            become `u + (cfg_scale + 1) * (c - u)`, `c` with the prompt shown and `u` with it masked. Both are
            computed in one forward pass of twice the rows, which counts once. 0: none.
        compat: None, or "official" to normalise probabilities as the official code of LLaDA, Fast-dLLM and
            DepCap does, over the mask token and the padded vocabulary rows too. These are never committed
            either way.

    Raises:
        ValueError: a choice is not one of the above.
    """

    blocks: BlockSchedule
    unmask: UnmaskingRule
    revise: None = None
    cache: None = None
    cfg_scale: float = 0.0
    compat: str | None = None

    def __post_init__(self) -> None:
        for name, method in (("blocks", "open"), ("unmask", "select")):
            choice = getattr(self, name)
            if isinstance(choice, type) or not hasattr(choice, method):
                raise ValueError(f"{name} must be an object with a method {method}(), got {choice!r}")
        for name in ("revise", "cache"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} must be None, got {getattr(self, name)!r}")
        _check.finite_number_from_zero("cfg_scale", self.cfg_scale)
        if self.compat not in (None, "official"):
            raise ValueError(f'compat must be None or "official", got {self.compat!r}')
