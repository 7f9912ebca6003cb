"""One source, several instruction sets: the choice at run time, and what the compiler made of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.build.cmake import ROOT
from tests.cpu.capi import NULL, OK, UNAVAILABLE, VALUE, Library

CODE = """
import sys
import numpy as np
from tests.cpu.capi import Library
library = Library(sys.argv[1])
x, token = np.zeros((1, 1, 5), np.float32), np.zeros((1, 1), np.int64)
code = library.call("cpu_token_stats", x, None, None, -1, token, *[None] * 4)
print(library.call("cpu_isa").decode(), code)
"""

needs_x86 = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="only x86-64 has several instruction sets"
)


def ask(library: Library, name: str | None, *prefix: str) -> list[str]:
    """The instruction set and token_stats' error code in a process with DLMKERN_CPU_ISA=name."""
    environment = {key: value for key, value in os.environ.items() if key != "DLMKERN_CPU_ISA"}
    if name is not None:
        environment["DLMKERN_CPU_ISA"] = name
    command = [*prefix, sys.executable, "-c", CODE, str(library.path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_environment_names_one(library: Library) -> None:
    assert ask(library, "portable") == ["portable", "0"]
    assert ask(library, "") == ask(library, None)
    assert ask(library, "sse9") == ["unavailable", str(UNAVAILABLE)]


def test_set_isa(library: Library) -> None:
    before = library.call("cpu_isa")
    assert library.call("cpu_set_isa", None) == NULL
    assert library.call("cpu_set_isa", b"sse9") == VALUE
    assert library.call("cpu_isa") == before
    assert library.call("cpu_set_isa", b"portable") == OK
    assert library.call("cpu_isa") == b"portable"
    assert library.call("cpu_set_isa", before) == OK


@needs_x86
@pytest.mark.parametrize(("cpu", "expected"), [("Nehalem", "portable"), ("Haswell", "avx2")])
def test_the_best_one_of_the_machine_is_taken(
    build_folder: Path, tmp_path: Path, cpu: str, expected: str
) -> None:
    """Emulated processors: one without AVX, one with AVX2 but without AVX-512. Their answers agree."""
    if shutil.which("qemu-x86_64") is None:
        pytest.skip("qemu-x86_64 is not installed (Debian's package qemu-user)")
    program = tmp_path / "example"
    source = ROOT / "examples" / "c" / "main.c"
    include = ROOT / "csrc" / "include"
    link = ["-L", build_folder, "-ldlmkern", f"-Wl,-rpath,{build_folder}"]
    subprocess.run(["cc", source, "-I", include, *link, "-o", program], check=True)
    native = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    done = subprocess.run(["qemu-x86_64", "-cpu", cpu, program], capture_output=True, text=True, check=True)
    emulated = done.stdout.splitlines()
    assert emulated[0].endswith(f", {expected}")
    assert emulated[1:] == native[1:]


def compiled(build_folder: Path, isa: str, source: str) -> Path:
    return next((build_folder / "CMakeFiles" / f"dlmkern_{isa}.dir").rglob(f"{source}.o"))


def disassemble(build_folder: Path, isa: str, source: str, function: str) -> list[str]:
    """The instructions of the function whose demangled name matches."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    file = compiled(build_folder, isa, source)
    text = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", file], capture_output=True, text=True, check=True
    ).stdout
    body = re.search(rf"<[^\n]*::{function}[^\n]*>:\n(.*?)\n\n", text, re.DOTALL)
    assert body is not None
    return [line.strip() for line in body[1].splitlines()]


@needs_x86
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize(
    ("source", "table"), [("row_kernels.cpp", "kTable"), ("score_kernels.cpp", "kScoreTable")]
)
def test_no_symbol_can_replace_a_portable_one(build_folder: Path, isa: str, source: str, table: str) -> None:
    """The linker keeps one copy of an inline function: never one that an old CPU can't run."""
    lines = subprocess.run(
        ["nm", "-C", compiled(build_folder, isa, source)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    weak = [line for line in lines if re.match(r"[0-9a-f ]+ [WVuvw] ", line)]
    assert weak == []
    public = [line for line in lines if re.match(r"[0-9a-f]+ [TDRB] ", line)]
    assert len(public) == 1, public
    assert public[0].endswith(f"dlmkern::{isa}::{table}")


@needs_x86
@pytest.mark.parametrize(("isa", "register"), [("avx2", "ymm"), ("avx512", "zmm")])
def test_hot_loop(build_folder: Path, isa: str, register: str) -> None:
    """The widest sum (entropy and KL of float32): full vectors, fused products, nothing spilled."""
    instructions = disassemble(build_folder, isa, "row_kernels.cpp", "sums<float, 3u>")
    # From the first prefetch to the jump back over it.
    start = next(i for i, line in enumerate(instructions) if "prefetch" in line)
    end = next(i for i in range(start, len(instructions)) if re.search(r"\sj\w+ ", instructions[i]))
    loop = instructions[start:end]
    vectors = [line for line in loop if re.search(r"\tv?\w+ps\s", line)]
    assert len(vectors) > 40
    assert all(f"%{register}" in line for line in vectors)
    # Two vectors of both rows: an exp with seven products for each, and two sums of products.
    assert sum("\tvf" in line for line in loop) == 2 * (2 * 7 + 2)
    stores = [line for line in loop if re.search(r"vmov\w+\s+%[xyz]mm\d+,.*\(", line)]
    assert stores == []


@needs_x86
@pytest.mark.parametrize(("isa", "register", "rows"), [("avx2", "ymm", 6), ("avx512", "zmm", 12)])
def test_tile_of_scores(build_folder: Path, isa: str, register: str, rows: int) -> None:
    """Two fused products a row of queries in full vectors, nothing spilled."""
    instructions = disassemble(build_folder, isa, "score_kernels.cpp", r"tile<float[^\n]*, float>")
    products = [i for i, line in enumerate(instructions) if "\tvfmadd" in line]
    assert len(products) == 2 * rows
    jump = next(i for i in range(products[-1], len(instructions)) if re.search(r"\tj\w+ ", instructions[i]))
    target = instructions[jump].split("\tj")[1].split()[1]
    start = next(i for i, line in enumerate(instructions) if line.startswith(f"{target}:"))
    loop = instructions[start:jump]
    vectors = [line for line in loop if re.search(r"\tv\w+\s", line)]
    assert len(vectors) == 2 + 3 * rows  # two vectors of keys; each query is spread and multiplied with both
    assert all(f"%{register}" in line for line in vectors)
    assert not any(re.search(r"vmov\w+\s+%[xyz]mm\d+,.*\(", line) for line in loop)


@needs_x86
def test_avx512_itself(library: Library) -> None:
    """Where there is no AVX-512, its loops only run as avx512-on-avx2."""
    before = library.call("cpu_isa")
    code = library.call("cpu_set_isa", b"avx512")
    if code == UNAVAILABLE:
        pytest.skip("this machine has no AVX-512")
    assert library.call("cpu_isa") == b"avx512"
    assert library.call("cpu_set_isa", before) == OK
