"""The method of Dream's `generation_utils.py` (arXiv:2508.15487), and what Fast-dLLM added to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from dlmkern.decoders import _check, presets
from dlmkern.decoders.decoder import Decoder
from dlmkern.decoders.forward import Model
from dlmkern.drop_in._batch import check_mask_id, check_prompt, check_threshold, open_stream, sequences

_DEFAULTS: dict[str, Any] = {
    "attention_mask": None,
    "max_new_tokens": None,
    "max_length": None,
    "steps": 512,
    "eps": 1e-3,
    "alg": "origin",
    "alg_temp": None,
    "temperature": 0.0,
    "top_p": None,
    "top_k": None,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "output_history": False,
    "mask_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
    "threshold": 0.9,
    "block_length": None,
    "dual_cache": False,
}
# New tokens if nobody says how many. As `max_length` of a generation_config it says nothing.
_NEW_TOKENS = 20


@dataclass
class DreamModelOutput(ModelOutput):
    """What `diffusion_generate` returns with `return_dict_in_generate`."""

    sequences: Tensor
    """int64 `[B, P + G]`."""
    history: list[Tensor] | None = None
    """With `output_history`, the sequences after each forward pass of the batch, masks included."""


def diffusion_generate(
    model: Model,
    inputs: Tensor,
    generation_config: object = None,
    *,
    compat: str | None = None,
    seed: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Tensor | DreamModelOutput:
    """Decode with Dream: `decoders.dream`.

    Args:
        model, compat, seed: see `dlmkern.drop_in`.
        inputs: int64 `[B, P]`.
        generation_config: any object with some of the following as attributes, None meaning the default.
            Arguments win over it.
        attention_mask: `[B, P]`, 0 where there is padding.
        max_new_tokens: tokens to generate, `G`.
        max_length: `P + G`, if `max_new_tokens` is not given. Neither, or a `generation_config` with the
            usual `max_length` of 20: 20 new tokens.
        steps, eps, alg, alg_temp: see `decoders.DreamSchedule`; by default 512, 0.001, "origin", None.
            "confidence_threshold" goes by `threshold` and does not look at `steps`, except outside blocks
            with `compat="official"`.
        temperature, top_p, top_k: see `dlmkern.generate`; by default 0, None, None.
        num_return_sequences: answers to each prompt, in rows that follow each other. Those to one prompt
            have the seeds `seed`, `seed + 1`, ...
        return_dict_in_generate, output_history: see `DreamModelOutput`. Outside blocks all rows are in step,
            and the history is that of the official code; in blocks rows differ in speed, and those that wait
            or have finished stay as they are.
        mask_token_id: the mask, by default that of `model.config`.
        eos_token_id, pad_token_id, bos_token_id: without effect, as in the official code.
        threshold: 0.9 by default, for "confidence_threshold".
        block_length: decode block by block with `decoders.PrefixCache`, which needs a model of
            `dlmkern.models`. None: all at once, without a cache.
        dual_cache: `decoders.DualCache` instead.

    Returns:
        int64 `[B * num_return_sequences, P + G]` on the model's device, without masks; or a
        `DreamModelOutput`.

    Raises:
        TypeError: an argument is unknown, such as the official code's hook functions, or has the wrong type.
        ValueError, FloatingPointError: as `dlmkern.generate`.
    """
    check_prompt("inputs", inputs)
    settings = _settings(generation_config, kwargs)
    gen_length = _new_tokens(settings, kwargs, inputs.shape[1])
    mask_id = settings["mask_token_id"]
    if mask_id is None:
        mask_id = getattr(getattr(model, "config", None), "mask_token_id", None)
    check_mask_id(model, "mask_token_id", mask_id)
    decoder = _decoder(settings, compat)
    copies = settings["num_return_sequences"]
    _check.positive_int("num_return_sequences", copies)
    prompt = inputs.to(getattr(model, "device", inputs.device)).repeat_interleave(copies, 0)
    attention_mask = settings["attention_mask"]
    if isinstance(attention_mask, Tensor) and attention_mask.shape == inputs.shape:
        attention_mask = attention_mask.repeat_interleave(copies, 0)
    if isinstance(seed, int) and not isinstance(seed, bool):
        seed = [seed + copy for copy in range(copies)] * len(inputs)
    stream = open_stream(
        model,
        "inputs",
        prompt,
        attention_mask,
        decoder,
        gen_length,
        mask_token_id=mask_id,
        seed=seed,
        **{name: settings[name] for name in ("temperature", "top_p", "top_k")},
    )
    if not settings["return_dict_in_generate"]:
        return sequences(prompt, stream)
    history = None
    if settings["output_history"]:
        history = []
        x = torch.nn.functional.pad(prompt, (0, gen_length), value=mask_id)
        for step in stream:
            for row in step.rows:
                columns = [inputs.shape[1] + position for position in row.positions]
                x[row.row, columns] = torch.tensor(row.tokens, dtype=torch.int64, device=x.device)
            history.append(x.clone())
    return DreamModelOutput(sequences=sequences(prompt, stream), history=history)


def _settings(generation_config: object, kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if name.endswith("_hook_func"):
            raise TypeError(
                f"{name}: hook functions are not supported; output_history shows every step, and "
                "dlmkern.generate_stream decodes step by step"
            )
        if name not in _DEFAULTS:
            raise TypeError(f"unknown argument {name!r}, known: {', '.join(_DEFAULTS)}")
    if isinstance(generation_config, Mapping):
        raise TypeError("generation_config must be an object with attributes, got a mapping; use **kwargs")
    settings = dict(_DEFAULTS)
    for name in settings:
        value = getattr(generation_config, name, None)
        if value is not None:
            settings[name] = value
    return settings | kwargs


def _new_tokens(settings: dict[str, Any], kwargs: dict[str, Any], prompt: int) -> int:
    if settings["max_new_tokens"] is not None:
        _check.positive_int("max_new_tokens", settings["max_new_tokens"])
        return int(settings["max_new_tokens"])
    length = settings["max_length"]
    if length is None or ("max_length" not in kwargs and length == _NEW_TOKENS):
        return _NEW_TOKENS
    _check.positive_int("max_length", length)
    if length <= prompt:
        raise ValueError(f"max_length must exceed the prompt's {prompt} tokens, got {length}")
    return int(length) - prompt


def _decoder(settings: dict[str, Any], compat: str | None) -> Decoder:
    alg, steps, block_length = settings["alg"], settings["steps"], settings["block_length"]
    dual = settings["dual_cache"]
    if not isinstance(dual, bool):
        raise TypeError(f"dual_cache must be a bool, got {dual!r}")
    if dual and block_length is None:
        raise ValueError("dual_cache needs a block_length")
    check_threshold(settings["threshold"])
    if alg == "confidence_threshold" and (compat is None or block_length is not None):
        steps = None
    return presets.dream(
        alg,
        steps,
        block_length,
        None if block_length is None else "dual" if dual else "prefix",
        eps=settings["eps"],
        alg_temp=settings["alg_temp"],
        tau=settings["threshold"],
        compat=compat,
    )
