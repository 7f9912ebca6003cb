"""KV caches in the loop: what each forward pass computes, and that a row does not notice the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlmkern
from dlmkern import decoders as d
from dlmkern.attention import attention
from dlmkern.models.kv_cache import KVCache
from tests.decoders.support import DATA, HashModel, same

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]
CHECKPOINTS = ["llada_seed0", "dream_seed0"]
CACHES = {"prefix": d.PrefixCache, "dual": d.DualCache}


def load(checkpoint: str, dtype: str = "float64") -> Any:
    return dlmkern.load_model(DATA / "models" / checkpoint, dtype=dtype)


def widths(model: nn.Module) -> list[int]:
    """A list that every forward pass of the model adds its number of positions to."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    return seen


RULES: dict[str, tuple[Any, Any]] = {
    "steps": (d.FixedBlocks(6), d.OnePerStep()),
    "random": (d.FixedBlocks(9), d.OnePerStep(remasking="random")),
    "threshold": (d.FixedBlocks(7), d.Threshold(0.4)),
    "factor": (d.WholeSequence(), d.Factor(1.5)),
    "dream": (d.FixedBlocks(5), d.DreamSchedule("topk_margin", alg_temp=0.3)),
    "dream, sure": (d.DepGABlocks(l_min=3, l_max=8), d.DreamSchedule("confidence_threshold", tau=0.5)),
    "ties": (d.FixedBlocks(8), d.DAPD("direct", 0.2, 0.6, certain=0.9)),
    "ties, late without": (d.WholeSequence(), d.DAPD("staged", 0.3, 0.7, late=0.4, late_graph=False)),
    "ties, adaptive": (d.DepGABlocks(l_min=3, l_max=9), d.DAPD("staged", 0.2, 0.6, symmetric=True)),
    "conflicts": (d.DepGABlocks(l_min=3, l_max=9), d.CAP(0.3, 0.6)),
    "conflicts, topk": (d.DepGABlocks(l_min=2, l_max=9, kl="topk", topk=8), d.CAP(0.3, 0.6)),
}


@pytest.mark.parametrize("cache", [d.PrefixCache(), d.DualCache(), d.DualCache(refresh=2)], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_batch_equals_solo(checkpoint: str, rule: str, cache: Any) -> None:
    """Ragged prompts, rows out of phase, random tokens: each row is decoded as if it were alone."""
    model = load(checkpoint)
    blocks, unmask = RULES[rule]
    decoder = d.Decoder(blocks, unmask, cache=cache)
    options: dict[str, Any] = {"gen_length": 14, "temperature": 0.7, "top_p": 0.95}
    batch = dlmkern.generate(model, PROMPTS, decoder, seed=[5, 6, 7], **options)
    for row, prompt in enumerate(PROMPTS):
        alone = dlmkern.generate(model, [prompt], decoder, seed=[5 + row], **options)
        assert same(alone, batch, 0, row)
    assert (batch.tokens != model.config.mask_token_id).all()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_guidance_and_early_end_in_a_batch(checkpoint: str, cache: str) -> None:
    """The masked prompts of guidance have cache rows of their own; rows leave the cache as they finish."""
    model = load(checkpoint)
    decoder = d.Decoder(d.FixedBlocks(5), d.Threshold(0.3), cache=cache, cfg_scale=0.7)
    free = dlmkern.generate(model, PROMPTS, decoder, 20)
    # The token in the middle of the first row's answer ends that row early, and others perhaps.
    options: dict[str, Any] = {"stop_at_eos": True, "eos_token_id": int(free.tokens[0, 8])}
    batch = dlmkern.generate(model, PROMPTS, decoder, 20, **options)
    assert (batch.reason[0] == d.Reason.AFTER_EOS).any()
    assert batch.nfe.tolist() != free.nfe.tolist()
    for row, prompt in enumerate(PROMPTS):
        assert same(dlmkern.generate(model, [prompt], decoder, 20, **options), batch, 0, row)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_refreshing_always_is_no_cache(checkpoint: str, rule: str, cache: str) -> None:
    model = load(checkpoint)
    blocks, unmask = RULES[rule]
    without = dlmkern.generate(model, PROMPTS, d.Decoder(blocks, unmask), 14, 0.6, seed=1)
    always = dlmkern.generate(
        model, PROMPTS, d.Decoder(blocks, unmask, cache=CACHES[cache](refresh=1)), 14, 0.6, seed=1
    )
    for row in range(len(PROMPTS)):
        assert same(without, always, row, row)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_what_is_computed(checkpoint: str) -> None:
    """Whole rows where a block opens and at each refresh, else the block, or all from it on.

    A model whose logits are shifted also computes the position before: it predicts the block's first token.
    """
    model = load(checkpoint)
    left = int(model.shifted_logits)
    seen = widths(model)

    def run(cache: Any, compat: str | None = None) -> list[int]:
        seen.clear()
        dlmkern.generate(model, [[1, 2, 3]], d.vanilla(4, cache=cache, compat=compat), 10)
        return seen.copy()

    whole, block, end = 13, 4 + left, 2 + left
    assert run(d.NoCache()) == [whole] * 10
    assert run("dual") == [whole, *[block] * 3, whole, *[block] * 3, whole, end]
    assert run("prefix") == [whole, *[10 + left] * 3, whole, *[6 + left] * 3, whole, end]
    assert run(d.DualCache(refresh=2)) == [whole, block, whole, block] * 2 + [whole, end]
    assert run(d.DualCache(refresh=3)) == [whole, block, block, whole] * 2 + [whole, end]
    assert run("dual", "official")[1] == 4


def test_rows_out_of_phase_share_the_passes_inside_blocks() -> None:
    """Rows that need a whole pass go first, alone; then all are inside a block again."""
    model = load("llada_seed0")
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    out = dlmkern.generate(model, PROMPTS, d.threshold(0.5, 6, "dual"), 18)
    block_passes = [shape for shape in shapes if shape[1] <= 6]
    whole_rows = sum(shape[0] for shape in shapes if shape[1] > 6)
    assert whole_rows == 3 * 3  # three blocks of three rows
    assert sum(shape[0] for shape in block_passes) == int(out.nfe.sum()) - whole_rows
    assert len(block_passes) == int(out.nfe.max()) - 3


def test_the_buffer_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows move inside it as others finish, and no other is made."""
    made: list[KVCache] = []
    empty = KVCache.empty

    def record(*args: Any) -> KVCache:
        made.append(empty(*args))
        return made[-1]

    monkeypatch.setattr(KVCache, "empty", staticmethod(record))
    model = load("llada_seed0")
    stream = dlmkern.generate_stream(model, PROMPTS, d.threshold(0.5, 6, "dual"), 18)
    addresses = set()
    for _ in stream:
        cache = stream._loop.forward.cache
        assert cache is not None
        addresses.add(cache.storage.data_ptr())
    assert len(made) == 1
    assert made[0].storage.shape == (4, 2, 3, 4, 9 + 18, 16)
    assert addresses == {made[0].storage.data_ptr()}


@pytest.mark.parametrize("cache", CACHES)
def test_each_pass_against_a_plain_computation(cache: str) -> None:
    """The loop commits what a dual or prefix cache written out by hand commits."""
    model = load("llada_seed0")
    prompt, length, gen = [7, 8, 9, 10], 5, 15
    mask = model.config.mask_token_id
    ids = torch.tensor([prompt + [mask] * gen])

    def forward(first: int, stop: int, stale: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits of `[first, stop)`; keys and values elsewhere are `stale`, those inside are replaced."""
        x = model.embed(ids[:, first:stop])
        rope = model.rope(torch.arange(first, stop))
        for block, (keys, values) in zip(model.blocks, stale, strict=True):
            q, k, v = block.qkv(x, rope)
            keys[:, :, first:stop], values[:, :, first:stop] = k, v
            x = block.finish(x, attention(q, keys, values))
        return model.head(x)[..., : model.config.vocab_size]

    shape = (1, model.config.n_kv_heads, len(prompt) + gen, model.config.head_dim)
    step_map = [-1] * gen
    nfe = 0
    with torch.no_grad():
        for start in range(len(prompt), len(prompt) + gen, length):
            stop = start + length
            stale = [
                (torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))
                for _ in model.blocks
            ]
            first, last = 0, len(prompt) + gen
            while (ids[0, start:stop] == mask).any():
                logits = forward(first, last, stale)[0, start - first : stop - first]
                logits[:, mask] = -torch.inf
                confidence, token = logits.softmax(-1).max(-1)
                confidence = confidence.where(ids[0, start:stop] == mask, -1.0)
                best = int(confidence.argmax())
                ids[0, start + best] = token[best]
                step_map[start + best - len(prompt)] = nfe
                nfe += 1
                first, last = start, stop if cache == "dual" else last
    out = dlmkern.generate(model, [prompt], d.vanilla(length, cache=cache), gen)
    assert out.sequences[0].tolist() == ids[0].tolist()
    assert out.step_map[0].tolist() == step_map
    assert out.nfe.tolist() == [nfe]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(("gen_length", "block_length"), [(1, 32), (5, 32), (7, 3), (4, 1), (6, None)])
def test_lengths_that_do_not_divide(
    gen_length: int, block_length: int | None, checkpoint: str, cache: str
) -> None:
    """A block longer than the answer or than what remains, blocks of one position; no mask is left."""
    model = load(checkpoint)
    for compat in (None, "official"):
        for decoder in (
            d.vanilla(block_length, cache=cache, compat=compat),
            d.threshold(0.3, block_length, cache, compat=compat),
            d.factor(1.0, block_length, cache, compat=compat),
            d.dream("entropy", None, block_length, cache, compat=compat),
            d.dream("confidence_threshold", None, block_length, cache, compat=compat),
        ):
            out = dlmkern.generate(model, PROMPTS, decoder, gen_length)
            assert (out.tokens != model.config.mask_token_id).all()
            assert all(sum(lengths) == gen_length for lengths in out.block_lengths)


def test_an_empty_prompt_has_no_position_before_it() -> None:
    """The first token of all is predicted by its own position, also in a shifted model."""
    for checkpoint in CHECKPOINTS:
        model = load(checkpoint)
        for cache in CACHES:
            decoder = d.vanilla(4, cache=cache)
            batch = dlmkern.generate(model, [[], [4, 2]], decoder, 8)
            assert same(dlmkern.generate(model, [[]], decoder, 8), batch, 0, 0)
            assert same(dlmkern.generate(model, [[4, 2]], decoder, 8), batch, 0, 1)


def test_official_shifted_blocks_start_with_a_forced_token() -> None:
    """Official: whatever its confidence, and the opening pass commits nothing else."""
    model = load("dream_seed0")
    out = dlmkern.generate(model, [[1, 2, 3]], d.threshold(0.0, 4, "dual", compat="official"), 8)
    assert out.step_map.tolist() == [[0, 1, 1, 1, 2, 3, 3, 3]]
    assert out.reason[0, [0, 4]].tolist() == [d.Reason.FORCED] * 2
    out = dlmkern.generate(model, [[1, 2, 3]], d.threshold(0.0, 4, "dual"), 8)
    assert out.step_map.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_dtypes(dtype: str) -> None:
    model = load("llada_seed0", dtype)
    for cache in CACHES:
        out = dlmkern.generate(model, PROMPTS, d.threshold(0.5, 6, cache), 13)
        assert (out.tokens < model.config.mask_token_id).all()


def test_a_bare_callable_has_no_cache() -> None:
    with pytest.raises(
        ValueError, match=r"cache: DualCache.* needs a model of dlmkern.models, .* got HashModel"
    ):
        dlmkern.generate(HashModel(), [[1]], d.threshold(cache="dual"), 4, mask_token_id=9)
