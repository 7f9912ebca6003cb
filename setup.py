"""Builds dlmkern._C by driving CMake and Ninja; everything else about the package is in pyproject.toml.

Environment: DLMKERN_CUDA=0|1|auto, DLMKERN_CUDA_ARCHS="80;90;100", DLMKERN_BUILD_JOBS=N, CXX, CUDACXX.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CUDA_CHOICES = {"0": "OFF", "1": "ON", "auto": "auto"}


def fail(sentence: str) -> NoReturn:
    raise SystemExit(f"dlmkern: {sentence}")


def find_tool(name: str) -> str:
    """CMake and Ninja from PATH, or from beside this Python."""
    path = os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])
    tool = shutil.which(name, path=path)
    if tool is None:
        fail(f"building needs {name}; install it with `pip install {name}` or leave build isolation on.")
    return tool


def find_compiler() -> str:
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for candidate in candidates:
        if compiler := shutil.which(candidate):
            return compiler
    names = " or ".join(candidates)
    fail(f"building needs a C++17 compiler, but {names} cannot be run; install g++ or name another in CXX.")


class Build(build):
    """Compiles before it copies anything, so that nothing precedes the reason why it cannot."""

    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        compiler, cmake, ninja = find_compiler(), find_tool("cmake"), find_tool("ninja")
        cuda = os.environ.get("DLMKERN_CUDA", "auto")
        if cuda not in CUDA_CHOICES:
            fail(f"DLMKERN_CUDA is {cuda!r}, but must be 0, 1 or auto.")

        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_CXX_COMPILER": compiler,
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": output,
            "CMAKE_MAKE_PROGRAM": ninja,
            "DLMKERN_CUDA": CUDA_CHOICES[cuda],
            "DLMKERN_PYTHON": "ON",
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
        }
        if architectures := os.environ.get("DLMKERN_CUDA_ARCHS"):
            options["DLMKERN_CUDA_ARCHS"] = architectures
        configure = [cmake, "-S", ROOT / "csrc", "-G", "Ninja", *(f"-D{k}={v}" for k, v in options.items())]

        # A CMake cache names the tools that it was made with, and those of an isolated build vanish with it.
        # So every set of tools and options has a directory of its own.
        key = hashlib.sha256("\0".join(map(str, configure)).encode()).hexdigest()[:12]
        directory = Path(self.build_temp).resolve() / key
        directory.mkdir(parents=True, exist_ok=True)
        jobs = os.environ.get("DLMKERN_BUILD_JOBS", str(os.cpu_count() or 1))
        self.run_tool([*configure, "-B", directory], "CMake could not configure the build")
        self.run_tool(
            [cmake, "--build", directory, "--parallel", jobs], "the C++ or CUDA sources did not compile"
        )

    @staticmethod
    def run_tool(command: list[object], failure: str) -> None:
        if subprocess.run([str(part) for part in command]).returncode != 0:
            fail(f"{failure}; the reason is above.")


setup(
    ext_modules=[Extension("dlmkern._C", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild},
)
