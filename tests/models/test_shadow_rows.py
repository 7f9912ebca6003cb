"""Passes with WINO's shadow rows, against a walk in which every query gathers its own keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlmkern.models import AttentionGraph, LLaDAConfig, LLaDAModelLM, load_model
from dlmkern.models.masked_lm import MaskedLM
from tests.models.support import (
    LLADA,
    KeysOfEachQuery,
    KeyValue,
    Memory,
    assert_close,
    assert_holds,
    ids,
    poisoned,
)
from tests.ops.test_device_rules import Watch

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("no_grad")
MASK = LLADA["mask_token_id"]


class Walk(KeysOfEachQuery):
    """In the next call, so many of the last columns are shadow rows. Columns at place -1 are padding."""

    shadows = 0

    def seen(
        self, layer: int, rows: Sequence[KeyValue], places: Sequence[int], memory: Memory
    ) -> list[list[KeyValue]]:
        n = len(places) - self.shadows
        real = [place >= 0 for place in places]
        memory.update({(layer, places[i]): rows[i] for i in range(n) if real[i]})
        keys = {place: kv for (owner, place), kv in memory.items() if owner == layer}
        shadows = [rows[i] for i in range(n, len(places)) if real[i]]
        beside = [[kv for place, kv in keys.items() if place != own] for own in places[n:]]
        return [[*keys.values()]] * n + [[*others, *shadows] for others in beside]


@pytest.fixture(params=[2, 4])
def folder(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Path:
    return checkpoint(n_layers=3, n_kv_heads=request.param)


@pytest.fixture
def model(folder: Path) -> MaskedLM:
    return load_model(folder, dtype="float64")


@pytest.fixture
def walk(folder: Path, model: MaskedLM) -> Walk:
    return Walk(folder, model.config)


# Of rows of 9, 1 and 7 tokens: adjacent ones, the only position and no other, the same position twice.
LENGTHS = [9, 1, 7]
SHADOWS = torch.tensor([[2, 3, 8], [-1, 0, -1], [5, 5, -1]])


def with_shadows(tokens: Tensor, shadows: Tensor = SHADOWS) -> Tensor:
    return torch.cat((tokens, torch.full_like(shadows, MASK)), dim=1)


@pytest.mark.parametrize("cached", [False, True])
def test_whole_rows(model: MaskedLM, walk: Walk, cached: bool) -> None:
    batch, lengths = ids(3, 9), torch.tensor(LENGTHS)
    cache = poisoned(model, 4, 11)
    options = {"cache": cache, "cache_rows": torch.tensor([3, 0, 1])} if cached else {}
    logits = model(with_shadows(batch), lengths=lengths, shadow_positions=SHADOWS, **options).logits
    assert_close(logits[:, :9], model(batch, lengths=lengths).logits)
    for row, length in enumerate(LENGTHS):
        memory: Memory = {}
        places = [*range(length), *SHADOWS[row].tolist()]
        walk.shadows = 3
        tokens = with_shadows(batch[row : row + 1, :length], SHADOWS[row : row + 1])[0]
        expected = walk(tokens, places, memory)
        real = SHADOWS[row] >= 0
        assert_close(logits[row, :length], expected[:length])
        assert_close(logits[row, 9:][real], expected[length:][real])
        if cached:
            assert_holds(cache, [3, 0, 1][row], memory)
    if cached:
        assert (cache.storage[:, :, 2] == 1e6).all()
        assert (cache.storage[..., 9:, :] == 1e6).all()


PLACES = torch.tensor([[2, 3, 4, -1], [-1, 0, -1, -1], [6, -1, 4, 5]])


def test_blocks(model: MaskedLM, walk: Walk) -> None:
    """A shadow row may stand at a position inside the block or outside."""
    before, tokens, lengths = ids(3, 9), ids(3, 4, seed=2), torch.tensor(LENGTHS)
    cache, plain = poisoned(model, 3, 11), poisoned(model, 3, 11)
    for each in (cache, plain):
        model(before, lengths=lengths, cache=each)
    options = {"lengths": lengths, "position_ids": PLACES}
    logits = model(with_shadows(tokens), cache=cache, shadow_positions=SHADOWS, **options).logits
    without = model(tokens, cache=plain, **options).logits
    assert_close(cache.storage, plain.storage)
    for row, length in enumerate(LENGTHS):
        memory: Memory = {}
        walk.shadows = 0
        walk(before[row, :length], memory=memory)
        walk.shadows = 3
        places = torch.cat((PLACES[row], SHADOWS[row]))
        expected = walk(with_shadows(tokens)[row], places.tolist(), memory)
        assert_close(logits[row, places >= 0], expected[places >= 0])
        assert_close(logits[row, :4][PLACES[row] >= 0], without[row, PLACES[row] >= 0])
        assert_holds(cache, row, memory)


def test_batched_rows_equal_solo_rows(model: MaskedLM) -> None:
    """And other shadows of a row, or what stands at padding, change nothing that sees none of them."""
    batch, lengths = ids(3, 9), torch.tensor(LENGTHS)
    logits = model(with_shadows(batch), lengths=lengths, shadow_positions=SHADOWS).logits
    for row, length in enumerate(LENGTHS):
        shadows = SHADOWS[row][SHADOWS[row] >= 0][None]
        solo = model(with_shadows(batch[row : row + 1, :length], shadows), shadow_positions=shadows).logits[0]
        assert_close(logits[row, :length], solo[:length])
        assert_close(logits[row, 9:][SHADOWS[row] >= 0], solo[length:])
    tokens = with_shadows(batch)
    tokens[:, 9:][SHADOWS < 0] = 7
    elsewhere = model(tokens, lengths=lengths, shadow_positions=SHADOWS).logits
    assert torch.equal(elsewhere[:, 9:][SHADOWS >= 0], logits[:, 9:][SHADOWS >= 0])


def test_an_attention_mask(model: MaskedLM) -> None:
    tokens, mask = with_shadows(ids(3, 9)), torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    by_mask = model(tokens, attention_mask=mask, shadow_positions=SHADOWS).logits
    lengths = torch.tensor(LENGTHS)
    assert torch.equal(by_mask, model(tokens, lengths=lengths, shadow_positions=SHADOWS).logits)


def test_no_shadow_rows_change_no_bit(model: MaskedLM) -> None:
    batch, none = ids(3, 9), torch.empty((3, 0), dtype=torch.int64)
    assert torch.equal(model(batch, shadow_positions=none).logits, model(batch).logits)
    padding = torch.full((3, 2), -1)
    logits = model(with_shadows(batch, padding), shadow_positions=padding).logits
    assert_close(logits[:, :9], model(batch).logits)
    assert logits.isfinite().all()


def test_logits_of_shadow_rows(model: MaskedLM) -> None:
    """Those wanted are columns of what goes in, in any order."""
    tokens, wanted = with_shadows(ids(3, 9)), torch.tensor([[11, 0], [10, 10], [3, 9]])
    every = model(tokens, shadow_positions=SHADOWS).logits
    some = model(tokens, shadow_positions=SHADOWS, positions=wanted).logits
    assert_close(some, every.gather(1, wanted[..., None].expand_as(some)))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.1)])
def test_other_dtypes(folder: Path, model: MaskedLM, dtype: str, tolerance: float) -> None:
    tokens = with_shadows(ids(3, 9))
    logits = load_model(folder, dtype=dtype)(tokens, shadow_positions=SHADOWS).logits
    expected = model(tokens, shadow_positions=SHADOWS).logits
    assert logits.dtype == getattr(torch, dtype)
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


def test_the_graph_knows_no_shadow_rows(model: MaskedLM) -> None:
    batch, place = ids(3, 9), torch.tensor([[2, 3, 4, 8], [1, 0, -1, -1], [6, -1, 4, 5]])
    scores = []
    for shadows in ({}, {"shadow_positions": SHADOWS}):
        tokens = with_shadows(batch) if shadows else batch
        cache, graphs = model.new_cache(3, 9), [AttentionGraph(place), AttentionGraph(place)]
        model(tokens, cache=cache, graph=graphs[0], **shadows)
        part = torch.cat((tokens[:, :4], tokens[:, 9:]), dim=1)
        model(part, cache=cache, position_ids=place, graph=graphs[1], **shadows)
        scores.append([graph.scores() for graph in graphs])
    for without, beside in zip(*scores, strict=True):
        assert_close(without, beside)


def test_a_token_leaks_to_its_shadow(checkpoint: Checkpoint) -> None:
    """Through the others, which see it, from the second layer on: as with seeds."""

    def change(layers: int) -> float:
        model = load_model(checkpoint(n_layers=layers), dtype="float64")
        predictions = []
        for token in (7, 30):
            batch, shadow = ids(1, 9), torch.tensor([[4]])
            batch[:, 4] = token
            predictions.append(model(with_shadows(batch, shadow), shadow_positions=shadow).logits[0, 9])
        return float((predictions[0] - predictions[1]).abs().max())

    assert change(1) < 1e-12
    assert change(2) > 1e-2


def test_one_layer_of_shadows_is_one_of_seeds(checkpoint: Checkpoint) -> None:
    """Both leave out one token and put a mask in its place."""
    model = load_model(checkpoint(n_layers=1), dtype="float64")
    batch, place = ids(2, 9), torch.tensor([[4], [0]])
    seeds = torch.zeros(2, 9, dtype=torch.bool).scatter_(1, place, True)
    cache = model.new_cache(2, 9)
    shadows = model(with_shadows(batch, place), cache=cache, shadow_positions=place).logits[:, 9:]
    verified = model(batch.masked_fill(seeds, MASK), cache=cache, seeds=seeds, positions=place).logits
    assert_close(shadows, verified)


@pytest.mark.usefixtures("empty_compiler")
def test_tracing(checkpoint: Checkpoint) -> None:
    """In one graph, and without a look at values."""
    model = load_model(checkpoint(n_layers=1), dtype="float64")
    tokens, lengths = with_shadows(ids(3, 9)), torch.tensor(LENGTHS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    real = torch.cat((torch.arange(9) < lengths[:, None], SHADOWS >= 0), dim=1)
    expected = model(tokens, lengths=lengths, shadow_positions=SHADOWS).logits[real]
    assert_close(compiled(tokens, lengths=lengths, shadow_positions=SHADOWS).logits[real], expected)


def test_nothing_is_read_on_an_accelerator() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        model = LLaDAModelLM(LLaDAConfig(**LLADA))
        tokens = torch.zeros(2, 9, dtype=torch.int64)
        for lengths in (None, tokens[:, 0]):
            cache = model.new_cache(2, 6)
            with Watch():
                options = {"lengths": lengths, "cache": cache, "shadow_positions": tokens[:, :3]}
                model(tokens, **options)
                model(tokens[:, :5], position_ids=tokens[:, :2], **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_on_a_gpu(folder: Path, dtype: str, tolerance: float) -> None:
    tokens, wanted = with_shadows(ids(3, 9)), torch.tensor([[9, 10, 11, 0], [10, 0, 0, 0], [9, 10, 3, 4]])
    results = []
    for device in ("cpu", "cuda"):
        model = load_model(folder, dtype=dtype, device=device)
        whole, shadows, columns, lengths, places = (
            x.to(device) for x in (tokens, SHADOWS, wanted, torch.tensor(LENGTHS), PLACES)
        )
        options = {"lengths": lengths, "cache": model.new_cache(3, 9), "shadow_positions": shadows}
        logits = [model(whole, positions=columns, **options).logits]
        block = model(whole[:, 5:], position_ids=places, **options).logits
        real = torch.cat((places, shadows), dim=1) >= 0
        results.append([x.cpu() for x in (*logits, block[real], options["cache"].storage)])
    for expected, got in zip(*results, strict=True):
        assert_close(got, expected, tolerance * max(1, float(expected.abs().max())))


ONE = torch.zeros(2, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"shadow_positions": [[0], [0]]}, TypeError, "must be an int64 tensor, got list"),
        ({"shadow_positions": ONE.int()}, TypeError, "must be an int64 tensor, got torch.int32"),
        ({"shadow_positions": ONE[:, 0]}, ValueError, r"must have shape \[2, \*\], got \[2\]"),
        ({"shadow_positions": ONE[:1]}, ValueError, r"must have shape \[2, \*\], got \[1, 1\]"),
        ({"shadow_positions": ONE + 3}, ValueError, r"must lie in \[-1, 3\), got values from 3 to 3"),
        ({"shadow_positions": ONE - 2}, ValueError, r"must lie in \[-1, 3\), got values from -2 to -2"),
        ({"shadow_positions": ONE.repeat(1, 5)}, ValueError, "has 5 columns, input_ids has 4"),
        ({"shadow_positions": ONE.to("meta")}, ValueError, "must be on cpu, got meta"),
        ({"positions": ONE + 4}, ValueError, r"lie in \[0, 4\), got values from 4 to 4"),
        ({"position_ids": ONE.repeat(1, 4)}, ValueError, r"have shape \[2, 3\], got \[2, 4\]"),
        ({"lengths": ONE[:, 0] + 4}, ValueError, r"lie in \[1, 4\), got values from 4 to 4"),
    ],
)
def test_bad_input(
    checkpoint: Checkpoint, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = load_model(checkpoint())
    cache = model.new_cache(2, 3)
    name = next(iter(arguments))
    with pytest.raises(error, match=f"^{name}.* {message}"):
        model(**{"input_ids": ids(2, 4), "cache": cache, "shadow_positions": ONE, **arguments})
    assert (cache.storage == 0).all()  # nothing was written


def test_not_for_shifted_logits(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint(model_type="Dream"))
    with pytest.raises(ValueError, match="shadow_positions needs a model whose output at a position"):
        model(ids(2, 4), shadow_positions=ONE)
