"""`generate`: masked diffusion decoding of a batch of prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlmkern.decoders.decoder import Decoder
from dlmkern.decoders.forward import Forward, Model
from dlmkern.decoders.loop import Advance, Loop
from dlmkern.decoders.presets import find_decoder
from dlmkern.decoders.state import Reason, initial_state
from dlmkern.decoders.step import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompts = Tensor | str | Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class GenerationOutput:
    """What `generate` returns for `B` prompts and `G` generated tokens each, on the model's device."""

    sequences: list[Tensor]
    """Prompt and answer of each row, int64."""
    tokens: Tensor
    """int64 `[B, G]`: the answers."""
    nfe: Tensor
    """int64 `[B]`: forward passes of the model that the row took part in."""
    confidence: Tensor
    """float64 `[B, G]`: probability of the token at temperature 1 in the forward pass that fixed it; NaN
    where the reason is `AFTER_EOS`."""
    block_lengths: list[list[int]]
    """Lengths of the blocks of each row. A row that ended early has not opened all."""
    reason: Tensor
    """int8 `[B, G]`: why the token was committed, a `Reason`."""
    step_map: Tensor
    """int64 `[B, G]`: 0-based index of the forward pass that fixed the token for good."""
    revisions: Tensor
    """int64 `[B]`: how often a token that a forward pass had seen was masked again or replaced, also where
    the same step then ended the answer before it."""


@dataclass(frozen=True)
class RowStep:
    """What one forward pass has brought for one row."""

    row: int
    """Index of the prompt."""
    positions: list[int]
    """The positions that were filled or got another token, counted from the first generated one."""
    tokens: list[int]
    reasons: list[Reason]
    confidence: list[float]
    """As in `GenerationOutput`."""
    remasked: list[int]
    """The positions that were masked again, counted like `positions`."""
    block_start: int
    """Start of the row's block, counted like `positions`."""
    block_length: int


@dataclass(frozen=True)
class Step:
    """What one forward pass has brought."""

    forward: int
    """Its 0-based index."""
    rows: list[RowStep]
    """The rows that took part."""


class GenerationStream(Iterator[Step]):
    """Decodes as it is iterated over: one `Step` a forward pass."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._forwards = 0

    def __next__(self) -> Step:
        if not self._loop.rows:
            raise StopIteration
        advance = self._loop.advance()
        rows = _row_steps(advance, self._loop.plan.gen_length)
        self._forwards += 1
        return Step(self._forwards - 1, rows)

    def result(self) -> GenerationOutput:
        """The same as `generate` returns; does what is left to do."""
        while self._loop.rows:
            self._loop.advance()
            self._forwards += 1
        return _output(self._loop)


def generate(
    model: Model,
    input_ids: Prompts,
    decoder: str | Decoder = "depcap",
    gen_length: int = 256,
    temperature: float = 0.0,
    seed: int | Sequence[int] | None = None,
    stop_at_eos: bool = False,
    mask_token_id: int | None = None,
    eos_token_id: int | None = None,
    vocab_size: int | None = None,
    *,
    top_p: float | None = None,
    top_k: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chat_template: bool = False,
) -> GenerationOutput:
    """Answer prompts with a masked diffusion language model.

    Each row is decoded as if it were alone: it has its own blocks, number of forward passes and random
    numbers. Only rounding inside the model can tell a batch from single calls.

    Args:
        model: a model of `dlmkern.models`, or any callable `ids [B, L] -> logits [B, L, V]` (a tensor, or an
            object with the attribute `logits`), where `ids` holds the mask token wherever a token is to be
            predicted. If its attribute `shifted_logits` is true (or its `config.model_type` is "Dream"), the
            logits at a position predict the token after it.
        input_ids: int64 `[B, P]`, or a list of token lists (or int64 `[P]` tensors) of any lengths. Or text,
            one string or a list of them. A prompt may be empty if the model accepts that; it must not contain
            the mask.
        decoder: a name in `decoders.PRESETS`, such as "depcap" or "threshold", for that method with its
            default settings, or a `Decoder`.
        gen_length: tokens to generate for each prompt.
        temperature: 0 commits the likeliest token; above, one drawn from `softmax(logits / temperature)`.
            Confidence is the token's probability at temperature 1 in any case, so thresholds keep their
            meaning; `DreamSchedule` alone goes by the distribution that it draws from.
        seed: of the random numbers, for all rows or one a row; they also depend on the position and the
            forward pass, and on nothing else. Rows with the same prompt and seed get the same answer. None:
            each row draws a seed from torch's global generator.
        stop_at_eos: finish a row once all tokens up to its first end-of-sequence token are committed. The
            rest of the row becomes that token, whatever was there.
        mask_token_id, eos_token_id, vocab_size: default to those of `model.config`. A bare callable needs the
            first, and the second for `stop_at_eos`. Token ids from `vocab_size` on are never generated; None:
            all ids of the logits are.
        top_p, top_k: draw from the smallest set of the likeliest tokens with more than `top_p` of the
            probability, in (0, 1], or from the `top_k` likeliest, or both. None: from all.
        tokenizer: for text.
        chat_template: wrap each text as a user's turn by the tokenizer's chat template.

    Returns:
        See `GenerationOutput`. No mask is left in it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; the message names it.
        FloatingPointError: logits hold no distribution (NaN, +inf, no allowed token); the message names row,
            position and forward pass.
    """
    return generate_stream(
        model,
        input_ids,
        decoder,
        gen_length,
        temperature,
        seed,
        stop_at_eos,
        mask_token_id,
        eos_token_id,
        vocab_size,
        top_p=top_p,
        top_k=top_k,
        tokenizer=tokenizer,
        chat_template=chat_template,
    ).result()


def generate_stream(
    model: Model,
    input_ids: Prompts,
    decoder: str | Decoder = "depcap",
    gen_length: int = 256,
    temperature: float = 0.0,
    seed: int | Sequence[int] | None = None,
    stop_at_eos: bool = False,
    mask_token_id: int | None = None,
    eos_token_id: int | None = None,
    vocab_size: int | None = None,
    *,
    top_p: float | None = None,
    top_k: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chat_template: bool = False,
) -> GenerationStream:
    """`generate`, forward pass by forward pass: an iterator over `Step`, whose `result()` is the whole.

    Arguments and errors are those of `generate`. Bad arguments are reported at once, before the first forward
    pass.
    """
    if not callable(model):
        raise TypeError(f"model must be callable, got {type(model).__name__}")
    decoder = find_decoder(decoder)
    _check_int("gen_length", gen_length, 1, 2**31)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a number, got {type(temperature).__name__}")
    if not 0 <= temperature <= sys.float_info.max:
        raise ValueError(f"temperature must be a finite number of at least 0, got {temperature}")
    if top_p is not None:
        if isinstance(top_p, bool) or not isinstance(top_p, (int, float)):
            raise TypeError(f"top_p must be a number, got {type(top_p).__name__}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if top_k is not None:
        _check_int("top_k", top_k, 1, 2**31)
    config = getattr(model, "config", None)
    mask_token_id = _token_id("mask_token_id", mask_token_id, config)
    eos_token_id = _token_id("eos_token_id", eos_token_id, config) if stop_at_eos else None
    if vocab_size is None:
        vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is not None:
        _check_int("vocab_size", vocab_size, 1, 2**31)
    if eos_token_id is not None:
        if eos_token_id == mask_token_id:
            raise ValueError(f"eos_token_id and mask_token_id must differ, got {eos_token_id} for both")
        if vocab_size is not None and eos_token_id >= vocab_size:
            raise ValueError(f"eos_token_id must be below vocab_size = {vocab_size}, got {eos_token_id}")
    prompts = _token_lists(input_ids, tokenizer, chat_template)
    limit = getattr(config, "max_sequence_length", None)
    for row, prompt in enumerate(prompts):
        _check_prompt(row, prompt, mask_token_id, vocab_size)
        if limit is not None and len(prompt) + gen_length > limit:
            raise ValueError(
                f"row {row}: the prompt's {len(prompt)} tokens and gen_length = {gen_length} exceed the "
                f"model's max_sequence_length = {limit}"
            )
    decoder.unmask.check(gen_length, decoder.blocks.count(gen_length))
    seeds = _seeds(seed, len(prompts))
    forward = Forward(model, mask_token_id, vocab_size, decoder)
    plan = Plan(
        decoder,
        gen_length,
        mask_token_id,
        vocab_size,
        eos_token_id,
        float(temperature),
        None if top_p == 1 else top_p,
        top_k,
        first_alone=forward.caches and forward.shifted and decoder.compat == "official",
    )
    state = initial_state(prompts, gen_length, mask_token_id, seeds, _device(model, input_ids))
    if decoder.revise is not None:
        state = state._replace(memory=decoder.revise.start(state))
    return GenerationStream(Loop(forward, plan, state))


def _output(loop: Loop) -> GenerationOutput:
    rows = [loop.finished[row] for row in range(len(loop.finished))]
    gen_length = loop.plan.gen_length
    return GenerationOutput(
        sequences=[row.ids for row in rows],
        tokens=torch.stack([row.ids[-gen_length:] for row in rows]),
        nfe=torch.tensor(loop.nfe, device=rows[0].ids.device),
        confidence=torch.stack([row.confidence for row in rows]),
        block_lengths=[list(lengths) for lengths in loop.block_lengths],
        reason=torch.stack([row.reason for row in rows]),
        step_map=torch.stack([row.step_map for row in rows]),
        revisions=torch.stack([row.revisions for row in rows]),
    )


def _row_steps(advance: Advance, gen_length: int) -> list[RowStep]:
    state = advance.state
    generated = torch.arange(-gen_length, 0, device=state.ids.device) + state.end.unsqueeze(1)
    fresh = state.step_map == state.nfe.unsqueeze(1) - 1
    remasked = (state.step_map < 0) & (advance.before_step_map >= 0)
    # float64 holds every token id exactly, so that one read of the device does for all.
    columns = (fresh, remasked, state.ids, state.reason, state.confidence)
    packed = torch.stack([x.gather(1, generated).double() for x in columns], dim=-1).tolist()
    steps = []
    for i, row in enumerate(advance.rows):
        filled = [(p, *values) for p, (is_fresh, _, *values) in enumerate(packed[i]) if is_fresh]
        steps.append(
            RowStep(
                row=row,
                positions=[p for p, *_ in filled],
                tokens=[int(token) for _, token, _, _ in filled],
                reasons=[Reason(int(reason)) for _, _, reason, _ in filled],
                confidence=[confidence for *_, confidence in filled],
                remasked=[p for p, (_, is_remasked, *_) in enumerate(packed[i]) if is_remasked],
                block_start=advance.block_starts[i] - (advance.ends[i] - gen_length),
                block_length=advance.block_lengths[i],
            )
        )
    return steps


def _token_lists(
    prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None, chat_template: bool
) -> list[list[int]]:
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Tensor):
        if prompts.dtype != torch.int64:
            raise TypeError(f"input_ids must be int64, got {prompts.dtype}")
        if prompts.dim() != 2:
            raise ValueError(f"input_ids must have shape [B, P], got {list(prompts.shape)}")
        rows: list[Any] = prompts.tolist()
    elif isinstance(prompts, Sequence):
        rows = list(prompts)
    else:
        raise TypeError(
            f"input_ids must be an int64 tensor, a list of token lists, or text, got {type(prompts).__name__}"
        )
    if not rows:
        raise ValueError("input_ids holds no prompt")
    texts = [isinstance(row, str) for row in rows]
    if all(texts):
        return _tokenize(rows, tokenizer, chat_template)
    if any(texts):
        raise TypeError("input_ids mixes text and token ids")
    if chat_template:
        raise ValueError("chat_template applies to text, and input_ids holds token ids")
    return [_token_list(row, prompt) for row, prompt in enumerate(rows)]


def _token_list(row: int, prompt: Any) -> list[int]:
    if isinstance(prompt, Tensor):
        if prompt.dtype != torch.int64 or prompt.dim() != 1:
            raise TypeError(
                f"input_ids[{row}] must be int64 of shape [P], got {prompt.dtype} of shape "
                f"{list(prompt.shape)}"
            )
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise TypeError(
            f"input_ids[{row}] must be a list of token ids, got {type(prompt).__name__}; "
            "a single prompt needs a list around it"
        )
    for position, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"input_ids[{row}][{position}] must be an int, got {token!r}")
    return list(prompt)


def _tokenize(
    texts: list[str], tokenizer: PreTrainedTokenizerBase | None, chat_template: bool
) -> list[list[int]]:
    if tokenizer is None:
        raise ValueError("input_ids holds text, which needs a tokenizer (dlmkern.models.load_tokenizer)")
    if not chat_template:
        return [list(tokenizer(text)["input_ids"]) for text in texts]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in texts
    ]
    # The template has put the special tokens in already.
    return [list(tokenizer(chat, add_special_tokens=False)["input_ids"]) for chat in chats]


def _check_prompt(row: int, prompt: list[int], mask_token_id: int, vocab_size: int | None) -> None:
    for position, token in enumerate(prompt):
        if token == mask_token_id:
            raise ValueError(f"row {row}: the prompt holds the mask token {token} at position {position}")
        if not 0 <= token < (vocab_size or 2**31):
            raise ValueError(
                f"row {row}: the prompt holds token {token} at position {position}, which must lie in "
                f"[0, {vocab_size or 2**31})"
            )


def _token_id(name: str, value: int | None, config: Any) -> int:
    if value is None:
        value = getattr(config, name, None)
    if value is None:
        raise ValueError(f"{name} is needed: the model has no config.{name}")
    _check_int(name, value, 0, 2**31)
    return value


def _seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    if seed is None:
        return torch.randint(2**63 - 1, (rows,)).tolist()
    seeds = [seed] * rows if isinstance(seed, int) else seed
    if not isinstance(seeds, Sequence):
        raise TypeError(f"seed must be an int or a list of them, got {type(seed).__name__}")
    if len(seeds) != rows:
        raise ValueError(f"seed must hold one number a row: {rows} rows, {len(seeds)} seeds")
    for value in seeds:
        _check_int("seed", value, -(2**63), 2**63)
    return list(seeds)


def _check_int(name: str, value: object, least: int, stop: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value >= stop:
        raise ValueError(f"{name} must be below {stop}, got {value}")


def _device(model: Model, input_ids: Prompts) -> torch.device:
    """Where the model's parameters are; for a bare callable, where the prompts are."""
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            return parameter.device
    prompts = [input_ids] if isinstance(input_ids, Tensor) else input_ids
    for prompt in prompts:
        if isinstance(prompt, Tensor):
            return prompt.device
    return torch.device("cpu")
