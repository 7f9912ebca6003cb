"""The CUDA kernels as code: what sanitizers and other schedules find in them.

Their results are tested with those of the other backends, in tests/ops.
"""

from __future__ import annotations

import subprocess

from tests.cuda_emulator.emulator_build import EMULATOR, ROOT, SANITIZE, build

SCHEDULES = [("0", "0"), ("1", "0"), ("2", "1")]  # order and seed


def test_sanitizers_find_nothing_and_schedules_give_the_same_bits() -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer over awkward shapes, strides and alignments."""
    program = build(
        "kernels_driver",
        [EMULATOR / "kernels_driver.cpp", *sorted((ROOT / "csrc" / "cuda").glob("*.cu"))],
        flags=["-ffp-contract=off", *SANITIZE],
        includes=[ROOT / "csrc" / "common"],
    )
    hashes = set()
    for schedule in SCHEDULES:
        result = subprocess.run([program, *schedule], capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        hashes.add(result.stdout)
    assert len(hashes) == 1, hashes
