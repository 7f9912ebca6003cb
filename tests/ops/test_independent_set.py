"""independent_set against a scan with Python sets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from tests.ops.support import assert_same, opcheck

OP = "independent_set"


def truth(
    conflict: Tensor, priority: Tensor, eligible: Tensor | None = None, preselected: Tensor | None = None
) -> Tensor:
    """One sequence: [n, n], [n] -> [n]."""
    n = len(priority)
    p = priority.tolist()
    chosen = set() if preselected is None else {i for i in range(n) if preselected[i]}
    for i in sorted((i for i in range(n) if not math.isnan(p[i])), key=lambda i: (-p[i], i)):
        allowed = eligible is None or bool(eligible[i])
        if allowed and i not in chosen and not any(conflict[i, j] for j in chosen):
            chosen.add(i)
    return torch.tensor([i in chosen for i in range(n)], dtype=torch.bool)


def random_case(n: int, seed: int, density: float, batch: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Directed conflicts and priorities with many ties, NaN and both infinities."""
    generator = torch.Generator().manual_seed(seed)
    conflict = torch.rand((batch, n, n), generator=generator) < density
    priority = torch.randint(0, 6, (batch, n), generator=generator) / 5
    priority[torch.rand((batch, n), generator=generator) < 0.1] = math.nan
    priority[torch.rand((batch, n), generator=generator) < 0.1] = -math.inf
    priority[torch.rand((batch, n), generator=generator) < 0.1] = math.inf
    eligible = torch.rand((batch, n), generator=generator) < 0.8
    preselected = torch.rand((batch, n), generator=generator) < 0.15
    return conflict, priority, eligible, preselected


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 64, 65, 130])
def test_against_truth(backend: str, device: torch.device, n: int) -> None:
    few = backend == "triton" and n > 2  # in the interpreter every step of the scan takes milliseconds
    for density in (0.1,) if few else (0.0, 0.03, 0.3, 1.0):
        case = random_case(n, n, density, batch=3)
        sets = ((case[2], case[3]), (None, case[3]), (case[2], None), (None, None))
        for eligible, preselected in sets[:1] if few else sets:
            expected = [
                truth(
                    case[0][b],
                    case[1][b],
                    None if eligible is None else eligible[b],
                    None if preselected is None else preselected[b],
                )
                for b in range(3)
            ]
            arguments = [None if x is None else x.to(device) for x in (*case[:2], eligible, preselected)]
            assert_same(dlmkern.independent_set(*arguments), torch.stack(expected))  # type: ignore[arg-type]
            alone = [None if x is None else x[1] for x in arguments]
            assert_same(dlmkern.independent_set(*alone), expected[1])  # type: ignore[arg-type]


def test_many_positions(backend: str, device: torch.device) -> None:
    if backend == "triton":
        pytest.skip("a thousand steps of the scan take too long in Triton's interpreter")
    conflict, priority, eligible, preselected = random_case(1030, 1, 0.01)
    expected = truth(conflict[0], priority[0], eligible[0], preselected[0])
    selected = dlmkern.independent_set(
        *(x.to(device) for x in (conflict, priority, eligible, preselected))  # type: ignore[arg-type]
    )
    assert_same(selected[0], expected)


def test_the_candidates_row_is_tested(backend: str, device: torch.device) -> None:
    conflict = torch.zeros((2, 2), dtype=torch.bool, device=device)
    conflict[0, 1] = True  # 0 must not join 1
    for priority, expected in (([2.0, 1.0], [True, True]), ([1.0, 2.0], [False, True])):
        selected = dlmkern.independent_set(conflict, torch.tensor(priority, device=device))
        assert selected.tolist() == expected


def test_diagonal_is_ignored(backend: str, device: torch.device) -> None:
    everyone = dlmkern.independent_set(
        torch.eye(5, dtype=torch.bool, device=device), torch.zeros(5, device=device)
    )
    assert everyone.all()


def test_preselected_block_others_but_not_each_other(backend: str, device: torch.device) -> None:
    conflict = torch.ones((4, 4), dtype=torch.bool, device=device)
    preselected = torch.tensor([True, True, False, False], device=device)
    ineligible = torch.zeros(4, dtype=torch.bool, device=device)
    priority = torch.tensor([math.nan, 0.0, 1.0, 2.0], device=device)
    assert_same(dlmkern.independent_set(conflict, priority, ineligible, preselected), preselected)
    assert_same(dlmkern.independent_set(conflict, priority, ~ineligible, preselected), preselected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_priority_dtypes(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    conflict, priority, _, _ = random_case(20, 4, 0.3)
    priority = priority.to(dtype)
    expected = truth(conflict[0], priority[0].double())
    assert_same(dlmkern.independent_set(conflict[0].to(device), priority[0].to(device)), expected)


def test_float64_priorities_are_not_rounded(backend: str, device: torch.device) -> None:
    conflict = torch.ones((2, 2), dtype=torch.bool, device=device)
    priority = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64, device=device)
    assert dlmkern.independent_set(conflict, priority).tolist() == [False, True]
    zeros = torch.tensor([-0.0, 0.0], device=device)  # a tie
    assert dlmkern.independent_set(conflict, zeros).tolist() == [True, False]


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    conflict, priority, eligible, preselected = (x.to(device) for x in random_case(12, 5, 0.2, batch=2))
    expected = dlmkern.independent_set(conflict, priority, eligible, preselected)
    transposed = conflict.mT.contiguous().mT
    wide = torch.zeros((2, 30), device=device)
    wide[:, 3:27:2] = priority
    selected = dlmkern.independent_set(transposed, wide[:, 3:27:2], eligible.T.contiguous().T, preselected)
    assert torch.equal(selected, expected)
    one_for_all = dlmkern.independent_set(conflict[:1].expand(2, -1, -1), priority[:1].expand(2, -1))
    assert torch.equal(one_for_all[0], one_for_all[1])


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(0, 40),
    seed=st.integers(0, 2**16),
    density=st.sampled_from([0.02, 0.1, 0.5]),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_result_is_maximal_and_independent(n: int, seed: int, density: float, backend_name: str) -> None:
    conflict, priority, eligible, _ = (x[0] for x in random_case(n, seed, density))
    conflict = conflict | conflict.T
    with dlmkern.use_backend(backend_name):
        selected = dlmkern.independent_set(conflict, priority, eligible)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        distinct = torch.randperm(n, generator=torch.Generator().manual_seed(seed + 1)).float()
        one = dlmkern.independent_set(conflict, distinct)
        other = dlmkern.independent_set(conflict[order][:, order], distinct[order])
    off_diagonal = conflict & ~torch.eye(n, dtype=torch.bool)
    assert not off_diagonal[selected][:, selected].any()
    left_out = eligible & ~priority.isnan() & ~selected
    assert off_diagonal[left_out][:, selected].any(dim=1).all()
    assert torch.equal(one[order], other)


def test_errors() -> None:
    conflict, priority = torch.zeros((2, 3, 3), dtype=torch.bool), torch.zeros(2, 3)
    flags = torch.zeros((2, 3), dtype=torch.bool)
    for arguments, error, message in (
        ((conflict.float(), priority), TypeError, "conflict: expected dtype bool"),
        ((conflict[:, :2], priority), ValueError, "conflict: expected shape"),
        ((flags[0], priority), ValueError, "conflict: expected shape"),
        ((conflict, priority.long()), TypeError, "priority: expected dtype"),
        ((conflict, priority[0]), ValueError, "priority: expected shape"),
        ((conflict, priority.to("meta")), ValueError, "priority: expected device"),
        ((conflict, priority, priority), TypeError, "eligible: expected dtype bool"),
        ((conflict, priority, flags[:, :2]), ValueError, "eligible: expected shape"),
        ((conflict, priority, flags, priority), TypeError, "preselected: expected dtype bool"),
        ((conflict, priority, flags, flags[0]), ValueError, "preselected: expected shape"),
        ((conflict, None), TypeError, "priority: expected a tensor"),
    ):
        with pytest.raises(error, match=message):
            dlmkern.independent_set(*arguments)


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    conflict, priority, eligible, preselected = (x.to(device) for x in random_case(6, 6, 0.3, batch=2))
    opcheck(OP, conflict, priority, None, None)
    opcheck(OP, conflict, priority, eligible, preselected)
    compiled = torch.compile(dlmkern.independent_set, fullgraph=True, backend="aot_eager")
    expected = dlmkern.independent_set(conflict, priority, eligible, preselected)
    assert torch.equal(compiled(conflict, priority, eligible, preselected), expected)
