"""Bad input ends in an error that names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern import decoders as d
from tests.decoders.support import DATA, MASK, VOCAB, HashModel, constant_model


def generate(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "model": HashModel(),
        "input_ids": [[1, 2], [3]],
        "decoder": "threshold",
        "gen_length": 6,
        "mask_token_id": MASK,
        "vocab_size": VOCAB,
    }
    return dlmkern.generate(**(arguments | changes))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no mask": ({"mask_token_id": None}, ValueError, "mask_token_id is needed"),
    "no eos": ({"stop_at_eos": True}, ValueError, "eos_token_id is needed"),
    "eos is mask": ({"stop_at_eos": True, "eos_token_id": MASK}, ValueError, "must differ"),
    "eos outside": (
        {"stop_at_eos": True, "eos_token_id": VOCAB},
        ValueError,
        "below vocab_size = 12, got 12",
    ),
    "negative mask": ({"mask_token_id": -1}, ValueError, "mask_token_id must be at least 0, got -1"),
    "mask is a float": ({"mask_token_id": 9.0}, TypeError, "mask_token_id must be an int, got 9.0"),
    "no tokens": ({"gen_length": 0}, ValueError, "gen_length must be at least 1, got 0"),
    "length is a float": ({"gen_length": 8.0}, TypeError, "gen_length must be an int, got 8.0"),
    "length is a bool": ({"gen_length": True}, TypeError, "gen_length must be an int, got True"),
    "empty vocabulary": ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1"),
    "large vocabulary": ({"vocab_size": VOCAB + 1}, ValueError, "12 logits .* fewer than vocab_size = 13"),
    "unknown decoder": (
        {"decoder": "magic"},
        ValueError,
        "'magic', known: vanilla, threshold, factor, dream, dep",
    ),
    "no decoder": ({"decoder": None}, TypeError, "decoder must be a name or a Decoder, got NoneType"),
    "negative temperature": ({"temperature": -0.1}, ValueError, "temperature must be a finite .* got -0.1"),
    "nan temperature": ({"temperature": float("nan")}, ValueError, "temperature must be a finite"),
    "infinite temperature": ({"temperature": float("inf")}, ValueError, "temperature must be a finite"),
    "text temperature": ({"temperature": "1"}, TypeError, "temperature must be a number, got str"),
    "top_p 0": ({"top_p": 0}, ValueError, r"top_p must lie in \(0, 1\], got 0"),
    "top_p 1.5": ({"top_p": 1.5}, ValueError, r"top_p must lie in \(0, 1\], got 1.5"),
    "top_p nan": ({"top_p": float("nan")}, ValueError, "top_p must lie in"),
    "top_p text": ({"top_p": "1"}, TypeError, "top_p must be a number, got str"),
    "top_k 0": ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    "top_k 2.0": ({"top_k": 2.0}, TypeError, "top_k must be an int, got 2.0"),
    "few seeds": ({"seed": [1]}, ValueError, "2 rows, 1 seeds"),
    "float seed": ({"seed": 1.5}, TypeError, "seed must be an int or a list of them, got float"),
    "float seeds": ({"seed": [1, 1.5]}, TypeError, "seed must be an int, got 1.5"),
    "large seed": ({"seed": 2**63}, ValueError, "seed must be below 9223372036854775808"),
    "no prompts": ({"input_ids": []}, ValueError, "input_ids holds no prompt"),
    "no rows": ({"input_ids": torch.zeros(0, 4, dtype=torch.int64)}, ValueError, "holds no prompt"),
    "one dimension": ({"input_ids": torch.tensor([1, 2])}, ValueError, r"shape \[B, P\], got \[2\]"),
    "one list": ({"input_ids": [1, 2]}, TypeError, r"input_ids\[0\] must be a list .* got int; a single"),
    "float ids": ({"input_ids": torch.ones(1, 2)}, TypeError, "must be int64, got torch.float32"),
    "int32 ids": ({"input_ids": torch.ones(1, 2).int()}, TypeError, "must be int64, got torch.int32"),
    "int32 row": ({"input_ids": [torch.ones(2).int()]}, TypeError, r"input_ids\[0\] must be int64 of shape"),
    "float token": (
        {"input_ids": [[1], [1, 2.0]]},
        TypeError,
        r"input_ids\[1\]\[1\] must be an int, got 2.0",
    ),
    "an int": ({"input_ids": 3}, TypeError, "input_ids must be .* got int"),
    "mask in a prompt": ({"input_ids": [[1], [1, MASK]]}, ValueError, "row 1: .* mask token 9 at position 1"),
    "negative token": ({"input_ids": [[1], [1, -1]]}, ValueError, "row 1: .* token -1 at position 1"),
    "large token": ({"input_ids": [[VOCAB]]}, ValueError, r"row 0: .* 12 at position 0, .* \[0, 12\)"),
    "text without tokenizer": ({"input_ids": "hello"}, ValueError, "needs a tokenizer"),
    "text and ids": ({"input_ids": ["hello", [1]]}, TypeError, "mixes text and token ids"),
    "template for ids": ({"chat_template": True}, ValueError, "chat_template applies to text"),
    "no model": ({"model": None}, TypeError, "model must be callable, got NoneType"),
    "no logits": ({"model": lambda ids: None}, TypeError, "floating-point logits, got NoneType"),
    "integer logits": ({"model": lambda ids: ids}, TypeError, "floating-point logits, got torch.int64"),
    "flat logits": (
        {"model": lambda ids: ids.double()},
        ValueError,
        r"shape \[1, 7, V\], got \[1, 7\]",
    ),
    "few positions": (
        {"model": lambda ids: HashModel()(ids)[:, :3]},
        ValueError,
        r"shape \[1, 7, V\], got \[1, 3, 12\]",
    ),
    "too many steps": (
        {"decoder": d.vanilla(3, 7)},
        ValueError,
        "number of blocks, 2, and gen_length, 6; got 7",
    ),
    "too few steps": (
        {"decoder": d.vanilla(3, 1)},
        ValueError,
        "number of blocks, 2, and gen_length, 6; got 1",
    ),
    "dream steps and blocks": (
        {"decoder": d.dream(steps=3, block_length=3)},
        ValueError,
        "steps must be a multiple of the number of blocks, 2, got steps = 3",
    ),
    "dream steps without blocks": (
        {"decoder": d.Decoder(d.DepGABlocks(), d.DreamSchedule(steps=4))},
        ValueError,
        "steps needs blocks whose number is known",
    ),
    "official steps": (
        {"decoder": d.dream("confidence_threshold", 4, compat="official")},
        ValueError,
        "got 1 blocks, gen_length = 6, steps = 4",
    ),
    "official steps in blocks": (
        {
            "decoder": d.Decoder(
                d.FixedBlocks(3), d.DreamSchedule("confidence_threshold", 6, compat="official")
            )
        },
        ValueError,
        "needs one block .* got 2 blocks, gen_length = 6, steps = 6",
    ),
    "steps without blocks": (
        {"decoder": d.Decoder(d.DepGABlocks(), d.OnePerStep(steps=4))},
        ValueError,
        "steps needs blocks whose number is known",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_generate(name: str) -> None:
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        generate(**changes)


SETTINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "block 0": (lambda: d.vanilla(0), "block_length must be a positive integer, got 0"),
    "block -1": (lambda: d.threshold(0.9, -1), "block_length must be a positive integer, got -1"),
    "block 2.0": (lambda: d.FixedBlocks(2.0), "block_length must be .* got 2.0"),  # type: ignore[arg-type]
    "steps 0": (lambda: d.vanilla(32, 0), "steps must be a positive integer, got 0"),
    "remasking": (lambda: d.vanilla(remasking="high"), "remasking must be .* got 'high'"),
    "cfg -1": (lambda: d.vanilla(cfg_scale=-1), "cfg_scale must be a finite number of at least 0, got -1"),
    "tau 2": (lambda: d.threshold(2.0), r"tau must lie in \[0, 1\], got 2.0"),
    "tau nan": (lambda: d.threshold(float("nan")), "tau must be a number, got nan"),
    "tau text": (lambda: d.threshold("0.9"), "tau must be a number, got '0.9'"),  # type: ignore[arg-type]
    "tau_low -1": (lambda: d.depcap(tau_low=-0.1), r"tau_low must lie in \[0, 1\], got -0.1"),
    "order": (lambda: d.depcap(tau_low=0.9, tau_high=0.8), "tau_low must not exceed tau_high"),
    "gamma": (lambda: d.depcap(gamma=float("nan")), "gamma must be a number, got nan"),
    "strict": (lambda: d.depcap(strict=1), "strict must be a bool, got 1"),  # type: ignore[arg-type]
    "lam": (lambda: d.depcap(lam=-1), "lam must be a finite number of at least 0, got -1"),
    "l_min": (lambda: d.depcap(l_min=0), "l_min must be a positive integer, got 0"),
    "l_max": (lambda: d.depcap(l_min=9, l_max=8), "l_min must not exceed l_max"),
    "kl": (lambda: d.depcap(kl="approximate"), 'kl must be "exact" or "topk"'),
    "topk": (lambda: d.depcap(topk=0), "topk must be a positive integer, got 0"),
    "padding": (lambda: d.depcap(padding="none"), 'padding must be "zero" or "reflect"'),
    "cache": (lambda: d.depcap(cache="triple"), 'cache must be None, "prefix", "dual", .* got \'triple\''),
    "cache class": (lambda: d.threshold(cache=d.DualCache), "cache must be None"),  # type: ignore[arg-type]
    "cache list": (lambda: d.Decoder(d.FixedBlocks(), d.CAP(), cache=[]), "cache must be"),  # type: ignore[arg-type]
    "refresh 0": (lambda: d.DualCache(0), "refresh must be a positive integer, got 0"),
    "refresh 1.5": (lambda: d.PrefixCache(1.5), "refresh must be a positive integer"),  # type: ignore[arg-type]
    "factor 0": (lambda: d.factor(0), "factor must be positive, got 0"),
    "factor nan": (lambda: d.factor(float("nan")), "factor must be a number, got nan"),
    "factor compat": (lambda: d.Factor(compat="old"), "compat must be None or \"official\", got 'old'"),
    "alg": (lambda: d.dream("margin"), "alg must be one of origin, .* got 'margin'"),
    "dream steps": (lambda: d.dream(steps=0), "steps must be a positive integer, got 0"),
    "eps 0": (lambda: d.dream(eps=0.0), r"eps must lie in \(0, 1\), got 0.0"),
    "eps nan": (lambda: d.dream(eps=float("nan")), "eps must be a number, got nan"),
    "alg_temp": (lambda: d.dream(alg_temp=-1.0), "alg_temp must be a finite number of at least 0, got -1.0"),
    "dream tau": (lambda: d.dream(tau=-0.5), r"tau must lie in \[0, 1\], got -0.5"),
    "no rule": (lambda: d.Decoder(d.FixedBlocks(), 0.9), "unmask must be an UnmaskingRule, got 0.9"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    make, message = SETTINGS[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_too_long() -> None:
    model = dlmkern.load_model(DATA / "models" / "llada_seed0")
    limit = model.config.max_sequence_length
    with pytest.raises(
        ValueError, match=rf"row 1: the prompt's 3 tokens and gen_length = {limit - 2} exceed .* {limit}"
    ):
        dlmkern.generate(model, [[1], [1, 2, 3]], gen_length=limit - 2)


@pytest.mark.parametrize(
    "decoder", [d.vanilla(), d.threshold(), d.depcap(l_min=6)], ids=["vanilla", "threshold", "depcap"]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_without_distribution(decoder: d.Decoder, value: float) -> None:
    """The error names row, position and forward pass."""
    calls = []

    def model(ids: Tensor) -> Tensor:
        calls.append(ids)
        logits = HashModel(peak=0.1)(ids)
        if len(calls) == 3:
            logits[1, ids[1] == MASK] = value
        return logits

    with pytest.raises(FloatingPointError) as caught:
        generate(model=model, input_ids=[[1, 2], [3, 4]], decoder=decoder)
    first = int((calls[-1][1] == MASK).nonzero()[0])
    assert f"row 1: the logits of position {first} hold no distribution" in str(caught.value)
    assert "in forward pass 2" in str(caught.value)


@pytest.mark.parametrize("decoder", ["vanilla", "threshold", "depcap"])
def test_logits_that_do_not_matter(decoder: str) -> None:
    """Rows of the model's output for the prompt and for what is committed may hold anything."""

    def model(ids: Tensor) -> Tensor:
        logits = HashModel()(ids)
        logits[ids != MASK] = torch.nan
        return logits

    assert torch.equal(generate(model=model, decoder=decoder).tokens, generate(decoder=decoder).tokens)


def test_nothing_but_the_mask() -> None:
    """Neither the mask nor padded ids are an answer."""
    logits = torch.full((1, 8, VOCAB + 2), -torch.inf)
    logits[..., MASK] = 1.0
    logits[..., VOCAB:] = 2.0
    with pytest.raises(FloatingPointError, match="no allowed token above -inf"):
        generate(model=constant_model(logits), input_ids=[[1]])


@pytest.mark.parametrize("decoder", ["vanilla", "threshold", "depcap"])
@pytest.mark.parametrize("compat", [None, "official"])
def test_the_mask_is_always_best(decoder: str, compat: str | None) -> None:
    def model(ids: Tensor) -> Tensor:
        logits = HashModel(VOCAB + 2)(ids)
        logits[..., MASK] = 50.0
        logits[..., VOCAB:] = 60.0
        return logits

    out = generate(model=model, decoder=d.PRESETS[decoder](compat=compat))
    assert (out.tokens != MASK).all()
    assert (out.tokens < VOCAB).all()
    assert (out.confidence < 1e-9).all() == (compat == "official")


def test_what_is_allowed() -> None:
    """An empty prompt, a vocabulary that need not be named, a mask beyond the logits, ints as thresholds."""
    assert generate(input_ids=[[]]).tokens.shape == (1, 6)
    assert generate(vocab_size=None).tokens.shape == (2, 6)
    assert generate(mask_token_id=VOCAB + 5, decoder=d.threshold(1)).tokens.shape == (2, 6)
    assert generate(input_ids=[torch.tensor([1, 2]), [3]]).sequences[0].tolist()[:2] == [1, 2]
    assert generate(input_ids=torch.tensor([[1, 2], [3, 4]])).tokens.shape == (2, 6)
    assert generate(gen_length=1, decoder="depcap").block_lengths == [[1], [1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: d.FixedBlocks(2**63), "block_length"),
        (lambda: d.vanilla(cfg_scale=10**400), "cfg_scale"),
        (lambda: d.depcap(gamma=10**400), "gamma"),
        (lambda: d.depcap(lam=10**400), "lam"),
        (lambda: dlmkern.generate(dlmkern.models.tiny(), [[1]], gen_length=2**62), "gen_length"),
        (lambda: dlmkern.generate(dlmkern.models.tiny(), [[1]], temperature=10**400), "temperature"),
        (lambda: dlmkern.generate(dlmkern.models.tiny(), [[1]], mask_token_id=2**70), "mask_token_id"),
        (lambda: dlmkern.generate(lambda ids: ids, [[2**70]], mask_token_id=3), "row 0"),
    ],
)
def test_numbers_beyond_reason_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_may_write_into_its_ids() -> None:
    def model(ids: Tensor, lengths: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        logits = torch.nn.functional.one_hot((positions + ids[:, :1]) % 19, 20).double()
        ids.fill_(3)
        return logits

    out = dlmkern.generate(model, [[5]], "threshold", 6, mask_token_id=19)
    assert out.sequences[0].tolist() == [5, 6, 7, 8, 9, 10, 11]


def test_a_failed_forward_pass_counts_for_no_row() -> None:
    calls = 0

    def model(ids: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        logits = torch.randn(*ids.shape, 9, generator=torch.Generator().manual_seed(0))
        if calls == 2:
            logits[1] = torch.nan
        return logits

    stream = dlmkern.generate_stream(model, [[1], [1]], "vanilla", 4, mask_token_id=8)
    with pytest.raises(FloatingPointError, match="row 1"):
        list(stream)
    assert stream.result().nfe.tolist() == [4, 4]
