"""dapd_select against the rule written with Python lists, and the official code's recorded steps."""

import functools
import json
import math
from fractions import Fraction
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import dlmkern
from dlmkern.ops.dapd_select import least_that_rounds_up_to
from tests.ops.support import DATA, DTYPES, assert_close, assert_same, opcheck

OP = "dapd_select"
NAN, INF = math.nan, math.inf
FLOAT32_MAX = float(torch.finfo(torch.float32).max)


class Graph:
    """What the rule computes on the way, for one sequence, in float64."""

    def __init__(self, scores: list[list[float]], confidence: list[float], valid: list[bool]) -> None:
        m = len(confidence)
        self.confidence = confidence
        self.candidates = [i for i in range(m) if valid[i] and math.isfinite(confidence[i])]

        def number(x: float) -> float:
            return x if abs(x) <= FLOAT32_MAX else 0.0  # which no NaN is

        self.raw = [[0.0] * m for _ in range(m)]
        for i, j in permutations(self.candidates, 2):
            self.raw[i][j] = (number(scores[i][j]) + number(scores[j][i])) / 2
        self.degree = [0.0] * m
        for i in range(m):
            for j in range(m):
                self.degree[i] += self.raw[i][j]
        self.normalized = [[x / max(*row, 1e-8) for x in row] for row in self.raw]
        key = [d * c for d, c in zip(self.degree, confidence, strict=True)]
        self.order = sorted(self.candidates, key=lambda i: -key[i])  # stable

    def select(
        self, tau: float, certain: float = INF, late: float = INF, symmetric: bool = False
    ) -> list[bool]:
        """`certain` and `late` are what confidences are compared with."""
        c = self.confidence
        taken: list[int] = []
        for i in self.order:
            edges = (
                self.normalized[i][j] > tau or (symmetric and self.normalized[j][i] > tau) for j in taken
            )
            if c[i] < certain and not any(edges):
                taken.append(i)
        chosen = {*taken, *(i for i in self.candidates if c[i] >= min(certain, late))}
        return [i in chosen for i in range(len(c))]


def graphs(scores: Tensor, confidence: Tensor, valid: Tensor | None = None) -> list[Graph]:
    """Of [B, M, M] and [B, M]."""
    valid = torch.ones_like(confidence, dtype=torch.bool) if valid is None else valid
    rows = zip(scores.tolist(), confidence.tolist(), valid.tolist(), strict=True)
    return [Graph(*row) for row in rows]


def truth(rows: list[Graph], tau: float, **options: Any) -> Tensor:
    return torch.tensor([row.select(tau, **options) for row in rows], dtype=torch.bool)


KINDS = ("attention", "ties", "circulant", "wild")


def random_case(
    kind: str, m: int, seed: int, batch: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, confidences and which positions are valid.

    "ties" has few different numbers, "circulant" sums of the same numbers in another order in every row,
    "wild" NaN, infinities, negative and huge scores, and NaN confidences.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=dtype)

    scores, confidence = uniform(batch, m, m), uniform(batch, m)
    valid = uniform(batch, m) < 0.85
    if kind == "attention":
        scores = (6 * scores**2).softmax(-1)
        confidence[uniform(batch, m) < 0.1] = 1.0
    elif kind == "ties":
        scores, confidence = (4 * scores).ceil() / 4, (3 * confidence).ceil() / 3
    elif kind == "circulant":
        places = torch.arange(m)
        scores = scores[:, 0][:, (places - places[:, None]).remainder(max(m, 1))] if m else scores
        confidence = torch.full_like(confidence, 0.7)
    else:
        specials = torch.tensor([NAN, INF, -INF, FLOAT32_MAX, -1.0, 0.0, 1e-30], dtype=dtype)
        drawn = torch.randint(len(specials), (batch, m, m), generator=generator)
        scores = torch.where(uniform(batch, m, m) < 0.4, specials[drawn], scores)
        confidence[uniform(batch, m) < 0.15] = NAN
        confidence[uniform(batch, m) < 0.1] = INF
        confidence[uniform(batch, m) < 0.1] = -INF
    return scores, confidence, valid


# tau and symmetric; each size takes a third of them
CHOICES = tuple(product((-0.5, 0.0, 1.0, 0.05, 0.25), (False, True)))
DIRECT: dict[str, Any] = {"variant": "direct", "certain": 0.8, "certain_dtype": torch.float64}


@functools.cache
def answers(
    kind: str, m: int, batch: int, dtype: torch.dtype, choices: tuple[tuple[float, bool], ...]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What is selected, for each choice: late, early, and by DIRECT with all positions valid."""
    scores, confidence, valid = random_case(kind, m, m, batch, dtype)
    some, everyone = graphs(scores, confidence, valid), graphs(scores, confidence)
    return [
        (
            truth(some, tau, late=0.9, symmetric=symmetric),
            truth(some, tau, symmetric=symmetric),
            truth(everyone, tau, certain=0.8, symmetric=symmetric),
        )
        for tau, symmetric in choices
    ]


@pytest.mark.parametrize("m", [0, 1, 5, 33, 65, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_against_truth(backend: str, device: torch.device, kind: str, m: int) -> None:
    few = backend == "triton"  # in the interpreter every step of the scan takes milliseconds
    choices, batch = CHOICES[m % 3 :: 3], 2
    if few:
        choices, batch = choices[-1:], 1
    for dtype in (torch.float32, torch.float64)[few:]:
        a, c, v = (x.to(device) for x in random_case(kind, m, m, batch, dtype))
        for (tau, symmetric), (late, early, direct) in zip(
            choices, answers(kind, m, batch, dtype, choices), strict=True
        ):
            found = dlmkern.dapd_select(a, c, v, tau, symmetric=symmetric, progress=0.5)
            assert found.dtype == torch.bool
            assert_same(found, late, f"late, {tau}")
            if few and m > 40:
                continue
            found = dlmkern.dapd_select(a, c, v, tau, symmetric=symmetric)
            assert_same(found, early, f"early, {tau}")
            found = dlmkern.dapd_select(a, c, None, tau, symmetric=symmetric, **DIRECT)
            assert_same(found, direct, f"direct, {tau}")


def test_many_positions(backend: str, device: torch.device) -> None:
    if backend == "triton":
        pytest.skip("hundreds of steps of the scan take too long in Triton's interpreter")
    for kind in ("attention", "circulant"):
        case = random_case(kind, 300, 1)
        found = dlmkern.dapd_select(*(x.to(device) for x in case), 0.15)
        assert_same(found, truth(graphs(*case), 0.15), kind)


def recorded() -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Settings and tensors of the recorded steps of DAPD's official code, of one sequence each."""
    tensors = load_file(DATA / "dapd_ops.safetensors")
    cases = []
    for case in json.loads((DATA / "dapd_ops.json").read_text()):
        prefix = f"case{case['case']:02d}."
        own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        for name in ("direct.order", "staged.order"):
            own[name] = own[name].unsqueeze(0)
        cases.append((case, {name: x[0] for name, x in own.items()}))
    return cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_official_commits(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    cases = recorded()[:: 15 if backend == "triton" else 1]  # of which the batch below has more
    committed = 0
    for case, data in cases:
        scores, confidence = (data[name].to(device, dtype) for name in ("attention", "confidence"))
        mask = data["mask_index"].bool().to(device)
        tau, progress = case["tau"], case["progress"]
        chosen = {
            "direct": dlmkern.dapd_select(scores, confidence, mask, tau, variant="direct"),
            "staged": dlmkern.dapd_select(scores, confidence, mask, tau, progress=progress),
        }
        for variant, selected in chosen.items():
            assert_same(selected, data[f"{variant}.selected"].bool(), f"case {case['case']}, {variant}")
            committed += int(selected.sum())
        early = dlmkern.dapd_select(scores, confidence, mask, tau)
        assert_same(early, data["staged.independent_set"].bool())
        # the masked positions by themselves
        own = dlmkern.dapd_select(scores[mask][:, mask], confidence[mask], None, tau, progress=progress)
        assert_same(own, data["staged.selected"].bool()[mask.cpu()])
    assert committed == sum(case[variant]["n_selected"] for case, _ in cases for variant in chosen) > 0


def test_official_steps_in_one_batch(backend: str, device: torch.device) -> None:
    """The official code takes the progress of a whole batch for that of one sequence, and its tau goes
    below zero: here a row is what it is alone."""
    cases = recorded()
    assert len(cases) == 30
    cases = cases[:: 3 if backend == "triton" else 1]
    longest = max(case["L"] for case, _ in cases)
    scores = torch.full((len(cases), longest, longest), NAN, device=device)
    confidence = torch.full((len(cases), longest), 0.99, device=device)
    valid = torch.zeros((len(cases), longest), dtype=torch.bool, device=device)
    for row, (case, data) in enumerate(cases):
        scores[row, : case["L"], : case["L"]] = data["attention"].to(device)
        confidence[row, : case["L"]] = data["confidence"].to(device)
        valid[row, : case["L"]] = data["mask_index"].bool().to(device)
    tau, progress = (
        torch.tensor([case[name] for case, _ in cases], dtype=torch.float64, device=device)
        for name in ("tau", "progress")
    )
    for variant in ("direct", "staged"):
        selected = dlmkern.dapd_select(scores, confidence, valid, tau, variant=variant, progress=progress)
        for row, (case, data) in enumerate(cases):
            assert_same(selected[row, : case["L"]], data[f"{variant}.selected"].bool())
            assert not selected[row, case["L"] :].any()


def test_the_rule_above_is_the_official_one() -> None:
    for _, data in recorded():
        c = data["confidence"].tolist()
        graph = Graph(data["attention"].tolist(), c, data["mask_index"].bool().tolist())
        assert_close(torch.tensor(graph.raw), data["raw"].numpy(), 1e-7)
        assert_close(torch.tensor(graph.normalized), data["normalized"].numpy(), 1e-6)
        assert_close(torch.tensor(graph.degree), data["degree"].numpy(), 1e-6)
        assert graph.order == data["staged.order"].tolist()
        assert [i for i in graph.order if c[i] < 1] == data["direct.order"].tolist()
        # the keys of what is scanned, but for a factor
        own, scanned = torch.tensor(graph.degree) * data["confidence"], data["direct.order"]
        assert_close(
            (own / own.max())[scanned], (data["staged.key"] / data["staged.key"].max())[scanned].numpy(), 1e-5
        )
        assert_close(data["direct.key"][scanned], data["staged.key"][scanned].numpy(), 1e-7)


def select(device: torch.device, scores: Any, confidence: Any, tau: float, **options: Any) -> list[int]:
    """The indices of what is selected."""
    a, c = (torch.tensor(x, dtype=torch.float64, device=device) for x in (scores, confidence))
    return dlmkern.dapd_select(a, c, None, tau, **options).nonzero().flatten().tolist()  # type: ignore[no-any-return]


def test_by_hand(backend: str, device: torch.device) -> None:
    # degrees 8, 10, 7, 1; row 3's largest weight is 1, to position 1
    s = [[0.0, 5.0, 3.0, 0.0], [5.0, 0.0, 4.0, 1.0], [3.0, 4.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    # 1 first; 0 has 5/5 to it, 2 has 4/4, 3 has 1/1
    assert select(device, s, [0.5] * 4, 0.9) == [1]
    # with tau = 1 no weight is above it
    assert select(device, s, [0.5] * 4, 1.0) == [0, 1, 2, 3]
    # confidence turns the order: 8, 2, 3.5, 0.5; 2 has 3/4 to 0, and 3 has nothing but its weight to 1
    assert select(device, s, [1.0, 0.2, 0.5, 0.5], 0.8) == [0, 2, 3]
    assert select(device, s, [1.0, 0.2, 0.5, 0.5], 0.7) == [0, 3]
    # the diagonal counts for nothing, and only the mean of both directions counts
    a = [[9.0, 10.0, 6.0, 0.0], [0.0, 9.0, 8.0, 2.0], [0.0, 0.0, 9.0, 0.0], [0.0, 0.0, 0.0, 9.0]]
    assert select(device, a, [1.0, 0.2, 0.5, 0.5], 0.7) == [0, 3]


def test_edges_go_one_way(backend: str, device: torch.device) -> None:
    # 0 and 1 have a weight of 1: all that 1 has, little for 0, whose largest weight is 10, to 2
    s = [[0.0, 1.0, 10.0], [1.0, 0.0, 0.0], [10.0, 0.0, 0.0]]
    # 0 goes first: 1 has an edge to it
    assert select(device, s, [0.9, 0.9, 0.1], 0.5) == [0]
    # 1 goes first (a confidence of 0.05 leaves 0 a key of 0.55): 0 has none to 1
    assert select(device, s, [0.05, 0.9, 0.01], 0.5) == [0, 1]
    assert select(device, s, [0.05, 0.9, 0.01], 0.5, symmetric=True) == [1, 2]


def test_ties_go_to_the_lower_index(backend: str, device: torch.device) -> None:
    for m in (2, 7, 33):
        for value in (0.0, 0.3, 1e-12, -1.0):
            same = [[value] * m for _ in range(m)]
            assert select(device, same, [0.4] * m, -INF) == [0]
        above = [[1.0] * m for _ in range(m)]
        assert select(device, above, [0.4] * m, 0.99) == [0]
    # 1 and 3 have the same key, and an edge between them
    s = [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 2.0], [0.0, 1.0, 0.0, 1.0], [1.0, 2.0, 1.0, 0.0]]
    assert select(device, s, [0.5] * 4, 0.4) == [1]
    assert select(device, s, [0.5, 0.5, 0.5, 0.5000001], 0.4) == [3]
    assert select(device, s, [0.0, -0.0, -0.0, 0.0], 0.4) == [0, 2]  # zeros of both signs are alike


def test_degrees_are_added_in_order(backend: str, device: torch.device) -> None:
    # from the left, 2^-53 + 2^-53 + 1 is more than 1, and 1 + 2^-53 + 2^-53 is 1
    e = 2.0**-53
    rising, falling = (e, e, 1.0), (1.0, e, e)
    for first, other, best in ((rising, falling, 0), (falling, rising, 3)):
        s = [[0.0] * 8 for _ in range(8)]
        for i, places, weights in ((0, (1, 2, 4), first), (3, (5, 6, 7), other)):
            for j, weight in zip(places, weights, strict=True):
                s[i][j] = s[j][i] = weight
        c = [0.5, 0.1, 0.1, 0.5, 0.1, 0.1, 0.1, 0.1]
        assert select(device, s, c, -0.5) == [best]  # there are edges everywhere


def test_an_edge_is_above_tau_to_the_bit(backend: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    n = 10 if backend == "triton" else 200
    weight, peak = torch.rand((2, n), generator=generator, dtype=torch.float64).sort(0).values
    # three positions: 1 has `weight` to 0 and `peak` to 2; 0 goes first
    scores = torch.zeros((n, 3, 3), dtype=torch.float64)
    scores[:, 0, 1] = scores[:, 1, 0] = weight
    scores[:, 2, 1] = scores[:, 1, 2] = peak
    confidence = torch.tensor([1e6, 1.0, 1e-9], dtype=torch.float64).expand(n, 3)
    ratio = weight / peak
    below = torch.nextafter(ratio, torch.zeros_like(ratio))
    a, c = scores.to(device), confidence.to(device)
    for tau, joins in ((ratio, True), (below, False)):
        found = dlmkern.dapd_select(a, c, None, tau.to(device))
        assert found[:, 0].all()
        assert (found[:, 1] == joins).all()


def test_a_peak_is_at_least_1e_8(backend: str, device: torch.device) -> None:
    for weight, chosen in ((1e-9, [0, 1]), (2e-8, [0])):  # 0.1 and 1 of the peak
        assert select(device, [[0.0, weight], [weight, 0.0]], [0.5, 0.4], 0.2) == chosen


def test_scores_beyond_float32_count_as_zero(backend: str, device: torch.device) -> None:
    for dtype in (torch.float64, torch.float32):
        c = torch.tensor([0.5, 0.6, 0.7], dtype=dtype, device=device)

        def run(junk: float, tau: float, c: Tensor = c) -> Tensor:
            s = [[junk, junk, 0.2], [0.5, junk, junk], [0.2, 0.1, junk]]
            return dlmkern.dapd_select(torch.tensor(s, dtype=c.dtype, device=device), c, None, tau)

        for tau in (0.1, 0.3, 0.9):
            expected = run(0.0, tau)
            for junk in (NAN, INF, -INF) + ((1e39, -1e300) if dtype == torch.float64 else ()):
                assert_same(run(junk, tau), expected)
    # sums of the largest numbers do not overflow
    big = torch.full((4, 4), FLOAT32_MAX, device=device)
    assert dlmkern.dapd_select(
        big, torch.tensor([0.1, 0.3, 0.2, 0.3], device=device), None, 0.5
    ).tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_what_is_no_candidate_plays_no_part(backend: str, device: torch.device) -> None:
    m = 9
    scores, confidence, valid = (x.to(device) for x in random_case("attention", m, 3, 2))
    valid[:, 2] = False
    own = dlmkern.dapd_select(scores, confidence, valid, 0.2, progress=1.0)
    assert own.any(1).all()
    assert not own[~valid].any()
    for junk in (NAN, INF, 1e30, -1.0):
        a, c = scores.clone(), confidence.clone()
        a.masked_fill_(~valid[:, :, None] | ~valid[:, None, :], junk)
        c.masked_fill_(~valid, junk)
        assert_same(dlmkern.dapd_select(a, c, valid, 0.2, progress=1.0), own)
    for variant in ("staged", "direct"):
        options: dict[str, Any] = {"variant": variant, "certain": 0.7, "progress": 1.0}
        expected = dlmkern.dapd_select(scores, confidence, valid, 0.2, **options)
        for junk in (NAN, INF, -INF):  # candidates have finite confidences
            c = confidence.masked_fill(~valid, junk)
            found = dlmkern.dapd_select(scores, c, None, 0.2, **options)
            assert_same(found, expected)
            assert not found[~valid].any()
    nobody = dlmkern.dapd_select(
        scores, confidence, torch.zeros_like(valid), 0.2, progress=1.0, late_graph=False
    )
    assert not nobody.any()
    assert not dlmkern.dapd_select(scores, torch.full_like(confidence, NAN), None, 0.2).any()


def test_certain_ones_neither_block_nor_vanish(backend: str, device: torch.device) -> None:
    same = [[1.0] * 5 for _ in range(5)]
    c = [0.3, 1.0, 0.5, 1.0, 0.4]
    # all have edges to all: the scan takes one, and both certain ones come in beside it
    assert select(device, same, c, 0.5, variant="direct") == [1, 2, 3]
    assert select(device, same, c, 0.5) == [1]
    assert select(device, same, c, 0.5, variant="direct", certain=0.4) == [0, 1, 2, 3, 4]
    assert select(device, same, c, 0.5, variant="direct", certain=INF) == [1]
    assert select(device, same, c, 0.5, variant="direct", certain=-INF) == [0, 1, 2, 3, 4]
    # but they count in maxima: 1's weight to 2, which goes before it, is little beside that to 0
    s = [[0.0, 10.0, 0.0], [10.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    assert select(device, s, [1.0, 0.01, 0.9], 0.5, variant="direct") == [0, 1, 2]
    assert select(device, s, [1.0, 0.01, 0.9], 0.05, variant="direct") == [0, 2]
    # and in degrees: for its weight to 0, 1 goes before 2
    assert select(device, s, [1.0, 0.1, 0.9], 0.05, variant="direct") == [0, 1]


def test_certain_is_compared_in_a_dtype(backend: str, device: torch.device) -> None:
    def certain(c: list[float], dtype: torch.dtype, level: float = 1.0) -> list[float]:
        """Those of c that are; all have an edge to a position that goes before them."""
        star = [[float(0 in (i, j)) for i in range(len(c) + 1)] for j in range(len(c) + 1)]
        options: dict[str, Any] = {"variant": "direct", "certain": level, "certain_dtype": dtype}
        first, *rest = select(device, star, [0.6, *c], 0.5, **options)
        assert first == 0
        return [c[i - 1] for i in rest]

    assert certain([0.9981, 0.9980, 0.99, 1.0], torch.bfloat16) == [0.9981, 1.0]
    for dtype, bits in ((torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 11)):
        middle = 1 - 2.0 ** -(bits + 1)  # between 1, which is even, and the number below it
        below, least = math.nextafter(middle, 0.0), 1 - 2.0**-bits
        assert certain([middle, below, least, 1.0, 1.5], dtype) == [middle, 1.0, 1.5]
        # the middle below an odd number goes down to an even one
        odd = 1 - 2.0**-bits
        middle = 1 - 1.5 * 2.0**-bits
        above = math.nextafter(middle, 1.0)
        assert certain([middle, above, odd, 0.95], dtype, odd) == [above, odd]
    assert certain([math.nextafter(1.0, 0.0), 0.5, 1.0], torch.float64) == [1.0]


def test_late_rows_take_the_confident_ones_too(backend: str, device: torch.device) -> None:
    same = [[1.0] * 5 for _ in range(5)]
    c = [0.3, 0.95, 0.5, 0.9, math.nextafter(0.9, 0.0)]
    for options, expected in (
        ({}, [1]),
        ({"progress": None}, [1]),
        ({"progress": 0.49}, [1]),
        ({"progress": 0.5}, [1, 3]),
        ({"progress": 1}, [1, 3]),
        ({"progress": 0.5, "late": 0.5}, [1, 2, 3, 4]),
        ({"progress": 0.5, "late": np.float32(0.5), "late_from": Fraction(1, 2)}, [1, 2, 3, 4]),
        ({"progress": 0.5, "late": -INF}, [0, 1, 2, 3, 4]),
        ({"progress": 0.5, "late": INF}, [1]),
        ({"progress": 0.79, "late_from": 0.8}, [1]),
        ({"progress": 0.8, "late_from": 0.8}, [1, 3]),
        ({"progress": -1.0, "late_from": -INF}, [1, 3]),
        ({"progress": 1.0, "variant": "direct"}, [1]),
    ):
        assert select(device, same, c, 0.5, **options) == expected, options
    # float32's 0.9 lies below 0.9
    x = torch.tensor([0.95, 0.9], device=device)
    assert dlmkern.dapd_select(torch.ones((2, 2), device=device), x, None, 0.5, progress=1.0).tolist() == [
        True,
        False,
    ]


def test_late_rows_without_the_graph(backend: str, device: torch.device) -> None:
    scores, confidence, valid = (x.to(device) for x in random_case("wild", 9, 2, 4))
    confidence[2:] *= 0.5  # nobody reaches 0.9
    progress = torch.tensor([0.6, 0.1, 0.5, 0.4], device=device)
    late = progress >= 0.5
    found = dlmkern.dapd_select(scores, confidence, valid, 0.2, progress=progress, late_graph=False)
    graph = dlmkern.dapd_select(scores, confidence, valid, 0.2)
    finite = valid & confidence.isfinite()
    with dlmkern.use_backend("reference"):
        threshold = dlmkern.confidence_select(confidence=confidence, mask=finite, tau=0.9).selected
    assert_same(found[~late], graph[~late])
    assert_same(found[late], threshold[late])
    assert not torch.equal(graph[late], threshold[late])
    scores, confidence, valid = scores[:2], confidence[:2], valid[:2]
    for options in ({}, {"variant": "direct", "progress": 1.0}):  # then no row is late
        with_graph = dlmkern.dapd_select(scores, confidence, valid, 0.2, **options)
        assert_same(
            dlmkern.dapd_select(scores, confidence, valid, 0.2, late_graph=False, **options), with_graph
        )


def test_parameters_may_differ_by_row(backend: str, device: torch.device) -> None:
    scores, confidence, _ = random_case("attention", 8, 5)
    confidence.clamp_(max=0.95)
    (graph,) = graphs(scores, confidence)
    a, c = scores.to(device).expand(3, -1, -1), confidence.to(device).expand(3, -1)
    taus, progress = (0.0, 0.5, 1.0), (0.75, 0.25, 0.5)
    expected = truth([graph], 0.0, late=0.6), truth([graph], 0.5), truth([graph], 1.0, late=0.6)
    assert len({str(x) for x in expected}) == 3
    for dtype in (torch.float64, torch.float32, torch.bfloat16)[: 1 if backend == "triton" else 3]:
        tau, share = (torch.tensor(x, dtype=dtype, device=device) for x in (taus, progress))
        for level in (tau, tau.repeat_interleave(2)[::2]):
            found = dlmkern.dapd_select(a, c, None, level, progress=share, late=0.6)
            assert_same(found, torch.cat(expected))
        for level in (tau[1], tau[1:2]):
            assert_same(dlmkern.dapd_select(a[1], c[1], None, level, progress=share[1]), expected[1][0])
    whole = torch.tensor([0, 1, 1], device=device)
    found = dlmkern.dapd_select(a, c, None, whole, progress=whole, late=0.6)
    assert_same(found, torch.cat([truth([graph], 0.0), expected[2], expected[2]]))


def test_unchecked_parameters_have_an_answer(backend: str, device: torch.device) -> None:
    """On an accelerator nobody looks at the numbers."""
    a, c = torch.ones((1, 4, 4), dtype=torch.float64, device=device), torch.ones((1, 4), device=device)

    def run(*parameters: float) -> list[bool]:
        tau, certain, late = (torch.tensor([x], dtype=torch.float64, device=device) for x in parameters)
        return torch.ops.dlmkern.dapd_select(a, c, None, tau, certain, late, False)[0].tolist()  # type: ignore[no-any-return]

    first, everyone = [True, False, False, False], [True] * 4
    assert run(NAN, INF, INF) == everyone  # nothing is above NaN, so there is no edge
    assert run(-INF, INF, INF) == first
    assert run(0.5, NAN, NAN) == first  # no confidence reaches NaN
    assert run(0.5, 1.0, INF) == run(0.5, INF, 1.0) == everyone


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    scores, confidence, valid = random_case("attention", 12, 7, 2)
    for kind in DTYPES[:: 3 if backend == "triton" else 1]:
        a, c = scores.to(dtype), confidence.to(kind)
        expected = truth(graphs(a, c, valid), 0.3, late=0.9)
        found = dlmkern.dapd_select(*(x.to(device) for x in (a, c, valid)), 0.3, progress=1.0)
        assert_same(found, expected)


def test_float64_is_not_rounded(backend: str, device: torch.device) -> None:
    even = [[0.0, 1.0], [1.0, 0.0]]
    assert select(device, even, [1.0, 1.0 + 1e-12], 0.5) == [1]
    uneven = [[0.0, 1.0, 0.5], [1.0, 0.0, 0.5 + 1e-12], [0.5, 0.5 + 1e-12, 0.0]]
    assert select(device, uneven, [1.0] * 3, 0.1) == [1]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (0,)], ids=str)
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    a = torch.zeros((*shape, shape[-1]), device=device)
    c = torch.zeros(shape, device=device)
    for options in ({}, {"variant": "direct"}, {"progress": 1.0}, {"progress": 1.0, "late_graph": False}):
        for valid in (None, torch.ones(shape, dtype=torch.bool, device=device)):
            found = dlmkern.dapd_select(a, c, valid, 0.1, **options)
            assert (found.shape, found.dtype) == (shape, torch.bool)


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    m = 7
    scores, confidence, valid = (x.to(device) for x in random_case("attention", m, 8, 3))
    expected = dlmkern.dapd_select(scores, confidence, valid, 0.2, progress=1.0)
    wide = torch.full((3, m + 2, 2 * m + 3), NAN, device=device)
    wide[:, 1:-1, 3::2] = scores
    line = torch.full((3, 2 * m + 3), NAN, device=device)
    line[:, 3::2] = confidence
    flags = torch.ones((3, m, 3), dtype=torch.bool, device=device)
    flags[..., 1] = valid
    for a, c, v in (
        (scores.mT.contiguous().mT, confidence.T.contiguous().T, valid.T.contiguous().T),
        (scores.mT, confidence, valid),  # another matrix, whose mean with its transpose is the same
        (wide[:, 1:-1, 3::2], line[:, 3::2], flags[..., 1]),
        (scores.permute(1, 2, 0).contiguous().permute(2, 0, 1), confidence, valid),
    ):
        assert_same(dlmkern.dapd_select(a, c, v, 0.2, progress=1.0), expected)
    shared = dlmkern.dapd_select(
        scores[:1].expand(3, -1, -1), confidence[:1].expand(3, -1), valid[0].expand(3, -1), 0.2, progress=1.0
    )
    assert_same(shared, expected[:1].expand(3, -1))


def test_gradients_do_not_flow(backend: str, device: torch.device) -> None:
    scores, confidence, valid = (x.to(device) for x in random_case("attention", 5, 9, 2))
    expected = dlmkern.dapd_select(scores, confidence, valid, 0.2)
    found = dlmkern.dapd_select(scores.requires_grad_(), confidence.requires_grad_(), valid, 0.2)
    assert not found.requires_grad
    assert_same(found, expected)


@settings(deadline=None, max_examples=100)
@given(
    kind=st.sampled_from(KINDS),
    m=st.integers(0, 14),
    seed=st.integers(0, 2**16),
    tau=st.sampled_from([-INF, -0.1, 0.0, 0.05, 0.25, 0.5, 1.0, INF]),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_invariants(
    kind: str, m: int, seed: int, tau: float, symmetric: bool, dtype: torch.dtype, backend_name: str
) -> None:
    scores, confidence, valid = random_case(kind, m, seed, 3, dtype)
    generator = torch.Generator().manual_seed(seed)
    taus = torch.tensor([tau, 0.3, tau])
    options: dict[str, Any] = {"symmetric": symmetric}
    with dlmkern.use_backend(backend_name):
        selected = dlmkern.dapd_select(scores, confidence, valid, taus, **options)
        drawn = graphs(scores, confidence, valid)
        for row, level in enumerate(taus.tolist()):
            assert selected[row].tolist() == drawn[row].select(level, **options)
            # alone, and with more that is no candidate
            alone = dlmkern.dapd_select(scores[row], confidence[row], valid[row], level, **options)
            assert torch.equal(alone, selected[row])
        more = torch.full((3, m + 5, m + 5), NAN, dtype=dtype)
        more[:, 2 : m + 2, 2 : m + 2] = scores
        c = torch.nn.functional.pad(confidence, (2, 3), value=1e9)
        v = torch.nn.functional.pad(valid, (2, 3))
        padded = dlmkern.dapd_select(more, c, v, taus, **options)
        assert torch.equal(padded[:, 2 : m + 2], selected)
        assert not padded[:, :2].any()
        assert not padded[:, m + 2 :].any()
        # one is always selected, and only candidates are
        candidate = valid & confidence.isfinite()
        assert torch.equal(selected.any(1), candidate.any(1))
        assert not (selected & ~candidate).any()
        # powers of two change no proportion
        doubled = torch.ldexp(scores.double(), torch.tensor(10)), torch.ldexp(confidence, torch.tensor(-4))
        if kind != "wild":
            assert torch.equal(dlmkern.dapd_select(doubled[0], doubled[1], valid, taus, **options), selected)
        # late and certain ones come in
        late = dlmkern.dapd_select(scores, confidence, valid, taus, progress=0.5, late=0.7, **options)
        assert torch.equal(late, selected | (candidate & (confidence.double() >= 0.7)))
        certain = dlmkern.dapd_select(scores, confidence, valid, taus, **DIRECT, **options)
        sure = candidate & (confidence.double() >= 0.8)
        assert not (sure & ~certain).any()
        # an edge between two of the scan, and from each that is left out to one of the scan
        for row, level in enumerate(taus.tolist()):
            edge = torch.tensor(drawn[row].normalized, dtype=torch.float64).reshape(m, m) > level
            edge = (edge | edge.T if symmetric else edge).fill_diagonal_(False)
            scanned = certain[row] & ~sure[row]
            left_out = candidate[row] & ~certain[row]
            assert edge[left_out][:, scanned].any(1).all()
            assert not (edge & edge.T)[scanned][:, scanned].any()
        if kind == "attention":  # no two keys are alike
            order = torch.randperm(m, generator=generator)
            moved = dlmkern.dapd_select(
                scores[:, order][:, :, order], confidence[:, order], valid[:, order], taus, **options
            )
            assert torch.equal(moved, selected[:, order])


@settings(deadline=None, max_examples=300)
@given(
    dtype=st.sampled_from(DTYPES),
    level=st.floats(allow_nan=False) | st.floats(-2, 2) | st.sampled_from([1.0, 0.998, 65504.0, -65504.0]),
    steps=st.integers(-3, 3),
)
def test_least_that_rounds_up(dtype: torch.dtype, level: float, steps: int) -> None:
    least = least_that_rounds_up_to(level, dtype)
    assert isinstance(least, float)
    for x in (least, math.nextafter(least, -INF), level, math.nextafter(level, INF)):
        for _ in range(abs(steps)):
            x = math.nextafter(x, math.copysign(INF, steps))
        assert (rounded(x, dtype) >= level) == (x >= least), x
        # what a confidence of fewer bits goes through
        x = float(torch.tensor(x, dtype=torch.float32))
        assert (torch.tensor(x).to(dtype).double().item() >= level) == (x >= least), x


def rounded(x: float, dtype: torch.dtype) -> float:
    """To nearest, ties to even, at once: torch goes from float64 to float32 and from there to 16 bits."""
    if not math.isfinite(x) or dtype == torch.float64:
        return x
    info = torch.finfo(dtype)
    step = Fraction(info.eps) * Fraction(2) ** (math.frexp(max(abs(x), info.smallest_normal))[1] - 1)
    y = round(Fraction(x) / step) * step
    return float(y) if abs(y) <= info.max else math.copysign(INF, x)


def test_meta_tensors_have_shapes() -> None:
    scores, confidence = (torch.empty(shape, device="meta") for shape in ((2, 5, 5), (2, 5)))
    for options in ({}, {"variant": "direct"}, {"progress": 1.0, "late_graph": False}):
        found = dlmkern.dapd_select(scores, confidence, None, 0.1, **options)
        assert (found.shape, found.dtype, found.device.type) == ((2, 5), torch.bool, "meta")


def test_errors() -> None:
    scores, confidence, valid = random_case("attention", 3, 0, 2)
    good = {"scores": scores, "confidence": confidence, "valid": valid, "tau": 0.1}
    rows = torch.tensor([0.1, 0.2])
    for changes, error, message in (
        ({"scores": scores.long()}, TypeError, "scores: expected dtype float64 or .*, got int64"),
        (
            {"scores": scores[:, :2]},
            ValueError,
            r"scores: expected shape \[M, M\] or \[B, M, M\], got \[2, 2, 3\]",
        ),
        ({"scores": scores[0, 0]}, ValueError, r"scores: expected shape \[M, M\] or \[B, M, M\], got \[3\]"),
        ({"scores": scores[None]}, ValueError, r"scores: expected shape .*, got \[1, 2, 3, 3\]"),
        ({"scores": None}, TypeError, "scores: expected a tensor or array, got None"),
        ({"scores": scores.to_sparse()}, TypeError, "scores: expected a dense tensor"),
        ({"confidence": confidence.bool()}, TypeError, "confidence: expected dtype float64 or .*, got bool"),
        ({"confidence": confidence[0]}, ValueError, r"confidence: expected shape \[2, 3\] to go with scores"),
        ({"confidence": confidence.to("meta")}, ValueError, "confidence: expected device cpu like scores"),
        ({"confidence": None}, TypeError, "confidence: expected a tensor or array, got None"),
        (
            {"confidence": [0.1]},
            TypeError,
            "confidence: expected a tensor or an array with __dlpack__, got list",
        ),
        ({"valid": valid.float()}, TypeError, "valid: expected dtype bool, got float32"),
        ({"valid": valid[:, :2]}, ValueError, r"valid: expected shape \[2, 3\] to go with scores"),
        ({"valid": valid.to("meta")}, ValueError, "valid: expected device cpu"),
        ({"tau": "0.1"}, TypeError, "tau: expected a float or a tensor, got str"),
        ({"tau": True}, TypeError, "tau: expected a float or a tensor, got bool"),
        ({"tau": NAN}, ValueError, "tau: expected a number, got nan"),
        ({"tau": torch.tensor([0.1, NAN])}, ValueError, "tau: expected a number, got nan"),
        ({"tau": torch.tensor(NAN)}, ValueError, "tau: expected a number, got nan"),
        ({"tau": rows[:1]}, ValueError, r"tau: expected a number or shape \[2\], got \[1\]"),
        ({"tau": rows.to("meta")}, ValueError, "tau: expected device cpu, got meta"),
        ({"tau": rows > 0}, TypeError, "tau: expected dtype float64 or .*, got bool"),
        ({"tau": 10**400}, ValueError, "tau: expected a number that a float can hold"),
        ({"variant": "both"}, ValueError, "variant: expected one of staged, direct, got 'both'"),
        ({"variant": None}, ValueError, "variant: expected one of staged, direct, got None"),
        ({"progress": "half"}, TypeError, "progress: expected a float or a tensor, got str"),
        ({"progress": NAN}, ValueError, "progress: expected a number, got nan"),
        ({"progress": torch.tensor([NAN, 0.5])}, ValueError, "progress: expected a number, got nan"),
        ({"progress": rows[None]}, ValueError, r"progress: expected a number or shape \[2\], got \[1, 2\]"),
        ({"certain": "1"}, TypeError, "certain: expected a float, got str"),
        ({"certain": rows}, TypeError, "certain: expected a float, got Tensor"),
        ({"certain": NAN}, ValueError, "certain: expected a number, got nan"),
        ({"late": None}, TypeError, "late: expected a float, got NoneType"),
        ({"late": NAN}, ValueError, "late: expected a number, got nan"),
        ({"late": 10**400}, ValueError, "late: expected a number that a float can hold"),
        ({"late_from": True}, TypeError, "late_from: expected a float, got bool"),
        ({"late_from": NAN}, ValueError, "late_from: expected a number, got nan"),
        ({"symmetric": 1}, TypeError, "symmetric: expected a bool, got int"),
        ({"late_graph": None}, TypeError, "late_graph: expected a bool, got NoneType"),
        (
            {"certain_dtype": torch.int64},
            TypeError,
            "certain_dtype: expected a floating-point dtype, got torch.int64",
        ),
        (
            {"certain_dtype": "float32"},
            TypeError,
            "certain_dtype: expected a floating-point dtype, got 'float32'",
        ),
    ):
        arguments: dict[str, Any] = good | changes
        with pytest.raises(error, match=message):
            dlmkern.dapd_select(**arguments)


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    scores, confidence, valid = (x.to(device) for x in random_case("attention", 6, 6, 2))
    numbers = [
        torch.tensor(x, dtype=torch.float64, device=device) for x in ([0.1, 0.2], [INF, 0.8], [0.9, INF])
    ]
    opcheck(OP, scores, confidence, None, *numbers, False)
    opcheck(OP, scores, confidence.double(), valid, *numbers, True)

    def both(a: Tensor, c: Tensor, tau: Tensor) -> tuple[Tensor, ...]:
        return (
            dlmkern.dapd_select(a, c, valid, tau, progress=tau, late_from=0.15, late_graph=False),
            dlmkern.dapd_select(a, c, None, 0.1, progress=0.7),
            dlmkern.dapd_select(
                a[0], c[0], None, 0.1, variant="direct", certain=0.9, certain_dtype=torch.bfloat16
            ),
        )

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    arguments = scores, confidence, numbers[0]
    for one, expected in zip(compiled(*arguments), both(*arguments), strict=True):
        assert torch.equal(one, expected)
