"""The Triton kernels under Triton's interpreter, against a float64 truth: slices, strides, special values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .interpreter import INTERPRETED, interpreted, randn, speed_up

if INTERPRETED:
    from dlmkern.triton_kernels import (
        cap_select,
        conflict_matrix,
        independent_set,
        token_stats,
    )

    speed_up()

INF, NAN = float("inf"), float("nan")
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_own_process(run_again: Callable[[str, bool], None]) -> None:
    run_again(__file__, True)


# ---- token_stats


def stats_truth(logits: Tensor, prev: Tensor | None, banned: int) -> list[Tensor]:
    """token, confidence, logsumexp, entropy, kl of [B, n, V] in float64, from the definitions."""

    def distribution(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.double().clone()
        if banned >= 0:
            x[..., banned] = -INF
        bad = x.isnan().any(-1) | (x == INF).any(-1) | (x == -INF).all(-1)
        return x.masked_fill(bad[..., None], NAN), bad

    x, bad = distribution(logits)
    log_p = x.log_softmax(-1)
    p = log_p.exp()
    top, token = x.max(-1)
    others = torch.where(torch.arange(x.shape[-1]) == token[..., None], 0.0, (x - top[..., None]).exp()).sum(
        -1
    )
    entropy = -torch.where(log_p == -INF, 0.0, p * log_p).sum(-1)
    others.masked_fill_(bad, NAN)
    truth = [token.masked_fill(bad, -1), 1 / (1 + others), top + others.log1p(), entropy]
    if prev is not None:
        log_q = distribution(prev)[0].log_softmax(-1)
        terms = torch.where(log_p == -INF, 0.0, torch.where(log_q == -INF, INF, p * (log_p - log_q)))
        truth.append(
            (terms + 0.0 * log_q.nan_to_num(0.0, 0.0, 0.0)).sum(-1).masked_fill(log_q.isnan().any(-1), NAN)
        )
    return truth


def check_stats(
    logits: Tensor,
    prev: Tensor | None = None,
    prev_rows: Tensor | None = None,
    banned: int = -1,
    out_dtype: torch.dtype = torch.float64,
) -> None:
    got = token_stats.token_stats(logits, prev, prev_rows, banned, out_dtype)
    aligned = prev
    if prev is not None and prev_rows is not None:
        known = (prev_rows >= 0) & (prev_rows < prev.shape[1])
        index = prev_rows.where(known, 0)[..., None].expand(-1, -1, prev.shape[-1])
        aligned = prev.gather(1, index).masked_fill(~known[..., None], NAN)
    want = stats_truth(logits, aligned, banned)
    assert torch.equal(got[0], want[0])
    for name, a, b in zip(("confidence", "logsumexp", "entropy", "kl"), got[1:], want[1:], strict=False):
        assert a.dtype == out_dtype
        a, b = (
            t.double().where(t < 1e35, INF).where(~t.isnan(), NAN) for t in (a, b)
        )  # beyond float32 is infinite
        torch.testing.assert_close(
            a, b, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    if prev is None:
        assert got[4].numel() == 0
        assert got[4].dtype == out_dtype


@pytest.fixture(params=[1, 4096], ids=["whole rows", "sliced rows"])
def slicing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 logits; a row is walked by one program, or by as many as the table allows."""
    monkeypatch.setattr(token_stats, "_BLOCK", dict.fromkeys(token_stats._BLOCK, 128))
    monkeypatch.setattr(token_stats, "_PROGRAMS", request.param)


@interpreted
@pytest.mark.parametrize("rows", [1, 3, 64, 5000])
@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 5000, 126464, 300_001])
@pytest.mark.parametrize("size", [2, 4])
def test_every_logit_is_in_one_slice(rows: int, vocabulary: int, size: int) -> None:
    for has_prev in (False, True):
        cut = token_stats.config(rows, vocabulary, size, has_prev)
        assert cut.block & (cut.block - 1) == 0
        assert cut.slice_width % cut.block == 0
        assert (cut.slices - 1) * cut.slice_width < vocabulary <= cut.slices * cut.slice_width
        assert cut.slices <= token_stats._MOST_SLICES
        assert cut.slices == 1 or rows * cut.slices < 2 * token_stats._PROGRAMS
        assert cut.block // (32 * cut.num_warps) <= 16


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_stats_of_random_rows(slicing: None, dtype: torch.dtype) -> None:
    logits = randn(2, 1, 700, dtype=dtype)
    prev = (logits.float() + randn(2, 1, 700, seed=1, scale=0.5)).to(dtype)
    check_stats(logits, prev, banned=int(logits[0, 0].argmax()))
    check_stats(logits, prev, out_dtype=torch.float32)
    check_stats(logits)


@interpreted
def test_stats_with_the_real_table() -> None:
    check_stats(randn(1, 1, 9001), randn(1, 1, 9001, seed=1))
    check_stats(randn(1, 1, 9001, dtype=torch.bfloat16))


@interpreted
def test_stats_of_a_growing_row(slicing: None) -> None:
    """Every block has a new maximum, by far, or hardly."""
    steps = torch.arange(600.0)
    check_stats(
        torch.stack([steps / 3, steps / 1000, -steps / 3])[None],
        torch.stack([-steps / 50, steps, steps / 3])[None],
    )


@interpreted
@pytest.mark.parametrize("V", [1, 2, 260])
def test_stats_of_special_rows(slicing: None, V: int) -> None:
    rows = [torch.zeros(V)]  # all tied: the first index wins
    for value in (NAN, INF, -INF):
        for at in {0, V // 2, V - 1}:
            row = randn(V, seed=at)
            row[at] = value
            rows.append(row)
    rows += [torch.full((V,), value) for value in (NAN, INF, -INF)]
    lowest = torch.full((V,), torch.finfo(torch.float32).min)
    rows.append(lowest)
    lowest = lowest.clone()
    lowest[V - 1] = 1.0  # leading blocks hold nothing but the lowest number
    rows.append(lowest)
    late = torch.full((V,), -INF)
    late[V - 1] = 2.0
    rows.append(late)
    logits = torch.stack(rows)[None]
    check_stats(logits, torch.zeros_like(logits) + randn(V, seed=3))
    check_stats(randn(1, len(rows), V, seed=4), logits)


@interpreted
def test_kl_is_infinite_only_where_a_ruled_out_token_is_possible(slicing: None) -> None:
    logits, prev = randn(1, 4, 260), randn(1, 4, 260, seed=1)
    prev[0, 0, 200] = -INF  # possible now, ruled out before
    logits[0, 1, 200] = -INF  # the other way round
    logits[0, 2, 200] = prev[0, 2, 200] = -INF
    logits[0, 3, 10], prev[0, 3, 10], logits[0, 3, 259] = (
        -500.0,
        -INF,
        500.0,
    )  # p underflows and is still not zero
    kl = token_stats.token_stats(logits, prev, None, -1, torch.float64)[4]
    assert kl.isinf().tolist() == [[True, False, False, True]]
    check_stats(logits, prev)
    assert not token_stats.token_stats(logits[:, :1], prev[:, :1], None, 200, torch.float64)[4].isinf()


@interpreted
def test_ties_across_slices_go_to_the_lowest_index(slicing: None) -> None:
    logits = randn(1, 2, 700).clamp(max=5.0)
    logits[0, 0, [150, 151, 400, 690]] = 7.0
    logits[0, 1, [0, 127, 128, 699]] = 7.0
    token = token_stats.token_stats(logits, None, None, -1, torch.float32)[0]
    assert token.tolist() == [[150, 0]]
    check_stats(logits, logits.flip(-1))


@interpreted
def test_confidence_is_resolved_near_one(slicing: None) -> None:
    logits = randn(1, 4, 400)
    logits[0, :, 170] = torch.tensor([25.0, 30.0, 35.0, 40.0])
    got = token_stats.token_stats(logits, None, None, -1, torch.float64)
    want = stats_truth(logits, None, -1)
    others = 1 - want[1]
    assert ((got[1] - want[1]).abs() <= 1e-5 * others + 3e-16).all()
    assert ((got[3] - want[3]).abs() <= 1e-5 * want[3] + 1e-15).all()


@interpreted
def test_rows_of_the_earlier_step(slicing: None) -> None:
    logits, prev = randn(2, 3, 130), randn(2, 4, 130, seed=1)
    check_stats(logits, prev, torch.tensor([[3, -1, 0], [4, 1, 1]]))
    kl = token_stats.token_stats(
        logits, prev[:, :0], torch.zeros_like(logits[..., 0]).long(), -1, torch.float32
    )[4]
    assert kl.isnan().all()


@interpreted
def test_stats_of_strided_logits(slicing: None) -> None:
    logits = randn(2, 150, 3).transpose(1, 2)[:, 1:, 5:140]  # V has stride 3, and there is an offset
    prev = randn(1, 1, 300, seed=1)[..., ::2][..., 7:142].expand(2, 2, -1)  # strides 0, 0 and 2
    check_stats(logits, prev)
    rows = torch.tensor([[1, 9, 0, 9]]).expand(2, -1)[:, ::2]
    check_stats(logits, prev, rows, banned=134)


@interpreted
def test_no_positions() -> None:
    for shape in ((0, 3, 5), (2, 0, 5)):
        for out in token_stats.token_stats(torch.zeros(shape), torch.zeros(shape), None, -1, torch.float32):
            assert out.shape == shape[:2]


@interpreted
def test_float64_logits_are_refused() -> None:
    with pytest.raises(TypeError, match=r"logits.*float64"):
        token_stats.token_stats(torch.zeros(1, 1, 4, dtype=torch.float64), None, None, -1, torch.float64)


@interpreted
def test_offsets_are_64_bits(far_memory: Tensor) -> None:
    """Strides fit into 32 bits, offsets do not."""
    far = 2**30
    for stride, shape in (((0, far, 1), (1, 3, 300)), ((0, 1, far), (1, 2, 3)), ((far, 1, 300), (3, 2, 1))):
        view = far_memory.as_strided(shape, stride)
        view.copy_(randn(*shape, seed=2))
        check_stats(view, view.clone())
        token, _, logsumexp, *_ = token_stats.token_stats(view, None, None, -1, torch.float64)
        log_p = view.double() - logsumexp[..., None]
        picked = log_p.gather(2, token[:, None, :].expand(-1, shape[1], -1))
        got = conflict_matrix.conflict_matrix(view, token, logsumexp)
        assert torch.equal(got, (picked + picked.mT).float())


# ---- conflict_matrix


@interpreted
@pytest.mark.parametrize("n", [1, 32, 33])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_conflicts_are_exact_and_symmetric(n: int, dtype: torch.dtype) -> None:
    logits = randn(2, 50, n, dtype=dtype).transpose(1, 2)
    logits[0, 0, 3], logits[0, n // 2, 5] = -INF, NAN
    token = torch.randint(0, 50, (2, n), generator=torch.Generator().manual_seed(1))
    logsumexp = logits.double().logsumexp(-1)
    token[1, n - 1] = 50
    picked = (logits.double() - logsumexp[..., None]).gather(
        2, token.clamp(max=49)[:, None, :].expand(-1, n, -1)
    )
    want = (picked + picked.mT).float()
    want[1, n - 1], want[1, :, n - 1] = NAN, NAN
    got = conflict_matrix.conflict_matrix(logits, token, logsumexp)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.nan_to_num(7.0), got.mT.nan_to_num(7.0))
    assert conflict_matrix.conflict_matrix(logits[:, :0], token[:, :0], logsumexp[:, :0]).shape == (2, 0, 0)


# ---- independent_set


def greedy(conflict: Tensor, priority: Tensor, eligible: Tensor | None, preselected: Tensor | None) -> Tensor:
    """The set of one matrix, one position at a time."""
    n = priority.numel()
    chosen = [bool(preselected[i]) if preselected is not None else False for i in range(n)]
    candidates = [i for i in range(n) if not priority[i].isnan() and (eligible is None or eligible[i])]
    for i in sorted(candidates, key=lambda i: (-float(priority[i]), i)):
        if not any(chosen[j] and bool(conflict[i, j]) for j in range(n) if j != i):
            chosen[i] = True
    return torch.tensor(chosen, dtype=torch.bool)


def check_set(
    conflict: Tensor, priority: Tensor, eligible: Tensor | None = None, preselected: Tensor | None = None
) -> None:
    got = independent_set.independent_set(conflict, priority, eligible, preselected)
    for b in range(conflict.shape[0]):
        rows = [None if t is None else t[b] for t in (eligible, preselected)]
        assert torch.equal(got[b], greedy(conflict[b], priority[b], *rows))


@interpreted
@pytest.mark.parametrize("n", [1, 2, 33, 70])
@pytest.mark.parametrize("density", [0.02, 0.3])
def test_sets_of_directed_graphs(n: int, density: float) -> None:
    generator = torch.Generator().manual_seed(n)
    conflict = torch.rand(2, n, n, generator=generator) < density
    priority = torch.randint(0, 9, (2, n), generator=generator).double()  # with ties
    priority[0, n // 2] = NAN
    priority[1, n // 3] = -INF
    eligible = torch.rand(2, n, generator=generator) < 0.7
    preselected = torch.rand(2, n, generator=generator) < 0.1
    check_set(conflict, priority)
    check_set(conflict.mT, priority.float(), eligible, preselected)
    check_set(conflict[:, :, :1].expand(-1, -1, n), priority, None, preselected)


@interpreted
def test_set_of_thousands() -> None:
    n = 2500
    i = torch.arange(n)
    conflict = ((i[:, None] - i).abs() <= 400)[None]
    selected = independent_set.independent_set(conflict, -i[None].float(), None, i[None] == 1000)
    assert selected[0].nonzero()[:, 0].tolist() == [0, 401, 1000, 1401, 1802, 2203]
    assert independent_set.independent_set(conflict[:, :0, :0], i[None, :0].float(), None, None).shape == (
        1,
        0,
    )


# ---- cap_select


def cap_truth(
    log_p: Tensor,
    token: Tensor,
    confidence: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    gamma: float,
    strict: bool,
) -> Tensor:
    """The selection of one sequence, one position at a time."""
    n = token.numel()
    chosen: list[int] = []
    order = sorted(
        (i for i in range(n) if mask[i] and not confidence[i].isnan()),
        key=lambda i: (-float(confidence[i]), i),
    )
    for i in order:
        if confidence[i] < low:
            continue
        free = all(log_p[i, token[j]] + log_p[j, token[i]] <= gamma for j in chosen)
        if free or (not strict and confidence[i] >= high):
            chosen.append(i)
    return torch.tensor([i in set(chosen + order[:1]) for i in range(n)], dtype=torch.bool)


@interpreted
@pytest.mark.parametrize("n", [1, 32, 70])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("probabilities", [False, True])
def test_cap_select(n: int, strict: bool, probabilities: bool) -> None:
    B, V = 3, 40
    logits = randn(B, V, n, seed=n, scale=2.0).transpose(1, 2)  # V is strided
    peak = torch.randint(0, V, (B, n), generator=torch.Generator().manual_seed(n + 1))
    logits.scatter_add_(2, peak[..., None], randn(B, n, 1, seed=n + 2, scale=3.0).abs() + 4.0)
    if n > 1:
        logits[0, 1] = logits[0, 0]  # an exact tie
        logits[1, 3] = NAN
    token, logsumexp = logits.argmax(-1), logits.double().logsumexp(-1)
    if n > 1:
        token[1, 3], token[2, 5] = -1, V
    mask = torch.rand(B, n, generator=torch.Generator().manual_seed(n + 3)) < 0.8
    mask[2] = False
    low, high, gamma = (
        torch.tensor(v, dtype=torch.float64) for v in ([0.3, 0.5, 0.5], [0.9, 0.99, 2.0], [-9.0, -7.0, -8.0])
    )

    given, lse = logits, logsumexp
    if probabilities:
        given, lse = logits.softmax(-1), None
        log_p = given.double().log()
    else:
        log_p = logits.double() - logsumexp[..., None]
    selected, confidence = cap_select.cap_select(given, token, lse, mask, low, high, gamma, strict)
    known = (token >= 0) & (token < V)
    at = token.where(known, 0)[..., None]
    truth = given.double().gather(2, at) if probabilities else log_p.gather(2, at).exp()
    truth = truth.squeeze(2).masked_fill(~known, NAN)
    torch.testing.assert_close(confidence, truth, rtol=1e-14, atol=0, equal_nan=True)
    for b in range(B):
        want = cap_truth(
            log_p[b], token[b], confidence[b], mask[b], *(float(v[b]) for v in (low, high, gamma)), strict
        )
        assert torch.equal(selected[b], want)
    if n > 1:
        assert selected[0].any()
        assert not torch.equal(selected[0], mask[0] & (confidence[0] >= 0.3))


@interpreted
def test_cap_select_without_mask_forces_the_best() -> None:
    probs = torch.full((1, 3, 4), 0.2)
    probs[0, 1:, 0] = 0.4
    thresholds = (torch.full((1,), v, dtype=torch.float64) for v in (0.8, 0.95, -16.0))
    selected, confidence = cap_select.cap_select(probs, probs.argmax(-1), None, None, *thresholds, False)
    assert selected.tolist() == [[False, True, False]]
    assert confidence.dtype == torch.float64
    selected, _ = cap_select.cap_select(
        probs[:, :0], probs.argmax(-1)[:, :0], None, None, *[torch.zeros(1).double()] * 3, False
    )
    assert selected.shape == (1, 0)
