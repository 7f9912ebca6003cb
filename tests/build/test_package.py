"""The package as others get it: sdist, wheel, editable installation; what a failing build says."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dlmkern
from tests.build.cmake import ROOT, environment, run

MODULES = sorted(path.name for path in (ROOT / "triton_kernels").glob("*.py"))
SMOKE = """
import importlib.util, torch
import dlmkern, dlmkern._C, dlmkern.triton_kernels
token = dlmkern.token_stats(torch.eye(3, 2000)).token
assert token.tolist() == [0, 1, 2], token
assert dlmkern._C.version() == dlmkern.__version__
with dlmkern.use_backend("cpu"):
    dlmkern.topk_snapshot(torch.eye(3, 2000), 5)
spec = importlib.util.find_spec("triton_kernels")
print(dlmkern.__file__, dlmkern.triton_kernels.__name__, spec and spec.origin)
"""


def smoke(folder: Path, path: Path | None) -> list[str]:
    """Uses dlmkern in a new process in this folder: where it is, and which top-level triton_kernels."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", SMOKE]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_sdist_has_all_that_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files", "csrc", "dlmkern"], cwd=ROOT, capture_output=True, text=True)
    links = {"dlmkern/include", "dlmkern/triton_kernels"}
    assert set(tracked.stdout.split()) - links <= names
    assert {f"dlmkern/triton_kernels/{module}" for module in MODULES} <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "dlmkern/include/dlmkern.h"} <= names


def test_wheel_has_what_is_imported_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"dlmkern-{dlmkern.__version__}.dist-info/METADATA"))
        scripts = archive.read(f"dlmkern-{dlmkern.__version__}.dist-info/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"dlmkern", f"dlmkern-{dlmkern.__version__}.dist-info"}
    python = {str(path.relative_to(ROOT)) for path in (ROOT / "dlmkern").rglob("*.py")}
    assert python | {f"dlmkern/triton_kernels/{module}" for module in MODULES} <= names
    assert {"dlmkern/py.typed", "dlmkern/include/dlmkern.h"} <= names
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "dlmkern" / "models").rglob("*.*[s]*n*")}
    assert {name for name in data if name.endswith((".json", ".safetensors"))} <= names
    compiled = [name for name in names if name.endswith((".so", ".o", ".cpp", ".cu"))]
    assert len(compiled) == 1
    assert compiled[0].startswith("dlmkern/_C.")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra" not in line]
    assert sorted(line.split(">")[0] for line in required) == ["numpy", "rich", "torch"]
    assert {"triton", "models", "test", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert "dlmkern = dlmkern.cli:main" in scripts


def test_the_installed_wheel_works_elsewhere(installed: Path, tmp_path: Path) -> None:
    file, name, top_level = smoke(tmp_path, installed)
    assert Path(file).parent.parent == installed
    assert name == "dlmkern.triton_kernels"
    assert top_level == "None"


@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_the_editable_installation_works(tmp_path: Path, where: str) -> None:
    """At the root the folder triton_kernels is in sight too; dlmkern must still have its own."""
    file, name, _ = smoke(ROOT if where == "root" else tmp_path, None)
    if Path(file).parent != ROOT / "dlmkern":
        pytest.skip(f"dlmkern is installed in {Path(file).parent}, not editable")
    assert name == "dlmkern.triton_kernels"


def test_the_sources_work_by_path(tmp_path: Path) -> None:
    file, name, _ = smoke(tmp_path, ROOT)
    assert Path(file).parent == ROOT / "dlmkern"
    assert name == "dlmkern.triton_kernels"


MODULE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C"};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&definition); }
"""
PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(small LANGUAGES CXX)
find_package(Python COMPONENTS Interpreter Development.Module REQUIRED)
python_add_library(_C MODULE WITH_SOABI module.cpp)
"""


def test_tools_that_have_vanished_since_the_last_build(tmp_path: Path) -> None:
    """An isolated build leaves a build folder that was made with a Ninja that is gone. Here csrc is small."""
    ninja = shutil.which("ninja", path=environment()["PATH"])
    assert ninja is not None
    sources, output = tmp_path / "sources", tmp_path / "output"
    (sources / "csrc").mkdir(parents=True)
    (sources / "dlmkern").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "dlmkern/_version.py"):
        shutil.copy(ROOT / name, sources / name)
    (sources / "csrc" / "module.cpp").write_text(MODULE)
    (sources / "csrc" / "CMakeLists.txt").write_text(PROJECT)
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", output]
    for name in ("first", "second"):
        tools = tmp_path / name
        tools.mkdir()
        (tools / "ninja").symlink_to(ninja)
        variables = environment() | {"PATH": f"{tools}{os.pathsep}{environment()['PATH']}"}
        done = subprocess.run(command, cwd=sources, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert list((output / "dlmkern").glob("_C.*"))
        shutil.rmtree(tools)
        shutil.rmtree(output)


NO_COMPILER = (
    "dlmkern: building needs a C++17 compiler, but {} cannot be run; install g++ or name another in CXX."
)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"CXX": "/nonexistent/c++"}, NO_COMPILER.format("/nonexistent/c++")),
        ({"DLMKERN_CUDA": "maybe"}, "dlmkern: DLMKERN_CUDA is 'maybe', but must be 0, 1 or auto."),
    ],
)
def test_what_stops_a_build_is_one_sentence(
    sources: Path, tmp_path: Path, variables: dict[str, str], sentence: str
) -> None:
    """Nothing before it but setuptools' own progress, and no traceback after it."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path]
    done = subprocess.run([*command, sources], env=environment() | variables, capture_output=True, text=True)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert sentence in output
    for word in ("Traceback", "CMake", "copying"):
        assert word not in output


def test_without_any_compiler_on_the_path(sources: Path, tmp_path: Path) -> None:
    variables = {key: value for key, value in os.environ.items() if key != "CXX"} | {"PATH": str(tmp_path)}
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path]
    done = subprocess.run(command, cwd=sources, env=variables, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == NO_COMPILER.format("c++ or g++ or clang++")


def test_a_build_says_what_it_makes(tmp_path: Path) -> None:
    said = run("cmake", "-S", ROOT / "csrc", "-B", tmp_path, "-G", "Ninja", "-DDLMKERN_CUDA=OFF")
    for line in ("CPU instruction sets: portable", "CUDA: no (DLMKERN_CUDA=OFF)", "Python module: OFF"):
        assert line in said
