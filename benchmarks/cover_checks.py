"""How honest COVER's cheap verification is, and whether attention foretells which tokens go stale.

Two studies that `benchmarks.cover` runs. Both look at single forward passes on answers whose truth is known.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor

import dlmkern
from benchmarks.markdown import table
from dlmkern import decoders
from dlmkern.decoders import Decoder
from dlmkern.models import AttentionGraph, chains4
from dlmkern.models.chains4 import ANSWER_LENGTH, MASK, PROMPT_LENGTH
from dlmkern.ops import Verdict

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the layers, with an override in the last ones
SEEDS = (1, 4)
TAU_REPLACE = 0.9
SHOWN = 0.75  # share of the answer's tokens that are committed
STALE = 0.25  # share of the committed tokens that the pass before has not seen


@dataclass(frozen=True)
class Leak:
    """One way to verify tokens, against leave-one-out by passes of their own. All are shares or means."""

    view: str
    seeds: int
    """A pass."""
    stale: bool
    """Whether tokens were committed since the pass that filled the cache."""
    agree: float
    """The verdict is that of leave-one-out."""
    kept: float
    """Of the right tokens that leave-one-out keeps, those kept."""
    replaced: float
    """Of the same, those replaced."""
    variation: float
    """Total variation between the two distributions."""
    own_token: float
    """Probability of the present token, less that of leave-one-out."""
    detected: float
    """Of planted errors, those not kept."""
    repaired: float
    """Of planted errors, those replaced by the right token."""


@dataclass(frozen=True)
class Drift:
    """How well attention to new tokens foretells how far a committed token's keys and values move."""

    layers: str
    draft: str
    step: float
    """Spearman's correlation inside a step of an answer, mean."""
    share: float
    """Of these, the positive ones."""
    overall: float
    """Over all steps and answers."""
    pairs: int


class Scene(NamedTuple):
    """A pass that verifies tokens, and the pass before; all `[B, L]`."""

    before: Tensor
    now: Tensor
    seeds: Tensor


def scene(full: Tensor, count: int, stale: bool, wrong: bool, generator: torch.Generator) -> Scene:
    """Valid answers, partly masked, in each of which `count` committed digits are to be verified.

    Args:
        full: prompts and answers, int64 `[B, L]`.
        count: digits to verify.
        stale: whether the pass before has not seen all of what is committed now.
        wrong: whether another digit is in the place of the first of them, in both passes.
        generator: of the choices.
    """
    shape = (len(full), ANSWER_LENGTH)
    answer = full[:, PROMPT_LENGTH:]
    digits = answer < 3
    # A fixed number of the digits first, so that there are always enough of them.
    order = torch.where(digits, torch.rand(shape, generator=generator), 2.0).argsort(1)
    rank = order.argsort(1)
    committed = (rank < count) | (torch.rand(shape, generator=generator) < SHOWN)
    new = (rank >= count) & (torch.rand(shape, generator=generator) < STALE) & stale
    if wrong:
        shift = 1 + torch.randint(2, (len(full), 1), generator=generator)
        answer = torch.where(rank == 0, (answer + shift) % 3, answer)
    now, before = (torch.where(seen, answer, MASK) for seen in (committed, committed & ~new))
    prompt = full[:, :PROMPT_LENGTH]
    chosen = torch.nn.functional.pad(rank < count, (PROMPT_LENGTH, 0))
    return Scene(torch.cat((prompt, before), 1), torch.cat((prompt, now), 1), chosen)


def leave_one_out(model: Any, x: Scene) -> Tensor:
    """Probabilities `[N, V]` for the N seeds, row by row, each from a pass in which it alone is masked."""
    row, position = x.seeds.nonzero(as_tuple=True)
    each = torch.arange(len(row))
    ids = x.now[row].clone()
    ids[each, position] = MASK
    return _probabilities(model(ids).logits[each, position])


def cheap(model: Any, x: Scene, share: float | None) -> Tensor:
    """The same from one pass for all seeds: masked, with an override in a share of the layers or none."""
    ids = torch.where(x.seeds, MASK, x.now)
    if share is None:
        return _probabilities(model(ids).logits[x.seeds])
    cache = model.new_cache(*ids.shape)
    model(x.before, cache=cache)
    return _probabilities(model(ids, cache=cache, seeds=x.seeds, seed_layers=share).logits[x.seeds])


def _probabilities(logits: Tensor) -> Tensor:
    """Of the tokens that may be committed, float64."""
    logits = logits[:, : chains4.VOCAB_SIZE].double()
    logits[:, MASK] = -torch.inf
    return logits.softmax(-1)


def verdicts(probability: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """What COVER does by `TAU_REPLACE` for tokens that were never masked again, and the likeliest; `[N]`."""
    confidence, predicted = probability.max(-1)
    everywhere = torch.ones_like(token, dtype=torch.bool)
    verdict = dlmkern.cover_verify(
        token, predicted, confidence, everywhere, tau_replace=TAU_REPLACE, max_remasks=1
    )
    return verdict, predicted


def views() -> Iterator[tuple[str, float | None]]:
    yield "masked", None
    for share in SHARES:
        yield f"override, {share:.0%} of the layers", share


@torch.no_grad()
def run_leak(model: Any, full: Tensor) -> list[Leak]:
    """`full` is int64 `[B, L]`: prompts and valid answers."""
    out = []
    for count in track(SEEDS, "leak", transient=True):
        for stale in (False, True):
            generator = torch.Generator().manual_seed(0)
            right = scene(full, count, stale, False, generator)
            wrong = scene(full, count, stale, True, generator)
            truth, faulty = leave_one_out(model, right), leave_one_out(model, wrong)
            planted = (wrong.now != full)[wrong.seeds]
            out.append(_leak("leave-one-out", truth, faulty, truth, right, wrong, planted, full, stale))
            for name, share in views():
                seen, seen_faulty = cheap(model, right, share), cheap(model, wrong, share)
                out.append(_leak(name, seen, seen_faulty, truth, right, wrong, planted, full, stale))
    return out


def _leak(
    view: str,
    seen: Tensor,
    seen_faulty: Tensor,
    truth: Tensor,
    right: Scene,
    wrong: Scene,
    planted: Tensor,
    full: Tensor,
    stale: bool,
) -> Leak:
    token, faulty = right.now[right.seeds], wrong.now[wrong.seeds]
    verdict, _ = verdicts(seen, token)
    honest, _ = verdicts(truth, token)
    keeps = honest == Verdict.KEEP
    own = (seen - truth).gather(1, token.unsqueeze(1))
    judged, predicted = verdicts(seen_faulty, faulty)
    mended = (judged == Verdict.REPLACE) & (predicted == full[wrong.seeds])
    return Leak(
        view,
        seeds=int(right.seeds[0].sum()),
        stale=stale,
        agree=_mean(verdict == honest),
        kept=_mean((verdict == Verdict.KEEP)[keeps]),
        replaced=_mean((verdict == Verdict.REPLACE)[keeps]),
        variation=_mean((seen - truth).abs().sum(-1) / 2),
        own_token=_mean(own),
        detected=_mean((judged != Verdict.KEEP)[planted]),
        repaired=_mean(mended[planted]),
    )


def _mean(x: Tensor) -> float:
    return x.double().mean().item()


def leak_table(points: Iterable[Leak]) -> str:
    names = [field.name.replace("_", " ") for field in fields(Leak)]
    rows = [
        [
            p.view, str(p.seeds), "stale" if p.stale else "fresh", f"{p.agree:.1%}", f"{p.kept:.1%}",
            f"{p.replaced:.1%}", f"{p.variation:.3f}", f"{p.own_token:+.3f}", f"{p.detected:.1%}",
            f"{p.repaired:.1%}",
        ]
        for p in points
    ]  # fmt: skip
    return table([*names[:2], "cache", *names[3:]], rows, left=1)


DRAFTS = {
    "threshold 0.7": decoders.threshold(0.7, None),
    "DAPD, tau 0.001": decoders.dapd(tau_min=0.001, tau_max=0.001),
}
LAYERS = {"last 30 %": 0.3, "all": 1.0}


def passes(model: Any, prompts: Tensor, decoder: Decoder) -> list[Tensor]:
    """What each forward pass is shown while a decoder that takes nothing back answers; `[B, L]` each.

    A row that has finished is shown as it is from then on.
    """
    blank = torch.full((len(prompts), ANSWER_LENGTH), MASK)
    shown = [torch.cat((prompts, blank), dim=1)]
    for step in dlmkern.generate_stream(model, prompts, decoder, ANSWER_LENGTH):
        ids = shown[-1].clone()
        for row in step.rows:
            ids[row.row, PROMPT_LENGTH + torch.tensor(row.positions)] = torch.tensor(row.tokens)
        shown.append(ids)
    return shown


@torch.no_grad()
def run_drift(model: Any, prompts: Tensor) -> list[Drift]:
    """For each draft and choice of layers."""
    out = []
    for draft, decoder in track(DRAFTS.items(), "drift", transient=True):
        shown = passes(model, prompts, decoder)
        for name, layers in LAYERS.items():
            foretold, measured = [], []
            for before, after in pairwise(shown):
                expected, moved = step_drift(model, before, after, layers)
                changes = (before != after).any(-1)
                known = (before != MASK)[:, PROMPT_LENGTH:]
                for row in changes.nonzero()[:, 0].tolist():
                    foretold.append(expected[row][known[row]])
                    measured.append(moved[row][known[row]])
            inside = [spearman(*pair) for pair in zip(foretold, measured, strict=True) if len(pair[0]) > 2]
            correlations = torch.tensor([r for r in inside if r == r])
            pooled = torch.cat(foretold), torch.cat(measured)
            out.append(
                Drift(
                    name,
                    draft,
                    step=_mean(correlations),
                    share=_mean(correlations > 0),
                    overall=spearman(*pooled),
                    pairs=len(pooled[0]),
                )
            )
    return out


def step_drift(model: Any, before: Tensor, after: Tensor, layers: float) -> tuple[Tensor, Tensor]:
    """What COVER expects of the positions of an answer, and what happens; both `[B, 40]`.

    The first is how much a position attends to those that the step commits. The second is by how much, of
    their own norm, its keys and values move until the next pass, mean over both and over the layers.
    """
    place = torch.arange(PROMPT_LENGTH, PROMPT_LENGTH + ANSWER_LENGTH).repeat(len(before), 1)
    cache = model.new_cache(*before.shape)
    graph = AttentionGraph(place, layers)
    model(before, cache=cache, graph=graph)
    changed = (before != after)[:, PROMPT_LENGTH:]
    expected = (graph.scores() * changed[:, None, :]).sum(-1)
    fresh = model.new_cache(*after.shape)
    model(after, cache=fresh)
    total = torch.zeros(place.shape)
    for old, new in zip(cache.storage, fresh.storage, strict=True):
        k, v = new[:, :, :, PROMPT_LENGTH:]
        moved = dlmkern.kv_block_write(old[0], old[1], k, v, place, drift=True)
        assert moved is not None
        total += (moved.k_distance + moved.v_distance) / 2
    return expected, total / len(cache.storage)


def spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation of `[n]` and `[n]`; NaN where all of one are equal."""
    ranks = torch.stack([_rank(v) for v in (x, y)])
    return torch.corrcoef(ranks)[0, 1].item()


def _rank(x: Tensor) -> Tensor:
    """Equal ones share their mean rank."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    counts = counts.double()
    mean: Tensor = counts.cumsum(0) - (counts - 1) / 2
    return mean[inverse]


def drift_table(points: Iterable[Drift]) -> str:
    rows = [
        [p.draft, p.layers, f"{p.step:.2f}", f"{p.share:.0%}", f"{p.overall:.2f}", str(p.pairs)]
        for p in points
    ]
    return table(["draft", "layers", "inside a step", "positive", "overall", "pairs"], rows, left=2)
