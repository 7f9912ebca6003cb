"""What DAPD gains where an answer has independent parts: ``python -m benchmarks.dapd``.

Three studies of unseen prompts whose answers are checked by rule. Each prints a table; the numbers go to a
JSON file, with a plot beside it.

- curve: valid answers against forward passes on `dlmkern.models.chains4`, the graph's threshold swept.
- blocks: the same, and eight chains (80 tokens) by the model of `benchmarks.chains`, with answers cut into
  blocks. An independent re-run of DAPD finds no advantage in blocks of 32 tokens.
- parts: one to eight chains in an answer, by that model: how forward passes grow with the number of
  independent parts.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import dlmkern
from benchmarks import chains, quality
from benchmarks.markdown import table
from dlmkern import decoders, models
from dlmkern.decoders import Decoder
from dlmkern.models import chains4
from dlmkern.models.chains4 import CHAIN_LENGTH

TAUS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
BLOCK_LENGTHS = {"blocks, 4 chains": (8, 10, 16, 20, 32, 40), "blocks, 8 chains": (8, 16, 32, 40, 80)}
CHECKPOINT = Path(__file__).parent / "checkpoints" / "chains8"


def curve_candidates() -> Iterable[tuple[str, str, Decoder]]:
    """Curve, setting and decoder."""
    for steps in quality.STEPS:
        yield "fixed steps (top k)", f"steps={steps}", decoders.vanilla(None, steps)
    for tau in quality.TAUS:
        yield "threshold", f"tau={tau}", decoders.threshold(tau, None)
    for gamma in quality.GAMMAS:
        yield "DepCap, tau_low=0.3", f"gamma={gamma}", decoders.depcap(tau_low=0.3, gamma=gamma)
    for gamma in quality.GAMMAS:
        decoder = Decoder(decoders.WholeSequence(), decoders.CAP(tau_low=0.3, gamma=gamma))
        yield "DepCap's rule on the whole answer", f"gamma={gamma}", decoder
    yield "DAPD, default settings", "tau=0.01..0.15", decoders.dapd()
    for tau in TAUS:
        yield "DAPD staged", f"tau={tau}", decoders.dapd("staged", tau, tau)
    for tau in TAUS:
        yield "DAPD staged, symmetric", f"tau={tau}", decoders.dapd("staged", tau, tau, symmetric=True)
    for tau in TAUS:
        yield (
            "DAPD staged, late without graph",
            f"tau={tau}",
            decoders.dapd("staged", tau, tau, late_graph=False),
        )
    for tau in TAUS:
        yield "DAPD direct", f"tau={tau}", decoders.dapd("direct", tau, tau)


def block_rules() -> dict[str, Callable[[int | None], Decoder]]:
    """By name, the decoder for blocks of a length."""
    return {
        "threshold 0.9": lambda n: decoders.threshold(0.9, n),
        "threshold 0.4": lambda n: decoders.threshold(0.4, n),
        "DAPD direct, tau 0.005..0.05": lambda n: decoders.dapd("direct", 0.005, 0.05, n),
        "DAPD staged, tau 0.001": lambda n: decoders.dapd("staged", 0.001, 0.001, n),
        "DAPD staged, default": lambda n: decoders.dapd(block_length=n),
    }


def part_decoders() -> dict[str, Callable[[int], Decoder]]:
    """By name, the decoder for an answer of a length."""
    return {
        "one a pass": lambda n: decoders.vanilla(None),
        "top 4": lambda n: decoders.vanilla(None, -(-n // 4)),
        "threshold 0.9": lambda n: decoders.threshold(0.9, None),
        "DepCap, tau_low 0.3, gamma -8": lambda n: decoders.depcap(tau_low=0.3, gamma=-8.0),
        "DepCap's rule, gamma -4": lambda n: Decoder(
            decoders.WholeSequence(), decoders.CAP(tau_low=0.3, gamma=-4.0)
        ),
        "DAPD staged, tau 0.001": lambda n: decoders.dapd("staged", 0.001, 0.001),
        "DAPD staged, default": lambda n: decoders.dapd(),
        "DAPD direct, tau 0.001": lambda n: decoders.dapd("direct", 0.001, 0.001),
    }


@dataclass(frozen=True)
class Row:
    """A decoder on all prompts."""

    study: str
    decoder: str
    setting: int  # block length, or number of chains
    nfe: float  # mean
    valid: float  # share of the answers
    chains: float  # share of the chains


def run_curve(prompts: int) -> list[quality.Point]:
    model, asked = models.tiny(), chains4.prompts(prompts, seed=0)
    candidates = list(curve_candidates())
    return [quality.measure(*one, model, asked) for one in track(candidates, "curve", transient=True)]


def run_blocks(prompts: int) -> list[Row]:
    tasks = {
        "blocks, 4 chains": (models.tiny(), chains4.prompts(prompts, seed=0)),
        "blocks, 8 chains": (dlmkern.load_model(CHECKPOINT), chains.prompts(prompts, 8, seed=0)),
    }
    rows = []
    for study, (model, asked) in tasks.items():
        length = max(BLOCK_LENGTHS[study])
        for name, make in track(block_rules().items(), study, transient=True):
            for n in BLOCK_LENGTHS[study]:
                rows.append(_row(study, name, n, model, asked, make(n), length))
    return rows


def run_parts(prompts: int) -> list[Row]:
    model = dlmkern.load_model(CHECKPOINT)
    rows = []
    for count in track(range(1, chains.MOST_CHAINS + 1), "parts", transient=True):
        asked, length = chains.prompts(prompts, count, seed=0), count * CHAIN_LENGTH
        for name, make in part_decoders().items():
            rows.append(_row("parts", name, count, model, asked, make(length), length))
    return rows


def _row(
    study: str, name: str, setting: int, model: Any, asked: torch.Tensor, decoder: Decoder, length: int
) -> Row:
    point = quality.measure(study, name, decoder, model, asked, length)
    return Row(study, name, setting, point.nfe, point.valid, point.chains)


def pivot(rows: list[Row]) -> str:
    """A line for each decoder, a column for each setting: NFE, share of the chains that are valid."""
    settings = sorted({row.setting for row in rows})
    cells = {(row.decoder, row.setting): f"{row.nfe:.1f}, {row.chains:.2f}" for row in rows}
    lines = [
        [name, *(cells[name, setting] for setting in settings)]
        for name in dict.fromkeys(row.decoder for row in rows)
    ]
    return table(["decoder", *map(str, settings)], lines, left=1)


def plot(points: list[quality.Point], rows: list[Row], file: Path) -> None:
    """The curve on the left, the parts on the right. Needs matplotlib, of the extra "bench"."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    quality.draw(left, points)
    for name in dict.fromkeys(row.decoder for row in rows):
        line = [(row.setting, row.nfe) for row in rows if row.decoder == name]
        right.plot(*zip(*line, strict=True), marker="o", markersize=4, linestyle=_style(name), label=name)
    right.set(xlabel="independent chains of 10 tokens in the answer", ylabel="forward passes (NFE, mean)")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _style(name: str) -> str:
    return "-" if name.startswith("DAPD") else "--"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dapd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=int, default=100, help="of each study (100)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (2)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the files")
    options = parser.parse_args(arguments)
    if options.prompts < 1:
        parser.error(f"--prompts: expected at least 1, got {options.prompts}")
    torch.set_num_threads(options.threads)
    points = run_curve(options.prompts)
    quality.show(points)
    rows = run_blocks(options.prompts) + run_parts(options.prompts)
    for study in dict.fromkeys(row.study for row in rows):
        what = "the number of chains" if study == "parts" else "the length of blocks"
        print(f"\n{study}: NFE and valid chains, by {what}\n")
        print(pivot([row for row in rows if row.study == study]))
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "dapd.json"
    record = {
        "prompts": options.prompts,
        "curve": [asdict(point) for point in points],
        "rows": [asdict(row) for row in rows],
    }
    file.write_text(json.dumps(record, indent=1) + "\n")
    plot(points, [row for row in rows if row.study == "parts"], file.with_suffix(".png"))
    print(f"\nwritten: {file}, {file.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
