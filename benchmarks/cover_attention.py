"""cover_attention on the CPU: what it adds to torch's attention, and its errors beside those of torch.

``python -m benchmarks.cover_attention`` times torch's attention over the keys that all queries see; the op,
which makes these keys itself; and, with the keys made, attention and diagonal_correction. Each round runs all
of them, and the ratios are medians of each round's. Errors are those of rows that predict a seed, against
float64, where the seed's own token, or its mask, weighs from 1e-12 to 1 - 1e-12.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import dlmkern
from benchmarks.__main__ import on
from benchmarks.cases import cover_inputs, named
from benchmarks.markdown import table
from benchmarks.measure import Clock
from dlmkern.attention import attention, attention_with_lse

CPU = torch.device("cpu")
LENGTHS = (1024, 2048, 4096)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Time:
    """One shape. Ratios are to the time of torch's attention."""

    detail: str
    torch_ms: float
    cover_ratio: float
    corrected_ratio: float  # of attention and diagonal_correction
    recomputed_ratio: float  # the same, if no row can be corrected


@dataclass(frozen=True)
class Error:
    """The largest errors of any weight: of the op, and of torch's attention over each row's own keys."""

    dtype: str
    side: str  # whose weight it is: the token's that others see, or the mask's that its own row sees
    error: float
    torch_error: float


def seen_by_all(fresh: Tensor, cached: Tensor, seeds: Tensor) -> Tensor:
    return torch.where(seeds[:, None, :, None], cached, fresh)


def time(length: int, kv_heads: int, dtype: torch.dtype, rounds: int) -> Time:
    inputs = q, k, v, k_cached, v_cached, seeds = cover_inputs(length, kv_heads, dtype, CPU)
    keys, values = seen_by_all(k, k_cached, seeds), seen_by_all(v, v_cached, seeds)

    def corrected(recompute_below: float = 0.5) -> None:
        out, lse = attention_with_lse(q, keys, values)
        if lse is None:
            raise RuntimeError("this version of torch has no attention on the CPU that returns its row sums")
        scale = q.shape[-1] ** -0.5
        torch.ops.dlmkern.diagonal_correction(
            out, lse, *inputs, None, None, 0, scale, recompute_below
        )  # in place

    contenders = {
        "torch": lambda: attention(q, keys, values),
        "cover": on("cpu", lambda: dlmkern.cover_attention(*inputs)),
        "corrected": on("cpu", corrected),
        "recomputed": on("cpu", lambda: corrected(torch.inf)),
    }
    clock = Clock(CPU)
    for run in contenders.values():
        run()
    samples = [{name: clock(run, 1) for name, run in contenders.items()} for _ in range(rounds)]

    def ratio(name: str) -> float:
        return statistics.median(sample[name] / sample["torch"] for sample in samples)

    return Time(
        named(f"L = {length}", kv_heads, dtype),
        torch_ms=1e3 * statistics.median(sample["torch"] for sample in samples),
        cover_ratio=ratio("cover"),
        corrected_ratio=ratio("corrected"),
        recomputed_ratio=ratio("recomputed"),
    )


def measure(options: argparse.Namespace) -> Iterator[Time]:
    for length in options.lengths:
        for kv_heads in (32, 8):
            for dtype in DTYPES:
                yield time(length, kv_heads, dtype, options.rounds)


def weights() -> Tensor:
    """From 1e-12 to 1 - 1e-12, float64."""
    small = torch.logspace(-12, 0, 49, dtype=torch.float64)[:-1]
    return torch.cat((small, 1 - small.flip(0)))


def error(dtype: torch.dtype, side: str) -> Error:
    """Of one sequence a weight, each with one seed: what predicts it sees the keys of this pass alone."""
    target = weights()
    batch, heads, length, size = len(target), 4, 256, 64
    generator = torch.Generator().manual_seed(0)
    q, k, v, k_cached, v_cached = (
        torch.randn(batch, heads, length, size, generator=generator).to(dtype) for _ in range(5)
    )
    places = torch.arange(batch)
    seeds = torch.arange(length) == places[:, None]
    row = torch.arange(batch), slice(None), places  # the seeds': [batch, heads, size]
    query = q[row].double()
    scores = (k.double() @ query.unsqueeze(-1)).squeeze(-1) / size**0.5
    others = scores.masked_fill(seeds[:, None], -torch.inf).logsumexp(-1)
    score = (target / (1 - target)).log()[:, None] + others
    key = query * (score * size**0.5 / query.square().sum(-1)).unsqueeze(-1)
    (k_cached if side == "token" else k)[row] = key.to(dtype)

    query = q[row].unsqueeze(2)
    truth = attention(query.double(), k.double(), v.double()).squeeze(2)
    with dlmkern.use_backend("cpu"):
        covered = dlmkern.cover_attention(q, k, v, k_cached, v_cached, seeds).out[row]

    def largest(out: Tensor) -> float:
        return float((out.double() - truth).abs().max())

    name = str(dtype).removeprefix("torch.")
    return Error(name, side, largest(covered), largest(attention(query, k, v).squeeze(2)))


def show(times: list[Time], errors: list[Error]) -> str:
    timed = [
        [row.detail, f"{row.torch_ms:.0f}"]
        + [f"{ratio:.3f}" for ratio in (row.cover_ratio, row.corrected_ratio, row.recomputed_ratio)]
        for row in times
    ]
    erred = [[row.dtype, row.side, f"{row.error:.1e}", f"{row.torch_error:.1e}"] for row in errors]
    header = ["case", "torch, ms", "cover_attention", "torch and correction", "all computed anew"]
    return "\n\n".join(
        (
            table(header, timed, left=1),
            table(["dtype", "weight of the", "largest error", "torch's"], erred, left=2),
        )
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cover_attention", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of the sequence")
    parser.add_argument("--rounds", type=int, default=9, help="of which the median is taken (9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (2)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    errors = [error(dtype, side) for dtype in DTYPES for side in ("token", "mask")]
    times: list[Time] = []
    for row in measure(options):
        times.append(row)
        if options.json:
            document = {
                "environment": {"torch": torch.__version__, "threads": options.threads},
                "times": [asdict(row) for row in times],
                "errors": [asdict(row) for row in errors],
            }
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(show(times, errors))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
