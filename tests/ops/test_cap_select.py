"""cap_select against CAP-Decoding written with Python sets, and the faults of the published code."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from tests.ops.support import DTYPES, assert_close, assert_same, dtypes_of, layouts, opcheck
from tests.ops.test_token_stats import row_truth

OP = "cap_select"


def truth(
    log_p: Callable[[int, int], float],
    n: int,
    mask: list[bool],
    tau_low: float,
    tau_high: float,
    gamma: float,
    strict: bool = False,
) -> list[bool]:
    """One sequence; ``log_p(i, j)`` is the log-probability of j's token at i, NaN where it has none."""
    confidence = {i: math.exp(log_p(i, i)) for i in range(n) if mask[i] and not math.isnan(log_p(i, i))}

    def conflicts(i: int, j: int) -> bool:
        return log_p(i, j) + log_p(j, i) > gamma

    candidates = [i for i in confidence if confidence[i] >= tau_low]
    chosen = set() if strict else {i for i in candidates if confidence[i] >= tau_high}
    for i in sorted(candidates, key=lambda i: (-confidence[i], i)):
        if i not in chosen and not any(conflicts(i, j) for j in chosen):
            chosen.add(i)
    if confidence:
        chosen.add(min(confidence, key=lambda i: (-confidence[i], i)))
    return [i in chosen for i in range(n)]


def truth_of_logits(logits: Tensor, mask: Tensor | None = None, **options: float) -> np.ndarray:
    """[n, V] -> [n] bool"""
    rows = logits.double().cpu().tolist()
    stats = [row_truth(x) for x in rows]

    def log_p(i: int, j: int) -> float:
        if stats[i][0] < 0 or stats[j][0] < 0:
            return math.nan
        return rows[i][stats[j][0]] - stats[i][2]

    flags = [True] * len(rows) if mask is None else mask.tolist()
    return np.array(truth(log_p, len(rows), flags, **options), dtype=bool)  # type: ignore[arg-type]


def chained_logits(n: int, vocabulary: int, seed: int, sharpness: float = 3.0) -> Tensor:
    """Rows that share tokens and have confidences on both sides of the thresholds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((n, vocabulary), generator=generator)
    shared = torch.randint(max(1, min(vocabulary, n)), (n,), generator=generator)
    x[torch.arange(n), shared] += sharpness * 3 * torch.rand(n, generator=generator)
    return x * sharpness / 2


OPTIONS = (
    {"tau_low": 0.8, "tau_high": 0.95, "gamma": -16.0},
    {"tau_low": 0.3, "tau_high": 0.6, "gamma": -8.0},
    {"tau_low": 0.1, "tau_high": 2.0, "gamma": -10.0},
    {"tau_low": 0.0, "tau_high": 1.0, "gamma": -30.0},
)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_truth(backend: str, device: torch.device, dtype: torch.dtype, strict: bool) -> None:
    if dtype not in dtypes_of(backend):
        pytest.skip(f"{backend} does not take {dtype} logits")
    removed = committed = 0
    few = backend == "triton"  # in the interpreter every step of the scan takes milliseconds
    sizes = ((1, 2), (5, 7), (16, 12), (33, 40))
    for n, vocabulary in sizes[1 if dtype == torch.float32 else 0 :: 2] if few else sizes:
        logits = torch.stack([chained_logits(n, vocabulary, seed) for seed in range(2)]).to(device, dtype)
        mask = torch.rand((2, n), generator=torch.Generator().manual_seed(n)) < 0.8
        for options in OPTIONS[1:2] if few else OPTIONS:
            expected = np.stack(
                [truth_of_logits(x, m, strict=strict, **options) for x, m in zip(logits, mask, strict=True)]
            )
            chosen = dlmkern.cap_select(logits=logits, mask=mask.to(device), strict=strict, **options)
            assert isinstance(chosen, Tensor)
            assert_same(chosen, expected)
            committed += int(expected.sum())
            candidates = dlmkern.token_stats(logits).confidence.cpu() >= options["tau_low"]
            removed += int((candidates & mask & ~torch.from_numpy(expected)).sum())
    assert removed > 2  # the cases have conflicts to resolve
    assert committed > 8


def test_probabilities_and_logits_agree(backend: str, device: torch.device) -> None:
    for seed in range(3):
        logits = torch.stack([chained_logits(9, 8, 10 * seed + b) for b in range(2)]).double()
        stats = {}
        for name, x in (("logits", logits), ("probs", logits.softmax(-1))):
            x = x.to(device, dtypes_of(backend)[0])
            stats[name] = dlmkern.cap_select(
                **{name: x}, tau_low=0.3, tau_high=0.6, gamma=-6.0, return_stats=True
            )
        assert torch.equal(stats["logits"].selected, stats["probs"].selected)
        assert torch.equal(stats["logits"].token, stats["probs"].token)
        assert_close(stats["logits"].confidence, stats["probs"].confidence.cpu().numpy(), 1e-6)
        assert stats["probs"].confidence.dtype == torch.float64


def test_given_statistics_spare_the_scan(backend: str, device: torch.device) -> None:
    logits = torch.stack([chained_logits(9, 8, seed) for seed in range(2)]).to(device)
    stats = dlmkern.token_stats(logits, out_dtype=torch.float64)
    for x, token, logsumexp in (
        (logits, stats.token, stats.logsumexp),
        (logits[0], stats.token[0], stats.logsumexp[0]),
    ):
        given = dlmkern.cap_select(
            logits=x, token=token, logsumexp=logsumexp, tau_low=0.3, gamma=-6.0, return_stats=True
        )
        scanned = dlmkern.cap_select(logits=x, tau_low=0.3, gamma=-6.0, return_stats=True)
        for one, other in zip(given, scanned, strict=True):
            assert torch.equal(one, other)
    # a token that is not the best one, and one that is none
    token = stats.token.clone()
    token[0, 0] = -1
    token[0, 1] = logits.shape[-1]
    token[1, 0] = (token[1, 0] + 1) % logits.shape[-1]
    given = dlmkern.cap_select(
        logits=logits, token=token, logsumexp=stats.logsumexp, tau_low=0.0, tau_high=0.0, return_stats=True
    )
    assert given.selected.tolist() == [[False, False] + 7 * [True], 9 * [True]]
    assert given.confidence[0, :2].isnan().all()
    expected = (logits[1, 0, token[1, 0]].double() - stats.logsumexp[1, 0]).exp()
    assert_close(given.confidence[1, 0], expected.cpu().numpy(), 1e-12)


def test_thresholds_may_differ_by_row(backend: str, device: torch.device) -> None:
    logits = torch.stack([chained_logits(7, 10, 3)] * 4).to(device)
    columns = {
        name: torch.tensor([options[name] for options in OPTIONS], dtype=torch.float64, device=device)
        for name in OPTIONS[0]
    }
    together = dlmkern.cap_select(logits=logits, **columns)
    for b, options in enumerate(OPTIONS):
        assert_same(together[b], truth_of_logits(logits[b], **options))
    scalar = {name: value[1] for name, value in columns.items()}  # 0-dimensional
    assert torch.equal(dlmkern.cap_select(logits=logits, **scalar)[0], together[1])


def test_limits_belong_to_the_side_that_the_paper_says(backend: str, device: torch.device) -> None:
    # confidence at a threshold counts as above it
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.25, 0.25, 0.25]], device=device)
    probs[2, 2] = 0.2500001  # another token than the others'
    tau_low = float(probs[2, 2])
    selected = dlmkern.cap_select(probs, tau_low=tau_low, tau_high=0.5, gamma=10.0)
    assert selected.tolist() == [True, True, True]
    selected = dlmkern.cap_select(probs, tau_low=tau_low, tau_high=0.5, gamma=-1.5)
    assert selected.tolist() == [True, True, True]  # 0 and 1 conflict, but in the high tier nobody looks
    above = math.nextafter(tau_low, 1)
    selected = dlmkern.cap_select(probs, tau_low=above, tau_high=math.nextafter(0.5, 1), gamma=-1.5)
    assert selected.tolist() == [True, False, False]
    # D at gamma is no conflict
    certain = torch.tensor([[1.0, 0.0], [1.0, 0.0]], device=device)  # D = 0 to the bit
    assert dlmkern.cap_select(certain, tau_high=2.0, gamma=0.0).tolist() == [True, True]
    assert dlmkern.cap_select(certain, tau_high=2.0, gamma=-1e-300).tolist() == [True, False]


def test_masks(backend: str, device: torch.device) -> None:
    logits = chained_logits(6, 8, 4).to(device)
    nothing = torch.zeros(6, dtype=torch.bool, device=device)
    assert not dlmkern.cap_select(logits=logits, mask=nothing).any()
    everything = dlmkern.cap_select(logits=logits, mask=~nothing)
    assert torch.equal(dlmkern.cap_select(logits=logits), everything)
    one = nothing.clone()
    one[2] = True
    assert_same(dlmkern.cap_select(logits=logits, mask=one, tau_low=1.0, tau_high=1.0), one)


def test_something_is_always_committed(backend: str, device: torch.device) -> None:
    flat = torch.zeros((2, 5, 7), device=device)  # every confidence is 1 / 7: the lowest index wins
    mask = torch.tensor([[False, False, True, True, True]] * 2, device=device)
    assert dlmkern.cap_select(logits=flat, mask=mask).tolist() == [[False, False, True, False, False]] * 2


def test_ties_go_to_the_lower_index(backend: str, device: torch.device) -> None:
    logits = torch.zeros((4, 9), device=device)
    logits[[0, 1, 2, 3], [0, 5, 5, 7]] = 4.0  # 1 and 2 want the same token with the same confidence
    selected = dlmkern.cap_select(logits=logits, tau_low=0.5, tau_high=2.0, gamma=-5.0)
    assert selected.tolist() == [True, True, False, True]


def test_rows_without_a_distribution_are_never_committed(backend: str, device: torch.device) -> None:
    logits = chained_logits(6, 8, 5)
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    logits[4, 0] = math.inf
    logits = logits.to(device)
    mask = torch.tensor([False, True, True, False, True, False], device=device)
    assert not dlmkern.cap_select(logits=logits, mask=mask, tau_low=0.0, tau_high=0.0).any()
    result = dlmkern.cap_select(logits=logits, tau_low=0.0, tau_high=0.0, return_stats=True)
    assert result.selected.tolist() == [True, False, False, True, False, True]
    assert result.token[[1, 2, 4]].tolist() == [-1, -1, -1]
    assert result.confidence[[1, 2, 4]].isnan().all()
    probs = chained_logits(6, 8, 5).softmax(-1).to(device)
    probs[1, 3] = math.nan
    selected = dlmkern.cap_select(probs, tau_low=0.0, tau_high=0.0)
    assert selected.tolist() == [True, False, True, True, True, True]


def test_banned_tokens(backend: str, device: torch.device) -> None:
    logits = chained_logits(8, 8, 6)
    for banned in (0, 7):
        banned_by_hand = logits.clone()
        banned_by_hand[:, banned] = -math.inf
        result = dlmkern.cap_select(
            logits=logits.to(device), tau_low=0.3, gamma=-6.0, banned_token=banned, return_stats=True
        )
        assert (result.token != banned).all()
        assert_same(result.selected, truth_of_logits(banned_by_hand, tau_low=0.3, tau_high=0.95, gamma=-6.0))


def test_unchecked_thresholds_have_an_answer(backend: str, device: torch.device) -> None:
    # on an accelerator nobody looks at the numbers
    logits = torch.stack([chained_logits(7, 8, 8)] * 4).to(device)
    stats = dlmkern.token_stats(logits, out_dtype=torch.float64)
    nan = math.nan
    rows = [(nan, 0.5, -6.0), (0.3, nan, -6.0), (0.3, 0.9, nan), (0.8, 0.2, -6.0)]
    columns = [torch.tensor(x, dtype=torch.float64, device=device) for x in zip(*rows, strict=True)]
    selected, _ = torch.ops.dlmkern.cap_select(logits, stats.token, stats.logsumexp, None, *columns, False)
    for b, (tau_low, tau_high, gamma) in enumerate(rows):
        options = {"tau_low": tau_low, "tau_high": tau_high, "gamma": gamma}
        assert_same(selected[b], truth_of_logits(logits[b], **options))


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (0, 5)])
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    result = dlmkern.cap_select(logits=torch.zeros(shape, device=device), return_stats=True)
    assert [x.shape for x in result] == [shape[:-1]] * 3


def test_one_token_vocabulary(backend: str, device: torch.device) -> None:
    # all confidences are 1 and everything conflicts
    x = torch.zeros((2, 3, 1), device=device)
    assert dlmkern.cap_select(logits=x).all()
    assert dlmkern.cap_select(logits=x, strict=True).tolist() == [[True, False, False]] * 2


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.stack([chained_logits(9, 12, seed) for seed in (1, 2)]).to(device, dtype)
        mask = torch.ones((2, 9), dtype=torch.bool, device=device)
        mask[:, 3] = False
        expected = dlmkern.cap_select(logits=logits, mask=mask, tau_low=0.3, gamma=-6.0)
        for name, view in layouts(logits):
            flags = mask.T.contiguous().T
            selected = dlmkern.cap_select(logits=view, mask=flags, tau_low=0.3, gamma=-6.0)
            assert_same(selected, expected, name)


def test_every_row_stands_alone(backend: str, device: torch.device) -> None:
    logits = torch.stack([chained_logits(9, 12, seed) for seed in (1, 2, 3)]).to(device)
    together = dlmkern.cap_select(logits=logits, tau_low=0.3, gamma=-6.0)
    broken = logits.clone()
    broken[1] = math.nan
    beside_nan = dlmkern.cap_select(logits=broken, tau_low=0.3, gamma=-6.0)
    assert not beside_nan[1].any()
    for b in (0, 2):
        assert torch.equal(dlmkern.cap_select(logits=logits[b], tau_low=0.3, gamma=-6.0), together[b])
        assert torch.equal(beside_nan[b], together[b])


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 12),
    vocabulary=st.integers(1, 20),
    seed=st.integers(0, 2**16),
    options=st.sampled_from(OPTIONS),
    strict=st.booleans(),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_invariants(
    n: int, vocabulary: int, seed: int, options: dict[str, float], strict: bool, backend_name: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = chained_logits(n, vocabulary, seed).double()
    mask = torch.rand(n, generator=generator) < 0.8
    with dlmkern.use_backend(backend_name):
        result = dlmkern.cap_select(logits=logits, mask=mask, strict=strict, return_stats=True, **options)
        hidden = logits.masked_fill(~mask[:, None], math.nan)  # what is not masked plays no part
        assert torch.equal(
            dlmkern.cap_select(logits=hidden, mask=mask, strict=strict, **options), result.selected
        )
        conflict = dlmkern.conflict_matrix(logits) > options["gamma"]
        order = torch.randperm(n, generator=generator)
        if result.confidence.unique().numel() == n:  # no ties for the index to break
            permuted = dlmkern.cap_select(logits=logits[order], mask=mask[order], strict=strict, **options)
            assert torch.equal(permuted, result.selected[order])
    selected, confidence = result.selected, result.confidence
    assert not (selected & ~mask).any()
    assert selected.any() == mask.any()
    checked = selected & (confidence >= options["tau_low"])
    if not strict:
        checked &= confidence < options["tau_high"]
    others = selected & (confidence >= options["tau_low"])
    clash = conflict & ~torch.eye(n, dtype=torch.bool)
    assert not clash[checked][:, others].any()


# Faults of the published code, each with its smallest input.


def test_fault_rows_do_not_share_candidates(backend: str, device: torch.device) -> None:
    # the official code pools the candidate columns of all rows: row 0 also commits position 2, at 1/8
    logits = torch.zeros((2, 3, 8), device=device)
    logits[0, 0, 1] = logits[1, 0, 1] = 12.0
    logits[1, 2, 2] = 12.0
    selected = dlmkern.cap_select(logits=logits, gamma=10.0)
    assert selected.tolist() == [[True, False, False], [True, False, True]]


def test_fault_two_rows_of_two_come_to_an_end(backend: str, device: torch.device) -> None:
    # the official greedy loop can run for ever here
    logits = torch.zeros((2, 2, 8), device=device)
    logits[0, 0, 1] = 4.0
    logits[1, 1, 1] = 4.0
    for gamma in (-16.0, 10.0):
        selected = dlmkern.cap_select(logits=logits, tau_low=0.5, tau_high=2.0, gamma=gamma)
        assert selected.tolist() == [[True, False], [False, True]]


def test_fault_high_tier_is_unchecked_unless_strict(backend: str, device: torch.device) -> None:
    logits = torch.zeros((2, 32), device=device)
    logits[:, 5] = 12.0  # both want the same token
    assert dlmkern.cap_select(logits=logits).tolist() == [True, True]
    assert dlmkern.cap_select(logits=logits, strict=True).tolist() == [True, False]


def test_errors() -> None:
    nan = math.nan
    x, mask = torch.zeros(2, 3, 5), torch.ones((2, 3), dtype=torch.bool)
    token, lse = torch.zeros(2, 3).long(), torch.zeros(2, 3)
    for arguments, keywords, error, message in (
        ((), {}, ValueError, "probs, logits: expected exactly one"),
        ((x,), {"logits": x}, ValueError, "probs, logits: expected exactly one"),
        ((x.long(),), {}, TypeError, "probs: expected dtype"),
        ((), {"logits": x[0, 0]}, ValueError, "logits: expected shape"),
        ((x, x), {}, TypeError, "mask: expected dtype bool"),
        ((x, mask[0]), {}, ValueError, "mask: expected shape"),
        ((x, mask.to("meta")), {}, ValueError, "mask: expected device"),
        ((x,), {"tau_low": nan}, ValueError, "tau_low: expected a threshold"),
        ((x,), {"tau_low": -0.1}, ValueError, "tau_low: expected a threshold"),
        ((x,), {"tau_low": 1.1, "tau_high": 2}, ValueError, "tau_low: expected a threshold"),
        ((x,), {"tau_high": nan}, ValueError, "tau_high: expected a threshold"),
        ((x,), {"tau_low": 0.9, "tau_high": 0.8}, ValueError, "tau_low: expected at most tau_high"),
        ((x,), {"tau_low": torch.tensor([0.5, 0.99])}, ValueError, "tau_low: expected at most tau_high"),
        ((x,), {"tau_high": torch.tensor([0.9, 0.5])}, ValueError, "tau_low: expected at most tau_high"),
        ((x,), {"tau_low": torch.tensor([0.5, nan])}, ValueError, "tau_low: expected a threshold"),
        ((x,), {"tau_low": torch.tensor([0.5, 0.5, 0.5])}, ValueError, "tau_low: expected a number or shape"),
        ((x,), {"tau_low": torch.tensor([True, True])}, TypeError, "tau_low: expected dtype"),
        ((x,), {"tau_low": "0.5"}, TypeError, "tau_low: expected a float"),
        ((x,), {"tau_low": torch.zeros(2, device="meta")}, ValueError, "tau_low: expected device"),
        ((x,), {"gamma": nan}, ValueError, "gamma: expected a number"),
        ((x,), {"gamma": True}, TypeError, "gamma: expected a float"),
        (
            (x,),
            {"token": token, "logsumexp": lse},
            ValueError,
            "token, logsumexp: expected both, with logits",
        ),
        ((), {"logits": x, "token": token}, ValueError, "token, logsumexp: expected both"),
        ((), {"logits": x, "logsumexp": lse}, ValueError, "token, logsumexp: expected both"),
        ((), {"logits": x, "token": lse, "logsumexp": lse}, TypeError, "token: expected dtype"),
        ((), {"logits": x, "token": token, "logsumexp": lse[0]}, ValueError, "logsumexp: expected shape"),
        (
            (),
            {"logits": x, "token": token, "logsumexp": lse, "banned_token": 1},
            ValueError,
            "banned_token: expected None",
        ),
        ((x,), {"banned_token": 9}, ValueError, "banned_token: expected an id"),
    ):
        with pytest.raises(error, match=message):
            dlmkern.cap_select(*arguments, **keywords)  # type: ignore[arg-type]


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    x = chained_logits(5, 9, 7).to(device)[None]
    stats = dlmkern.token_stats(x)
    mask = torch.ones((1, 5), dtype=torch.bool, device=device)
    rows = [torch.full((1,), value, dtype=torch.float64, device=device) for value in (0.3, 0.6, -8.0)]
    opcheck(OP, x, stats.token, stats.logsumexp, mask, *rows, False)
    opcheck(OP, x.softmax(-1), stats.token, None, None, *rows, True)
    compiled = torch.compile(
        lambda logits, tau: dlmkern.cap_select(logits=logits, tau_low=tau, tau_high=0.9, gamma=-6.0),
        fullgraph=True,
        backend="aot_eager",
    )
    for tau in (rows[0], 0.3):
        expected = dlmkern.cap_select(logits=x, tau_low=0.3, tau_high=0.9, gamma=-6.0)
        assert torch.equal(compiled(x, tau), expected)
