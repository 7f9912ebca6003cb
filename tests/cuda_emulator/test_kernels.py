"""The CUDA kernels as code: what nvcc makes of them, what sanitizers and other schedules find in them.

Their results are tested with those of the other backends, in tests/ops.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cuda_emulator.emulator_build import BUILD, EMULATOR, ROOT, SANITIZE, build

SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
INCLUDES = [ROOT / "csrc" / name for name in ("include", "common", "cuda")]
ARCHITECTURES = {"80": "sm_80", "90": "sm_90", "100": "[sm_100,compute_100]"}


def compile_with_nvcc(source: Path) -> str:
    """ptxas' report on the source for every architecture; kept until the source or a header changes."""
    headers = [path for folder in INCLUDES for path in sorted(folder.glob("*.h"))]
    flags = ["-std=c++17", "-O3", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror", "-Xptxas=-v"]
    flags += [f"-gencode=arch=compute_{number},code={code}" for number, code in ARCHITECTURES.items()]
    digest = hashlib.sha256(repr(flags).encode())
    for path in [source, *headers]:
        digest.update(path.read_bytes())
    report = BUILD / "nvcc" / f"{source.stem}-{digest.hexdigest()[:16]}"
    if not report.exists():
        report.parent.mkdir(parents=True, exist_ok=True)
        command = [
            "nvcc",
            *flags,
            *(f"-I{folder}" for folder in INCLUDES),
            "-c",
            str(source),
            "-o",
            "/dev/null",
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        report.write_text(result.stderr)
    return report.read_text()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
def test_nvcc_compiles_without_spills(source: Path) -> None:
    report = compile_with_nvcc(source)
    kernels = re.findall(
        r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        report,
        flags=re.DOTALL,
    )
    assert len(kernels) == report.count("Compiling entry function")
    for name, architecture, stores, loads, registers in kernels:
        print(f"{architecture} {registers} registers {name}")
        assert (int(stores), int(loads)) == (0, 0), f"{name} spills on {architecture}"
    architectures = {architecture for _, architecture, *_ in kernels}
    assert not kernels or architectures == {f"sm_{number}" for number in ARCHITECTURES}


def build_driver(name: str, *flags: str) -> Path:
    return build(
        name,
        [EMULATOR / "kernels_driver.cpp", *SOURCES],
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
