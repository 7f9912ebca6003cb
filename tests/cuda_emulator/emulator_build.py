"""Builds CUDA sources against the emulator with the host compiler; results are cached by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

EMULATOR = Path(__file__).resolve().parent
ROOT = EMULATOR.parents[1]
BUILD = ROOT / "build" / "emulator"

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def cuda_include() -> Path:
    """The CUDA toolkit's headers: of CUDA_HOME (or its usual place), next to nvcc, or those Triton carries."""
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    if nvcc := shutil.which("nvcc"):
        candidates.append(Path(nvcc).resolve().parents[1] / "include")
    try:
        import triton
    except ImportError:
        pass
    else:
        candidates.append(Path(triton.__file__).parent / "backends" / "nvidia" / "include")
    for candidate in candidates:
        if (candidate / "cuda_bf16.h").exists():
            return candidate
    raise FileNotFoundError(f"no CUDA headers in any of {[str(c) for c in candidates]}")


def build(
    name: str, sources: Sequence[Path], *, flags: Sequence[str] = (), includes: Sequence[Path] = ()
) -> Path:
    """Compiles `sources` and the emulator to a shared library, or to a program if `name` does not end in .so.

    The result is kept in build/emulator and made again when a source, a header beside one, or a flag changes.
    Raises RuntimeError with the compiler's output if it fails or warns.
    """
    directories = [EMULATOR, ROOT / "csrc" / "cuda", ROOT / "csrc" / "include", *includes]
    objects = [*sources, EMULATOR / "cuda_emulator.cpp", EMULATOR / "fibre.cpp"]
    compile_flags = [
        "-std=c++20",
        "-O1",
        "-g1",
        *WARNINGS,
        "-fPIC",
        "-fvisibility=hidden",
        "-DDLMKERN_EMULATE",
    ]
    compile_flags += [
        *flags,
        "-isystem",
        str(cuda_include()),
        *(f"-I{directory}" for directory in directories),
    ]

    headers = sorted(path for directory in directories for path in directory.glob("*.h"))
    digest = hashlib.sha256(repr((name, compile_flags)).encode())
    for path in [*objects, *headers]:
        digest.update(path.read_bytes())
    output = BUILD / digest.hexdigest()[:16] / name
    if output.exists():
        return output

    output.parent.mkdir(parents=True, exist_ok=True)
    link = ["-shared"] if name.endswith(".so") else []
    scratch = output.with_name(f"{name}.{os.getpid()}")
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *compile_flags, *link, "-x", "c++", *map(str, objects), "-o", str(scratch)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
    scratch.rename(output)  # other test processes see all of it or nothing
    return output
