"""`get_transfer_index` and `get_transfer_index_dynamic` against the rules, written out row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlmkern.drop_in.fast_dllm import get_transfer_index, get_transfer_index_dynamic
from tests.drop_in.support import defaults

B, L, V = 5, 12, 31


def batch(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, masks and tokens; the first row has no mask, the second is all masks."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((B, L, V), generator=generator, dtype=torch.float64) * 4
    mask = torch.rand((B, L), generator=generator) < torch.tensor([[0.0], [1.0], [0.1], [0.5], [0.8]])
    x = torch.randint(V, (B, L), generator=generator)
    return logits.to(dtype), mask, x


def plain(
    logits: Tensor, mask: Tensor, x: Tensor, commits: Callable[[int, list[float]], int]
) -> tuple[Tensor, Tensor]:
    """Commits the first `commits(row, confidences)` positions by falling confidence."""
    p = torch.softmax(logits.double(), dim=-1)
    x0, selected = x.clone(), torch.zeros_like(mask)
    for row in range(len(x)):
        positions = mask[row].nonzero().flatten().tolist()
        for position in positions:
            x0[row, position] = logits[row, position].argmax()
        confidence = {position: float(p[row, position].max()) for position in positions}
        order = sorted(positions, key=lambda position: -confidence[position])
        if order:
            n = commits(row, [confidence[position] for position in order])
            selected[row, order[:n]] = True
    return x0, selected


def equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return a[0].tolist() == b[0].tolist() and a[1].tolist() == b[1].tolist()


def official_factor(confidences: list[float], factor: float) -> int:
    """By a scan that stops at the first rank which fails; stopping at the last looks like passing."""
    m = len(confidences)
    limits = [-1.0] + [1 - factor / (n + 1) for n in range(2, m + 1)]
    stop = next((i for i in range(m) if confidences[i] < limits[i]), m - 1)
    return stop + 1 if stop in (0, m - 1) else stop


dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
seeds = pytest.mark.parametrize("seed", range(4))


@dtypes
@seeds
def test_counts(seed: int, dtype: torch.dtype) -> None:
    """A count above the number of masks commits these; the official code then writes over other tokens."""
    logits, mask, x = batch(seed, dtype)
    counts = [3, 4, 100, 0, 2]
    expected = plain(logits, mask, x, lambda row, _: counts[row])
    assert equal(get_transfer_index(logits, 0.0, "low_confidence", mask, x, torch.tensor(counts)), expected)
    column = torch.tensor(counts, dtype=torch.int32).unsqueeze(1)
    assert equal(get_transfer_index(logits, 0.0, "low_confidence", mask, x, column), expected)
    x0, selected = get_transfer_index(logits, 0.0, "low_confidence", mask, x, 100)
    assert torch.equal(selected, mask)
    assert torch.equal(torch.where(selected, x0, x)[~mask], x[~mask])


@dtypes
@seeds
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_threshold(threshold: float, seed: int, dtype: torch.dtype) -> None:
    logits, mask, x = batch(seed, dtype)
    expected = plain(logits, mask, x, lambda _, c: max(1, sum(value >= threshold for value in c)))
    for count in (None, torch.zeros(B, dtype=torch.int64)):
        found = get_transfer_index(logits, 0.0, "low_confidence", mask, x, count, threshold)
        assert equal(found, expected)


@dtypes
@seeds
@pytest.mark.parametrize("factor", [0.5, 1, 2.5])
def test_factor(factor: float, seed: int, dtype: torch.dtype) -> None:
    logits, mask, x = batch(seed, dtype)

    def paper(_: int, c: list[float]) -> int:
        return max([1] + [n for n in range(1, len(c) + 1) if (n + 1) * (1 - c[n - 1]) < factor])

    args = (logits, 0.0, "low_confidence", mask, x, None)
    assert equal(get_transfer_index_dynamic(*args, factor=factor), plain(logits, mask, x, paper))
    expected = plain(logits, mask, x, lambda _, c: official_factor(c, factor))
    assert equal(get_transfer_index_dynamic(*args, factor, compat="official"), expected)


def test_official_and_paper_differ() -> None:
    """Guards `test_factor` against batches that cannot tell them apart."""
    paper, official = (
        [
            get_transfer_index_dynamic(logits, 0.0, "low_confidence", mask, x, None, 1, compat=compat)[
                1
            ].sum()
            for logits, mask, x in (batch(seed, torch.float64) for seed in range(4))
        ]
        for compat in (None, "official")
    )
    assert paper != official


def test_tokens_are_drawn_at_the_temperature() -> None:
    torch.manual_seed(0)
    n, temperature = 20000, 0.7
    row = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0])
    logits = row.expand(1, n, 5)
    mask, x = torch.ones(1, n, dtype=torch.bool), torch.zeros(1, n, dtype=torch.int64)
    x0, selected = get_transfer_index(logits, temperature, "low_confidence", mask, x, None, 0.35)
    p = torch.softmax(row.double() / temperature, 0)
    frequency = x0.flatten().bincount(minlength=5) / n
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / n).sqrt()).all()
    # Confidence is that at temperature 1, 0.43 for the likeliest token and 0.26 for the next.
    assert torch.equal(selected, x0 == 0)


def test_random_remasking() -> None:
    torch.manual_seed(0)
    logits, mask, x = batch(0, torch.float32)
    chosen = torch.zeros(B, L)
    for _ in range(200):
        x0, selected = get_transfer_index(logits, 0.0, "random", mask, x, torch.ones(B, dtype=torch.int64))
        assert torch.equal(selected.sum(1), mask.any(1).long())
        assert equal((x0, mask), plain(logits, mask, x, lambda _, c: len(c)))
        chosen += selected
    assert (chosen[1] > 0).all()
    assert chosen[1].max() < 60  # of 200, where 200 / 12 are expected


def test_no_gradient_and_no_change() -> None:
    logits, mask, x = batch(0, torch.float32)
    before = logits.clone(), mask.clone(), x.clone()
    get_transfer_index(logits.requires_grad_(), 0.5, "low_confidence", mask, x, 2)
    assert torch.equal(logits, before[0])
    assert torch.equal(mask, before[1])
    assert torch.equal(x, before[2])


def test_signatures() -> None:
    shared = ["logits", "temperature", "remasking", "mask_index", "x", "num_transfer_tokens"]
    positional, other = defaults(get_transfer_index)
    assert list(positional) == [*shared, "threshold"]
    assert positional["threshold"] is None
    assert other == set()
    positional, other = defaults(get_transfer_index_dynamic)
    assert list(positional) == [*shared, "factor"]
    assert positional["factor"] == 1
    assert other == {"compat"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": [[[1.0]]]}, TypeError, "logits must be a tensor, got list"),
        ({"logits": torch.zeros(L, V)}, ValueError, r"logits must have shape \[B, L, V\]"),
        ({"logits": torch.zeros(B, L, V, dtype=torch.int64)}, TypeError, "logits: expected dtype"),
        ({"mask_index": torch.ones(B, L)}, TypeError, "mask_index: expected dtype bool"),
        ({"mask_index": torch.ones(B, L + 1, dtype=torch.bool)}, ValueError, "mask_index: expected shape"),
        ({"x": torch.zeros(B, L)}, TypeError, "x: expected dtype int64"),
        ({"x": torch.zeros(L, dtype=torch.int64)}, ValueError, "x: expected shape"),
        ({"temperature": -0.5}, ValueError, "temperature must be a finite number"),
        ({"remasking": "entropy"}, ValueError, "remasking must be"),
        ({"num_transfer_tokens": None}, ValueError, "num_transfer_tokens is needed"),
        (
            {"num_transfer_tokens": torch.ones(B, 2).long()},
            ValueError,
            r"num_transfer_tokens must have shape \[5\]",
        ),
        ({"threshold": 1.5}, ValueError, r"threshold must lie in \[0, 1\], got 1.5"),
        ({"logits": torch.full((B, L, V), torch.nan)}, FloatingPointError, "row 1: the logits of position 0"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    logits, mask, x = batch(0, torch.float32)
    good = {
        "logits": logits,
        "temperature": 0.0,
        "remasking": "low_confidence",
        "mask_index": mask,
        "x": x,
        "num_transfer_tokens": 1,
    }
    with pytest.raises(error, match=message):
        get_transfer_index(**(good | changes))


def test_bad_factor() -> None:
    logits, mask, x = batch(0, torch.float32)
    with pytest.raises(ValueError, match="factor"):
        get_transfer_index_dynamic(logits, 0.0, "low_confidence", mask, x, None, 0.0)
