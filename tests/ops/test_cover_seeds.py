"""cover_seeds against the rule written with Python lists."""

import math
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from tests.ops.support import DTYPES, assert_same, opcheck

OP = "cover_seeds"
NAN, INF = math.nan, math.inf
KINDS = ("probabilities", "ties", "wild")
RULES = tuple({"combine": c, "suspects": s} for c, s in product(("product", "sum"), ("mean", "above_mean")))


def rule(
    arguments: list[list[float]],
    eligible: list[bool],
    combine: str = "product",
    suspects: str = "mean",
    most: float = INF,
    drift: bool = True,
) -> tuple[list[bool], list[float]]:
    """Seeds and scores of one row, in Python's float64; the last of `arguments` may be drift."""
    n = len(eligible)
    taking_part = [i for i in range(n) if eligible[i] and all(math.isfinite(x[i]) for x in arguments)]
    factors = []
    for x in arguments:
        largest = max((x[i] for i in taking_part), default=0.0)
        factors.append([max(x[i], 0.0) / largest if largest > 0 else 0.0 for i in range(n)])
    if drift and len(arguments) > 1:
        factors[-1] = [1 - x for x in factors[-1]]
    score = [0.0] * n
    for i in taking_part:
        score[i] = factors[0][i]
        for factor in factors[1:]:
            score[i] = score[i] + factor[i] if combine == "sum" else score[i] * factor[i]
    total = 0.0
    for number in score:
        total += number
    largest = max(score, default=0.0)
    if suspects == "mean":
        count = seeds_for(total / largest if largest > 0 else 0.0)
    else:
        count = seeds_for(sum(score[i] > total / len(taking_part) for i in taking_part))
    order = sorted(range(n), key=lambda i: -score[i])  # stable
    chosen = {i for i in order[: int(min(count, most, n))] if score[i] > 0}
    return [i in chosen for i in range(n)], score


def seeds_for(suspected: float) -> int:
    """ceil(sqrt(t)), exactly: t has a square root in whole numbers, or it is between two of them."""
    whole = math.ceil(Fraction(suspected))
    return math.isqrt(whole - 1) + 1 if whole > 0 else 0


def truth(
    arguments: tuple[Tensor | None, ...], eligible: Tensor | None, most: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """`arguments` are uncertainty, influence and drift, [B, n]."""
    given_ = [x.double().tolist() for x in arguments if x is not None]
    batch, n = arguments[0].shape  # type: ignore[union-attr]
    bounds = [INF] * batch if most is None else most if isinstance(most, list) else [most] * batch
    rows = [
        rule(
            [x[b] for x in given_],
            [True] * n if eligible is None else eligible[b].tolist(),
            most=bounds[b],
            drift=arguments[2] is not None,
            **options,
        )
        for b in range(batch)
    ]
    seeds = np.array([row[0] for row in rows], dtype=bool).reshape(batch, n)
    return seeds, np.array([row[1] for row in rows], dtype=np.float64).reshape(batch, n)


def random_case(
    kind: str, n: int, seed: int, batch: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uncertainty, influence, drift and which positions are eligible.

    "ties" has few different numbers, "wild" NaN, infinities, negative, huge and tiny numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand((batch, n), generator=generator, dtype=torch.float64)

    numbers = [uniform() ** 4, 3 * uniform(), uniform() ** 2]
    if kind == "ties":
        numbers = [(3 * x).ceil() / 4 for x in numbers]
    elif kind == "wild":
        info = torch.finfo(dtype)
        special = torch.tensor([NAN, INF, -INF, -1.0, -0.0, 0.0, info.max, info.tiny, info.tiny * info.eps])
        for x in numbers:
            drawn = torch.randint(len(special), (batch, n), generator=generator)
            x.copy_(torch.where(uniform() < 0.15, special.double()[drawn], x))
    eligible = uniform() < 0.8
    return *(x.to(dtype) for x in numbers), eligible  # type: ignore[return-value]


def assert_seeds(found: dlmkern.CoverSeeds, expected: tuple[np.ndarray, np.ndarray], what: str = "") -> None:
    assert (found.seeds.dtype, found.score.dtype) == (torch.bool, torch.float64)
    assert_same(found.score, expected[1], what)
    assert_same(found.seeds, expected[0], what)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 33, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_against_truth(backend: str, device: torch.device, kind: str, n: int) -> None:
    few = backend == "triton"
    for dtype in (torch.float32, torch.float64)[few:]:
        u, g, d, ok = random_case(kind, n, n, dtype=dtype)
        for options, (arguments, eligible), most in zip(
            RULES[:: 3 if few else 1] * 2,
            (
                ((u, g, d), ok),
                ((u, g, d), None),
                ((u, None, d), ok),
                ((u, g, None), ok),
                ((u, None, None), None),
            ),
            (None, 3, 0, [1, 2], None),
            strict=False,
        ):
            bound = torch.tensor(most, device=device) if isinstance(most, list) else most
            tensors = (None if x is None else x.to(device) for x in (*arguments, eligible))
            found = dlmkern.cover_seeds(*tensors, **options, most=bound)  # type: ignore[arg-type]
            assert_seeds(found, truth(arguments, eligible, most, **options), f"{options}, {most}")


@pytest.mark.parametrize("n", [300, 1030])
def test_many_positions(backend: str, device: torch.device, n: int) -> None:
    if backend == "triton" and n > 300:
        pytest.skip("a thousand positions take too long in Triton's interpreter")
    for kind in KINDS[:: 3 if backend == "triton" else 1]:
        *arguments, ok = random_case(kind, n, 1, dtype=torch.float64)
        found = dlmkern.cover_seeds(*(x.to(device) for x in (*arguments, ok)))
        assert_seeds(found, truth(tuple(arguments), ok), kind)
        assert kind == "wild" or 4 < found.seeds.sum() / 2 < math.isqrt(n) + 1


def chosen(
    device: torch.device, *numbers: list[float] | None, **options: Any
) -> tuple[list[int], list[float]]:
    """The indices of the seeds, and the scores."""
    tensors = (None if x is None else torch.tensor(x, dtype=torch.float64, device=device) for x in numbers)
    found = dlmkern.cover_seeds(*tensors, **options)  # type: ignore[arg-type]
    return found.seeds.nonzero().flatten().tolist(), found.score.tolist()


def test_by_hand(backend: str, device: torch.device) -> None:
    u, g, d = [0.1, 0.4, 0.2, 0.0], [2.0, 1.0, 4.0, 4.0], [0.0, 5.0, 10.0, 0.0]
    # shares of the largest: 1/4 1 1/2 0, 1/2 1/4 1 1, and what is left of 0 1/2 1 0
    assert chosen(device, u)[1] == [0.25, 1.0, 0.5, 0.0]
    assert chosen(device, u, g)[1] == [0.125, 0.25, 0.5, 0.0]
    assert chosen(device, u, g, d)[1] == [0.125, 0.125, 0.0, 0.0]
    assert chosen(device, u, None, d)[1] == [0.25, 0.5, 0.0, 0.0]
    assert chosen(device, u, g, d, combine="sum")[1] == [1.75, 1.75, 1.5, 2.0]
    # scores 1/4 1 1/2 0: t = 1.75, or two above the mean of 7/16: two seeds either way
    assert chosen(device, u)[0] == [1, 2]
    assert chosen(device, u, suspects="above_mean")[0] == [1, 2]
    # t = 3.5, whose root is above 1; by above_mean one exceeds 7/4: one seed
    assert chosen(device, u, g, d, combine="sum")[0] == [0, 3]
    assert chosen(device, u, g, d, combine="sum", suspects="above_mean")[0] == [3]


def test_number_of_seeds(backend: str, device: torch.device) -> None:
    """ceil(sqrt(n_t pi_t)), at the squares and next to them: t positions alike have the sum t."""
    for t in (1, 2, 5, 9, 10) if backend == "triton" else range(1, 18):
        count = math.ceil(math.sqrt(t))
        assert count**2 >= t > (count - 1) ** 2
        assert chosen(device, [0.7] * t)[0] == list(range(count))
        assert len(chosen(device, [0.7] * t + [1e-9])[0]) == math.ceil(math.sqrt(t + 1e-9))
        assert len(chosen(device, [0.7] * (t - 1) + [0.7 - 1e-9])[0]) == max(
            1, math.ceil(math.sqrt(t - 1e-9))
        )
        # as many exceed the mean
        found = chosen(device, [0.0] * 20 + [1.0] * t, suspects="above_mean")[0]
        assert found == list(range(20, 20 + count))
        for most in (0, 1, 2, 10):
            assert len(chosen(device, [0.7] * t, most=most)[0]) == min(count, most)
    # none exceeds the mean of equal numbers
    assert chosen(device, [0.5] * 4, suspects="above_mean")[0] == []


def test_a_score_of_zero_is_no_seed(backend: str, device: torch.device) -> None:
    for options in RULES:
        assert chosen(device, [0.0] * 9, [0.0] * 9, **options) == ([], [0.0] * 9)
        assert chosen(device, [-1.0, 0.0, -0.0], **options) == ([], [0.0] * 3)
    # nine suspects of whom eight have been stable never: t = 1, and one is left
    assert chosen(device, [1.0] * 9, None, [1.0] * 8 + [0.0]) == ([8], [0.0] * 8 + [1.0])
    # what does not drift at all takes nothing away
    assert chosen(device, [0.5, 1.0], None, [0.0, -3.0]) == ([0, 1], [0.5, 1.0])


def test_ties_go_to_the_lower_index(backend: str, device: torch.device) -> None:
    assert chosen(device, [0.5, 1.0, 1.0, 0.5, 1.0, 0.5, 0.5], most=2)[0] == [1, 2]
    assert chosen(device, [0.5, 1.0, 0.5, 0.5, 1.0, 0.5, 0.5], most=3)[0] == [0, 1, 4]
    # a product of the same factors is the same
    assert chosen(device, [0.5, 1.0, 0.25, 1.0], [1.0, 0.5, 0.5, 0.25], most=1)[0] == [0]


def test_exclusions_take_no_part(backend: str, device: torch.device) -> None:
    """Neither chosen nor what others are measured by."""
    for junk in (1e9, NAN, INF, -INF):
        for place in range(3):
            numbers = [[0.5, 0.25, 0.5, 0.5, 0.125] for _ in range(3)]
            expected = chosen(device, *(x[:1] + x[2:] for x in numbers))
            numbers[place][1] = junk
            u, g, d = (torch.tensor(x, dtype=torch.float64, device=device) for x in numbers)
            ok = torch.tensor([True, False, True, True, True], device=device)
            for eligible in (ok, None)[: 1 + (not math.isfinite(junk))]:
                found = dlmkern.cover_seeds(u, g, d, eligible)
                assert not found.seeds[1]
                assert found.score[1] == 0
                left = [i - (i > 1) for i in found.seeds.nonzero().flatten().tolist()]
                assert (left, found.score[ok].tolist()) == expected
    nobody = torch.zeros(5, dtype=torch.bool, device=device)
    for options in RULES:
        found = dlmkern.cover_seeds(u, None, None, nobody, **options)
        assert not found.seeds.any()
        assert not found.score.any()


def test_most_by_row(backend: str, device: torch.device) -> None:
    u = torch.full((4, 30), 0.3, device=device)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        most = torch.tensor([0, 1, 4, 200], dtype=dtype, device=device)
        assert dlmkern.cover_seeds(u, most=most).seeds.sum(1).tolist() == [0, 1, 4, 6]
    assert dlmkern.cover_seeds(u, most=torch.tensor(3, device=device)).seeds.sum(1).tolist() == [3] * 4
    assert dlmkern.cover_seeds(u[0], most=torch.tensor([3], device=device)).seeds.sum() == 3
    assert dlmkern.cover_seeds(u, most=2**63 - 1).seeds.sum() == 24
    # on an accelerator nobody looks at the numbers
    most = torch.tensor([-1, -(2**63), 5, 2**63 - 1], device=device)
    seeds, _ = torch.ops.dlmkern.cover_seeds(u, None, None, None, most, False, False)
    assert seeds.sum(1).tolist() == [0, 0, 5, 6]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    u, g, d, ok = random_case("probabilities", 12, 7)
    for kind in DTYPES[:: 3 if backend == "triton" else 1]:
        arguments = u.to(dtype), g.to(kind), d.to(kind)
        found = dlmkern.cover_seeds(*(x.to(device) for x in (*arguments, ok)))
        assert_seeds(found, truth(arguments, ok))


def test_float64_is_not_rounded(backend: str, device: torch.device) -> None:
    assert chosen(device, [1.0, 1.0 + 1e-15], most=1)[0] == [1]
    assert chosen(device, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0 + 1e-15], most=1)[0] == [2]
    # nine alike and 1e-14 of a tenth are more than nine
    assert len(chosen(device, [1.0] * 9 + [1e-14])[0]) == 4
    assert len(chosen(device, [1.0] * 9 + [1e-17])[0]) == 3


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (0,)], ids=str)
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(shape, dtype=dtype, device=device)
        for eligible in (None, x == 0):
            for options in RULES:
                found = dlmkern.cover_seeds(x, x, x, eligible, **options)
                assert (found.seeds.shape, found.seeds.dtype) == (shape, torch.bool)
                assert (found.score.shape, found.score.dtype) == (shape, torch.float64)


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    u, g, d, ok = (x.to(device) for x in random_case("probabilities", 9, 8, 3))
    expected = dlmkern.cover_seeds(u, g, d, ok)
    lines = torch.full((3, 3, 2 * 9 + 3), NAN, device=device)
    lines[..., 3::2] = torch.stack((u, g, d))
    flags = torch.ones((3, 9, 3), dtype=torch.bool, device=device)
    flags[..., 1] = ok
    bounds = torch.full((3, 2), 9, device=device)[:, 0]
    for arguments in (
        (*(x.T.contiguous().T for x in (u, g, d)), ok.T.contiguous().T),
        (*lines[..., 3::2], flags[..., 1]),
        (*(torch.cat((x.new_full((1,), NAN), x.flatten()))[1:].view(3, 9) for x in (u, g, d)), ok),
    ):
        found = dlmkern.cover_seeds(*arguments, most=bounds)
        assert_same(found.seeds, expected.seeds)
        assert_same(found.score, expected.score)
    shared = dlmkern.cover_seeds(*(x[:1].expand(3, -1) for x in (u, g, d, ok)))
    assert_same(shared.seeds, expected.seeds[:1].expand(3, -1))


def test_gradients_do_not_flow(backend: str, device: torch.device) -> None:
    u, g, d, ok = (x.to(device) for x in random_case("probabilities", 5, 9))
    expected = dlmkern.cover_seeds(u, g, d, ok)
    found = dlmkern.cover_seeds(*(x.requires_grad_() for x in (u, g, d)), ok)
    assert not found.score.requires_grad
    assert_same(found.score, expected.score)


@settings(deadline=None, max_examples=100)
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(0, 30),
    seed=st.integers(0, 2**16),
    options=st.sampled_from(RULES),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_invariants(
    kind: str, n: int, seed: int, options: dict[str, Any], dtype: torch.dtype, backend_name: str
) -> None:
    u, g, d, ok = random_case(kind, n, seed, 3, dtype)
    generator = torch.Generator().manual_seed(seed)
    with dlmkern.use_backend(backend_name):
        found = dlmkern.cover_seeds(u, g, d, ok, **options)
        assert_seeds(found, truth((u, g, d), ok, **options))
        part = ok & u.isfinite() & g.isfinite() & d.isfinite()
        assert not (found.seeds & ~part).any()
        assert not found.score[~part].any()
        assert not (found.seeds & (found.score == 0)).any()
        # as many as the paper says, unless t is too near a whole number to tell
        for b in range(3):
            score, many = found.score[b], int(part[b].sum())
            if many and (largest := score.max()) > 0:
                mean = score.sum() / many
                if options["suspects"] == "mean":
                    t = float(many * (mean / largest))
                    near = abs(t - round(t)) < 1e-9
                else:
                    t = float((score[part[b]] > mean).sum())
                    near = bool(((score - mean).abs() < 1e-12).any())
                expected = min(math.ceil(math.sqrt(t)), int((score > 0).sum()))
                assert near or int(found.seeds[b].sum()) == expected
            # alone
            alone = dlmkern.cover_seeds(u[b], g[b], d[b], ok[b], **options)
            assert torch.equal(alone.seeds, found.seeds[b])
            assert torch.equal(alone.score, found.score[b])
        # with more that takes no part
        more = (torch.nn.functional.pad(x, (2, 3), value=1e9) for x in (u, g, d))
        padded = dlmkern.cover_seeds(*more, torch.nn.functional.pad(ok, (2, 3)), **options)
        assert torch.equal(padded.seeds[:, 2 : n + 2], found.seeds)
        assert torch.equal(padded.score[:, 2 : n + 2], found.score)
        assert padded.seeds.sum() == found.seeds.sum()
        # a seed's score is at least that of everyone else; a smaller bound chooses fewer of them
        least = found.score.masked_fill(~found.seeds, INF)
        best = found.score.masked_fill(found.seeds, -INF)
        if n:
            assert (least.amin(1) >= best.amax(1)).all()
        for most in (0, 1, 2):
            fewer = dlmkern.cover_seeds(u, g, d, ok, **options, most=most).seeds
            assert not (fewer & ~found.seeds).any()
            assert torch.equal(fewer.sum(1), found.seeds.sum(1).clamp(max=most))
        if kind != "wild":
            # powers of two change no proportion
            scaled = (torch.ldexp(x, torch.tensor(p)) for x, p in ((u, 5), (g, -7), (d, 3)))
            assert torch.equal(dlmkern.cover_seeds(*scaled, ok, **options).score, found.score)
        if kind == "probabilities":
            # in another order the same, but for how the sum of the scores is rounded, and for ties
            order = torch.randperm(n, generator=generator)
            moved = dlmkern.cover_seeds(*(x[:, order] for x in (u, g, d, ok)), **options)
            assert torch.equal(moved.score, found.score[:, order])
            bound = torch.minimum(moved.seeds.sum(1), found.seeds.sum(1))
            here, there = (
                dlmkern.cover_seeds(*(x[:, p] for x in (u, g, d, ok)), **options, most=bound).seeds
                for p in (torch.arange(n), order)
            )
            for b in range(3):
                positive = found.score[b][found.score[b] > 0]
                if len(positive.unique()) == len(positive):
                    assert torch.equal(there[b], here[b, order])
        if options["suspects"] == "mean" and found.seeds.any():
            # a seed that is more uncertain, if not beyond the others, remains one
            b, i = found.seeds.nonzero()[int(found.seeds.sum()) // 2].tolist()
            u[b, i] = u[b][part[b]].max()
            assert dlmkern.cover_seeds(u, g, d, ok, **options).seeds[b, i]


def test_meta_tensors_have_shapes() -> None:
    x = torch.empty((2, 5), device="meta")
    for options in RULES:
        found = dlmkern.cover_seeds(x, x, x, **options)
        assert (found.seeds.shape, found.seeds.dtype, found.seeds.device.type) == ((2, 5), torch.bool, "meta")
        assert (found.score.shape, found.score.dtype) == ((2, 5), torch.float64)


def test_errors() -> None:
    u, g, d, ok = random_case("probabilities", 3, 0)
    good = {"uncertainty": u, "influence": g, "drift": d, "eligible": ok}
    most = torch.tensor([1, 2])
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"uncertainty": u.long()}, TypeError, "uncertainty: expected dtype float64 or .*, got int64"),
        (
            {"uncertainty": u[None]},
            ValueError,
            r"uncertainty: expected shape \[n\] or \[B, n\], got \[1, 2, 3\]",
        ),
        ({"uncertainty": u[0, 0]}, ValueError, r"uncertainty: expected shape \[n\] or \[B, n\], got \[\]"),
        ({"uncertainty": u.to_sparse()}, TypeError, "uncertainty: expected a dense tensor"),
        ({"uncertainty": None}, TypeError, "uncertainty: expected a tensor or array, got None"),
        ({"uncertainty": u.numpy()}, TypeError, "influence: expected the same kind of array as uncertainty"),
        ({"eligible": ok.long()}, TypeError, "eligible: expected dtype bool, got int64"),
        ({"combine": "mean"}, ValueError, "combine: expected one of product, sum, got 'mean'"),
        ({"combine": None}, ValueError, "combine: expected one of product, sum, got None"),
        ({"suspects": "product"}, ValueError, "suspects: expected one of mean, above_mean, got 'product'"),
        ({"suspects": True}, ValueError, "suspects: expected one of mean, above_mean, got True"),
        ({"most": "3"}, TypeError, "most: expected an int or a tensor, got str"),
        ({"most": 2.0}, TypeError, "most: expected an int or a tensor, got float"),
        ({"most": True}, TypeError, "most: expected an int or a tensor, got bool"),
        ({"most": -1}, ValueError, "most: expected at least 0, got -1"),
        ({"most": 2**63}, ValueError, "most: expected an int of 64 bits"),
        ({"most": most - 2}, ValueError, "most: expected at least 0, got -1"),
        ({"most": most.float()}, TypeError, "most: expected dtype int64 or .*, got float32"),
        ({"most": most[:1]}, ValueError, r"most: expected a number or shape \[2\], got \[1\]"),
        ({"most": most.to("meta")}, ValueError, "most: expected device cpu, got meta"),
        ({"most": [1, 2]}, TypeError, "most: expected an int or a tensor, got list"),
    ]
    for name in ("influence", "drift", "eligible"):
        x: Any = good[name]
        kind = "bool" if name == "eligible" else "float64 or .*"
        cases += [
            ({name: x.to(torch.int32)}, TypeError, f"{name}: expected dtype {kind}, got int32"),
            (
                {name: x[:, :2]},
                ValueError,
                rf"{name}: expected shape \[2, 3\] to go with uncertainty, got \[2, 2\]",
            ),
            ({name: x[0]}, ValueError, rf"{name}: expected shape \[2, 3\] to go with uncertainty, got \[3\]"),
            ({name: x.to("meta")}, ValueError, f"{name}: expected device cpu like uncertainty, got meta"),
            ({name: x.to_sparse()}, TypeError, f"{name}: expected a dense tensor, got layout"),
            (
                {name: x.tolist()},
                TypeError,
                f"{name}: expected a tensor or an array with __dlpack__, got list",
            ),
        ]
    for changes, error, message in cases:
        arguments: dict[str, Any] = good | changes
        with pytest.raises(error, match=message):
            dlmkern.cover_seeds(**arguments)


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    u, g, d, ok = (x.to(device) for x in random_case("probabilities", 6, 6))
    most = torch.tensor([2, 9], device=device)
    opcheck(OP, u, None, None, None, most, False, False)
    opcheck(OP, u.double(), g, d.double(), ok, most, True, True)
    for empty in (u[:, :0].double(), u[:0].double()):
        opcheck(OP, empty, empty, None, None, most[: len(empty)], False, False)

    def both(u: Tensor, g: Tensor, d: Tensor, most: Tensor) -> tuple[Tensor, ...]:
        return (
            *dlmkern.cover_seeds(u, g, d, ok, most=most),
            *dlmkern.cover_seeds(u[0].half(), combine="sum", suspects="above_mean", most=2),
        )

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for one, expected in zip(compiled(u, g, d, most), both(u, g, d, most), strict=True):
        assert torch.equal(one, expected)
