"""The attention that a forward pass records, against recorded attention and a plain float64 model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlmkern import attention
from dlmkern.graph import bidirectional
from dlmkern.models import AttentionGraph, LLaDAConfig, LLaDAModelLM, _check, attend, load_model
from dlmkern.models.masked_lm import MaskedLM
from tests.models.support import DATA, DREAM, LLADA, Memory, PlainModel, assert_close, ids
from tests.ops.test_device_rules import Watch

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("no_grad")

MODELS: dict[str, dict[str, Any]] = {
    "llada": {**LLADA, "n_layers": 4, "n_kv_heads": 4},
    "llada-grouped": {**LLADA, "n_layers": 4},
    "dream": {**DREAM, "num_hidden_layers": 4},
}
PLACES = torch.tensor([[3, 4, -1, 1], [8, -1, 0, 5], [-1, 1, 0, -1]])
LENGTHS = [6, 9, 2]


@pytest.fixture(params=MODELS)
def folder(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Path:
    return checkpoint(**MODELS[request.param])


@pytest.fixture
def model(folder: Path) -> MaskedLM:
    return load_model(folder, dtype="float64")


@pytest.fixture
def plain(folder: Path, model: MaskedLM) -> PlainModel:
    return PlainModel(folder, model.config)


class Recorder(AttentionGraph):
    """Keeps what it gets."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__(positions)
        self.got: list[tuple[Tensor, Tensor, dict[str, Any]]] = []

    def add(self, q: Tensor, k: Tensor, **options: Any) -> None:
        self.got.append((q, k, options))
        super().add(q, k, **options)


def every_position(rows: int, length: int) -> Tensor:
    return torch.arange(length).repeat(rows, 1)


def picked(mean: Tensor, places: Tensor, rows: Tensor | None = None) -> Tensor:
    """`[M, M]` from a map `[n, L]`: 0 where a place is -1."""
    out = mean.new_zeros(len(places), len(places))
    for i, place in enumerate(places.tolist()):
        for j, other in enumerate(places.tolist()):
            if place >= 0 and other >= 0:
                out[i, j] = mean[place if rows is None else int(rows[i]), other]
    return out


def mean_map(plain: PlainModel, *chosen: int) -> Tensor:
    """`[n, L]`, the mean over these layers and all heads."""
    return torch.stack([plain.maps[layer] for layer in chosen]).mean((0, 1))


@pytest.mark.parametrize("prompt", [0, 1])
def test_recorded_attention(prompt: int) -> None:
    recorded = load_file(DATA / "dapd_attention.safetensors")
    expected, input_ids = (recorded[f"seed0.prompt{prompt}.{key}"] for key in ("attention", "input_ids"))
    everywhere = every_position(*input_ids.shape)
    kept = [[recorded[f"seed0.prompt{prompt}.layer{layer}.{key}"][None] for key in "qk"] for layer in (2, 3)]
    graph = AttentionGraph(everywhere)
    for q, k in kept:
        graph.add(q, k)
    assert graph.scores().dtype == torch.float32
    assert_close(graph.scores()[0], expected, 1e-6)

    recorder = Recorder(everywhere)
    load_model(DATA / "models/llada_seed0")(input_ids, graph=recorder)
    assert_close(recorder.scores()[0], expected, 1e-6)
    for (q, k, _), (official_q, official_k) in zip(recorder.got, kept, strict=True):
        assert_close(q, official_q, 2e-5)
        assert_close(k, official_k, 2e-5)


def test_rows_of_different_lengths(model: MaskedLM, plain: PlainModel) -> None:
    batch = ids(3, 9)
    graph = AttentionGraph(PLACES)
    model(batch, lengths=torch.tensor(LENGTHS), graph=graph)
    assert graph.scores().dtype == torch.float64
    for row, length in enumerate(LENGTHS):
        plain(batch[row, :length])
        assert_close(graph.scores()[row], picked(mean_map(plain, 2, 3), PLACES[row]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_padded_batch_equals_solo(folder: Path, dtype: str) -> None:
    model = load_model(folder, dtype=dtype)
    batch = ids(3, 9)
    graph = AttentionGraph(PLACES)
    model(batch, lengths=torch.tensor(LENGTHS), graph=graph)
    for row, length in enumerate(LENGTHS):
        solo = AttentionGraph(PLACES[row : row + 1])
        model(batch[row : row + 1, :length], graph=solo)
        assert_close(graph.scores()[row], solo.scores()[0], {"float32": 2e-6, "bfloat16": 0.02}[dtype])


@pytest.mark.parametrize("missing", [False, True])
def test_hidden_keys_equal_none(
    model: MaskedLM, plain: PlainModel, missing: bool, request: pytest.FixtureRequest
) -> None:
    """Left padding and holes: as the row without them. A hidden position counts as padding."""
    if missing:
        request.getfixturevalue("no_cpu_flash")
    batch, mask = ids(3, 9), torch.ones(3, 9, dtype=torch.int64)
    mask[0, :3] = mask[1, 1] = mask[1, 6:8] = 0
    positions = torch.tensor([[3, 8, 2, -1], [0, 2, 8, 6], [5, 8, 0, 7]])
    graph = AttentionGraph(positions)
    model(batch, attention_mask=mask, graph=graph)
    for row, real in enumerate(mask.bool()):
        plain(batch[row, real], real.nonzero()[:, 0].tolist())
        place = (
            (real.cumsum(0) - 1).masked_fill(~real, -1)[positions[row]].masked_fill(positions[row] < 0, -1)
        )
        assert_close(graph.scores()[row], picked(mean_map(plain, 2, 3), place))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_left_padding_equals_solo(folder: Path, dtype: str) -> None:
    """Rotations tell only how far positions are from each other."""
    model = load_model(folder, dtype=dtype)
    batch, positions = ids(3, 9), torch.tensor([[8, 4, 7, -1], [0, 2, 8, 6], [-1, 7, 8, -1]])
    starts = torch.tensor([[3], [0], [7]])
    graph = AttentionGraph(positions)
    model(batch, attention_mask=torch.arange(9) >= starts, graph=graph)
    for row, start in enumerate(starts.flatten().tolist()):
        solo = AttentionGraph((positions[row : row + 1] - start).clamp(min=-1))
        model(batch[row : row + 1, start:], graph=solo)
        assert_close(graph.scores()[row], solo.scores()[0], {"float32": 2e-6, "bfloat16": 0.02}[dtype])


def test_positions_that_are_nothing_but_padding(model: MaskedLM) -> None:
    for positions in (torch.full((2, 3), -1), torch.empty(2, 0, dtype=torch.int64)):
        graph = AttentionGraph(positions)
        model(ids(2, 7), graph=graph)
        assert graph.scores().shape == (2, *positions.shape[1:] * 2)
        assert not graph.scores().any()


def test_a_pass_may_have_more_rows(model: MaskedLM) -> None:
    batch, positions, lengths = ids(4, 9), every_position(2, 5), torch.tensor([9, 7, 5, 6])
    graph, expected = AttentionGraph(positions), AttentionGraph(positions)
    model(batch, lengths=lengths, graph=graph)
    model(batch[:2], lengths=lengths[:2], graph=expected)
    assert_close(graph.scores(), expected.scores())


def test_a_block_pass_sees_what_is_stale_elsewhere(model: MaskedLM, plain: PlainModel) -> None:
    """The queries are those of the slice, the keys are all that the cache holds."""
    before, tokens = ids(3, 9), ids(3, 4, seed=2)
    places = torch.tensor([[4, 5, 2, -1], [0, 8, 3, 5], [-1, 1, -1, -1]])  # what is computed
    rows = torch.tensor([[2, 0, -1, 1], [3, -1, 1, 0], [1, -1, -1, -1]])
    positions = places.gather(1, rows.clamp(min=0)).masked_fill(rows < 0, -1)  # what the graph is of
    cache = model.new_cache(3, 12)
    cache.storage.fill_(1e6)  # would spoil any sum it got into
    lengths = torch.tensor(LENGTHS)
    model(before, lengths=lengths, cache=cache)
    graph = AttentionGraph(positions)
    cache = cache.narrow(3, 9)
    model(tokens, lengths=lengths, cache=cache, position_ids=places, graph=graph)
    for row, length in enumerate(LENGTHS):
        memory: Memory = {}
        plain(before[row, :length], memory=memory)
        real = places[row] >= 0
        plain(tokens[row, real], places[row, real].tolist(), memory)
        compact = real.cumsum(0)[rows[row].clamp(min=0)] - 1
        assert_close(graph.scores()[row], picked(mean_map(plain, 2, 3), positions[row], compact))


def test_a_block_pass_over_nothing_stale_is_the_whole_pass(model: MaskedLM) -> None:
    batch, positions = ids(2, 9), torch.tensor([[3, 5, 4], [6, -1, 7]])
    cache = model.new_cache(2, 9)
    whole = AttentionGraph(positions)
    model(batch, cache=cache, graph=whole)
    place = every_position(2, 9)[:, 3:8]
    block = AttentionGraph(positions)
    model(batch[:, 3:8], cache=cache, position_ids=place, graph=block)
    assert_close(block.scores(), whole.scores())


def test_where_positions_are_computed() -> None:
    position_ids = torch.tensor([[4, -1, 2, 4], [-1, 5, 0, -1], [1, 2, 3, 4]])
    positions = torch.tensor([[2, 4, -1, 5], [0, -1, 5, 3]])
    columns = attend.columns_of(position_ids, positions, 6)
    assert columns.tolist() == [[2, 3, -1, -1], [2, -1, 1, -1]]
    # On an accelerator nothing checks these values.
    for shift in (7, -7):
        columns = attend.columns_of(position_ids + shift, positions + shift, 6)
        assert columns.tolist() == [[-1] * 4] * 2


@pytest.mark.parametrize(
    ("share", "n_layers", "first"), [(0.3, 4, 2), (0.3, 28, 19), (0.3, 32, 22), (1, 5, 0), (0.01, 5, 4)]
)
def test_a_share_of_the_layers(share: float, n_layers: int, first: int) -> None:
    graph = AttentionGraph(every_position(1, 1), share)
    wanted = [layer for layer in range(n_layers) if graph.wants(layer, n_layers)]
    assert wanted == [*range(first, n_layers)]
    assert len(wanted) == n_layers - int(n_layers * (1 - share))


def test_layers_by_their_indices(model: MaskedLM, plain: PlainModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only these leave the usual path."""
    calls: list[str] = []

    def spy(run: Callable[..., Any]) -> Callable[..., Any]:
        def spied(*args: Any) -> Any:
            calls.append(run.__name__)
            return run(*args)

        return spied

    for run in (attention.attention, attention.attention_with_lse):
        monkeypatch.setattr(attend, run.__name__, spy(run))
    graph = AttentionGraph(every_position(1, 7), {0, 2})
    model(ids(1, 7), graph=graph)
    assert calls == ["attention_with_lse", "attention"] * 2
    plain(ids(1, 7)[0])
    assert_close(graph.scores()[0], mean_map(plain, 0, 2))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("missing", [False, True])
def test_recording_changes_no_logits(
    folder: Path, dtype: str, missing: bool, request: pytest.FixtureRequest
) -> None:
    if missing:
        request.getfixturevalue("no_cpu_flash")
    model = load_model(folder, dtype=dtype)
    batch, places = ids(3, 9), every_position(3, 2)
    for options in ({}, {"lengths": torch.tensor(LENGTHS)}):
        results = []
        for record in (False, True):
            cache = model.new_cache(3, 9)

            def graph(record: bool = record) -> dict[str, AttentionGraph]:
                return {"graph": AttentionGraph(places, 1.0)} if record else {}

            results.append(
                (
                    model(batch, **options, **graph()).logits,
                    model(batch, cache=cache, **options, **graph()).logits,
                    model(batch[:, 3:5], cache=cache, position_ids=places, **options, **graph()).logits,
                    cache.storage,
                )
            )
        for without, recorded in zip(*results, strict=True):
            assert torch.equal(without, recorded)


def projections(dtype: torch.dtype, n: int = 5) -> tuple[Tensor, ...]:
    """Queries of 4 heads, keys and values of 2, as projections are laid out: `[B, L, H, d]` transposed."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, size, heads, 8, generator=generator).to(dtype).transpose(1, 2)
        for size, heads in ((n, 4), (7, 2), (7, 2))
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_log_sum_exp_of_the_kernel(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = projections(dtype)
    mask = (torch.arange(7) < torch.tensor([[4], [7]]))[:, None, None, :] if masked else None
    attended, lse = attention.attention_with_lse(q, k, v, mask)
    assert torch.equal(attended, attention.attention(q, k, v, mask))
    assert lse is not None
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 8**0.5
    truth = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).logsumexp(-1)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(lse.double(), truth, 1e-12 if dtype == torch.float64 else 2e-6)


def test_without_the_kernel_there_is_no_log_sum_exp(no_cpu_flash: None) -> None:
    q, k, v = projections(torch.float32)
    attended, lse = attention.attention_with_lse(q, k, v)
    assert lse is None
    assert torch.equal(attended, attention.attention(q, k, v))


def test_a_kernel_that_does_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = attention._cpu_flash
    for fault in (
        lambda out, lse: (out, lse * 1.4427),  # in bits
        lambda out, lse: (out, lse.mT),
        lambda out, lse: (out + 1, lse),
    ):
        monkeypatch.setattr(attention, "_cpu_flash", lambda *args, fault=fault: fault(*usual(*args)))
        assert not attention._has_cpu_flash.__wrapped__()
    monkeypatch.setattr(attention, "_cpu_flash", usual)
    assert attention._has_cpu_flash.__wrapped__()


def test_torchs_choice_of_a_kernel_is_respected() -> None:
    q, k, v = projections(torch.float32)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        attended, lse = attention.attention_with_lse(q, k, v)
        assert lse is None
        assert torch.equal(attended, attention.attention(q, k, v))


def test_row_sums_without_the_kernel(folder: Path, no_cpu_flash: None) -> None:
    model = load_model(folder, dtype="float64")
    batch, lengths = ids(3, 9), torch.tensor(LENGTHS)
    recorder = Recorder(PLACES)
    model(batch, lengths=lengths, graph=recorder)
    assert [options["lse"] for _, _, options in recorder.got] == [None, None]
    attention._has_cpu_flash.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_cpu_flash", torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
        usual = AttentionGraph(PLACES)
        model(batch, lengths=lengths, graph=usual)
    assert_close(recorder.scores(), usual.scores(), 1e-12)


def test_keys_hidden_anywhere() -> None:
    """Left padding and holes: as if only the other keys were there."""
    q, k, _ = projections(torch.float64, n=7)
    key_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0, 1]]).bool()
    positions = torch.tensor([[6, 2, 1, -1], [0, 6, 2, 5]])
    graph = AttentionGraph(positions)
    graph.add(q, k, key_mask=key_mask, scale=0.3)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    weights = scores.masked_fill(~key_mask[:, None, None], -torch.inf).softmax(-1).mean(1)
    for row in range(2):
        hidden = ~key_mask[row][positions[row].clamp(min=0)]
        expected = picked(weights[row], positions[row].masked_fill(hidden, -1))
        assert_close(graph.scores()[row], expected, 1e-12)
    block = AttentionGraph(positions[:, :1])
    places = torch.tensor([[2, 6], [0, 3]])[:, None, :, None].expand(2, 4, 2, 8)
    block.add(q.gather(2, places), k, rows=torch.tensor([[1], [0]]), key_mask=key_mask, scale=0.3)
    assert_close(block.scores(), graph.scores()[:, :1, :1], 1e-12)


def test_a_log_sum_exp_is_taken_as_it_is() -> None:
    q, k, _ = projections(torch.float64, n=7)
    lse = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).logsumexp(-1)
    graph, halved = AttentionGraph(every_position(1, 7)), AttentionGraph(every_position(1, 7))
    graph.add(q, k)
    halved.add(q, k, lse=lse + math.log(2))
    assert_close(halved.scores() * 2, graph.scores(), 1e-12)


def test_attention_maps() -> None:
    """Maps that are handed in whole give what queries and keys give."""
    q, k, _ = projections(torch.float32, n=7)
    weights = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).softmax(-1)
    positions = torch.tensor([[6, 2, -1, 0], [0, 6, 2, 5]])
    graph, by_map = AttentionGraph(positions), AttentionGraph(positions)
    for _ in range(2):
        graph.add(q, k)
        by_map.add_maps([weights], 7, None)
    assert_close(by_map.scores(), graph.scores(), 1e-6)
    half = AttentionGraph(positions)
    half.add_maps([weights.bfloat16()], 7, None)
    assert half.scores().dtype == torch.float32
    assert_close(half.scores(), graph.scores(), 1e-2)
    first = AttentionGraph(positions[:1])
    first.add_maps((weights,), 7, None)
    assert_close(first.scores(), graph.scores()[:1], 1e-6)


def test_the_graph_takes_no_part_in_the_gradient(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint())
    graph = AttentionGraph(every_position(2, 7))
    with torch.enable_grad():
        loss = model(ids(2, 7), graph=graph).logits.logsumexp(-1).sum()
        loss.backward()
        recorded = [x.grad for x in model.parameters()]
        model.zero_grad()
        model(ids(2, 7)).logits.logsumexp(-1).sum().backward()
    assert not graph.scores().requires_grad
    for parameter, grad in zip(model.parameters(), recorded, strict=True):
        assert parameter.grad is not None
        assert grad is not None
        assert_close(grad, parameter.grad, 1e-5)


def test_no_map_is_made(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_check, "readable", lambda _: False)
    length, heads = 256, LLADA["n_heads"]
    model = load_model(checkpoint(max_sequence_length=length))
    graph = AttentionGraph(every_position(2, 8), 1.0)
    lengths = torch.tensor([length, 100])
    largest = []
    for options in ({}, {"graph": graph}):
        with Watch() as watch:
            model(ids(2, length), lengths=lengths, **options)
        largest.append(watch.largest)
    assert largest[0] == largest[1] < 4 * heads * length * length


def on_an_accelerator(mask: bool) -> None:
    """A pass of every kind on a device that is not the host."""
    device = torch.device("meta")
    with torch.device(device):
        model = LLaDAModelLM(LLaDAConfig(**LLADA))
    tokens, places = (torch.zeros(2, 9, dtype=torch.int64, device=device) for _ in range(2))
    lengths = tokens[:, 0] if mask else None
    cache = model.new_cache(2, 9)
    with Watch():
        for options in ({}, {"lengths": lengths, "cache": cache}):
            graph = AttentionGraph(places)
            model(tokens, graph=graph, **options)
            assert graph.scores().device == device
        graph = AttentionGraph(places[:, :3])
        model(tokens[:, :4], lengths=lengths, cache=cache, position_ids=places[:, :4], graph=graph)
        q = torch.zeros(2, 4, 9, 8, device=device)
        graph = AttentionGraph(places)
        graph.add(q, q[:, :2], key_mask=tokens.bool())
        graph.add(q[:, :, :4], q[:, :2], rows=places, key_mask=tokens.bool())
        model(tokens, attention_mask=tokens, graph=graph)
        bidirectional[id(model)] = model  # as it is after a first look
        graph.add_maps([torch.zeros(2, 4, 9, 9, device=device)], 9, model)
        graph.scores()


@pytest.mark.parametrize("mask", [False, True])
def test_nothing_is_read(mask: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_an_accelerator(mask)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_nothing_is_read(folder: Path, dtype: str) -> None:
    batch, lengths = ids(3, 9), torch.tensor(LENGTHS)
    host = AttentionGraph(PLACES)
    load_model(folder, dtype=dtype)(batch, lengths=lengths, graph=host)
    model = load_model(folder, dtype=dtype, device="cuda")
    batch, lengths, places = batch.cuda(), lengths.cuda(), PLACES.cuda()
    for strict in (False, True):  # the first pass compiles
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            graph = AttentionGraph(places)
            model(batch, lengths=lengths, graph=graph)
            scores = graph.scores()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_close(scores.cpu(), host.scores(), {"float32": 1e-5, "bfloat16": 0.02}[dtype])


@pytest.mark.usefixtures("empty_compiler")
def test_tracing(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint())
    batch, lengths, places = ids(2, 9), torch.tensor([4, 9]), every_position(2, 4)

    def run() -> tuple[Tensor, Tensor]:
        graph = AttentionGraph(places)
        return model(batch, lengths=lengths, graph=graph).logits, graph.scores()

    for got, expected in zip(torch.compile(run, fullgraph=True, backend="eager")(), run(), strict=True):
        assert_close(got, expected, 1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"positions": [[1]]}, TypeError, "positions must be an int64 tensor, got list"),
        ({"positions": torch.zeros(1, 2)}, TypeError, "positions must be an int64 tensor, got torch.float32"),
        ({"positions": torch.arange(3)}, ValueError, r"positions must have shape \[B, M\], got \[3\]"),
        ({"layers": 0.0}, ValueError, r"layers must be a share in \(0, 1\] or indices of layers, got 0.0"),
        ({"layers": 1.5}, ValueError, "layers must be a share"),
        ({"layers": float("nan")}, ValueError, "layers must be a share"),
        ({"layers": ()}, ValueError, "layers must be a share"),
        ({"layers": [-1]}, ValueError, "layers must be a share"),
        ({"layers": 3}, ValueError, "layers must be a share in .* got 3"),
        ({"layers": -0.3}, ValueError, "layers must be a share in .* got -0.3"),
        ({"layers": {1, -2}}, ValueError, "layers must be a share in .* got {1, -2}"),
        ({"layers": True}, TypeError, "layers must be a number or a list, tuple or set of ints, got True"),
        ({"layers": "12"}, TypeError, "layers must be a number or a list, tuple or set of ints, got '12'"),
        ({"layers": [0.3]}, TypeError, "layers must be a number or a list, tuple or set of ints"),
        ({"layers": [True]}, TypeError, "layers must be a number or a list, tuple or set of ints"),
        ({"layers": b"12"}, TypeError, "layers must be a number or a list, tuple or set of ints, got b'12'"),
        (
            {"layers": {1: 2}},
            TypeError,
            "layers must be a number or a list, tuple or set of ints, got {1: 2}",
        ),
        ({"layers": None}, TypeError, "layers must be a number or a list, tuple or set of ints, got None"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AttentionGraph(**{"positions": every_position(2, 2), **arguments})


@pytest.mark.parametrize(
    ("graph", "options", "error", "message"),
    [
        (every_position(2, 3), {}, TypeError, "graph must be an AttentionGraph, got Tensor"),
        (
            AttentionGraph(every_position(3, 3)),
            {},
            ValueError,
            "graph has 3 rows of positions, input_ids has 2",
        ),
        (AttentionGraph(every_position(2, 6)), {}, ValueError, r"graph.positions must lie in \[-1, 5\)"),
        (
            AttentionGraph(every_position(2, 3), {2}),
            {},
            ValueError,
            r"layers must lie in \[0, 2\), got \[2\]",
        ),
    ],
)
def test_bad_graphs(
    checkpoint: Checkpoint, graph: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_model(checkpoint())(ids(2, 5), graph=graph, **options)


def test_bad_layers() -> None:
    q = torch.zeros(2, 4, 5, 8)
    graph = AttentionGraph(every_position(3, 2))
    with pytest.raises(ValueError, match="the graph has 3 rows of positions, the pass has 2 rows"):
        graph.add(q, q)
    graph = AttentionGraph(every_position(2, 2))
    with pytest.raises(ValueError, match="rows: expected where q has 5 rows and k 4 positions"):
        graph.add(q, q[:, :, :4])
    with pytest.raises(ValueError, match="give either lengths or key_mask, not both"):
        graph.add(q, q, lengths=torch.tensor([5, 5]), key_mask=torch.ones(2, 5).bool())
    with pytest.raises(ValueError, match=r"key_mask: expected shape \[2, 5\]"):
        graph.add(q, q, key_mask=torch.ones(2, 4).bool())
    with pytest.raises(TypeError, match="key_mask: expected dtype bool, got int64"):
        graph.add(q, q, key_mask=torch.ones(2, 5).long())
    with pytest.raises(ValueError, match="k: expected a number of heads that divides the 4 of q, got 3"):
        graph.add(q, q[:, :3])
    with pytest.raises(ValueError, match=r"lse: expected shape \[2, 4, 5\]"):
        graph.add(q, q, lse=torch.zeros(2, 4, 9))
    with pytest.raises(ValueError, match="positions: expected device cpu like q, got meta"):
        AttentionGraph(torch.zeros(2, 2, dtype=torch.int64, device="meta")).add(q, q)


@pytest.mark.parametrize(
    ("maps", "error", "message"),
    [
        ((), TypeError, "attentions must be a tuple or list of maps, got tuple"),
        (torch.zeros(2, 1, 2, 5, 5), TypeError, "attentions must be a tuple or list of maps, got Tensor"),
        ([torch.rand(1, 2, 5, 5), None], TypeError, r"attentions\[1\] must be a map .* got NoneType"),
        ([torch.ones(1, 2, 5, 5).bool()], TypeError, r"attentions\[0\] must be .* got torch.bool"),
        ([torch.rand(1, 2, 3, 3)], ValueError, r"\[R, H, 5, 5\] with R >= 1 and H >= 1, got \[1, 2, 3, 3\]"),
        ([torch.rand(1, 5, 5)], ValueError, r"must have shape .* got \[1, 5, 5\]"),
        ([torch.rand(1, 0, 5, 5)], ValueError, r"must have shape .* got \[1, 0, 5, 5\]"),
        ([torch.rand(0, 1, 5, 5)], ValueError, r"must have shape .* got \[0, 1, 5, 5\]"),
        ([torch.rand(1, 1, 5, 5, device="meta")], ValueError, "must be on cpu, got meta"),
    ],
)
def test_maps_that_do_not_fit(maps: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AttentionGraph(every_position(1, 5)).add_maps(maps, 5, None)


@pytest.mark.parametrize(
    ("layers", "choice"),
    [
        (0.3, 0.3),
        (1, 1.0),
        (np.float32(0.5), 0.5),
        ([3, 1, 3], {1, 3}),
        (range(2, 4), {2, 3}),
        (frozenset({0}), {0}),
        ([np.int64(2)], {2}),
    ],
)
def test_choices_of_layers(layers: Any, choice: float | set[int]) -> None:
    got = AttentionGraph(every_position(1, 1), layers).layers
    assert got == choice
    assert isinstance(got, float if isinstance(choice, float) else frozenset)


def test_parts_of_a_batch() -> None:
    """Passes over some of the rows each, one of them over a row beyond those of the graph."""
    positions = torch.tensor([[6, 2, -1, 0], [0, 6, 2, 5], [1, -1, 4, 3]])
    q, k = (torch.cat((x, x.flip(2))) for x in projections(torch.float32, n=7)[:2])
    whole, graph = AttentionGraph(positions, {0, 2}), AttentionGraph(positions, {0, 2})
    for scale in (0.2, 0.5):
        whole.add(q, k, scale=scale)
    for rows in ([3, 1], [0, 2]):
        part = graph.select(rows)
        assert part.layers == {0, 2}
        with pytest.raises(ValueError, match="got no layer"):
            graph.put(rows, part)
        for scale in (0.2, 0.5):
            part.add(q[rows[-len(part.positions) :]], k[rows[-len(part.positions) :]], scale=scale)
        graph.put(rows, part)
    assert_close(graph.scores(), whole.scores(), 1e-6)


def test_no_layer_was_added() -> None:
    with pytest.raises(ValueError, match=r"the attention graph got no layer: .* layers = 0.3"):
        AttentionGraph(every_position(1, 1)).scores()
