"""Passes with COVER's seeds, against a walk in which every query gathers its own keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlmkern.models import AttentionGraph, LLaDAConfig, LLaDAModelLM, load_model
from dlmkern.models.attend import first_of_last
from dlmkern.models.masked_lm import MaskedLM
from tests.models.support import (
    DREAM,
    FIELDS,
    LLADA,
    KeysOfEachQuery,
    KeyValue,
    Memory,
    assert_close,
    assert_holds,
    ids,
    poisoned,
)
from tests.models.test_attention_graph import picked
from tests.ops.test_device_rules import Watch

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("no_grad")

MODELS: dict[str, dict[str, Any]] = {
    "llada": {**LLADA, "n_layers": 4, "n_kv_heads": 4},
    "llada-grouped": {**LLADA, "n_layers": 4},
    "dream": {**DREAM, "num_hidden_layers": 4},
}
MASK = LLADA["mask_token_id"]


class Walk(KeysOfEachQuery):
    """Of the columns of the next call these are seeds, from this layer on. Those at place -1 are padding."""

    seeds: Sequence[int] = ()
    cover_from = 0
    shift = 0

    def seen(
        self, layer: int, rows: Sequence[KeyValue], places: Sequence[int], memory: Memory
    ) -> list[list[KeyValue]]:
        fresh = {i: (place, rows[i]) for i, place in enumerate(places) if place >= 0}
        seeds = {i: fresh[i] for i in self.seeds if i in fresh}
        memory.update({(layer, place): kv for i, (place, kv) in fresh.items() if i not in seeds})
        keys = {place: kv for (owner, place), kv in memory.items() if owner == layer}
        result = []
        for i in range(len(places)):
            others = seeds if layer < self.cover_from else {}
            own = {i: seeds[i + self.shift]} if i + self.shift in seeds else {}
            result.append({**keys, **dict(others.values()), **dict(own.values())})
        return [[kv for _, kv in sorted(own.items())] for own in result]


@pytest.fixture(params=MODELS)
def folder(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Path:
    return checkpoint(**MODELS[request.param])


@pytest.fixture
def model(folder: Path) -> MaskedLM:
    return load_model(folder, dtype="float64")


@pytest.fixture
def walk(folder: Path, model: MaskedLM) -> Walk:
    walk = Walk(folder, model.config)
    walk.shift = int(model.shifted_logits)
    return walk


def at(shape: tuple[int, int], *columns: Sequence[int]) -> Tensor:
    """Seeds at these columns of each row."""
    seeds = torch.zeros(shape, dtype=torch.bool)
    for row, own in zip(seeds, columns, strict=True):
        row[list(own)] = True
    return seeds


def columns(seeds: Tensor) -> list[int]:
    return seeds.nonzero().flatten().tolist()


def shown_and_masked(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """What a first pass shows, and what the one with the seeds does: other tokens, some of them masks."""
    shown, now = (ids(*seeds.shape, seed=seed).clamp(max=MASK - 1) for seed in (1, 2))
    now[:, ::4] = MASK
    return shown, now.masked_fill(seeds, MASK)


# Of rows of 9, 6 and 8 tokens.
LENGTHS = [9, 6, 8]
PATTERNS = {
    "apart": ([0, 4], [], [2, 7]),
    "adjacent": ([2, 3, 4], [4, 5], [0, 1, 3]),
    "all": (range(9), range(6), range(8)),
}
some_seeds = pytest.mark.parametrize("pattern", PATTERNS)
shares = pytest.mark.parametrize("share", [1.0, 0.5, 0.0])


@shares
@some_seeds
def test_whole_rows(model: MaskedLM, walk: Walk, pattern: str, share: float) -> None:
    seeds = at((3, 9), *PATTERNS[pattern])
    shown, now = shown_and_masked(seeds)
    lengths = torch.tensor(LENGTHS)
    cache = poisoned(model, 3, 11)
    model(shown, lengths=lengths, cache=cache)
    logits = model(now, lengths=lengths, cache=cache, seeds=seeds, seed_layers=share).logits
    walk.cover_from = 4 - int(4 * share)
    for row, length in enumerate(LENGTHS):
        memory: Memory = {}
        walk.seeds = ()
        walk(shown[row, :length], memory=memory)
        walk.seeds = columns(seeds[row])
        assert_close(logits[row, :length], walk(now[row, :length], memory=memory))
        assert_holds(cache, row, memory)
    assert (cache.storage[..., 9:, :] == 1e6).all()


PLACES = [[3, 4, 5, 6, -1], [5, 0, 1, -1, 2], [-1, 7, 2, 3, -1]]
BLOCK_PATTERNS = {
    "apart": ([0, 3], [], [2]),
    "adjacent": ([1, 2, 3], [0, 1], [2, 3]),
    "all, and padding": (range(5), range(5), range(5)),
}


@shares
@pytest.mark.parametrize("pattern", BLOCK_PATTERNS)
def test_blocks(model: MaskedLM, walk: Walk, pattern: str, share: float) -> None:
    """Rows and blocks of different lengths."""
    seeds = at((3, 5), *BLOCK_PATTERNS[pattern])
    _, now = shown_and_masked(seeds)
    shown, lengths, place = ids(3, 9), torch.tensor(LENGTHS), torch.tensor(PLACES)
    cache = poisoned(model, 3, 11)
    model(shown, lengths=lengths, cache=cache)
    kept = cache.storage.clone()
    logits = model(
        now, lengths=lengths, cache=cache, position_ids=place, seeds=seeds, seed_layers=share
    ).logits
    walk.cover_from = 4 - int(4 * share)
    for row, length in enumerate(LENGTHS):
        memory: Memory = {}
        walk.seeds = ()
        walk(shown[row, :length], memory=memory)
        walk.seeds = columns(seeds[row])
        got = walk(now[row], PLACES[row], memory)
        real = [i for i, place in enumerate(PLACES[row]) if place >= 0]
        assert_close(logits[row, real], got[real])
        assert_holds(cache, row, memory)
        others = [i for i in range(11) if i not in PLACES[row]]
        assert torch.equal(cache.storage[:, :, row, :, others], kept[:, :, row, :, others])


def test_rows_of_the_cache_that_are_named(model: MaskedLM, walk: Walk) -> None:
    seeds = at((2, 7), [1, 2], [6])
    shown, now = shown_and_masked(seeds)
    cache, rows = poisoned(model, 4, 8), torch.tensor([3, 1])
    model(shown, cache=cache, cache_rows=rows)
    logits = model(now, cache=cache, cache_rows=rows, seeds=seeds).logits
    for own, row in enumerate((3, 1)):
        memory: Memory = {}
        walk.seeds = ()
        walk(shown[own], memory=memory)
        walk.seeds = columns(seeds[own])
        assert_close(logits[own], walk(now[own], memory=memory))
        assert_holds(cache, row, memory)
    assert (cache.storage[:, :, [0, 2]] == 1e6).all()


def passes(
    model: MaskedLM, seeds: Tensor, rows: slice = slice(None), graph: bool = False, **options: Any
) -> list[Tensor]:
    """What a whole pass and then one over a block compute for these rows of `[3, 9]`, both with seeds."""
    inputs = (*shown_and_masked(seeds), seeds, torch.tensor(PLACES), torch.tensor(LENGTHS))
    shown, now, seeds, place, lengths = (x[rows].to(model.device) for x in inputs)
    real = torch.arange(9, device=model.device) < lengths[:, None]
    cache = model.new_cache(len(now), 9)
    model(shown, cache=cache, lengths=lengths)
    results = []
    for arguments, kept in (
        ({"input_ids": now, "seeds": seeds}, real),
        ({"input_ids": now[:, :5], "seeds": seeds[:, :5], "position_ids": place}, place >= 0),
    ):
        graphs = {"graph": AttentionGraph(place, 1.0)} if graph else {}
        logits = model(cache=cache, lengths=lengths, **arguments, **graphs, **options).logits
        results += [logits.where(kept[..., None], 0.0), cache.storage.clone()]
        results += [graphs["graph"].scores()] if graph else []
    return results


SEEDS = at((3, 9), [2, 3], [0], [])


def test_without_the_log_sum_exp_of_torch(model: MaskedLM, request: pytest.FixtureRequest) -> None:
    expected = passes(model, SEEDS, graph=True)
    request.getfixturevalue("no_cpu_flash")
    for got, other in zip(passes(model, SEEDS, graph=True), expected, strict=True):
        assert_close(got, other)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float64", 1e-12), ("bfloat16", 0.1)])
def test_batched_rows_equal_solo_rows(folder: Path, dtype: str, tolerance: float) -> None:
    """Those without a seed too."""
    model = load_model(folder, dtype=dtype)
    batched = passes(model, SEEDS, seed_layers=0.5, graph=True)
    for row in range(3):
        solo = passes(model, SEEDS, slice(row, row + 1), seed_layers=0.5, graph=True)
        for whole, own in zip(batched, solo, strict=True):
            mine = whole[:, :, row] if whole.dim() == 6 else whole[row]
            own = own[:, :, 0] if own.dim() == 6 else own[0]
            assert_close(mine, own, tolerance * max(1, float(own.abs().max())))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_no_seeds_change_no_bit(folder: Path, dtype: str) -> None:
    model = load_model(folder, dtype=dtype)
    shown, now = shown_and_masked(SEEDS)
    none, place = torch.zeros_like(SEEDS), torch.tensor(PLACES)
    results = []
    for whole, block in (({}, {}), ({"seeds": none}, {"seeds": none[:, :5]})):
        cache = model.new_cache(3, 9)
        model(shown, cache=cache)
        logits = model(now, cache=cache, **whole).logits
        results.append(
            (logits, model(now[:, :5], cache=cache, position_ids=place, **block).logits, cache.storage)
        )
    for without, with_none in zip(*results, strict=True):
        assert torch.equal(without, with_none)


def test_what_is_beyond_a_row_is_no_seed(model: MaskedLM) -> None:
    shown, now = shown_and_masked(SEEDS)
    real, lengths = torch.arange(9) < torch.tensor(LENGTHS)[:, None], torch.tensor(LENGTHS)
    results = []
    for seeds in (SEEDS, SEEDS | ~real):
        cache = model.new_cache(3, 9)
        model(shown, cache=cache, lengths=lengths)
        results.append(model(now, cache=cache, lengths=lengths, seeds=seeds).logits[real])
    assert torch.equal(*results)


@shares
def test_the_graph_is_that_of_what_is_seen(model: MaskedLM, walk: Walk, share: float) -> None:
    """Up to the weight of a seed's column in the row that predicts it, where all others see another."""
    seeds, places = at((1, 9), [2, 3, 7]), torch.tensor([2, 3, 4, 8, -1])
    shown, now = shown_and_masked(seeds)
    walk.cover_from = 4 - int(4 * share)
    for own in (list(range(9)), [1, 2, 3, 4, 5, -1, 6, 7, 8]):
        memory: Memory = {}
        walk.seeds = ()
        walk(shown[0], memory=memory)
        walk.seeds = columns(seeds[0])
        walk(now[0], own, memory)
        rows = torch.tensor([own.index(place) if place >= 0 else -1 for place in places.tolist()])
        expected = picked(torch.stack(walk.maps).mean((0, 1)), places, rows)

        cache, graph = model.new_cache(1, 9), AttentionGraph(places[None], 1.0)
        model(shown, cache=cache)
        place = {} if own == list(range(9)) else {"position_ids": torch.tensor([own])}
        model(now, cache=cache, seeds=seeds, seed_layers=share, graph=graph, **place)
        scores = graph.scores()[0]
        predicts = rows[:, None] + walk.shift == rows  # of each position: whether it is what the row predicts
        compared = ~(predicts & seeds[0, rows])
        assert (~compared).any()
        assert_close(scores[compared], expected[compared])


def prediction_of_a_seed(model: MaskedLM, token: int, share: float) -> Tensor:
    """`[V]` of the seed at position 4, at which the pass before showed this token."""
    shown = ids(1, 9)
    shown[:, 4] = token
    cache, seeds = model.new_cache(1, 9), at((1, 9), [4])
    model(shown, cache=cache)
    logits: Tensor = model(shown.masked_fill(seeds, MASK), cache=cache, seeds=seeds, seed_layers=share).logits
    return logits[0, 4 - int(model.shifted_logits)]


@pytest.mark.parametrize("model_type", FIELDS)
def test_a_token_leaks_to_its_own_prediction(checkpoint: Checkpoint, model_type: str) -> None:
    """COVER's correction leaves a seed's token out of its own row, in each layer. But from the second layer
    on, the others have seen it. Only an override in the last layer keeps the prediction free of it."""

    def change(layers: int, share: float) -> float:
        fields = {("n_layers" if model_type == "llada" else "num_hidden_layers"): layers}
        model = load_model(checkpoint(model_type=model_type, **fields), dtype="float64")
        one, other = (prediction_of_a_seed(model, token, share) for token in (7, 30))
        return float((one - other).abs().max())

    assert change(1, 1.0) < 1e-12
    assert change(2, 1.0) > 1e-2
    assert change(2, 0.5) < 1e-12
    assert change(3, 0.5) > 1e-2  # two layers
    assert change(3, 0.0) < 1e-12


@pytest.mark.usefixtures("empty_compiler")
def test_tracing(checkpoint: Checkpoint) -> None:
    """In one graph, and without a look at values."""
    model = load_model(checkpoint(), dtype="float64")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    shown, now = shown_and_masked(SEEDS)
    results = []
    for run in (model, compiled):
        cache = model.new_cache(3, 9)
        model(shown, cache=cache)
        place = torch.tensor(PLACES)
        options = {"cache": cache, "lengths": torch.tensor(LENGTHS), "seed_layers": 0.5}
        run(now, seeds=SEEDS, **options)
        logits = run(now[:, :5], seeds=SEEDS[:, :5], position_ids=place, **options).logits
        results.append((logits[place >= 0], cache.storage))
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected)


def test_nothing_is_read_on_an_accelerator() -> None:
    device = torch.device("meta")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        model = LLaDAModelLM(LLaDAConfig(**LLADA))
        tokens, flags = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.bool)
        for lengths in (None, tokens[:, 0]):
            cache = model.new_cache(2, 9)
            for rows in (None, tokens[:, 0]):
                with Watch():
                    options = {"lengths": lengths, "cache": cache, "seed_layers": 0.5}
                    model(tokens, cache_rows=rows, seeds=flags, **options)
            with Watch():
                model(tokens[:, :4], position_ids=tokens[:, :4], seeds=flags[:, :4], **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_on_a_gpu(folder: Path, dtype: str, tolerance: float) -> None:
    host, model = (load_model(folder, dtype=dtype, device=device) for device in ("cpu", "cuda"))
    options = {"seed_layers": 0.5, "graph": True}
    for got, expected in zip(passes(model, SEEDS, **options), passes(host, SEEDS, **options), strict=True):
        assert_close(got.cpu(), expected, tolerance * max(1, float(expected.abs().max())))


NONE = torch.zeros(2, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seeds": NONE, "cache": None}, ValueError, "seeds needs cache, and neither attention_mask nor"),
        ({"seeds": NONE, "attention_mask": NONE.long() + 1}, ValueError, "seeds needs cache, and neither"),
        (
            {"seeds": NONE, "shadow_positions": NONE.long()[:, :1]},
            ValueError,
            "attention_mask nor shadow_pos",
        ),
        ({"seeds": [[True, False]]}, TypeError, "seeds must be a bool tensor, got list"),
        ({"seeds": NONE.long()}, TypeError, "seeds must be a bool tensor, got torch.int64"),
        ({"seeds": NONE[:, :1]}, ValueError, r"seeds must have shape \[2, 2\], got \[2, 1\]"),
        ({"seeds": NONE[0]}, ValueError, r"seeds must have shape \[2, 2\], got \[2\]"),
        ({"seeds": NONE.to("meta")}, ValueError, "seeds must be on cpu, got meta"),
        ({"seed_layers": 1.01}, ValueError, r"seed_layers must be a share in \[0, 1\], got 1.01"),
        ({"seed_layers": -0.1}, ValueError, r"seed_layers must be a share in \[0, 1\], got -0.1"),
        ({"seed_layers": float("nan")}, ValueError, r"seed_layers must be a share in \[0, 1\], got nan"),
        ({"seed_layers": True}, TypeError, "seed_layers must be a number, got True"),
        ({"seed_layers": "0.5"}, TypeError, "seed_layers must be a number, got '0.5'"),
    ],
)
def test_bad_input(
    checkpoint: Checkpoint, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = load_model(checkpoint())
    cache = model.new_cache(2, 2)
    with pytest.raises(error, match=message):
        model(**{"input_ids": ids(2, 2), "cache": cache, **arguments})
    assert (cache.storage == 0).all()  # nothing was written


def test_a_share_of_the_layers() -> None:
    for layers in (1, 4, 10, 28, 32):
        assert [first_of_last(layers, k / layers) for k in range(layers + 1)] == list(range(layers, -1, -1))
    assert first_of_last(32, 0.3) == 22
