"""DAPD against an oracle that keeps whole attention maps, and what its settings do."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern import decoders as d
from tests.decoders.support import DATA, MASK, VOCAB, HashModel, same

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]
G = 16


def load(checkpoint: str = "llada_seed0", dtype: str = "float64") -> Any:
    return dlmkern.load_model(DATA / "models" / checkpoint, dtype=dtype)


def whole_maps(model: Any, ids: Tensor) -> list[Tensor]:
    """The attention map `[B, H, L, L]` of every layer."""
    maps = []
    rope = model.rope(torch.arange(ids.shape[1]))
    x = model.embed(ids)
    for block in model.blocks:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            groups = q.shape[1] // k.shape[1]
            k, v = (y.repeat_interleave(groups, dim=1) for y in (k, v))
            weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
            maps.append(weights)
            return weights @ v

        x = block(x, rope, attend)
    return maps


def with_maps(model: Any) -> Any:
    """The model as foreign code: a function that returns logits and maps, and knows of nothing else."""

    def call(ids: Tensor) -> Any:
        return SimpleNamespace(logits=model(ids).logits, attentions=tuple(whole_maps(model, ids)))

    call.shifted_logits = model.shifted_logits  # type: ignore[attr-defined]
    return call


def ids_of(model: Any) -> dict[str, int]:
    return {"mask_token_id": model.config.mask_token_id, "vocab_size": model.config.vocab_size}


def oracle(model: Any, prompt: list[int], rule: d.DAPD, block_length: int) -> tuple[list[int], list[int]]:
    """Ids and step map, position by position, as the paper has it."""
    mask = model.config.mask_token_id
    ids = torch.tensor([prompt + [mask] * G])
    step_map = [-1] * G
    forward = 0
    for start in range(0, G, block_length):
        while True:
            nodes = [
                i
                for i in range(len(prompt) + start, len(prompt) + min(start + block_length, G))
                if ids[0, i] == mask
            ]
            if not nodes:
                break
            logits = model(ids).logits[0]
            if model.shifted_logits:
                logits = torch.cat((logits[:1], logits[:-1]))
            logits = logits[:, : model.config.vocab_size]
            if mask < logits.shape[1]:
                logits[:, mask] = -math.inf
            confidence, token = logits.softmax(-1).max(-1)
            maps = whole_maps(model, ids)
            captured = maps[-(len(maps) - int(len(maps) * 0.7)) :]
            attention = torch.stack(captured).mean(0)[0].mean(0)
            s = ((attention + attention.T) / 2).fill_diagonal_(0)[nodes][:, nodes].tolist()
            c = confidence[nodes].tolist()
            m = sum(x == mask for x in ids[0].tolist())
            progress = 1 - m / G
            tau = rule.tau_min + (rule.tau_max - rule.tau_min) * progress
            taken = choose(s, c, tau, progress, rule)
            for i in taken:
                ids[0, nodes[i]] = token[nodes[i]]
                step_map[nodes[i] - len(prompt)] = forward
            forward += 1
    return ids[0].tolist(), step_map


def choose(s: list[list[float]], c: list[float], tau: float, progress: float, rule: d.DAPD) -> set[int]:
    everyone = range(len(c))
    late = {i for i in everyone if c[i] >= rule.late} if rule.variant == "staged" else set()
    if rule.variant == "staged" and progress >= rule.late_from and not rule.late_graph:
        return late or {max(everyone, key=lambda i: c[i])}
    certain = {i for i in everyone if c[i] >= rule.certain} if rule.variant == "direct" else set()

    def tied(i: int, j: int) -> bool:
        edge = s[i][j] / max(max(s[i]), 1e-8) > tau
        return edge or (rule.symmetric and s[j][i] / max(max(s[j]), 1e-8) > tau)

    taken: list[int] = []
    for i in sorted(everyone, key=lambda i: -sum(s[i]) * c[i]):
        if i not in certain and not any(tied(i, j) for j in taken):
            taken.append(i)
    return set(taken) | certain | (late if progress >= rule.late_from else set())


RULES = {
    "staged": d.DAPD(tau_min=0.2, tau_max=0.6, late=0.3),
    "direct": d.DAPD("direct", 0.3, 0.3, certain=0.25),
    "symmetric": d.DAPD("direct", 0.3, 0.5, symmetric=True),
    "late without graph": d.DAPD(tau_min=0.3, tau_max=0.9, late=0.2, late_from=0.25, late_graph=False),
}


@pytest.mark.parametrize("block_length", [5, G])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("checkpoint", ["llada_seed0", "dream_seed0"])
def test_the_rule_as_the_paper_has_it(checkpoint: str, name: str, block_length: int) -> None:
    model, rule = load(checkpoint), RULES[name]
    out = dlmkern.generate(model, PROMPTS, d.Decoder(d.FixedBlocks(block_length), rule), G)
    assert min(out.nfe.tolist()) < G  # several at a time
    for row, prompt in enumerate(PROMPTS):
        ids, step_map = oracle(model, prompt, rule, block_length)
        assert out.sequences[row].tolist() == ids
        assert out.step_map[row].tolist() == step_map


@pytest.mark.parametrize("guidance", [0.0, 0.6])
@pytest.mark.parametrize("checkpoint", ["llada_seed0", "dream_seed0"])
def test_a_foreign_model_that_returns_its_maps(checkpoint: str, guidance: float) -> None:
    """Rows of different lengths share no call; the graphs come out in their rows."""
    model = load(checkpoint)
    for rule in RULES.values():
        decoder = d.Decoder(d.FixedBlocks(7), rule, cfg_scale=guidance)
        ours = dlmkern.generate(model, [*PROMPTS, PROMPTS[0]], decoder, G)
        theirs = dlmkern.generate(with_maps(model), [*PROMPTS, PROMPTS[0]], decoder, G, **ids_of(model))
        assert all(same(ours, theirs, row, row) for row in range(4))


def test_maps_need_no_transformers() -> None:
    """Which is an extra: a model of torch alone is decoded where it is not installed."""
    program = """
import sys, types
sys.modules["transformers"] = None
import torch, dlmkern
def model(ids):
    logits = torch.nn.functional.one_hot(ids % 5, 7).double()
    maps = torch.full((*ids.shape, ids.shape[1]), 1 / ids.shape[1]).unsqueeze(1)
    return types.SimpleNamespace(logits=logits, attentions=(maps, maps))
print(dlmkern.generate(model, [[1]], "dapd", 3, mask_token_id=6).nfe.tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[3]"


def test_layers() -> None:
    """The last 30 % of four layers are two."""
    model = load()
    last = dlmkern.generate(model, PROMPTS, d.dapd(tau_min=0.3, tau_max=0.6), G)
    named = dlmkern.generate(model, PROMPTS, d.dapd(tau_min=0.3, tau_max=0.6, layers=(2, 3)), G)
    first = dlmkern.generate(model, PROMPTS, d.dapd(tau_min=0.3, tau_max=0.6, layers=[0]), G)
    assert all(same(last, named, row, row) for row in range(3))
    assert not all(same(last, first, row, row) for row in range(3))
    with pytest.raises(ValueError, match="layer"):
        dlmkern.generate(model, PROMPTS, d.dapd(layers=[4]), G)


def test_other_decoders_ask_for_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a graph was made")

    monkeypatch.setattr("dlmkern.graph.AttentionGraph.__init__", refuse)
    dlmkern.generate(load(), PROMPTS, "threshold", G)
    with pytest.raises(AssertionError, match="a graph"):
        dlmkern.generate(load(), PROMPTS, "dapd", G)


def test_without_a_late_graph_none_is_made_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlmkern.graph import AttentionGraph

    sizes: list[int] = []
    scores = AttentionGraph.scores

    def record(self: AttentionGraph) -> Tensor:
        out = scores(self)
        sizes.append(out.shape[1])
        return out

    monkeypatch.setattr(AttentionGraph, "scores", record)
    rule = RULES["late without graph"]
    model = load()
    out = dlmkern.generate(model, PROMPTS[:1], d.Decoder(d.WholeSequence(), rule), G)
    committed = [int((out.step_map[0] < forward).sum()) for forward in range(int(out.nfe))]
    early = [G - done for done in committed if done / G < rule.late_from]
    assert sizes == early  # of all masked positions and no more
    assert len(early) < int(out.nfe)
    sizes.clear()
    with_graph = dlmkern.generate(model, PROMPTS[:1], d.dapd(tau_min=0.3, tau_max=0.9), G)
    assert len(sizes) == int(with_graph.nfe)


def test_reasons() -> None:
    model = load()
    out = dlmkern.generate(model, PROMPTS, d.Decoder(d.WholeSequence(), RULES["staged"]), G)
    sure = out.confidence >= RULES["staged"].late
    assert (out.reason[~sure] == d.Reason.INDEPENDENT).all()
    early = torch.zeros_like(sure)
    for row in range(3):
        done = torch.tensor([int((out.step_map[row] < s).sum()) for s in out.step_map[row].tolist()])
        early[row] = done / G < 0.5
    assert (out.reason[sure & ~early] == d.Reason.THRESHOLD).all()
    assert (out.reason[early] == d.Reason.INDEPENDENT).all()
    assert (sure & ~early).any()
    assert early.any()

    out = dlmkern.generate(model, PROMPTS, d.Decoder(d.WholeSequence(), RULES["direct"]), G)
    certain = out.confidence.float() >= 0.25
    assert (out.reason[certain] == d.Reason.THRESHOLD).all()
    assert (out.reason[~certain] == d.Reason.INDEPENDENT).all()

    decoder = d.dapd(tau_min=0.3, tau_max=0.9, late=0.97, late_graph=False)
    out = dlmkern.generate(model, PROMPTS, decoder, G)
    assert set(out.reason.flatten().tolist()) == {
        d.Reason.INDEPENDENT, d.Reason.THRESHOLD, d.Reason.FORCED,
    }  # fmt: skip


class Constant:
    """The same logits and maps whatever the tokens are."""

    def __init__(self, logits: Tensor, attention: Tensor) -> None:
        self.logits = logits
        self.attention = attention

    def __call__(self, ids: Tensor) -> Any:
        batch, length = ids.shape
        maps = self.attention.expand(batch, 1, length, length)
        return SimpleNamespace(logits=self.logits.expand(batch, -1, -1).clone(), attentions=(maps,))


def test_certain_in_the_dtype_of_the_logits() -> None:
    """A probability of 0.999 is 1 in bfloat16, and in float32 it is not."""
    logits = torch.zeros(1, 4, 3, dtype=torch.bfloat16)
    logits[..., 1] = 7.625  # p = 0.99902
    uniform = torch.full((4, 4), 0.25)  # everything is tied to everything
    options: dict[str, Any] = {"gen_length": 4, "mask_token_id": 3}
    model = Constant(logits, uniform)
    out = dlmkern.generate(model, [[]], d.dapd("direct"), **options)
    assert out.step_map.tolist() == [[0, 1, 2, 3]]
    out = dlmkern.generate(model, [[]], d.dapd("direct", compat="official"), **options)
    assert out.step_map.tolist() == [[0, 0, 0, 0]]
    out = dlmkern.generate(
        Constant(logits.float(), uniform), [[]], d.dapd("direct", compat="official"), **options
    )
    assert out.step_map.tolist() == [[0, 1, 2, 3]]


def test_delayed_tokens_come_last() -> None:
    """Token 2 is the surest answer of positions 1 and 3; nothing is tied to anything but the prompt."""
    logits = torch.zeros(1, 5, 3)
    logits[0, 1::2, 1] = 2.0
    logits[0, 2::2, 2] = 9.0
    attention = torch.eye(5)
    attention[0] = 0.2
    model = Constant(logits, attention)
    options: dict[str, Any] = {"gen_length": 4, "mask_token_id": 3}
    free = dlmkern.generate(model, [[0]], d.dapd(), **options)
    assert free.step_map.tolist() == [[0, 0, 0, 0]]
    last = dlmkern.generate(model, [[0]], d.dapd(delayed_token_id=2), **options)
    assert last.step_map.tolist() == [[0, 1, 0, 1]]
    assert last.tokens.tolist() == [[1, 2, 1, 2]]
    blocks = dlmkern.generate(model, [[0]], d.dapd(block_length=2, delayed_token_id=2), **options)
    assert blocks.step_map.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_early_end_and_guidance_in_a_batch(cache: str | None) -> None:
    model = load()
    decoder = d.Decoder(d.FixedBlocks(8), RULES["staged"], cache=cache, cfg_scale=0.7)
    free = dlmkern.generate(model, PROMPTS, decoder, G)
    options: dict[str, Any] = {"stop_at_eos": True, "eos_token_id": int(free.tokens[0, 6])}
    batch = dlmkern.generate(model, PROMPTS, decoder, G, **options)
    assert (batch.reason[0] == d.Reason.AFTER_EOS).any()
    for row, prompt in enumerate(PROMPTS):
        assert same(dlmkern.generate(model, [prompt], decoder, G, **options), batch, 0, row)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("checkpoint", ["llada_seed0", "dream_seed0"])
def test_the_graph_of_a_cached_pass(checkpoint: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh queries and keys of the block against all keys of the row, stale ones where they are cached."""
    from dlmkern.graph import AttentionGraph

    seen: list[Tensor] = []
    scores = AttentionGraph.scores

    def record(self: AttentionGraph) -> Tensor:
        seen.append(scores(self))
        return seen[-1]

    monkeypatch.setattr(AttentionGraph, "scores", record)
    model, prompt, length, block = load(checkpoint), PROMPTS[0], len(PROMPTS[0]) + G, 8
    decoder = d.dapd("staged", 0.05, 0.1, block, cache=cache)
    stream = dlmkern.generate_stream(model, [prompt], decoder, G)
    first = next(stream).rows[0]
    next(stream)  # the first cached pass
    mask = model.config.mask_token_id
    opening = torch.tensor([prompt + [mask] * G])
    now = opening.clone()
    for place, token in zip(first.positions, first.tokens, strict=True):
        now[0, len(prompt) + place] = token
    nodes = [i for i in range(len(prompt), len(prompt) + block) if now[0, i] == mask]
    assert 1 < len(nodes) < block
    start = len(prompt) - model.shifted_logits
    stop = len(prompt) + block if cache == "dual" else length
    rope = model.rope(torch.arange(length))
    fresh_rope = tuple(table[start:stop] for table in rope)
    stale, x = model.embed(opening), model.embed(now[:, start:stop])
    wanted = torch.zeros(len(nodes), len(nodes), dtype=torch.float64)
    for layer, layer_block in enumerate(model.blocks):
        stale_q, stale_k, stale_v = layer_block.qkv(stale, rope)
        q, k, v = layer_block.qkv(x, fresh_rope)
        k = torch.cat((stale_k[:, :, :start], k, stale_k[:, :, stop:]), dim=2)
        v = torch.cat((stale_v[:, :, :start], v, stale_v[:, :, stop:]), dim=2)
        groups = q.shape[1] // k.shape[1]
        stale_maps = (stale_q @ stale_k.repeat_interleave(groups, 1).mT / math.sqrt(q.shape[-1])).softmax(-1)
        maps = (q @ k.repeat_interleave(groups, 1).mT / math.sqrt(q.shape[-1])).softmax(-1)
        if layer >= 2:
            rows = [i - start for i in nodes]
            wanted += maps.mean(1)[0][rows][:, nodes] / 2
        stale = layer_block.finish(stale, stale_maps @ stale_v.repeat_interleave(groups, 1))
        x = layer_block.finish(x, maps @ v.repeat_interleave(groups, 1))
    torch.testing.assert_close(seen[1][0], wanted)


def test_no_attention_to_be_had() -> None:
    with pytest.raises(ValueError, match=r"needs the attention of the model, and HashModel .*attentions"):
        dlmkern.generate(HashModel(), [[1]], "dapd", 4, mask_token_id=MASK, vocab_size=VOCAB)


def test_maps_of_another_length() -> None:
    def model(ids: Tensor) -> Any:
        return SimpleNamespace(logits=torch.rand(*ids.shape, 7), attentions=(torch.rand(1, 2, 3, 3),))

    with pytest.raises(ValueError, match=r"attentions\[0\] must have shape \[R, H, 5, 5\]"):
        dlmkern.generate(model, [[1]], "dapd", 4, mask_token_id=6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "stage"}, "variant must be"),
        ({"tau_min": "0"}, "tau_min must be a number"),
        ({"tau_max": math.inf}, "tau_max must be finite, got inf"),
        ({"tau_min": -1e308, "tau_max": 1e308}, "tau_max - tau_min must be finite"),
        ({"tau_min": 0.2, "tau_max": 0.1}, "tau_min must not exceed tau_max, got tau_min = 0.2"),
        ({"layers": 0}, r"layers must be a share in \(0, 1\] or indices of layers, got 0"),
        ({"layers": []}, "layers must be a share"),
        ({"layers": [-1]}, "layers must be a share"),
        ({"certain": 1.5}, r"certain must lie in \[0, 1\]"),
        ({"late": -0.1}, "late must lie"),
        ({"late_from": math.nan}, "late_from must be a number"),
        ({"late_graph": 1}, "late_graph must be a bool"),
        ({"symmetric": None}, "symmetric must be a bool"),
        ({"delayed_token_id": -1}, "delayed_token_id must be a token id, got -1"),
        ({"compat": "x"}, "compat must be"),
        ({"block_length": 0}, "block_length must be"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        d.dapd(**settings)


@pytest.mark.parametrize("layers", ["last", b"1", [0.5], [True], {0: 1}, None])
def test_layers_of_the_wrong_kind(layers: Any) -> None:
    with pytest.raises(TypeError, match="layers must be a number or a list, tuple or set of ints"):
        d.dapd(layers=layers)


def test_decoders_with_the_same_layers_are_equal() -> None:
    assert d.dapd(layers=[2, 3]) == d.dapd(layers=(3, 2)) == d.dapd(layers=range(2, 4))
    assert len({d.dapd(layers=[2, 3]), d.dapd(layers={2, 3}), d.dapd(layers=1), d.dapd(layers=1.0)}) == 2


PUBLISHED = {
    "dapd": ("staged", 0.01, 0.15, None),
    "dapd-llada-gsm8k": ("direct", 0.005, 0.05, 64),
    "dapd-llada-gsm8k-staged": ("staged", 0.01, 0.05, None),
    "dapd-llada-humaneval": ("direct", 0.01, 0.05, 64),
    "dapd-llada-humaneval-staged": ("staged", 0.01, 0.15, None),
    "dapd-llada-mbpp": ("staged", 0.01, 0.15, None),
    "dapd-llada-mbpp-direct": ("direct", 0.01, 0.02, None),
    "dapd-llada-math": ("staged", 0.01, 0.05, None),
    "dapd-dream": ("direct", 0.005, 0.01, None),
}


def test_published_settings() -> None:
    """The tables of the paper and its scripts, for answers of 256 tokens."""
    assert [name for name in d.PRESETS if name.startswith("dapd")] == list(PUBLISHED)
    for name, (variant, tau_min, tau_max, block_length) in PUBLISHED.items():
        blocks = d.WholeSequence() if block_length is None else d.FixedBlocks(block_length)
        assert d.find_decoder(name) == d.Decoder(blocks, d.DAPD(variant, tau_min, tau_max))
    assert d.PRESETS["dapd-dream"](tau_max=0.02) == d.dapd("direct", 0.005, 0.02)
    model = load()
    out = dlmkern.generate(model, PROMPTS, "dapd-llada-gsm8k", G)
    assert (out.tokens != model.config.mask_token_id).all()
