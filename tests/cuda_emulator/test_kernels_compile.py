"""What nvcc makes of the CUDA kernels: no warnings, and everything in registers."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cuda_emulator.emulator_build import BUILD, ROOT

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
