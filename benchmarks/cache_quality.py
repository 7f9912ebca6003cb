"""What a KV cache costs in valid answers and saves in computed positions, on the embedded model.

Run by ``python -m benchmarks.cache --quality``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track

from benchmarks import quality
from benchmarks.markdown import table
from dlmkern import decoders, models
from dlmkern.decoders import Decoder, DualCache, Factor, FixedBlocks
from dlmkern.decoders.cache import Cache
from dlmkern.models import chains4

BLOCK_LENGTHS = (10, 20, 40)
CACHES = {"none": None, "prefix": "prefix", "dual": "dual"}

SURE = "threshold, tau=0.9"
GUESSING = "DepCap, tau_low=0.3, gamma=-8"


@dataclass(frozen=True)
class Row:
    """A decoder on all prompts."""

    table: str
    rule: str
    variant: str  # the cache, or what else the table compares
    block_length: int  # for DepCap the shortest
    valid: float  # share of the answers
    chains: float  # share of the chains, four an answer
    nfe: float  # mean
    positions: float  # computed for an answer, mean


def sure(block_length: int, cache: str | Cache | None) -> Decoder:
    return decoders.threshold(0.9, block_length, cache)


def guessing(l_min: int, cache: str | Cache | None) -> Decoder:
    """The other rules commit what the model is sure of, which a cache seldom spoils; this one does not."""
    return decoders.depcap(l_min=l_min, tau_low=0.3, gamma=-8.0, cache=cache)


def candidates() -> Iterator[tuple[str, str, str, int, Decoder]]:
    """Table, rule, variant, block length and decoder of every row."""
    for n in BLOCK_LENGTHS:
        for name, cache in CACHES.items():
            yield "caches", SURE, name, n, sure(n, cache)
            yield "caches", "threshold, tau=0.7", name, n, decoders.threshold(0.7, n, cache)
            for factor in (1.0, 0.75):
                yield "caches", f"factor {factor}", name, n, decoders.factor(factor, n, cache)
            yield "caches", "DepCap", name, n, decoders.depcap(l_min=n, cache=cache)
            yield "caches", GUESSING, name, n, guessing(n, cache)
    for n in BLOCK_LENGTHS:
        for factor in (1.0, 0.75):
            for compat in (None, "official"):
                decoder = Decoder(FixedBlocks(n), Factor(factor, compat))
                yield "factor rule", f"factor {factor}", compat or "paper", n, decoder
    for n in BLOCK_LENGTHS:
        for refresh in (1, 2, 4, None):
            yield "refresh", SURE, f"refresh={refresh}", n, sure(n, DualCache(refresh))
            yield "refresh", GUESSING, f"refresh={refresh}", n, guessing(n, DualCache(refresh))


class Positions:
    """Counts the positions that a model computes, without padding."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        model.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, _: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        places = keywords.get("position_ids")
        self.count += arguments[0].numel() if places is None else int((places >= 0).sum())


def run(prompts: int) -> list[Row]:
    """Prints the tables; returns the rows."""
    model = models.tiny()
    positions = Positions(model)
    asked = chains4.prompts(prompts, seed=0)
    rows = []
    for name, rule, variant, n, decoder in track(list(candidates()), "decoding", transient=True):
        positions.count = 0
        point = quality.measure(rule, variant, decoder, model, asked)
        computed = positions.count / prompts
        rows.append(Row(name, rule, variant, n, point.valid, point.chains, point.nfe, computed))
    for name in dict.fromkeys(row.table for row in rows):
        print(f"{name}, {prompts} prompts: valid answers, NFE, positions computed for an answer\n")
        print(pivot([row for row in rows if row.table == name]), end="\n\n")
    return rows


def pivot(rows: list[Row]) -> str:
    """A line for each rule and block length, a column for each variant."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    cells = {(row.rule, row.block_length, row.variant): row for row in rows}
    lines = []
    for rule in dict.fromkeys(row.rule for row in rows):
        for n in BLOCK_LENGTHS:
            line = [cells[rule, n, variant] for variant in variants]
            texts = [f"{row.valid:.2f}, {row.nfe:.1f}, {row.positions:.0f}" for row in line]
            lines.append([rule, str(n), *texts])
    return table(["rule", "block", *variants], lines, left=1)
