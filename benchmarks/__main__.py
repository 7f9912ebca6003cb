"""Command line: ``python -m benchmarks [--json FILE] [--quick] [op ...]``."""

import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import dlmkern
from benchmarks.cases import Case, cases
from benchmarks.measure import Contender, medians, read_all
from dlmkern.backends import registry
from dlmkern.cli import Parser


@dataclass(frozen=True)
class Row:
    """One case on one backend. Times are in milliseconds; a ratio says how much longer the other takes."""

    op: str
    detail: str
    backend: str
    match: bool
    ms: float
    gb_per_s: float | None
    read_share: float | None  # of the bandwidth that merely reading the inputs reaches
    eager_ms: float
    eager_ratio: float | None
    compile_ms: float | None
    compile_ratio: float | None


def agree(result: Any, expected: Any) -> bool:
    """Whether tokens and selections are the same and numbers are close, for their dtype."""
    if isinstance(result, tuple):
        return all(agree(a, b) for a, b in zip(result, expected, strict=True))
    if result is None or not result.is_floating_point():
        return result is expected or torch.equal(result, expected)
    rounding = 2 * torch.finfo(expected.dtype).eps  # of results and, in attention, of what they are sums of
    relative, absolute = max(1e-4, rounding), max(1e-5, rounding)
    return torch.allclose(result.double(), expected.double(), rtol=relative, atol=absolute, equal_nan=True)


def backends(case: Case, device: torch.device) -> list[str]:
    """The backends other than the reference that can run all of the case's ops on `device`."""
    found = []
    for backend in registry.BACKENDS[1:]:
        try:
            with dlmkern.use_backend(backend):
                for op in case.op.split(" + "):
                    registry.resolve(op, device, torch.float32)
        except dlmkern.BackendUnavailableError:
            continue
        found.append(backend)
    return found


def on(backend: str, run: Contender) -> Contender:
    def call() -> Any:
        with dlmkern.use_backend(backend):
            return run()

    return call


def measure(case: Case, device: torch.device, rounds: int, compiling: bool) -> Iterator[Row]:
    named = {backend: on(backend, case.run) for backend in backends(case, device)}
    if not named:
        return
    expected = on("reference", case.result)()
    match = {backend: agree(on(backend, case.result)(), expected) for backend in named}
    contenders = {**named, "eager": lambda: case.eager(*case.inputs)}
    if compiling and case.compiles:
        compiled = torch.compile(case.eager, fullgraph=True, dynamic=False)
        contenders["compile"] = lambda: compiled(*case.inputs)
    if case.reads:
        contenders["read"] = read_all(case.reads)
    seconds = medians(contenders, device, rounds)
    size = sum(x.nbytes for x in case.reads)
    for backend in named:
        time = seconds[backend]

        def ratio(other: str, time: float = time, valid: bool = match[backend]) -> float | None:
            return seconds[other] / time if valid and other in seconds else None

        yield Row(
            op=case.op,
            detail=case.detail,
            backend=backend,
            match=match[backend],
            ms=time * 1e3,
            gb_per_s=size / time / 1e9 if size else None,
            read_share=ratio("read"),
            eager_ms=seconds["eager"] * 1e3,
            eager_ratio=ratio("eager"),
            compile_ms=seconds["compile"] * 1e3 if "compile" in seconds else None,
            compile_ratio=ratio("compile"),
        )


def write(file: Path, device: torch.device, rows: list[Row]) -> None:
    """What the figures depend on, and the figures. Called after each case, as a run may be cut short."""
    cuda = device.type == "cuda"
    environment = {
        "dlmkern": dlmkern.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    document = {"environment": environment, "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(document, indent=2) + "\n")


def table(rows: list[Row]) -> Table:
    out = Table("op", "case", "backend", "ms", "GB/s", "of read", "eager", "compile", "match", box=None)
    for column in out.columns[3:8]:
        column.justify = "right"
    for row in rows:
        out.add_row(
            row.op,
            row.detail,
            row.backend,
            f"{row.ms:.3g}",
            "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}",
            "" if row.read_share is None else f"{row.read_share:.0%}",
            "" if row.eager_ratio is None else f"{row.eager_ratio:.1f}x",
            "" if row.compile_ratio is None else f"{row.compile_ratio:.1f}x",
            "yes" if row.match else "[red]NO",
        )
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("op", nargs="*", help="only these ops; every op if none is named")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--quick", action="store_true", help="smaller inputs, fewer rounds, no torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (2)")
    options = parser.parse_args(arguments)
    unknown = set(options.op) - set(registry.OPS)
    if unknown:
        parser.error(f"op: expected any of {', '.join(registry.OPS)}, got {', '.join(sorted(unknown))}")

    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    rows: list[Row] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        for case in cases(device, options.quick, options.op):
            progress.update(task, description=f"{case.op}, {case.detail}")
            rows += measure(case, device, rounds=5 if options.quick else 15, compiling=not options.quick)
            if options.json:
                write(options.json, device, rows)
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    return 0 if rows and all(row.match for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
