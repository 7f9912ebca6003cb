"""What taking tokens back gains and costs: ``python -m benchmarks.cover``.

Studies of COVER, WINO and Saber on unseen prompts of `dlmkern.models.chains4`, whose answers are checked by
rule. Each prints a table; the numbers go to a JSON file, with a plot beside it.

- curve: valid answers against forward passes, the draft's threshold swept; and drafts with more errors.
- ablations: COVER's seeds by stability, by doubt alone and at random, with and without the override.
- choices, thresholds: what the paper leaves open, one at a time around the defaults, on prompts of its own.
- leak: COVER's verification against leave-one-out, and how many planted errors it finds.
- drift: whether attention to new tokens foretells which keys and values move.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

import dlmkern
from benchmarks import cover_checks, quality, study
from benchmarks.chains import valid_chains
from benchmarks.markdown import table
from dlmkern import decoders, models
from dlmkern.decoders import COVER, DAPD, Decoder, Reason, Threshold, UnmaskingRule, WholeSequence
from dlmkern.models import chains4

TAUS = (0.7, 0.5, 0.4, 0.35)
COVER_TAUS = (0.7, 0.4, 0.35)
DRAFT_TAUS = (0.9, 0.8, 0.6, 0.5, 0.4)
WINO_TAUS = (0.6, 0.4, 0.35, 0.3)
SABER_N = (2, 4)
LAST_LAYER = 0.25  # of the four of the embedded model

VIEWS: dict[str, dict[str, Any]] = {
    "override": {},
    "override, rechecked": {"recheck": True},
    "override in the last layer": {"override_layers": LAST_LAYER},
    "masked": {"verify": "masked"},
    "exact": {"verify": "exact"},
}


def drafts() -> dict[str, UnmaskingRule]:
    """Rules that make errors, by name; DAPD looks at the layers that COVER does."""
    return {
        "2 a pass": Threshold(0.0, most=2),
        "DAPD, tau 0.03": DAPD(tau_min=0.03, tau_max=0.03, layers=1.0),
        "DAPD, tau 0.1": DAPD(tau_min=0.1, tau_max=0.1, layers=1.0),
    }


def judging_drafts() -> dict[str, UnmaskingRule]:
    """By name, what drafts where choices and ablations are compared: few errors and many."""
    return {"tau 0.7": Threshold(0.7), "2 a pass": Threshold(0.0, most=2)}


CHOICES: dict[str, tuple[Any, ...]] = {
    "tau_replace": (0.9, 0.99, 1.1),
    "max_remasks": (1, 3),
    "cooldown": (2,),
    "most": (1,),
    "combine": ("sum",),
    "suspects": ("above_mean",),
    "layers": (0.3,),
    "block_length": (8, 16),
    "override_layers": (0.5, LAST_LAYER, 0.0),
    "recheck": (True,),
}


@dataclass(frozen=True)
class Point(quality.Point):
    """A decoder on all prompts, and what it took back; means over the answers."""

    revisions: float
    """Tokens that were masked again or replaced."""
    replaced: float
    flip_flops: float
    """Masked again, and then the same token once more."""
    effective: float | None
    """Share of the revisions after which there is another token. None: no revisions."""


def measure(curve: str, setting: str, decoder: Decoder, model: Any, prompts: Tensor) -> Point:
    """Decode all prompts; they are those of `chains4`."""
    stream = dlmkern.generate_stream(model, prompts, decoder, chains4.ANSWER_LENGTH, seed=0)
    present: dict[tuple[int, int], int] = {}
    taken: dict[tuple[int, int], int] = {}
    replaced = flip_flops = other = 0
    for step in stream:
        for row in step.rows:
            for position, token, reason in zip(row.positions, row.tokens, row.reasons, strict=True):
                place = row.row, position
                replaced += reason == Reason.REPLACED
                if place in taken:
                    same = taken.pop(place) == token
                    flip_flops, other = flip_flops + same, other + (not same)
                present[place] = token
            for position in row.remasked:
                taken[row.row, position] = present[row.row, position]
    output = stream.result()
    answers = [valid_chains(*pair) for pair in zip(prompts, output.tokens, strict=True)]
    chains = [chain for answer in answers for chain in answer]
    lengths = [length for row_lengths in output.block_lengths for length in row_lengths]
    revisions, count = int(output.revisions.sum()), len(prompts)
    return Point(
        curve,
        setting,
        nfe=output.nfe.double().mean().item(),
        valid=sum(map(all, answers)) / count,
        chains=sum(chains) / len(chains),
        block_length=sum(lengths) / len(lengths),
        revisions=revisions / count,
        replaced=replaced / count,
        flip_flops=flip_flops / count,
        effective=(replaced + other) / revisions if revisions else None,
    )


def curve_candidates() -> Iterable[tuple[str, str, Decoder]]:
    """Curve, setting and decoder."""
    whole = WholeSequence()
    for tau in TAUS:
        yield "threshold", f"tau={tau}", decoders.threshold(tau, None)
    for tau in WINO_TAUS:
        yield "WINO", f"tau_draft={tau}", decoders.wino(None, tau)
    for n in SABER_N:
        yield "Saber", f"n={n}", decoders.saber(None, n)
    for name, view in VIEWS.items():
        for tau in COVER_TAUS:
            yield f"COVER, {name}", f"tau_draft={tau}", decoders.cover(tau, block_length=None, **view)
    for name, rule in drafts().items():
        yield "no verification", name, Decoder(whole, rule)
    for view_name, view in VIEWS.items():
        for name, rule in drafts().items():
            yield f"{view_name}, other drafts", name, Decoder(whole, rule, COVER(**view))


def ablation_candidates() -> Iterable[tuple[str, str, Decoder]]:
    for draft, rule in judging_drafts().items():
        for verify in ("override", "masked"):
            for seeds_by in ("stability", "uncertainty", "random"):
                revise = COVER(verify=verify, seeds_by=seeds_by)
                yield draft, f"{verify}, {seeds_by}", Decoder(WholeSequence(), rule, revise)


def choice_decoder(rule: UnmaskingRule, name: str, value: Any) -> Decoder:
    """COVER's default settings on the whole answer, but one."""
    if name == "block_length":
        return Decoder(decoders.FixedBlocks(value), rule, COVER())
    return Decoder(WholeSequence(), rule, COVER(**{name: value}))


def choice_candidates() -> Iterable[tuple[str, str, Decoder]]:
    for draft, rule in judging_drafts().items():
        yield draft, "no verification", Decoder(WholeSequence(), rule)
        yield draft, "default", Decoder(WholeSequence(), rule, COVER())
        for name, values in CHOICES.items():
            for value in values:
                yield draft, f"{name}={value}", choice_decoder(rule, name, value)


def draft_candidates() -> Iterable[tuple[str, str, Decoder]]:
    for tau in DRAFT_TAUS:
        yield "COVER, default", f"tau_draft={tau}", decoders.cover(tau, block_length=None)


def run(
    title: str, candidates: Iterable[tuple[str, str, Decoder]], model: Any, prompts: Tensor
) -> list[Point]:
    return [measure(*one, model, prompts) for one in track(list(candidates), title, transient=True)]


def points_table(points: Iterable[Point]) -> str:
    rows = [
        [
            p.curve, p.setting, f"{p.nfe:.1f}", f"{p.valid:.2f}", f"{p.chains:.3f}", f"{p.revisions:.2f}",
            f"{p.replaced:.2f}", f"{p.flip_flops:.2f}",
            "" if p.effective is None else f"{p.effective:.0%}",
        ]
        for p in points
    ]  # fmt: skip
    header = ["", "", "NFE", "valid", "chains", "revisions", "replaced", "flip-flops", "effective"]
    return table(header, rows, left=2)


def pivot(points: list[Point]) -> str:
    """A line for each setting, a column for each draft: NFE, share of the chains, revisions; and the means,
    by which the settings are judged."""
    curves = list(dict.fromkeys(point.curve for point in points))
    cells = {(p.curve, p.setting): p for p in points}
    lines = []
    for setting in dict.fromkeys(point.setting for point in points):
        row = [cells[curve, setting] for curve in curves]
        shown = [f"{p.nfe:.1f}, {p.chains:.3f}, {p.revisions:.1f}" for p in row]
        mean = [sum(values) / len(row) for values in ([p.chains for p in row], [p.nfe for p in row])]
        lines.append([setting, *shown, f"{mean[0]:.3f}, {mean[1]:.1f}"])
    return table(["", *curves, "chains, NFE"], lines, left=1)


def plot(curve: list[Point], file: Path) -> None:
    """Drafts by a threshold on the left, others on the right. Needs matplotlib, of the extra "bench"."""
    from matplotlib import pyplot

    names = drafts()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    quality.draw(left, [point for point in curve if point.setting not in names])
    quality.draw(right, [point for point in curve if point.setting in names])
    for line in right.lines:  # between drafts that have nothing to do with each other
        line.set_linestyle("none")
    for point in curve:
        if point.curve == "no verification":
            place = point.nfe, point.valid
            right.annotate(point.setting, place, (4, -11), textcoords="offset points", fontsize=8)
    right.legend(fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = study.parser("cover", __doc__, page_plot="docs/cover.png")
    parser.add_argument(
        "--prompts",
        type=study.count,
        default=100,
        help="of each study (100); half as many where defaults are chosen",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = models.tiny()
    asked = chains4.prompts(options.prompts, seed=0)
    others = chains4.prompts(-(-options.prompts // 2), seed=1)
    curve = run("curve", curve_candidates(), model, asked)
    print(f"curve\n\n{points_table(curve)}", flush=True)
    ablations = run("ablations", ablation_candidates(), model, asked)
    print(f"\nablations\n\n{points_table(ablations)}", flush=True)
    choices = run("choices", choice_candidates(), model, others)
    print(f"\nchoices: NFE, valid chains, revisions\n\n{pivot(choices)}", flush=True)
    thresholds = run("thresholds", draft_candidates(), model, others)
    print(f"\nthresholds\n\n{points_table(thresholds)}", flush=True)
    answered = dlmkern.generate(model, asked, decoders.vanilla(None), chains4.ANSWER_LENGTH)
    leak = cover_checks.run_leak(model, torch.stack(answered.sequences))
    print(f"\nleak\n\n{cover_checks.leak_table(leak)}", flush=True)
    drift = cover_checks.run_drift(model, asked)
    print(f"\ndrift: Spearman's correlation\n\n{cover_checks.drift_table(drift)}")
    studies: dict[str, list[Any]] = {
        "curve": curve,
        "ablations": ablations,
        "choices": choices,
        "thresholds": thresholds,
        "leak": leak,
        "drift": drift,
    }
    record = {name: [asdict(point) for point in points] for name, points in studies.items()}
    study.write(options.out, "cover", {"prompts": options.prompts, **record}, lambda file: plot(curve, file))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
