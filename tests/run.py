"""Every test, as ``make test`` runs it: in several processes, as Triton's interpreter excludes its compiler.

Ends with what really ran and a line of totals. Where nothing of an item of PROOFS ran, because the machine
lacks what it takes, the output says so; under ``CI=true`` that is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Leg:
    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


LEGS = (
    Leg(
        "everything but Triton",
        ("tests", "--ignore=tests/triton", "-n", "2", "--dist", "worksteal"),
    ),
    Leg(
        "Triton, interpreted",
        ("tests/ops", "tests/triton", "--ignore=tests/triton/test_aot.py", "-n", "2", "--dist", "worksteal"),
        {"TRITON_INTERPRET": "1"},
    ),
    Leg(
        "Triton, compiled ahead of time",
        ("tests/triton/test_aot.py", "-n", "2", "--dist", "loadgroup"),
    ),
)


@dataclass(frozen=True)
class Case:
    """One test that has run."""

    leg: str
    module: str
    backend: str | None
    outcome: str  # passed, failed or skipped
    reason: str  # why it was skipped


# What a green run stands for: of each of these, at least one test has passed.
PROOFS: dict[str, Callable[[Case], bool]] = {
    "the reference": lambda case: case.backend == "reference",
    "C++ kernels on the CPU": lambda case: case.backend == "cpu",
    "CUDA kernels in the emulator": lambda case: case.backend == "cuda",
    "CUDA kernels under sanitizers": lambda case: case.module == "tests.cuda_emulator.test_kernels",
    "CUDA kernels compiled by nvcc": lambda case: case.module == "tests.cuda_emulator.test_kernels_compile",
    "Triton kernels in the interpreter": lambda case: case.backend == "triton",
    "Triton kernels compiled ahead of time": lambda case: case.module == "tests.triton.test_aot",
    "decoders": lambda case: case.module.startswith("tests.decoders."),
}


def run(leg: Leg, arguments: list[str]) -> tuple[int, list[Case]]:
    print(f"\n== {leg.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *leg.arguments, f"--junitxml={report}", *arguments]
        environment = os.environ | leg.environment
        code = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
        return code, list(cases(leg.name, report)) if report.exists() else []


def cases(leg: str, report: Path) -> Iterator[Case]:
    for case in ElementTree.parse(report).iter("testcase"):
        backend = case.find("properties/property[@name='backend']")
        skipped = case.find("skipped")
        bad = case.find("failure") is not None or case.find("error") is not None
        yield Case(
            leg=leg,
            module=case.get("classname", ""),
            backend=None if backend is None else backend.get("value"),
            outcome="failed" if bad else "passed" if skipped is None else "skipped",
            reason="" if skipped is None else skipped.get("message", ""),
        )


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    codes, ran = [], []
    for leg in LEGS:
        code, done = run(leg, arguments)
        codes.append(code)
        ran += done

    print(f"\n== What has run, in {time.monotonic() - began:.0f} s")
    missing = []
    for name, belongs in PROOFS.items():
        chosen = [case for case in ran if belongs(case)]
        passed = sum(case.outcome == "passed" for case in chosen)
        reasons = sorted({case.reason for case in chosen if case.outcome == "skipped"})
        print(
            f"{name:40}{passed:6} passed" if passed else f"{name:40}  none: {'; '.join(reasons) or 'no test'}"
        )
        if not passed:
            missing.append(name)
    totals = {
        outcome: sum(case.outcome == outcome for case in ran) for outcome in ("passed", "failed", "skipped")
    }
    must_all_run = os.environ.get("CI") == "true"
    if missing and must_all_run:
        print(f"CI=true asks for all of them; missing: {', '.join(missing)}")
    # A leg can also fail outside its tests: at collection, or because the process died. Options may leave
    # it without tests, which is no failure.
    fine = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    died = sum(code not in fine for code in codes) if not totals["failed"] else 0
    totals["failed"] += died + (len(missing) if must_all_run else 0)
    print(", ".join(f"{count} {outcome}" for outcome, count in totals.items()), flush=True)
    return 1 if totals["failed"] or not totals["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
