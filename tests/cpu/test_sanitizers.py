"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

from pathlib import Path

from tests.build.cmake import ROOT, build, run

FLAGS = ("-std=c++17", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def test_awkward_shapes(tmp_path: Path) -> None:
    folder = build("sanitize", "dlmkern", DLMKERN_SANITIZE="ON", DLMKERN_TEST_ISAS="ON")
    program = tmp_path / "sanitize"
    source = ROOT / "tests" / "cpu" / "sanitize.cpp"
    link = ("-L", folder, "-ldlmkern", f"-Wl,-rpath,{folder}")
    run("c++", *FLAGS, source, "-I", ROOT / "csrc" / "include", *link, "-o", program)
    calls, word = run(program).split()
    assert word == "calls"
    assert int(calls) > 1000
