"""Builds the C library for these tests, with the AVX-512 loops also in AVX2's instructions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.build.cmake import build
from tests.cpu.capi import OK, Library

CPU = Path("/proc/cpuinfo")
FLAGS = set(CPU.read_text().split()) if CPU.exists() else set()
NEEDS = {"portable": set(), "avx2": {"avx2"}, "avx512-on-avx2": {"avx2"}, "avx512": {"avx512f"}}


@pytest.fixture(scope="session")
def build_folder() -> Path:
    return build("cpu_tests", "dlmkern", DLMKERN_TEST_ISAS="ON")


@pytest.fixture(scope="session")
def library(build_folder: Path) -> Library:
    return Library(build_folder / "libdlmkern.so")


@pytest.fixture(params=[name for name, flags in NEEDS.items() if flags <= FLAGS])
def isa(request: pytest.FixtureRequest, library: Library) -> Iterator[str]:
    """Runs the test once for every instruction set that this machine has."""
    before = library.call("cpu_isa")
    assert library.call("cpu_set_isa", request.param.encode()) == OK
    yield request.param
    assert library.call("cpu_set_isa", before) == OK
