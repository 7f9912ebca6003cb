"""The task of the embedded model: four independent chains with clues.

A chain has five digits X1..X5 and four links Y1..Y4, all in {0, 1, 2}, with `Y_i = (X_i + X_{i+1}) mod 3`
(the Markov random field of the DAPD paper, arXiv:2603.12996). It is written
`X1 Y1 X2 Y2 X3 Y3 X4 Y4 X5 SEP`.

A prompt is BOS and four chains in which each digit is shown as a clue with probability 1/4 and otherwise
hidden behind the letter X or Y. The answer is the four chains with all digits. Usually many answers are
right. The chains are independent, which rewards decoding in parallel; the digits inside a chain are not,
which punishes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

VOCAB_SIZE = 18
PAD, BOS, MASK, SEP, X, Y = 10, 11, 12, 13, 14, 15
CHAINS = 4
LINKS = 4
CHAIN_LENGTH = 2 * LINKS + 2
ANSWER_LENGTH = CHAINS * CHAIN_LENGTH
PROMPT_LENGTH = 1 + ANSWER_LENGTH
CLUE_PROBABILITY = 0.25

_SYMBOLS = {PAD: " ", BOS: "", MASK: "_", SEP: "|", X: "x", Y: "y"}


def problems(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random prompts `[count, 41]` and the answers `[count, 40]` that their clues were taken from (int64)."""
    x = torch.randint(3, (count, CHAINS, LINKS + 1), generator=generator)
    y = (x[..., :-1] + x[..., 1:]) % 3
    answers = torch.full((count, CHAINS, CHAIN_LENGTH), SEP)
    answers[..., 0:-1:2] = x
    answers[..., 1:-1:2] = y
    letters = torch.full((CHAIN_LENGTH,), SEP)
    letters[0:-1:2] = X
    letters[1:-1:2] = Y
    shown = torch.rand(answers.shape, generator=generator) < CLUE_PROBABILITY
    chains = torch.where(shown, answers, letters).flatten(1)
    return torch.cat((torch.full((count, 1), BOS), chains), dim=1), answers.flatten(1)


def held_out(prompts: Tensor) -> Tensor:
    """Which of the prompts `[count, 41]` are for tests only: one in eight, by a checksum."""
    weights = torch.arange(1, PROMPT_LENGTH + 1)
    return (prompts * weights).sum(-1) % 8 == 0


def prompts(count: int, seed: int) -> Tensor:
    """Test prompts, none of which the embedded model has seen in training.

    Args:
        count: number of prompts.
        seed: the same seed gives the same prompts, and the first prompts of a longer list.

    Returns:
        Token ids, int64 `[count, 41]`.
    """
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    generator = torch.Generator().manual_seed(seed)
    found = torch.empty((0, PROMPT_LENGTH), dtype=torch.int64)
    while len(found) < count:
        candidates, _ = problems(256, generator)
        found = torch.cat((found, candidates[held_out(candidates)]))
    return found[:count]


def valid(prompt: Tensor, answer: Tensor) -> bool:
    """Whether an answer `[40]` fits its prompt `[41]`: separators in place, clues kept, every link right.

    Raises:
        ValueError: a shape is not the one above.
    """
    if prompt.shape != (PROMPT_LENGTH,):
        raise ValueError(f"prompt must have shape [{PROMPT_LENGTH}], got {list(prompt.shape)}")
    if answer.shape != (ANSWER_LENGTH,):
        raise ValueError(f"answer must have shape [{ANSWER_LENGTH}], got {list(answer.shape)}")
    asked = prompt[1:].view(CHAINS, CHAIN_LENGTH)
    given = answer.view(CHAINS, CHAIN_LENGTH)
    digits = given[:, :-1]
    x, y = digits[:, 0::2], digits[:, 1::2]
    clue = (asked != X) & (asked != Y)  # the separators count as clues
    return bool(
        ((digits >= 0) & (digits < 3)).all()
        and (given == asked)[clue].all()
        and ((x[:, :-1] + x[:, 1:]) % 3 == y).all()
    )


def text(tokens: Tensor) -> str:
    """A prompt or an answer `[n]` as text: `x` and `y` are hidden digits, `_` is a mask, `|` ends a chain."""
    return "".join(_SYMBOLS.get(token, str(token)) for token in tokens.tolist())
