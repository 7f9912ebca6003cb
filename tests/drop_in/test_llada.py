"""`drop_in.llada.generate`: signature, the decoder behind it, options, and where the official code fails."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern import decoders as d
from dlmkern.drop_in import llada
from tests.decoders.support import DATA, MASK, VOCAB
from tests.drop_in.support import OfficialModel, defaults, padded

PROMPT = torch.tensor([[1, 3, 5, 7], [2, 2, 0, 8]])
EOS, EOT = 4, 6


def test_signature() -> None:
    positional, other = defaults(llada.generate)
    official = {
        "model": inspect.Parameter.empty,
        "prompt": inspect.Parameter.empty,
        "attention_mask": None,
        "steps": 128,
        "gen_length": 128,
        "block_length": 128,
        "temperature": 0.0,
        "cfg_scale": 0.0,
        "remasking": "low_confidence",
        "mask_id": 126336,
        "logits_eos_inf": False,
        "confidence_eos_eot_inf": False,
    }
    assert list(positional.items()) == list(official.items())
    assert other == {"compat", "seed"}


def test_calls_of_the_official_examples() -> None:
    """Newer ones give a mask by position, older ones go on to keywords after the prompt."""
    settings: dict[str, Any] = {"steps": 8, "gen_length": 8, "block_length": 4, "mask_id": MASK}
    ids, mask = padded([[1, 3, 5, 7], [2, 8]], "left")
    newer = llada.generate(OfficialModel(), ids, mask, **settings)
    assert torch.equal(newer, llada.generate(OfficialModel(), ids, attention_mask=mask, **settings))
    older = llada.generate(OfficialModel(), ids[:1], **settings)
    assert torch.equal(older, newer[:1])
    assert not torch.equal(llada.generate(OfficialModel(), ids, **settings), newer)


@pytest.mark.parametrize("compat", [None, "official"])
@pytest.mark.parametrize(
    ("settings", "decoder"),
    [
        ({"steps": 12, "block_length": 6}, {"block_length": 6, "steps": 12}),
        (
            {"steps": 6, "block_length": 6, "cfg_scale": 1.5},
            {"block_length": 6, "steps": 6, "cfg_scale": 1.5},
        ),
        ({"steps": 4, "remasking": "random"}, {"block_length": 128, "steps": 4, "remasking": "random"}),
    ],
)
def test_is_vanilla(settings: dict[str, Any], decoder: dict[str, Any], compat: str | None) -> None:
    model = OfficialModel()
    for temperature in (0.0, 0.9):
        sequences = llada.generate(
            model,
            PROMPT,
            gen_length=12,
            temperature=temperature,
            mask_id=MASK,
            seed=5,
            compat=compat,
            **settings,
        )
        out = dlmkern.generate(model, PROMPT, d.vanilla(compat=compat, **decoder), 12, temperature, seed=5)
        assert torch.equal(sequences, torch.stack(out.sequences))
        assert sequences.dtype == torch.int64


def test_seeds() -> None:
    def tokens(seed: int | list[int] | None) -> list[list[int]]:
        rows: list[list[int]] = llada.generate(
            OfficialModel(peak=1.0), PROMPT, gen_length=16, temperature=1.0, mask_id=MASK, seed=seed
        ).tolist()
        return rows

    assert tokens(1) == tokens(1) == tokens([1, 1]) != tokens(2)
    torch.manual_seed(0)
    first = tokens(None)
    assert tokens(None) != first
    torch.manual_seed(0)
    assert tokens(None) == first


@pytest.mark.parametrize(
    ("steps", "gen_length", "block_length", "calls"),
    [
        (12, 12, 128, 12),  # officially the block must not be longer than the answer
        (8, 14, 4, 8),  # nor end after it
        (7, 12, 4, 7),  # nor may there be 7 steps for 3 blocks
        (128, 12, 4, 12),  # 43 steps for a block of 4 tokens, of which 39 would commit nothing
        (128, 14, 4, 14),
        (3, 12, 4, 3),
        (1, 5, 5, 1),
    ],
)
def test_any_lengths(steps: int, gen_length: int, block_length: int, calls: int) -> None:
    model = OfficialModel()
    sequences = llada.generate(
        model, PROMPT, steps=steps, gen_length=gen_length, block_length=block_length, mask_id=MASK
    )
    assert sequences.shape == (2, 4 + gen_length)
    assert MASK not in sequences
    assert model.calls == calls


def plain(
    model: OfficialModel,
    prompt: Tensor,
    block_length: int,
    cfg_scale: float,
    never_eos: bool,
    ends_last: bool,
) -> Tensor:
    """LLaDA's rule for one row of 12 tokens, two a step, with the options as the official code has them at
    temperature 0; but the mask is never committed."""
    start = prompt.shape[1]
    x = torch.cat((prompt, torch.full((1, 12), MASK)), dim=1)
    for block in range(start, start + 12, block_length):
        while (x[0, block : block + block_length] == MASK).any():
            logits = model(x).logits[0]
            if cfg_scale:
                unconditional = x.clone()
                unconditional[:, :start] = MASK
                other = model(unconditional).logits[0]
                logits = other + (cfg_scale + 1) * (logits - other)
            if never_eos:
                logits[:, EOS] = -torch.inf
            tokens = logits.index_fill(1, torch.tensor(MASK), -torch.inf).argmax(-1)
            if ends_last:
                logits[:, [EOS, EOT]] = -torch.inf
            p = logits.softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            inside = torch.zeros_like(p, dtype=torch.bool)
            inside[block : block + block_length] = True
            best = torch.where(inside & (x[0] == MASK), p, -1.0).sort(descending=True, stable=True).indices
            x[0, best[:2]] = tokens[best[:2]]
    return x


@pytest.mark.parametrize("cfg_scale", [0.0, 1.0])
@pytest.mark.parametrize("block_length", [6, 12])
@pytest.mark.parametrize(
    ("never_eos", "ends_last"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_end_tokens(never_eos: bool, ends_last: bool, block_length: int, cfg_scale: float) -> None:
    model = OfficialModel(peak=3.0, eos_token_id=EOS, eot_token_id=EOT)
    changed = 0
    for first in range(8):
        prompt = torch.tensor([[first, 1, 3, 3]])
        plainly = plain(model, prompt, block_length, cfg_scale, False, False)
        expected = plain(model, prompt, block_length, cfg_scale, never_eos, ends_last)
        sequences = llada.generate(
            model,
            prompt,
            steps=6,
            gen_length=12,
            block_length=block_length,
            cfg_scale=cfg_scale,
            mask_id=MASK,
            logits_eos_inf=never_eos,
            confidence_eos_eot_inf=ends_last,
            compat="official",
        )
        assert torch.equal(sequences, expected)
        assert not never_eos or EOS not in sequences[:, 4:]
        changed += not torch.equal(plainly, expected)
    assert changed >= 4 * (never_eos or ends_last)


def test_end_tokens_in_windows() -> None:
    """A model of this package is still asked for the block's logits only."""
    model = dlmkern.load_model(DATA / "models" / "llada_seed0", dtype="float64")
    prompt = torch.tensor([[5, 6, 7]])
    plainly = llada.generate(model, prompt, gen_length=16, block_length=8, mask_id=499)
    model.config.eos_token_id = model.config.eot_token_id = int(plainly[0, 5])
    sizes: list[torch.Size] = []
    handle = model.register_forward_hook(lambda _, __, output: sizes.append(output.logits.shape))
    settings: dict[str, Any] = {"gen_length": 16, "block_length": 8, "mask_id": 499}
    without = llada.generate(model, prompt, logits_eos_inf=True, **settings)
    handle.remove()
    assert set(sizes) == {torch.Size([1, 8, 512])}
    assert model.config.eos_token_id not in without
    # Where nothing is compared with anything else, only the token of confidence 0 itself could be.
    last = llada.generate(model, prompt, confidence_eos_eot_inf=True, **settings)
    assert 499 not in last
    assert not torch.equal(plainly, last)


def test_end_tokens_of_llada() -> None:
    """With LLaDA's mask, and no word of the ends in the configuration, they are those of its tokenizer."""
    logits = torch.zeros(126464)
    logits[126081], logits[126348], logits[17] = 9.0, 8.0, 7.0

    def model(ids: Tensor) -> Tensor:
        return logits.expand(*ids.shape, -1)

    def answer(**options: bool) -> list[int]:
        tokens: list[int] = llada.generate(
            model,
            torch.tensor([[5]]),
            steps=2,
            gen_length=2,
            **options,  # type: ignore[arg-type]
        )[0, 1:].tolist()
        return tokens

    assert answer() == [126081] * 2
    assert answer(logits_eos_inf=True) == [126348] * 2
    assert answer(confidence_eos_eot_inf=True) == [126081] * 2


def test_all_confidence_at_the_ends() -> None:
    """Nothing is left for other tokens, and still each step commits one."""
    model = OfficialModel(eos_token_id=EOS, eot_token_id=EOT)
    model.hash_model.table.zero_()
    model.hash_model.table[:, EOS] = 1e5
    sequences = llada.generate(
        model,
        PROMPT,
        steps=24,
        gen_length=24,
        temperature=1e5,
        mask_id=MASK,
        confidence_eos_eot_inf=True,
        seed=0,
    )
    assert MASK not in sequences
    assert model.calls == 24
    assert len(sequences[:, 4:].unique()) > 4


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"steps": 2, "block_length": 4}, ValueError, "steps must lie between the number of blocks, 3"),
        ({"steps": 0}, ValueError, "steps must be a positive integer"),
        ({"steps": 1.5}, ValueError, "steps must be a positive integer"),
        ({"gen_length": 0}, ValueError, "gen_length must be a positive integer"),
        ({"block_length": 0}, ValueError, "block_length must be a positive integer"),
        ({"cfg_scale": -1.0}, ValueError, "cfg_scale must be a finite number"),
        ({"remasking": "entropy"}, ValueError, "remasking must be"),
        ({"mask_id": 126336}, ValueError, "mask_id must be the model's mask_token_id = 9, got 126336"),
        ({"mask_id": None}, TypeError, "mask_id must be an int, got None"),
        ({"logits_eos_inf": True}, ValueError, r"model\.config\.eos_token_id must be a token id"),
        ({"confidence_eos_eot_inf": True}, ValueError, r"model\.config\.eos_token_id must be a token id"),
        ({"is_mps": True}, TypeError, "is_mps"),
    ],
)
def test_bad_input(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"steps": 12, "gen_length": 12, "mask_id": MASK}
    with pytest.raises(error, match=message):
        llada.generate(OfficialModel(), PROMPT, **(good | settings))


def test_bad_end_tokens() -> None:
    settings: dict[str, Any] = {"gen_length": 4, "mask_id": MASK}
    with pytest.raises(
        ValueError, match=r"model\.config\.eot_token_id must be a token id for this, got None"
    ):
        llada.generate(OfficialModel(eos_token_id=EOS), PROMPT, confidence_eos_eot_inf=True, **settings)
    with pytest.raises(ValueError, match=rf"model\.config\.eos_token_id must lie in \[0, {VOCAB}\), got 12"):
        llada.generate(OfficialModel(eos_token_id=VOCAB), PROMPT, logits_eos_inf=True, **settings)


def test_bad_model() -> None:
    with pytest.raises(TypeError, match="model must be callable, got str"):
        llada.generate("LLaDA", PROMPT)  # type: ignore[arg-type]
