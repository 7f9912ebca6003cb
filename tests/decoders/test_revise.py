"""Revocable decoding: what WINO, Saber and COVER take back, and that every run ends."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern import decoders as d
from dlmkern.decoders import Candidates, Selection, State
from tests.decoders.support import DATA, MASK, VOCAB, HashModel, same

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]

REVOCABLE: dict[str, d.Decoder] = {
    "wino": d.wino(8, 0.3, 0.7),
    "wino, adaptive": d.Decoder(d.DepGABlocks(l_min=5, l_max=9), d.WideThreshold(0.2, least=3), d.WINO(0.95)),
    "saber": d.saber(None, 3),
    "saber, blocks": d.saber(6, 2),
    "saber, adaptive": d.Decoder(d.DepGABlocks(l_min=6, l_max=9), d.MeanThreshold(3), d.Saber(4)),
    "cover": d.cover(0.05, 0.6, 9, draft_most=3),
    "cover, sum": d.cover(
        0.05, 0.5, None, draft_most=3, max_remasks=3, combine="sum", suspects="above_mean", cooldown=2
    ),
    "cover, last layers": d.cover(
        0.05, 0.6, 7, draft_most=2, override_layers=0.5, most=2, seeds_by="uncertainty"
    ),
    "cover, masked": d.cover(0.05, 0.6, 10, draft_most=3, verify="masked", seeds_by="random", max_remasks=2),
    "cover, rechecked": d.cover(0.05, 0.6, None, draft_most=1, recheck=True),
    "cover, exact": d.cover(0.05, 0.6, 8, draft_most=2, verify="exact", max_remasks=2),
    "cover, ties": d.Decoder(d.FixedBlocks(9), d.DAPD(layers=1.0), d.COVER(0.6)),
}


def load(checkpoint: str, dtype: str = "float64") -> Any:
    return dlmkern.load_model(DATA / "models" / checkpoint, dtype=dtype)


def replay(
    stream: dlmkern.generation.GenerationStream, rows: int, length: int, mask: int
) -> tuple[list[list[int]], list[Counter[int]], list[int]]:
    """The answers that the steps of a stream add up to; of each row, how often every position was masked
    again, and how many tokens were replaced."""
    answers = [[mask] * length for _ in range(rows)]
    remasks = [Counter[int]() for _ in range(rows)]
    replaced = [0] * rows
    for step in stream:
        for row in step.rows:
            for position, token, reason in zip(row.positions, row.tokens, row.reasons, strict=True):
                was_mask = answers[row.row][position] == mask
                assert was_mask == (reason != d.Reason.REPLACED)
                answers[row.row][position] = token
            replaced[row.row] += row.reasons.count(d.Reason.REPLACED)
            for position in row.remasked:
                assert answers[row.row][position] != mask
                answers[row.row][position] = mask
                remasks[row.row][position] += 1
    return answers, remasks, replaced


CASES = [
    *(("llada_seed0", None, name) for name in REVOCABLE),
    *(("llada_seed0", "prefix", name) for name in ("wino", "saber, blocks", "cover")),
    *(("llada_seed0", "dual", name) for name in ("cover, ties", "saber, adaptive")),
    *(("dream_seed0", cache, "cover") for cache in (None, "prefix", "dual")),
    ("dream_seed0", None, "saber, blocks"),
]


@pytest.mark.parametrize(("checkpoint", "cache", "name"), CASES)
def test_batch_equals_solo(checkpoint: str, cache: str | None, name: str) -> None:
    """Ragged prompts, rows out of phase, random tokens: each row is decoded as if it were alone, and the
    stream tells what has happened."""
    model = load(checkpoint)
    parts = REVOCABLE[name]
    kind = d.DualCache(refresh=3) if cache == "dual" else cache
    decoder = d.Decoder(parts.blocks, parts.unmask, parts.revise, kind)
    options: dict[str, Any] = {"gen_length": 14, "temperature": 0.5}
    stream = dlmkern.generate_stream(model, PROMPTS, decoder, seed=[5, 6, 7], **options)
    answers, remasks, replaced = replay(stream, 3, 14, model.config.mask_token_id)
    batch = stream.result()
    assert answers == batch.tokens.tolist()
    assert (batch.tokens != model.config.mask_token_id).all()
    assert batch.revisions.sum() > 0
    for row, prompt in enumerate(PROMPTS):
        assert same(dlmkern.generate(model, [prompt], decoder, seed=[5 + row], **options), batch, 0, row)
        assert batch.revisions[row] == remasks[row].total() + replaced[row]
        if isinstance(parts.revise, d.COVER):
            assert max(remasks[row].values(), default=0) <= parts.revise.max_remasks


@pytest.mark.parametrize("name", ["wino", "cover"])
def test_guidance_and_early_end_in_a_batch(name: str) -> None:
    model = load("llada_seed0")
    parts = REVOCABLE[name]
    decoder = d.Decoder(parts.blocks, parts.unmask, parts.revise, cfg_scale=0.7)
    free = dlmkern.generate(model, PROMPTS, decoder, 12)
    options: dict[str, Any] = {"stop_at_eos": True, "eos_token_id": int(free.tokens[0, 6])}
    batch = dlmkern.generate(model, PROMPTS, decoder, 12, **options)
    assert (batch.reason[0] == d.Reason.AFTER_EOS).any()
    assert same(dlmkern.generate(model, PROMPTS[:1], decoder, 12, **options), batch, 0, 0)
    assert same(dlmkern.generate(model, PROMPTS[1:2], decoder, 12, **options), batch, 0, 1)


class Ruthless(d.RevisionRule):
    """Takes back all that it may, whenever it may."""

    def __init__(self, patience: int) -> None:
        self.steps = patience

    def patience(self, length: Tensor) -> Tensor:
        return length * 0 + self.steps

    def revise(
        self, candidates: Candidates, selection: Selection, verification: d.Verification, state: State
    ) -> d.Revision:
        nothing = torch.zeros_like(candidates.masked)
        return d.Revision(candidates.committed | selection.selected, nothing, nothing, nothing, ())


@pytest.mark.parametrize("patience", [0, 1, 7])
def test_every_run_ends(patience: int) -> None:
    """After `patience` steps nothing is masked again: a block of n positions takes at most n more."""
    decoder = d.Decoder(d.FixedBlocks(5), d.Threshold(0.99), Ruthless(patience))
    out = dlmkern.generate(HashModel(), [[1], [2, 3]], decoder, 12, mask_token_id=MASK, vocab_size=VOCAB)
    assert (out.tokens != MASK).all()
    assert (out.nfe <= 3 * patience + 12).all()
    assert (out.nfe >= 3 * patience).all()


class Careless(d.RevisionRule):
    """Asks for all at once, everywhere."""

    def revise(
        self, candidates: Candidates, selection: Selection, verification: d.Verification, state: State
    ) -> d.Revision:
        everything = torch.ones_like(candidates.masked)
        return d.Revision(everything & (state.nfe < 2).unsqueeze(1), everything, everything, everything, ())


@pytest.mark.parametrize("length", [5, None])
def test_a_rule_cannot_reach_beyond_the_block(length: int | None) -> None:
    """The last block is shorter, and masks are not replaced."""
    blocks = d.WholeSequence() if length is None else d.FixedBlocks(length)
    decoder = d.Decoder(blocks, d.Threshold(0.3), Careless())
    stream = dlmkern.generate_stream(
        HashModel(peak=1.0), [[1], [2, 3]], decoder, 12, mask_token_id=MASK, vocab_size=VOCAB
    )
    answers, remasks, replaced = replay(stream, 2, 12, MASK)
    out = stream.result()
    assert answers == out.tokens.tolist()
    assert [remasks[row].total() + replaced[row] for row in range(2)] <= out.revisions.tolist()


@pytest.mark.parametrize("seed", [0, 1])
def test_bounds(seed: int) -> None:
    """WINO and Saber take at most a step a token; COVER one for each token and each time it is taken back."""
    model = HashModel(seed=seed, peak=2.0)
    keywords: dict[str, Any] = {"mask_token_id": MASK, "vocab_size": VOCAB, "temperature": seed * 0.5}
    for verify in ("exact", "masked"):
        for limit in (1, 3):
            decoder = d.cover(
                0.05, 0.9, None, draft_most=2, max_remasks=limit, verify=verify, seeds_by="random"
            )
            stream = dlmkern.generate_stream(model, [[seed]], decoder, 16, seed=1, **keywords)
            _, (remasks,), _ = replay(stream, 1, 16, MASK)
            out = stream.result()
            assert max(remasks.values()) <= limit
            assert int(out.nfe[0]) <= 16 + remasks.total() <= (1 + limit) * 16
    for n in (1, 5, 40):
        for length in (None, 7):
            out = dlmkern.generate(model, [[seed]], d.saber(length, n), 16, seed=1, **keywords)
            assert (out.tokens != MASK).all()
            assert out.nfe <= 16


class Blind:
    """A model of this package whose predictions at some positions hold no distribution in some passes."""

    def __init__(self, model: Any, spoil: Any) -> None:
        self.model, self.spoil, self.config, self.new_cache = model, spoil, model.config, model.new_cache

    def __call__(
        self, ids: Tensor, *, lengths: Any = None, positions: Any = None, shadow_positions: Any = None,
        cache: Any = None, cache_rows: Any = None, seeds: Any = None, seed_layers: float = 1.0,
    ) -> Any:  # fmt: skip
        logits = self.model(
            ids, lengths=lengths, positions=positions, shadow_positions=shadow_positions, cache=cache,
            cache_rows=cache_rows, seeds=seeds, seed_layers=seed_layers,
        ).logits  # fmt: skip
        return self.spoil(logits, shadow_positions, seeds)


def test_logits_without_distribution_in_what_is_verified() -> None:
    model = load("llada_seed0")
    settings: dict[str, Any] = {"seeds_by": "uncertainty", "draft_most": 3}

    def shadows(logits: Tensor, shadow_positions: Any, seeds: Any) -> Tensor:
        if shadow_positions is not None:
            logits[:, -shadow_positions.shape[1] :] = torch.nan
        return logits

    def verified(logits: Tensor, shadow_positions: Any, seeds: Any) -> Tensor:
        return logits if seeds is None else torch.where(seeds[:, 3:, None], torch.nan, logits)

    for decoder, spoil in ((d.wino(8, 0.1), shadows), (d.cover(0.05, 0.5, None, **settings), verified)):
        with pytest.raises(
            FloatingPointError, match=r"row 0: the logits of position \d+ hold no distribution"
        ):
            dlmkern.generate(Blind(model, spoil), [[1, 2, 3]], decoder, 12)


# The rule of COVER, written out for one row and with whole attention maps.


class Pass:
    """One forward pass with seeds, every query's row of attention made by itself."""

    def __init__(self, model: Any, keys: list[tuple[Tensor, Tensor]] | None, layers: float) -> None:
        self.model = model
        self.cached = keys
        self.layers = layers

    def __call__(self, ids: Tensor, seeds: set[int], hidden: set[int], override_layers: float) -> Tensor:
        model, shift = self.model, int(self.model.shifted_logits)
        shown = ids.clone()
        for seed in seeds:
            shown[0, seed] = model.config.mask_token_id
        seeds = seeds - hidden
        x = model.embed(shown)
        rope = model.rope(torch.arange(ids.shape[1]))
        maps, kept = [], []
        n_layers = len(model.blocks)
        for layer, block in enumerate(model.blocks):
            q, k, v = block.qkv(x, rope)
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            keys, values = k.clone(), v.clone()
            if self.cached is not None:
                for seed in seeds:
                    keys[:, :, seed], values[:, :, seed] = (old[:, :, seed] for old in self.cached[layer])
            kept.append((keys, values))
            if layer < int(n_layers * (1 - override_layers)):
                keys, values = k, v
            rows, weights = [], []
            for i in range(ids.shape[1]):
                own_keys, own_values = keys.clone(), values.clone()
                if i + shift in seeds:
                    own_keys[:, :, i + shift] = k[:, :, i + shift]
                    own_values[:, :, i + shift] = v[:, :, i + shift]
                query = q[:, :, i, :, None] / q.shape[-1] ** 0.5
                scores = (own_keys @ query).squeeze(-1)
                rows.append((scores.softmax(-1)[..., None] * own_values).sum(2))
                # The graph has the keys that all queries see.
                seen = (keys @ query).squeeze(-1)
                weights.append((seen - scores.logsumexp(-1, keepdim=True)).exp())
            maps.append(torch.stack(weights, 2).mean(1)[0])
            x = block.finish(x, torch.stack(rows, 2))
        self.cached = kept
        self.attention = torch.stack(maps[int(n_layers * (1 - self.layers)) :]).mean(0)
        logits = model.head(x)[0, :, : model.config.vocab_size]
        if shift:
            logits = torch.cat((logits[:1], logits[:-1]))
        logits[:, model.config.mask_token_id] = -torch.inf
        return logits.softmax(-1)


def by_hand(model: Any, prompt: list[int], length: int, block_length: int, most: int, rule: d.COVER) -> Any:
    """The answer, the forward passes, and what each of them filled and took back. `most` positions of some
    confidence are drafted a step."""
    mask, start = model.config.mask_token_id, len(prompt)
    ids = torch.tensor([prompt + [mask] * length])
    run = Pass(model, None, rule.layers)
    events: list[Any] = []
    for begin in range(start, start + length, block_length):
        block = range(begin, min(begin + block_length, start + length))
        shown = dict.fromkeys(block, 0)
        remasks = dict.fromkeys(block, 0)
        doubt = dict.fromkeys(block, 0.0)
        seeds: set[int] = set()
        hidden: set[int] = set()
        while any(ids[0, i] == mask for i in block):
            masked = [i for i in block if ids[0, i] == mask]
            committed = [i for i in block if ids[0, i] != mask]
            p = run(ids, seeds, hidden, rule.override_layers)
            confidence, token = p.max(-1)
            ranked = sorted(masked, key=lambda i: -float(confidence[i]))
            draft = [i for i in ranked[:most] if confidence[i] >= 0.05] or ranked[:1]
            replaced, remasked, again = [], [], set[int]()
            for i in seeds:
                if rule.recheck and i not in hidden and token[i] != ids[0, i]:
                    again.add(i)
                    doubt[i] = 1 - float(p[i, ids[0, i]])
                elif token[i] == ids[0, i]:
                    doubt[i] = 1 - float(p[i, ids[0, i]])
                elif confidence[i] >= rule.tau_replace:
                    replaced.append(i)
                    doubt[i] = 1 - float(confidence[i])
                else:
                    remasked.append(i)
                    remasks[i] += 1
            for i in committed:
                shown[i] = 1 - rule.cooldown if i in seeds else shown[i] + 1
            for i in draft:
                doubt[i] = 1 - float(confidence[i])
            changed = draft + replaced + remasked
            for i in changed:
                shown[i] = 0
            for i in draft + replaced:
                ids[0, i] = token[i]
            for i in remasked:
                ids[0, i] = mask
            events.append((sorted(i - start for i in draft + replaced), sorted(i - start for i in remasked)))
            still = [i for i in block if ids[0, i] == mask]
            eligible = [
                i for i in committed if i not in changed and shown[i] >= 1 and remasks[i] < rule.max_remasks
            ]
            a = run.attention
            score = {
                i: (doubt[i], float(sum(a[j, i] for j in still)), float(sum(a[i, j] for j in changed)))
                for i in eligible
            }
            largest = [max((score[i][part] for i in eligible), default=0) or 1 for part in range(3)]
            total = {}
            for i in eligible:
                u, g, drift = (
                    part / most_of_all for part, most_of_all in zip(score[i], largest, strict=True)
                )
                total[i] = u * g * (1 - drift) if rule.combine == "product" else u + g + 1 - drift
            top = max(total.values(), default=0)
            mean = sum(total.values()) / max(len(total), 1)
            above = sum(value > mean for value in total.values())
            suspects = above if rule.suspects == "above_mean" else sum(total.values()) / (top or 1)
            number = math.ceil(suspects**0.5)
            ranked = sorted((i for i in eligible if total[i] > 0), key=lambda i: (-total[i], i))
            seeds, hidden = set(ranked[:number]) | again, again
    return ids[0].tolist(), len(events), events


@pytest.mark.parametrize("override_layers", [1.0, 0.5])
@pytest.mark.parametrize("checkpoint", ["llada_seed0", "dream_seed0"])
def test_cover_written_out(checkpoint: str, override_layers: float) -> None:
    model = load(checkpoint)
    prompt = [7, 8, 9, 10]
    layers: dict[str, Any] = {"layers": 0.3, "override_layers": override_layers}
    other: dict[str, Any] = {"cooldown": 2, "combine": "sum", "suspects": "above_mean"}
    for block_length, most, rule in (
        (16, 3, d.COVER(0.4, **layers)),
        (7, 3, d.COVER(0.8, override_layers=override_layers, **other)),
        (16, 2, d.COVER(0.8, recheck=True, **layers)),
    ):
        decoder = d.Decoder(d.FixedBlocks(block_length), d.Threshold(0.05, most), rule)
        stream = dlmkern.generate_stream(model, [prompt], decoder, 16)
        events = [(step.rows[0].positions, step.rows[0].remasked) for step in stream]
        out = stream.result()
        with torch.no_grad():
            expected = by_hand(model, prompt, 16, block_length, most, rule)
        assert (out.sequences[0].tolist(), int(out.nfe[0]), events) == expected
        assert out.revisions[0] > 4


@pytest.mark.parametrize("checkpoint", ["llada_seed0", "dream_seed0"])
def test_a_seed_alone_is_exact_without_the_cache(checkpoint: str) -> None:
    """If all see the one seed masked, it is left out: "masked" and "exact" decide alike."""
    model = load(checkpoint)

    def third_step(prompt: int, tau_replace: float, verify: str) -> tuple[list[int], list[tuple[int, int]]]:
        # The first pass commits, the second shows it, the third verifies one of it.
        decoder = d.cover(0.0, tau_replace, None, draft_most=8, verify=verify, most=1, seeds_by="random")
        stream = dlmkern.generate_stream(model, [[prompt]], decoder, 30, seed=1)
        *_, (row,) = (next(stream).rows for _ in range(3))
        replaced = [
            (p, token) for p, token, why in zip(row.positions, row.tokens, row.reasons, strict=True)
            if why == d.Reason.REPLACED
        ]  # fmt: skip
        return row.remasked, replaced

    verdicts = [
        [third_step(prompt, tau, verify) for prompt in range(3) for tau in (0.0, 2.0)]
        for verify in ("masked", "exact")
    ]
    assert verdicts[0] == verdicts[1]
    assert any(remasked or replaced for remasked, replaced in verdicts[0])


def test_layers_of_draft_and_seeds() -> None:
    d.Decoder(d.WholeSequence(), d.DAPD(layers=0.5), d.COVER(layers=0.5))
    d.Decoder(d.WholeSequence(), d.DAPD(layers=0.5), d.COVER(layers=0.3, seeds_by="uncertainty"))
    with pytest.raises(ValueError, match=r"must look at the same layers, got layers = 0.5 and 1.0"):
        d.Decoder(d.WholeSequence(), d.DAPD(layers=0.5), d.COVER())


@pytest.mark.parametrize(
    "unmask", [d.OnePerStep(4), d.DreamSchedule(), d.DreamSchedule("origin", 8)], ids=str
)
def test_rules_that_count_their_steps_are_refused(unmask: Any) -> None:
    with pytest.raises(ValueError, match="revise needs an unmask that does not count its steps, got"):
        d.Decoder(d.WholeSequence(), unmask, d.WINO())


@pytest.mark.parametrize("decoder", ["wino", "cover"])
def test_a_bare_callable_hides_nothing(decoder: str) -> None:
    with pytest.raises(ValueError, match=r"revise: .* needs a model of dlmkern.models, .* got HashModel"):
        dlmkern.generate(HashModel(), [[1]], decoder, 4, mask_token_id=MASK)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: d.cover(tau_replace=float("nan")), "tau_replace must be a number, got nan"),
        (lambda: d.cover(max_remasks=0), "max_remasks must be a positive integer, got 0"),
        (lambda: d.cover(max_remasks=1.0), "max_remasks must be a positive integer, got 1.0"),  # type: ignore[arg-type]
        (lambda: d.cover(cooldown=0), "cooldown must be a positive integer, got 0"),
        (lambda: d.cover(most=0), "most must be a positive integer, got 0"),
        (lambda: d.cover(draft_most=0), "most must be a positive integer, got 0"),
        (lambda: d.cover(combine="max"), "combine must be one of product, sum, got 'max'"),
        (lambda: d.cover(suspects="all"), "suspects must be one of mean, above_mean, got 'all'"),
        (lambda: d.cover(seeds_by="luck"), "seeds_by must be one of stability, uncertainty, random, got"),
        (lambda: d.cover(verify="shadow"), "verify must be one of override, masked, exact, got 'shadow'"),
        (lambda: d.cover(override_layers=1.5), r"override_layers must lie in \[0, 1\], got 1.5"),
        (
            lambda: d.cover(verify="masked", override_layers=0.5),
            'override_layers and recheck go with verify = "override", got .masked',
        ),
        (lambda: d.cover(verify="exact", recheck=True), 'override_layers and recheck go with verify = "over'),
        (lambda: d.cover(recheck=1), "recheck must be a bool, got 1"),  # type: ignore[arg-type]
        (
            lambda: d.Decoder(d.FixedBlocks(4, growing=True), d.Threshold(), d.WINO()),
            r"revise: WINO\(.*\) needs blocks that do not grow, got FixedBlocks\(block_length=4, gr",
        ),
        (
            lambda: d.saber(4, cache="dual"),
            "blocks that grow go without a cache or with a PrefixCache, got DualC",
        ),
        (lambda: d.cover(layers=0.0), r"layers must be a share in \(0, 1\] or indices of layers, got 0.0"),
        (lambda: d.wino(tau_draft=-0.1), r"tau must lie in \[0, 1\], got -0.1"),
        (lambda: d.wino(tau_back=2.0), r"tau_back must lie in \[0, 1\], got 2.0"),
        (lambda: d.WideThreshold(least=9, most=3), "least must not exceed most, got least = 9 and most = 3"),
        (lambda: d.saber(n=0), "n must be a positive integer, got 0"),
        (lambda: d.FixedBlocks(4, growing=1), "growing must be a bool, got 1"),  # type: ignore[arg-type]
        (lambda: d.Decoder(d.WholeSequence(), d.Threshold(), "cover"), "revise must be a RevisionRule"),  # type: ignore[arg-type]
        (lambda: d.Decoder(d.WholeSequence(), d.Threshold(), d.COVER), "revise must be a RevisionRule"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
