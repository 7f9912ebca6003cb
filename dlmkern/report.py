"""Decoding shown to people: decoders side by side, and an answer step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dlmkern.decoders import Decoder, Reason
from dlmkern.generation import RowStep, Step, generate_stream

STYLES = {
    Reason.SCHEDULED: "bold",
    Reason.THRESHOLD: "bold green",
    Reason.HIGH_TIER: "bold green",
    Reason.CONFLICT_FREE: "bold cyan",
    Reason.FORCED: "bold yellow",
    Reason.AFTER_EOS: "dim",
    Reason.FACTOR: "bold green",
    Reason.INDEPENDENT: "bold cyan",
    Reason.REPLACED: "bold magenta",
}
TAKEN_BACK = "bold red"


@dataclass(frozen=True)
class Comparison:
    """How one decoder did on a batch of prompts."""

    decoder: str
    answers: int
    valid: int | None
    """Answers that passed the check; None without a check."""
    nfe: float
    """Mean forward passes an answer."""
    tokens_per_forward: float
    seconds: float
    """For all answers together."""
    tokens: Tensor
    """int64 `[B, G]`: the answers."""


def compare(
    model: Callable[..., Any],
    prompts: list[list[int]],
    decoders: Mapping[str, Decoder],
    gen_length: int,
    valid: Callable[[list[int], list[int]], bool] | None = None,
    **settings: Any,
) -> list[Comparison]:
    """Answer the same prompts with each decoder, under a progress bar on stderr.

    Args:
        model: as in `dlmkern.generate`.
        prompts: token lists, of any lengths.
        decoders: the decoders by name.
        gen_length: tokens to generate for each prompt.
        valid: says whether an answer fits its prompt.
        settings: further arguments of `dlmkern.generate`.
    """
    results = []
    total = len(decoders) * len(prompts) * gen_length
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total)
        for name, decoder in decoders.items():
            progress.update(bar, description=name)
            began = time.perf_counter()
            stream = generate_stream(model, prompts, decoder, gen_length, **settings)
            for step in stream:
                progress.advance(bar, sum(_filled(row) for row in step.rows))
            output = stream.result()
            seconds = time.perf_counter() - began
            nfe = output.nfe.double().mean().item()
            answers = output.tokens.tolist()
            results.append(
                Comparison(
                    decoder=name,
                    answers=len(answers),
                    valid=None if valid is None else sum(map(valid, prompts, answers)),
                    nfe=nfe,
                    tokens_per_forward=gen_length / nfe,
                    seconds=seconds,
                    tokens=output.tokens,
                )
            )
    return results


def comparison_table(results: Iterable[Comparison]) -> Table:
    """A row a decoder."""
    table = Table(box=None, pad_edge=False)
    table.add_column("decoder")
    for name in ("valid answers", "forwards", "tokens per forward", "seconds"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.decoder,
            "" if result.valid is None else f"{result.valid} of {result.answers}",
            f"{result.nfe:.1f}",
            f"{result.tokens_per_forward:.2f}",
            f"{result.seconds:.2f}",
        )
    return table


def steps_table(
    steps: Iterable[Step], gen_length: int, symbol: Callable[[int], str], mask: str = "_"
) -> Table:
    """An answer as it comes about: a line a forward pass, its block in brackets, and what it committed or
    took back.

    Args:
        steps: of `dlmkern.generate_stream`; the first row of each is shown.
        gen_length: length of the answer.
        symbol: what to show for a token.
        mask: what to show for a position that is not committed yet.
    """
    table = Table("forward", "block", "answer", "committed here, and why", box=None, pad_edge=False)
    shown = [Text(mask) for _ in range(gen_length)]
    for step in steps:
        row = step.rows[0]
        for position, token, reason in zip(row.positions, row.tokens, row.reasons, strict=True):
            shown[position] = Text(symbol(token), style=STYLES[reason])
        for position in row.remasked:
            shown[position] = Text(mask, style=TAKEN_BACK)
        end = row.block_start + row.block_length
        block = f"{row.block_start}-{end - 1}"
        table.add_row(str(step.forward), block, _bracketed(shown, row.block_start, end), _reasons(row))
        for position in (*row.positions, *row.remasked):
            shown[position].style = ""
    return table


def step_lines(steps: Iterable[Step], symbol: Callable[[int], str]) -> Iterator[str]:
    """The same as plain text, a line for each row of each forward pass, as the passes are made.

    `3='x'` is a token that was committed at position 3, `3:='x'` one that has replaced another there, and
    `-3` one that was masked again.
    """
    for step in steps:
        for row in step.rows:
            tokens = " ".join(
                f"{position}{':' * (reason == Reason.REPLACED)}={symbol(token)!r}"
                for position, token, reason in zip(row.positions, row.tokens, row.reasons, strict=True)
            )
            taken_back = "".join(f" -{position}" for position in row.remasked)
            block = f"{row.block_start}-{row.block_start + row.block_length - 1}"
            yield f"forward {step.forward}, row {row.row}, block {block}: {tokens}{taken_back}"


def _filled(row: RowStep) -> int:
    """How many masks less there are, but for those behind an early end."""
    kept = sum(reason not in (Reason.REPLACED, Reason.AFTER_EOS) for reason in row.reasons)
    return kept - len(row.remasked)


def _bracketed(shown: list[Text], start: int, end: int) -> Text:
    return Text.assemble(*shown[:start], "[", *shown[start:end], "]", *shown[end:])


def _reasons(row: RowStep) -> Text:
    """Positions by reason, in order of the reasons: "high tier 3 4 7, forced 2, masked again 1"."""
    pairs = sorted(zip(row.reasons, row.positions, strict=True))
    parts = []
    for reason, group in groupby(pairs, key=lambda pair: pair[0]):
        positions = " ".join(str(position) for _, position in group)
        parts.append(Text.assemble((reason.name.lower().replace("_", " "), STYLES[reason]), " ", positions))
    if row.remasked:
        parts.append(Text.assemble(("masked again", TAKEN_BACK), " ", " ".join(map(str, row.remasked))))
    return Text(", ").join(parts)
