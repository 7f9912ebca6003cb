"""One to eight independent chains: `dlmkern.models.chains4` with a number of chains that is asked for.

A prompt is BOS and eight slots for a chain each; slots beyond the chains asked for are filled with PAD. The
answer has as many chains as were asked for. So a chain's answer is always equally far from its prompt.
"""

from pathlib import Path

import torch
from torch import Tensor

from dlmkern.models import chains4
from dlmkern.models.chains4 import CHAIN_LENGTH

CHECKPOINT = Path(__file__).parent / "checkpoints" / "chains8"
MOST_CHAINS = 8
PROMPT_LENGTH = 1 + MOST_CHAINS * CHAIN_LENGTH


def problems(count: int, chains: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random prompts `[count, 81]` and answers `[count, 10 * chains]` for 1 to 8 chains (int64)."""
    if not 1 <= chains <= MOST_CHAINS:
        raise ValueError(f"chains must be from 1 to {MOST_CHAINS}, got {chains}")
    prompts, answers = chains4.problems(count * MOST_CHAINS // chains4.CHAINS, generator)
    asked = prompts[:, 1:].reshape(count, -1)
    asked[:, chains * CHAIN_LENGTH :] = chains4.PAD
    prompts = torch.cat((torch.full((count, 1), chains4.BOS), asked), dim=1)
    return prompts, answers.reshape(count, -1)[:, : chains * CHAIN_LENGTH]


def held_out(prompts: Tensor) -> Tensor:
    """Which of the prompts `[count, 81]` are for tests only: one in eight, by a checksum."""
    return (prompts * torch.arange(1, PROMPT_LENGTH + 1)).sum(-1) % 8 == 0


def prompts(count: int, chains: int, seed: int) -> Tensor:
    """Test prompts, none of which the model has seen in training.

    Args:
        count: number of prompts.
        chains: how many chains each of them asks for, from 1 to 8.
        seed: the same seed gives the same prompts, and the first prompts of a longer list.

    Returns:
        Token ids, int64 `[count, 81]`.
    """
    generator = torch.Generator().manual_seed(seed)
    found = torch.empty((0, PROMPT_LENGTH), dtype=torch.int64)
    while len(found) < count:
        candidates, _ = problems(256, chains, generator)
        found = torch.cat((found, candidates[held_out(candidates)]))
    return found[:count]


def valid_chains(prompt: Tensor, answer: Tensor) -> list[bool]:
    """Which chains hold: each is judged in an answer whose other chains are copies of it.

    Args:
        prompt: token ids, of `chains4` or of this module.
        answer: token ids, 10 for each chain.
    """
    asked, given = (x.view(-1, CHAIN_LENGTH) for x in (prompt[1 : 1 + len(answer)], answer))
    return [
        chains4.valid(torch.cat((prompt[:1], chain.repeat(chains4.CHAINS))), filled.repeat(chains4.CHAINS))
        for chain, filled in zip(asked, given, strict=True)
    ]
