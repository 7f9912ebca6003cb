"""The decoding loop: forward passes and steps until every row is finished."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern.decoders.cache import DualCache, PrefixCache
from dlmkern.decoders.forward import Forward
from dlmkern.decoders.state import State
from dlmkern.decoders.step import (
    LeaveOneOut,
    Plan,
    block_positions,
    masked_positions,
    seed_positions,
    step,
    window_positions,
)
from dlmkern.decoders.unmask import Graph
from dlmkern.graph import AttentionGraph


@dataclass
class _Row:
    """What the host knows of an unfinished row."""

    index: int
    end: int
    block_start: int
    block_length: int = 0
    opening: bool = True
    masks_left: int = 0
    seeds: int = 0
    age: int = 0
    """Forward passes since the last whole one, which counts."""


@dataclass(frozen=True)
class FinishedRow:
    """The result for one row; the tensors cover its generated positions."""

    ids: Tensor
    """int64, prompt included."""
    step_map: Tensor
    confidence: Tensor
    reason: Tensor
    revisions: Tensor


class Advance(NamedTuple):
    """One forward pass and one step."""

    rows: list[int]
    """The rows that took part."""
    block_starts: list[int]
    """First position of the block that each was in."""
    block_lengths: list[int]
    """Positions of that block."""
    ends: list[int]
    """One past each row's last position."""
    before_step_map: Tensor
    """Their `State.step_map` before the step."""
    state: State
    """Their state after the step."""


class Loop:
    """Decodes a batch; rows share forward passes, and a finished row takes part in no more of them.

    Without a cache, all rows take part in each. With one, see `_group`.

    The host reads the device once a step, a few integers a row. It needs them to size the next forward pass.

    Args:
        forward: the model.
        plan: what stays the same in all steps.
        state: the rows, none of them finished.
    """

    def __init__(self, forward: Forward, plan: Plan, state: State) -> None:
        self.forward = forward
        self.plan = plan
        self.state = state
        ends = state.end.tolist()
        self.rows = [_Row(row, end, end - plan.gen_length) for row, end in enumerate(ends)]
        self.nfe = [0] * len(ends)
        self.block_lengths: list[list[int]] = [[] for _ in ends]
        self.finished: dict[int, FinishedRow] = {}

    @torch.no_grad()
    def advance(self) -> Advance:
        """One forward pass and one step of the unfinished rows, of which there must be one.

        Raises:
            FloatingPointError: logits of the model hold no distribution.
        """
        group, whole = self._group()
        rows, plan = [self.rows[i] for i in group], self.plan
        blocks = plan.decoder.blocks
        opens = any(row.opening for row in rows)
        if opens or blocks.looks_ahead:
            # Rows inside a block count as well: what a schedule keeps of their opening pass must not be cut
            # off.
            width = max(blocks.window(row.end - row.block_start) for row in rows)
        else:
            width = max(row.block_length for row in rows)
        starts = [row.block_start for row in rows]
        lengths = [row.end for row in rows]
        index = None
        if len(group) < len(self.rows):
            index = torch.tensor(group, device=self.state.ids.device)
        state = self.state if index is None else self.state.select(index)
        positions = window_positions(state, width)
        attention = self._attention_graph(rows, state, width)
        verified = self._verified_positions(rows, state)
        if whole:
            logits, apart = self.forward.whole(state, positions, starts, lengths, index, attention, verified)
        else:
            sizes = [row.block_length for row in rows]
            logits, apart = self.forward.block(state, positions, starts, sizes, lengths, attention, verified)
        graph = None if attention is None else Graph(attention.positions, attention.scores())
        without = None if apart is None or verified is None else LeaveOneOut(apart, verified)
        before = state.step_map
        state = step(logits, state, plan, opens, graph, without)
        self._poll(rows, state)
        for row in rows:
            row.age = 1 if whole else row.age + 1
        advance = Advance(
            [row.index for row in rows], starts, [row.block_length for row in rows], lengths, before, state
        )
        self.state = state if index is None else self.state.put(index, state)
        self._drop_finished()
        return advance

    def _group(self) -> tuple[list[int], bool]:
        """The rows that go next, and whether whole: those whose next pass must be a whole one, or else all.

        The others wait for them. So each row's cache is refreshed exactly when it would be if the row were
        alone, and the passes inside blocks, which cost the less the more rows share them, are shared by all.
        """
        everyone = list(range(len(self.rows)))
        cache = self.plan.decoder.cache
        if not isinstance(cache, PrefixCache | DualCache):
            return everyone, True
        refresh = cache.refresh or sys.maxsize
        due = [i for i, row in enumerate(self.rows) if row.opening or row.age >= refresh]
        return due or everyone, bool(due)

    def _attention_graph(self, rows: list[_Row], state: State, width: int) -> AttentionGraph | None:
        """What collects the attention between positions of the block, if a rule asks for it."""
        decoder, gen_length = self.plan.decoder, self.plan.gen_length
        left = [
            row.end - row.block_start - (0 if row.opening else row.block_length - row.masks_left)
            for row in rows
        ]
        layers = decoder.attention_layers([1 - masks / gen_length for masks in left])
        if layers is None:
            return None
        width = min(width, decoder.blocks.longest(gen_length))
        if decoder.revise is not None and decoder.revise.attention_layers() is not None:
            return AttentionGraph(block_positions(state, width), layers)
        most = max(min(width, row.end - row.block_start) if row.opening else row.masks_left for row in rows)
        return AttentionGraph(masked_positions(state, width, most, self.plan), layers)

    def _verified_positions(self, rows: list[_Row], state: State) -> Tensor | None:
        """The positions to verify in this pass, int64 `[B, S]`, padded with -1; None: there is none."""
        revise = self.plan.decoder.revise
        if revise is None or revise.view == "plain":
            return None
        if revise.view == "shadow":
            inside = [row.block_length for row in rows if not row.opening]
            return block_positions(state, max(inside)) if inside else None
        most = max(row.seeds for row in rows)
        return seed_positions(state, most) if most else None

    def _poll(self, rows: list[_Row], state: State) -> None:
        """Take note of where each of the rows is after its step."""
        packed = torch.stack(
            (
                state.block_start, state.block_length, state.opening, state.masks_left,
                state.seeds[:, :-1].sum(-1), state.bad_position,
            )
        )  # fmt: skip
        starts, lengths, openings, masks_left, seeds, bad_positions = packed.tolist()
        for row, bad in zip(rows, bad_positions, strict=True):
            if bad < row.end:
                raise FloatingPointError(
                    f"row {row.index}: the logits of position {bad} hold no distribution (a NaN, +inf, or no "
                    f"allowed token above -inf) in forward pass {self.nfe[row.index]}"
                )
        for row, start, length, opening, masks, chosen in zip(
            rows, starts, lengths, openings, masks_left, seeds, strict=True
        ):
            self.nfe[row.index] += 1
            if row.opening:
                self.block_lengths[row.index].append(length)
            row.block_start, row.block_length, row.opening = start, length, bool(opening)
            row.masks_left, row.seeds = masks, chosen

    def _drop_finished(self) -> None:
        state = self.state
        kept = []
        for i, row in enumerate(self.rows):
            if row.block_start < row.end:
                kept.append(i)
                continue
            generated = slice(row.end - self.plan.gen_length, row.end)
            self.finished[row.index] = FinishedRow(
                ids=state.ids[i, : row.end],
                step_map=state.step_map[i, generated],
                confidence=state.confidence[i, generated],
                reason=state.reason[i, generated],
                revisions=state.revisions[i],
            )
        if len(kept) < len(self.rows):
            self.rows = [self.rows[i] for i in kept]
            if kept:
                self.state = state.select(torch.tensor(kept, device=state.ids.device))
                self.forward.keep(kept)
