"""One to eight chains: the task, and what the model trained on it can do."""

from __future__ import annotations

import pytest
import torch

import dlmkern
from benchmarks import chains
from dlmkern import decoders
from dlmkern.models import chains4, load_model


@pytest.mark.parametrize("count", [1, 3, 8])
def test_problems_fit_their_prompts(count: int) -> None:
    prompts, answers = chains.problems(50, count, torch.Generator().manual_seed(0))
    assert prompts.shape == (50, chains.PROMPT_LENGTH)
    assert answers.shape == (50, 10 * count)
    assert (prompts[:, 0] == chains4.BOS).all()
    asked = prompts[:, 1 : 1 + 10 * count]
    assert (asked != chains4.PAD).all()
    assert (prompts[:, 1 + 10 * count :] == chains4.PAD).all()
    clue = asked < 3
    assert torch.equal(asked[clue], answers[clue])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert chains.valid_chains(prompt, answer) == [True] * count


def test_chains_are_judged_one_by_one() -> None:
    prompts, answers = chains.problems(1, 5, torch.Generator().manual_seed(0))
    answer = answers[0].clone()
    answer[32] = 7
    answer[49] = 0
    assert chains.valid_chains(prompts[0], answer) == [True, True, True, False, False]
    prompts, answers = chains4.problems(1, torch.Generator().manual_seed(0))
    answer = answers[0].clone()
    answer[12] = 7
    assert chains.valid_chains(prompts[0], answer) == [True, False, True, True]


@pytest.mark.parametrize("count", [0, 9])
def test_the_number_of_chains_is_checked(count: int) -> None:
    with pytest.raises(ValueError, match=f"chains must be from 1 to 8, got {count}"):
        chains.prompts(1, count, seed=0)


def test_prompts_are_held_out_and_reproducible() -> None:
    prompts = chains.prompts(300, 2, seed=5)
    assert prompts.shape == (300, chains.PROMPT_LENGTH)
    assert chains.held_out(prompts).all()
    assert torch.equal(chains.prompts(7, 2, seed=5), prompts[:7])
    assert not torch.equal(chains.prompts(7, 2, seed=6), prompts[:7])


@pytest.mark.parametrize("count", [1, 8])
def test_chains8_answers_unseen_prompts(count: int) -> None:
    """One token a pass is right, all at once is wrong."""
    model = load_model(chains.CHECKPOINT)
    prompts = chains.prompts(10, count, seed=123)
    answers = dlmkern.generate(model, prompts, decoders.vanilla(None), 10 * count).tokens
    valid = [all(chains.valid_chains(*pair)) for pair in zip(prompts, answers, strict=True)]
    assert sum(valid) >= 9
    answers = dlmkern.generate(model, prompts, decoders.vanilla(None, 1), 10 * count).tokens
    valid = [all(chains.valid_chains(*pair)) for pair in zip(prompts, answers, strict=True)]
    assert sum(valid) <= 5
