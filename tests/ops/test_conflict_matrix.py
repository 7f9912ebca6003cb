"""conflict_matrix against the definition, element by element."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import dlmkern
from tests.ops.support import DTYPES, assert_close, assert_same, dtypes_of, layouts, make_logits, opcheck
from tests.ops.test_token_stats import row_truth

OP = "conflict_matrix"


def truth(logits: Tensor, token: Tensor | None = None) -> np.ndarray:
    """D of one sequence [n, V] -> [n, n]; the tokens are the best ones unless given."""
    rows = logits.double().cpu().tolist()
    stats = [row_truth(x) for x in rows]
    tokens = [s[0] for s in stats] if token is None else token.tolist()

    def log_p(i: int, j: int) -> float:
        if not (0 <= tokens[j] < len(rows[i]) and 0 <= tokens[i] < len(rows[i])):
            return math.nan
        return rows[i][tokens[j]] - stats[i][2]

    n = len(rows)
    return np.array([[log_p(i, j) + log_p(j, i) for j in range(n)] for i in range(n)]).reshape(n, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_truth(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    if dtype not in dtypes_of(backend):
        pytest.skip(f"{backend} does not take {dtype} logits")
    sizes = ((1, 1), (2, 3), (5, 64), (33, 20), (9, 1200))
    if backend == "triton":  # in the interpreter every program takes milliseconds
        sizes = ((1, 1), (5, 64), (33, 20) if dtype == torch.float32 else (9, 1200))
    for n, vocabulary in sizes:
        logits = make_logits((2, n, vocabulary), dtype, device, n)
        expected = np.stack([truth(x) for x in logits])
        conflict = dlmkern.conflict_matrix(logits)
        assert conflict.dtype == torch.float32
        assert_close(conflict, expected, 2e-6, relative=2e-6)
        assert torch.equal(conflict, conflict.mT)
        stats = dlmkern.token_stats(logits)
        given = dlmkern.conflict_matrix(logits, stats.token, stats.logsumexp)
        assert_close(given, expected, 1e-5, relative=1e-5)
        alone = dlmkern.conflict_matrix(logits[1], stats.token[1], stats.logsumexp[1])
        assert torch.equal(alone, given[1])


def test_the_sum_is_formed_in_float64(backend: str, device: torch.device) -> None:
    # in float32, 1e8 + 3 - 1e8 is 0 or 8
    logits = torch.tensor([[[3.0, 1e8], [1e8, 5.0]]], device=device)
    token = torch.tensor([[0, 1]], device=device)
    logsumexp = torch.full((1, 2), 1e8, dtype=torch.float64, device=device)
    expected = np.array([[[6 - 2e8, 0.0], [0.0, 10 - 2e8]]], dtype=np.float32)
    assert_same(dlmkern.conflict_matrix(logits, token, logsumexp), expected)
    # and rounded once, at the end
    logits = make_logits((1, 20, 30), torch.float32, device, 7)
    stats = dlmkern.token_stats(logits, out_dtype=torch.float64)
    x, token, lse = (value[0].cpu().numpy() for value in (logits.double(), stats.token, stats.logsumexp))
    log_p = x[:, token] - lse[:, None]
    expected = (log_p + log_p.T).astype(np.float32)
    assert_same(dlmkern.conflict_matrix(logits, stats.token, stats.logsumexp)[0], expected)


def test_special_values(backend: str, device: torch.device) -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [[2.0, 0.0, -inf], [0.0, 2.0, 1.0], [nan, 0.0, 0.0], [0.0, -inf, 3.0]], device=device
    )
    expected = truth(logits)
    assert np.isnan(expected[2]).all()
    assert expected[0, 3] == -inf
    assert_close(dlmkern.conflict_matrix(logits), expected, 1e-6)

    finite = make_logits((4, 6), torch.float32, device, 3)
    token = torch.tensor([0, -1, 6, 5], device=device)
    logsumexp = finite.double().logsumexp(-1)
    expected = truth(finite, token)
    assert np.isfinite(expected[[0, 0, 3, 3], [0, 3, 0, 3]]).all()
    assert np.isnan(expected[1:3]).all()
    assert_close(dlmkern.conflict_matrix(finite, token, logsumexp), expected, 2e-6)


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = make_logits((2, 5, 40), dtype, device, 4)
        stats = dlmkern.token_stats(logits, out_dtype=torch.float64)
        expected = dlmkern.conflict_matrix(logits, stats.token, stats.logsumexp)
        for name, view in layouts(logits):
            strided = stats.token.repeat_interleave(2, dim=1)[:, ::2]
            assert_same(dlmkern.conflict_matrix(view, strided, stats.logsumexp), expected, name)


def test_positions_may_be_permuted(backend: str, device: torch.device) -> None:
    logits = make_logits((7, 30), torch.float32, device, 5)
    stats = dlmkern.token_stats(logits, out_dtype=torch.float64)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0)).to(device)
    conflict = dlmkern.conflict_matrix(logits, stats.token, stats.logsumexp)
    permuted = dlmkern.conflict_matrix(logits[order], stats.token[order], stats.logsumexp[order])
    assert torch.equal(permuted, conflict[order][:, order])


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (0, 5)])
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    assert dlmkern.conflict_matrix(torch.zeros(shape, device=device)).shape == (*shape[:-1], shape[-2])


def test_errors() -> None:
    x, token, lse = torch.zeros(2, 3, 5), torch.zeros(2, 3).long(), torch.zeros(2, 3)
    for arguments, error, message in (
        ((x.long(),), TypeError, "logits: expected dtype"),
        ((x[0, 0],), ValueError, "logits: expected shape"),
        ((x, token), ValueError, "logsumexp: expected token and logsumexp together"),
        ((x, None, lse), ValueError, "token: expected token and logsumexp together"),
        ((x, lse, lse), TypeError, "token: expected dtype"),
        ((x, token[:1], lse), ValueError, "token: expected shape"),
        ((x, token, token), TypeError, "logsumexp: expected dtype"),
        ((x, token, lse[0]), ValueError, "logsumexp: expected shape"),
        ((x, token.to("meta"), lse), ValueError, "token: expected device"),
    ):
        with pytest.raises(error, match=message):
            dlmkern.conflict_matrix(*arguments)


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    x = make_logits((2, 3, 9), torch.float32, device, 6)
    stats = dlmkern.token_stats(x)
    opcheck(OP, x, stats.token, stats.logsumexp)
    compiled = torch.compile(dlmkern.conflict_matrix, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), dlmkern.conflict_matrix(x))
