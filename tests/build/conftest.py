"""What the tests of the packaging build: a copy of the sources, and from it each kind of package once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.build.cmake import ROOT, environment, run

FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md")


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a package is made of, without what has been built from them."""
    folder = tmp_path_factory.mktemp("sources")
    for part in ("csrc", "dlmkern", "triton_kernels"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="session")
def sdist(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, sources)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as `pip install` makes it: from the sdist, in an environment of its own that has no torch."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, sdist]
    done = subprocess.run(
        command,
        env=environment() | {"DLMKERN_CUDA": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return next(folder.glob("dlmkern-*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds the installed wheel."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, wheel)
    return folder
