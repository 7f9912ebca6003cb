"""Builds, tests and times everything on a GPU, in at most eight minutes: ``python -m benchmarks.gpu_check``.

It takes the CUDA torch that this Python already has, installs nothing and needs no network. Every stage has a
time limit of its own and runs whatever became of the ones before it. After each one the results are written
to benchmarks/results/<name of the GPU>: check.json for programs, check.md for people, a log for each stage.
``--dry-run`` goes as far as a machine without a GPU can.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "cmake",
    "hypothesis",
    "ninja",
    "pybind11",
    "pytest",
    "rich",
    "safetensors",
    "transformers",
    "triton",
)


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float  # its time limit
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str  # ok, failed, timed out, or skipped
    seconds: float
    summary: str  # the last line it printed, or why it was skipped


def run(stage: Stage, log: Path, limit: float) -> Outcome:
    """Runs a stage with its output in `log`; past its limit it is ended with all that it has started."""
    if limit <= 0:
        return Outcome(stage.name, "skipped", 0, "no time was left")
    if shutil.which(stage.command[0]) is None:
        return Outcome(stage.name, "skipped", 0, f"{stage.command[0]} is not installed")
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | stage.environment
    with log.open("w") as output:
        process = subprocess.Popen(
            stage.command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = "ok" if process.wait(min(limit, stage.seconds)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "timed out"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(stage.name, status, time.monotonic() - began, lines[-1].strip("= ") if lines else "")


def stages(out: Path, dry_run: bool) -> list[Stage]:
    """What is to be done, in the order of its worth should time run out."""
    python = sys.executable
    device = "cpu" if dry_run else "cuda"
    parallel = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", device, *parallel]
    gpu_tests = ["tests/ops", "tests/decoders", "tests/models", "tests/gpu"]
    shapes = [python, "-m", "benchmarks.shapes"]
    compare = [python, "-m", "dlmkern", "compare", "--model", "tiny", "--device", device, "--count", "32"]
    bench = [python, "-m", "benchmarks", "--device", device, "--json", str(out / "benchmarks.json")]
    if dry_run:
        return [
            Stage("build", 60, [python, "setup.py", "--version"]),
            Stage("shapes, cpu", 60, [*shapes, "cpu"]),
            Stage("tests", 120, [*tests, "--collect-only", *gpu_tests]),
            Stage("benchmarks", 60, [*bench, "--quick", "independent_set", "depga_block"]),
        ]
    major, minor = torch.cuda.get_device_capability()
    build = {"DLMKERN_CUDA": "1", "DLMKERN_CUDA_ARCHS": f"{major}{minor}"}
    sanitizer = ["compute-sanitizer", "--error-exitcode", "1", "--kernel-name-exclude", "regex=at::native"]
    uncached = {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
    }  # so that the end of a tensor is the end of an allocation
    return [
        Stage("build", 150, [python, "setup.py", "build_ext", "--inplace"], build),
        Stage("shapes, cuda", 30, [*shapes, "cuda"]),
        Stage("shapes, triton", 45, [*shapes, "triton"]),
        Stage("tests", 150, [*tests, "--require-backends", "reference,cuda,triton", *gpu_tests]),
        Stage("decoding", 45, compare),
        Stage("benchmarks", 90, bench),
        Stage("memcheck", 45, [*sanitizer, "--tool", "memcheck", *shapes, "cuda"], uncached),
        Stage("racecheck", 45, [*sanitizer, "--tool", "racecheck", *shapes, "cuda"], uncached),
    ]


def environment() -> dict[str, Any]:
    """What the results were found on."""
    cuda = torch.cuda.is_available()
    nvcc = shutil.which("nvcc")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout if nvcc else ""
    release = re.search(r"release (\S+),", version)
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "no GPU",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": release[1] if release else None,
        "missing": [name for name in NEEDED if importlib.util.find_spec(name) is None],
    }


def write(out: Path, machine: dict[str, Any], outcomes: list[Outcome]) -> None:
    """check.json and check.md, with the benchmarks' rows once there are any."""
    benchmarks = out / "benchmarks.json"
    rows = json.loads(benchmarks.read_text())["rows"] if benchmarks.exists() else []
    document = {"environment": machine, "stages": [asdict(outcome) for outcome in outcomes], "rows": rows}
    (out / "check.json").write_text(json.dumps(document, indent=2) + "\n")
    lines = [f"# {machine['gpu']}", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += ["", "| stage | result | seconds | |", "|---|---|---:|---|"]
    lines += [f"| {o.name} | {o.status} | {o.seconds:.0f} | {_cell(o.summary)} |" for o in outcomes]
    if rows:
        lines += ["", "| op | case | backend | ms | GB/s | of copy | eager | compile | match |"]
        lines += ["|---|---|---|---:|---:|---:|---:|---:|---|"]
        lines += [_benchmark(row) for row in rows]
    (out / "check.md").write_text("\n".join(lines) + "\n")


def _benchmark(row: dict[str, Any]) -> str:
    def number(name: str, form: str) -> str:
        return "" if row[name] is None else format(row[name], form)

    cells = [row["op"], row["detail"], row["backend"], number("ms", ".3g"), number("gb_per_s", ".0f")]
    cells += [number("read_share", ".0%"), number("eager_ratio", ".1f"), number("compile_ratio", ".1f")]
    return f"| {' | '.join(cells)} | {'yes' if row['match'] else 'NO'} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:160]


def check(
    out: Path, machine: dict[str, Any], work: list[Stage], seconds: float, say: Callable[[str], None] = print
) -> list[Outcome]:
    """Runs the stages within `seconds` together and keeps what is written up to date."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmarks.json").unlink(missing_ok=True)
    end = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    write(out, machine, outcomes)
    for stage in work:
        log = out / f"{stage.name.replace(', ', '-')}.log"
        outcomes.append(run(stage, log, end - time.monotonic()))
        done = outcomes[-1]
        say(f"{done.name:16}{done.status:10}{done.seconds:6.0f} s  {done.summary}")
        write(out, machine, outcomes)
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="go as far as possible without a GPU")
    parser.add_argument("--seconds", type=float, default=460, help="for everything (460)")
    parser.add_argument("--out", type=Path, help="folder for the results (benchmarks/results/<gpu>)")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} of {sys.executable} sees no GPU; try --dry-run")
    machine = environment()
    name = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    out = (options.out or ROOT / "benchmarks" / "results" / name).resolve()
    for fact, value in machine.items():
        print(f"{fact}: {value}")
    if machine["missing"]:
        print("Some stages will fail for lack of these packages; pip can install them.")
    outcomes = check(out, machine, stages(out, options.dry_run), options.seconds)
    print(f"Results are in {out}")
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
