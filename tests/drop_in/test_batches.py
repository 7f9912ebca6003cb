"""Padding: a row of a batch is decoded as it is alone, and the padding stays where it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern.drop_in import dream, fast_dllm, llada
from tests.decoders.support import DATA, MASK
from tests.drop_in.support import PAD, PROMPTS, OfficialModel, padded

Decode = Callable[..., Tensor]
G = 11


def with_llada(model: Any, prompt: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
    mask_id = model.config.mask_token_id
    return llada.generate(
        model, prompt, mask, steps=7, gen_length=G, block_length=4, mask_id=mask_id, **settings
    )


def with_fast_dllm(cache: str, model: Any, prompt: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    function = getattr(fast_dllm, "generate" + cache)
    settings = {"gen_length": G, "block_length": 4, "threshold": 0.4, "mask_id": model.config.mask_token_id}
    sequences: Tensor = function(model, prompt, attention_mask=mask, **settings, **more)[0]
    return sequences


def with_dream(
    block_length: int | None, model: Any, prompt: Tensor, mask: Tensor | None = None, **more: Any
) -> Tensor:
    result = dream.diffusion_generate(
        model,
        prompt,
        attention_mask=mask,
        max_new_tokens=G,
        steps=9,
        alg="entropy",
        block_length=block_length,
        **more,
    )
    assert isinstance(result, Tensor)
    return result


def functions(cached: bool) -> dict[str, Decode]:
    found: dict[str, Decode] = {
        "llada": with_llada,
        "fast_dllm": lambda *args, **more: with_fast_dllm("", *args, **more),
        "dream": lambda *args, **more: with_dream(None, *args, **more),
    }
    if cached:
        found["prefix"] = lambda *args, **more: with_fast_dllm("_with_prefix_cache", *args, **more)
        found["dual"] = lambda *args, **more: with_fast_dllm("_with_dual_cache", *args, **more)
        found["dream prefix"] = lambda *args, **more: with_dream(4, *args, **more)
        found["dream dual"] = lambda *args, **more: with_dream(4, *args, dual_cache=True, **more)
    return found


def check(decode: Decode, model: Any, side: str, **settings: Any) -> None:
    ids, mask = padded(PROMPTS, side)
    together = decode(model, ids, mask, **settings)
    assert together.shape == (len(PROMPTS), ids.shape[1] + G)
    assert torch.equal(together[:, : ids.shape[1]], ids)
    for row, prompt in enumerate(PROMPTS):
        alone = decode(model, torch.tensor([prompt]), **settings)
        assert together[row, ids.shape[1] :].tolist() == alone[0, len(prompt) :].tolist()
        assert model.config.mask_token_id not in alone


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", functions(cached=False))
def test_foreign_models(name: str, side: str, temperature: float) -> None:
    """The model's output is a hash of all that it is shown, so that a single padding token would be seen."""
    check(functions(cached=False)[name], OfficialModel(), side, temperature=temperature, seed=3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", functions(cached=True))
def test_own_models(name: str, side: str) -> None:
    checkpoint = "dream_seed0" if name.startswith("dream") else "llada_seed0"
    model = dlmkern.load_model(DATA / "models" / checkpoint, dtype="float64")
    check(functions(cached=True)[name], model, side)


@pytest.mark.parametrize("name", functions(cached=False))
def test_masks_of_every_dtype(name: str) -> None:
    ids, mask = padded(PROMPTS, "left")
    decode = functions(cached=False)[name]
    expected = decode(OfficialModel(), ids, mask)
    for dtype in (torch.bool, torch.float32, torch.int32):
        assert torch.equal(decode(OfficialModel(), ids, mask.to(dtype)), expected)


@pytest.mark.parametrize("name", functions(cached=False))
def test_the_padding_token_is_a_token(name: str) -> None:
    """Without a mask all of it is prompt, and with one an end-of-sequence token in a prompt stays in it."""
    decode = functions(cached=False)[name]
    ids, mask = padded(PROMPTS, "left")
    model = OfficialModel(eos_token_id=PAD, pad_token_id=PAD)
    everything = decode(model, ids)
    assert torch.equal(everything, decode(model, ids, torch.ones_like(mask)))
    assert not torch.equal(everything, decode(model, ids, mask))
    assert MASK not in everything


@pytest.mark.parametrize("name", functions(cached=False))
def test_bad_prompts_and_masks(name: str) -> None:
    decode, model = functions(cached=False)[name], OfficialModel()
    prompt = "inputs" if name == "dream" else "prompt"
    ids, mask = padded(PROMPTS, "left")
    with pytest.raises(TypeError, match=f"{prompt} must be an int64 tensor, got list"):
        decode(model, PROMPTS)
    with pytest.raises(TypeError, match=rf"{prompt} must be an int64 tensor, got torch\.int32"):
        decode(model, ids.int())
    with pytest.raises(ValueError, match=rf"{prompt} must have shape \[B, P\], got \[6\]"):
        decode(model, ids[0])
    with pytest.raises(ValueError, match=f"{prompt} must hold at least one row"):
        decode(model, ids[:0])
    with pytest.raises(ValueError, match="row 0: the prompt holds the mask token 9 at position 1"):
        decode(model, torch.tensor([[1, MASK]]))
    with pytest.raises(TypeError, match="attention_mask must be a tensor, got int"):
        decode(model, ids, 128)
    with pytest.raises(ValueError, match=rf"attention_mask must have the shape of {prompt}, \[4, 6\], got"):
        decode(model, ids, mask[:, 1:])
    with pytest.raises(ValueError, match="attention_mask hides all of row 1"):
        decode(model, ids, mask * torch.tensor([[1], [0], [1], [1]]))
    with pytest.raises(ValueError, match="in row 0 it is 0 at position 3 between them"):
        decode(model, ids, mask * torch.tensor([1, 1, 1, 0, 1, 1]))
    with pytest.raises(TypeError, match="seed must be an int"):
        decode(model, ids, seed=0.5)
    with pytest.raises(ValueError, match="compat"):
        decode(model, ids, compat="yes")
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        decode(model, ids, temperature=-1.0)
