"""What a KV cache saves, and what selection and cache cost beside the model: a LLaDA with random weights.

``python -m benchmarks.cache`` decodes with each cache, one forward pass of each in turn, and prints tables in
Markdown: tokens a second, the parts of a pass, and the cost of a token as the sequence grows, which is also
plotted. Beside the times stands what the counted operations and bytes let one expect of this machine.
``--quality`` decodes with the embedded model instead: valid answers and computed positions.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.progress import track

import dlmkern
from benchmarks import cache_quality
from benchmarks.markdown import table
from benchmarks.measure import medians, read_all
from dlmkern.decoders import loop, vanilla
from dlmkern.models.kv_cache import KVCache
from dlmkern.models.llada import LLaDAConfig, LLaDAModelLM
from dlmkern.models.masked_lm import MaskedLM

CACHES = {"none": None, "prefix": "prefix", "dual": "dual"}
BLOCK_LENGTH = 32
GOAL = 0.03  # of a pass: selection and cache write together

PARTS = ("model", "selection", "cache write", "rest")
WATCHED = (
    (loop.Loop, "advance", "rest"),
    (MaskedLM, "forward", "model"),
    (KVCache, "write_rows", "cache write"),
    (KVCache, "write_block", "cache write"),
    (loop, "step", "selection"),
    (loop.Loop, "_poll", "selection"),
)


@dataclass(frozen=True)
class Setting:
    """What is decoded: one sequence, in blocks, with the same number of forward passes for every cache."""

    d_model: int
    n_layers: int
    n_heads: int
    mlp: int
    vocabulary: int
    prompt: int
    gen_length: int
    steps: int

    @property
    def length(self) -> int:
        return self.prompt + self.gen_length


@dataclass
class Pass:
    """One forward pass and step."""

    computed: int = 0  # positions
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Machine:
    """What this machine can do at best with the threads it is given."""

    flops: float  # a second, in a large float32 matrix product
    bandwidth: float  # bytes a second, read from memory


class Stopwatch:
    """Times the parts of a pass; what a part calls is timed as the other part that it belongs to."""

    def __init__(self) -> None:
        self.current = Pass()
        self._inside = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # whose signature the decoding loop inspects
        def call(*args: Any, **kwargs: Any) -> Any:
            outside, self._inside = self._inside, 0.0
            if part == "model":
                self.current.computed = args[1].shape[1]
            began = time.perf_counter()
            result = function(*args, **kwargs)
            elapsed = time.perf_counter() - began
            self.current.seconds[part] += elapsed - self._inside
            self._inside = outside + elapsed
            return result

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, part in WATCHED:
                timed = self.timed(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
            yield

    def time(self, run: Callable[[], Any]) -> Pass:
        self.current = Pass()
        run()
        return self.current


def make_model(setting: Setting) -> MaskedLM:
    torch.manual_seed(0)
    config = LLaDAConfig(
        d_model=setting.d_model,
        n_heads=setting.n_heads,
        n_layers=setting.n_layers,
        mlp_hidden_size=setting.mlp,
        vocab_size=setting.vocabulary,
        mask_token_id=setting.vocabulary - 1,
        max_sequence_length=8192,
    )
    model: MaskedLM = LLaDAModelLM(config).eval()
    return model


def decode(model: MaskedLM, setting: Setting) -> dict[str, list[Pass]]:
    """The passes with each cache; they take turns, so that what else the machine does meets all alike."""
    prompt = torch.randint(setting.vocabulary - 1, (1, setting.prompt))
    streams = {
        name: dlmkern.generate_stream(
            model, prompt, vanilla(BLOCK_LENGTH, setting.steps, cache), setting.gen_length, seed=0
        )
        for name, cache in CACHES.items()
    }
    watch = Stopwatch()
    passes: dict[str, list[Pass]] = {name: [] for name in streams}
    with watch.watching():
        for _ in range(setting.steps):
            for name, stream in streams.items():
                passes[name].append(watch.time(stream.__next__))
    assert all(next(stream, None) is None for stream in streams.values())
    return passes


def operations(setting: Setting, computed: int) -> float:
    """Floating-point operations of a pass: the projections, attention, and the head for one block."""
    d = setting.d_model
    weights = setting.n_layers * (4 * d * d + 3 * d * setting.mlp)
    attention = setting.n_layers * 2 * d * setting.length
    return 2.0 * (computed * (weights + attention) + BLOCK_LENGTH * d * setting.vocabulary)


def traffic(setting: Setting, computed: int) -> float:
    """Bytes that a pass must move: every weight, key and value once, and the block's logits out and in.

    Activations are left out, as those of a block stay in the processor's caches.
    """
    d = setting.d_model
    weights = setting.n_layers * (4 * d * d + 3 * d * setting.mlp) + d * setting.vocabulary
    cache = setting.n_layers * 2 * d * (setting.length + computed)
    return 4.0 * (weights + cache + 2 * BLOCK_LENGTH * setting.vocabulary)


def expected(setting: Setting, machine: Machine, computed: int) -> float:
    """Seconds of a pass if it does nothing but compute, or nothing but read, whichever takes longer."""
    return max(operations(setting, computed) / machine.flops, traffic(setting, computed) / machine.bandwidth)


def measure_machine() -> Machine:
    matrix = torch.randn(1024, 1024)
    memory = torch.zeros(64 << 20)
    contenders = {"multiply": lambda: matrix @ matrix, "read": read_all([memory])}
    seconds = medians(contenders, matrix.device, 5)
    return Machine(2 * 1024**3 / seconds["multiply"], memory.nbytes / seconds["read"])


@dataclass(frozen=True)
class Speed:
    """A cache on a whole answer."""

    vocabulary: int
    cache: str
    whole_passes: int
    other_passes: int
    tokens_per_second: float
    speedup: float
    expected_speedup: float


@dataclass(frozen=True)
class Share:
    """A kind of pass; times are medians in milliseconds, shares medians of its passes' shares."""

    vocabulary: int
    cache: str
    kind: str
    computed: float  # positions, mean
    gflop: float
    megabytes: float
    expected_ms: float
    ms: float
    shares: dict[str, float]

    @property
    def overhead(self) -> float:
        return self.shares["selection"] + self.shares["cache write"]


def speeds(setting: Setting, machine: Machine, passes: dict[str, list[Pass]]) -> Iterator[Speed]:
    seconds = {name: sum(p.total for p in some) for name, some in passes.items()}
    ideal = {name: sum(expected(setting, machine, p.computed) for p in some) for name, some in passes.items()}
    for name, some in passes.items():
        whole = sum(p.computed == setting.length for p in some)
        yield Speed(
            setting.vocabulary,
            name,
            whole,
            len(some) - whole,
            setting.gen_length / seconds[name],
            seconds["none"] / seconds[name],
            ideal["none"] / ideal[name],
        )


def shares(setting: Setting, machine: Machine, passes: dict[str, list[Pass]]) -> Iterator[Share]:
    for name, some in passes.items():
        whole = [p for p in some if p.computed == setting.length]
        others = [p for p in some if p.computed < setting.length]
        for kind, chosen in (("whole", whole), ("block" if name == "dual" else "from the block on", others)):
            if not chosen:
                continue

            def mean(count: Callable[[int], float], chosen: list[Pass] = chosen) -> float:
                return statistics.fmean(count(p.computed) for p in chosen)

            yield Share(
                setting.vocabulary,
                name,
                kind,
                computed=mean(float),
                gflop=mean(lambda n: operations(setting, n)) / 1e9,
                megabytes=mean(lambda n: traffic(setting, n)) / 1e6,
                expected_ms=mean(lambda n: expected(setting, machine, n)) * 1e3,
                ms=statistics.median(p.total for p in chosen) * 1e3,
                shares={part: statistics.median(p.seconds[part] / p.total for p in chosen) for part in PARTS},
            )


def speed_table(rows: Iterable[Speed]) -> str:
    return table(
        ["vocabulary", "cache", "whole passes", "others", "tokens/s", "speed-up", "expected"],
        [
            [
                f"{row.vocabulary:,}",
                row.cache,
                str(row.whole_passes),
                str(row.other_passes),
                f"{row.tokens_per_second:.1f}",
                f"{row.speedup:.2f}",
                f"{row.expected_speedup:.2f}",
            ]
            for row in rows
        ],
        left=2,
    )


def share_table(rows: Iterable[Share]) -> str:
    header = ["vocabulary", "cache", "pass", "positions", "GFLOP", "MB", "expected ms", "ms"]
    return table(
        [*header, *PARTS, "selection + cache write"],
        [
            [
                f"{row.vocabulary:,}",
                row.cache,
                row.kind,
                f"{row.computed:.0f}",
                f"{row.gflop:.2f}",
                f"{row.megabytes:.0f}",
                f"{row.expected_ms:.1f}",
                f"{row.ms:.1f}",
                *(f"{row.shares[part]:.1%}" for part in PARTS),
                f"{row.overhead:.1%}",
            ]
            for row in rows
        ],
        left=3,
    )


def ratios(rows: list[Share]) -> Iterator[str]:
    """A whole pass against a block pass of the dual cache."""
    for vocabulary in dict.fromkeys(row.vocabulary for row in rows):
        whole, block = (row for row in rows if (row.vocabulary, row.cache) == (vocabulary, "dual"))
        yield (
            f"Vocabulary {vocabulary:,}: a whole pass is {whole.gflop / block.gflop:.1f} block passes by "
            f"operations and {whole.megabytes / block.megabytes:.1f} by bytes; expected "
            f"{whole.expected_ms / block.expected_ms:.1f}, measured {whole.ms / block.ms:.1f}. Selection and "
            f"cache write take {whole.overhead:.1%} of a whole pass and {block.overhead:.1%} of a block pass "
            f"(goal: {GOAL:.0%})."
        )


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a committed token."""

    length: int
    cache: str
    ms: float
    expected_ms: float


def costs(setting: Setting, machine: Machine, passes: dict[str, list[Pass]]) -> Iterator[Cost]:
    for name, some in passes.items():
        per_token = 1e3 / setting.gen_length
        ideal = sum(expected(setting, machine, p.computed) for p in some)
        yield Cost(setting.length, name, sum(p.total for p in some) * per_token, ideal * per_token)


def cost_table(rows: list[Cost]) -> str:
    lengths = list(dict.fromkeys(row.length for row in rows))
    by_cache = {name: [row for row in rows if row.cache == name] for name in CACHES}
    return table(
        ["ms a token", *map(str, lengths)],
        [
            [name, *(f"{row.ms:.1f} ({row.expected_ms:.1f})" for row in line)]
            for name, line in by_cache.items()
        ],
        left=1,
    )


def plot(rows: list[Cost], file: Path) -> None:
    """Needs matplotlib, of the extra "bench"."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in CACHES:
        line = [row for row in rows if row.cache == name]
        lengths = [row.length for row in line]
        (drawn,) = axes.loglog(lengths, [row.ms for row in line], marker="o", markersize=4, label=name)
        axes.loglog(lengths, [row.expected_ms for row in line], linestyle=":", color=drawn.get_color())
    axes.set_xticks(lengths, map(str, lengths))
    axes.minorticks_off()
    axes.set(
        xlabel="tokens of prompt and answer",
        ylabel="milliseconds a committed token",
        title="solid: measured; dotted: expected from operations and bytes",
    )
    axes.grid(alpha=0.3)
    axes.legend(title="cache")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


FULL = Setting(512, 8, 8, 1536, 32_000, prompt=512, gen_length=256, steps=64)
VOCABULARIES = (32_000, 126_464)
LENGTHS = (256, 512, 1024, 2048, 4096)
QUICK = Setting(64, 2, 4, 192, 1_000, prompt=64, gen_length=64, steps=8)
QUICK_LENGTHS = (96, 192)


def measure(machine: Machine, quick: bool) -> tuple[list[Speed], list[Share], list[Cost]]:
    base, lengths = (QUICK, QUICK_LENGTHS) if quick else (FULL, LENGTHS)
    speed_rows: list[Speed] = []
    share_rows: list[Share] = []
    cost_rows: list[Cost] = []
    for vocabulary in (QUICK.vocabulary,) if quick else VOCABULARIES:
        setting = replace(base, vocabulary=vocabulary)
        model = make_model(setting)
        decode(model, replace(setting, gen_length=BLOCK_LENGTH, steps=2))  # the first calls are slower
        passes = decode(model, setting)
        speed_rows += speeds(setting, machine, passes)
        share_rows += shares(setting, machine, passes)
    model = make_model(base)
    for length in track(lengths, "sequence lengths", transient=True):
        setting = replace(base, prompt=length - 2 * BLOCK_LENGTH, gen_length=2 * BLOCK_LENGTH, steps=8)
        cost_rows += costs(setting, machine, decode(model, setting))
    return speed_rows, share_rows, cost_rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, short sequences, no plot")
    parser.add_argument("--quality", action="store_true", help="valid answers of the embedded model instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (2)")
    parser.add_argument("--plot", type=Path, default=Path("docs/cache_cost.png"), help="the plot's file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.quality:
        rows: dict[str, Iterable[Any]] = {"quality": cache_quality.run(prompts=10 if options.quick else 100)}
    else:
        machine = measure_machine()
        print(f"This machine: {machine.flops / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s\n")
        speed_rows, share_rows, cost_rows = measure(machine, options.quick)
        print(speed_table(speed_rows), share_table(share_rows), sep="\n\n", end="\n\n")
        print(*ratios(share_rows), cost_table(cost_rows), sep="\n\n")
        if not options.quick:
            plot(cost_rows, options.plot)
            print(f"\nwritten: {options.plot}")
        rows = {"machine": [machine], "speed": speed_rows, "shares": share_rows, "cost": cost_rows}
    if options.json:
        environment = {"torch": torch.__version__, "threads": options.threads}
        document = {name: [asdict(row) for row in some] for name, some in rows.items()}
        options.json.write_text(json.dumps({"environment": environment, **document}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
