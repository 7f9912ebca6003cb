"""kv_block_write against loops over the positions, and its rotations and drift against float64."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from tests.ops.support import DTYPES, assert_close, assert_same, opcheck, ulp

OP = "kv_block_write"
NAN, INF = math.nan, math.inf
SHAPES = ((1, 1, 1, 1, 1), (2, 3, 7, 4, 5), (1, 2, 40, 64, 33), (2, 1, 5, 6, 9))  # [B, H, L, d], n


def random_case(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Caches, keys, values and distinct positions, some of them -1."""
    batch, heads, length, size, n = shape
    generator = torch.Generator().manual_seed(seed)

    def random(count: int) -> Tensor:
        return torch.randn((batch, heads, count, size), generator=generator).to(device, dtype)

    positions = torch.full((batch, n), -1)
    for row in positions:
        places = torch.randperm(length, generator=generator)[:n]
        row[torch.randperm(n, generator=generator)[: len(places)]] = places
    positions[torch.rand((batch, n), generator=generator) < 0.2] = -1
    return random(length), random(length), random(n), random(n), positions.to(device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What keys of this dtype are turned in, and the dtype of the tables."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def table(length: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """For a cache of `dtype`, cosines and sines whose two halves differ, unlike those of a model."""
    generator = torch.Generator().manual_seed(length)
    angles = 7 * torch.rand((length, size), generator=generator, dtype=torch.float64)
    return angles.cos().to(device, wide(dtype)), angles.sin().to(device, wide(dtype))


def written(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    """A copy of the cache with the rows in their places."""
    cache = cache.clone()
    for b, row in enumerate(positions.tolist()):
        for i, p in enumerate(row):
            if 0 <= p < cache.shape[2]:
                cache[b, :, p] = new[b, :, i]
    return cache


def rotated(k: Tensor, positions: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Turned keys, computed in `dtype`; rows that are skipped are turned somehow."""
    cos, sin = (t.to(dtype)[positions.clamp(0, len(t) - 1)][:, None] for t in rope)
    x = k.to(dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def drift_truth(before: Tensor, after: Tensor, positions: Tensor) -> np.ndarray:
    """[2, B, n]: cosine and distance, from the cache before and after."""
    result = np.full((2, *positions.shape), NAN)
    with np.errstate(all="ignore"):
        for b, row in enumerate(positions.tolist()):
            for i, p in enumerate(row):
                if 0 <= p < before.shape[2]:
                    old, new = (x[b, :, p].double().cpu().numpy().ravel() for x in (before, after))
                    norm = np.sqrt(old @ old)
                    result[0, b, i] = (old @ new) / (norm * np.sqrt(new @ new))
                    result[1, b, i] = np.sqrt((new - old) @ (new - old)) / norm
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_truth(
    backend: str, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    k_cache, v_cache, k, v, positions = random_case(shape, dtype, device)
    expected = written(k_cache, k, positions), written(v_cache, v, positions)
    inputs = k.clone(), v.clone(), positions.clone()
    assert dlmkern.kv_block_write(k_cache, v_cache, k, v, positions) is None
    assert_same(k_cache.float(), expected[0].float())
    assert_same(v_cache.float(), expected[1].float())
    for one, other in zip((k, v, positions), inputs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    for shape in SHAPES[1:]:
        k_cache, v_cache, k, v, positions = random_case(shape, dtype, device)
        rope = table(shape[2] + 3, shape[3], dtype, device)
        before = k_cache.clone()
        exact = rotated(k, positions, rope, torch.float64)
        expected = written(before.double(), exact, positions).cpu()
        v_expected = written(v_cache, v, positions)
        dlmkern.kv_block_write(k_cache, v_cache, k, v, positions, rope=rope)
        # three roundings of the arithmetic, of numbers up to 10, and one of the result
        assert_close(k_cache.double(), expected.numpy(), 20 * ulp(wide(dtype)), ulp(dtype))
        assert_same(v_cache.float(), v_expected.float())
        untouched = written(torch.zeros_like(before), torch.ones_like(k), positions) == 0
        assert torch.equal(k_cache[untouched], before[untouched])
        same_dtype = written(before, rotated(k, positions, rope, wide(dtype)).to(dtype), positions).cpu()
        error, allowed = ((x.double().cpu() - expected).abs().max() for x in (k_cache, same_dtype))
        assert error <= 2 * allowed + 20 * ulp(wide(dtype))


def test_rope_by_hand(backend: str, device: torch.device) -> None:
    # a quarter turn takes (x, y) to (-y, x): element 0 pairs with 2, 1 with 3
    k = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device).expand(1, 1, 2, 4)
    cos, sin = torch.zeros((3, 4), device=device), torch.zeros((3, 4), device=device)
    sin[2] = 1.0
    cos[0] = torch.tensor([1.0, 2.0, 3.0, 4.0])  # both halves are read as they are given
    caches = torch.full((2, 1, 1, 3, 4), 9.0, device=device)
    positions = torch.tensor([[2, 0]], device=device)
    dlmkern.kv_block_write(caches[0], caches[1], k, k, positions, rope=(cos, sin))
    assert caches[0, 0, 0].tolist() == [[1.0, 4.0, 9.0, 16.0], [9.0] * 4, [-3.0, -4.0, 1.0, 2.0]]
    assert caches[1, 0, 0].tolist() == [[1.0, 2.0, 3.0, 4.0], [9.0] * 4, [1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_of_turned_keys(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """To nearest, ties to even, from the smallest numbers of the dtype to beyond its largest one."""
    info = torch.finfo(dtype)
    scale = 2.0 ** torch.arange(-20, 20, dtype=torch.float64)
    fine = (1 + torch.arange(-6, 7, dtype=torch.float64) * info.eps / 4)[:, None] * scale
    tiny = info.smallest_normal * info.eps * torch.arange(0, 9, 0.25, dtype=torch.float64)
    special = torch.tensor([info.max, info.max * (1 + info.eps / 4), info.max * (1 + info.eps), INF, NAN])
    factor = torch.cat((fine.flatten(), tiny, special.double())).to(wide(dtype))
    factor = torch.cat((factor, -factor))
    size = 2 * len(factor)
    cos = torch.cat((factor, factor))[None].to(device)
    k_cache, v_cache = torch.zeros((2, 1, 1, 1, size), dtype=dtype, device=device)
    k = torch.ones((1, 1, 1, size), dtype=dtype, device=device)
    positions = torch.zeros((1, 1), dtype=torch.int64, device=device)
    dlmkern.kv_block_write(k_cache, v_cache, k, k, positions, rope=(cos, torch.zeros_like(cos)))
    assert_same(k_cache.flatten().double(), cos.flatten().to(dtype).double())


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_turned_keys_are_rounded_once(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """x cos - y sin lies just above the middle of 1 and the next number. Products or tables rounded to the
    cache's dtype before the sum give 1."""
    eps = ulp(dtype)
    cos = torch.full((1, 2), 1 + eps / 4, device=device)
    sin = torch.full((1, 2), -(eps / 4 + eps / 32), device=device)
    k_cache, v_cache = torch.zeros((2, 1, 1, 1, 2), dtype=dtype, device=device)
    k = torch.ones((1, 1, 1, 2), dtype=dtype, device=device)
    positions = torch.zeros((1, 1), dtype=torch.int64, device=device)
    dlmkern.kv_block_write(k_cache, v_cache, k, k, positions, rope=(cos, sin))
    assert k_cache[0, 0, 0, 0].item() == 1 + eps
    products = (x[0, 0].to(dtype).double().item() for x in (cos, -sin))
    assert torch.tensor(sum(products), dtype=torch.float64).to(dtype).item() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_drift(backend: str, device: torch.device, dtype: torch.dtype, turned: bool) -> None:
    for shape in SHAPES[1:]:
        k_cache, v_cache, k, v, positions = random_case(shape, dtype, device, seed=1)
        before = k_cache.clone(), v_cache.clone()
        rope = table(shape[2], shape[3], dtype, device) if turned else None
        drift = dlmkern.kv_block_write(k_cache, v_cache, k, v, positions, rope=rope, drift=True)
        assert isinstance(drift, dlmkern.KVDrift)
        expected = [drift_truth(x, y, positions) for x, y in zip(before, (k_cache, v_cache), strict=True)]
        for found, truth in zip(drift, np.concatenate(expected), strict=True):
            assert found.dtype == torch.float32
            assert_close(found, truth, 1e-6, 1e-5)
        plain = before[0].clone(), before[1].clone()
        dlmkern.kv_block_write(*plain, k, v, positions, rope=rope)
        assert torch.equal(plain[0], k_cache)
        assert torch.equal(plain[1], v_cache)


def test_drift_by_hand(backend: str, device: torch.device) -> None:
    # two heads of one number each are one vector
    old = [[3.0, 1.0, 0.0, 0.0, 5.0], [4.0, 0.0, 0.0, 0.0, 5.0]]
    new = [[6.0, 0.0, 1.0, 0.0, 7.0], [8.0, 1.0, 0.0, 0.0, 7.0]]
    k_cache = torch.tensor(old, device=device)[None, :, :, None]
    k = torch.tensor(new, device=device)[None, :, :, None]
    v_cache = torch.ones_like(k_cache)
    positions = torch.tensor([[0, 1, 2, 3, -1]], device=device)
    drift = dlmkern.kv_block_write(k_cache, v_cache, k, v_cache.clone(), positions, drift=True)
    assert drift is not None
    assert_close(drift.k_cosine, np.array([[1.0, 0.0, NAN, NAN, NAN]]), 1e-7)
    assert_close(drift.k_distance, np.array([[1.0, math.sqrt(2), INF, NAN, NAN]]), 1e-6)
    assert_close(drift.v_cosine, np.array([[1.0] * 4 + [NAN]]), 1e-7)
    assert_close(drift.v_distance, np.array([[0.0] * 4 + [NAN]]), 0.0)
    assert k_cache[0, :, 4, 0].tolist() == [5.0, 5.0]


def cache_layouts(x: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """A name, a view with the values of x [B, H, L, d], and the whole buffer, which is NaN elsewhere."""
    batch, heads, length, size = x.shape
    for name, shape, view in (
        ("a slice of a longer cache", (batch, heads, length + 9, size), lambda y: y[:, :, 4 : 4 + length]),
        ("heads within positions", (batch, length, heads, size), lambda y: y.transpose(1, 2)),
        ("one layer of many", (batch, heads, length, 3, size), lambda y: y[..., 1, :]),
        ("every other number", (batch, heads, length, 2 * size + 1), lambda y: y[..., 1::2]),
        ("size before length", (batch, heads, size, length), lambda y: y.mT),
        ("off alignment", (batch * heads * length * size + 1,), lambda y: y[1:].view(x.shape)),
    ):
        buffer = torch.full(shape, NAN, dtype=x.dtype, device=x.device)
        view(buffer).copy_(x)
        yield name, view(buffer), buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_do_not_matter(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    shape = (2, 3, 6, 4, 5)
    k_cache, v_cache, k, v, positions = random_case(shape, dtype, device, seed=2)
    rope = table(shape[2], shape[3], torch.float32, device)
    expected = k_cache.clone(), v_cache.clone()
    drift = dlmkern.kv_block_write(*expected, k, v, positions, rope=rope, drift=True)
    wide = torch.full((len(rope[0]), 2 * shape[3]), NAN, device=device)
    wide[:, ::2] = rope[0]
    layouts = zip(*(cache_layouts(x) for x in (k_cache, v_cache, k, v)), strict=True)
    for (name, keys, buffer), (_, values, _), (_, new_k, _), (_, new_v, _) in layouts:
        outside = int(buffer.isnan().sum())
        moved = dlmkern.kv_block_write(
            *(keys, values, new_k, new_v, positions.T.contiguous().T),
            rope=(wide[:, ::2], rope[1].T.contiguous().T),
            drift=True,
        )
        assert_same(keys.float(), expected[0].float(), name)
        assert_same(values.float(), expected[1].float(), name)
        assert int(buffer.isnan().sum()) == outside, name
        for one, other in zip(moved, drift, strict=True):  # type: ignore[arg-type]
            assert_same(one, other, name)
    # the keys of all sequences from one
    one_for_all = k[:1, :1].expand(k.shape)
    dlmkern.kv_block_write(k_cache, v_cache, one_for_all, v, positions)
    assert_same(k_cache.float(), written(k_cache, one_for_all, positions).float())


def test_whatever_lies_outside_is_skipped(backend: str, device: torch.device) -> None:
    """On an accelerator nobody looks at the positions."""
    k_cache, v_cache, k, v, _ = random_case((2, 2, 4, 3, 6), torch.float32, device)
    for row in ([-1, -2, 4, 2, 2**40, -(2**63)], [-1] * 6, [9, 3, -7, 0, 1, 2]):
        positions = torch.tensor([row, row[::-1]], device=device)
        expected = written(k_cache, k, positions), written(v_cache, v, positions)
        moved = torch.ops.dlmkern.kv_block_write(k_cache, v_cache, k, v, positions, None, None, True)
        assert_same(k_cache, expected[0])
        assert_same(v_cache, expected[1])
        outside = (positions < 0) | (positions >= 4)
        assert torch.equal(moved.isnan(), outside.expand(4, -1, -1))


def test_more_than_fits_one_thread(backend: str, device: torch.device) -> None:
    shape = (2, 4, 80, 64, 70)
    k_cache, v_cache, k, v, positions = random_case(shape, torch.float32, device, seed=3)
    rope = table(shape[2], shape[3], torch.float32, device)
    before = k_cache.clone(), v_cache.clone()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        drift = dlmkern.kv_block_write(k_cache, v_cache, k, v, positions, rope=rope, drift=True)
    finally:
        torch.set_num_threads(threads)
    exact = written(before[0].double(), rotated(k, positions, rope, torch.float64), positions)
    assert_close(k_cache.double(), exact.cpu().numpy(), 1e-5)
    assert_same(v_cache, written(before[1], v, positions))
    assert drift is not None
    expected = drift_truth(before[1], v_cache, positions)
    assert_close(drift.v_cosine, expected[0], 1e-6)
    assert_close(drift.v_distance, expected[1], 1e-5)


@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 4, 2), (2, 0, 3, 4, 2), (2, 2, 0, 4, 2), (2, 2, 3, 0, 2), (2, 2, 3, 4, 0)], ids=str
)
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    k_cache, v_cache, k, v, positions = random_case(shape, torch.float32, device)
    rope = table(shape[2], shape[3], torch.float32, device)
    expected = written(v_cache, v, positions)
    drift = dlmkern.kv_block_write(k_cache, v_cache, k, v, positions, rope=rope, drift=True)
    assert drift is not None
    assert [x.shape for x in drift] == [positions.shape] * 4
    assert all(x.isnan().all() for x in drift)
    assert_same(v_cache, expected)


def test_positions_of_any_integer_dtype(backend: str, device: torch.device) -> None:
    k_cache, v_cache, k, v, _ = random_case((1, 2, 9, 4, 3), torch.float32, device)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        positions = torch.tensor([[8, 0, 5]], dtype=dtype, device=device)
        k_cache.zero_()
        dlmkern.kv_block_write(k_cache, v_cache, k, v, positions)
        assert_same(k_cache[:, :, [8, 0, 5]], k)
    shared = torch.tensor([2, 4, 6], device=device).expand(1, -1)
    dlmkern.kv_block_write(k_cache, v_cache, k, v, shared)
    assert_same(v_cache[:, :, 2:8:2], v)


def test_gradients_do_not_flow(backend: str, device: torch.device) -> None:
    k_cache, v_cache, k, v, positions = random_case((1, 2, 5, 4, 3), torch.float32, device)
    expected = written(k_cache, k, positions)
    drift = dlmkern.kv_block_write(k_cache, v_cache, k.requires_grad_(), v, positions, drift=True)
    assert drift is not None
    assert not drift.k_cosine.requires_grad
    assert not k_cache.requires_grad
    assert_same(k_cache, expected)
    with torch.inference_mode():
        caches = torch.zeros((2, 1, 2, 5, 4), device=device)
        dlmkern.kv_block_write(caches[0], caches[1], k.detach(), v, positions)
        assert_same(caches[1], written(torch.zeros_like(v_cache), v, positions))


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 2, st.integers(1, 9), st.integers(1, 4), st.integers(0, 9)),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    turned=st.booleans(),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_invariants(
    sizes: tuple[int, ...], seed: int, dtype: torch.dtype, turned: bool, backend_name: str
) -> None:
    batch, heads, length, half, n = sizes
    cpu = torch.device("cpu")
    k_cache, v_cache, k, v, positions = random_case((batch, heads, length, 2 * half, n), dtype, cpu, seed)
    rope = table(length, 2 * half, dtype, cpu) if turned else None
    before = k_cache.clone(), v_cache.clone()
    with dlmkern.use_backend(backend_name):
        drift = dlmkern.kv_block_write(k_cache, v_cache, k, v, positions, rope=rope, drift=True)
        assert drift is not None
        # each sequence by itself, its rows in another order
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        for b in range(batch):
            caches = before[0][b : b + 1].clone(), before[1][b : b + 1].clone()
            rows = (x[b : b + 1, :, order] for x in (k, v))
            alone = dlmkern.kv_block_write(*caches, *rows, positions[b : b + 1, order], rope=rope, drift=True)
            assert torch.equal(caches[0][0], k_cache[b])
            assert torch.equal(caches[1][0], v_cache[b])
            for one, other in zip(alone, drift, strict=True):  # type: ignore[arg-type]
                assert_same(one[0], other[b, order])
        # once more changes nothing
        after = k_cache.clone(), v_cache.clone()
        again = dlmkern.kv_block_write(k_cache, v_cache, k, v, positions, rope=rope, drift=True)
    assert again is not None
    assert torch.equal(k_cache, after[0])
    assert torch.equal(v_cache, after[1])
    known = positions >= 0
    for distance in (again.k_distance, again.v_distance):
        assert (distance[known] == 0).all()
    for cosine in (again.k_cosine, again.v_cosine):
        assert ((cosine[known] - 1).abs() < 1e-6).all()
        assert cosine[~known].isnan().all()


def test_errors() -> None:
    cpu = torch.device("cpu")
    k_cache, v_cache, k, v, positions = random_case((2, 3, 7, 4, 5), torch.float32, cpu)
    before = k_cache.clone(), v_cache.clone()
    good = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "positions": positions}
    cos, sin = table(7, 4, torch.float32, cpu)
    odd = torch.zeros(2, 3, 7, 3)
    for changes, error, message in (
        ({"k_cache": k_cache.long()}, TypeError, "k_cache: expected dtype"),
        ({"k_cache": k_cache[0]}, ValueError, r"k_cache: expected shape \[B, H, L, d\]"),
        ({"k_cache": k_cache[:, :1].expand_as(k_cache)}, ValueError, "k_cache: expected a place of its own"),
        ({"v_cache": v_cache[:1].expand_as(v_cache)}, ValueError, "v_cache: expected a place of its own"),
        ({"v_cache": v_cache.double()}, TypeError, "v_cache: expected dtype float32, got float64"),
        ({"v_cache": v_cache[..., :2]}, ValueError, r"v_cache: expected shape \[2, 3, 7, 4\]"),
        ({"v_cache": v_cache.to("meta")}, ValueError, "v_cache: expected device cpu"),
        ({"k": k.half()}, TypeError, "k: expected dtype float32"),
        ({"k": k[:, :2]}, ValueError, r"k: expected shape \[2, 3, 5, 4\]"),
        ({"v": v[:, :, :4]}, ValueError, r"v: expected shape \[2, 3, 5, 4\]"),
        ({"v": None}, TypeError, "v: expected a tensor"),
        ({"positions": positions.float()}, TypeError, "positions: expected dtype int64 or"),
        ({"positions": positions[0]}, ValueError, r"positions: expected shape \[2, n\]"),
        ({"positions": positions[:1]}, ValueError, r"positions: expected shape \[2, n\]"),
        ({"positions": positions.to("meta")}, ValueError, "positions: expected device cpu"),
        (
            {"positions": positions.clamp(min=7)},
            ValueError,
            r"positions: expected values in \[-1, 6\], got 7",
        ),
        (
            {"positions": positions.clamp(max=-2)},
            ValueError,
            r"positions: expected values in \[-1, 6\], got -2",
        ),
        ({"rope": cos}, TypeError, r"rope: expected a pair \(cos, sin\)"),
        ({"rope": (cos,)}, TypeError, "rope: expected a pair"),
        ({"rope": (cos, None)}, TypeError, "sin: expected a tensor"),
        ({"rope": (None, sin)}, TypeError, "cos: expected a tensor"),
        ({"rope": (cos.half(), sin.half())}, TypeError, "cos: expected dtype float32, got float16"),
        ({"rope": (cos.double(), sin.double())}, TypeError, "cos: expected dtype float32, got float64"),
        ({"rope": (cos, sin.double())}, TypeError, "sin: expected dtype float32"),
        ({"rope": (cos[:6], sin[:6])}, ValueError, r"cos: expected shape \[P, 4\] with P >= 7"),
        ({"rope": (cos[:, :2], sin)}, ValueError, r"cos: expected shape \[P, 4\]"),
        ({"rope": (cos, sin[:, :2])}, ValueError, r"sin: expected shape \[7, 4\]"),
        ({"rope": (cos.to("meta"), sin)}, ValueError, "cos: expected device cpu"),
        (
            {name: x.double() for name, x in good.items() if name != "positions"} | {"rope": (cos, sin)},
            TypeError,
            "cos: expected dtype float64, got float32",
        ),
        (
            {
                "k_cache": odd,
                "v_cache": odd.clone(),
                "k": odd[:, :, :5],
                "v": odd[:, :, :5],
                "rope": (cos[:, :3], sin[:, :3]),
            },
            ValueError,
            "rope: expected an even head size, got d = 3",
        ),
    ):
        arguments: dict[str, Any] = good | changes
        with pytest.raises(error, match=message):
            dlmkern.kv_block_write(**arguments)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    k_cache, v_cache, k, v, positions = random_case((2, 2, 7, 4, 5), torch.float32, device)
    cos, sin = table(7, 4, torch.float32, device)
    positions[0] = torch.arange(2, 7, device=device)
    positions[1] = torch.arange(5, device=device).flip(0)  # opcheck takes two NaN for different
    opcheck(OP, k_cache, v_cache, k, v, positions, None, None, False)
    opcheck(OP, k_cache, v_cache, k, v, positions, cos, sin, True)

    def step(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        drift = dlmkern.kv_block_write(k_cache, v_cache, 2 * k, v, positions, rope=(cos, sin), drift=True)
        assert drift is not None
        return k_cache.sum(), drift.v_distance  # what follows sees what was written

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    caches = k_cache.clone(), v_cache.clone()
    expected = step(*caches, k, v)
    for one, other in zip(compiled(k_cache, v_cache, k, v), expected, strict=True):
        assert_same(one, other)
    assert torch.equal(k_cache, caches[0])
    assert torch.equal(v_cache, caches[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_heads(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Nothing is written and no table is read; without numbers, no cosine or distance is defined."""
    cache = torch.zeros(1, 0, 2000, 64, dtype=dtype, device=device)
    block = torch.zeros(1, 0, 1000, 64, dtype=dtype, device=device)
    positions = torch.arange(1000, device=device).unsqueeze(0)
    table = torch.randn(64, 2000, dtype=dtype, device=device).T
    for _ in range(3):
        drift = dlmkern.kv_block_write(
            cache, cache.clone(), block, block, positions, rope=(table, table), drift=True
        )
    assert all(x.isnan().all() for x in drift)


def test_autograd_notices_the_write() -> None:
    weight = torch.ones(1, 1, 1, 2, requires_grad=True)
    cache = torch.ones(1, 1, 1, 2)
    product = (cache * weight).sum()
    block, positions = torch.full_like(cache, 5.0), torch.zeros(1, 1, dtype=torch.int64)
    dlmkern.kv_block_write(cache, cache.clone(), block, block, positions)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with pytest.raises(TypeError, match="k_cache: expected a tensor that does not require grad"):
        dlmkern.kv_block_write(weight, cache, block, block, positions)
