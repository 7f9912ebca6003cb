"""The C library with its CUDA half, compiled by nvcc."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.build.cmake import ROOT, build, run
from tests.cpu.capi import NULL, OK, Library

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

CUDA_ERRORS = range(-1999, -1000)  # DLMKERN_ERROR_CUDA - cudaError


@pytest.fixture(scope="module")
def folder() -> Path:
    """For one architecture: every kernel is compiled for all of them where its registers are counted."""
    return build("nvcc_tests", "dlmkern", DLMKERN_CUDA="ON", DLMKERN_CUDA_ARCHS="90")


def test_the_architectures_of_a_plain_build(tmp_path: Path) -> None:
    said = run("cmake", "-S", ROOT / "csrc", "-B", tmp_path, "-G", "Ninja")
    assert ", architectures 80-real;90-real;100" in said


def test_it_brings_its_own_runtime(folder: Path) -> None:
    """A shared libcudart would have to be the very one that PyTorch has loaded."""
    assert "cudart" not in run("ldd", folder / "libdlmkern.so")


def test_it_answers_without_a_gpu(folder: Path) -> None:
    """The CPU half is the same; a CUDA function reports CUDA's error where there is no device to run it."""
    library = Library(folder / "libdlmkern.so")
    assert library.call("has_cuda") == 1
    x, token = np.eye(3, dtype=np.float32)[None], np.full((1, 3), 77)
    nothing = [None] * 4
    assert library.call("cpu_token_stats", x, None, None, -1, token, *nothing) == OK
    np.testing.assert_array_equal(token, [[0, 1, 2]])
    assert library.call("cuda_token_stats", None, None, None, -1, token, *nothing, None, 0, None) == NULL
    if shutil.which("nvidia-smi") is None:
        code = library.call("cuda_conflict_matrix", x, token, x[..., 0], x, None, 0, None)
        assert code in CUDA_ERRORS, library.call("error_string", code)
