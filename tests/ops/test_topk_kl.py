"""topk_kl against the definition with dictionaries."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import dlmkern
from tests.ops.support import assert_close, assert_same, make_logits, opcheck

OP = "topk_kl"


def truth(curr: dlmkern.TopKSnapshot, prev: dlmkern.TopKSnapshot) -> np.ndarray:
    shape = curr.floor.shape
    k = curr.ids.shape[-1]
    rows = [x.cpu().reshape(-1, k).tolist() for x in (curr.ids, curr.logp, prev.ids, prev.logp)]
    result = []
    for ids, logp, prev_ids, prev_logp, floor in zip(*rows, prev.floor.flatten().tolist(), strict=True):
        q = dict(zip(prev_ids, prev_logp, strict=True))
        terms = [
            math.exp(lp) * (lp - q.get(v, floor)) for v, lp in zip(ids, logp, strict=True) if lp != -math.inf
        ]
        result.append(math.nan if any(map(math.isnan, terms)) else math.fsum(terms))
    return np.array(result).reshape(shape)


def snapshots(shape: tuple[int, ...], k: int, device: torch.device) -> list[dlmkern.TopKSnapshot]:
    first = make_logits(shape, torch.float32, device, 1)
    second = first + 0.7 * make_logits(shape, torch.float32, device, 2)
    with dlmkern.use_backend("reference"):
        return [dlmkern.topk_snapshot(x, k) for x in (first, second)]


@pytest.mark.parametrize(("n", "vocabulary", "k"), [(1, 1, 1), (3, 9, 4), (4, 100, 64), (2, 64, 64)])
def test_against_truth(backend: str, device: torch.device, n: int, vocabulary: int, k: int) -> None:
    prev, curr = snapshots((2, n, vocabulary), k, device)
    expected = truth(curr, prev)
    kl = dlmkern.topk_kl(curr, prev)
    assert kl.dtype == torch.float64
    assert_close(kl, expected, 1e-12, relative=1e-12)
    alone = dlmkern.topk_kl(*(dlmkern.TopKSnapshot(*(x[1] for x in s)) for s in (curr, prev)))
    assert torch.equal(alone, kl[1])
    assert_close(dlmkern.topk_kl(curr, curr), np.zeros((2, n)), 0.0)


def test_whole_vocabulary_gives_the_exact_kl(backend: str, device: torch.device) -> None:
    first, second = (make_logits((1, 3, 20), torch.float32, device, seed) for seed in (3, 4))
    with dlmkern.use_backend("reference"):
        curr, prev = dlmkern.topk_snapshot(first, 20), dlmkern.topk_snapshot(second, 20)
        exact = dlmkern.token_stats(first, second, out_dtype=torch.float64).kl
    assert exact is not None
    assert_close(dlmkern.topk_kl(curr, prev), exact.cpu().numpy(), 1e-12, relative=1e-12)


def test_without_the_tail_it_can_be_negative(backend: str, device: torch.device) -> None:
    prev = dlmkern.TopKSnapshot(*_one_row(device, [0], [0.6], 0.4))
    curr = dlmkern.TopKSnapshot(*_one_row(device, [0], [0.5], 0.5))
    assert_close(dlmkern.topk_kl(curr, prev), np.array([0.5 * math.log(0.5 / 0.6)]), 1e-15)


def test_special_values(backend: str, device: torch.device) -> None:
    logits = torch.zeros((4, 5), device=device)
    logits[0] = math.nan
    logits[1, 1:] = -math.inf  # p = 0 for all but one
    logits[2, 0] = -math.inf
    with dlmkern.use_backend("reference"):
        curr = dlmkern.topk_snapshot(logits, 3)
        prev = dlmkern.topk_snapshot(logits.flip(0), 3)
        whole = [dlmkern.topk_snapshot(x, 5) for x in (logits, logits[[0, 0, 3, 2]])]
    for now, before in ((curr, prev), (prev, curr), (curr, curr), whole):
        expected = truth(now, before)
        assert_close(dlmkern.topk_kl(now, before), expected, 1e-12)
    assert truth(curr, curr)[1] == 0
    assert truth(*whole)[3] == math.inf  # a token with p_prev = 0 < p among the ids
    assert math.isnan(truth(*whole)[1])


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    prev, curr = snapshots((2, 3, 30), 8, device)
    expected = dlmkern.topk_kl(curr, prev)
    strided = [
        dlmkern.TopKSnapshot(
            s.ids.permute(2, 1, 0).contiguous().permute(2, 1, 0),
            s.logp.repeat_interleave(2, dim=-1)[..., ::2],
            torch.stack([s.floor, s.floor])[1].T.contiguous().T,
        )
        for s in (curr, prev)
    ]
    assert_same(dlmkern.topk_kl(*strided), expected)


def test_empty(backend: str, device: torch.device) -> None:
    prev, curr = snapshots((2, 3, 30), 8, device)
    for cut in (slice(0, 0), slice(None)):
        parts = [dlmkern.TopKSnapshot(*(x[cut, :0] for x in s)) for s in (curr, prev)]
        assert dlmkern.topk_kl(*parts).shape == parts[0].floor.shape


def test_errors() -> None:
    snapshot = dlmkern.topk_snapshot(torch.zeros(2, 3, 9), 4)
    fewer = dlmkern.topk_snapshot(torch.zeros(2, 3, 9), 3)
    ids, logp, floor = snapshot
    for curr, prev, error, message in (
        (ids, snapshot, TypeError, "curr: expected a TopKSnapshot"),
        (snapshot, (ids, logp), TypeError, "prev: expected a TopKSnapshot"),
        ((logp, logp, floor), snapshot, TypeError, "curr.ids: expected dtype"),
        ((ids[0, 0], logp, floor), snapshot, ValueError, "curr.ids: expected shape"),
        ((ids, ids, floor), snapshot, TypeError, "curr.logp: expected dtype"),
        (snapshot, fewer, ValueError, "prev.ids: expected shape"),
        (snapshot, (ids, logp, floor[0]), ValueError, "prev.floor: expected shape"),
        (snapshot, (ids, logp, None), TypeError, "prev.floor: expected a tensor"),
        (snapshot, (ids, logp.to("meta"), floor), ValueError, "prev.logp: expected device"),
    ):
        with pytest.raises(error, match=message):
            dlmkern.topk_kl(curr, prev)  # type: ignore[arg-type]


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    prev, curr = snapshots((2, 3, 9), 4, device)
    opcheck(OP, curr.ids, curr.logp, *prev)
    compiled = torch.compile(dlmkern.topk_kl, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(curr, prev), dlmkern.topk_kl(curr, prev))


def _one_row(
    device: torch.device, ids: list[int], probabilities: list[float], tail: float
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.tensor([ids], device=device),
        torch.tensor([probabilities], dtype=torch.float64, device=device).log(),
        torch.tensor([math.log(tail)], dtype=torch.float64, device=device),
    )


def test_a_probability_that_underflows_adds_nothing(backend: str, device: torch.device) -> None:
    curr = torch.tensor([[0.0, -800.0]], device=device)
    prev = torch.tensor([[0.0, -math.inf]], device=device)
    with dlmkern.use_backend("reference"):
        snapshots = [dlmkern.topk_snapshot(x, 2) for x in (curr, prev)]
    with dlmkern.use_backend(backend):
        assert dlmkern.topk_kl(*snapshots).tolist() == [0.0]
