"""What DAPD adds to a pass: ``python -m benchmarks.dapd_overhead`` times it against a threshold.

Both decode one token a pass from the same random LLaDA, pass by pass in turn: the threshold because nothing
reaches it, DAPD because every pair has an edge. So both see as many masks in each pass, and what DAPD takes
longer is the graph from the last layers' attention and the selection.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import dlmkern
from benchmarks.cache import Setting, make_model
from benchmarks.markdown import table
from dlmkern import decoders

FULL = Setting(512, 8, 8, 1536, 32000, prompt=512, gen_length=256, steps=256)
QUICK = Setting(64, 4, 4, 128, 1000, prompt=32, gen_length=32, steps=32)
PARTS = 4  # of an answer, by the masks that are left


@dataclass(frozen=True)
class Row:
    block_length: int
    masks: str  # left in the block
    threshold: float  # seconds a pass, median
    dapd: float
    overhead: float  # median over the passes


def run(setting: Setting, block_length: int) -> list[Row]:
    model = make_model(setting)
    prompt = torch.randint(setting.vocabulary - 1, (1, setting.prompt))
    contenders = {
        "threshold": decoders.threshold(1.0, block_length),
        "dapd": decoders.dapd("direct", -1.0, -1.0, block_length),
    }
    streams = {
        name: dlmkern.generate_stream(model, prompt, decoder, setting.gen_length)
        for name, decoder in contenders.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(setting.gen_length):
        for name, stream in streams.items():
            began = time.perf_counter()
            next(stream)
            seconds[name].append(time.perf_counter() - began)
    passes = list(zip(*seconds.values(), strict=True))
    size = block_length // PARTS
    rows = []
    for first in range(0, block_length, size):  # pass of a block
        chosen = [one for i, one in enumerate(passes) if first <= i % block_length < first + size]
        left = block_length - first
        rows.append(_row(block_length, f"{left} to {left - size + 1}", chosen))
    return [*rows, _row(block_length, "all", passes)]


def _row(block_length: int, masks: str, passes: list[tuple[float, ...]]) -> Row:
    """`passes`: seconds of the threshold and of DAPD."""
    threshold, dapd = map(statistics.median, zip(*passes, strict=True))
    overhead = statistics.median(b / a for a, b in passes) - 1
    return Row(block_length, masks, threshold, dapd, overhead)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dapd_overhead", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a model that says little")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (2)")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    setting = QUICK if options.quick else FULL
    rows = [row for length in (setting.gen_length, setting.gen_length // 4) for row in run(setting, length)]
    lines = [
        [
            str(row.block_length),
            row.masks,
            f"{1e3 * row.threshold:.1f}",
            f"{1e3 * row.dapd:.1f}",
            f"{row.overhead:+.1%}",
        ]
        for row in rows
    ]
    print(
        table(["block", "masks left", "threshold, ms a pass", "DAPD, ms a pass", "overhead"], lines, left=2)
    )
    if options.json:
        record = {"setting": asdict(setting), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
