"""COVER's four ops under Triton's interpreter: tiles, splits, strides, special values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlmkern import reference

from .interpreter import INTERPRETED, interpreted, randn, speed_up

if INTERPRETED:
    from dlmkern.triton_kernels import (
        attention,
        block_attention,
        cover_attention,
        cover_seeds,
        cover_verify,
        diagonal_correction,
    )

    speed_up()

INF, NAN = float("inf"), float("nan")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_own_process(run_again: Callable[[str, bool], None]) -> None:
    run_again(__file__, True)


# ---- cover_attention


def cover_truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cached: Tensor,
    v_cached: Tensor,
    seeds: Tensor,
    lengths: list[int],
    shift: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out and lse in float64, and out in the inputs' dtype: every row with its own keys and values."""
    groups = q.shape[1] // k.shape[1]
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:3], -INF, dtype=torch.float64)
    narrow = torch.zeros(q.shape, dtype=q.dtype)
    for b, length in enumerate(lengths):
        seed = seeds[b, :length, None]
        for i in range(q.shape[2] if length else 0):
            old = seed & (torch.arange(length) != i + shift)[:, None]
            keys = torch.where(old, k_cached[b, :, :length], k[b, :, :length]).repeat_interleave(groups, 0)
            values = torch.where(old, v_cached[b, :, :length], v[b, :, :length]).repeat_interleave(groups, 0)
            x = q[b, :, i, :, None]
            score = (keys.double() @ x.double()).squeeze(-1) * scale
            out[b, :, i] = (score.softmax(-1)[:, None] @ values.double()).squeeze(1)
            lse[b, :, i] = score.logsumexp(-1)
            narrow[b, :, i] = (((keys @ x).squeeze(-1) * scale).softmax(-1)[:, None] @ values).squeeze(1)
    return out, lse, narrow


def check(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor, Tensor]) -> None:
    (out, lse), (want_out, want_lse, narrow) = found, truth
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    assert out.dtype == narrow.dtype
    assert lse.dtype == wide
    error, allowed = (float((x.double() - want_out).abs().max()) for x in (out, narrow))
    few = 8 if out.dtype == torch.float64 else 2  # the truth has errors of its own
    assert error <= 2 * allowed + few * torch.finfo(out.dtype).eps * float(want_out.abs().max())
    eps = torch.finfo(wide).eps
    torch.testing.assert_close(lse.double(), want_lse, rtol=8 * eps, atol=16 * eps)


def cover_case(Hq: int, Hkv: int, L: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Two sequences: q, k, v, the caches, all laid out in different ways, and seeds."""
    q = randn(2, L, Hq, d, scale=2.0, dtype=dtype).transpose(1, 2)
    k, v = randn(2, L, 2, Hkv, d, seed=1, dtype=dtype).permute(2, 0, 3, 1, 4)
    k_cached, v_cached = randn(2, Hkv, L, d, seed=2, dtype=dtype), randn(2, Hkv, d, L, seed=3, dtype=dtype).mT
    seeds = torch.rand(2, L, generator=torch.Generator().manual_seed(4)) < 0.3
    seeds[:, 16:32] = False  # a tile without
    seeds[1, :2] = True
    return q, k, v, k_cached, v_cached, seeds


@pytest.fixture(params=[1, 4096], ids=["keys together", "keys split"])
def splitting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program walks all keys, or as many as there are parts of 16."""
    monkeypatch.setattr(attention, "_PROGRAMS", request.param)
    monkeypatch.setattr(block_attention, "_LEAST_KEYS", 16)


@interpreted
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 3), torch.float32),
        ((4, 2, 20, 8), torch.float16),
        ((4, 2, 18, 8), torch.float64),
        ((2, 1, 37, 20), torch.bfloat16),
        ((1, 1, 37, 20), torch.float32),
    ],
    ids=str,
)
def test_cover(splitting: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v, k_cached, v_cached, seeds = cover_case(*shape, dtype)
    L, d = shape[2:]
    scale, shift = 0.7 * d**-0.5, L % 2
    want = cover_truth(q, k, v, k_cached, v_cached, seeds, [L, L // 2], shift, scale)
    k, v, k_cached, v_cached = k.clone(), v.clone(), k_cached.clone(), v_cached.clone()
    for new, old in ((k, k_cached), (v, v_cached)):
        new[1, :, L // 2 :] = NAN  # what lies beyond the length may be anything, and so may an unused cache
        old.masked_fill_(~(seeds & (torch.arange(L) < torch.tensor([[L], [L // 2]])))[:, None, :, None], NAN)
    lengths = torch.tensor([2**40, L // 2])  # as may come from another device
    check(cover_attention.cover_attention(q, k, v, k_cached, v_cached, seeds, lengths, shift, scale), want)


@interpreted
def test_of_its_old_column_a_seed_sees_nothing(splitting: None) -> None:
    """Not even where that takes all the weight in the rows of others: no difference is formed."""
    q, k, v, k_cached, v_cached, seeds = cover_case(1, 1, 20, 4, torch.float32)
    seeds[:], seeds[:, 3] = False, True
    q[:] = q.abs() + 1
    k_cached[:, :, 3], v_cached[:, :, 3] = 60.0, 1e30
    for lengths in ([20, 20], [4, 0]):
        args = (q, k, v, k_cached, v_cached, seeds, torch.tensor(lengths), 0, 0.5)
        out, lse = cover_attention.cover_attention(*args)
        assert out[0, 0, 4].tolist() == pytest.approx([1e30] * 4)
        want = cover_truth(q, k, v, k, v, seeds, lengths, 0, 0.5)
        torch.testing.assert_close(out[:, :, 3].double(), want[0][:, :, 3], rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(lse[:, :, 3].double(), want[1][:, :, 3], rtol=2e-6, atol=1e-6)
    one = (x[:1, :, 3:4] for x in (q, k, v, k_cached, v_cached))
    out, lse = cover_attention.cover_attention(*one, seeds[:1, 3:4], None, 0, 0.5)  # nothing else is there
    assert torch.equal(out, v[:1, :, 3:4])
    torch.testing.assert_close(lse[0, 0, 0], (q[0, 0, 3] @ k[0, 0, 3]) * 0.5)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_heads_are_refused_that_are_too_large(dtype: torch.dtype) -> None:
    q = torch.zeros(1, 1, 1, 257, dtype=dtype)
    none = torch.zeros(1, 1, dtype=torch.bool)
    most = 128 if dtype == torch.float64 else 256
    with pytest.raises(ValueError, match=f"q: .*at most {most}.*257"):
        cover_attention.cover_attention(q, q, q, q, q, none, None, 0, 1.0)
    with pytest.raises(ValueError, match=r"q: .*at most 256.*257"):
        diagonal_correction.diagonal_correction(q, q[..., 0], q, q, q, q, q, none, None, None, 0, 1.0, 0.5)


@interpreted
def test_nothing_to_attend_to() -> None:
    q, none = torch.zeros(2, 3, 0, 4), torch.zeros(2, 0, dtype=torch.bool)
    out, lse = cover_attention.cover_attention(q, q, q, q, q, none, None, 0, 1.0)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    diagonal_correction.diagonal_correction(out, lse, q, q, q, q, q, none, None, None, 0, 1.0, 0.5)


# ---- diagonal_correction


@pytest.fixture
def tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few keys at a time."""
    monkeypatch.setattr(diagonal_correction, "_TILE_BYTES", 512)


def correct(
    q: Tensor, new: list[Tensor], old: list[Tensor], seeds: Tensor, *rest: object, below: float
) -> tuple[Tensor, Tensor]:
    """diagonal_correction of what all queries see, in memory of another order."""
    lengths, positions, shift, scale = rest
    seen = old
    if positions is None:
        seen = [torch.where(seeds[:, None, :, None], x, y) for x, y in zip(old, new, strict=True)]
    out, lse = reference.block_attention(q, *seen, lengths, scale)
    before = out.clone(), lse.clone()
    out, lse = out.transpose(1, 2).contiguous().transpose(1, 2), lse.mT.contiguous().mT
    diagonal_correction.diagonal_correction(
        out, lse, q, *new, *old, seeds, lengths, positions, shift, scale, below
    )
    shown = torch.arange(q.shape[2]) + shift
    other = ~seeds[:, shown.clamp(max=q.shape[2] - 1)] | (shown >= q.shape[2])
    for x, y in zip((out, lse), before, strict=True):
        assert torch.equal(x.transpose(1, 2)[other], y.transpose(1, 2)[other])
    return out, lse


@interpreted
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("below", [0.5, INF])
def test_correction(tile: None, dtype: torch.dtype, below: float) -> None:
    q, k, v, k_cached, v_cached, seeds = cover_case(2, 1, 9, 20, dtype)
    for shift, lengths in ((0, None), (1, torch.tensor([9, 5]))):
        if lengths is not None:
            seeds[1, 5:] = False
        found = correct(q, [k, v], [k_cached, v_cached], seeds, lengths, None, shift, 0.1, below=below)
        ends = [9, 9] if lengths is None else [9, 5]
        check(found, cover_truth(q, k, v, k_cached, v_cached, seeds, ends, shift, 0.1))


@interpreted
@pytest.mark.parametrize("below", [0.0, INF])
def test_correction_of_rows_with_places(tile: None, below: float) -> None:
    """The rows stand anywhere in the cache; padding, and what is beyond the length, is no seed."""
    q, k, v, _, _, seeds = cover_case(2, 1, 5, 8, torch.float32)
    caches = [randn(2, 1, 23, 8, seed=seed) for seed in (5, 6)]
    seeds[:] = torch.tensor([[True, False, True, True, True], [True, True, False, False, True]])
    positions = torch.tensor([[20, 3, 7, 0, -1], [9, 9, 2, 4, 17]])
    ends = [23, 16]
    lengths = torch.tensor(ends)
    real = seeds & (positions >= 0) & (positions < lengths[:, None])
    out, lse = correct(q, [k, v], caches, real, lengths, positions, 0, 0.5, below=below)
    again = correct(q, [k, v], caches, seeds & (positions < 0), lengths, positions, 0, 0.5, below=below)
    assert torch.equal(again[0], reference.block_attention(q, *caches, lengths, 0.5)[0])
    for b, i in real.nonzero().tolist():
        keys, values = (x[b, :, : ends[b]].double().clone() for x in caches)
        keys[:, positions[b, i]], values[:, positions[b, i]] = k[b, :, i].double(), v[b, :, i].double()
        score = (q[b, :, i].double() @ keys[0].T) * 0.5
        torch.testing.assert_close(out[b, :, i].double(), score.softmax(-1) @ values[0], rtol=2e-5, atol=1e-5)
        torch.testing.assert_close(lse[b, :, i].double(), score.logsumexp(-1), rtol=1e-6, atol=2e-6)


@interpreted
def test_offsets_are_64_bits(far_memory: Tensor) -> None:
    """Strides fit into 32 bits, offsets do not."""
    far = 2**30
    sizes = {0: 1, 1: 4, far: 3}
    for strides in ((0, 16, far, 1), (0, far, 8, 1), (far, 32, 8, 1), (0, 32, 8, far)):
        size = [sizes.get(stride, 3 if axis == 2 else 2) for axis, stride in enumerate(strides)]
        x = far_memory.as_strided(size, strides).copy_(randn(*size, dtype=torch.float16))
        near, seeds = x.clone(), torch.tensor([[True, False, True]] * size[0])
        other = near.flip(2)
        out, lse = cover_attention.cover_attention(near, near, near, other, other, seeds, None, 0, 0.5)
        found = cover_attention.cover_attention(x, x, x, other, other, seeds, None, 0, 0.5)
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], lse)
        x.copy_(near.flip(2))
        found = cover_attention.cover_attention(near, near, near, x, x, seeds, None, 0, 0.5)
        assert torch.equal(found[0], out)
        # Of attention over the old columns, kept in far memory.
        start, start_lse = reference.block_attention(near, near, near, None, 0.5)
        x.copy_(near)
        for below in (0.0, INF):
            near_out, near_lse, far_lse = start.clone(), start_lse.clone(), start_lse.clone()
            rest = (seeds, None, None, 0, 0.5, below)
            correct_ = diagonal_correction.diagonal_correction
            correct_(near_out, near_lse, near, other, other, near, near, *rest)
            assert not torch.equal(near_out, start)
            correct_(start.clone(), far_lse, x, other, other, x, x, *rest)
            assert torch.equal(far_lse, near_lse)
            x.copy_(start)
            correct_(x, start_lse.clone(), near, other, other, near, near, *rest)
            assert torch.equal(x, near_out)
            x.copy_(other)
            out_ = start.clone()
            correct_(out_, start_lse.clone(), near, x, x, near, near, *rest)
            assert torch.equal(out_, near_out)
            x.copy_(near)


# ---- cover_seeds


def seeds_case(n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """uncertainty, influence, drift, eligible, most: with ties, with what does not take part, and plain."""
    generator = torch.Generator().manual_seed(n)
    u, g, d = torch.rand(3, 4, n, dtype=torch.float64, generator=generator)
    u[0], g[0], d[0] = ((x[0] * 3).round() / 3 for x in (u, g, d))
    if n > 4:
        u[1, 0], u[1, 1], g[1, 2], d[1, 3] = NAN, INF, -INF, -1.0
    g[3] = 0.0
    eligible = torch.rand(4, n, generator=generator) < 0.9
    most = torch.tensor([n, n, 1, 3])
    return u.to(dtype), g.to(dtype), d.to(dtype), eligible, most


@interpreted
@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float64), (33, torch.float32), (70, torch.float64)])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("above_mean", [False, True])
def test_seeds(n: int, dtype: torch.dtype, additive: bool, above_mean: bool) -> None:
    u, g, d, eligible, most = seeds_case(n, dtype)
    for args in ((u, g, d, eligible), (u.mT.contiguous().mT, None, d, None), (u, g.float(), None, eligible)):
        found = cover_seeds.cover_seeds(*args, most, additive, above_mean)
        want = reference.cover_seeds(*args, most, additive, above_mean)
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[1], want[1])
    empty = cover_seeds.cover_seeds(u[:, :0], None, None, None, most, additive, above_mean)
    assert [x.shape for x in empty] == [(4, 0), (4, 0)]


@interpreted
def test_scores_are_summed_in_order() -> None:
    """Their sum decides whether there is a second seed, and from the other end it would be another."""
    u = torch.full((1, 40), 2.0**-54, dtype=torch.float64)
    for first in (0, 39):
        u[0, first] = 1.0
        most = torch.tensor([40])
        found = cover_seeds.cover_seeds(u, None, None, None, most, False, False)[0]
        assert found.sum() == (1 if first == 0 else 2)
        assert torch.equal(found, reference.cover_seeds(u, None, None, None, most, False, False)[0])
        u[0, first] = 2.0**-54


# ---- cover_verify


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verdicts(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    token, predicted, remasks = (torch.randint(3, (3, 100), generator=generator) for _ in range(3))
    seeds = torch.rand(3, 100, generator=generator) < 0.8
    confidence = torch.rand(3, 100, dtype=torch.float64, generator=generator).to(dtype)
    confidence[0, :5] = torch.tensor([0.9, 0.9, NAN, INF, -INF])
    predicted[0, :5], token[0, :5], seeds[0, :5] = 2**40, 0, True
    for args in (
        (confidence, token, predicted, seeds, remasks),
        (confidence.mT, *(x.mT for x in (token, predicted, seeds, remasks))),
    ):
        for tau, most in ((0.9, 1), (0.0, 0), (2.0, 2**63 - 1)):
            found = cover_verify.cover_verify(*args, tau, most)
            assert torch.equal(found, reference.cover_verify(*args, tau, most))
    assert cover_verify.cover_verify(*(x[:, :0] for x in args), 0.5, 1).shape == (100, 0)
