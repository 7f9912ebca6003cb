"""diagonal_correction in C: every instruction set against float64, on awkward sizes and layouts."""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.cpu.capi import (
    BFLOAT16,
    DTYPE,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    MEMORY,
    OK,
    SHAPE,
    VALUE,
    Array,
    Library,
    cast,
    to_float64,
    view,
)

DTYPES = (FLOAT64, FLOAT32, BFLOAT16, FLOAT16)
ROUNDING = {FLOAT64: 2**-53, FLOAT32: 2**-24, BFLOAT16: 2**-8, FLOAT16: 2**-11}
SCALE = 0.3
UNTOUCHED = 77.0
NOTHING, EVERYTHING = 0.0, float("inf")  # is computed anew
# B, Hq, Hkv, n, L, d: around a vector, a panel of 6 to 12 rows or 8 to 32 keys, a tile of 36 rows and a block
# of 16 panels. Rows are at places of a cache where n differs from L.
SHAPES = (
    (1, 1, 1, 1, 1, 1),
    (2, 2, 1, 7, 7, 3),
    (2, 4, 2, 13, 129, 8),
    (1, 3, 1, 90, 90, 17),
    (1, 2, 2, 5, 700, 33),
)


@dataclass(frozen=True)
class Case:
    q: Array
    k: Array
    v: Array
    k_cached: Array
    v_cached: Array
    seeds: Array
    lengths: Array
    positions: Array | None


def random_case(shape: tuple[int, ...], dtype: int, shared: float = 0.5) -> Case:
    """About a `shared` part of the rows are seeds, and the first is one."""
    batch, heads, kv_heads, n, length, size = shape
    generator = np.random.default_rng(0)

    def normal(heads: int, rows: int) -> Array:
        return cast(generator.standard_normal((batch, heads, rows, size)), dtype)

    seeds = generator.random((batch, n)) < shared
    seeds[:, 0] = True
    positions = None if n == length else generator.integers(-1, length, (batch, n))
    return Case(
        normal(heads, n),
        *(normal(kv_heads, rows) for rows in (n, n, length, length)),
        seeds,
        np.maximum(1, length - generator.integers(0, 3, batch)),
        positions,
    )


def attend(case: Case, b: int, h: int, i: int, seed: int | None) -> tuple[Array, Any]:
    """What row i gathers by the definition in float64, and its log-sum-exp."""
    q, k, v, k_cached, v_cached = (to_float64(x) for x in astuple(case)[:5])
    g = h // (q.shape[1] // k.shape[1])
    keys, values = k_cached[b, g], v_cached[b, g]
    if case.positions is None:
        fresh = ~case.seeds[b]
        keys[fresh], values[fresh] = k[b, g, fresh], v[b, g, fresh]
    if seed is not None:
        column = seed if case.positions is None else case.positions[b, seed]
        keys[column], values[column] = k[b, g, seed], v[b, g, seed]
    scores = SCALE * keys[: case.lengths[b]] @ q[b, h, i]
    lse = scores.max() + np.log(np.exp(scores - scores.max()).sum())
    return np.exp(scores - lse) @ values[: case.lengths[b]], lse


def before_and_after(case: Case, shift: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """`out` and `lse` in float64, untouched where the row predicts no seed."""
    batch, heads, n, _ = case.q.shape
    places = np.tile(np.arange(n), (batch, 1)) if case.positions is None else case.positions
    real = case.seeds & (places >= 0) & (places < case.lengths[:, None])
    results = []
    for corrected in (False, True):
        out, lse = np.full(case.q.shape, UNTOUCHED), np.full(case.q.shape[:3], UNTOUCHED)
        for b, seed in zip(*np.nonzero(real), strict=True):
            i = seed - shift
            for h in range(heads if i >= 0 else 0):
                out[b, h, i], lse[b, h, i] = attend(case, b, h, i, seed if corrected else None)
        results.append((out, lse))
    return results[0], results[1]


def correct(
    library: Library,
    case: Case,
    before: tuple[Array, Array],
    shift: int = 0,
    recompute_below: float = EVERYTHING,
) -> tuple[Array, Array]:
    dtype = next(code for code in DTYPES if cast(np.zeros(1), code).dtype == case.q.dtype)
    out, lse = cast(before[0], dtype), before[1].astype(np.float64 if dtype == FLOAT64 else np.float32)
    arguments = (out, lse, *astuple(case), shift, SCALE, recompute_below)
    assert library.call("cpu_diagonal_correction", *arguments) == OK
    return out, lse


@pytest.mark.parametrize("recompute_below", [NOTHING, EVERYTHING])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(
    library: Library, isa: str, shape: tuple[int, ...], dtype: int, recompute_below: float
) -> None:
    case = random_case(shape, dtype)
    for shift in (0, 1):
        before, after = before_and_after(case, shift)
        out, lse = correct(library, case, before, shift, recompute_below)
        wide = np.finfo(lse.dtype).eps
        divisor = min(1, np.exp(after[1] - before[1]).min()) if recompute_below == NOTHING else 1
        np.testing.assert_allclose(lse, after[1], rtol=0, atol=16 * wide / divisor)
        atol = max(32 * wide, 4 * ROUNDING[dtype]) / divisor
        np.testing.assert_allclose(to_float64(out), after[0], rtol=0, atol=atol)
        np.testing.assert_array_equal(to_float64(out)[after[1] == UNTOUCHED], UNTOUCHED)
        np.testing.assert_array_equal(lse[after[1] == UNTOUCHED], UNTOUCHED)


@pytest.mark.parametrize("recompute_below", [NOTHING, EVERYTHING])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_layout(library: Library, isa: str, dtype: int, recompute_below: float) -> None:
    """Strided, broadcast and unaligned tensors give the same bits as plain ones."""
    case = random_case((2, 4, 1, 12, 45, 6), dtype)
    before, _ = before_and_after(case, 0)
    want = correct(library, case, before, recompute_below=recompute_below)

    def turned(x: Array) -> Array:
        return np.ascontiguousarray(x.transpose(3, 2, 1, 0)).transpose(3, 2, 1, 0)

    def unaligned(x: Array) -> Array:
        buffer = np.zeros(x.nbytes + 1, np.uint8)
        buffer[1:] = x.view(np.uint8).reshape(-1)
        return buffer[1:].view(x.dtype).reshape(x.shape)

    def every_other(x: Array) -> Array:
        return np.repeat(x, 2, axis=-1)[..., ::2]

    def each_head(x: Array) -> Array:
        return np.broadcast_to(x, (2, 4, *x.shape[2:]))

    for change in (turned, unaligned, every_other, each_head):
        changed = (change(x) for x in astuple(case)[1:5])
        q = case.q if change is each_head else change(case.q)
        moved = Case(q, *changed, every_other(case.seeds), case.lengths, every_other(case.positions))
        for one, other in zip(
            correct(library, moved, before, recompute_below=recompute_below), want, strict=True
        ):
            np.testing.assert_array_equal(one, other)
    out = np.zeros((12, 2, 4, 12), want[0].dtype).transpose(1, 2, 0, 3)[..., ::2]
    lse = np.zeros((2, 12, 4), want[1].dtype).transpose(0, 2, 1)
    out[...], lse[...] = cast(before[0], dtype), before[1]
    arguments = (out, lse, *astuple(case), 0, SCALE, recompute_below)
    assert library.call("cpu_diagonal_correction", *arguments) == OK
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(lse, want[1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_lies_beyond_the_length_does_not_leak(library: Library, isa: str, value: float) -> None:
    case = random_case((1, 2, 1, 50, 50, 8), FLOAT32)
    case.lengths[:] = 30
    before, _ = before_and_after(case, 0)
    want = correct(library, case, before)
    for x in astuple(case)[1:5]:
        x[:, :, 30:] = value
    spoilt = replace(case, **dict(zip(("k", "v", "k_cached", "v_cached"), astuple(case)[1:5], strict=True)))
    for one, other in zip(correct(library, spoilt, before), want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32])
def test_the_number_of_threads_does_not_change_a_bit(library: Library, isa: str, dtype: int) -> None:
    case = random_case((1, 4, 2, 100, 100, 64), dtype)
    before, after = before_and_after(case, 0)
    threads = ctypes.CDLL("libgomp.so.1")
    for recompute_below in (NOTHING, float(np.exp(np.median(after[1] - before[1]))), EVERYTHING):
        results = []
        try:
            for count in (1, 2, 5):
                threads.omp_set_num_threads(count)
                results.append(correct(library, case, before, recompute_below=recompute_below))
        finally:
            threads.omp_set_num_threads(1)
        for other in results[1:]:
            np.testing.assert_array_equal(other[0], results[0][0])
            np.testing.assert_array_equal(other[1], results[0][1])


def test_error_codes(library: Library) -> None:
    """What is wrong with more than one tensor; test_error_codes.py has every tensor by itself."""
    case = random_case((2, 4, 2, 5, 9, 3), FLOAT32)
    out, lse = np.full(case.q.shape, UNTOUCHED, np.float32), np.full((2, 4, 5), UNTOUCHED, np.float32)

    def code(shift: int = 0, scale: float = 1.0, recompute_below: float = 0.5, **changes: Any) -> Any:
        outputs = [changes.pop(name, value) for name, value in (("out", out), ("lse", lse))]
        arguments = (*outputs, *astuple(replace(case, **changes)), shift, scale, recompute_below)
        return library.call("cpu_diagonal_correction", *arguments)

    for value in (np.nan, np.inf, -np.inf):
        assert code(scale=float(value)) == VALUE
    assert code(recompute_below=float(np.nan)) == code(recompute_below=-1.0) == VALUE
    assert code(shift=2) == code(shift=-1) == VALUE
    assert code(positions=None) == SHAPE  # the cache is longer than the rows
    assert code(k_cached=case.k_cached[:, :, :8]) == SHAPE
    assert code(k=case.k[:, :1], v=case.v[:, :1]) == SHAPE
    three = {name: getattr(case, name)[:, [0, 1, 0]] for name in ("k", "v", "k_cached", "v_cached")}
    assert code(**three) == SHAPE
    assert code(k=case.k.astype(np.float64)) == DTYPE
    assert code(lse=lse.astype(np.float64)) == DTYPE
    assert code(lse=view(lse, stride=(20, 0, 1))) == SHAPE
    assert (out == UNTOUCHED).all()
    assert code() == OK


@pytest.mark.parametrize(
    "shape",
    [(0, 4, 2, 5, 9, 3), (2, 0, 2, 5, 9, 3), (2, 0, 0, 5, 9, 3), (2, 4, 2, 0, 9, 3), (2, 4, 2, 5, 0, 3)],
)
def test_nothing_to_do(library: Library, shape: tuple[int, ...]) -> None:
    batch, heads, kv_heads, n, length, size = shape

    def numbers(*shape: int) -> Array:
        return np.full(shape, UNTOUCHED, np.float32)

    caches = numbers(batch, kv_heads, length, size), numbers(batch, kv_heads, length, size)
    fresh = numbers(batch, kv_heads, n, size), numbers(batch, kv_heads, n, size)
    out, lse, q = numbers(batch, heads, n, size), numbers(batch, heads, n), numbers(batch, heads, n, size)
    seeds, positions = np.ones((batch, n), bool), np.zeros((batch, n), np.int64)
    arguments = (out, lse, q, *fresh, *caches, seeds, None, positions, 0, 1.0, 0.5)
    assert library.call("cpu_diagonal_correction", *arguments) == OK
    assert (out == UNTOUCHED).all()


def test_sizes_beyond_any_memory(library: Library) -> None:
    """An error code, and no overflow on the way."""
    number, seeds = np.zeros((1, 1, 1, 1), np.float32), np.ones((1, 1), bool)
    huge = view(number, shape=(1, 1, 1, 2**56))
    arguments = (huge, number[0], *[huge] * 5, seeds, None, None, 0, 1.0, 0.5)
    assert library.call("cpu_diagonal_correction", *arguments) == MEMORY
