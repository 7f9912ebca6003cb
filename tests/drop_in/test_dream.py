"""`drop_in.dream.diffusion_generate` and the model's method: arguments, the decoders behind them, history."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import dlmkern
from dlmkern import decoders as d
from dlmkern.drop_in.dream import DreamModelOutput, diffusion_generate
from tests.decoders.support import DATA, MASK
from tests.drop_in.support import OfficialModel, padded

PROMPT = torch.tensor([[333, 148, 291], [5, 6, 7]])
G = 12


@pytest.fixture(scope="module")
def model() -> Any:
    return dlmkern.load_model(DATA / "models" / "dream_seed0", dtype="float64")


def tokens(model: Any, prompt: Tensor = PROMPT, **settings: Any) -> Tensor:
    result = diffusion_generate(model, prompt, **({"max_new_tokens": G, "seed": 3} | settings))
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("compat", [None, "official"])
@pytest.mark.parametrize(
    ("settings", "decoder"),
    [
        ({"steps": 6}, {"alg": "origin", "steps": 6}),
        (
            {"alg": "maskgit_plus", "steps": 20, "alg_temp": 0.5, "eps": 0.01},
            {"alg": "maskgit_plus", "steps": 20, "alg_temp": 0.5, "eps": 0.01},
        ),
        ({"alg": "topk_margin", "steps": 12}, {"alg": "topk_margin", "steps": 12}),
        (
            {"alg": "entropy", "steps": 9, "block_length": 5},
            {"alg": "entropy", "steps": 9, "block_length": 5, "cache": "prefix"},
        ),
        (
            {"alg": "entropy", "steps": 12, "block_length": 4, "dual_cache": True},
            {"alg": "entropy", "steps": 12, "block_length": 4, "cache": "dual"},
        ),
        (
            {"alg": "confidence_threshold", "block_length": 5, "threshold": 0.3},
            {"alg": "confidence_threshold", "block_length": 5, "tau": 0.3, "cache": "prefix"},
        ),
        (
            {"alg": "confidence_threshold", "block_length": 5, "dual_cache": True},
            {"alg": "confidence_threshold", "block_length": 5, "tau": 0.9, "cache": "dual"},
        ),
    ],
)
def test_is_dream(settings: dict[str, Any], decoder: dict[str, Any], compat: str | None, model: Any) -> None:
    draw = {"temperature": 0.4, "top_p": 0.9, "top_k": 40}
    out = dlmkern.generate(model, PROMPT, d.dream(compat=compat, **decoder), G, seed=3, **draw)
    assert torch.equal(tokens(model, compat=compat, **settings, **draw), torch.stack(out.sequences))


def test_threshold_outside_blocks(model: Any) -> None:
    """`steps` matters with compat="official" only."""
    settings: dict[str, Any] = {"alg": "confidence_threshold", "threshold": 0.3, "output_history": True}
    for compat, steps, decoder in (
        (None, 512, d.dream("confidence_threshold", tau=0.3)),
        ("official", 6, d.dream("confidence_threshold", 6, tau=0.3, compat="official")),
    ):
        result = model.diffusion_generate(
            PROMPT, max_new_tokens=G, steps=steps, return_dict_in_generate=True, compat=compat, **settings
        )
        out = dlmkern.generate(model, PROMPT, decoder, G)
        assert torch.equal(result.sequences, torch.stack(out.sequences))
        assert len(result.history) == out.nfe.max()
    with pytest.raises(
        ValueError, match=r"steps that divide gen_length; got .* gen_length = 12, steps = 512"
    ):
        tokens(model, alg="confidence_threshold", compat="official")


def test_defaults(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """512 steps of "origin"; 20 tokens, if nobody says how many."""
    seen: list[Any] = []

    def open_stream(*args: Any, **settings: Any) -> Any:
        seen.extend((*args[3:], settings))
        return dlmkern.generate_stream(model, PROMPT, "vanilla", 1)

    monkeypatch.setattr("dlmkern.drop_in.dream.open_stream", open_stream)
    diffusion_generate(model, PROMPT)
    rest = {"mask_token_id": 511, "seed": None, "temperature": 0.0, "top_p": None, "top_k": None}
    assert seen == [None, d.dream("origin", 512), 20, rest]


@pytest.mark.parametrize("compat", [None, "official"])
def test_one_step_a_block(compat: str | None, model: Any) -> None:
    """Officially, it commits the first token of each block and leaves the others masked."""
    assert 511 not in tokens(model, steps=3, alg="entropy", block_length=4, compat=compat)


def test_method(model: Any) -> None:
    settings: dict[str, Any] = {"max_new_tokens": G, "steps": 6, "alg": "entropy"}
    expected = diffusion_generate(model, PROMPT, **settings)
    assert torch.equal(model.diffusion_generate(PROMPT, **settings), expected)
    assert torch.equal(model.diffusion_generate(inputs=PROMPT, **settings), expected)
    config = SimpleNamespace(**settings)
    assert torch.equal(model.diffusion_generate(PROMPT, config), expected)
    assert torch.equal(model.diffusion_generate(PROMPT, generation_config=config), expected)


def test_generation_config(model: Any) -> None:
    """Its None means the default, other attributes are not looked at, and arguments win."""
    settings: dict[str, Any] = {"alg": "entropy", "steps": 4, "temperature": 0.5, "top_p": 0.8}
    expected = tokens(model, **settings)
    config = SimpleNamespace(
        **settings, eps=None, max_length=20, generation_tokens_hook_func=print, do_sample=1
    )
    assert torch.equal(tokens(model, generation_config=config), expected)
    config.steps = 12
    assert torch.equal(tokens(model, generation_config=config, steps=4), expected)
    config = transformers.GenerationConfig(max_new_tokens=G, temperature=0.5, top_k=None, top_p=0.8)
    other = tokens(
        model, generation_config=config, max_new_tokens=None, max_length=3 + G, alg="entropy", steps=4
    )
    assert torch.equal(other, expected)
    result = model.diffusion_generate(PROMPT, SimpleNamespace(return_dict_in_generate=True, steps=20))
    assert isinstance(result, DreamModelOutput)
    assert result.sequences.shape == (2, 23)
    assert result.history is None


def test_lengths(model: Any) -> None:
    settings: dict[str, Any] = {"steps": 4, "alg": "entropy", "seed": 0}
    expected = diffusion_generate(model, PROMPT, max_new_tokens=7, **settings)
    assert torch.equal(diffusion_generate(model, PROMPT, max_length=10, **settings), expected)
    assert torch.equal(
        diffusion_generate(model, PROMPT, max_length=99, max_new_tokens=7, **settings), expected
    )
    assert diffusion_generate(model, PROMPT, max_length=20, **settings).shape == (2, 20)
    config = SimpleNamespace(max_length=20)  # what a configuration says that has not been told
    assert diffusion_generate(model, PROMPT, config, **settings).shape == (2, 23)
    config = SimpleNamespace(max_length=10)
    assert torch.equal(diffusion_generate(model, PROMPT, config, **settings), expected)


@pytest.mark.parametrize("block_length", [None, 5])
@pytest.mark.parametrize("side", ["left", "right"])
def test_history(side: str, block_length: int | None, model: Any) -> None:
    """Each entry fills masks of the one before, and the last is the result."""
    ids, mask = padded([[1, 3, 5, 7], [4], [2, 2, 8]], side)
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    result = model.diffusion_generate(
        ids,
        attention_mask=mask,
        max_new_tokens=G,
        steps=9,
        alg="confidence_threshold" if block_length else "entropy",
        threshold=0.3,
        block_length=block_length,
        return_dict_in_generate=True,
        output_history=True,
    )
    handle.remove()
    assert len(result.history) == len(calls)
    assert block_length or len(calls) == 9
    before = torch.cat((ids, torch.full((3, G), 511)), dim=1)
    for after in result.history:
        filled = before != after
        assert (before[filled] == 511).all()
        assert filled.any() or block_length is None  # Dream's schedule may leave a step without any
        before = after
    assert torch.equal(before, result.sequences)
    assert 511 not in result.sequences


def test_the_result_is_a_model_output(model: Any) -> None:
    plain = tokens(model, steps=4, output_history=True)
    result = model.diffusion_generate(PROMPT, max_new_tokens=G, steps=4, seed=3, return_dict_in_generate=True)
    assert torch.equal(result.sequences, plain)
    assert torch.equal(result["sequences"], plain)
    assert result.history is None


def test_num_return_sequences(model: Any) -> None:
    """The answers to a prompt follow each other and differ."""
    settings: dict[str, Any] = {"steps": 6, "temperature": 1.0, "num_return_sequences": 3}
    ids, mask = padded([[1, 3, 5, 7], [4]], "left")
    rows = tokens(model, ids, attention_mask=mask, seed=10, **settings)
    assert torch.equal(rows[:, :4], ids.repeat_interleave(3, 0))
    assert len(rows.unique(dim=0)) == 6
    for copy in range(3):
        settings = {"steps": 6, "temperature": 1.0, "seed": 10 + copy}
        assert torch.equal(rows[[copy, 3 + copy]], tokens(model, ids, attention_mask=mask, **settings))
    assert torch.equal(
        rows,
        tokens(
            model,
            ids.repeat_interleave(3, 0),
            attention_mask=mask.repeat_interleave(3, 0),
            steps=6,
            temperature=1.0,
            seed=[10, 11, 12] * 2,
        ),
    )


def test_special_tokens_have_no_effect(model: Any) -> None:
    expected = tokens(model, steps=4, alg="entropy")
    answer = int(expected[0, 5])
    special = {"eos_token_id": answer, "pad_token_id": answer, "bos_token_id": answer, "mask_token_id": 511}
    assert torch.equal(tokens(model, steps=4, alg="entropy", **special), expected)


def test_models_that_are_not_shifted() -> None:
    """Any model, without a cache."""
    model = OfficialModel()
    prompt = torch.tensor([[1, 3], [5, 7]])
    out = dlmkern.generate(model, prompt, d.dream("entropy", 4), G)
    result = tokens(model, prompt, steps=4, alg="entropy")
    assert torch.equal(result, torch.stack(out.sequences))
    with pytest.raises(ValueError, match=r"needs a model of dlmkern\.models"):
        tokens(model, prompt, steps=4, alg="entropy", block_length=G)
    with pytest.raises(TypeError, match="mask_token_id must be an int, got None"):
        tokens(lambda ids: model(ids).logits, prompt)
    bare = tokens(lambda ids: model(ids).logits, prompt, mask_token_id=MASK, steps=4, alg="entropy")
    assert MASK not in bare


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"generation_logits_hook_func": print},
            TypeError,
            "generation_logits_hook_func: hook functions are",
        ),
        (
            {"generation_tokens_hook_func": print},
            TypeError,
            "generation_tokens_hook_func: hook functions are",
        ),
        (
            {"gen_length": 5},
            TypeError,
            "unknown argument 'gen_length', known: attention_mask, max_new_tokens",
        ),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be a positive integer"),
        (
            {"max_new_tokens": None, "max_length": 3},
            ValueError,
            "max_length must exceed the prompt's 3 tokens",
        ),
        ({"max_new_tokens": None, "max_length": "9"}, ValueError, "max_length must be a positive integer"),
        ({"steps": 0}, ValueError, "steps must be a positive integer"),
        ({"steps": 7, "block_length": 6}, ValueError, "steps must be a multiple of the number of blocks, 2"),
        ({"eps": 0}, ValueError, r"eps must lie in \(0, 1\)"),
        ({"alg": "random"}, ValueError, "alg must be one of origin, maskgit_plus"),
        ({"alg_temp": -1}, ValueError, "alg_temp must be a finite number"),
        ({"temperature": None}, TypeError, "temperature must be a number"),
        ({"top_p": 0}, ValueError, r"top_p must lie in \(0, 1\]"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1"),
        ({"num_return_sequences": 0}, ValueError, "num_return_sequences must be a positive integer"),
        ({"mask_token_id": 5}, ValueError, "mask_token_id must be the model's mask_token_id = 511, got 5"),
        ({"threshold": 2}, ValueError, r"threshold must lie in \[0, 1\], got 2"),
        ({"block_length": 0}, ValueError, "block_length must be a positive integer"),
        ({"dual_cache": True}, ValueError, "dual_cache needs a block_length"),
        ({"dual_cache": "yes", "block_length": 4}, TypeError, "dual_cache must be a bool, got 'yes'"),
        ({"attention_mask": "full"}, TypeError, "attention_mask must be a tensor, got str"),
    ],
)
def test_bad_input(settings: dict[str, Any], error: type[Exception], message: str, model: Any) -> None:
    with pytest.raises(error, match=message):
        tokens(model, **settings)
