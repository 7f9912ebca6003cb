"""The embedded model, its task, and the script that trained it."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dlmkern.models import chains4, load_model, tiny

ROOT = Path(__file__).parents[2]


def decode(model: torch.nn.Module, prompts: Tensor, commit: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    """Fill the answers: `commit` maps confidences [B, 40], -1 where committed, to the positions to commit."""
    answer = torch.full((len(prompts), chains4.ANSWER_LENGTH), chains4.MASK)
    forwards = 0
    while (answer == chains4.MASK).any():
        with torch.no_grad():
            logits = model(torch.cat((prompts, answer), dim=1)).logits[:, chains4.PROMPT_LENGTH :].clone()
        logits[..., chains4.MASK] = -torch.inf
        confidence, token = logits.double().softmax(-1).max(-1)
        confidence[answer != chains4.MASK] = -1
        answer = torch.where(commit(confidence), token, answer)
        forwards += 1
    return answer, forwards


def most_confident(confidence: Tensor) -> Tensor:
    return torch.zeros_like(confidence, dtype=torch.bool).scatter_(
        1, confidence.argmax(1, keepdim=True), True
    )


def above_threshold(confidence: Tensor) -> Tensor:
    left = confidence.max(1, keepdim=True).values >= 0
    return ((confidence >= 0.9) | most_confident(confidence)) & left


def all_at_once(confidence: Tensor) -> Tensor:
    return confidence >= 0


def share_valid(prompts: Tensor, answers: Tensor) -> float:
    valid = [chains4.valid(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return sum(valid) / len(valid)


def test_quality() -> None:
    """Careful decoding of unseen prompts is right, decoding all at once is wrong."""
    model = tiny()
    prompts = chains4.prompts(20, seed=123)
    answers, forwards = decode(model, prompts, most_confident)
    assert forwards == chains4.ANSWER_LENGTH
    assert share_valid(prompts, answers) >= 0.95
    answers, forwards = decode(model, prompts, above_threshold)
    assert forwards < chains4.ANSWER_LENGTH
    assert share_valid(prompts, answers) >= 0.95
    answers, forwards = decode(model, prompts, all_at_once)
    assert forwards == 1
    assert share_valid(prompts, answers) == 0


def test_tiny_is_a_loaded_model() -> None:
    model = tiny(dtype="float64")
    assert model.dtype == torch.float64
    assert sum(parameter.numel() for parameter in model.parameters()) == 166_720
    assert model.config.mask_token_id == chains4.MASK
    assert model.config.vocab_size == chains4.VOCAB_SIZE


def test_problems_fit_their_prompts() -> None:
    prompts, answers = chains4.problems(500, torch.Generator().manual_seed(0))
    assert share_valid(prompts, answers) == 1
    digit = prompts[:, 1:] < 3
    places = torch.arange(chains4.ANSWER_LENGTH) % 10 != 9
    assert 0.23 < digit[:, places].double().mean() < 0.27
    assert (prompts[:, 0] == chains4.BOS).all()
    assert (prompts[:, 1:][:, ~places] == chains4.SEP).all()


def test_every_wrong_token_is_found() -> None:
    """A link depends on its two ends, so one changed token always breaks a constraint."""
    prompts, answers = chains4.problems(3, torch.Generator().manual_seed(1))
    for prompt, answer in zip(prompts, answers, strict=True):
        for position in range(chains4.ANSWER_LENGTH):
            for token in range(chains4.VOCAB_SIZE):
                changed = answer.clone()
                changed[position] = token
                assert chains4.valid(prompt, changed) == (token == answer[position])


def test_clues_must_be_kept() -> None:
    """Another chain that is right in itself does not answer a prompt whose clues say otherwise."""
    prompts, answers = chains4.problems(2, torch.Generator().manual_seed(2))
    assert not chains4.valid(prompts[0], answers[1])
    without_clues = prompts[0].clone()
    chain = torch.tensor([chains4.X, chains4.Y] * 4 + [chains4.X, chains4.SEP])
    without_clues[1:] = chain.repeat(4)
    assert chains4.valid(without_clues, answers[1])


def test_shapes_are_checked() -> None:
    prompts, answers = chains4.problems(1, torch.Generator().manual_seed(3))
    with pytest.raises(ValueError, match=r"prompt must have shape \[41\], got \[1, 41\]"):
        chains4.valid(prompts, answers[0])
    with pytest.raises(ValueError, match=r"answer must have shape \[40\], got \[39\]"):
        chains4.valid(prompts[0], answers[0, :-1])
    with pytest.raises(ValueError, match="count must not be negative, got -1"):
        chains4.prompts(-1, seed=0)


def test_prompts_are_held_out_and_reproducible() -> None:
    prompts = chains4.prompts(300, seed=5)
    assert prompts.shape == (300, chains4.PROMPT_LENGTH)
    assert prompts.dtype == torch.int64
    assert chains4.held_out(prompts).all()
    assert torch.equal(chains4.prompts(7, seed=5), prompts[:7])
    assert not torch.equal(chains4.prompts(7, seed=6), prompts[:7])
    assert chains4.prompts(0, seed=5).shape == (0, chains4.PROMPT_LENGTH)


def test_text() -> None:
    tokens = torch.tensor([chains4.BOS, chains4.X, 1, chains4.Y, chains4.MASK, chains4.SEP])
    assert chains4.text(tokens) == "x1y_|"


@pytest.fixture
def script() -> Iterator[dict]:
    """The training script's functions; its process-wide settings are undone afterwards."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield runpy.run_path(str(ROOT / "examples/train_tiny.py"))
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def test_training_never_sees_a_held_out_prompt(script: dict) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        prompts, answers = script["training_problems"](generator)
        assert len(prompts) == len(answers) == 64
        assert not chains4.held_out(prompts).any()


def test_training_is_deterministic(script: dict, tmp_path: Path) -> None:
    for run in ("first", "second"):
        script["main"]([str(tmp_path / run), "--steps", "3", "--cache-steps", "2"])
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    script["main"]([str(tmp_path / "other"), "--steps", "3", "--cache-steps", "0", "--seed", "1"])
    name = "model.transformer.wte.weight"
    first, other = (load_file(tmp_path / run / "model.safetensors")[name] for run in ("first", "other"))
    assert not torch.equal(first, other)
    load_model(tmp_path / "first")


def test_cached_loss_equals_the_plain_forward_when_nothing_is_stale(script: dict) -> None:
    """While its block is still fully masked, the cached forward is the plain one."""
    cached_loss = script["cached_loss"]
    model = tiny(dtype="float64")
    seen = []

    def plain(logits: Tensor, answers: Tensor, masked: Tensor) -> Tensor:
        seen.append((logits, answers))
        return logits.sum()

    cached_loss.__globals__["random_mask"] = lambda size, generator: torch.ones(64, size, dtype=torch.bool)
    cached_loss.__globals__["masked_loss"] = plain
    caches = set()
    for seed in (1, 4, 6, 14):
        with torch.no_grad():
            cached_loss(model, torch.Generator().manual_seed(seed))
            logits, _ = seen.pop()
            generator = torch.Generator().manual_seed(seed)
            prompts, answers = script["training_problems"](generator)
            start, stop = script["random_block"](generator)
            caches.add("dual" if torch.randint(2, (), generator=generator) else "prefix")
            state = answers.masked_fill(torch.arange(chains4.ANSWER_LENGTH) >= start, chains4.MASK)
            expected = model(torch.cat((prompts, state), dim=1)).logits[:, 41 + start : 41 + stop]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert caches == {"dual", "prefix"}
