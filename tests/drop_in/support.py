"""Models as the official codes expect them, prompts with padding, signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.decoders.support import MASK, VOCAB, HashModel

PAD = 2
PROMPTS = [[1, 3, 5, 7], [4], [2, 2, 8, 2, 6, 1], [0, 2]]  # the padding token is a token too


class OfficialModel:
    """What the official codes need of a model: `logits` of the output, and `device`. Counts its calls."""

    device = torch.device("cpu")

    def __init__(self, peak: float = 6.0, **config: int) -> None:
        self.hash_model = HashModel(peak=peak)
        self.config = SimpleNamespace(mask_token_id=MASK, vocab_size=VOCAB, **config)
        self.calls = 0

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        self.calls += 1
        return SimpleNamespace(logits=self.hash_model(ids))


def padded(prompts: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """The prompts `[B, P]` and their attention mask, padded on the "left", the "right" or "both" sides."""
    longest = max(map(len, prompts)) + (side == "both")
    ids, mask = (
        torch.full((len(prompts), longest), PAD),
        torch.zeros(len(prompts), longest, dtype=torch.int64),
    )
    for row, prompt in enumerate(prompts):
        spare = longest - len(prompt)
        start = {"left": spare, "right": 0, "both": (spare + 1) // 2}[side]
        ids[row, start : start + len(prompt)] = torch.tensor(prompt)
        mask[row, start : start + len(prompt)] = 1
    return ids, mask


def defaults(function: Callable[..., Any]) -> tuple[dict[str, Any], set[str]]:
    """The arguments that can be given by position, in order, with their defaults; and the others."""
    parameters = inspect.signature(function).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    return positional, {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
