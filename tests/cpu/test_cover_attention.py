"""cover_attention on the CPU: in parts, and in a torch that hands out no log-sum-exp."""

from __future__ import annotations

import pytest
import torch

import dlmkern
from dlmkern import attention
from dlmkern.backends import native
from tests.ops.cover_support import Pass, random_pass


def attend(case: Pass, backend: str) -> dlmkern.CoverAttention:
    with dlmkern.use_backend(backend):
        return dlmkern.cover_attention(*case.tensors(), **case.options())  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [None, torch.tensor([17, 0])])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_some_heads_at_a_time(
    dtype: torch.dtype, lengths: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what all at once are, whether the last ones are fewer or not."""
    case = random_pass((2, 10, 5, 20, 20, 16), dtype, torch.device("cpu"), lengths=lengths, shift=1)
    kept = case.map(torch.clone)
    whole = attend(case, "cpu")
    for heads in (1, 2):
        size = heads * case.k[:, :1].nbytes
        monkeypatch.setattr(native, "HEADS_BYTES", size // torch.get_num_threads())
        parts = attend(case, "cpu")
        assert torch.equal(parts.out, whole.out)
        assert torch.equal(parts.lse, whole.lse)
    for one, other in zip(case, kept, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_without_a_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_pass((2, 4, 2, 20, 20, 16), torch.float32, torch.device("cpu"))
    expected = attend(case, "reference")
    monkeypatch.setattr(attention, "_has_cpu_flash", lambda: False)
    found = attend(case, "cpu")
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_a_row_does_not_see_costs_it_no_digits(dtype: torch.dtype) -> None:
    """The row that predicts a seed is not made by taking the seed's cached value, here a large one, away."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, k_cached, v_cached = torch.randn(5, 1, 4, 64, 32, generator=generator).to(dtype)
    seeds = torch.zeros(1, 64, dtype=torch.bool)
    seeds[0, 7] = True
    v_cached = v_cached * 1000
    passes = {"q": q, "k": k, "v": v, "k_cached": k_cached, "v_cached": v_cached}
    truth = dlmkern.cover_attention(**{name: x.double() for name, x in passes.items()}, seeds=seeds)
    with dlmkern.use_backend("cpu"):
        found = dlmkern.cover_attention(**passes, seeds=seeds)
    error = (found.out[:, :, 7].double() - truth.out[:, :, 7]).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps
