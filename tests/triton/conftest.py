"""Triton interprets or compiles, for a whole process: each kind of test has one of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
