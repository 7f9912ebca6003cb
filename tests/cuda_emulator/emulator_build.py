"""Builds CUDA sources against the emulator with the host compiler; results are cached by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EMULATOR = Path(__file__).resolve().parent
ROOT = EMULATOR.parents[1]
BUILD = ROOT / "build" / "emulator"

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def cuda_include() -> Path:
    """The CUDA toolkit's headers: of CUDA_HOME (or its usual place), beside nvcc, or those in Triton."""
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
    """Compiles `sources` and the emulator to a shared library, or to a program if `name` doesn't end in .so.

    Results are kept in build/emulator and made again when a source, a header beside one, or a flag changes.
    Raises RuntimeError with the compiler's output if it fails or warns.
    """
    directories = [EMULATOR, ROOT / "csrc" / "cuda", ROOT / "csrc" / "include", *includes]
    command = [
        os.environ.get("CXX", "g++"),
        "-std=c++20",
        "-O1",
        "-g1",
        *WARNINGS,
        "-fPIC",
        "-fvisibility=hidden",
    ]
    command += ["-DDLMKERN_EMULATE", *flags, "-isystem", str(cuda_include())]
    command += [f"-I{directory}" for directory in directories]
    headers = b"".join(path.read_bytes() for folder in directories for path in sorted(folder.glob("*.h")))

    def compile_source(source: Path) -> Path:
        key = [repr(command).encode(), headers, source.read_bytes()]
        return make(f"{source.stem}.o", key, [*command, "-x", "c++", "-c", str(source)])

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(
            pool.map(compile_source, [*sources, EMULATOR / "cuda_emulator.cpp", EMULATOR / "fibre.cpp"])
        )
    link = ["-shared"] if name.endswith(".so") else []
    key = [repr(command).encode(), *(str(path).encode() for path in objects)]
    return make(name, key, [command[0], *flags, *link, *map(str, objects)])


def make(name: str, key: Sequence[bytes], command: Sequence[str]) -> Path:
    """The file that `command` writes to what follows its -o, or an earlier one made with the same key."""
    digest = hashlib.sha256()
    for part in key:
        digest.update(part)
    output = BUILD / digest.hexdigest()[:16] / name
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = output.with_name(f"{name}.{os.getpid()}")
        result = subprocess.run([*command, "-o", str(scratch)], capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
        scratch.rename(output)  # other test processes see all of it or nothing
    return output
