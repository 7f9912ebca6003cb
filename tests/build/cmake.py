"""Builds of csrc for tests, kept in build/ and brought up to date by Ninja."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """With this Python's CMake and Ninja on PATH."""
    return os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Returns what the command prints; AssertionError with all of it if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def build(name: str, target: str, **options: str | Path) -> Path:
    """Builds a target without CUDA, warnings being errors, in build/<name> and returns that folder."""
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    definitions = {"DLMKERN_CUDA": "OFF", "DLMKERN_WERROR": "ON", **options}
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes take turns
        run(
            "cmake",
            "-S",
            ROOT / "csrc",
            "-B",
            folder,
            "-G",
            "Ninja",
            *(f"-D{k}={v}" for k, v in definitions.items()),
        )
        run("cmake", "--build", folder, "--target", target)
    return folder
