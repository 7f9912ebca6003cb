"""token_stats in C: every instruction set against float64, on awkward sizes, layouts and values."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cpu.capi import (
    BFLOAT16,
    DTYPE,
    FLOAT16,
    FLOAT32,
    FLOAT64,
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

FLOATS = (FLOAT64, FLOAT32, BFLOAT16, FLOAT16)
# Around one vector, one pair, the short rows of plain float64, one piece and one section of a row.
SIZES = (1, 2, 7, 8, 9, 31, 33, 1024, 1025, 1057, 2048, 2049, 4099, 32768, 33000)
SPECIAL = (np.nan, np.inf, -np.inf, 40.0, 0.0, -3e38)
STATISTICS = ("confidence", "logsumexp", "entropy", "kl")


@dataclass
class Stats:
    token: Array
    confidence: Array
    logsumexp: Array
    entropy: Array
    kl: Array


def compute(
    library: Library,
    logits: Array,
    prev: Array | None = None,
    rows: Array | None = None,
    banned: int = -1,
    dtype: type = np.float64,
    wanted: tuple[str, ...] = STATISTICS,
) -> Stats:
    shape = logits.shape[:2]
    out = Stats(np.full(shape, 77), *(np.full(shape, 77, dtype) for _ in STATISTICS))
    outputs = [getattr(out, name) if name in wanted else None for name in STATISTICS]
    assert library.call("cpu_token_stats", logits, prev, rows, banned, out.token, *outputs) == OK
    return out


def truth(logits: Array, prev: Array | None = None, banned: int = -1) -> Stats:
    """The definition, row by row in float64; every row must be one that defines a distribution."""
    x = to_float64(logits)
    y = np.full_like(x, np.nan) if prev is None else to_float64(prev)
    if banned >= 0:
        x[..., banned] = y[..., banned] = -np.inf
    token = x.argmax(-1)
    best = x.max(-1, keepdims=True)
    mass = np.exp(x - best).sum(-1, keepdims=True)
    logp = x - best - np.log(mass)
    p = np.exp(logp)
    confidence = 1 / mass[..., 0]
    with np.errstate(invalid="ignore"):
        entropy = -np.where(np.isneginf(x), 0, p * logp).sum(-1)
        logq = y - y.max(-1, keepdims=True)
        logq = logq - np.log(np.exp(logq).sum(-1, keepdims=True))
        kl = np.where(np.isneginf(x), 0, p * (logp - logq)).sum(-1)
    return Stats(token, confidence, best[..., 0] + np.log(mass[..., 0]), entropy, kl)


def assert_close(got: Stats, want: Stats, what: str = "") -> None:
    """Well within what float32 could say; `1 - confidence` is held to its own size, not to one."""
    np.testing.assert_array_equal(got.token, want.token, err_msg=what)
    np.testing.assert_allclose(got.confidence, want.confidence, rtol=1e-6, atol=0, err_msg=what)
    np.testing.assert_allclose(1 - got.confidence, 1 - want.confidence, rtol=1e-6, atol=1e-15, err_msg=what)
    np.testing.assert_allclose(got.logsumexp, want.logsumexp, rtol=1e-7, atol=3e-7, err_msg=what)
    np.testing.assert_allclose(got.entropy, want.entropy, rtol=1e-6, atol=1e-6, err_msg=what)
    np.testing.assert_allclose(got.kl, want.kl, rtol=1e-6, atol=1e-6, err_msg=what)


def random_rows(V: int, dtype: int, seed: int, scale: float = 3.0, n: int = 3) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(scale=scale, size=(1, n, V))
    x[0, 0, rng.integers(V)] += 12  # one row is sure of itself
    return cast(x, dtype), cast(x + rng.normal(size=x.shape), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("V", SIZES)
def test_agrees_with_float64(library: Library, isa: str, dtype: int, V: int) -> None:
    x, prev = random_rows(V, dtype, seed=V)
    assert_close(compute(library, x, prev), truth(x, prev))


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_what_is_asked_for_does_not_change_an_answer(library: Library, isa: str, dtype: int) -> None:
    x, prev = random_rows(4099, dtype, seed=1)
    everything = compute(library, x, prev)
    for wanted in ((), ("confidence",), ("entropy",), ("kl",), ("logsumexp", "kl")):
        some = compute(library, x, prev, wanted=wanted)
        np.testing.assert_array_equal(some.token, everything.token)
        for name in wanted:
            np.testing.assert_array_equal(getattr(some, name), getattr(everything, name), err_msg=name)
    np.testing.assert_array_equal(compute(library, x).entropy, everything.entropy)
    assert np.isnan(compute(library, x).kl).all()


def test_float32_outputs_are_the_rounded_float64_ones(library: Library) -> None:
    x, prev = random_rows(3000, FLOAT32, seed=2)
    single, double = compute(library, x, prev, dtype=np.float32), compute(library, x, prev)
    for name in STATISTICS:
        np.testing.assert_array_equal(getattr(single, name), getattr(double, name).astype(np.float32))


def test_confidences_near_one_are_told_apart(library: Library, isa: str) -> None:
    x = np.zeros((1, 2, 5000), np.float32)
    x[0, :, 4321] = 30.0, 30.5
    confidence = compute(library, x).confidence[0]
    np.testing.assert_allclose(1 - confidence, 4999 * np.exp([-30.0, -30.5]), rtol=1e-4)
    assert confidence[0] < confidence[1] < 1


@pytest.mark.parametrize("V", [40, 5000])
def test_lowest_index_wins_a_tie(library: Library, isa: str, V: int) -> None:
    x = np.zeros((1, 4, V), np.float32)
    x[0, 1, [V // 2, V - 1]] = 3
    x[0, 2, [V - 2, V - 1]] = 3
    x[0, 3, 0] = -1
    got = compute(library, x)
    np.testing.assert_array_equal(got.token, [[0, V // 2, V - 2, 1]])
    np.testing.assert_allclose(got.confidence, truth(x).confidence, rtol=1e-6)


@pytest.mark.parametrize("V", [50, 3000, 40000])
@pytest.mark.parametrize("where", ["first", "last", "best", "inside"])
def test_banned_token(library: Library, isa: str, V: int, where: str) -> None:
    x, prev = random_rows(V, FLOAT32, seed=V)
    banned = {"first": 0, "last": V - 1, "best": int(x[0, 0].argmax()), "inside": V // 3}[where]
    want = truth(x, prev, banned)
    assert_close(compute(library, x, prev, banned=banned), want)
    x[0, 1, banned] = np.nan  # a banned token is not looked at
    prev[0, 2, banned] = np.inf
    assert_close(compute(library, x, prev, banned=banned), want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("V", [40, 5000])
def test_layouts(library: Library, isa: str, dtype: int, V: int) -> None:
    x, prev = random_rows(V, dtype, seed=3)
    want = compute(library, x, prev)
    outermost = np.ascontiguousarray(x.transpose(2, 0, 1)).transpose(1, 2, 0)
    every_other = np.zeros((1, 3, 2 * V), x.dtype)
    every_other[..., ::2] = x
    bytes_ = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = np.ndarray(x.shape, x.dtype, bytes_, offset=1)
    unaligned[...] = x
    for name, logits in {
        "outermost": outermost,
        "every other": every_other[..., ::2],
        "unaligned": unaligned,
    }.items():
        got = compute(library, logits, prev)
        assert_close(got, want, name)
        if name == "unaligned":
            np.testing.assert_array_equal(got.kl, want.kl)


def test_strides_of_zero_and_strided_outputs(library: Library) -> None:
    x, _ = random_rows(2000, FLOAT32, seed=4, n=1)
    wide = np.broadcast_to(x, (2, 5, 2000))
    tokens = np.full((2, 10), 77)
    assert library.call("cpu_token_stats", wide, None, None, -1, tokens[:, ::2], None, None, None, None) == OK
    assert (tokens[:, ::2] == x.argmax()).all()
    assert (tokens[:, 1::2] == 77).all()


def test_nothing_to_do(library: Library) -> None:
    for shape in ((0, 3, 5), (2, 0, 5)):
        compute(library, np.zeros(shape, np.float32), np.zeros(shape, np.float32))


def test_prev_rows(library: Library) -> None:
    x, _ = random_rows(3000, FLOAT32, seed=5, n=4)
    _, prev = random_rows(3000, FLOAT32, seed=6, n=2)
    rows = np.array([[1, -1, 0, 2]])
    got = compute(library, x, prev, rows)
    want = truth(x[:, [0, 2]], prev[:, [1, 0]])
    np.testing.assert_allclose(got.kl[:, [0, 2]], want.kl, rtol=1e-6)
    assert np.isnan(got.kl[:, [1, 3]]).all()
    np.testing.assert_array_equal(got.entropy, compute(library, x).entropy)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("V", [30, 1030, 5000])
def test_infinities(library: Library, isa: str, dtype: int, V: int) -> None:
    """-inf is p = 0; what is not a distribution says so; what prev rules out costs an infinite KL."""
    x, prev = (np.repeat(row[:, :1], 8, axis=1) for row in random_rows(V, dtype, seed=7))
    inf, nan = (cast(np.array(value), dtype) for value in (np.inf, np.nan))
    low = cast(np.array(-np.inf), dtype)
    x[0, 1, 1:] = low  # one token left
    x[0, 2, :] = low
    x[0, 3, V - 1] = inf
    x[0, 4, V // 2] = nan
    x[0, 5, ::2] = prev[0, 5, ::2] = low
    prev[0, 6, 3] = low
    x[0, 7, 3] = low
    got = compute(library, x, prev)
    np.testing.assert_array_equal(got.token[0, 2:5], -1)
    for name in STATISTICS:
        assert np.isnan(getattr(got, name)[0, 2:5]).all(), name
    good = [0, 1, 5, 7]
    with np.errstate(divide="ignore"):
        want = truth(x[:, good], prev[:, good])
    assert_close(Stats(*(getattr(got, name)[:, good] for name in ("token", *STATISTICS))), want)
    assert got.kl[0, 6] == np.inf
    np.testing.assert_allclose(got.entropy[0, 6], got.entropy[0, 0], rtol=1e-6)


@pytest.mark.parametrize("V", [30, 5000])
def test_prev_without_a_distribution_spoils_only_kl(library: Library, isa: str, V: int) -> None:
    x, prev = (np.repeat(row[:, :1], 3, axis=1) for row in random_rows(V, FLOAT32, seed=8))
    want = truth(x)
    prev[0, 0, V - 1] = np.nan
    prev[0, 1, V - 1] = np.inf
    prev[0, 2] = -np.inf
    got = compute(library, x, prev)
    assert np.isnan(got.kl).all()
    want.kl = got.kl
    assert_close(got, want)


@pytest.mark.parametrize("V", [30, 5000])
def test_logits_as_low_as_floats_go(library: Library, isa: str, V: int) -> None:
    """Models that mask with the lowest finite number, in one row, in the other and in both."""
    x, prev = (np.repeat(row[:, :1], 3, axis=1) for row in random_rows(V, FLOAT32, seed=9))
    lowest = np.finfo(np.float32).min
    x[0, [0, 2], 5:9] = lowest
    prev[0, [0, 1], 5:9] = lowest
    assert_close(compute(library, x, prev), truth(x, prev))


@given(
    V=st.integers(1025, 5000),
    at=st.lists(
        st.tuples(st.integers(0, 4999), st.sampled_from([np.nan, -np.inf, 40.0, 0.0, -3e38])), max_size=4
    ),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(FLOATS[1:]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_special_values_anywhere(
    library: Library, isa: str, V: int, at: list[tuple[int, float]], seed: int, dtype: int
) -> None:
    """The vector loops against the plain ones, which serve float64."""
    x, prev = random_rows(V, dtype, seed, n=1)
    with np.errstate(over="ignore"):
        for index, value in at:
            x[0, 0, index % V] = cast(np.array(value), dtype)
            prev[0, 0, (7 * index) % V] = cast(np.array(value), dtype)
    assert_close(compute(library, x, prev), compute(library, to_float64(x), to_float64(prev)))


@pytest.mark.parametrize("n", [1, 3])
def test_the_number_of_threads_does_not_change_a_bit(library: Library, isa: str, n: int) -> None:
    x, prev = random_rows(100_000, FLOAT32, seed=10, n=n)
    threads = ctypes.CDLL("libgomp.so.1")
    results = []
    try:
        for count in (1, 2, 4):
            threads.omp_set_num_threads(count)
            results.append(compute(library, x, prev))
    finally:
        threads.omp_set_num_threads(1)
    for other in results[1:]:
        for name in ("token", *STATISTICS):
            np.testing.assert_array_equal(getattr(other, name), getattr(results[0], name), err_msg=name)


def test_error_codes(library: Library) -> None:
    x, rows, token = np.zeros((2, 3, 5), np.float32), np.zeros((2, 3), np.int64), np.full((2, 3), 77)
    value = np.full((2, 3), 77.0)

    def code(
        logits: Any = x,
        prev: Any = None,
        prev_rows: Any = None,
        banned: int = -1,
        token: Any = token,
        confidence: Any = value,
    ) -> Any:
        outputs = (token, confidence, None, None, None)
        return library.call("cpu_token_stats", logits, prev, prev_rows, banned, *outputs)

    assert code() == OK
    token[:], value[:] = 77, 77
    assert code(logits=None) == NULL
    assert code(logits=view(x, data=None)) == NULL
    assert code(prev_rows=rows) == NULL
    assert code(logits=x[0]) == SHAPE
    assert code(logits=np.zeros((2, 3, 0), np.float32)) == SHAPE
    assert code(logits=view(x, shape=(2, -3, 5))) == SHAPE
    assert code(logits=view(x, stride=(15, 5, -1))) == SHAPE
    assert code(logits=view(x, ndim=7)) == SHAPE
    assert code(logits=rows[..., None]) == DTYPE
    assert code(logits=view(x, dtype=6)) == DTYPE
    assert code(logits=view(x, dtype=-1)) == DTYPE
    assert code(prev=x[:, :2]) == SHAPE
    assert code(prev=np.zeros((2, 3, 5))) == DTYPE
    assert code(prev=x, prev_rows=rows[:1]) == SHAPE
    assert code(prev=x, prev_rows=value) == DTYPE
    assert code(banned=5) == VALUE
    assert code(banned=-2) == VALUE
    assert code(token=token[:, :2]) == SHAPE
    assert code(token=view(token, stride=(0, 1))) == SHAPE
    assert code(token=value) == DTYPE
    assert code(confidence=np.zeros((2, 3), np.float16)) == DTYPE
    assert (token == 77).all()
    assert (value == 77).all()
