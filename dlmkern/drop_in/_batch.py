"""Batches of prompts as the official codes take them: one tensor, perhaps with padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlmkern.decoders import _check
from dlmkern.decoders.decoder import Decoder
from dlmkern.decoders.forward import Model
from dlmkern.generation import GenerationStream, generate_stream


def open_stream(
    model: Model,
    name: str,
    prompt: Tensor,
    attention_mask: Tensor | None,
    decoder: Decoder,
    gen_length: int,
    **settings: Any,
) -> GenerationStream:
    """`generate_stream` of the prompts without their padding.

    Args:
        name: what the caller calls `prompt`, for errors.
        prompt: int64 `[B, P]`.
        attention_mask: `[B, P]`, 0 where there is padding; None: nowhere.
        settings: further arguments of `generate_stream`.
    """
    check_prompt(name, prompt)
    rows = prompt.to(getattr(model, "device", prompt.device))
    if attention_mask is None:
        return generate_stream(model, rows, decoder, gen_length, **settings)
    real = _real(name, prompt, attention_mask).to(rows.device)
    unpadded = [row[kept] for row, kept in zip(rows, real, strict=True)]
    return generate_stream(model, unpadded, decoder, gen_length, **settings)


def sequences(prompt: Tensor, stream: GenerationStream) -> Tensor:
    """int64 `[B, P + gen_length]`: the prompts with their padding, then the answers."""
    tokens = stream.result().tokens
    return torch.cat((prompt.to(tokens.device), tokens), dim=1)


def check_prompt(name: str, prompt: Tensor) -> None:
    if not isinstance(prompt, Tensor) or prompt.dtype != torch.int64:
        got = prompt.dtype if isinstance(prompt, Tensor) else type(prompt).__name__
        raise TypeError(f"{name} must be an int64 tensor, got {got}")
    if prompt.dim() != 2:
        raise ValueError(f"{name} must have shape [B, P], got {list(prompt.shape)}")
    if prompt.shape[0] == 0:
        raise ValueError(f"{name} must hold at least one row, got shape {list(prompt.shape)}")


def check_mask_id(model: Model, name: str, mask_id: int) -> None:
    """An id that is not at odds with the model's own."""
    if isinstance(mask_id, bool) or not isinstance(mask_id, int):
        raise TypeError(f"{name} must be an int, got {mask_id!r}")
    own = getattr(getattr(model, "config", None), "mask_token_id", None)
    if own is not None and own != mask_id:
        raise ValueError(f"{name} must be the model's mask_token_id = {own}, got {mask_id}")


def check_threshold(threshold: float) -> None:
    _check.number("threshold", threshold)
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must lie in [0, 1], got {threshold!r}")


def schedule_steps(steps: int, gen_length: int) -> int | None:
    """`OnePerStep.steps` for the official `steps`: those beyond one a token commit nothing."""
    _check.positive_int("steps", steps)
    _check.positive_int("gen_length", gen_length)
    return steps if steps < gen_length else None


def _real(name: str, prompt: Tensor, attention_mask: Tensor) -> Tensor:
    """bool `[B, P]`: what is no padding."""
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if attention_mask.shape != prompt.shape:
        raise ValueError(
            f"attention_mask must have the shape of {name}, {list(prompt.shape)}, "
            f"got {list(attention_mask.shape)}"
        )
    real = attention_mask != 0
    for row, columns in enumerate(real.tolist()):
        if True not in columns:
            raise ValueError(f"attention_mask hides all of row {row}")
        first, last = columns.index(True), len(columns) - columns[::-1].index(True)
        if not all(columns[first:last]):
            raise ValueError(
                f"attention_mask must be 0 only before or after a row's tokens; in row {row} it is 0 at "
                f"position {columns.index(False, first)} between them"
            )
    return real
