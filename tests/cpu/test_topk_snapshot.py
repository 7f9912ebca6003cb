"""topk_snapshot in C: every instruction set against float64."""

from __future__ import annotations

import numpy as np
import pytest

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


def compute(library: Library, logits: Array, k: int, banned: int = -1) -> tuple[Array, Array, Array]:
    shape = logits.shape[:2]
    ids, logp, floor = np.full((*shape, k), 77), np.full((*shape, k), 77.0), np.full(shape, 77.0)
    assert library.call("cpu_topk_snapshot", logits, banned, ids, logp, floor) == OK
    return ids, logp, floor


def truth(logits: Array, k: int, banned: int = -1) -> tuple[Array, Array, Array]:
    x = to_float64(logits)
    V = x.shape[-1]
    order = np.argsort(-x, axis=-1, kind="stable")
    if banned >= 0:
        order = order[order != banned].reshape(*x.shape[:2], V - 1)
        x[..., banned] = -np.inf
        V -= 1
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        logp = np.take_along_axis(np.log(p), order[..., :k], -1)
    tail = np.take_along_axis(p, order[..., k:], -1).sum(-1)
    return order[..., :k], logp, np.log(np.maximum(tail, 1e-12) / max(V - k, 1))


def assert_agrees(library: Library, logits: Array, k: int, banned: int = -1) -> None:
    got, want = compute(library, logits, k, banned), truth(logits, k, banned)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], atol=1e-6)
    np.testing.assert_allclose(got[2], want[2], atol=1e-6)


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BFLOAT16, FLOAT16])
@pytest.mark.parametrize(
    ("V", "k"), [(1, 1), (2, 2), (70, 64), (1024, 5), (1500, 1500), (5003, 64), (40000, 16)]
)
def test_agrees_with_float64(library: Library, isa: str, dtype: int, V: int, k: int) -> None:
    """16-bit logits have ties at the k-th place: the lower ids are taken."""
    x = cast(np.random.default_rng(V).normal(scale=3, size=(2, 3, V)), dtype)
    assert_agrees(library, x, k)
    if k < V:
        assert_agrees(library, x, k, banned=0)
        assert_agrees(library, x, k, banned=int(truth(x, 1)[0][0, 0, 0]))


@pytest.mark.parametrize("V", [100, 3000])
def test_a_tail_that_one_minus_the_sum_would_lose(library: Library, isa: str, V: int) -> None:
    x = np.full((1, 1, V), -20, np.float32)
    x[..., :4] = 3
    assert_agrees(library, x, 4)
    assert_agrees(library, x, 2)


@pytest.mark.parametrize("V", [90, 3000])
def test_special_values(library: Library, isa: str, V: int) -> None:
    x = np.random.default_rng(0).normal(size=(1, 5, V)).astype(np.float32)
    x[0, 0, V - 1] = np.nan
    x[0, 1, V // 2] = np.inf
    x[0, 2] = -np.inf
    x[0, 3, 10:] = -np.inf  # fewer likely tokens than k
    ids, logp, floor = compute(library, x, 64)
    assert (ids[0, :3] == -1).all()
    assert np.isnan(logp[0, :3]).all()
    assert np.isnan(floor[0, :3]).all()
    assert_agrees(library, x[:, 3:], 64)
    np.testing.assert_array_equal(logp[0, 3, 10:], -np.inf)


def test_layout(library: Library, isa: str) -> None:
    x = np.random.default_rng(1).normal(size=(2000, 1, 3)).astype(np.float32).transpose(1, 2, 0)
    assert_agrees(library, x, 20)


def test_error_codes(library: Library) -> None:
    x = np.zeros((1, 2, 5), np.float32)
    ids, logp, floor = np.full((1, 2, 3), 77), np.zeros((1, 2, 3)), np.zeros((1, 2))
    assert library.call("cpu_topk_snapshot", None, -1, ids, logp, floor) == NULL
    assert library.call("cpu_topk_snapshot", x, -1, None, logp, floor) == NULL
    assert library.call("cpu_topk_snapshot", x, 5, ids, logp, floor) == VALUE
    assert library.call("cpu_topk_snapshot", x, -1, ids[..., :0], logp[..., :0], floor) == SHAPE
    assert library.call("cpu_topk_snapshot", x[..., :2], -1, ids, logp, floor) == SHAPE
    assert library.call("cpu_topk_snapshot", x[..., :3], 0, ids, logp, floor) == SHAPE
    assert library.call("cpu_topk_snapshot", x, -1, ids, logp[..., :2], floor) == SHAPE
    assert library.call("cpu_topk_snapshot", x, -1, ids, logp.astype(np.float32), floor) == DTYPE
    assert library.call("cpu_topk_snapshot", x, -1, view(ids, stride=(6, 3, 0)), logp, floor) == SHAPE
    assert (ids == 77).all()
