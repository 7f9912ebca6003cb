"""The training of the studies' models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import chains, train
from dlmkern.models import load_model


def test_training_never_sees_a_held_out_prompt() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = set()
    for _ in range(60):
        groups = train.chains8_batch(generator)
        for prompts, answers in groups:
            assert len(prompts) == len(answers) == 16
            assert not chains.held_out(prompts).any()
        numbers |= {answers.shape[1] // 10 for _, answers in groups}
    assert numbers == set(range(1, 9))


@pytest.fixture
def _process_settings() -> Iterator[None]:
    """Undoes what training sets for the process."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("_process_settings")
@pytest.mark.parametrize("task", ["mrf9", "chains8"])
def test_training_is_deterministic(task: str, tmp_path: Path) -> None:
    for run in ("first", "second"):
        assert train.main([task, str(tmp_path / run), "--steps", "2"]) == 0
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    load_model(tmp_path / "first")


def test_steps_are_checked() -> None:
    with pytest.raises(SystemExit):
        train.main(["mrf9", "nowhere", "--steps", "0"])
