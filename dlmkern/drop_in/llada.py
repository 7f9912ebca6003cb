"""The function of LLaDA's `generate.py` (arXiv:2502.09992)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dlmkern.decoders.forward import Model
from dlmkern.decoders.presets import vanilla
from dlmkern.decoders.state import State
from dlmkern.decoders.unmask import Candidates, Selection, UnmaskingRule
from dlmkern.drop_in._batch import check_mask_id, open_stream, schedule_steps, sequences
from dlmkern.models.masked_lm import MaskedLM

# Of LLaDA's tokenizer, which is known by its mask.
_MASK, _EOS, _EOT = 126336, 126081, 126348


def generate(
    model: Model,
    prompt: Tensor,
    attention_mask: Tensor | None = None,
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    remasking: str = "low_confidence",
    mask_id: int = _MASK,
    logits_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
    *,
    compat: str | None = None,
    seed: int | Sequence[int] | None = None,
) -> Tensor:
    """Decode by LLaDA's own rule, a fixed number of tokens a step: `decoders.vanilla`.

    The signature is that of the newest official version. Older ones had no `attention_mask`, and one had
    `is_mps`, which is refused: it computed in float32 for devices without float64, which is needed here.

    Args:
        model, compat, seed: see `dlmkern.drop_in`.
        prompt: int64 `[B, P]`.
        attention_mask: `[B, P]`, 0 where there is padding.
        steps: forward passes for the whole answer, at least one a block; `gen_length` and more mean one
            token a step. Unlike officially, no multiple of the number of blocks is needed.
        gen_length: tokens to generate.
        block_length: any; the last block takes what is left.
        temperature, cfg_scale, remasking: see `dlmkern.generate`, `decoders.Decoder`, `decoders.OnePerStep`.
        mask_id: the mask; that of `model.config`, if it has one.
        logits_eos_inf: never generate the end-of-sequence token, `model.config.eos_token_id`, or 126081 with
            LLaDA's mask.
        confidence_eos_eot_inf: positions that predict this token or the end of the turn,
            `model.config.eot_token_id`, or 126348 with LLaDA's mask, have confidence 0, so that they are
            committed last; neither takes part in the others' probabilities. The official code spares the
            former token above temperature 0. Does nothing with random remasking.

    Returns:
        int64 `[B, P + gen_length]` on the model's device; no mask is left in it.

    Raises:
        TypeError, ValueError, FloatingPointError: as `dlmkern.generate`.
    """
    check_mask_id(model, "mask_id", mask_id)
    decoder = vanilla(
        block_length,
        schedule_steps(steps, gen_length),
        remasking=remasking,
        cfg_scale=cfg_scale,
        compat=compat,
    )
    if confidence_eos_eot_inf:
        eos = _token_id(model, "eos_token_id", _EOS, mask_id)
        eot = _token_id(model, "eot_token_id", _EOT, mask_id)
        decoder = replace(decoder, unmask=_EndsLast(decoder.unmask, frozenset((eos, eot))))
    if logits_eos_inf:
        kind = _WindowsWithoutToken if isinstance(model, MaskedLM) else _WithoutToken
        model = kind(model, _token_id(model, "eos_token_id", _EOS, mask_id))
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
    return sequences(prompt, stream)


@dataclass(frozen=True)
class _EndsLast(UnmaskingRule):
    """A rule for which positions that would commit one of the tokens `ends` have confidence 0.

    The other confidences are those without these tokens.
    """

    rule: UnmaskingRule
    ends: frozenset[int]

    def check(self, gen_length: int, blocks: int | None) -> None:
        self.rule.check(gen_length, blocks)

    def select(self, candidates: Candidates, state: State, blocks: int | None) -> Selection:
        token, confidence = candidates.token, candidates.confidence
        rest = torch.ones_like(confidence)
        is_end = torch.zeros_like(token, dtype=torch.bool)
        for end in self.ends:
            _check_token("eos_token_id and eot_token_id", end, candidates.logits)
            rest -= (candidates.logits[..., end].to(torch.float64) - candidates.logsumexp).exp()
            is_end |= token == end
        # Where the ends take all, rounding may leave less than the token's own share, or nothing.
        rest = torch.maximum(rest, confidence).clamp(min=torch.finfo(torch.float64).tiny)
        confidence = (confidence / rest).masked_fill(is_end, 0.0)
        return self.rule.select(candidates._replace(confidence=confidence), state, blocks)


class _WithoutToken(nn.Module):
    """A model that never predicts a token."""

    def __init__(self, model: Model, token_id: int) -> None:
        super().__init__()
        self.model = model
        self.token_id = token_id
        self.config = getattr(model, "config", None)
        for name in ("device", "shifted_logits"):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.without_token(self.model(input_ids))

    def without_token(self, output: Any) -> Tensor:
        logits: Tensor = getattr(output, "logits", output)
        _check_token("eos_token_id", self.token_id, logits)
        # Not -inf, which guidance would turn into NaN.
        token = torch.tensor(self.token_id, device=logits.device)
        return logits.index_fill(-1, token, torch.finfo(logits.dtype).min)


class _WindowsWithoutToken(_WithoutToken):
    """The same for a model of `dlmkern.models`, which computes only the logits that are wanted."""

    def forward(
        self, input_ids: Tensor, lengths: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        return self.without_token(self.model(input_ids, lengths=lengths, positions=positions))


def _check_token(name: str, token: int, logits: Tensor) -> None:
    if token >= logits.shape[-1]:
        raise ValueError(f"{name} must be below the model's {logits.shape[-1]} logits, got {token}")


def _token_id(model: Model, name: str, official: int, mask_id: int) -> int:
    config = getattr(model, "config", None)
    token = getattr(config, name, None)
    if token is None and mask_id == _MASK:
        token = official
    if isinstance(token, bool) or not isinstance(token, int):
        raise ValueError(f"model.config.{name} must be a token id for this, got {token!r}")
    vocab_size = getattr(config, "vocab_size", None)
    if token < 0 or (vocab_size is not None and token >= vocab_size):
        raise ValueError(f"model.config.{name} must lie in [0, {vocab_size}), got {token}")
    return token
