"""attention_graph on the CPU: its share of the machine's rate of multiplying matrices, and its peak memory.

``python -m benchmarks.attention_graph`` runs the cases of ``python -m benchmarks attention_graph``. Rates
count what is needed: products of M queries with L keys, or with M where the log-sum-exp is given. Memory is
what one call in a process of its own takes beyond the inputs.
"""

import argparse
import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.__main__ import agree, on
from benchmarks.cases import Case, cases
from benchmarks.markdown import table
from benchmarks.measure import Contender, medians

CPU = torch.device("cpu")
SIDES = ("cpu", "reference", "eager")


@dataclass(frozen=True)
class Row:
    """One case. Ratios say how much more time or memory the other side takes."""

    detail: str
    match: bool  # with the reference
    ms: float
    gflops: float
    share: float  # of torch.mm's rate, measured in turn
    eager_ms: float
    eager_ratio: float
    reference_ratio: float
    peak_mb: float
    eager_peak_mb: float
    memory_ratio: float


def contender(case: Case, side: str) -> Contender:
    return (lambda: case.eager(*case.inputs)) if side == "eager" else on(side, case.run)


def operations(case: Case) -> float:
    q, _, positions = case.inputs
    many = positions.shape[1]
    keys = many if "lse" in case.detail else q.shape[2]
    return float(2 * q.shape[1] * many * keys * q.shape[3])


def memory(field: str) -> int:
    """In bytes, of this process: VmRSS is what it holds, VmHWM the most it ever held."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peak(case: Case, side: str) -> int:
    """Bytes that one call takes in a process that has done nothing else."""
    ctypes.CDLL(None).malloc_trim(0)  # what making the inputs left behind would be used again
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = memory("VmRSS")
    contender(case, side)()
    return memory("VmHWM") - before


def peak_elsewhere(index: int, side: str, options: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "benchmarks.attention_graph", "--peak", str(index), side]
    command += ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    matrix = torch.randn(1024, 1024)
    for index, case in enumerate(cases(CPU, options.quick, ["attention_graph"])):
        contenders = {side: contender(case, side) for side in SIDES} | {"mm": lambda: matrix @ matrix}
        match = agree(contenders["cpu"](), contenders["reference"]())
        seconds = medians(contenders, CPU, options.rounds)
        peaks = {side: peak_elsewhere(index, side, options) for side in ("cpu", "eager")}
        rate = operations(case) / seconds["cpu"]
        yield Row(
            case.detail,
            match,
            ms=seconds["cpu"] * 1e3,
            gflops=rate / 1e9,
            share=rate * seconds["mm"] / (2 * 1024**3),
            eager_ms=seconds["eager"] * 1e3,
            eager_ratio=seconds["eager"] / seconds["cpu"],
            reference_ratio=seconds["reference"] / seconds["cpu"],
            peak_mb=peaks["cpu"] / 1e6,
            eager_peak_mb=peaks["eager"] / 1e6,
            memory_ratio=peaks["eager"] / peaks["cpu"],
        )


def show(rows: list[Row]) -> str:
    return table(
        ["case", "ms", "GFLOP/s", "of torch.mm", "eager", "reference", "MB", "eager's MB", "match"],
        [
            [
                row.detail,
                f"{row.ms:.1f}",
                f"{row.gflops:.0f}",
                f"{row.share:.0%}",
                f"{row.eager_ratio:.1f}x",
                f"{row.reference_ratio:.1f}x",
                f"{row.peak_mb:.1f}",
                f"{row.eager_peak_mb:.0f}",
                "yes" if row.match else "NO",
            ]
            for row in rows
        ],
        left=1,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_graph", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="L = 256 only")
    parser.add_argument("--rounds", type=int, default=9, help="of which the median is taken (9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (2)")
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "SIDE"), help="print one call's peak memory only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.peak:
        index, side = int(options.peak[0]), options.peak[1]
        chosen = (x for i, x in enumerate(cases(CPU, options.quick, ["attention_graph"])) if i == index)
        print(peak(next(chosen), side))
        return 0
    rows = []
    for row in measure(options):
        rows.append(row)
        if options.json:
            document = {
                "environment": {"torch": torch.__version__, "threads": options.threads},
                "rows": [asdict(row) for row in rows],
            }
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(show(rows))
    return 0 if all(row.match for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
