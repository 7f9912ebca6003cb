"""The C library for programs without Python: installed, found by CMake, linked and run."""

from __future__ import annotations

from pathlib import Path

import dlmkern
from tests.build.cmake import ROOT, build, run


def test_example(tmp_path: Path) -> None:
    folder = build("cpu_tests", "dlmkern", DLMKERN_TEST_ISAS="ON")
    prefix, binary = tmp_path / "prefix", tmp_path / "binary"
    run("cmake", "--install", folder, "--prefix", prefix)
    assert (prefix / "include" / "dlmkern.h").exists()
    source = ROOT / "examples" / "c"
    flags = (f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_C_FLAGS=-Wall -Wextra -Wpedantic -Werror")
    run("cmake", "-S", source, "-B", binary, "-G", "Ninja", *flags)
    run("cmake", "--build", binary)
    lines = run(binary / "example").splitlines()
    assert lines[0].startswith(f"dlmkern {dlmkern.__version__}, ")
    assert [line.rpartition(", ")[2] for line in lines[1:]] == ["commit", "commit", "wait", "wait"]
    assert lines[1] == "position 0: token 0, confidence 0.999383, entropy 0.006167, commit"
