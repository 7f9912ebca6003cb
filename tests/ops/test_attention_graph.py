"""attention_graph against the whole attention map in float64."""

import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from tests.ops.support import DTYPES, assert_close, assert_same, opcheck, ulp

OP = "attention_graph"
NAN, INF = math.nan, math.inf
SHAPES = (  # B, Hq, Hkv, n, L, d, M; rows of q where n differs from L
    (1, 1, 1, 1, 1, 1, 1),
    (2, 4, 2, 9, 9, 16, 5),
    (1, 6, 1, 7, 40, 32, 33),
    (2, 3, 3, 70, 70, 20, 8),
    (3, 2, 2, 5, 17, 8, 5),
)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def random_case(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0, spread: float = 2.0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, positions, some of them -1 and some repeated, and the rows of `q`."""
    batch, heads, kv_heads, n, length, size, many = shape
    generator = torch.Generator().manual_seed(seed)
    q = spread * torch.randn((batch, heads, n, size), generator=generator)
    k = torch.randn((batch, kv_heads, length, size), generator=generator)
    positions = torch.randint(length, (batch, many), generator=generator)
    if many > 1:
        positions[torch.rand((batch, many), generator=generator) < 0.2] = -1
    rows = None
    if n != length:
        rows = torch.randint(n, (batch, many), generator=generator).to(device)
    return q.to(device, dtype), k.to(device, dtype), positions.to(device), rows


def truth(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    rows: Tensor | None = None,
    lengths: list[int] | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The entries, in float64, and which of them are no padding: the map of each head from the softmax in
    `dtype`, its mean, and what is asked for of it."""
    (batch, heads, n, size), (kv_heads, length) = q.shape, k.shape[1:3]
    q, k, positions = q.cpu().to(dtype), k.cpu().to(dtype), positions.cpu()
    rows = positions if rows is None else rows.cpu()
    entries = torch.zeros(batch, positions.shape[1], positions.shape[1], dtype=torch.float64)
    pair = torch.zeros_like(entries, dtype=torch.bool)
    for b in range(batch):
        end = length if lengths is None else min(max(lengths[b], 0), length)
        maps = [
            (
                q[b, h] @ k[b, h * kv_heads // heads, :end].T * (size**-0.5 if scale is None else scale)
            ).softmax(-1)
            for h in range(heads)
        ]
        real = (positions[b] >= 0) & (positions[b] < end) & (rows[b] >= 0) & (rows[b] < n)
        pair[b] = real[:, None] & real
        if maps and real.any():
            mean = torch.stack(maps).mean(0).double()
            row, place = (x[b].masked_fill(~real, 0) for x in (rows, positions))
            entries[b] = mean[row][:, place].masked_fill(~pair[b], 0.0)
    return entries, pair


def relative(q: Tensor, k: Tensor, scale: float | None = None) -> float:
    """How exact an entry has to be: the scores are rounded by their own size."""
    if not q.numel() or not k.numel():
        return 0.0
    size = q.shape[-1]
    largest = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    return ulp(wide(q.dtype)) * (16 + 4 * float(largest) * abs(size**-0.5 if scale is None else scale))


def garbage(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN, infinities, both zeros and numbers, in turn."""
    values = torch.tensor([NAN, -0.0, INF, 0.0, -INF, 3.25, -NAN], dtype=dtype)
    return values[torch.arange(shape.numel()) % len(values)].view(shape).to(device)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_truth(
    backend: str, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    q, k, positions, rows = random_case(shape, dtype, device)
    length = shape[4]
    for lengths in (None, [length] * shape[0], [(length + 1) // 2, length, 0][: shape[0]]):
        where = None if lengths is None else torch.tensor(lengths, device=device)
        expected, pair = truth(q, k, positions, rows, lengths)
        torchs = truth(q, k, positions, rows, lengths, dtype=dtype)[0]
        with dlmkern.use_backend("reference"):
            lse = dlmkern.block_attention(q, k, k, where).lse
        for known in (None, lse):
            found = dlmkern.attention_graph(q, k, positions, rows=rows, lengths=where, lse=known)
            assert found.dtype == wide(dtype)
            assert (found.cpu()[~pair] == 0).all()
            assert_close(found.double(), expected.numpy(), 1e-30, relative(q, k))
            # the error rule: at most twice that of torch in the same dtype
            error, allowed = ((x - expected).abs().amax() for x in (found.double().cpu(), torchs))
            assert error <= 2 * allowed + 4 * ulp(wide(dtype))


def test_by_hand(backend: str, device: torch.device) -> None:
    # scores 0 and log 3 of query 0, 0 and -log 3 of query 1
    q = torch.tensor([1.0, -1.0], device=device)[None, None, :, None]
    k = torch.tensor([0.0, math.log(3)], device=device)[None, None, :, None]
    positions = torch.tensor([[1, 0, 0]], device=device)
    found = dlmkern.attention_graph(q, k, positions, scale=1.0)
    expected = torch.tensor([[0.25, 0.75, 0.75], [0.75, 0.25, 0.25], [0.75, 0.25, 0.25]])
    assert_close(found[0], expected.numpy(), 1e-6)
    assert dlmkern.attention_graph(q, k, positions, scale=0.0)[0].unique().tolist() == [0.5]
    # without key 1 there is nothing but key 0
    found = dlmkern.attention_graph(q, k, positions, lengths=torch.tensor([1], device=device))
    assert found[0].tolist() == [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    # the queries the other way round in q
    rows = torch.tensor([[0, 1, 1]], device=device)
    found = dlmkern.attention_graph(q.flip(2), k, positions, rows=rows, scale=1.0)
    assert_close(found[0], expected.numpy(), 1e-6)
    # the default scale is 1 / sqrt(d): scores 0 and log 9
    q, k = (torch.cat([x] * 4, dim=3) for x in (q, k))
    found = dlmkern.attention_graph(q, k, positions[:, :2])
    assert_close(found[0], torch.tensor([[0.1, 0.9], [0.9, 0.1]]).numpy(), 1e-6)


def test_query_heads_share_keys_in_order(backend: str, device: torch.device) -> None:
    for kv_heads in (1, 2, 4):
        q, k, positions, _ = random_case((1, 4, kv_heads, 9, 9, 8, 6), torch.float32, device)
        found = dlmkern.attention_graph(q, k, positions)
        repeated = dlmkern.attention_graph(q, k.repeat_interleave(4 // kv_heads, 1), positions)
        assert_close(found, repeated.cpu().numpy(), 1e-6)
        heads = [
            dlmkern.attention_graph(q[:, h : h + 1], k[:, h * kv_heads // 4, None], positions)
            for h in range(4)
        ]
        assert_close(found, torch.stack(heads).mean(0).cpu().numpy(), 1e-6)
        assert not torch.allclose(heads[0], heads[3], atol=1e-3)


def test_some_positions_are_a_part_of_the_map(backend: str, device: torch.device) -> None:
    q, k, _, _ = random_case((2, 4, 2, 21, 21, 8, 1), torch.float32, device)
    everything = torch.arange(21, device=device).expand(2, -1)
    whole = dlmkern.attention_graph(q, k, everything)
    assert_close(whole.sum(-1), torch.ones(2, 21).numpy(), 1e-5)
    places = [3, 20, 0, 3, 7]  # one of them twice
    part = dlmkern.attention_graph(q, k, torch.tensor([places] * 2, device=device))
    assert_close(part, whole[:, places][:, :, places].cpu().numpy(), 1e-6)
    assert_close(part[:, 0], part[:, 3].cpu().numpy(), 1e-6)
    # rows: the same queries, packed
    rows = torch.tensor([[0, 1, 2, 0, 3]] * 2, device=device)
    packed = q[:, :, [3, 20, 0, 7]]
    found = dlmkern.attention_graph(packed, k, torch.tensor([places] * 2, device=device), rows=rows)
    assert_close(found, part.cpu().numpy(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_padding_keeps_its_bits(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    q, k, _, _ = random_case((4, 2, 1, 12, 12, 8, 1), dtype, device)
    positions = torch.tensor(
        [[3, -1, 11, 0, -1, 5], [10, 2, 4, 7, 6, 9], [5, 5, 1, -1, 8, 11], [-1] * 6], device=device
    )
    lengths = torch.tensor([12, 7, 0, 12], device=device)
    expected, pair = truth(q, k, positions, lengths=lengths.tolist())
    start = garbage(torch.Size((4, 6, 6)), wide(dtype), device)
    start[pair.to(device)] = 0.5
    out = start.clone()
    assert dlmkern.attention_graph(q, k, positions, out=out, lengths=lengths) is out
    assert torch.equal(bits(out.cpu()[~pair]), bits(start.cpu()[~pair]))
    assert_close(
        out.cpu()[pair].double(), expected[pair].numpy() + 0.5, 1e-6 if dtype != DTYPES[0] else 1e-14
    )


def test_counts_end_the_positions(backend: str, device: torch.device) -> None:
    q, k, positions, rows = random_case((3, 2, 1, 4, 12, 8, 5), torch.float32, device)
    assert rows is not None
    positions.clamp_(min=0)
    counts = [5, 2, 0]
    known = torch.arange(5, device=device) < torch.tensor(counts, device=device)[:, None]
    expected = dlmkern.attention_graph(q, k, positions.masked_fill(~known, -1), rows=rows)
    for junk in (-9, 10**9):
        for dtype in (torch.int64, torch.int32):
            found = dlmkern.attention_graph(
                q,
                k,
                positions.masked_fill(~known, junk).to(dtype),
                torch.tensor(counts, dtype=dtype, device=device),
                rows=rows.masked_fill(~known, junk).to(dtype),
            )
            assert_same(found, expected)
    assert (expected[2] == 0).all()
    assert (expected[1, :2, :2] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_beyond_the_length_counts(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    q, k, positions, rows = random_case((3, 2, 1, 6, 40, 16, 9), dtype, device)
    lengths = torch.tensor([0, 17, 33], device=device)
    clean = dlmkern.attention_graph(q, k, positions, rows=rows, lengths=lengths)
    short = dlmkern.attention_graph(
        q[1:2], k[1:2, :, :17], positions[1:2].masked_fill(positions[1:2] >= 17, -1), rows=rows[1:2]
    )
    assert_close(clean[1:2], short.cpu().numpy(), 1e-6)
    assert (clean[0] == 0).all()
    assert (clean[1:] > 0).any()
    with dlmkern.use_backend("reference"):
        lse = dlmkern.block_attention(q, k, k, lengths).lse
    with_lse = dlmkern.attention_graph(q, k, positions, rows=rows, lengths=lengths, lse=lse)
    for junk in (NAN, INF, -INF, 1e30):
        for b, length in enumerate(lengths.tolist()):
            k[b, :, length:] = junk
        assert_same(dlmkern.attention_graph(q, k, positions, rows=rows, lengths=lengths), clean)
        found = dlmkern.attention_graph(q, k, positions, rows=rows, lengths=lengths, lse=lse)
        assert_same(found, with_lse)


def test_lse_is_taken_as_given(backend: str, device: torch.device) -> None:
    q, k, positions, rows = random_case((2, 4, 2, 5, 17, 8, 6), torch.float32, device)
    assert rows is not None
    expected = dlmkern.attention_graph(q, k, positions, rows=rows)
    with dlmkern.use_backend("reference"):
        lse = dlmkern.block_attention(q, k, k).lse
    used = torch.zeros(2, 5, dtype=torch.bool, device=device)
    for b in range(2):
        used[b, rows[b][positions[b] >= 0]] = True
    assert not used.all()
    for junk in (NAN, -INF, INF):  # of the queries that nobody asks for
        known = lse.masked_fill(~used[:, None], junk)
        found = dlmkern.attention_graph(q, k, positions, rows=rows, lse=known)
        assert_close(found, expected.cpu().numpy(), 1e-6, 1e-5)
    found = dlmkern.attention_graph(q, k, positions, rows=rows, lse=lse + math.log(2))
    assert_close(2 * found, expected.cpu().numpy(), 1e-6, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_layers_add_up(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    positions = random_case(SHAPES[1], dtype, device)[2]
    out = None
    expected = torch.zeros(2, 5, 5, dtype=torch.float64)
    for layer in range(3):
        q, k, _, _ = random_case(SHAPES[1], dtype, device, seed=layer)
        added = dlmkern.attention_graph(q, k, positions, out=out)
        assert out is None or added is out
        out = added
        expected += truth(q, k, positions)[0]
        assert_close(out.double(), expected.numpy(), 1e-6 if dtype != torch.float64 else 1e-14)


def test_scores_far_from_zero(backend: str, device: torch.device) -> None:
    q, k, positions, _ = random_case((1, 2, 2, 20, 20, 16, 9), torch.float32, device)
    for spread in (1e-20, 40.0, 1e4):
        with dlmkern.use_backend("reference"):
            lse = dlmkern.block_attention(spread * q, k, k).lse
        for known in (None, lse):
            found = dlmkern.attention_graph(spread * q, k, positions, lse=known)
            assert_close(found, truth(spread * q, k, positions)[0].numpy(), 1e-4 + 1e-6 * spread)
    for scale in (0.0, -0.3, 2.0, 1e3):
        found = dlmkern.attention_graph(q, k, positions, scale=scale)
        assert_close(found, truth(q, k, positions, scale=scale)[0].numpy(), 1e-5 + 1e-5 * abs(scale))
    # every key alike: the weights are equal however large the scores are
    for level in (1e3, -1e4):
        q, k = torch.full((1, 1, 20, 16), level, device=device), torch.ones((1, 1, 20, 16), device=device)
        found = dlmkern.attention_graph(q, k, positions, scale=1 / 16)
        assert_close(found[0], truth(q, k, positions, scale=1 / 16)[0][0].numpy(), 1e-30, 2e-3)


def test_a_nan_stays_in_its_query(backend: str, device: torch.device) -> None:
    q, k, _, _ = random_case((2, 4, 2, 20, 20, 16, 1), torch.float32, device)
    positions = torch.tensor([[4, 2, 19], [0, 2, 11]], device=device)
    clean = dlmkern.attention_graph(q, k, positions)
    q[0, 1, 2, 3] = NAN
    q[0, 1, 3, 3] = NAN  # nobody asks for it
    found = dlmkern.attention_graph(q, k, positions)
    touched = torch.zeros(2, 3, 3, dtype=torch.bool, device=device)
    touched[0, 1] = True
    assert found[touched].isnan().all()
    assert_same(found[~touched], clean[~touched])
    # a key with a NaN reaches all that attend to it, and no other sequence
    k[0, 0, 7, 0] = NAN
    found = dlmkern.attention_graph(q, k, positions)
    assert found[0].isnan().all()
    assert_same(found[1], clean[1])


def test_whatever_lies_outside_is_padding(backend: str, device: torch.device) -> None:
    """On an accelerator nobody looks at the numbers."""
    q, k, _, _ = random_case((3, 2, 1, 4, 9, 16, 1), torch.float32, device)
    for positions, rows in (
        ([0, 8, 9, -2, 2**40, -(2**63), 5], [0, 1, 2, 3, 0, 1, 2]),
        ([0, 8, 3, 5, 2, 4, 5], [0, 4, 2, -1, 2**40, -(2**63), 3]),
    ):
        place, row = (torch.tensor([x] * 3, device=device) for x in (positions, rows))
        for lengths in (None, torch.tensor([-5, 9, 2**40], device=device)):
            ends = None if lengths is None else lengths.tolist()
            expected, pair = truth(q, k, place, row, ends)
            start = garbage(expected.shape, torch.float32, device)
            start[pair.to(device)] = 0.0
            out = start.clone()
            torch.ops.dlmkern.attention_graph(q, k, place, row, lengths, None, 0.25, out)
            assert_close(out.cpu()[pair], expected[pair].numpy(), 1e-6)
            assert torch.equal(bits(out.cpu()[~pair]), bits(start.cpu()[~pair]))
            assert pair.any()


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """A name, a view with the values of x, and the whole buffer, which is NaN elsewhere."""
    (first, second, *_), last = x.shape, x.shape[-1]
    for name, shape, view in (
        ("a slice", (first + 1, *x.shape[1:-1], last + 5), lambda y: y[1:, ..., 3 : 3 + last]),
        ("the first two swapped", (second, first, *x.shape[2:]), lambda y: y.transpose(0, 1)),
        ("the last two swapped", (*x.shape[:-2], last, x.shape[-2]), lambda y: y.mT),
        ("every other number", (*x.shape[:-1], 2 * last + 1), lambda y: y[..., 1::2]),
        ("off alignment", (x.numel() + 1,), lambda y: y[1:].view(x.shape)),
    ):
        buffer = torch.full(shape, NAN, dtype=x.dtype, device=x.device)
        view(buffer).copy_(x)
        yield name, view(buffer), buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_do_not_matter(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    q, k, positions, rows = random_case((2, 4, 2, 7, 17, 16, 6), dtype, device)
    assert rows is not None
    with dlmkern.use_backend("reference"):
        lse = dlmkern.block_attention(q, k, k).lse
    start = torch.rand((2, 6, 6), generator=torch.Generator().manual_seed(0)).to(device)
    for known in (None, lse):
        expected = dlmkern.attention_graph(q, k, positions, out=start.clone(), rows=rows, lse=known)
        parts = zip(*(layouts(x) for x in (q, k, start, lse)), strict=True)
        for (name, queries, _), (_, keys, _), (_, out, buffer), (_, sums, _) in parts:
            outside = int(buffer.isnan().sum())
            found = dlmkern.attention_graph(
                queries,
                keys,
                positions.T.contiguous().T,
                out=out,
                rows=rows.repeat_interleave(2, 1)[:, ::2],
                lse=None if known is None else sums,
            )
            assert found is out
            assert_close(out, expected.cpu().numpy(), 1e-6)
            assert int(buffer.isnan().sum()) == outside, name
    shared = dlmkern.attention_graph(
        q[:1].expand_as(q),
        k[:1].expand_as(k),
        positions[:1].expand_as(positions),
        rows=rows[:1].expand(2, -1),
    )
    alone = dlmkern.attention_graph(q[:1], k[:1], positions[:1], rows=rows[:1])
    assert_close(shared, alone.expand_as(shared).cpu().numpy(), 1e-6)


@pytest.mark.parametrize(
    "shape",
    [
        (0, 2, 1, 5, 5, 4, 3),
        (2, 0, 1, 5, 5, 4, 3),
        (2, 0, 0, 5, 5, 4, 3),
        (2, 2, 1, 5, 5, 4, 0),
        (2, 2, 1, 0, 5, 4, 3),
        (2, 2, 1, 3, 0, 4, 3),
        (2, 2, 1, 0, 0, 4, 3),
    ],
    ids=str,
)
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    batch, heads, kv_heads, n, length, size, many = shape
    q, k = torch.ones((batch, heads, n, size)), torch.ones((batch, kv_heads, length, size))
    nowhere = not n or not length
    positions = torch.full((batch, many), -1 if nowhere else 2)
    rows = None if n == length else positions
    arguments = [None if x is None else x.to(device) for x in (q, k, positions, rows)]
    for lengths in (None, torch.full((batch,), length, device=device)):
        found = dlmkern.attention_graph(*arguments[:3], rows=arguments[3], lengths=lengths)  # type: ignore[arg-type]
        assert found.shape == (batch, many, many)
        assert (found == 0).all()
        out = garbage(found.shape, torch.float32, device)
        kept = out.clone()
        dlmkern.attention_graph(*arguments[:3], out=out, rows=arguments[3], lengths=lengths)  # type: ignore[arg-type]
        assert torch.equal(bits(out), bits(kept))


def test_more_than_fits_one_thread(backend: str, device: torch.device) -> None:
    shape = (2, 2, 1, 40, 40, 16, 35) if backend == "triton" else (2, 4, 2, 150, 150, 64, 131)
    q, k, positions, _ = random_case(shape, torch.float32, device, seed=3)
    lengths = [shape[4], shape[4] - 11]
    expected = truth(q, k, positions, lengths=lengths)[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = dlmkern.attention_graph(q, k, positions, lengths=torch.tensor(lengths, device=device))
    finally:
        torch.set_num_threads(threads)
    assert_close(found.double(), expected.numpy(), 1e-30, relative(q, k))


def test_positions_of_any_integer_dtype(backend: str, device: torch.device) -> None:
    q, k, _, _ = random_case((1, 2, 1, 9, 9, 8, 1), torch.float32, device)
    places = [[8, 0, 5]]
    expected = dlmkern.attention_graph(q, k, torch.tensor(places, device=device))
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        x = torch.tensor(places, dtype=dtype, device=device)
        ends = torch.tensor([9], dtype=dtype, device=device)
        assert_close(
            dlmkern.attention_graph(q, k, x, rows=x, lengths=ends, counts=ends // 3),
            expected.cpu().numpy(),
            1e-6,
        )


def test_chunks_of_queries(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, positions, _ = random_case((2, 4, 2, 20, 20, 16, 7), torch.float32, device)
    lengths = torch.tensor([20, 11], device=device)
    module = sys.modules["dlmkern.reference.attention_graph"]  # the function of that name hides it
    with dlmkern.use_backend("reference"):
        expected = dlmkern.attention_graph(q, k, positions, lengths=lengths)
        for queries in (0, 1, 3):
            monkeypatch.setattr(module, "CHUNK_BYTES", queries * 4 * q.shape[0] * k.shape[2])
            found = dlmkern.attention_graph(q, k, positions, lengths=lengths)
            assert_close(found, expected.cpu().numpy(), 1e-6)


@settings(deadline=None, max_examples=50)
@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (4, 1)]),
    n=st.integers(1, 5),
    length=st.integers(1, 9),
    size=st.integers(1, 5),
    many=st.integers(0, 7),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 2**16),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_invariants(
    batch: int,
    heads: tuple[int, int],
    n: int,
    length: int,
    size: int,
    many: int,
    dtype: torch.dtype,
    seed: int,
    backend_name: str,
) -> None:
    q, k, positions, rows = random_case(
        (batch, *heads, n, length, size, many), dtype, torch.device("cpu"), seed, spread=1.0
    )
    rows = positions if rows is None else rows
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, length + 1, (batch,), generator=generator)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    with dlmkern.use_backend(backend_name):
        found = dlmkern.attention_graph(q, k, positions, rows=rows, lengths=lengths)
        expected, pair = truth(q, k, positions, rows, lengths.tolist())
        assert_close(found, expected.numpy(), bound)
        assert torch.equal(found > 0, pair)
        order = torch.randperm(many, generator=generator)
        for b in range(batch):
            own = int(lengths[b])
            # alone, the positions in another order, and the keys too
            moved = torch.randperm(own, generator=generator)
            place = torch.full((length + 1,), -1)
            place[moved] = torch.arange(own)
            alone = dlmkern.attention_graph(
                q[b : b + 1],
                k[b : b + 1, :, moved],
                place[positions[b : b + 1, order]],
                rows=rows[b : b + 1, order],
            )
            assert_close(alone[0], found[b, order][:, order].numpy(), bound)
    assert (found.sum(-1) <= many + bound).all()
    assert (found <= 1 + bound).all()


def test_gradients_do_not_flow(backend: str, device: torch.device) -> None:
    q, k, positions, _ = random_case(SHAPES[1], torch.float32, device)
    expected = dlmkern.attention_graph(q, k, positions)
    found = dlmkern.attention_graph(q.requires_grad_(), k.requires_grad_(), positions)
    assert not found.requires_grad
    assert_same(found, expected)
    with torch.inference_mode():
        out = torch.zeros_like(expected)
        assert dlmkern.attention_graph(q, k, positions, out=out) is out
        assert_same(out, expected)


def test_autograd_notices_the_write() -> None:
    q = torch.ones(1, 1, 1, 2)
    positions = torch.zeros(1, 1, dtype=torch.int64)
    weight = torch.ones(1, 1, 1, requires_grad=True)
    out = torch.ones(1, 1, 1)
    product = (out * weight).sum()
    dlmkern.attention_graph(q, q, positions, out=out)
    assert out.item() == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with pytest.raises(TypeError, match="out: expected a tensor that does not require grad"):
        dlmkern.attention_graph(q, q, positions, out=weight)
    assert weight.item() == 1


def test_meta_tensors_have_shapes() -> None:
    q, k, positions, _ = random_case(SHAPES[1], torch.bfloat16, torch.device("meta"))
    found = dlmkern.attention_graph(q, k, positions)
    assert (found.shape, found.dtype, found.device.type) == ((2, 5, 5), torch.float32, "meta")


def test_errors() -> None:
    q, k, positions, rows = random_case((2, 4, 2, 3, 5, 8, 6), torch.float32, torch.device("cpu"))
    assert rows is not None
    lengths, out = torch.tensor([5, 2]), torch.full((2, 6, 6), 7.0)
    good = {"q": q, "k": k, "positions": positions, "rows": rows, "out": out}
    good |= {"lengths": lengths, "lse": torch.zeros(2, 4, 3), "counts": torch.tensor([6, 0])}
    for changes, error, message in (
        ({"q": q.long()}, TypeError, "q: expected dtype float64 or float32 .*, got int64"),
        ({"q": q[0]}, ValueError, r"q: expected shape \[B, Hq, n, d\] with d >= 1, got \[4, 3, 8\]"),
        ({"q": q[..., :0], "k": k[..., :0]}, ValueError, "with d >= 1"),
        ({"q": q.to_sparse()}, TypeError, "q: expected a dense tensor, got layout"),
        ({"q": None}, TypeError, "q: expected a tensor or array, got None"),
        ({"k": k.double()}, TypeError, "k: expected dtype float32, got float64"),
        ({"k": k[0]}, ValueError, r"k: expected shape \[2, Hkv, L, 8\]"),
        ({"k": k[:1]}, ValueError, r"k: expected shape \[2, Hkv, L, 8\]"),
        (
            {"k": k[..., :4]},
            ValueError,
            r"k: expected shape \[2, Hkv, L, 8\] to go with q, got \[2, 2, 5, 4\]",
        ),
        ({"k": k.to("meta")}, ValueError, "k: expected device cpu like q, got meta"),
        ({"q": q[:, :3]}, ValueError, "k: expected a number of heads that divides the 3 of q, got 2"),
        ({"k": k[:, :0]}, ValueError, "k: expected a number of heads that divides the 4 of q, got 0"),
        ({"positions": positions.float()}, TypeError, "positions: expected dtype int64 or .*, got float32"),
        ({"positions": positions[0]}, ValueError, r"positions: expected shape \[2, M\], got \[6\]"),
        ({"positions": positions[:1]}, ValueError, r"positions: expected shape \[2, M\], got \[1, 6\]"),
        ({"positions": positions.to("meta")}, ValueError, "positions: expected device cpu like q, got meta"),
        (
            {"positions": positions.clamp(min=5)},
            ValueError,
            r"positions: expected values in \[-1, 4\], got 5",
        ),
        ({"positions": positions - 9}, ValueError, r"positions: expected values in \[-1, 4\], got -"),
        ({"positions": [0]}, TypeError, "positions: expected a tensor or an array with __dlpack__, got list"),
        ({"counts": torch.ones(2)}, TypeError, "counts: expected dtype int64 or .*, got float32"),
        ({"counts": torch.tensor([6])}, ValueError, r"counts: expected shape \[2\] to go with q, got \[1\]"),
        ({"counts": torch.tensor([7, 0])}, ValueError, r"counts: expected values in \[0, 6\], got 7"),
        ({"counts": torch.tensor([0, -1])}, ValueError, r"counts: expected values in \[0, 6\], got -1"),
        ({"counts": lengths.to("meta")}, ValueError, "counts: expected device cpu"),
        ({"rows": None}, ValueError, "rows: expected where q has 3 rows and k 5 positions, got None"),
        ({"rows": rows.bool()}, TypeError, "rows: expected dtype int64 or .*, got bool"),
        ({"rows": rows[:, :5]}, ValueError, r"rows: expected shape \[2, 6\] to go with positions"),
        ({"rows": rows.to("meta")}, ValueError, "rows: expected device cpu"),
        (
            {"rows": rows + 3, "positions": positions * 0},
            ValueError,
            r"rows: expected values in \[-1, 2\], got [345]",
        ),
        ({"rows": rows * 0 - 2, "positions": positions * 0}, ValueError, r"rows: .*\[-1, 2\], got -2"),
        ({"lengths": lengths.float()}, TypeError, "lengths: expected dtype int64"),
        ({"lengths": lengths[:1]}, ValueError, r"lengths: expected shape \[2\]"),
        ({"lengths": lengths + 1}, ValueError, r"lengths: expected values in \[0, 5\], got 6"),
        ({"lengths": lengths - 3}, ValueError, r"lengths: expected values in \[0, 5\], got -1"),
        ({"lengths": 5}, TypeError, "lengths: expected a tensor or an array"),
        ({"lse": torch.zeros(2, 4, 3).half()}, TypeError, "lse: expected dtype float32, got float16"),
        ({"lse": torch.zeros(2, 4, 5)}, ValueError, r"lse: expected shape \[2, 4, 3\] to go with q"),
        ({"lse": torch.zeros(2, 4, 3, device="meta")}, ValueError, "lse: expected device cpu"),
        (
            {"q": q.double(), "k": k.double(), "out": None},
            TypeError,
            "lse: expected dtype float64, got float32",
        ),
        (
            {"q": q.bfloat16(), "k": k.bfloat16(), "lse": None, "out": out.bfloat16()},
            TypeError,
            "out: .*float32",
        ),
        ({"out": out.double()}, TypeError, "out: expected dtype float32, got float64"),
        ({"out": out[:, :5]}, ValueError, r"out: expected shape \[2, 6, 6\] to go with positions"),
        ({"out": out.to("meta")}, ValueError, "out: expected device cpu"),
        ({"out": out[:1].expand(2, 6, 6)}, ValueError, r"out: expected a place of its own for every element"),
        ({"out": 0.0}, TypeError, "out: expected a tensor or an array"),
        ({"scale": "1"}, TypeError, "scale: expected a number or None, got str"),
        ({"scale": True}, TypeError, "scale: expected a number or None, got bool"),
        ({"scale": NAN}, ValueError, "scale: expected a finite number, got nan"),
        ({"scale": INF}, ValueError, "scale: expected a finite number, got inf"),
        ({"scale": 10**400}, ValueError, "scale: expected a number that a float can hold"),
    ):
        arguments: dict[str, Any] = good | changes
        with pytest.raises(error, match=message):
            dlmkern.attention_graph(**arguments)
    assert (out == 7).all()


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    q, k, positions, rows = random_case((2, 4, 2, 3, 5, 16, 6), torch.float32, device)
    lengths = torch.tensor([5, 2], device=device)
    out = torch.ones((2, 6, 6), device=device)
    opcheck(OP, q, k, positions, rows, None, None, 0.25, out.clone())
    opcheck(OP, q, k, positions, rows, lengths, torch.zeros(2, 4, 3, device=device), 0.25, out.clone())

    def layers(q: Tensor, k: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.full((2,), 4, device=device)
        first = dlmkern.attention_graph(q, k, positions, counts, rows=rows, lengths=lengths)
        dlmkern.attention_graph(2 * q, k, positions, out=out, rows=rows)
        return 2 * first, out.sum()  # what follows sees what was written

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    other = out.clone()
    for one, expected in zip(compiled(q, k, out), layers(q, k, other), strict=True):
        assert_same(one, expected)
    assert_same(out, other)
    assert not (out == 1).all()
