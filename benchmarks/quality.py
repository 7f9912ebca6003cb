"""Valid answers against forward passes: what each decoder gains and what it costs, on the embedded model.

``python -m benchmarks.quality`` decodes unseen prompts of `dlmkern.models.chains4` with DepCap, its settings
swept one at a time, and with the baselines; it prints a table and writes it as JSON, with a plot beside it.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dlmkern
from benchmarks import study
from benchmarks.chains import valid_chains
from dlmkern import decoders, models
from dlmkern.decoders import Decoder
from dlmkern.models import chains4

# The model is sure of most tokens (0.999 and more) or torn between two or three: little happens above 0.5.
STEPS = (1, 2, 4, 8, 10, 20, 40)
TAUS = (0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
TAU_LOWS = (0.25, 0.3, 0.35, 0.4, 0.5, 0.8)
GAMMAS = (-30.0, -16.0, -12.0, -8.0, -4.0, -2.5, -2.0, -1.0)
LAMBDAS = (0.0, 0.3, 1.2, 2.4)
L_MINS = (2, 4, 8, 16, 40)


@dataclass(frozen=True)
class Point:
    """A decoder on all prompts."""

    curve: str
    setting: str
    nfe: float  # mean
    valid: float  # share of the answers
    chains: float  # share of the chains
    block_length: float  # mean


def candidates() -> Iterable[tuple[str, str, Decoder]]:
    """Curve, setting and decoder of every point."""
    for steps in STEPS:
        yield "fixed steps", f"steps={steps}", decoders.vanilla(None, steps)
    for tau in TAUS:
        yield "threshold, whole answer", f"tau={tau}", decoders.threshold(tau, None)
    for tau in TAUS:
        yield "threshold, blocks of 8", f"tau={tau}", decoders.threshold(tau, 8)
    for lam in LAMBDAS:
        yield "DepCap, lam swept", f"lam={lam}", decoders.depcap(lam=lam)
    for l_min in L_MINS:
        yield "DepCap, l_min swept", f"l_min={l_min}", decoders.depcap(l_min=l_min)
    for tau_low in TAU_LOWS:
        yield (
            "DepCap, tau_low swept, gamma=-8",
            f"tau_low={tau_low}",
            decoders.depcap(tau_low=tau_low, gamma=-8.0),
        )
    for gamma in GAMMAS:
        yield "DepCap, gamma swept, tau_low=0.3", f"gamma={gamma}", decoders.depcap(tau_low=0.3, gamma=gamma)
    # DepCap's unmasking rule without its blocks.
    for gamma in GAMMAS:
        decoder = Decoder(decoders.WholeSequence(), decoders.CAP(tau_low=0.3, gamma=gamma))
        yield "CAP, whole answer, gamma swept, tau_low=0.3", f"gamma={gamma}", decoder


def measure(
    curve: str,
    setting: str,
    decoder: Decoder,
    model: Any,
    prompts: torch.Tensor,
    gen_length: int = chains4.ANSWER_LENGTH,
) -> Point:
    """Decode all prompts; they are those of `chains4` or of `benchmarks.chains`."""
    output = dlmkern.generate(model, prompts, decoder, gen_length)
    answers = [valid_chains(*pair) for pair in zip(prompts, output.tokens, strict=True)]
    chains = [chain for answer in answers for chain in answer]
    lengths = [length for row in output.block_lengths for length in row]
    return Point(
        curve,
        setting,
        nfe=output.nfe.double().mean().item(),
        valid=sum(map(all, answers)) / len(answers),
        chains=sum(chains) / len(chains),
        block_length=sum(lengths) / len(lengths),
    )


def front(points: list[Point]) -> list[Point]:
    """The points that no other beats in both respects, by rising NFE."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.nfe, -p.valid)):
        if not best or point.valid > best[-1].valid:
            best.append(point)
    return best


def table(points: list[Point]) -> Table:
    """A star marks the points of `front`."""
    on_front = front(points)
    out = Table("curve", "setting", "NFE", "tokens/forward", "valid", "chains", "block", "", box=None)
    for column in out.columns[2:7]:
        column.justify = "right"
    for point in points:
        out.add_row(
            point.curve,
            point.setting,
            f"{point.nfe:.1f}",
            f"{chains4.ANSWER_LENGTH / point.nfe:.2f}",
            f"{point.valid:.1%}",
            f"{point.chains:.1%}",
            f"{point.block_length:.1f}",
            "*" if point in on_front else "",
        )
    return out


def show(points: list[Point]) -> None:
    """Print the table, wide enough for a file as well."""
    terminal = Console().is_terminal
    Console(highlight=False, width=None if terminal else 130).print(table(points))


def draw(axes: Any, points: list[Point]) -> None:
    """A line for each curve in matplotlib's `axes`, those of the baselines dashed."""
    for curve in dict.fromkeys(point.curve for point in points):
        line = sorted((point.nfe, point.valid) for point in points if point.curve == curve)
        baseline = curve.startswith(("fixed", "threshold"))
        axes.plot(
            [nfe for nfe, _ in line],
            [valid for _, valid in line],
            marker="s" if baseline else "o",
            linestyle="--" if baseline else "-",
            markersize=4,
            label=curve,
        )
    axes.set(
        xlabel="forward passes for 40 tokens (NFE, mean)", ylabel="answers that are valid", ylim=(-0.02, 1.02)
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def plot(points: list[Point], file: Path) -> None:
    """Needs matplotlib, of the extra "bench"."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    draw(axes, points)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = study.parser("quality", __doc__, page_plot="docs/quality.png")
    parser.add_argument("--prompts", type=study.count, default=100, help="how many (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = models.tiny(device=options.device)
    prompts = chains4.prompts(options.prompts, options.seed)
    points = [
        measure(*candidate, model, prompts)
        for candidate in track(list(candidates()), "decoding", transient=True)
    ]
    show(points)
    record = {"prompts": options.prompts, "points": [asdict(point) for point in points]}
    study.write(options.out, "quality", record, lambda file: plot(points, file))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
