"""Passes that fill a cache, and passes over some positions that use it, against a plain implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlmkern.models import load_model
from dlmkern.models.kv_cache import KVCache
from dlmkern.models.masked_lm import MaskedLM
from tests.models.support import (
    DREAM,
    LLADA,
    Memory,
    PlainModel,
    assert_close,
    assert_holds,
    ids,
    poisoned,
)

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("no_grad")

MODELS: dict[str, dict[str, Any]] = {
    "llada": {**LLADA, "n_kv_heads": 4},
    "llada-grouped": LLADA,
    "dream": DREAM,
}


@pytest.fixture(params=MODELS)
def folder(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Path:
    return checkpoint(**MODELS[request.param])


@pytest.fixture
def model(folder: Path) -> MaskedLM:
    return load_model(folder, dtype="float64")


@pytest.fixture
def plain(folder: Path, model: MaskedLM) -> PlainModel:
    return PlainModel(folder, model.config)


def test_an_empty_cache(model: MaskedLM) -> None:
    config = model.config
    cache = model.new_cache(3, 11)
    assert cache.storage.shape == (config.n_layers, 2, 3, config.n_kv_heads, 11, config.head_dim)
    assert (cache.rows, cache.length, cache.storage.dtype) == (3, 11, torch.float64)
    assert (cache.storage == 0).all()


def test_whole_rows_fill_the_cache(model: MaskedLM, plain: PlainModel) -> None:
    batch = ids(2, 7)
    cache = poisoned(model, 2, 10)
    logits = model(batch, cache=cache).logits
    assert torch.equal(logits, model(batch).logits)
    for row in range(2):
        memory: Memory = {}
        assert_close(logits[row], plain(batch[row], memory=memory))
        assert_holds(cache, row, memory)
    assert (cache.storage[..., 7:, :] == 1e6).all()


def test_whole_rows_of_different_lengths(model: MaskedLM, plain: PlainModel) -> None:
    batch, lengths = ids(3, 9), [4, 9, 1]
    cache = model.new_cache(3, 9)
    logits = model(batch, lengths=torch.tensor(lengths), cache=cache).logits
    for row, length in enumerate(lengths):
        memory: Memory = {}
        assert_close(logits[row, :length], plain(batch[row, :length], memory=memory))
        assert_holds(cache, row, memory)
    assert cache.storage.isfinite().all()


def test_whole_rows_go_to_the_rows_of_the_cache_that_are_named(model: MaskedLM, plain: PlainModel) -> None:
    batch = ids(2, 7)
    cache = poisoned(model, 4, 8)
    logits = model(batch, cache=cache, cache_rows=torch.tensor([3, 1])).logits
    for own, row in enumerate((3, 1)):
        memory: Memory = {}
        assert_close(logits[own], plain(batch[own], memory=memory))
        assert_holds(cache, row, memory)
    assert (cache.storage[:, :, [0, 2]] == 1e6).all()


def test_a_slice_of_all_positions_is_the_whole_pass(model: MaskedLM) -> None:
    batch = ids(2, 9)
    cache = model.new_cache(2, 9)
    model(ids(2, 9, seed=2), cache=cache)  # other tokens: all of this has to be replaced
    place = torch.stack((torch.arange(9), torch.tensor([4, 0, 8, 1, 7, 2, 3, 6, 5])))
    logits = model(batch.gather(1, place), cache=cache, position_ids=place).logits
    expected = model.new_cache(2, 9)
    whole = model(batch, cache=expected).logits
    assert_close(logits, whole.gather(1, place[..., None].expand_as(logits)))
    assert_close(cache.storage, expected.storage)


def test_slices_see_what_is_stale_elsewhere(model: MaskedLM, plain: PlainModel) -> None:
    """Pass after pass: each replaces its own keys and values, and sees all others as they last were."""
    before = ids(2, 9)
    memories: list[Memory] = [{}, {}]
    cache = model.new_cache(2, 9)
    logits = model(before, cache=cache).logits
    for row, memory in enumerate(memories):
        assert_close(logits[row], plain(before[row], memory=memory))
    for seed, places in enumerate(([[3, 4, 5], [0, 1, 2]], [[3, 5, 8], [2, 7, 1]], [[6], [2]]), start=2):
        place, tokens = torch.tensor(places), ids(2, len(places[0]), seed=seed)
        logits = model(tokens, cache=cache, position_ids=place).logits
        fresh = before.scatter(1, place, tokens)
        for row, memory in enumerate(memories):
            expected = plain(tokens[row], places[row], memory)
            assert_close(logits[row], expected)
            assert_holds(cache, row, memory)
            # The approximation shows: a whole pass gives something else.
            assert (plain(fresh[row])[places[row]] - expected).abs().max() > 1e-3


def test_slices_of_ragged_rows(model: MaskedLM, plain: PlainModel) -> None:
    """Rows of different lengths and slices of different sizes: padding is neither written nor seen."""
    before, lengths = ids(3, 9), [6, 9, 2]
    tokens, places = ids(3, 4, seed=2), [[4, 5, -1, -1], [0, 8, 3, 5], [-1, 1, -1, -1]]
    memories: list[Memory] = [{}, {}, {}]
    cache = poisoned(model, 3, 12)
    model(before, lengths=torch.tensor(lengths), cache=cache)
    for row, memory in enumerate(memories):
        plain(before[row, : lengths[row]], memory=memory)
    kept = cache.storage.clone()
    logits = model(
        tokens, lengths=torch.tensor(lengths), cache=cache, position_ids=torch.tensor(places)
    ).logits
    for row, memory in enumerate(memories):
        real = [i for i, place in enumerate(places[row]) if place >= 0]
        assert_close(logits[row, real], plain(tokens[row, real], [places[row][i] for i in real], memory))
        assert_holds(cache, row, memory)
        others = [i for i in range(12) if i not in places[row]]
        assert torch.equal(cache.storage[:, :, row, :, others], kept[:, :, row, :, others])


def test_what_stands_at_padding_changes_nothing(model: MaskedLM) -> None:
    before, place = ids(2, 9), torch.tensor([[2, -1, 6], [-1, -1, 3]])
    results = []
    for seed in (3, 4):
        cache = model.new_cache(2, 9)
        model(before, cache=cache)
        tokens = torch.where(place < 0, ids(2, 3, seed=seed), ids(2, 3, seed=2))
        logits = model(tokens, cache=cache, position_ids=place).logits
        results.append((logits[place >= 0], cache.storage))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_slices_without_lengths_see_the_whole_cache(model: MaskedLM) -> None:
    cache = model.new_cache(1, 9)
    model(ids(1, 9), cache=cache)
    other = KVCache(cache.storage.clone())
    arguments = {"input_ids": ids(1, 2, seed=2), "position_ids": torch.tensor([[3, 4]])}
    logits = model(cache=cache, **arguments).logits
    assert torch.equal(model(cache=other, lengths=torch.tensor([9]), **arguments).logits, logits)
    assert not torch.allclose(model(cache=other, lengths=torch.tensor([5]), **arguments).logits, logits)


def test_positions_are_columns_of_the_slice(model: MaskedLM) -> None:
    tokens, place = ids(2, 4, seed=2), torch.tensor([[5, 6, 7, 8], [1, 2, 3, -1]])
    columns = torch.tensor([[3, 0], [2, 2]])
    results = []
    for positions in (None, columns):
        cache = model.new_cache(2, 9)
        model(ids(2, 9), cache=cache)
        results.append(model(tokens, positions=positions, cache=cache, position_ids=place).logits)
    every, some = results
    assert_close(some, every.gather(1, columns[..., None].expand_as(some)))


def test_empty_slices_and_batches(model: MaskedLM) -> None:
    cache = model.new_cache(2, 9)
    model(ids(2, 9), cache=cache)
    kept = cache.storage.clone()
    nothing = torch.empty((2, 0), dtype=torch.int64)
    assert model(nothing, cache=cache, position_ids=nothing).logits.shape == (2, 0, 64)
    assert torch.equal(cache.storage, kept)
    none = model.new_cache(0, 9)
    assert model(ids(0, 9), cache=none).logits.shape == (0, 9, 64)
    assert model(ids(0, 3), cache=none, position_ids=ids(0, 3)).logits.shape == (0, 3, 64)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.05)])
def test_other_dtypes(folder: Path, dtype: str, tolerance: float) -> None:
    model = load_model(folder, dtype=dtype)
    cache = model.new_cache(2, 9)
    assert cache.storage.dtype == model.dtype
    model(ids(2, 9, seed=2), cache=cache)
    batch, place = ids(2, 9), torch.arange(9).expand(2, -1)
    logits, whole = model(batch, cache=cache, position_ids=place).logits, model(batch).logits
    assert logits.dtype == model.dtype
    assert (logits - whole).abs().max() <= tolerance * whole.abs().max()


@pytest.mark.usefixtures("empty_compiler")
def test_slices_trace(model: MaskedLM) -> None:
    """In one graph, and without a look at values."""
    caches = [model.new_cache(2, 9) for _ in range(2)]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    results = []
    for run, cache in zip((model, compiled), caches, strict=True):
        run(ids(2, 9), lengths=torch.tensor([7, 9]), cache=cache)
        place = torch.tensor([[5, 6, -1], [1, 2, 3]])
        out = run(ids(2, 3), lengths=torch.tensor([7, 9]), cache=cache, position_ids=place)
        results.append(out.logits[place >= 0])
    assert_close(*results)
    assert_close(caches[0].storage, caches[1].storage)


def numbered(rows: int = 4, length: int = 5) -> KVCache:
    """A cache in which row r holds the number r + p / 10 at position p."""
    cache = KVCache.empty(2, rows, 3, length, 4, torch.float64, torch.device("cpu"))
    number = torch.arange(rows)[:, None, None, None] + torch.arange(length)[:, None] / 10
    cache.storage.copy_(number.expand_as(cache.storage))
    return cache


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 2], [1, 3], [2, 3], [3], []])
def test_keep(rows: list[int]) -> None:
    cache, before = numbered(), numbered().storage
    kept = cache.keep(rows)
    assert (kept.rows, kept.length) == (len(rows), 5)
    assert torch.equal(kept.storage, before[:, :, rows])
    if rows:
        assert kept.storage.data_ptr() == cache.storage.data_ptr()  # moved, not copied elsewhere


def test_keep_twice() -> None:
    kept = numbered().keep([0, 2, 3]).narrow(3, 4).keep([1, 2])
    assert torch.equal(kept.storage, numbered().storage[:, :, [2, 3], :, :4])


def test_narrow() -> None:
    cache = numbered()
    assert cache.narrow(4, 5) is cache
    part = cache.narrow(2, 3)
    assert (part.rows, part.length) == (2, 3)
    assert torch.equal(part.storage, cache.storage[:, :, :2, :, :3])
    part.storage.fill_(7)
    assert (cache.storage[:, :, :2, :, :3] == 7).all()
    assert torch.equal(cache.storage[:, :, 2:], numbered().storage[:, :, 2:])


def test_decoding_goes_on_in_a_cache_that_was_cut_down(model: MaskedLM, plain: PlainModel) -> None:
    """Two of four rows are finished, and what is left is shorter; views of the buffer are not contiguous."""
    before, lengths = ids(4, 11), [11, 6, 10, 8]
    cache = poisoned(model, 4, 12)
    model(before, lengths=torch.tensor(lengths), cache=cache)
    cache = cache.keep([1, 3]).narrow(2, 8)
    tokens, places = ids(2, 2, seed=2), [[4, 5], [0, 7]]
    lengths = [6, 8]
    logits = model(
        tokens, lengths=torch.tensor(lengths), cache=cache, position_ids=torch.tensor(places)
    ).logits
    memories: list[Memory] = [{}, {}]
    for row, (old, memory) in enumerate(zip((1, 3), memories, strict=True)):
        plain(before[old, : lengths[row]], memory=memory)
        assert_close(logits[row], plain(tokens[row], places[row], memory))
        assert_holds(cache, row, memory)
    # A whole pass into the same buffer.
    whole = ids(1, 8, seed=3)
    assert_close(model(whole, cache=cache, cache_rows=torch.tensor([1])).logits[0], plain(whole[0]))
    assert_holds(cache, 0, memories[0])


def changed(cache: KVCache, **changes: Any) -> KVCache:
    """An empty cache like this one but for the changes."""
    layers, heads, head_dim, dtype, device = cache.kind
    same = {"layers": layers, "heads": heads, "head_dim": head_dim, "dtype": dtype, "device": device}
    return KVCache.empty(**{**same, "rows": cache.rows, "length": cache.length, **changes})


PLACE = torch.tensor([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cache": [torch.zeros(2)]}, TypeError, "cache must be a KVCache, got list"),
        ({"cache": (), "position_ids": PLACE}, TypeError, "cache must be a KVCache, got tuple"),
        ({"cache": {"rows": 3}}, ValueError, "cache has 3 rows, input_ids has 2"),
        ({"cache": {"rows": 1}, "position_ids": PLACE}, ValueError, "cache has 1 rows, input_ids has 2"),
        ({"cache": {"length": 1}}, ValueError, "cache holds 1 positions, input_ids has 2"),
        (
            {"cache": {"length": 41}, "position_ids": PLACE},
            ValueError,
            "cache: 41 tokens exceed max_sequence_length = 40",
        ),
        ({"cache": {"layers": 3}}, ValueError, r"cache must be from this model's new_cache, .*got \(3, "),
        ({"cache": {"heads": 1}}, ValueError, r"cache must be .*\(2, 2, 8, .*got \(2, 1, 8, "),
        ({"cache": {"head_dim": 6}}, ValueError, r"cache must be .*\(2, 2, 8, .*got \(2, 2, 6, "),
        ({"cache": {"dtype": torch.float32}}, ValueError, r"cache must be .*float64.*, got .*float32"),
        (
            {"cache": {"device": torch.device("meta")}, "position_ids": PLACE},
            ValueError,
            r"cache must be .*'cpu'.*, got .*'meta'",
        ),
        ({"cache_rows": torch.tensor([0, 1])}, ValueError, "cache_rows needs cache"),
        ({"cache": {}, "cache_rows": [0, 1]}, TypeError, "cache_rows must be an int64 tensor, got list"),
        (
            {"cache": {}, "cache_rows": torch.tensor([0])},
            ValueError,
            r"cache_rows must have shape \[2\], got \[1\]",
        ),
        (
            {"cache": {}, "cache_rows": torch.tensor([1, 2])},
            ValueError,
            r"cache_rows must lie in \[0, 2\), got values from 1 to 2",
        ),
        ({"cache": {}, "cache_rows": torch.tensor([-1, 0])}, ValueError, r"cache_rows must lie in \[0, 2\)"),
        ({"position_ids": PLACE}, ValueError, "position_ids needs cache, and neither"),
        (
            {"cache": {}, "position_ids": PLACE, "attention_mask": torch.ones(2, 2).long()},
            ValueError,
            "position_ids needs cache, and neither attention_mask",
        ),
        (
            {"cache": {}, "position_ids": PLACE, "cache_rows": torch.tensor([0, 1])},
            ValueError,
            "neither attention_mask nor cache_rows",
        ),
        (
            {"cache": {}, "position_ids": PLACE.int()},
            TypeError,
            "position_ids must be an int64 tensor, got torch.int32",
        ),
        (
            {"cache": {}, "position_ids": PLACE[:, :1]},
            ValueError,
            r"position_ids must have shape \[2, 2\], got \[2, 1\]",
        ),
        ({"cache": {}, "position_ids": PLACE + 4}, ValueError, r"position_ids must lie in \[-1, 6\)"),
        ({"cache": {}, "position_ids": PLACE - 2}, ValueError, r"position_ids must lie in \[-1, 6\)"),
        (
            {"cache": {}, "position_ids": PLACE, "lengths": torch.tensor([6, 7])},
            ValueError,
            r"lengths must lie in \[1, 7\)",
        ),
        (
            {"cache": {}, "position_ids": PLACE, "positions": torch.tensor([[2], [0]])},
            ValueError,
            r"positions must lie in \[0, 2\)",
        ),
    ],
)
def test_bad_input(
    checkpoint: Checkpoint, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = load_model(checkpoint(), dtype="float64")
    cache = arguments.get("cache")
    if isinstance(cache, dict):
        cache = changed(model.new_cache(2, 6), **cache)
        arguments = {**arguments, "cache": cache}
    with pytest.raises(error, match=message):
        model(**{"input_ids": ids(2, 2), **arguments})
    if isinstance(cache, KVCache) and cache.storage.device.type == "cpu":
        assert (cache.storage == 0).all()  # nothing was written


def test_a_pass_with_a_cache_carries_no_gradient(model: MaskedLM) -> None:
    """Also where gradients are recorded; without a cache they are."""
    cache = model.new_cache(1, 4)
    with torch.enable_grad():
        assert model(ids(1, 4)).logits.requires_grad
        assert not model(ids(1, 4), cache=cache).logits.requires_grad
        place = torch.tensor([[1, 2]])
        assert not model(ids(1, 2), cache=cache, position_ids=place).logits.requires_grad


def test_a_cache_outlives_inference_mode(model: MaskedLM) -> None:
    with torch.inference_mode():
        cache = model.new_cache(1, 4)
        expected = model(ids(1, 4), cache=cache).logits
    assert torch.equal(model(ids(1, 4), cache=cache).logits, expected)


def test_hooks_of_blocks_run(model: MaskedLM) -> None:
    """In every pass: what transformers' users attach to a layer sees the layer's output."""
    seen = []
    model.blocks[1].register_forward_hook(lambda _module, _input, output: seen.append(output.shape))
    cache = model.new_cache(1, 4)
    model(ids(1, 4), cache=cache)
    model(ids(1, 2), cache=cache, position_ids=torch.tensor([[1, 2]]))
    assert [shape[:2] for shape in seen] == [(1, 4), (1, 2)]
