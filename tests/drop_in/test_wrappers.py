"""Options that are carried out around a model, and arguments that would only fail later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlmkern.drop_in import dream, fast_dllm, llada
from tests.decoders.support import HashModel

PROMPT = torch.tensor([[1, 2, 3]])
MASK, EOS = 9, 11


class Shifted(nn.Module):
    """A model that is no model of this package, whose logits predict the next token."""

    shifted_logits = True
    config = SimpleNamespace(mask_token_id=MASK, eos_token_id=EOS, eot_token_id=3)

    def __init__(self, banned: int | None = None) -> None:
        super().__init__()
        self.hash = HashModel()
        self.banned = banned

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.hash(ids)
        return logits if self.banned is None else logits.index_fill(-1, torch.tensor(self.banned), -1e30)


def answer(model: Any, **options: Any) -> list[int]:
    out = llada.generate(model, PROMPT, steps=6, gen_length=6, block_length=6, mask_id=MASK, **options)
    tokens: list[int] = out[0, 3:].tolist()
    return tokens


def test_a_banned_token_leaves_logits_shifted() -> None:
    assert answer(Shifted(), logits_eos_inf=True) == answer(Shifted(banned=EOS))
    assert answer(Shifted()) != answer(HashModel())


@pytest.mark.parametrize("option", ["logits_eos_inf", "confidence_eos_eot_inf"])
def test_an_end_beyond_the_vocabulary(option: str) -> None:
    model = Shifted()
    model.config = SimpleNamespace(mask_token_id=MASK, eos_token_id=99, eot_token_id=98)
    with pytest.raises(ValueError, match=r"eos_token_id .*must be below the model's 12 logits, got 9[89]"):
        answer(model, **{option: True})


def test_the_dream_function_refuses_what_it_cannot_use() -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "steps": 4}
    with pytest.raises(TypeError, match="generation_config must be an object with attributes, got a mapping"):
        dream.diffusion_generate(Shifted(), PROMPT, generation_config={"steps": 2}, **options)
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of inputs, \[1, 3\], got \[\]"):
        dream.diffusion_generate(Shifted(), PROMPT, attention_mask=torch.tensor(1), **options)
    with pytest.raises(ValueError, match=r"alg must be one of origin, .* got \[\]"):
        dream.diffusion_generate(Shifted(), PROMPT, alg=[], **options)


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (-1, ValueError, "num_transfer_tokens must be at least 0, got -1"),
        (1.5, TypeError, "num_transfer_tokens must be an int or integers, got 1.5"),
        (True, TypeError, "num_transfer_tokens must be an int or integers, got True"),
        (torch.tensor([1.0]), TypeError, "num_transfer_tokens must hold integers, got torch.float32"),
        (torch.tensor([True]), TypeError, "num_transfer_tokens must hold integers, got torch.bool"),
    ],
)
def test_counts(count: Any, error: type[Exception], message: str) -> None:
    x = torch.tensor([[1, MASK]])
    with pytest.raises(error, match=message):
        fast_dllm.get_transfer_index(torch.zeros(1, 2, 12), 0.0, "low_confidence", x == MASK, x, count)
