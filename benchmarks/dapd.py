"""What DAPD gains where an answer has independent parts: ``python -m benchmarks.dapd``.

Three studies of unseen prompts whose answers are checked by rule. Each prints a table; the numbers go to a
JSON file, with a plot beside it.

- curve: valid answers against forward passes on `dlmkern.models.chains4`, the graph's threshold swept; and
  what the true dependencies give in place of attention.
- blocks: the same, and eight chains (80 tokens) by the model of `benchmarks.chains`, with answers cut into
  blocks. An independent re-run of DAPD finds no advantage in blocks of 32 tokens.
- parts: one to eight chains in an answer, by that model: how forward passes grow with the number of
  independent parts.
"""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.progress import track

import dlmkern
from benchmarks import chains, mrf9, quality, study
from benchmarks.markdown import table
from dlmkern import decoders, models
from dlmkern.decoders import Decoder
from dlmkern.models import chains4
from dlmkern.models.chains4 import CHAIN_LENGTH

TAUS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
BLOCK_LENGTHS = {"blocks, 4 chains": (8, 10, 16, 20, 32, 40), "blocks, 8 chains": (8, 16, 32, 40, 80)}


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
        yield "DAPD staged, all layers", f"tau={tau}", decoders.dapd("staged", tau, tau, layers=1.0)
    for tau in TAUS:
        yield "DAPD direct", f"tau={tau}", decoders.dapd("direct", tau, tau)


def block_decoders(length: int) -> dict[str, Decoder]:
    """By name, the decoders that are compared in blocks of a length."""
    return {
        "threshold 0.9": decoders.threshold(0.9, length),
        "threshold 0.4": decoders.threshold(0.4, length),
        "DAPD direct, tau 0.005..0.05": decoders.dapd("direct", 0.005, 0.05, length),
        "DAPD staged, tau 0.001": decoders.dapd("staged", 0.001, 0.001, length),
        "DAPD staged, default": decoders.dapd(block_length=length),
    }


def part_decoders(length: int) -> dict[str, Decoder]:
    """By name, the decoders that are compared on answers of a length. Only "top 4" depends on it."""
    return {
        "one a pass": decoders.vanilla(None),
        "top 4": decoders.vanilla(None, -(-length // 4)),
        "threshold 0.9": decoders.threshold(0.9, None),
        "DepCap, tau_low 0.3, gamma -8": decoders.depcap(tau_low=0.3, gamma=-8.0),
        "DepCap's rule, gamma -4": Decoder(decoders.WholeSequence(), decoders.CAP(tau_low=0.3, gamma=-4.0)),
        "DAPD staged, tau 0.001": decoders.dapd("staged", 0.001, 0.001),
        "DAPD staged, default": decoders.dapd(),
        "DAPD direct, tau 0.001": decoders.dapd("direct", 0.001, 0.001),
    }


class WithTrueGraph:
    """A model of `chains4` with the true edges of the answer in place of its attention."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        edges = mrf9.chains4_edges().float()
        self.attention = torch.nn.functional.pad(edges, (chains4.PROMPT_LENGTH, 0) * 2)

    def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
        maps = (self.attention.expand(len(ids), 1, -1, -1),)
        return SimpleNamespace(logits=self.model(ids).logits, attentions=maps)


def run_curve(prompts: int) -> list[quality.Point]:
    model, asked = models.tiny(), chains4.prompts(prompts, seed=0)
    candidates = list(curve_candidates())
    points = [quality.measure(*one, model, asked) for one in track(candidates, "curve", transient=True)]
    truth = WithTrueGraph(model)
    points.append(
        quality.measure("DAPD staged, true graph", "", decoders.dapd("staged", 0.5, 0.5), truth, asked)
    )
    return points


def run_blocks(prompts: int) -> dict[str, list[quality.Point]]:
    """By study, points whose curve is a decoder and whose setting is a block length."""
    tasks = {
        "blocks, 4 chains": (models.tiny(), chains4.prompts(prompts, seed=0)),
        "blocks, 8 chains": (dlmkern.load_model(chains.CHECKPOINT), chains.prompts(prompts, 8, seed=0)),
    }
    studies = {}
    for name, (model, asked) in tasks.items():
        lengths = BLOCK_LENGTHS[name]
        studies[name] = [
            quality.measure(decoder_name, str(length), decoder, model, asked, max(lengths))
            for length in track(lengths, name, transient=True)
            for decoder_name, decoder in block_decoders(length).items()
        ]
    return studies


def run_parts(prompts: int) -> list[quality.Point]:
    """Points whose curve is a decoder and whose setting is a number of chains."""
    model = dlmkern.load_model(chains.CHECKPOINT)
    points = []
    for count in track(range(1, chains.MOST_CHAINS + 1), "parts", transient=True):
        asked, length = chains.prompts(prompts, count, seed=0), count * CHAIN_LENGTH
        for name, decoder in part_decoders(length).items():
            points.append(quality.measure(name, str(count), decoder, model, asked, length))
    return points


def pivot(points: list[quality.Point]) -> str:
    """A line for each curve, a column for each setting: NFE, share of the chains that are valid."""
    settings = list(dict.fromkeys(point.setting for point in points))
    cells = {(point.curve, point.setting): f"{point.nfe:.1f}, {point.chains:.2f}" for point in points}
    lines = [
        [curve, *(cells[curve, setting] for setting in settings)]
        for curve in dict.fromkeys(point.curve for point in points)
    ]
    return table(["decoder", *settings], lines, left=1)


def plot(curve: list[quality.Point], parts: list[quality.Point], file: Path) -> None:
    """The curve on the left, the parts on the right. Needs matplotlib, of the extra "bench"."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    quality.draw(left, curve)
    for name in dict.fromkeys(point.curve for point in parts):
        line = [(int(point.setting), point.nfe) for point in parts if point.curve == name]
        style = "-" if name.startswith("DAPD") else "--"
        right.plot(*zip(*line, strict=True), marker="o", markersize=4, linestyle=style, label=name)
    right.set(xlabel="independent chains of 10 tokens in the answer", ylabel="forward passes (NFE, mean)")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = study.parser("dapd", __doc__, page_plot="docs/dapd.png")
    parser.add_argument("--prompts", type=study.count, default=100, help="of each study (100)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    curve = run_curve(options.prompts)
    quality.show(curve)
    blocks, parts = run_blocks(options.prompts), run_parts(options.prompts)
    for name, points in blocks.items():
        print(f"\n{name}: NFE and valid chains, by the length of blocks\n\n{pivot(points)}")
    print(f"\nparts: NFE and valid chains, by the number of chains\n\n{pivot(parts)}")
    studies = {"curve": curve, **blocks, "parts": parts}
    record = {name: [asdict(point) for point in points] for name, points in studies.items()}
    study.write(
        options.out, "dapd", {"prompts": options.prompts, **record}, lambda file: plot(curve, parts, file)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
