"""attention_graph in C: every instruction set against float64, on awkward sizes and layouts."""

from __future__ import annotations

import ctypes
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
    NULL,
    OK,
    SHAPE,
    VALUE,
    Array,
    Library,
    cast,
    to_float64,
    view,
)

SCALE = 0.3
UNTOUCHED = 77.0
# B, Hq, Hkv, L, M, d: around a vector, a panel of 6 to 12 rows or 8 to 32 keys, a tile of 36 rows, and the 16
# panels whose scores are summed up at once.
SHAPES = (
    (1, 1, 1, 1, 1, 1),
    (2, 2, 1, 7, 5, 3),
    (1, 2, 2, 33, 13, 8),
    (1, 4, 2, 129, 37, 5),
    (1, 1, 1, 700, 150, 4),
    (1, 3, 1, 70, 70, 17),
)


def random_case(shape: tuple[int, ...], dtype: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Queries, keys and positions, of which some are padding and some are repeated."""
    batch, heads, kv_heads, length, many, size = shape
    generator = np.random.default_rng(seed)
    q = 2 * generator.standard_normal((batch, heads, length, size))
    k = generator.standard_normal((batch, kv_heads, length, size))
    positions = generator.integers(-1, length + 1, (batch, many))
    positions[:, 0] = 0
    return cast(q, dtype), cast(k, dtype), positions


def whole_map(q: Array, k: Array, dtype: type) -> tuple[Array, Array]:
    """The attention map of every head by its definition, in `dtype`, and the log-sum-exp."""
    q, k = (to_float64(x).astype(dtype) for x in (q, k))
    scores = dtype(SCALE) * q @ k.repeat(q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3)
    best = scores.max(-1, keepdims=True)
    lse = best + np.log(np.exp(scores - best).sum(-1, keepdims=True))
    return np.exp(scores - lse), lse[..., 0]


def entries(attention: Array, positions: Array, length: int) -> Array:
    """What out is to hold: the mean over heads where both positions are real."""
    out = np.full((len(positions), positions.shape[1], positions.shape[1]), UNTOUCHED)
    for b, row in enumerate(positions):
        real = np.flatnonzero((row >= 0) & (row < length))
        weights = attention[b][:, row[real][:, None], row[real]].mean(0)
        out[b][np.ix_(real, real)] = 1 + weights.astype(np.float64)
    return out


def compute(
    library: Library,
    q: Array,
    k: Array,
    positions: Array,
    lse: Array | None = None,
    length: int | None = None,
) -> Array:
    """Added to 1 where both positions are real."""
    length = q.shape[2] if length is None else length
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    out = entries(np.zeros((*q.shape[:3], k.shape[2])), positions, length).astype(dtype)
    lengths = np.full(len(q), length)
    assert library.call("cpu_attention_graph", q, k, positions, None, lengths, lse, SCALE, out) == OK
    return out


@pytest.mark.parametrize("known", [False, True], ids=["sums", "lse"])
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BFLOAT16, FLOAT16])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(library: Library, isa: str, shape: tuple[int, ...], dtype: int, known: bool) -> None:
    q, k, positions = random_case(shape, dtype)
    length = q.shape[2]
    arithmetic = np.float64 if dtype == FLOAT64 else np.float32
    attention, lse = whole_map(q, k, np.float64)
    want = entries(attention, positions, length)
    plain = entries(whole_map(q, k, arithmetic)[0], positions, length).astype(arithmetic)
    got = compute(library, q, k, positions, lse.astype(arithmetic) if known else None)
    allowed = 2 * np.abs(plain - want).max() + 8 * np.finfo(arithmetic).eps
    np.testing.assert_allclose(got, want, rtol=0, atol=allowed)
    np.testing.assert_array_equal(got[want == UNTOUCHED], UNTOUCHED)


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BFLOAT16, FLOAT16])
def test_any_layout(library: Library, isa: str, dtype: int) -> None:
    """Strided, broadcast and unaligned tensors give the same bits as plain ones."""
    q, k, positions = random_case((2, 4, 1, 45, 20, 6), dtype)
    want = compute(library, q, k, positions)
    wide_q = np.repeat(q, 2, axis=3)[..., ::2]
    moved_k = np.ascontiguousarray(k.transpose(3, 2, 1, 0)).transpose(3, 2, 1, 0)
    np.testing.assert_array_equal(compute(library, wide_q, moved_k, positions), want)
    buffer = np.zeros(q.nbytes + 1, np.uint8)
    buffer[1:] = q.view(np.uint8).reshape(-1)
    unaligned = buffer[1:].view(q.dtype).reshape(q.shape)
    np.testing.assert_array_equal(compute(library, unaligned, k, positions), want)
    several = np.broadcast_to(k, (2, 4, *k.shape[2:]))
    np.testing.assert_array_equal(compute(library, q, several, positions), want)
    out = np.zeros((20, 2, 40), want.dtype).transpose(1, 0, 2)[..., ::2]
    assert library.call("cpu_attention_graph", q, k, positions, None, None, None, SCALE, out) == OK
    np.testing.assert_allclose(out, np.where(want == UNTOUCHED, 0, want - 1), atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_lies_beyond_the_length_does_not_leak(library: Library, isa: str, value: float) -> None:
    q, k, positions = random_case((1, 2, 1, 50, 20, 8), FLOAT32)
    want = compute(library, q[:, :, :30], k[:, :, :30], positions)
    q[:, :, 30:] = k[:, :, 30:] = value
    np.testing.assert_array_equal(compute(library, q, k, positions, length=30), want)


def test_a_bad_query_spoils_its_row_and_a_bad_key_everything(library: Library, isa: str) -> None:
    q, k, _ = random_case((1, 2, 2, 40, 1, 8), FLOAT32)
    positions = np.arange(0, 40, 2)[None]
    want = compute(library, q, k, positions)
    spoilt = q.copy()
    spoilt[0, 1, 6] = np.nan
    got = compute(library, spoilt, k, positions)
    assert np.isnan(got[0, 3]).all()
    np.testing.assert_array_equal(np.delete(got, 3, axis=1), np.delete(want, 3, axis=1))
    spoilt = k.copy()
    spoilt[0, 1, 39] = np.nan  # no position's key, but part of the sums
    assert np.isnan(compute(library, q, spoilt, positions)).all()
    assert np.isfinite(compute(library, q, spoilt, positions, np.zeros((1, 2, 40), np.float32))).all()


@pytest.mark.parametrize("known", [False, True], ids=["sums", "lse"])
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32])
def test_the_number_of_threads_does_not_change_a_bit(
    library: Library, isa: str, dtype: int, known: bool
) -> None:
    q, k, positions = random_case((1, 4, 2, 300, 150, 32), dtype)
    lse = np.full(q.shape[:3], 3, q.dtype) if known else None
    threads = ctypes.CDLL("libgomp.so.1")
    results = []
    try:
        for count in (1, 2, 5):
            threads.omp_set_num_threads(count)
            results.append(compute(library, q, k, positions, lse))
    finally:
        threads.omp_set_num_threads(1)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_error_codes(library: Library) -> None:
    """What is wrong with more than one tensor; test_error_codes.py has every tensor by itself."""
    q, k, positions = random_case((2, 4, 2, 6, 3, 5), FLOAT32)
    out = np.full((2, 3, 3), UNTOUCHED, np.float32)

    def code(
        q: Any = q, k: Any = k, rows: Any = None, lse: Any = None, scale: float = 1.0, out: Any = out
    ) -> Any:
        return library.call("cpu_attention_graph", q, k, positions, rows, None, lse, scale, out)

    for scale in (np.nan, np.inf, -np.inf):
        assert code(scale=float(scale)) == VALUE
    assert code(q=q[:, :3]) == SHAPE
    assert code(k=k[:, :0]) == SHAPE
    assert code(q=q[:, :, :5]) == SHAPE
    assert code(k=k[:, :, :5]) == SHAPE
    assert code(q=q[..., :0], k=k[..., :0]) == SHAPE
    assert code(q=q[..., :4]) == SHAPE
    assert code(k=k.astype(np.float64)) == DTYPE
    assert code(q=q.astype(np.float64), k=k.astype(np.float64)) == DTYPE  # out is to be float64 then
    assert code(lse=np.zeros((2, 4, 6))) == DTYPE
    assert code(lse=np.zeros((2, 2, 6), np.float32)) == SHAPE
    assert code(out=None) == NULL
    assert code(out=view(out, stride=(9, 0, 1))) == SHAPE
    assert (out == UNTOUCHED).all()
    assert code(q=q[:, :, :5], rows=positions) == OK


@pytest.mark.parametrize(
    "shape",
    [(0, 4, 2, 6, 3, 5), (2, 0, 2, 6, 3, 5), (2, 0, 0, 6, 3, 5), (2, 4, 2, 0, 3, 5), (2, 4, 2, 6, 0, 5)],
)
def test_nothing_to_do(library: Library, shape: tuple[int, ...]) -> None:
    batch, heads, kv_heads, length, many, size = shape
    q = np.zeros((batch, heads, length, size), np.float32)
    k = np.zeros((batch, kv_heads, length, size), np.float32)
    out = np.full((batch, many, many), UNTOUCHED, np.float32)
    positions = np.zeros((batch, many), np.int64)
    assert library.call("cpu_attention_graph", q, k, positions, None, None, None, 1.0, out) == OK
    assert (out == UNTOUCHED).all()


def test_sizes_beyond_any_memory(library: Library) -> None:
    """Broadcast from one number: an error code, and no overflow on the way."""
    number, out = np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32)
    positions = np.zeros((1, 1), np.int64)
    for shape in ((1, 1, 1, 2**56), (1, 1, 2**50, 64), (1, 1, 2**56, 1)):
        huge = view(number, shape=shape, stride=(0, 0, 0, 0))
        code = library.call("cpu_attention_graph", huge, huge, positions, None, None, None, 1.0, out)
        assert code == MEMORY
    assert (out == 0).all()
