"""`drop_in.fast_dllm`: signatures, the decoders behind the functions, and where the official code fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern import decoders as d
from dlmkern.drop_in import fast_dllm
from tests.decoders.support import DATA, MASK
from tests.drop_in.support import OfficialModel, defaults

FUNCTIONS: dict[str | None, Callable[..., tuple[Tensor, int]]] = {
    None: fast_dllm.generate,
    "prefix": fast_dllm.generate_with_prefix_cache,
    "dual": fast_dllm.generate_with_dual_cache,
}
caches = pytest.mark.parametrize("cache", FUNCTIONS)


@caches
def test_signatures(cache: str | None) -> None:
    positional, other = defaults(FUNCTIONS[cache])
    official = {
        "model": inspect.Parameter.empty,
        "prompt": inspect.Parameter.empty,
        "steps": 128,
        "gen_length": 128,
        "block_length": 128,
        "temperature": 0.0,
        "remasking": "low_confidence",
        "mask_id": 126336,
        "threshold": None,
        "factor": None,
        "step_callback": None,
    }
    assert list(positional.items()) == list(official.items())
    assert other == {"attention_mask", "compat", "seed"} | ({"cache"} if cache is None else set())


@pytest.fixture(scope="module")
def model() -> Any:
    return dlmkern.load_model(DATA / "models" / "llada_seed0", dtype="float64")


@caches
@pytest.mark.parametrize("compat", [None, "official"])
@pytest.mark.parametrize("method", ["vanilla", "random", "threshold", "factor"])
def test_are_decoders(method: str, compat: str | None, cache: str | None, model: Any) -> None:
    settings: dict[str, Any]
    if method == "vanilla":
        settings, decoder = {"steps": 8}, d.vanilla(6, 8, cache, compat=compat)
    elif method == "random":
        settings = {"steps": 8, "remasking": "random"}
        decoder = d.vanilla(6, 8, cache, remasking="random", compat=compat)
    elif method == "threshold":
        settings, decoder = {"threshold": 0.4, "steps": 1}, d.threshold(0.4, 6, cache, compat=compat)
    else:
        settings, decoder = {"factor": 1.2, "steps": 1}, d.factor(1.2, 6, cache, compat=compat)
    prompt = torch.tensor([[5, 6, 7], [400, 3, 3], [1, 2, 3]])
    called: list[int] = []
    sequences, nfe = FUNCTIONS[cache](
        model,
        prompt,
        gen_length=16,
        block_length=6,
        temperature=0.3,
        mask_id=499,
        step_callback=called.append,
        compat=compat,
        seed=[4, 5, 6],
        **settings,
    )
    stream = dlmkern.generate_stream(model, prompt, decoder, 16, 0.3, seed=[4, 5, 6])
    assert nfe == len(list(stream))
    assert called == list(range(nfe))
    out = stream.result()
    assert torch.equal(sequences, torch.stack(out.sequences))
    assert out.nfe.max() <= nfe
    assert cache is not None or out.nfe.max() == nfe


@pytest.mark.parametrize("cache", ["prefix", "dual", d.DualCache(refresh=2)])
def test_cache(cache: str | d.DualCache, model: Any) -> None:
    prompt = torch.tensor([[5, 6, 7], [400, 3, 3]])
    sequences, nfe = fast_dllm.generate(model, prompt, 12, 12, 6, mask_id=499, cache=cache)
    stream = dlmkern.generate_stream(model, prompt, d.vanilla(6, cache=cache), 12)
    assert nfe == len(list(stream))
    assert torch.equal(sequences, torch.stack(stream.result().sequences))
    with pytest.raises(ValueError, match="cache must be None"):
        fast_dllm.generate(model, prompt, mask_id=499, cache="both")


def test_factor_comes_before_threshold() -> None:
    prompt, settings = torch.tensor([[1, 3]]), {"gen_length": 20, "factor": 1.0, "mask_id": MASK}
    _, nfe = fast_dllm.generate(OfficialModel(), prompt, **settings)  # type: ignore[arg-type]
    assert nfe > 1
    _, both = fast_dllm.generate(OfficialModel(), prompt, threshold=0.0, **settings)  # type: ignore[arg-type]
    assert both == nfe


def test_nfe_counts_the_calls() -> None:
    model = OfficialModel()
    prompt = torch.tensor([[1, 3], [5, 7], [0, 0]])
    sequences, nfe = fast_dllm.generate(
        model, prompt, gen_length=20, block_length=5, threshold=0.8, mask_id=MASK
    )
    assert nfe == model.calls
    assert MASK not in sequences


@caches
@pytest.mark.parametrize(
    ("steps", "gen_length", "block_length", "nfe"), [(128, 10, 32, 10), (5, 10, 4, 5), (128, 10, 4, 10)]
)
def test_any_lengths(
    steps: int, gen_length: int, block_length: int, nfe: int, cache: str | None, model: Any
) -> None:
    """Officially blocks must divide the answer, and the number of blocks the steps."""
    prompt = torch.tensor([[5, 6, 7], [400, 3, 3]])
    settings = {"gen_length": gen_length, "block_length": block_length, "mask_id": 499}
    sequences, passes = FUNCTIONS[cache](model, prompt, steps=steps, **settings)
    assert passes == nfe
    assert 499 not in sequences
    assert sequences.shape == (2, 3 + gen_length)
    for rule in ({"threshold": 0.3}, {"factor": 1.0}):
        sequences, passes = FUNCTIONS[cache](model, prompt, **settings, **rule)
        assert 499 not in sequences


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"steps": 2, "block_length": 4}, ValueError, "steps must lie between the number of blocks, 3"),
        ({"gen_length": -1}, ValueError, "gen_length must be a positive integer"),
        ({"block_length": 2.0}, ValueError, "block_length must be a positive integer"),
        ({"threshold": 1.5}, ValueError, r"threshold must lie in \[0, 1\], got 1.5"),
        ({"threshold": "high"}, ValueError, "threshold must be a number, got 'high'"),
        ({"factor": 0}, ValueError, "factor must be positive, got 0"),
        ({"remasking": "entropy"}, ValueError, "remasking must be"),
        ({"remasking": "random", "factor": 1.0}, ValueError, 'remasking must be "low_confidence" with a'),
        ({"mask_id": 5}, ValueError, "mask_id must be the model's mask_token_id = 9, got 5"),
        ({"mask_id": True}, TypeError, "mask_id must be an int"),
    ],
)
@caches
def test_bad_input(cache: str | None, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"steps": 12, "gen_length": 12, "mask_id": MASK}
    with pytest.raises(error, match=message):
        FUNCTIONS[cache](OfficialModel(), torch.tensor([[1]]), **(good | settings))


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_caches_need_own_models(cache: str) -> None:
    with pytest.raises(ValueError, match=r"cache: .* needs a model of dlmkern\.models, .* got OfficialModel"):
        FUNCTIONS[cache](OfficialModel(), torch.tensor([[1]]), mask_id=MASK)
