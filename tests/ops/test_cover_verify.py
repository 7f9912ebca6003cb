"""cover_verify against the rule written with Python lists."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from dlmkern import Verdict
from tests.ops.support import DTYPES, assert_same, opcheck

OP = "cover_verify"
NAN, INF = math.nan, math.inf


def rule(
    token: int, predicted: int, confidence: float, seed: bool, remasks: int, tau: float, most: int
) -> Verdict:
    if not seed:
        return Verdict.NONE
    if token == predicted:
        return Verdict.KEEP
    if confidence >= tau:
        return Verdict.REPLACE
    return Verdict.KEEP if remasks >= most else Verdict.REMASK


def truth(case: tuple[Tensor, ...], tau: float = 0.9, most: int = 1) -> np.ndarray:
    """Of token, predicted, confidence, seeds and remasks."""
    lists = (
        x.double().tolist() if x.is_floating_point() else x.tolist() for x in (y.flatten() for y in case)
    )
    verdicts = [int(rule(*numbers, tau, most)) for numbers in zip(*lists, strict=True)]
    return np.array(verdicts, dtype=np.int64).reshape(case[0].shape)


def random_case(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Token, predicted, confidence, seeds and remasks, with tokens that differ in their upper bits alone, and
    confidences at, next to and far from the usual threshold."""
    generator = torch.Generator().manual_seed(seed)

    def below(n: int) -> Tensor:
        return torch.randint(n, shape, generator=generator)

    tokens = torch.tensor([0, 1, 2**32, 2**32 + 1, -1, 2**63 - 1])
    levels = torch.tensor([0.9, 0.5, 0.0, 1.0, 0.95, NAN, INF, -INF, 0.9], dtype=torch.float64)
    levels[8] = math.nextafter(0.9, 0)
    confidence = levels[below(9)].to(dtype)
    return tokens[below(6)], tokens[below(6)], confidence, below(4) > 0, below(4)


def test_every_outcome(backend: str, device: torch.device) -> None:
    token = torch.tensor([5, 5, 5, 5, 5, 5, 5, 5], device=device)
    predicted = torch.tensor([5, 5, 7, 7, 7, 7, 7, 7], device=device)
    confidence = torch.tensor([0.1, 1.0, 0.9, 0.95, 0.8, 0.8, 0.99, 0.1], device=device, dtype=torch.float64)
    seeds = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0], device=device).bool()
    remasks = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1], device=device)
    found = dlmkern.cover_verify(token, predicted, confidence, seeds, remasks)
    keep, replace, remask, none = Verdict.KEEP, Verdict.REPLACE, Verdict.REMASK, Verdict.NONE
    assert found.dtype == torch.int64
    assert found.tolist() == [keep, keep, replace, replace, remask, keep, none, none]
    # without a count nothing has been masked again
    found = dlmkern.cover_verify(token, predicted, confidence, seeds)
    assert found.tolist() == [keep, keep, replace, replace, remask, remask, none, none]
    # two times are allowed
    found = dlmkern.cover_verify(token, predicted, confidence, seeds, remasks, max_remasks=2)
    assert found.tolist() == [keep, keep, replace, replace, remask, remask, none, none]
    # never
    found = dlmkern.cover_verify(token, predicted, confidence, seeds, max_remasks=0)
    assert found.tolist() == [keep, keep, replace, replace, keep, keep, none, none]
    # nothing is replaced
    found = dlmkern.cover_verify(token, predicted, confidence, seeds, remasks, tau_replace=1.01)
    assert found.tolist() == [keep, keep, remask, keep, remask, keep, none, none]
    # everything is
    found = dlmkern.cover_verify(token, predicted, confidence, seeds, remasks, tau_replace=0)
    assert found.tolist() == [keep, keep, *[replace] * 4, none, none]
    # in rows
    rows = (x.view(2, 4) for x in (token, predicted, confidence, seeds, remasks))
    found = dlmkern.cover_verify(*rows)
    assert found.tolist() == [[keep, keep, replace, replace], [remask, keep, none, none]]


def test_the_c_interface_has_the_same_numbers() -> None:
    assert [int(x) for x in (Verdict.NONE, Verdict.KEEP, Verdict.REPLACE, Verdict.REMASK)] == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1), (3, 33), (2, 1000)], ids=str)
def test_against_truth(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        case = random_case(shape, len(shape), dtype)
        tensors = tuple(x.to(device) for x in case)
        for tau, most in ((0.9, 1), (0.5, 0), (-INF, 2), (INF, 3), (1.01, 2**63 - 1)):
            found = dlmkern.cover_verify(*tensors, tau_replace=tau, max_remasks=most)
            assert_same(found, truth(case, tau, most), f"{dtype}, {tau}, {most}")
        found = dlmkern.cover_verify(*tensors[:4])
        assert_same(found, truth((*case[:4], torch.zeros(shape, dtype=torch.int64))))


def test_the_threshold_is_that_of_float64(backend: str, device: torch.device) -> None:
    one, two = (torch.full((1,), x, device=device) for x in (1, 2))
    seeds = one > 0

    def verdict(confidence: float, dtype: torch.dtype, tau: float) -> int:
        c = torch.tensor([confidence], dtype=dtype, device=device)
        return int(dlmkern.cover_verify(one, two, c, seeds, tau_replace=tau).item())

    for tau in (0.9, 0.7, 1 / 3):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rounded = torch.tensor(tau, dtype=dtype).double().item()
            expected = Verdict.REPLACE if rounded >= tau else Verdict.REMASK
            assert verdict(tau, dtype, tau) == expected
            assert verdict(tau, dtype, rounded) == Verdict.REPLACE
            assert verdict(tau, dtype, math.nextafter(rounded, 1)) == Verdict.REMASK
        assert verdict(tau, torch.float64, tau) == Verdict.REPLACE
        assert verdict(math.nextafter(tau, 0), torch.float64, tau) == Verdict.REMASK
    assert verdict(NAN, torch.float64, -INF) == Verdict.REMASK
    assert verdict(INF, torch.float64, INF) == Verdict.REPLACE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    token, predicted, confidence, seeds, remasks = random_case((2, 12), 7, torch.float64)
    token, predicted, confidence = token.clamp(0, 1), predicted.clamp(0, 1), confidence.to(dtype)
    expected = truth((token, predicted, confidence, seeds, remasks))
    for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        case = token.to(kind), predicted.to(kind), confidence, seeds, remasks.to(kind)
        assert_same(dlmkern.cover_verify(*(x.to(device) for x in case)), expected)
    mixed = token.int(), predicted.byte(), confidence, seeds, remasks.short()
    assert_same(dlmkern.cover_verify(*(x.to(device) for x in mixed)), expected)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (0,)], ids=str)
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    token = torch.zeros(shape, dtype=torch.int64, device=device)
    found = dlmkern.cover_verify(token, token, token.float(), token > 0, token)
    assert (found.shape, found.dtype) == (shape, torch.int64)


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    case = random_case((3, 9), 2)
    expected = truth(case)

    def every_other(x: Tensor) -> Tensor:
        buffer = x.new_ones((3, 21))
        buffer[:, 3::2] = x
        return buffer[:, 3::2]

    for layout in (
        lambda x: x.T.contiguous().T,
        every_other,
        lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(3, 9),
    ):
        assert_same(dlmkern.cover_verify(*(layout(x.to(device)) for x in case)), expected)
    shared = dlmkern.cover_verify(*(x[:1].to(device).expand(3, 9) for x in case))
    assert_same(shared, expected[:1].repeat(3, 0))


@settings(deadline=None, max_examples=100)
@given(
    batch=st.integers(1, 3),
    n=st.integers(0, 12),
    seed=st.integers(0, 2**16),
    tau=st.sampled_from([0.9, 0.5, 1.0, 1.5, -INF, INF]),
    most=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_invariants(
    batch: int, n: int, seed: int, tau: float, most: int, dtype: torch.dtype, backend_name: str
) -> None:
    case = random_case((batch, n), seed, dtype)
    token, predicted, _, seeds, remasks = case
    options: dict[str, Any] = {"tau_replace": tau, "max_remasks": most}
    with dlmkern.use_backend(backend_name):
        found = dlmkern.cover_verify(*case, **options)
        assert_same(found, truth(case, tau, most))
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        moved = dlmkern.cover_verify(*(x[:, order] for x in case), **options)
        assert torch.equal(moved, found[:, order])
        for b in range(batch):
            assert torch.equal(dlmkern.cover_verify(*(x[b] for x in case), **options), found[b])
        # step by step, no position is masked again more often than it may be
        count = torch.zeros_like(remasks)
        for step in range(most + 2):
            now = random_case((batch, n), seed + step, dtype)
            count += dlmkern.cover_verify(*now[:4], count, **options) == Verdict.REMASK
        assert (count <= most).all()
    assert torch.equal(found == Verdict.NONE, ~seeds)
    assert not ((found == Verdict.REMASK) & (remasks >= most)).any()
    assert not ((found >= Verdict.REPLACE) & (token == predicted)).any()


def test_gradients_do_not_flow(backend: str, device: torch.device) -> None:
    token, predicted, confidence, seeds, remasks = (x.to(device) for x in random_case((2, 5), 3))
    found = dlmkern.cover_verify(token, predicted, confidence.requires_grad_(), seeds, remasks)
    assert not found.requires_grad


def test_arrays() -> None:
    token, predicted = np.array([1, 2, 3], dtype=np.int32), np.array([1, 9, 9])
    confidence, seeds = np.array([0.0, 1.0, 0.5], dtype=np.float16), np.ones(3, dtype=bool)
    found = dlmkern.cover_verify(token, predicted, confidence, seeds)  # type: ignore[arg-type]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.int64
    assert [Verdict(x) for x in found] == [Verdict.KEEP, Verdict.REPLACE, Verdict.REMASK]
    with pytest.raises(ValueError, match=r"remasks: expected shape \[3\] to go with token, got \[2\]"):
        dlmkern.cover_verify(token, predicted, confidence, seeds, predicted[:2])


def test_meta_tensors_have_shapes() -> None:
    for shape in ((5,), (2, 5)):
        x = torch.zeros(shape, dtype=torch.int64, device="meta")
        found = dlmkern.cover_verify(x, x, x.half(), x > 0)
        assert (found.shape, found.dtype, found.device.type) == (shape, torch.int64, "meta")


def test_errors() -> None:
    token, predicted, confidence, seeds, remasks = random_case((2, 3), 0)
    good = {
        "token": token,
        "predicted": predicted,
        "confidence": confidence,
        "seeds": seeds,
        "remasks": remasks,
    }
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"token": token.float()}, TypeError, "token: expected dtype int64 or .*, got float32"),
        ({"token": token[None]}, ValueError, r"token: expected shape \[n\] or \[B, n\], got \[1, 2, 3\]"),
        ({"token": token[0, 0]}, ValueError, r"token: expected shape \[n\] or \[B, n\], got \[\]"),
        ({"token": token.to_sparse()}, TypeError, "token: expected a dense tensor"),
        ({"token": None}, TypeError, "token: expected a tensor or array, got None"),
        ({"token": token.numpy()}, TypeError, "predicted: expected the same kind of array as token"),
        ({"predicted": predicted.bool()}, TypeError, "predicted: expected dtype int64 or .*, got bool"),
        ({"confidence": confidence.long()}, TypeError, "confidence: expected dtype float64 or .*, got int64"),
        ({"seeds": seeds.long()}, TypeError, "seeds: expected dtype bool, got int64"),
        ({"remasks": remasks.float()}, TypeError, "remasks: expected dtype int64 or .*, got float32"),
        ({"tau_replace": "0.9"}, TypeError, "tau_replace: expected a number, got str"),
        ({"tau_replace": None}, TypeError, "tau_replace: expected a number, got NoneType"),
        ({"tau_replace": True}, TypeError, "tau_replace: expected a number, got bool"),
        ({"tau_replace": confidence}, TypeError, "tau_replace: expected a number, got Tensor"),
        ({"tau_replace": NAN}, ValueError, "tau_replace: expected a number, got nan"),
        ({"tau_replace": 10**400}, ValueError, "tau_replace: expected a number that a float can hold"),
        ({"max_remasks": "1"}, TypeError, "max_remasks: expected an int, got str"),
        ({"max_remasks": 1.0}, TypeError, "max_remasks: expected an int, got float"),
        ({"max_remasks": True}, TypeError, "max_remasks: expected an int, got bool"),
        ({"max_remasks": remasks}, TypeError, "max_remasks: expected an int, got Tensor"),
        ({"max_remasks": -1}, ValueError, "max_remasks: expected at least 0 and 64 bits, got -1"),
        (
            {"max_remasks": 2**63},
            ValueError,
            "max_remasks: expected at least 0 and 64 bits, got 9223372036854775808",
        ),
    ]
    for name in ("predicted", "confidence", "seeds", "remasks"):
        x: Any = good[name]
        cases += [
            (
                {name: x[:, :2]},
                ValueError,
                rf"{name}: expected shape \[2, 3\] to go with token, got \[2, 2\]",
            ),
            ({name: x[0]}, ValueError, rf"{name}: expected shape \[2, 3\] to go with token, got \[3\]"),
            ({name: x.to("meta")}, ValueError, f"{name}: expected device cpu like token, got meta"),
            (
                {name: x.tolist()},
                TypeError,
                f"{name}: expected a tensor or an array with __dlpack__, got list",
            ),
        ]
        if name != "remasks":
            cases.append(({name: None}, TypeError, f"{name}: expected a tensor or array, got None"))
    for changes, error, message in cases:
        arguments: dict[str, Any] = good | changes
        with pytest.raises(error, match=message):
            dlmkern.cover_verify(**arguments)


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    token, predicted, confidence, seeds, remasks = (x.to(device) for x in random_case((2, 5), 4))
    confidence = confidence.nan_to_num()  # opcheck takes two NaN for different
    opcheck(OP, confidence, token, predicted, seeds, remasks, 0.9, 1)
    opcheck(OP, confidence.double(), token, predicted, seeds, remasks, 0.5, 0)

    def both(token: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor]:
        return (
            dlmkern.cover_verify(token, predicted, confidence, seeds, remasks, tau_replace=0.5),
            dlmkern.cover_verify(token[0].int(), predicted[0], confidence[0].half(), seeds[0]),
        )

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for one, expected in zip(compiled(token, confidence), both(token, confidence), strict=True):
        assert torch.equal(one, expected)
