"""Block schedules: where the block that is decoded next ends.

A block opens with a forward pass of its own, which is also its first denoising step. All methods are batched,
and those that take tensors read none of them on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dlmkern import ops
from dlmkern.decoders import _check
from dlmkern.decoders.state import State


class BlockSchedule(Protocol):
    """One of the four choices that make a decoder."""

    @property
    def looks_ahead(self) -> bool:
        """Whether the rules see in every pass what is predicted beyond the block, not only in one that opens
        a block."""

    def longest(self, gen_length: int) -> int:
        """Upper bound of the block lengths of an answer of `gen_length` tokens."""

    def count(self, gen_length: int) -> int | None:
        """Number of blocks of such an answer; None if the logits decide."""

    def window(self, remaining: int) -> int:
        """How many positions' logits it takes to open a block with `remaining` positions to go. It grows
        with them."""

    def comparison(self, state: State, width: int) -> tuple[Tensor | None, Tensor | None]:
        """Earlier logits `[B, m, V]` and rows `[B, width]` of them to which the opening ones are compared."""

    def following(self, block_end: Tensor, state: State) -> Tensor:
        """Where the next block starts, int64 `[B]`, once that which ends at `block_end` is filled; for the
        last block, its end."""

    def open(
        self, scored: Tensor, banned_token: int | None, stats: ops.TokenStats, state: State
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Open blocks.

        Args:
            scored: `[B, window, V]`, logits from each row's `block_start` on.
            banned_token: a token left out of the distributions, or None.
            stats: `[B, n]` statistics of the first `n = longest` of those positions.
            state: only rows that are `opening` matter.

        Returns:
            The lengths, int64 `[B]`, and what to keep in `State.previous`.
        """


@dataclass(frozen=True)
class FixedBlocks:
    """Blocks of `block_length` positions; the last one may be shorter.

    Args:
        growing: a block is all that came before it as well, so that a revision rule reaches back to the start
            of the answer. The k-th block has `k * block_length` positions.
    """

    block_length: int = 32
    growing: bool = False

    def __post_init__(self) -> None:
        _check.positive_int("block_length", self.block_length)
        if not isinstance(self.growing, bool):
            raise ValueError(f"growing must be a bool, got {self.growing!r}")

    @property
    def looks_ahead(self) -> bool:
        return self.growing

    def longest(self, gen_length: int) -> int:
        return gen_length if self.growing else min(self.block_length, gen_length)

    def count(self, gen_length: int) -> int:
        return -(-gen_length // self.block_length)

    def window(self, remaining: int) -> int:
        return remaining if self.growing else min(self.block_length, remaining)

    def comparison(self, state: State, width: int) -> tuple[None, None]:
        return None, None

    def following(self, block_end: Tensor, state: State) -> Tensor:
        if not self.growing:
            return block_end
        return torch.where(block_end < state.end, state.block_start, block_end)

    def open(
        self, scored: Tensor, banned_token: int | None, stats: ops.TokenStats, state: State
    ) -> tuple[Tensor, None]:
        most = self.block_length * (state.blocks_opened + 1 if self.growing else 1)
        return torch.minimum(state.end - state.block_start, torch.zeros_like(state.end) + most), None


@dataclass(frozen=True)
class WholeSequence:
    """One block, the whole answer."""

    @property
    def looks_ahead(self) -> bool:
        return False

    def longest(self, gen_length: int) -> int:
        return gen_length

    def count(self, gen_length: int) -> int:
        return 1

    def window(self, remaining: int) -> int:
        return remaining

    def comparison(self, state: State, width: int) -> tuple[None, None]:
        return None, None

    def following(self, block_end: Tensor, state: State) -> Tensor:
        return block_end

    def open(
        self, scored: Tensor, banned_token: int | None, stats: ops.TokenStats, state: State
    ) -> tuple[Tensor, None]:
        return state.end - state.block_start, None


@dataclass(frozen=True)
class DepGABlocks:
    """DepGA-Block (DepCap, arXiv:2604.15750): a block ends where the last block's influence fades.

    The forward pass that opens a block is compared with the one that opened the block before, from which it
    differs by that block's tokens: `KL(p_current || p_previous)` is the influence of these tokens on a
    position. `ops.depga_block` weighs it against the entropy. The first block, for which there is nothing to
    compare with, has `l_min` positions.

    Args:
        lam: weight of the entropy; larger values give shorter blocks.
        l_min, l_max: bounds of the length; only the end of the answer makes a block shorter.
        kl: "exact" is the divergence of the paper; it keeps the logits of `2 * l_max` positions between
            blocks. "topk" is the official code's sum over the `topk` likeliest current tokens, which keeps
            these only.
        topk: with `kl="topk"`. A vocabulary that is not larger makes the sum exact.
        padding: "zero" or "reflect", what the smoothing window sees beyond its ends.
    """

    lam: float = 1.2
    l_min: int = 8
    l_max: int = 128
    kl: str = "exact"
    topk: int = 64
    padding: str = "zero"

    def __post_init__(self) -> None:
        _check.finite_number_from_zero("lam", self.lam)
        _check.positive_int("l_min", self.l_min)
        _check.positive_int("l_max", self.l_max)
        if self.l_min > self.l_max:
            raise ValueError(
                f"l_min must not exceed l_max, got l_min = {self.l_min} and l_max = {self.l_max}"
            )
        if self.kl not in ("exact", "topk"):
            raise ValueError(f'kl must be "exact" or "topk", got {self.kl!r}')
        _check.positive_int("topk", self.topk)
        if self.padding not in ("zero", "reflect"):
            raise ValueError(f'padding must be "zero" or "reflect", got {self.padding!r}')

    @property
    def looks_ahead(self) -> bool:
        return False

    def longest(self, gen_length: int) -> int:
        return min(self.l_max, gen_length)

    def count(self, gen_length: int) -> None:
        return None

    def window(self, remaining: int) -> int:
        # The next block starts at most l_max further on and is judged by at most l_max positions.
        return min(2 * self.l_max, remaining)

    def comparison(self, state: State, width: int) -> tuple[Tensor | None, Tensor | None]:
        if self.kl != "exact" or state.previous is None:
            return None, None
        return state.previous[0], _previous_rows(state, width)

    def following(self, block_end: Tensor, state: State) -> Tensor:
        return block_end

    def open(
        self, scored: Tensor, banned_token: int | None, stats: ops.TokenStats, state: State
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        width = stats.token.shape[1]
        remaining = state.end - state.block_start
        if self.kl == "exact":
            current: tuple[Tensor, ...] = (scored,)
            kl = stats.kl
        else:
            allowed = scored.shape[-1] - (banned_token is not None)
            snapshot = ops.topk_snapshot(scored, min(self.topk, allowed), banned_token=banned_token)
            current = tuple(snapshot)
            kl = None
            if state.previous is not None:
                rows = _previous_rows(state, width).clamp(max=state.previous[0].shape[1] - 1)
                before = ops.TopKSnapshot(*(_gather_rows(x, rows) for x in state.previous))
                kl = ops.topk_kl(ops.TopKSnapshot(*(x[:, :width] for x in snapshot)), before)
        if state.previous is None or kl is None:
            return remaining.clamp(max=self.l_min), tuple(x.clone() for x in current)
        length = ops.depga_block(
            kl, stats.entropy, remaining, self.lam, self.l_min, self.l_max, padding=self.padding
        )
        return length, tuple(
            _where_rows(state.opening, new, old) for new, old in zip(current, state.previous, strict=True)
        )


def _previous_rows(state: State, width: int) -> Tensor:
    """Where the positions from `block_start` on are in `State.previous`, int64 `[B, width]`."""
    return state.block_length.unsqueeze(1) + torch.arange(width, device=state.block_length.device)


def _gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`x[b, rows[b, i]]` for `x [B, m]` or `[B, m, k]`."""
    return x.gather(1, rows) if x.dim() == 2 else x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[2]))


def _where_rows(condition: Tensor, new: Tensor, old: Tensor) -> Tensor:
    # The window never grows, and it always covers what a row that is inside a block has to keep.
    return torch.where(condition.view(-1, *[1] * (new.dim() - 1)), new, old[:, : new.shape[1]])
