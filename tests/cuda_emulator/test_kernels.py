"""The CUDA kernels as code: what sanitizers and other schedules find in them.

Their results are tested with those of the other backends, in tests/ops.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cuda_emulator.emulator_build import EMULATOR, ROOT, SANITIZE, build


def build_driver(name: str, *flags: str) -> Path:
    return build(
        name,
        [EMULATOR / "kernels_driver.cpp", *sorted((ROOT / "csrc" / "cuda").glob("*.cu"))],
        flags=["-ffp-contract=off", *flags],
        includes=[ROOT / "csrc" / "common"],
    )


def run_driver(program: Path, order: int, seed: int) -> str:
    result = subprocess.run([program, str(order), str(seed)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_sanitizers_find_nothing() -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer over awkward shapes, strides and alignments."""
    run_driver(build_driver("kernels_sanitized", *SANITIZE), order=2, seed=1)


def test_schedules_give_the_same_bits() -> None:
    program = build_driver("kernels_driver")
    hashes = {run_driver(program, *schedule) for schedule in [(0, 0), (1, 0), (2, 1), (2, 2), (2, 3)]}
    assert len(hashes) == 1
