"""topk_snapshot against sorted exact sums."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import dlmkern
from tests.ops.support import DTYPES, assert_close, assert_same, dtypes_of, layouts, make_logits, opcheck
from tests.ops.test_token_stats import row_truth

OP = "topk_snapshot"


def row_snapshot(x: list[float], k: int, banned: int | None = None) -> tuple[list[int], list[float], float]:
    ids = [v for v in range(len(x)) if v != banned]
    token, _, logsumexp, _ = row_truth([x[v] for v in ids])
    if token < 0:
        return [-1] * k, [math.nan] * k, math.nan
    ids.sort(key=lambda v: (-x[v], v))
    tail = math.fsum(math.exp(x[v] - logsumexp) for v in ids[k:])
    floor = math.log(max(tail, 1e-12) / max(len(ids) - k, 1))
    return ids[:k], [x[v] - logsumexp for v in ids[:k]], floor


def truth(logits: Tensor, k: int, banned: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = [row_snapshot(x, k, banned) for x in logits.double().cpu().flatten(0, -2).tolist()]
    ids, logp, floor = (np.array(part) for part in zip(*rows, strict=True))
    shape = logits.shape[:-1]
    return ids.reshape(*shape, k), logp.reshape(*shape, k), floor.reshape(shape)


def check(snapshot: dlmkern.TopKSnapshot, expected: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    assert (snapshot.ids.dtype, snapshot.logp.dtype, snapshot.floor.dtype) == (
        torch.int64,
        *[torch.float64] * 2,
    )
    assert_same(snapshot.ids, expected[0])
    assert_close(snapshot.logp, expected[1], 1e-6, relative=1e-6)
    assert_close(snapshot.floor, expected[2], 1e-6, relative=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_truth(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    if dtype not in dtypes_of(backend):
        pytest.skip(f"{backend} does not take {dtype} logits")
    for n, vocabulary, k in ((1, 1, 1), (3, 7, 3), (2, 64, 64), (3, 100, 64), (2, 500, 64), (1, 3000, 5)):
        logits = make_logits((2, n, vocabulary), dtype, device, vocabulary)
        check(dlmkern.topk_snapshot(logits, k), truth(logits, k))
        if k < vocabulary:
            banned = int(logits[0, 0].argmax())
            check(dlmkern.topk_snapshot(logits, k, banned_token=banned), truth(logits, k, banned))


def test_tail_does_not_cancel(backend: str, device: torch.device) -> None:
    # in float32, 1 - sum of the kept probabilities would be 0 here
    logits = torch.full((1, 1, 80), -25.0, device=device)
    logits[..., 3] = 0.0
    floor = dlmkern.topk_snapshot(logits, 2).floor
    assert_close(floor, np.array([[-25.0]]), 1e-5)


def test_tail_has_a_least_mass(backend: str, device: torch.device) -> None:
    logits = torch.full((1, 2, 6), -200.0, device=device)
    logits[..., 3] = 0.0
    snapshot = dlmkern.topk_snapshot(logits, 2)
    assert_close(snapshot.floor, np.full((1, 2), math.log(1e-12 / 4)), 1e-9)
    everything = dlmkern.topk_snapshot(logits, 6)
    assert_close(everything.floor, np.full((1, 2), math.log(1e-12)), 1e-9)


def test_ties_go_to_the_lower_id(backend: str, device: torch.device) -> None:
    for vocabulary, k in ((9, 4), (200, 64), (1500, 40)):
        generator = torch.Generator().manual_seed(k)
        logits = torch.randint(0, 4, (1, 3, vocabulary), generator=generator).float().to(device)
        check(dlmkern.topk_snapshot(logits, k), truth(logits, k))


def test_special_rows(backend: str, device: torch.device) -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [
            [0.0, nan, 1.0, 2.0, 0.0],
            [0.0, inf, 1.0, 2.0, 0.0],
            [-inf, -inf, -inf, -inf, -inf],
            [-inf, 3.0, -inf, 1.0, -inf],
            [-inf, -inf, -inf, -inf, 9.0],
        ],
        device=device,
    )
    check(dlmkern.topk_snapshot(logits, 4), truth(logits, 4))
    # the banned id stays out even where nothing but -inf is left to fill the places
    check(dlmkern.topk_snapshot(logits, 4, banned_token=1), truth(logits, 4, 1))
    assert (dlmkern.topk_snapshot(logits, 4, banned_token=0).ids != 0).all()


def test_fault_padded_vocabulary_shifts_the_floor(backend: str, device: torch.device) -> None:
    # The official code counts the padded rows of the embedding as tokens. Slicing them off gives the floor of
    # the tokens alone, and is a view, not a copy.
    logits = make_logits((1, 2, 512), torch.float32, device, 1)
    logits[..., 500:] = 0.0
    sliced = dlmkern.topk_snapshot(logits[..., :500])
    check(sliced, truth(logits[..., :500].clone(), 64))
    padded = dlmkern.topk_snapshot(logits)
    check(padded, truth(logits, 64))
    assert ((padded.floor - sliced.floor).abs() > 1e-3).all()


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = make_logits((2, 3, 90), dtype, device, 2)
        expected = truth(logits, 10)
        for _, view in layouts(logits):
            check(dlmkern.topk_snapshot(view, 10), expected)


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (0, 5)])
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    snapshot = dlmkern.topk_snapshot(torch.zeros(shape, device=device), 2)
    assert [x.shape for x in snapshot] == [(*shape[:-1], 2), (*shape[:-1], 2), shape[:-1]]


def test_errors() -> None:
    x = torch.zeros(2, 3, 5)
    for arguments, keywords, error, message in (
        ((x.long(),), {}, TypeError, "logits: expected dtype"),
        ((x[0, 0],), {}, ValueError, "logits: expected shape"),
        ((x,), {}, ValueError, "k: expected 1 <= k <= 5"),  # the official code crashes at K = 64 > V
        ((x, 0), {}, ValueError, "k: expected 1 <= k <= 5"),
        ((x, -1), {}, ValueError, "k: expected 1 <= k <= 5"),
        ((x, 5), {"banned_token": 0}, ValueError, "k: expected 1 <= k <= 4"),
        ((x, 2.0), {}, TypeError, "k: expected an int"),
        ((x, 2), {"banned_token": 5}, ValueError, "banned_token: expected an id"),
    ):
        with pytest.raises(error, match=message):
            dlmkern.topk_snapshot(*arguments, **keywords)  # type: ignore[arg-type]


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    x = make_logits((2, 3, 9), torch.float32, device, 3)
    opcheck(OP, x, 4, 2)
    compiled = torch.compile(
        lambda a: tuple(dlmkern.topk_snapshot(a, 4)), fullgraph=True, backend="aot_eager"
    )
    for one, other in zip(compiled(x), dlmkern.topk_snapshot(x, 4), strict=True):
        assert torch.equal(one, other)
