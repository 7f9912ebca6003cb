"""Options and fixtures that choose where tests run, and a summary that says which backends really ran.

A test that takes the fixture `backend` runs once for each leg: reference, cpu, cuda and triton. On a machine
without a GPU the CUDA kernels run in the emulator and Triton's in its interpreter. The interpreter changes
what ``import triton`` means, so that leg has a process of its own:

    pytest tests/ops                          # reference, cpu, cuda
    TRITON_INTERPRET=1 pytest tests/ops       # triton
    pytest tests/ops --device cuda            # reference, cuda, triton on the GPU

DLMKERN_TEST_BACKENDS=cpu,cuda chooses other legs, and ``--require-backends cpu,cuda`` fails a run in which
one of them ran no test.
"""

import fcntl
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dlmkern
from dlmkern.backends import registry

ROOT = Path(__file__).parents[1]
KERNELS = ("dlmkern.reference.", "dlmkern.backends.native", "dlmkern.triton_kernels.")
ran: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dlmkern")
    group.addoption(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where the tensors of the tests are"
    )
    group.addoption(
        "--require-backends",
        default="",
        metavar="NAMES",
        help="fail unless at least one test passed or failed on each of these backends",
    )
    group.addoption(
        "--all-recorded",
        action="store_true",
        help="decode everything that was recorded, not some of each kind",
    )


def legs(config: pytest.Config) -> list[str]:
    if names := os.environ.get("DLMKERN_TEST_BACKENDS"):
        return names.split(",")
    if config.getoption("--device") == "cuda":
        return ["reference", "cuda", "triton"]
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ["triton"]
    return ["reference", "cpu", "cuda"]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: there is no CUDA device")

    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the interpreter's process, leaves out what does not depend on the backend and runs elsewhere too."""
    if legs(config) == ["triton"]:
        ours = ROOT / "tests" / "ops"
        left = [
            item
            for item in items
            if item.path.is_relative_to(ours) and "backend" not in getattr(item, "fixturenames", ())
        ]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", legs(metafunc.config), indirect=True)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    return torch.device(pytestconfig.getoption("--device"))


@pytest.fixture
def backend(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Runs the test on this backend, with outputs and scratch memory full of garbage before the kernel runs.

    The module of the test names its op as OP. A test that is told the `dtype` of its tensors is skipped where
    the backend does not take it.
    """
    name: str = request.param
    if name == "cuda" and device.type == "cpu":
        os.environ["DLMKERN_EMULATED_MODULE"] = str(emulated_module())
    try:
        with dlmkern.use_backend(name):
            dtype = request.node.callspec.params.get("dtype", torch.float32)
            registry.resolve(request.module.OP, device, dtype)
    except dlmkern.BackendUnavailableError as error:
        pytest.skip(str(error))
    for path, module in list(sys.modules.items()):
        if path.startswith(KERNELS) and getattr(module, "torch", None) is torch:
            monkeypatch.setattr(module, "torch", PoisonedTorch("torch"))
    request.node.user_properties.append(("backend", name))
    with dlmkern.use_backend(name):
        yield name


@functools.cache
def emulated_module() -> Path:
    """The CUDA kernels compiled for the CPU, built here if the sources are newer. Processes take turns."""
    import pybind11

    sys.path.insert(0, str(ROOT / "tests" / "cuda_emulator"))
    from emulator_build import cuda_include

    folder = ROOT / "build" / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    definitions = {
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_CXX_FLAGS_DEBUG": "-O1",  # building takes longer than the tests
        "DLMKERN_EMULATE": "ON",
        "DLMKERN_CUDA": "OFF",
        "DLMKERN_CUDA_INCLUDE": cuda_include(),
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    configure = ["cmake", "-S", ROOT / "csrc", "-B", folder, "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in definitions.items()]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, ["cmake", "--build", folder, "--target", "dlmkern_emulated"]):
            done = subprocess.run(
                command,
                env=os.environ | {"PATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert done.returncode == 0, done.stdout
    return next(folder.glob("dlmkern_emulated*.so"))


class PoisonedTorch(ModuleType):
    """torch, but ``empty`` and ``empty_like`` give memory that is not zero by chance."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, **options: Any) -> torch.Tensor:
        return PoisonedTorch.poisoned(torch.empty(*size, **options))

    @staticmethod
    def empty_like(*like: Any, **options: Any) -> torch.Tensor:
        return PoisonedTorch.poisoned(torch.empty_like(*like, **options))

    @staticmethod
    def poisoned(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bool:
            return x.copy_(torch.randint(2, x.shape, device=x.device))
        return x.fill_(torch.nan if x.is_floating_point() else 0x5A)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.outcome != "skipped":
        ran.update(value for key, value in report.user_properties if key == "backend")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if ran:
        counts = ", ".join(f"{name} {ran[name]}" for name in registry.BACKENDS if ran[name])
        terminalreporter.write_line(f"tests by backend on {config.getoption('--device')}: {counts}")
    for name in _missing(config):
        terminalreporter.write_line(f"--require-backends: no test ran on {name}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and _missing(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _missing(config: pytest.Config) -> list[str]:
    required = config.getoption("--require-backends")
    return [name for name in required.split(",") if not ran[name]] if required else []
