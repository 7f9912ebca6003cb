"""Triton interprets or compiles, for a whole process: each kind of test has one of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


def _run_again(file: str, interpret: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_"))}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-q", "-rP", "-p", "no:cacheprovider", file]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed, done.stdout
    assert int(passed[1]) > 1, done.stdout


@pytest.fixture
def run_again() -> Callable[[str, bool], None]:
    """Runs a test file in a process of its own, interpreted or not; its tests must run and pass."""
    return _run_again


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """torch.empty is filled with NaN or the largest integer, so that what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def far_memory(poisoned_outputs: None, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """More than 2^31 numbers, of which the interpreter touches only those that a kernel uses."""
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)  # it would copy all of them back
    torch.use_deterministic_algorithms(False)  # and this fill them
    return torch.empty(2**31 + 4096, dtype=torch.float16)
