"""Train the embedded model: `python examples/train_tiny.py OUT`. Takes a quarter of an hour on one core.

The result is a folder in LLaDA's official format. The same seed on the same machine gives the same bytes,
which is why a single thread is used.

The first phase is plain masked diffusion: each answer is masked at a random ratio, and the model predicts
what is masked. In the second phase every other step trains on what a block-wise KV cache shows the model:
keys and values of everything outside the block stem from the block's start, when the block was still fully
masked. Without it the model learns to use the prompt's positions as working memory for the current state of
the answer, and such a memory is stale under any cache.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from dlmkern.attention import attention
from dlmkern.models import LLaDAConfig, LLaDAModelLM, chains4
from dlmkern.models.masked_lm import Block

BATCH = 64
FIELDS: dict[str, Any] = {
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 4,
    "mlp_hidden_size": 128,
    "vocab_size": chains4.VOCAB_SIZE,
    "embedding_size": chains4.VOCAB_SIZE,
    "max_sequence_length": 256,
    "rope": True,
    "rope_theta": 10000.0,
    "rope_full_precision": True,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rms_norm_eps": 1e-5,
    "bias_for_layer_norm": False,
    "activation_type": "silu",
    "block_type": "llama",
    "block_group_size": 1,
    "alibi": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "scale_logits": False,
    "weight_tying": False,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "residual_dropout": 0.0,
    "mask_token_id": chains4.MASK,
    "eos_token_id": chains4.PAD,
    "pad_token_id": chains4.PAD,
}


def training_problems(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of prompts `[64, 41]`, none of them held out for tests, and answers `[64, 40]`."""
    prompts, answers = chains4.problems(2 * BATCH, generator)
    seen = ~chains4.held_out(prompts)
    return prompts[seen][:BATCH], answers[seen][:BATCH]


def random_mask(size: int, generator: torch.Generator, rows: int = BATCH) -> Tensor:
    """Masks `[rows, size]` whose ratios are spread evenly over (0, 1), one in each `1 / rows`."""
    ratio = (torch.randperm(rows, generator=generator) + torch.rand(rows, generator=generator)) / rows
    return torch.rand(rows, size, generator=generator) < ratio[:, None]


def masked_loss(logits: Tensor, answers: Tensor, masked: Tensor) -> Tensor:
    """Mean cross entropy over the masked tokens."""
    return cross_entropy(logits[masked], answers[masked])


def plain_loss(model: LLaDAModelLM, generator: torch.Generator) -> Tensor:
    prompts, answers = training_problems(generator)
    masked = random_mask(chains4.ANSWER_LENGTH, generator)
    state = answers.masked_fill(masked, chains4.MASK)
    logits = model(torch.cat((prompts, state), dim=1)).logits[:, chains4.PROMPT_LENGTH :]
    return masked_loss(logits, answers, masked)


def random_block(generator: torch.Generator) -> tuple[int, int]:
    """Where a block of the answer starts and stops: half of the time one of a fixed grid, else any block."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    if draw(0, 1):
        length = (10, 20, 40)[draw(0, 2)]
        start = length * draw(0, chains4.ANSWER_LENGTH // length - 1)
    else:
        length = draw(8, chains4.ANSWER_LENGTH)
        start = draw(0, chains4.ANSWER_LENGTH - length)
    return start, start + length


def cached_loss(model: LLaDAModelLM, generator: torch.Generator) -> Tensor:
    """The loss inside a block when keys and values from elsewhere are those of the block's start.

    Only the block itself (dual cache), or the block and all that follows (prefix cache), is computed anew.
    """
    prompts, answers = training_problems(generator)
    start, stop = random_block(generator)
    dual = bool(torch.randint(2, (), generator=generator))
    place = torch.arange(chains4.ANSWER_LENGTH)
    masked = random_mask(chains4.ANSWER_LENGTH, generator) & (place >= start) & (place < stop)
    at_start = torch.cat((prompts, answers.masked_fill(place >= start, chains4.MASK)), dim=1)
    now = torch.cat((prompts, answers.masked_fill(masked | (place >= stop), chains4.MASK)), dim=1)

    first = chains4.PROMPT_LENGTH + start
    last = chains4.PROMPT_LENGTH + (stop if dual else chains4.ANSWER_LENGTH)
    positions = torch.arange(now.shape[1])
    rope, fresh_rope = model.rope(positions), model.rope(positions[first:last])
    stale = model.embed(at_start)
    x = model.embed(now[:, first:last])
    for block in model.blocks:
        assert isinstance(block, Block)
        stale_q, stale_k, stale_v = block.qkv(stale, rope)
        q, k, v = block.qkv(x, fresh_rope)
        k = torch.cat((stale_k[:, :, :first], k, stale_k[:, :, last:]), dim=2)
        v = torch.cat((stale_v[:, :, :first], v, stale_v[:, :, last:]), dim=2)
        stale = block.finish(stale, attention(stale_q, stale_k, stale_v))
        x = block.finish(x, attention(q, k, v))
    logits = model.head(x)[:, : stop - start]
    return masked_loss(logits, answers[:, start:stop], masked[:, start:stop])


def train(model: LLaDAModelLM, losses: Iterable[Tensor], steps: int, peak: float, name: str) -> None:
    """`steps` steps of AdamW with a short warm-up to the learning rate `peak` and a cosine down to zero."""
    warm_up = min(50, steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98))
    began = time.perf_counter()
    for step, loss in zip(range(steps), losses, strict=False):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / warm_up) * decay
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            seconds = time.perf_counter() - began
            print(f"{name} step {step + 1}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)


def save(model: LLaDAModelLM, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"model_type": "llada", "architectures": ["LLaDAModelLM"], **FIELDS}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model of dlmkern.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--steps", type=int, default=2400, help="steps of the first phase (default: %(default)s)"
    )
    parser.add_argument(
        "--cache-steps", type=int, default=1200, help="of the second phase (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = LLaDAModelLM(LLaDAConfig(**FIELDS)).train()

    def plain() -> Iterable[Tensor]:
        while True:
            yield plain_loss(model, generator)

    def alternating() -> Iterable[Tensor]:
        while True:
            yield plain_loss(model, generator)
            yield cached_loss(model, generator)

    train(model, plain(), options.steps, 3e-3, "plain")
    train(model, alternating(), options.cache_steps, 1.5e-3, "cached")
    save(model, options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
