"""confidence_select against the rules written with Python lists, and the official scan."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from tests.ops.support import DTYPES, assert_same, dtypes_of, make_logits, opcheck

OP = "confidence_select"
NAN, INF = math.nan, math.inf
THRESHOLD, FACTOR, SCHEDULE, FACTOR_OFFICIAL = range(4)
# What a rule is called with, and its code and parameter.
RULES: tuple[tuple[dict[str, Any], int, float], ...] = (
    ({"tau": 0.6}, THRESHOLD, 0.6),
    ({"tau": -INF}, THRESHOLD, -INF),
    ({"rule": "factor"}, FACTOR, 1.0),
    ({"rule": "factor", "factor": 2.4}, FACTOR, 2.4),
    ({"rule": "factor", "factor": INF}, FACTOR, INF),
    ({"rule": "factor", "factor": 1.5, "compat": "official"}, FACTOR_OFFICIAL, 1.5),
    ({"rule": "factor", "factor": 1e-3, "compat": "official"}, FACTOR_OFFICIAL, 1e-3),
    ({"rule": "schedule", "count": 0}, SCHEDULE, 0),
    ({"rule": "schedule", "count": 3}, SCHEDULE, 3),
    ({"rule": "schedule", "count": 10**6}, SCHEDULE, 10**6),
)


def truth(confidence: list[float], mask: list[bool], rule: int, p: float) -> list[bool]:
    """One sequence. The factor rules scan the ranks as the paper and the official code do."""
    ranked = sorted(
        (i for i, c in enumerate(confidence) if mask[i] and not math.isnan(c)),
        key=lambda i: (-confidence[i], i),
    )
    c = [confidence[i] for i in ranked]
    m = len(ranked)
    if rule == THRESHOLD:
        count = max(sum(x >= p for x in c), 1)
    elif rule == FACTOR:
        count = max([1] + [n for n in range(1, m + 1) if (n + 1) * (1 - c[n - 1]) < p])
    elif rule == SCHEDULE:
        count = int(p)
    else:
        limits = [-1.0] + [1 - p / (n + 1) for n in range(2, m + 1)]
        stop = 0
        for stop in range(m):  # where it stops is all that it knows
            if c[stop] < limits[stop]:
                break
        count = stop + 1 if stop in (0, m - 1) else stop
    chosen = set(ranked[:count])
    return [i in chosen for i in range(len(confidence))]


def random_case(n: int, seed: int, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Confidences with many ties, some close to one and some NaN, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.randint(0, 9, (batch, n), generator=generator, dtype=dtype) / 8
    fine = 1 - 0.1 * torch.rand((batch, n), generator=generator, dtype=dtype).square()
    confidence = torch.where(torch.rand((batch, n), generator=generator) < 0.5, fine, confidence)
    confidence[torch.rand((batch, n), generator=generator) < 0.1] = NAN
    return confidence, torch.rand((batch, n), generator=generator) < 0.8


@pytest.mark.parametrize("n", [0, 1, 2, 5, 32, 33, 130])
def test_against_truth(backend: str, device: torch.device, n: int) -> None:
    for dtype in (torch.float64, torch.float32):
        confidence, mask = random_case(n, n, 3, dtype)
        for options, rule, p in RULES:
            for flags in (mask, None):
                chosen = dlmkern.confidence_select(
                    confidence=confidence.to(device),
                    mask=None if flags is None else flags.to(device),
                    **options,
                )
                masks = torch.ones_like(mask) if flags is None else flags
                expected = [
                    truth(c, m, rule, p) for c, m in zip(confidence.tolist(), masks.tolist(), strict=True)
                ]
                assert chosen.selected.dtype == torch.bool
                assert chosen.selected.tolist() == expected, options
                assert chosen.token is None
                assert_same(chosen.confidence, confidence)


def test_many_positions(backend: str, device: torch.device) -> None:
    n = 300 if backend == "triton" else 3000
    confidence, mask = random_case(n, 1, 2, torch.float64)
    for options, rule, p in RULES[2:9:3] if backend == "triton" else RULES:
        selected = dlmkern.confidence_select(
            confidence=confidence.to(device), mask=mask.to(device), **options
        ).selected
        expected = [truth(c, m, rule, p) for c, m in zip(confidence.tolist(), mask.tolist(), strict=True)]
        assert selected.tolist() == expected, options


def select(device: torch.device, confidence: list[float], **options: Any) -> list[bool]:
    x = torch.tensor(confidence, dtype=torch.float64, device=device)
    return dlmkern.confidence_select(confidence=x, **options).selected.tolist()  # type: ignore[no-any-return]


def test_threshold_by_hand(backend: str, device: torch.device) -> None:
    at, below = 0.9, math.nextafter(0.9, 0)
    assert select(device, [0.2, at, below, 0.95], tau=0.9) == [False, True, False, True]
    assert select(device, [0.2, 0.4, 0.3]) == [False, True, False]  # the best one, whatever it is
    assert select(device, [0.4, 0.4, 0.4]) == [True, False, False]
    assert select(device, [0.9, 0.9, 0.9]) == [True, True, True]
    # float32's 0.9 lies below 0.9
    x = torch.tensor([0.95, 0.9], dtype=torch.float32, device=device)
    assert dlmkern.confidence_select(confidence=x, tau=0.9).selected.tolist() == [True, False]


def test_factor_by_hand(backend: str, device: torch.device) -> None:
    # at rank 2, 3 (1 - 0.75) = 0.75 to the bit: the paper's inequality is strict, the official one is not
    x = [0.75, 0.8, 0.1, 0.1]
    assert select(device, x, rule="factor", factor=0.75) == [False, True, False, False]
    assert select(device, x, rule="factor", factor=0.75, compat="official") == [True, True, False, False]
    above = math.nextafter(0.75, 1)
    assert select(device, x, rule="factor", factor=above) == [True, True, False, False]
    # factor 1: rank 2 needs 3 (1 - c) < 1, rank 3 needs 4 (1 - c) < 1
    assert select(device, [0.7, 0.74, 0.72], rule="factor") == [False, True, True]
    assert select(device, [0.76, 0.78, 0.77], rule="factor") == [True, True, True]
    assert select(device, [0.1, 0.2], rule="factor") == [False, True]


def test_the_official_factor_rule_commits_a_failing_last_rank(backend: str, device: torch.device) -> None:
    for x, paper, official in (
        ([0.99, 0.9, 0.1], [True, True, False], [True, True, True]),  # only the last rank fails
        ([0.99, 0.1, 0.9], [True, False, True], [True, True, True]),
        ([0.9, 0.1], [True, False], [True, True]),
        ([0.9, 0.1, 0.1], [True, False, False], [True, False, False]),  # two fail: as in the paper
        ([0.1], [True], [True]),
        ([0.99, 0.98], [True, True], [True, True]),
    ):
        assert select(device, x, rule="factor") == paper
        assert select(device, x, rule="factor", compat="official") == official
    mask = torch.tensor([True, True, False], device=device)  # the last rank is that of a candidate
    x = torch.tensor([0.9, 0.1, 0.05], device=device)
    chosen = dlmkern.confidence_select(confidence=x, mask=mask, rule="factor", compat="official")
    assert chosen.selected.tolist() == [True, True, False]


def test_schedule_by_hand(backend: str, device: torch.device) -> None:
    x = [0.2, 0.5, 0.5, 0.9]
    for count, expected in (
        (0, [False, False, False, False]),
        (1, [False, False, False, True]),
        (2, [False, True, False, True]),
        (3, [False, True, True, True]),
        (9, [True, True, True, True]),
    ):
        assert select(device, x, rule="schedule", count=count) == expected


def test_nan_is_no_candidate_and_infinities_are(backend: str, device: torch.device) -> None:
    x = [NAN, -INF, 0.5, INF, -0.0, 0.0]
    assert select(device, x, rule="schedule", count=1) == [False, False, False, True, False, False]
    assert select(device, x, rule="schedule", count=3) == [False, False, True, True, True, False]
    assert select(device, x, rule="schedule", count=4) == [False, False, True, True, True, True]
    assert select(device, x, rule="schedule", count=9) == [False, True, True, True, True, True]
    assert select(device, [-INF, NAN, -INF]) == [True, False, False]
    assert select(device, [NAN, NAN], tau=0.0) == [False, False]
    assert select(device, x, rule="factor", factor=INF) == [False, False, True, True, True, True]


def test_masks(backend: str, device: torch.device) -> None:
    x = torch.tensor([[0.9, 0.8, 0.7, 0.6]] * 2, device=device)
    mask = torch.tensor([[False, False, True, True], [False] * 4], device=device)
    for options in ({"tau": 0.65}, {"rule": "schedule", "count": 1}, {"rule": "factor"}):
        selected = dlmkern.confidence_select(confidence=x, mask=mask, **options).selected
        assert selected.tolist() == [[False, False, True, False], [False] * 4]


def test_parameters_may_differ_by_row(backend: str, device: torch.device) -> None:
    x = torch.tensor([[0.9, 0.8, 0.7, 0.6]] * 4, dtype=torch.float64, device=device)

    def counts(**options: Any) -> list[int]:
        return dlmkern.confidence_select(confidence=x, **options).selected.sum(1).tolist()  # type: ignore[no-any-return]

    def numbers(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    assert counts(tau=numbers(0.95, 0.85, 0.7, 0.0)) == [1, 1, 3, 4]
    assert counts(tau=numbers(0.95, 0.85, 0.7, 0.0, dtype=torch.float32)) == [1, 1, 3, 4]
    assert counts(rule="factor", factor=numbers(0.1, 0.61, 1.3, 9.0)) == [1, 2, 3, 4]
    assert counts(rule="schedule", count=torch.tensor([0, 1, 3, 9], device=device)) == [0, 1, 3, 4]
    # 0-dimensional
    assert counts(tau=numbers(0.7)[0]) == [3] * 4
    assert counts(rule="schedule", count=torch.tensor(2, dtype=torch.int32, device=device)) == [2] * 4


def test_unchecked_parameters_have_an_answer(backend: str, device: torch.device) -> None:
    # on an accelerator nobody looks at the numbers
    x = torch.tensor([[0.9, 0.8, 0.7]] * 3, dtype=torch.float64, device=device)
    parameter = torch.tensor([NAN, -INF, INF], dtype=torch.float64, device=device)
    for rule, counts in (
        (THRESHOLD, [1, 3, 1]),
        (FACTOR, [1, 1, 3]),
        (SCHEDULE, [0, 0, 3]),
        (FACTOR_OFFICIAL, [1, 1, 3]),
    ):
        selected = torch.ops.dlmkern.confidence_select(x, None, parameter, rule)
        assert selected.sum(1).tolist() == counts
    # "passes no test" and the official flaw together: of two, only the last fails
    selected = torch.ops.dlmkern.confidence_select(x[:, :2], None, parameter, FACTOR_OFFICIAL)
    assert selected.sum(1).tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_from_logits(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    if dtype not in dtypes_of(backend):
        pytest.skip(f"{backend} does not take {dtype} logits")
    logits = make_logits((2, 6, 17), dtype, device, 3)
    logits[0, 1] = NAN
    mask = torch.tensor([[True, True, False, True, True, True]] * 2, device=device)
    stats = dlmkern.token_stats(logits, banned_token=4, out_dtype=torch.float64)
    for options, rule, p in RULES[:6:5]:
        chosen = dlmkern.confidence_select(logits, mask, banned_token=4, **options)
        assert_same(chosen.token, stats.token)
        assert_same(chosen.confidence, stats.confidence)
        assert chosen.confidence.dtype == torch.float64
        expected = [
            truth(c, m, rule, p) for c, m in zip(stats.confidence.tolist(), mask.tolist(), strict=True)
        ]
        assert chosen.selected.tolist() == expected
        alone = dlmkern.confidence_select(logits[1], mask[1], banned_token=4, **options)
        for one, other in zip(alone, chosen, strict=True):
            assert_same(one, other[1])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,)])
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    for options, _, _ in RULES[::3]:
        chosen = dlmkern.confidence_select(confidence=torch.zeros(shape, device=device), **options)
        assert chosen.selected.shape == shape
        chosen = dlmkern.confidence_select(torch.zeros((*shape, 5), device=device), **options)
        assert [x.shape for x in chosen] == [shape] * 3


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    confidence, mask = (x.to(device) for x in random_case(9, 5, 4, torch.float32))
    for options, _, _ in RULES[::2]:
        expected = dlmkern.confidence_select(confidence=confidence, mask=mask, **options).selected
        wide = torch.full((4, 2 * 9 + 3), NAN, device=device)
        wide[:, 3::2] = confidence
        flags = torch.ones((4, 9, 3), dtype=torch.bool, device=device)
        flags[..., 1] = mask
        for x, m in (
            (confidence.T.contiguous().T, mask.T.contiguous().T),
            (wide[:, 3::2], flags[..., 1]),
        ):
            assert_same(dlmkern.confidence_select(confidence=x, mask=m, **options).selected, expected)
        same = dlmkern.confidence_select(confidence=confidence[:1].expand(3, -1), mask=mask[0].expand(3, -1))
        assert_same(
            same.selected,
            dlmkern.confidence_select(confidence=confidence[:1], mask=mask[:1]).selected.expand(3, -1),
        )


def test_gradients_do_not_flow(backend: str, device: torch.device) -> None:
    x = torch.rand(2, 5, device=device, requires_grad=True)
    chosen = dlmkern.confidence_select(confidence=x)
    assert not chosen.selected.requires_grad
    assert not chosen.confidence.requires_grad


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 12),
    seed=st.integers(0, 2**16),
    case=st.sampled_from(RULES),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_invariants(n: int, seed: int, case: tuple[dict[str, Any], int, float], backend_name: str) -> None:
    options, rule, p = case
    confidence, mask = random_case(n, seed, 3, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    with dlmkern.use_backend(backend_name):
        selected = dlmkern.confidence_select(confidence=confidence, mask=mask, **options).selected
        for b in range(3):
            alone = dlmkern.confidence_select(confidence=confidence[b], mask=mask[b], **options).selected
            assert torch.equal(alone, selected[b])
        hidden = confidence.masked_fill(~mask, NAN)  # what is not masked plays no part
        assert torch.equal(dlmkern.confidence_select(confidence=hidden, **options).selected, selected)
        distinct = torch.rand(3, n, generator=generator, dtype=torch.float64)
        straight = dlmkern.confidence_select(confidence=distinct, mask=mask, **options).selected
        shuffled = dlmkern.confidence_select(confidence=distinct[:, order], mask=mask[:, order], **options)
        assert torch.equal(shuffled.selected, straight[:, order])
    candidate = mask & ~confidence.isnan()
    assert not (selected & ~candidate).any()
    if rule == SCHEDULE:
        assert torch.equal(selected.sum(1), candidate.sum(1).clamp(max=int(p)))
    else:
        assert torch.equal(selected.any(1), candidate.any(1))
    # nothing is left behind that is more confident than what is committed
    least = torch.where(selected, confidence, INF).amin(1) if n else torch.full((3,), INF)
    left = candidate & ~selected
    assert not (left & (confidence > least[:, None])).any()


def test_errors() -> None:
    x, c = torch.zeros(2, 3, 5), torch.zeros(2, 3)
    mask = torch.ones((2, 3), dtype=torch.bool)
    for arguments, keywords, error, message in (
        ((), {}, ValueError, "logits, confidence: expected exactly one"),
        ((x,), {"confidence": c}, ValueError, "logits, confidence: expected exactly one"),
        ((x.long(),), {}, TypeError, "logits: expected dtype"),
        ((x[0, 0],), {}, ValueError, "logits: expected shape"),
        (
            (),
            {"confidence": c.half()},
            TypeError,
            "confidence: expected dtype float64 or float32, got float16",
        ),
        ((), {"confidence": x}, ValueError, "confidence: expected shape"),
        ((), {"confidence": c[0, 0]}, ValueError, "confidence: expected shape"),
        ((x, c), {}, TypeError, "mask: expected dtype bool"),
        ((x, mask[0]), {}, ValueError, r"mask: expected shape \[2, 3\] to go with logits"),
        ((), {"confidence": c, "mask": mask[:, :2]}, ValueError, "mask: expected shape"),
        ((x, mask.to("meta")), {}, ValueError, "mask: expected device"),
        ((x, None, "best"), {}, ValueError, "rule: expected one of threshold, factor, schedule, got 'best'"),
        ((x,), {"compat": "old"}, ValueError, "compat: expected None or 'official', got 'old'"),
        ((x,), {"count": 3}, ValueError, "count: expected with rule 'schedule' and with no other"),
        ((x, None, "schedule"), {}, ValueError, "count: expected with rule 'schedule'"),
        ((x, None, "schedule"), {"count": -1}, ValueError, "count: expected a count of at least 0"),
        ((x, None, "schedule"), {"count": 1.5}, TypeError, "count: expected an int"),
        ((x, None, "schedule"), {"count": c[:, 0]}, TypeError, "count: expected dtype"),
        ((x, None, "schedule"), {"count": torch.tensor([1, -1])}, ValueError, "count: expected a count"),
        ((x,), {"tau": NAN}, ValueError, "tau: expected a number"),
        ((x,), {"tau": "0.9"}, TypeError, "tau: expected a float"),
        ((x,), {"tau": torch.zeros(3)}, ValueError, r"tau: expected a number or shape \[2\]"),
        ((x,), {"tau": torch.tensor([0.5, NAN])}, ValueError, "tau: expected a number"),
        ((x,), {"tau": torch.zeros(2, device="meta")}, ValueError, "tau: expected device"),
        ((x, None, "factor"), {"factor": 0.0}, ValueError, "factor: expected a number above 0"),
        ((x, None, "factor"), {"factor": NAN}, ValueError, "factor: expected a number above 0"),
        ((x, None, "factor"), {"factor": True}, TypeError, "factor: expected a float"),
        ((x,), {"banned_token": 9}, ValueError, "banned_token: expected an id"),
        ((), {"confidence": c, "banned_token": 1}, ValueError, "banned_token: expected None"),
    ):
        with pytest.raises(error, match=message):
            dlmkern.confidence_select(*arguments, **keywords)  # type: ignore[arg-type]


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    confidence, mask = (x.to(device) for x in random_case(7, 2, 2, torch.float64))
    parameter = torch.full((2,), 1.2, dtype=torch.float64, device=device)
    for rule in range(4):
        opcheck(OP, confidence, mask if rule % 2 else None, parameter, rule)
    compiled = torch.compile(
        lambda c, m, tau: dlmkern.confidence_select(confidence=c, mask=m, tau=tau).selected,
        fullgraph=True,
        backend="aot_eager",
    )
    for tau in (parameter / 2, 0.6):
        expected = dlmkern.confidence_select(confidence=confidence, mask=mask, tau=0.6).selected
        assert torch.equal(compiled(confidence, mask, tau), expected)
