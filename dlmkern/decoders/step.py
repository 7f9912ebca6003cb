"""One step: from the logits of a forward pass to committed tokens.

Nothing here reads a tensor on the host or makes one from host data, so a step can be captured in a CUDA
graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern import ops
from dlmkern.decoders.decoder import Decoder
from dlmkern.decoders.revise import Revision, RevisionRule, Verification
from dlmkern.decoders.sampling import (
    TOKEN_STREAM,
    Draw,
    draw,
    probability_of,
    sample,
    score_of,
    uniform,
)
from dlmkern.decoders.state import Reason, State
from dlmkern.decoders.unmask import Candidates, Graph, Selection


@dataclass(frozen=True)
class Plan:
    """What stays the same in all steps.

    Args:
        decoder: the method.
        gen_length: generated tokens a row.
        mask_token_id: the mask.
        vocab_size: ids from here on are padding and never committed; None: all logits are tokens.
        eos_token_id: a row is finished once its tokens up to this one are committed; None: when all are.
        temperature: 0 commits the likeliest token, otherwise one drawn from `softmax(logits / temperature)`.
        top_p, top_k: tokens are drawn from the smallest set of the likeliest ones that holds `top_p` of the
            probability, or from the `top_k` likeliest, or both; None: from all.
        first_alone: a pass that opens a block commits its first position and nothing else (see `Decoder`).
    """

    decoder: Decoder
    gen_length: int
    mask_token_id: int
    vocab_size: int | None = None
    eos_token_id: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    first_alone: bool = False

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn from some of the vocabulary only."""
        return self.top_p is not None or self.top_k is not None


class LeaveOneOut(NamedTuple):
    """Logits of positions whose tokens the model was not shown."""

    logits: Tensor
    """`[B, S, V]`."""
    positions: Tensor
    """int64 `[B, S]`; -1 is padding."""


def step(
    logits: Tensor,
    state: State,
    plan: Plan,
    opens: bool,
    graph: Graph | None = None,
    without: LeaveOneOut | None = None,
) -> State:
    """Commit tokens, and take some back.

    Args:
        logits: `[B, W, V]`, of the positions from each row's `block_start` on. `W` covers the block of every
            row and, in rows that open one, `BlockSchedule.window`.
        state: the state that the forward pass has seen; unchanged.
        plan: see `Plan`.
        opens: whether any row opens a block.
        graph: of `masked_positions` or `block_positions`, where a rule asks for it.
        without: of the positions that the revision rule verifies, if `logits` is not leave-one-out there.

    Returns:
        The state to do the next forward pass with.
    """
    blocks, revise = plan.decoder.blocks, plan.decoder.revise
    width = min(logits.shape[1], blocks.longest(plan.gen_length))
    scored = _scored(logits, plan)
    comparison = blocks.comparison(state, width) if opens else (None, None)
    stats = _statistics(logits[:, :width], scored[:, :width], plan, *comparison)
    token, confidence, score = _predict(logits[:, :width], scored[:, :width], stats, state, plan)
    if opens:
        state = _open_blocks(scored, stats, state, plan)

    offset = torch.arange(width, device=logits.device)
    position = state.block_start.unsqueeze(1) + offset
    inside = offset < state.block_length.unsqueeze(1)
    scratch = state.ids.shape[1] - 1
    current = _at(state.ids, position)
    is_mask = current == plan.mask_token_id
    masked = inside & is_mask
    candidates = Candidates(
        scored[:, :width], token, confidence, score, stats.logsumexp, masked, inside & ~is_mask,
        position < state.end.unsqueeze(1) if blocks.looks_ahead else inside, position, current, graph,
    )  # fmt: skip
    selection = plan.decoder.unmask.select(candidates, state, blocks.count(plan.gen_length))
    if opens and plan.first_alone:
        selection = _first_alone(selection, masked, state)

    bad = masked & score.isnan()  # as it is where there is no token
    masks_left = masked & ~selection.selected
    new = _write(state, selection.selected, position, token, confidence, selection.reason)
    if revise is not None:
        verification = _verification(candidates, stats, without, state, plan)
        bad = bad | (candidates.committed & verification.confidence.isnan())
        revision = revise.revise(candidates, selection, verification, state)
        revision = _bounded(revision, revise, candidates, state)
        masks_left = masks_left | revision.remask
        new = _revised(new, revision, verification, candidates, plan)
    state = new

    block_end = state.block_start + state.block_length
    count = masks_left.sum(-1)
    done = count == 0
    state = state._replace(
        bad_position=torch.where(bad, position, scratch).amin(-1),
        block_start=torch.where(done, blocks.following(block_end, state), state.block_start),
        opening=done,
        masks_left=count,
        seeds=state.seeds & ~done.unsqueeze(1),
        block_step=state.block_step + 1,
        nfe=state.nfe + 1,
    )
    return state if plan.eos_token_id is None else _end_at_eos(state, plan, plan.eos_token_id)


def _at(x: Tensor, position: Tensor) -> Tensor:
    """What `x [B, L + 1]` holds at these positions, of which those past the end are in no block."""
    return x.gather(1, position.clamp(max=x.shape[1] - 1))


def _write(
    state: State, where: Tensor, position: Tensor, token: Tensor, confidence: Tensor, reason: Tensor | int
) -> State:
    """Commit tokens; `position` and the others are `[B, n]`."""
    target = torch.where(where, position, state.ids.shape[1] - 1)
    return state._replace(
        ids=state.ids.scatter(1, target, token),
        step_map=state.step_map.scatter(1, target, state.nfe.unsqueeze(1).expand_as(target)),
        confidence=state.confidence.scatter(1, target, confidence),
        reason=state.reason.scatter(1, target, reason),
    )


def _bounded(revision: Revision, revise: RevisionRule, candidates: Candidates, state: State) -> Revision:
    """The same, but nothing outside the block, nor masked again once the rule's patience has ended."""
    inside = candidates.masked | candidates.committed
    patient = state.block_step < revise.patience(state.block_length)
    remask = revision.remask & inside & patient.unsqueeze(1)
    return Revision(
        remask,
        revision.replace & candidates.committed & ~remask,
        revision.seeds & inside,
        revision.hidden & inside,
        revision.memory,
    )


def _revised(
    state: State, revision: Revision, verification: Verification, candidates: Candidates, plan: Plan
) -> State:
    """Replace tokens, mask others again, and note what to verify next."""
    position, scratch = candidates.position, state.ids.shape[1] - 1
    state = _write(
        state, revision.replace, position, verification.token, verification.confidence, Reason.REPLACED
    )
    taken_back = revision.remask & candidates.committed  # and not only just committed
    target = torch.where(revision.remask, position, scratch)
    seeds, hidden = (torch.where(x, position, scratch) for x in (revision.seeds, revision.hidden))
    return state._replace(
        ids=state.ids.scatter(1, target, plan.mask_token_id),
        step_map=state.step_map.scatter(1, target, -1),
        reason=state.reason.scatter(1, target, -1),
        revisions=state.revisions + (taken_back | revision.replace).sum(-1),
        seeds=torch.zeros_like(state.seeds).scatter(1, seeds, True),
        hidden=torch.zeros_like(state.hidden).scatter(1, hidden, True),
        memory=revision.memory,
    )


def window_positions(state: State, width: int) -> Tensor:
    """The positions whose logits a step with windows of `width` wants, int64 `[B, width]`.

    Past a row's end, its last position is repeated; those logits are not used.
    """
    offset = torch.arange(width, device=state.ids.device)
    return torch.minimum(state.block_start.unsqueeze(1) + offset, (state.end - 1).unsqueeze(1))


def masked_positions(state: State, width: int, most: int, plan: Plan) -> Tensor:
    """The masked ones among the `width` positions from each row's `block_start` on, in order.

    They end where the block does, or, in a row that opens one, the row. int64 `[B, most]`, padded with -1.
    """
    offset = torch.arange(width, device=state.ids.device)
    position = state.block_start.unsqueeze(1) + offset
    stop = torch.where(state.opening, state.end, state.block_start + state.block_length)
    is_mask = state.ids.gather(1, position.clamp(max=state.ids.shape[1] - 1)) == plan.mask_token_id
    masked = is_mask & (position < stop.unsqueeze(1))
    first, columns = masked.to(torch.int8).sort(dim=-1, descending=True, stable=True)
    return torch.where(first > 0, state.block_start.unsqueeze(1) + columns, -1)[:, :most]


def block_positions(state: State, most: int) -> Tensor:
    """The positions of each row's block, or of what follows in a row that opens one, in order.

    int64 `[B, most]`, padded with -1; `most` of them at most.
    """
    position = state.block_start.unsqueeze(1) + torch.arange(most, device=state.ids.device)
    stop = torch.where(state.opening, state.end, state.block_start + state.block_length)
    return torch.where(position < stop.unsqueeze(1), position, -1)


def seed_positions(state: State, most: int) -> Tensor:
    """The seeds of each row, in order: int64 `[B, most]`, padded with -1; none has more."""
    first, position = state.seeds[:, :-1].to(torch.int8).sort(dim=-1, descending=True, stable=True)
    return torch.where(first > 0, position, -1)[:, :most]


def _scored(logits: Tensor, plan: Plan) -> Tensor:
    """The logits over which probabilities are normalised (but for `_banned`)."""
    return logits if plan.decoder.compat == "official" else logits[..., : plan.vocab_size]


def _banned(logits: Tensor, plan: Plan) -> int | None:
    """The mask, if it is among the tokens of these logits."""
    return plan.mask_token_id if plan.mask_token_id < logits.shape[-1] else None


def _scored_banned(scored: Tensor, plan: Plan) -> int | None:
    return None if plan.decoder.compat == "official" else _banned(scored, plan)


def _statistics(
    logits: Tensor,
    scored: Tensor,
    plan: Plan,
    previous: Tensor | None = None,
    rows: Tensor | None = None,
) -> ops.TokenStats:
    """What is known of each position's distribution; the token is the likeliest that may be committed, and
    the confidence is that token's."""
    stats = ops.token_stats(
        scored, previous, prev_rows=rows, banned_token=_scored_banned(scored, plan), out_dtype=torch.float64
    )
    if plan.decoder.compat != "official":
        return stats
    allowed = logits[..., : plan.vocab_size]
    best = ops.token_stats(allowed, banned_token=_banned(allowed, plan), out_dtype=torch.float64)
    share = (best.logsumexp - stats.logsumexp).exp()
    return stats._replace(token=best.token, confidence=best.confidence * share)


def _predict(
    logits: Tensor, scored: Tensor, stats: ops.TokenStats, state: State, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """For every position the token it would commit, that token's probability, and the rule's score."""
    scored_banned = _scored_banned(scored, plan)
    allowed = logits[..., : plan.vocab_size]
    banned = _banned(allowed, plan)
    token, wanted = stats.token, plan.decoder.unmask.score()
    score: Tensor | None = None
    if plan.temperature > 0 or (plan.filters and wanted.transformed):
        position = state.block_start.unsqueeze(1) + torch.arange(logits.shape[1], device=logits.device)
        noise = uniform(state.seed.unsqueeze(1), position, state.nfe.unsqueeze(1), TOKEN_STREAM)
        if plan.filters or wanted.transformed:
            how = Draw(plan.temperature, plan.top_p, plan.top_k, allowed.shape[-1], banned)
            token, score = draw(scored, token, scored_banned, how, noise, wanted.statistic)
        else:
            token = sample(allowed, token, banned, plan.temperature, noise)
    if score is None or not wanted.transformed:
        score = score_of(wanted.statistic, token, scored, stats, scored_banned)
    confidence = stats.confidence if plan.temperature == 0 else probability_of(token, scored, stats)
    return token, confidence, score


def _verification(
    candidates: Candidates, stats: ops.TokenStats, without: LeaveOneOut | None, state: State, plan: Plan
) -> Verification:
    """What is predicted in the places of committed tokens."""
    if without is None:
        present = probability_of(candidates.current * candidates.committed, candidates.logits, stats)
        return Verification(stats.token, stats.confidence, present)
    scored = _scored(without.logits, plan)
    stats = _statistics(without.logits, scored, plan)
    current = state.ids.gather(1, without.positions.clamp(min=0))
    present = probability_of(current * (current != plan.mask_token_id), scored, stats)
    # One column more, for padding.
    many = candidates.masked.shape[1]
    column = torch.where(without.positions < 0, many, without.positions - state.block_start.unsqueeze(1))
    return Verification(
        *(
            x.new_zeros((x.shape[0], many + 1)).scatter(1, column, x)[:, :many]
            for x in (stats.token, stats.confidence, present)
        )
    )


def _first_alone(selection: Selection, masked: Tensor, state: State) -> Selection:
    opening = state.opening.unsqueeze(1)
    first = masked & (torch.arange(masked.shape[1], device=masked.device) == 0)
    return Selection(
        torch.where(opening, first, selection.selected),
        torch.where(opening, Reason.FORCED, selection.reason).to(torch.int8),
    )


def _open_blocks(scored: Tensor, stats: ops.TokenStats, state: State, plan: Plan) -> State:
    length, previous = plan.decoder.blocks.open(scored, _scored_banned(scored, plan), stats, state)
    return state._replace(
        block_length=torch.where(state.opening, length, state.block_length),
        blocks_opened=state.blocks_opened + state.opening,
        block_step=torch.where(state.opening, 0, state.block_step),
        previous=previous,
    )


def _end_at_eos(state: State, plan: Plan, eos_token_id: int) -> State:
    """Finish the rows whose tokens up to the first end-of-sequence token are committed; fill their rest."""
    length = state.ids.shape[1]
    position = torch.arange(length, device=state.ids.device)
    generated = (position >= state.prompt_length.unsqueeze(1)) & (position < state.end.unsqueeze(1))
    is_eos = generated & (state.ids == eos_token_id)
    is_mask = generated & (state.ids == plan.mask_token_id)
    eos = torch.where(is_eos, position, length).amin(-1)
    ended = eos < torch.where(is_mask, position, length).amin(-1)
    rest = generated & ended.unsqueeze(1) & (position > eos.unsqueeze(1))
    return state._replace(
        ids=torch.where(rest, eos_token_id, state.ids),
        step_map=torch.where(rest, state.nfe.unsqueeze(1) - 1, state.step_map),
        confidence=torch.where(rest, torch.nan, state.confidence),
        reason=torch.where(rest, Reason.AFTER_EOS, state.reason),
        block_start=torch.where(ended, state.end, state.block_start),
        opening=state.opening | ended,
    )
