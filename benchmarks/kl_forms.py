"""DepCap's influence in its two forms: the paper's exact divergence, and the official sum over the top 64.

``python -m benchmarks.kl_forms`` decodes the same prompts with both, once as the official code normalises
probabilities (compat) and once without padded ids and the mask, and counts the answers in which blocks or
tokens differ.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dlmkern
from benchmarks import study
from dlmkern import models
from dlmkern.decoders import depcap
from dlmkern.generation import GenerationOutput
from dlmkern.models import chains4

DATA = Path(__file__).parents[1] / "tests" / "data"
COMPATS = ("official", None)


@dataclass(frozen=True)
class Case:
    """Prompts to decode together, and DepCap's settings but for the form of the divergence."""

    group: str
    model: Any
    prompts: list[list[int]]
    gen_length: int
    settings: dict[str, Any]
    topk: int


@dataclass
class Count:
    """Differences between the exact and the truncated form."""

    answers: int = 0
    blocks: int = 0
    tokens: int = 0
    nfe_exact: float = 0.0
    nfe_topk: float = 0.0

    def add(self, exact: GenerationOutput, topk: GenerationOutput) -> None:
        self.answers += len(exact.tokens)
        self.blocks += sum(a != b for a, b in zip(exact.block_lengths, topk.block_lengths, strict=True))
        self.tokens += int((exact.tokens != topk.tokens).any(-1).sum())
        self.nfe_exact += float(exact.nfe.sum())
        self.nfe_topk += float(topk.nfe.sum())


def random_model_cases(prompts: int) -> Iterator[Case]:
    """The 112 settings under which the official code was recorded, on the tests' random model."""
    model = dlmkern.load_model(DATA / "models" / "llada_seed0")
    with gzip.open(DATA / "depcap_llada_traces.json.gz", "rt") as file:
        recorded = json.load(file)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 17, (prompts,), generator=generator).tolist()
    known: list[list[int]] = recorded["prompts"]
    drawn = [torch.randint(498, (length,), generator=generator).tolist() for length in lengths]
    for trace in recorded["traces"]:
        if trace["fn"] == "generate" and trace["prompt"] == 0:
            settings = {
                "lam": trace["lambda_u"],
                "l_min": trace["L_min"],
                "l_max": trace["L_max"],
                **{name: trace[name] for name in ("tau_low", "tau_high", "gamma")},
            }
            group = f"random weights, 500 tokens, {trace['block']} blocks"
            yield Case(
                group, model, (known + drawn)[:prompts], trace["gen_length"], settings, trace["topk_cache"]
            )


def tiny_cases(prompts: int) -> Iterator[Case]:
    """The embedded model, whose 17 tokens are fewer than 64: the sum is exact, but for smaller k."""
    model = models.tiny()
    ids = chains4.prompts(prompts, seed=0).tolist()
    for topk in (64, 4, 2):
        for lam in (0.3, 1.2):
            for l_min in (2, 8):
                settings = {"lam": lam, "l_min": l_min}
                yield Case(
                    f"embedded model, 17 tokens, top {topk}",
                    model,
                    ids,
                    chains4.ANSWER_LENGTH,
                    settings,
                    topk,
                )


def compare(cases: list[Case]) -> dict[tuple[str, str | None], Count]:
    counts: dict[tuple[str, str | None], Count] = {}
    for case in track(cases, "decoding", transient=True):
        for compat in COMPATS:
            exact, topk = (
                dlmkern.generate(
                    case.model,
                    case.prompts,
                    depcap(kl=kl, topk=case.topk, compat=compat, **case.settings),
                    case.gen_length,
                )
                for kl in ("exact", "topk")
            )
            counts.setdefault((case.group, compat), Count()).add(exact, topk)
    return counts


def table(counts: dict[tuple[str, str | None], Count]) -> Table:
    out = Table(
        "model", "compat", "answers", "other blocks", "other tokens", "NFE exact", "NFE top k", box=None
    )
    for column in out.columns[2:]:
        column.justify = "right"
    for (group, compat), count in counts.items():
        out.add_row(
            group,
            compat or "none",
            str(count.answers),
            f"{count.blocks} ({count.blocks / count.answers:.1%})",
            f"{count.tokens} ({count.tokens / count.answers:.1%})",
            f"{count.nfe_exact / count.answers:.2f}",
            f"{count.nfe_topk / count.answers:.2f}",
        )
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kl_forms", description=__doc__)
    parser.add_argument("--prompts", type=study.count, default=8, help="for each setting (8)")
    parser.add_argument("--threads", type=study.count, default=2, help="CPU threads (2)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    cases = [*random_model_cases(options.prompts), *tiny_cases(options.prompts)]
    Console(highlight=False, width=140).print(table(compare(cases)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
