"""The decoding loop: forward passes and steps until every row is finished."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern.decoders.forward import Forward
from dlmkern.decoders.state import State
from dlmkern.decoders.step import Plan, step, window_positions


@dataclass
class _Row:
    """What the host knows of an unfinished row."""

    index: int
    end: int
    block_start: int
    block_length: int = 0
    opening: bool = True


@dataclass(frozen=True)
class FinishedRow:
    """The result for one row; the tensors cover its generated positions."""

    ids: Tensor
    """int64, prompt included."""
    step_map: Tensor
    confidence: Tensor
    reason: Tensor


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
    state: State
    """Their state after the step."""


class Loop:
    """Decodes a batch; rows share forward passes, and a finished row takes part in no more of them.

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
        rows, plan = self.rows, self.plan
        blocks = plan.decoder.blocks
        opens = any(row.opening for row in rows)
        if opens:
            # Rows inside a block count as well: what a schedule keeps of their opening pass must not be cut
            # off.
            width = max(blocks.window(row.end - row.block_start) for row in rows)
        else:
            width = max(row.block_length for row in rows)
        starts = [row.block_start for row in rows]
        lengths = [row.end for row in rows]
        state = self.state
        logits = self.forward(
            state.ids[:, : max(lengths)],
            window_positions(state, width),
            state.prompt_length,
            state.end,
            starts,
            lengths,
        )
        state = step(logits, state, plan, opens)
        self._poll(state)
        self._drop_finished(state)
        return Advance(
            [row.index for row in rows], starts, [row.block_length for row in rows], lengths, state
        )

    def _poll(self, state: State) -> None:
        """Take note of where each row is."""
        packed = torch.stack((state.block_start, state.block_length, state.opening, state.bad_position))
        starts, lengths, openings, bad_positions = packed.tolist()
        for row, bad in zip(self.rows, bad_positions, strict=True):
            if bad < row.end:
                raise FloatingPointError(
                    f"row {row.index}: the logits of position {bad} hold no distribution (a NaN, +inf, or no "
                    f"allowed token above -inf) in forward pass {self.nfe[row.index]}"
                )
        for row, start, length, opening in zip(self.rows, starts, lengths, openings, strict=True):
            self.nfe[row.index] += 1
            if row.opening:
                self.block_lengths[row.index].append(length)
            row.block_start, row.block_length, row.opening = start, length, bool(opening)

    def _drop_finished(self, state: State) -> None:
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
            )
        if len(kept) < len(self.rows):
            self.rows = [self.rows[i] for i in kept]
            if kept:
                state = state.select(torch.tensor(kept, device=state.ids.device))
        self.state = state
