"""attention_graph and dapd_select under Triton's interpreter: tiles, splits, strides, special values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlmkern import reference

from .interpreter import INTERPRETED, interpreted, randn, speed_up

if INTERPRETED:
    from dlmkern.triton_kernels import attention, attention_graph, dapd_select, launch

    speed_up()

INF, NAN = float("inf"), float("nan")
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_own_process(run_again: Callable[[str, bool], None]) -> None:
    run_again(__file__, True)


# ---- attention_graph


@pytest.fixture(params=[1, 4096], ids=["together", "split"])
def splitting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One program walks all keys and heads, or as many as there are heads and parts of 16 keys."""
    monkeypatch.setattr(attention, "_PROGRAMS", request.param)
    monkeypatch.setattr(attention_graph, "_LEAST_KEYS", 16)
    return int(request.param)


def graph_truth(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    rows: Tensor | None,
    lengths: list[int],
    scale: float,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """out in float64, one sequence and head at a time, and lse."""
    Hq, Hkv = q.shape[1], k.shape[1]
    out, lse = out.double(), torch.full(q.shape[:3], NAN, dtype=torch.float64)
    rows = positions if rows is None else rows
    for b, length in enumerate(lengths):
        real = (positions[b] >= 0) & (positions[b] < length) & (rows[b] >= 0) & (rows[b] < q.shape[2])
        row, place = rows[b][real], positions[b][real]
        for h in range(Hq if length else 0):
            scores = q[b, h].double() @ k[b, h * Hkv // Hq, :length].double().T * scale
            lse[b, h] = scores.logsumexp(-1)
            map_ = (scores - lse[b, h, :, None]).exp()[row][:, place] / Hq
            out[b][real.nonzero(), real.nonzero()[:, 0]] += map_
    return out, lse


def check_graph(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    rows: Tensor | None = None,
    lengths: list[int] | None = None,
    scale: float = 0.5,
) -> None:
    """With and without lse: the entries to float32's accuracy, those of padding to the bit."""
    B, M = positions.shape
    ends = None if lengths is None else torch.tensor(lengths)
    ends_known = [k.shape[2]] * B if lengths is None else [min(max(x, 0), k.shape[2]) for x in lengths]
    start = randn(B, M, M, seed=9).mT
    want, lse = graph_truth(q, k, positions, rows, ends_known, scale, start)
    strided = torch.empty(q.shape[2], *q.shape[:2]).permute(1, 2, 0).copy_(lse)
    for given in (None, strided):
        out = torch.empty(M, 2, M, B).permute(3, 2, 1, 0)[:, :, 0].copy_(start)
        attention_graph.attention_graph(q, k, positions, rows, ends, given, scale, out)
        torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=1e-6)
        kept = want == start.double()
        assert torch.equal(out[kept], start[kept])


# Hq, Hkv, n, L, d, M: tiles that are not full and of one number; then several, which 16 bits have larger
SMALL = [(3, 3, 9, 40, 70, 5), (1, 1, 1, 33, 1, 1)]
GRAPHS = [
    *((shape, dtype) for shape in SMALL for dtype in FLOATS),
    ((4, 2, 70, 70, 20, 37), torch.float32),
    ((2, 1, 66, 66, 8, 66), torch.float16),
]


@interpreted
@pytest.mark.parametrize(("shape", "dtype"), GRAPHS, ids=str)
def test_graph(splitting: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    Hq, Hkv, n, L, d, M = shape
    generator = torch.Generator().manual_seed(M)
    q = randn(2, d, n, Hq, scale=1.0, dtype=dtype).permute(0, 3, 2, 1)
    k = randn(2, L, Hkv, d, seed=1, dtype=dtype).transpose(1, 2)
    positions = torch.stack([torch.randperm(L, generator=generator)[:M] for _ in range(2)])
    rows = torch.randint(n, (2, M), generator=generator)
    check_graph(q, k, positions, rows, scale=d**-0.5)
    if M > 1:
        positions[1, M // 2], rows[1, 0] = -1, -1
    ends = [L, L // 2]
    k[1, :, ends[1] :] = NAN  # what lies beyond the length may be anything
    check_graph(q, k, positions, rows, ends, 0.7 * d**-0.5)
    if n == L:
        q[1, :, ends[1] :] = INF
        check_graph(q, k, positions, None, ends, d**-0.5)


@interpreted
def test_unchecked_numbers_are_padding(splitting: int) -> None:
    """As they may come from another device."""
    q, k = randn(4, 2, 6, 4), randn(4, 1, 20, 4, seed=1)
    positions = torch.tensor([[0, 19, 20, -7, 2**40, -(2**32) + 3]]).repeat(4, 1)
    rows = torch.tensor([[5, 0, 1, 2, 3, 4], [6, 5, 0, 0, 0, 0], [-1, 2**40, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]])
    check_graph(q, k, positions, rows, [2**40, 20, 20, -5])
    check_graph(q[:2], k[:2], torch.full((2, 6), -1), rows[:2])


@interpreted
def test_graph_with_special_scores(splitting: int) -> None:
    q, k = randn(1, 2, 40, 4).abs() + 1.0, randn(1, 2, 40, 4, seed=1)
    positions = torch.arange(40)[None]
    for value in (-INF, INF, NAN):  # a key that is ruled out, one that takes all, one that spoils all
        k[0, 1, 3] = value
        out, want = torch.zeros(1, 40, 40), torch.zeros(1, 40, 40)
        attention_graph.attention_graph(q, k, positions, None, None, None, 0.5, out)
        reference.attention_graph(q, k, positions, None, None, None, 0.5, want)
        torch.testing.assert_close(out, want, rtol=2e-6, atol=1e-6, equal_nan=True)
    k[0, 1, 3] = 0.0
    q[0, 0, 5] = NAN  # one query without an answer, the others have theirs
    q[0, 0, 7] *= 1e4  # one key takes it all
    out = torch.zeros(1, 40, 40)
    attention_graph.attention_graph(q, k, positions, None, None, None, 0.5, out)
    assert out[0].isnan().all(1).nonzero().flatten().tolist() == [5]
    others = positions != 5
    assert out[0, others[0]].sum(1).sub(1).abs().max() < 1e-5


@interpreted
def test_keys_and_heads_are_split_where_programs_are_few(splitting: int) -> None:
    for B, Hq, Hkv, M, L, size in (
        (1, 32, 32, 256, 1000, 2),
        (1, 28, 4, 9, 1000, 2),
        (64, 32, 32, 224, 1000, 4),
        (1, 1, 1, 1, 15, 2),
    ):
        cut = attention_graph.config(B, Hq, Hkv, M, L, 128, size)
        tiles = B * math.ceil(M / cut.tile) ** 2
        row_tiles = B * Hkv * math.ceil(Hq // Hkv * M / cut.rows)
        assert cut.head_splits == (1 if splitting == 1 else min(-(-4096 // tiles), Hq, 32))
        assert cut.key_splits == (1 if splitting == 1 or L < 16 else min(-(-4096 // row_tiles), 32))


@interpreted
def test_graph_refuses_what_it_cannot() -> None:
    for size, dtype, error, message in (
        (4, torch.float64, TypeError, "q: .*float64"),
        (257, torch.float32, ValueError, "q: .*at most 256.*257"),
    ):
        q, positions = torch.zeros(1, 1, 1, size, dtype=dtype), torch.zeros(1, 1, dtype=torch.int64)
        with pytest.raises(error, match=message):
            attention_graph.attention_graph(q, q, positions, None, None, None, 1.0, torch.zeros(1, 1, 1))


# ---- dapd_select


def dapd_case(M: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """scores, confidence, valid, tau, certain, late: with ties, with what is not finite, and plain."""
    generator = torch.Generator().manual_seed(M)
    scores = torch.rand(3, M, M, dtype=torch.float64, generator=generator).pow(4)
    confidence = torch.rand(3, M, dtype=torch.float64, generator=generator)
    scores[0], confidence[0] = (scores[0] * 4).round() / 4, (confidence[0] * 4).round() / 4
    if M > 8:
        scores[1, 2, 3], scores[1, 3, 2], scores[1, 4], scores[1, :, 5] = NAN, INF, -INF, 1e300
        confidence[1, 6:8] = torch.tensor([NAN, INF])
    valid = torch.rand(3, M, generator=generator) < 0.9
    tau, certain, late = torch.tensor(
        [[0.1, 0.2, 0.5], [0.9, INF, 0.8], [INF, 0.95, 0.9]], dtype=torch.float64
    )
    return scores.to(dtype), confidence.to(dtype), valid, tau, certain, late


@interpreted
@pytest.mark.parametrize(("M", "symmetric"), [(1, False), (32, True), (33, False), (70, True)])
def test_selection(M: int, symmetric: bool) -> None:
    scores, confidence, valid, *rest = dapd_case(M, torch.float64 if M == 33 else torch.float32)
    for given, some in ((scores, valid), (scores.flip(0).mT, None)):
        want = reference.dapd_select(given, confidence, some, *rest, symmetric)
        got = dapd_select.dapd_select(given, confidence, some, *rest, symmetric)
        assert torch.equal(got, want)
        if M > 1:
            assert got.any(1).all()
            assert not got.all(1).any()


@interpreted
def test_degrees_are_summed_in_order() -> None:
    """To the bit, and here another order gives other bits."""
    scores, confidence, _, *rest = dapd_case(45, torch.float32)
    scores, confidence, rest = scores[2:], confidence[2:], [x[2:] for x in rest]
    launches, _ = dapd_select.plan(scores, confidence, None, *rest, False)
    launch.run(launches, scores.device)
    s = ((scores.double() + scores.double().mT) / 2).masked_fill(torch.eye(45, dtype=torch.bool), 0.0)
    forward = backward = torch.zeros(1, 45, dtype=torch.float64)
    for j in range(45):
        forward, backward = forward + s[:, :, j], backward + s[:, :, 44 - j]
    assert torch.equal(launches[0].arguments["priority_ptr"], forward * confidence)
    assert not torch.equal(forward * confidence, backward * confidence)


@interpreted
def test_nothing_to_select() -> None:
    one = torch.ones(2, dtype=torch.float64)
    empty = dapd_select.dapd_select(torch.zeros(2, 0, 0), torch.zeros(2, 0), None, one, one, one, False)
    assert empty.shape == (2, 0)
    scores, never = torch.rand(2, 3, 3), torch.zeros(2, 3, dtype=torch.bool)
    assert not dapd_select.dapd_select(scores, torch.rand(2, 3), never, one, 0 * one, 0 * one, True).any()
    nan = torch.full((2, 3), NAN)
    assert not dapd_select.dapd_select(scores, nan, None, one, 0 * one, 0 * one, True).any()


# ---- both


@interpreted
def test_offsets_are_64_bits(far_memory: Tensor) -> None:
    """Strides fit into 32 bits, offsets do not."""
    far = 2**30
    sizes = {0: 1, 1: 4, far: 3}
    positions, rest = torch.tensor([[0, 2], [1, 0], [2, 1]]), torch.tensor([[0.3, INF, 0.9]] * 3).double()
    for strides in ((0, 16, far, 1), (0, far, 8, 1), (far, 32, 8, 1), (0, 32, 8, far)):
        size = [sizes.get(stride, 3 if axis == 2 else 2) for axis, stride in enumerate(strides)]
        x = far_memory.as_strided(size, strides).copy_(randn(*size, dtype=torch.float16))
        near, places = x.clone(), positions[: size[0]]
        out, want = torch.zeros(2, size[0], 2, 2)
        attention_graph.attention_graph(near, near[:, :1], places, None, None, None, 0.5, want)
        attention_graph.attention_graph(x, x[:, :1], places, None, None, None, 0.5, out)
        assert torch.equal(out, want)
        assert out.all()
    wide = far_memory.view(torch.float32)
    for strides in ((far // 2, 3, 1), (0, far // 2, 1), (0, 1, far // 2)):
        size = [1 if stride == 0 else 2 + (stride < far // 2) for stride in strides]
        size = [size[0], min(size[1:]), min(size[1:])]
        x = wide.as_strided(size, strides)
        x.copy_(torch.rand(size))
        out = wide.as_strided(size, strides)
        want = x.clone()
        places = positions[: size[0], :1].repeat(1, size[1])
        q = randn(size[0], 1, 3, 4)
        attention_graph.attention_graph(q, q, places, None, None, None, 0.5, want)
        attention_graph.attention_graph(q, q, places, None, None, None, 0.5, out)
        assert torch.equal(out, want)
        confidence = torch.rand(size[:2])
        got = dapd_select.dapd_select(x, confidence, None, *rest[:, : size[0]], False)
        assert torch.equal(got, reference.dapd_select(want, confidence, None, *rest[:, : size[0]], False))
