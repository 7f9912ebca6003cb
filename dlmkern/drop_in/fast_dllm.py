"""The functions of Fast-dLLM's `llada/generate.py` (arXiv:2505.22618)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlmkern import ops
from dlmkern.decoders import _check, presets
from dlmkern.decoders.cache import Cache
from dlmkern.decoders.forward import Model
from dlmkern.decoders.sampling import probability_of, sample
from dlmkern.drop_in._batch import check_mask_id, check_threshold, open_stream, schedule_steps, sequences
from dlmkern.ops import _check as _ops_check


def generate(
    model: Model,
    prompt: Tensor,
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    remasking: str = "low_confidence",
    mask_id: int = 126336,
    threshold: float | None = None,
    factor: float | None = None,
    step_callback: Callable[[int], object] | None = None,
    *,
    attention_mask: Tensor | None = None,
    cache: str | Cache | None = None,
    compat: str | None = None,
    seed: int | Sequence[int] | None = None,
) -> tuple[Tensor, int]:
    """Decode block by block: `decoders.factor` if `factor` is given, or else `decoders.threshold` if
    `threshold` is, or else `decoders.vanilla`.

    Args:
        model, compat, seed: see `dlmkern.drop_in`.
        prompt: int64 `[B, P]`.
        steps: forward passes for the whole answer, at least one a block; `gen_length` and more mean one
            token a step. Not looked at with a threshold or a factor. Unlike officially, no multiple of the
            number of blocks is needed.
        gen_length: tokens to generate.
        block_length: any; the last block takes what is left.
        temperature: see `dlmkern.generate`.
        remasking: "low_confidence" or, without threshold and factor, "random".
        mask_id: the mask; that of `model.config`, if it has one.
        threshold: in `[0, 1]`.
        factor: above 0.
        step_callback: called after each forward pass with its 0-based index.
        attention_mask: `[B, P]`, 0 where there is padding.
        cache: see `decoders.Decoder`; one that keeps anything needs a model of `dlmkern.models`.

    Returns:
        int64 `[B, P + gen_length]` on the model's device, without masks; and the number of forward passes of
        the batch. With a cache, rows that open a block and rows inside one do not share passes.

    Raises:
        TypeError, ValueError, FloatingPointError: as `dlmkern.generate`.
    """
    check_mask_id(model, "mask_id", mask_id)
    if (threshold is not None or factor is not None) and remasking != "low_confidence":
        raise ValueError(f'remasking must be "low_confidence" with a threshold or factor, got {remasking!r}')
    if factor is not None:
        decoder = presets.factor(factor, block_length, cache, compat=compat)
    elif threshold is not None:
        check_threshold(threshold)
        decoder = presets.threshold(threshold, block_length, cache, compat=compat)
    else:
        decoder = presets.vanilla(
            block_length, schedule_steps(steps, gen_length), cache, remasking=remasking, compat=compat
        )
    stream = open_stream(
        model,
        "prompt",
        prompt,
        attention_mask,
        decoder,
        gen_length,
        temperature=temperature,
        seed=seed,
        mask_token_id=mask_id,
    )
    nfe = 0
    for step in stream:
        if step_callback is not None:
            step_callback(step.forward)
        nfe += 1
    return sequences(prompt, stream), nfe


def generate_with_prefix_cache(
    model: Model,
    prompt: Tensor,
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    remasking: str = "low_confidence",
    mask_id: int = 126336,
    threshold: float | None = None,
    factor: float | None = None,
    step_callback: Callable[[int], object] | None = None,
    *,
    attention_mask: Tensor | None = None,
    compat: str | None = None,
    seed: int | Sequence[int] | None = None,
) -> tuple[Tensor, int]:
    """`generate` with `decoders.PrefixCache`; the model is one of `dlmkern.models`."""
    return generate(
        model,
        prompt,
        steps=steps,
        gen_length=gen_length,
        block_length=block_length,
        temperature=temperature,
        remasking=remasking,
        mask_id=mask_id,
        threshold=threshold,
        factor=factor,
        step_callback=step_callback,
        attention_mask=attention_mask,
        cache="prefix",
        compat=compat,
        seed=seed,
    )


def generate_with_dual_cache(
    model: Model,
    prompt: Tensor,
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    remasking: str = "low_confidence",
    mask_id: int = 126336,
    threshold: float | None = None,
    factor: float | None = None,
    step_callback: Callable[[int], object] | None = None,
    *,
    attention_mask: Tensor | None = None,
    compat: str | None = None,
    seed: int | Sequence[int] | None = None,
) -> tuple[Tensor, int]:
    """`generate` with `decoders.DualCache`; the model is one of `dlmkern.models`."""
    return generate(
        model,
        prompt,
        steps=steps,
        gen_length=gen_length,
        block_length=block_length,
        temperature=temperature,
        remasking=remasking,
        mask_id=mask_id,
        threshold=threshold,
        factor=factor,
        step_callback=step_callback,
        attention_mask=attention_mask,
        cache="dual",
        compat=compat,
        seed=seed,
    )


@torch.no_grad()
def get_transfer_index(
    logits: Tensor,
    temperature: float,
    remasking: str,
    mask_index: Tensor,
    x: Tensor,
    num_transfer_tokens: int | Tensor | None,
    threshold: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens that one step would commit, and where: the most confident positions of each row.

    Args:
        logits: `[B, L, V]`.
        temperature: 0 takes the likeliest token; above, one drawn from `softmax(logits / temperature)` with
            torch's global generator. Confidence is the token's probability at temperature 1.
        remasking: "low_confidence"; or "random", which replaces confidences by random numbers in `[0, 1)`.
        mask_index: bool `[B, L]`: the positions that may be committed. A row without any selects nothing.
        x: int64 `[B, L]`, the tokens as they are.
        num_transfer_tokens: how many to commit, an int or integers `[B]` or `[B, 1]`; if a row has fewer
            masks, all of these. Not looked at with a threshold.
        threshold: in `[0, 1]`: commit in each row every position of at least this confidence, and the best.

    Returns:
        `x0`, int64 `[B, L]`: `x` where `mask_index` is False, or else the new token; and `transfer_index`,
        bool `[B, L]`. The step is `x[transfer_index] = x0[transfer_index]`.

    Raises:
        TypeError, ValueError: an argument is none of the above; the message names it.
        FloatingPointError: the logits of a masked position hold no distribution.
    """
    x0, confidence = _predict(logits, temperature, remasking, mask_index, x)
    if threshold is not None:
        check_threshold(threshold)
        chosen = ops.confidence_select(confidence=confidence, mask=mask_index, tau=threshold)
        return x0, chosen.selected
    count = num_transfer_tokens
    if count is None:
        raise ValueError("num_transfer_tokens is needed without a threshold")
    if isinstance(count, bool) or not isinstance(count, int | Tensor):
        raise TypeError(f"num_transfer_tokens must be an int or integers, got {count!r}")
    if isinstance(count, int) and count < 0:
        raise ValueError(f"num_transfer_tokens must be at least 0, got {count}")
    if isinstance(count, Tensor):
        if count.dtype.is_floating_point or count.dtype.is_complex or count.dtype == torch.bool:
            raise TypeError(f"num_transfer_tokens must hold integers, got {count.dtype}")
        if count.shape not in ((len(x),), (len(x), 1)):
            raise ValueError(
                f"num_transfer_tokens must have shape [{len(x)}] or [{len(x)}, 1], got {list(count.shape)}"
            )
        count = count.reshape(-1).to(x.device)
    chosen = ops.confidence_select(confidence=confidence, mask=mask_index, rule="schedule", count=count)
    return x0, chosen.selected


@torch.no_grad()
def get_transfer_index_dynamic(
    logits: Tensor,
    temperature: float,
    remasking: str,
    mask_index: Tensor,
    x: Tensor,
    num_transfer_tokens: object,
    factor: float = 1,
    *,
    compat: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`get_transfer_index` by the factor rule.

    Args:
        num_transfer_tokens: not looked at, as in the official code.
        factor: above 0.
        compat: None, or "official" for the rule as coded (see `ops.confidence_select`).
    """
    x0, confidence = _predict(logits, temperature, remasking, mask_index, x)
    chosen = ops.confidence_select(
        confidence=confidence, mask=mask_index, rule="factor", factor=factor, compat=compat
    )
    return x0, chosen.selected


def _predict(
    logits: Tensor, temperature: float, remasking: str, mask_index: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """`x` with the masks filled, and float64 confidences, both `[B, L]`."""
    for name, tensor in (("logits", logits), ("mask_index", mask_index), ("x", x)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if logits.dim() != 3:
        raise ValueError(f"logits must have shape [B, L, V], got {list(logits.shape)}")
    _ops_check.companion("mask_index", mask_index, "logits", logits, logits.shape[:2], _ops_check.BOOL)
    _ops_check.companion("x", x, "logits", logits, logits.shape[:2], (torch.int64,))
    _check.finite_number_from_zero("temperature", temperature)
    if remasking not in ("low_confidence", "random"):
        raise ValueError(f'remasking must be "low_confidence" or "random", got {remasking!r}')
    stats = ops.token_stats(logits, out_dtype=torch.float64)
    token, confidence = stats.token, stats.confidence
    if temperature > 0:
        token = sample(logits, token, None, temperature, torch.rand_like(confidence))
        confidence = probability_of(token, logits, stats)
    bad = (mask_index & (token < 0)).nonzero()
    if len(bad):
        row, position = bad[0].tolist()
        raise FloatingPointError(f"row {row}: the logits of position {position} hold no distribution")
    if remasking == "random":
        confidence = torch.rand_like(confidence)
    return torch.where(mask_index, token, x), confidence
