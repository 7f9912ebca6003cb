"""What a decoding loop remembers between two steps."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Reason(IntEnum):
    """Why a token was committed."""

    SCHEDULED = 0
    """Among the most confident positions that the step schedule had to fill."""
    THRESHOLD = 1
    """Its confidence reached the threshold `tau`."""
    HIGH_TIER = 2
    """Its confidence reached `tau_high`."""
    CONFLICT_FREE = 3
    """Its confidence reached `tau_low` and it conflicts with nothing committed in the same step."""
    FORCED = 4
    """No threshold was reached; each step commits something, and it was the most confident position (in the
    official code for shifted logits, the block's first)."""
    AFTER_EOS = 5
    """Not predicted: the answer had ended before it."""
    FACTOR = 6
    """It and all more confident positions passed the factor rule."""
    INDEPENDENT = 7
    """Attention ties it to nothing that was committed before it in the same step."""
    REPLACED = 8
    """Verification predicted it in the place of another token, with enough confidence."""


class State(NamedTuple):
    """The rows being decoded, `B` of them, all tensors on one device.

    Positions count from the first prompt token. Row `b` occupies `ids[b, :end[b]]`; what follows is padding.
    The `[B, L + 1]` tensors have a last column that belongs to no position: writes that must not happen go
    there.
    """

    ids: Tensor
    """int64 `[B, L + 1]`: prompt, then generated tokens; the mask token where none is committed yet."""
    prompt_length: Tensor
    """int64 `[B]`: the first generated position."""
    end: Tensor
    """int64 `[B]`: one past the last generated position."""
    block_start: Tensor
    """int64 `[B]`: first position of the block; `end` once the row is finished."""
    block_length: Tensor
    """int64 `[B]`: positions of the block; while `opening`, those of the block before."""
    opening: Tensor
    """bool `[B]`: the next forward pass opens the block at `block_start`."""
    masks_left: Tensor
    """int64 `[B]`: masked positions of the block; while `opening`, 0."""
    blocks_opened: Tensor
    """int64 `[B]`: blocks opened so far."""
    block_step: Tensor
    """int64 `[B]`: steps already taken in the block."""
    nfe: Tensor
    """int64 `[B]`: forward passes so far."""
    seed: Tensor
    """int64 `[B]`: key of the row's random numbers."""
    step_map: Tensor
    """int64 `[B, L + 1]`: index of the forward pass that committed the token; -1 where there is none."""
    confidence: Tensor
    """float64 `[B, L + 1]`: probability of the token when it was committed; NaN if none ever was. It stays
    where a token is masked again."""
    reason: Tensor
    """int8 `[B, L + 1]`: a `Reason`, or -1."""
    bad_position: Tensor
    """int64 `[B]`: status word: first position of the block whose logits hold no distribution; else `L`."""
    seeds: Tensor
    """bool `[B, L + 1]`: committed positions that the next forward pass verifies, if the revision rule
    chooses some."""
    hidden: Tensor
    """bool `[B, L + 1]`: those of the seeds that no position is shown, not even by the cache."""
    revisions: Tensor
    """int64 `[B]`: how often a token that a forward pass had seen has been taken back or replaced so far."""
    memory: tuple[Tensor, ...]
    """What the revision rule keeps, each `[B, ...]`."""
    previous: tuple[Tensor, ...] | None
    """What the block schedule keeps of the forward pass that opened the last block, each `[B, ...]`."""

    def select(self, rows: Tensor) -> State:
        """The state of some of the rows; `rows` is int64 `[n]`."""
        columns = {name: x.index_select(0, rows) for name, x in self._tensors().items()}
        memory = tuple(x.index_select(0, rows) for x in self.memory)
        previous = None if self.previous is None else tuple(x.index_select(0, rows) for x in self.previous)
        return State(**columns, memory=memory, previous=previous)

    def put(self, rows: Tensor, other: State) -> State:
        """This state with some of the rows replaced, the inverse of `select`.

        `previous` is written in place, where `other` may keep fewer positions than this state does.
        """
        assert self.previous is not None or other.previous is None
        new = other._tensors()
        columns = {name: x.index_copy(0, rows, new[name]) for name, x in self._tensors().items()}
        memory = tuple(x.index_copy(0, rows, part) for x, part in zip(self.memory, other.memory, strict=True))
        for old, part in zip(self.previous or (), other.previous or (), strict=True):
            old[:, : part.shape[1]].index_copy_(0, rows, part)
        return State(**columns, memory=memory, previous=self.previous)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self._asdict().items() if isinstance(x, Tensor)}


def initial_state(
    prompts: list[list[int]], gen_length: int, mask_token_id: int, seeds: list[int], device: torch.device
) -> State:
    """All generated positions masked, the first block about to open."""
    batch = len(prompts)
    longest = max(map(len, prompts)) + gen_length
    # Padding and the scratch column hold a mask too: any valid id does, as no real position attends to them.
    ids = torch.full((batch, longest + 1), mask_token_id)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
    ids = ids.to(device)
    prompt_length = torch.tensor([len(prompt) for prompt in prompts], device=device)
    zeros = torch.zeros_like(prompt_length)
    return State(
        ids=ids,
        prompt_length=prompt_length,
        end=prompt_length + gen_length,
        block_start=prompt_length,
        block_length=zeros,
        opening=torch.ones_like(zeros, dtype=torch.bool),
        masks_left=zeros,
        blocks_opened=zeros,
        block_step=zeros,
        nfe=zeros,
        seed=torch.tensor(seeds, dtype=torch.int64, device=device),
        step_map=torch.full_like(ids, -1),
        confidence=torch.full_like(ids, torch.nan, dtype=torch.float64),
        reason=torch.full_like(ids, -1, dtype=torch.int8),
        bad_position=torch.full_like(zeros, longest),
        seeds=torch.zeros_like(ids, dtype=torch.bool),
        hidden=torch.zeros_like(ids, dtype=torch.bool),
        revisions=zeros,
        memory=(),
        previous=None,
    )
