"""kv_block_write and block_attention under Triton's interpreter: tiles, splits, strides, special values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .interpreter import INTERPRETED, interpreted, randn, speed_up

if INTERPRETED:
    from dlmkern.triton_kernels import attention, block_attention, kv_block_write

    speed_up()

INF, NAN = float("inf"), float("nan")
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_own_process(run_again: Callable[[str, bool], None]) -> None:
    run_again(__file__, True)


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).abs().max())


# ---- kv_block_write


def write_truth(cache: Tensor, new: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cache afterwards, and cosine and distance of the rows, position by position."""
    cache, old = cache.clone(), cache
    drift = torch.full((2, *positions.shape), NAN, dtype=torch.float64)
    for b, row in enumerate(positions.tolist()):
        for i, p in enumerate(row):
            if 0 <= p < cache.shape[2]:
                cache[b, :, p] = new[b, :, i]
                x, y = old[b, :, p].double().flatten(), new[b, :, i].double().flatten()
                drift[0, b, i] = x @ y / (x.norm() * y.norm())
                drift[1, b, i] = (y - x).norm() / x.norm()
    return cache, *drift


def turned(k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    known = positions.clamp(0, cos.shape[0] - 1)
    x = k.to(cos.dtype)
    low, high = x.chunk(2, -1)
    return (x * cos[known][:, None] + torch.cat((-high, low), -1) * sin[known][:, None]).to(k.dtype)


@pytest.fixture(params=[8, 1024], ids=["a head or two at a time", "all heads at once"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_block_write, "_TILE", request.param)


@interpreted
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("rope", [False, True])
def test_writes_and_drift(tile: None, dtype: torch.dtype, rope: bool) -> None:
    B, H, L, n, d = 2, 3, 7, 5, 10 if rope else 7
    buffer = randn(2, B, L, H, d, dtype=dtype)  # the caches of one layer lie in it, positions before heads
    k, v = randn(B, n, H, d, seed=1, dtype=dtype).transpose(1, 2), randn(B, H, d, n, seed=2, dtype=dtype).mT
    positions = torch.tensor([[6, -1, 0, 3, 2], [1, 5, 7, 4, 0]])
    cos = sin = None
    new_k = k
    if rope:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        cos, sin = randn(d, L + 2, seed=3, dtype=wide).mT, randn(L + 2, d, seed=4, dtype=wide)
        new_k = turned(k, positions, cos, sin)
    for drift in (False, True):
        caches = buffer.clone()
        k_cache, v_cache = caches.transpose(2, 3)
        wants = [
            write_truth(old.transpose(1, 2), new, positions)
            for old, new in zip(buffer, (new_k, v), strict=True)
        ]
        got = kv_block_write.kv_block_write(k_cache, v_cache, k, v, positions, cos, sin, drift)
        assert torch.equal(k_cache, wants[0][0])
        assert torch.equal(v_cache, wants[1][0])
        assert got.dtype == torch.float32
        if drift:
            want = torch.stack([*wants[0][1:], *wants[1][1:]])
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert got.shape == (0,)


# ---- block_attention


def attention_truth(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out and lse in float64, and out in the inputs' dtype, of the keys that count."""
    Hq, Hkv = q.shape[1], k.shape[1]
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:3], -INF, dtype=torch.float64)
    narrow = torch.zeros(q.shape, dtype=q.dtype)
    for b, length in enumerate(lengths):
        for h in range(Hq if length else 0):
            x, keys, values = q[b, h], k[b, h * Hkv // Hq, :length], v[b, h * Hkv // Hq, :length]
            score = x.double() @ keys.double().T * scale
            out[b, h], lse[b, h] = score.softmax(-1) @ values.double(), score.logsumexp(-1)
            narrow[b, h] = (x @ keys.T * scale).softmax(-1) @ values
    return out, lse, narrow


def check_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int] | None, scale: float) -> None:
    given = None if lengths is None else torch.tensor(lengths)
    out, lse = block_attention.block_attention(q, k, v, given, scale)
    counts = [k.shape[2]] * q.shape[0] if lengths is None else lengths
    want_out, want_lse, narrow = attention_truth(q, k, v, counts, scale)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    bound = 2 * error(narrow, want_out) + 2 * torch.finfo(q.dtype).eps * float(want_out.abs().max())
    assert error(out, want_out) <= bound
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=2e-6)


@pytest.fixture(params=[1, 4096], ids=["keys together", "keys split"])
def splitting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One program walks all keys, or as many as there are parts of 16."""
    monkeypatch.setattr(attention, "_PROGRAMS", request.param)
    monkeypatch.setattr(block_attention, "_LEAST_KEYS", 16)
    return int(request.param)


SHAPES = [(2, 2, 1, 3, 1), (4, 2, 5, 100, 20), (3, 1, 25, 70, 8), (1, 1, 1, 130, 16), (7, 1, 11, 33, 40)]


@interpreted
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(splitting: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    Hq, Hkv, n, L, d = shape
    q = randn(2, n, Hq, d, dtype=dtype).transpose(1, 2)
    k, v = randn(2, L, 2, Hkv, d, seed=1, dtype=dtype).permute(2, 0, 3, 1, 4)
    check_attention(q, k, v, None, d**-0.5)
    k, v = k.clone(), v.clone()
    k[1, :, L // 2 :], v[1, :, L // 2 :] = NAN, INF  # what lies beyond the length may be anything
    check_attention(q, k, v, [L, L // 2], 0.7 * d**-0.5)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_length(splitting: int, dtype: torch.dtype) -> None:
    """Parts of every size, some of them empty, and sequences without keys."""
    lengths = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 150]
    B = len(lengths)
    q, k, v = (randn(B, 1, n, 4, seed=n, dtype=dtype) for n in (2, 150, 150))
    check_attention(q, k, v, lengths, 0.5)
    unchecked = torch.tensor([-1, 2**40, -(2**32) + 5])  # as may come from another device
    out, lse = block_attention.block_attention(q[:3], k[:3], v[:3], unchecked, 0.5)
    want = attention_truth(q[:3], k[:3], v[:3], [0, 150, 0], 0.5)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-6, atol=2e-6)
    assert not out[0].any()
    assert not out[2].any()


@interpreted
def test_the_keys_are_split_where_programs_are_few(splitting: int) -> None:
    for heads, rows, length, size in (
        (1, 32, 1000, 2),
        (32, 32, 1000, 2),
        (256, 224, 1000, 4),
        (1, 1, 15, 2),
    ):
        cut = block_attention.config(heads, rows, length, 128, size)
        programs = heads * math.ceil(rows / cut.rows)
        assert cut.splits == (1 if splitting == 1 or length < 16 else min(-(-4096 // programs), 32))


@interpreted
def test_attention_with_special_scores(splitting: int) -> None:
    q, k, v = randn(1, 1, 5, 4), randn(1, 1, 40, 4, seed=1), randn(1, 1, 40, 4, seed=2)
    q[0, 0, 1, 2] = NAN  # one query without an answer, the others have theirs
    q[0, 0, 2] = 0.0  # all scores tie
    q[0, 0, 3] *= 100.0  # one key takes it all
    out, lse = block_attention.block_attention(q, k, v, None, 0.5)
    assert (
        out[0, 0].isnan().all(1).tolist() == lse[0, 0].isnan().tolist() == [False, True, False, False, False]
    )
    rest = q[:, :, [0, 2, 3, 4]]
    want_out, want_lse, _ = attention_truth(rest, k, v, [40], 0.5)
    torch.testing.assert_close(out[:, :, [0, 2, 3, 4]].double(), want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:, :, [0, 2, 3, 4]].double(), want_lse, rtol=1e-6, atol=1e-6)

    q = q.abs().nan_to_num(1.0) + 1.0
    k[0, 0, 3] = -INF  # a key that is ruled out
    out, lse = block_attention.block_attention(q, k, v, None, 0.5)
    kept = [j for j in range(40) if j != 3]
    want_out, want_lse, _ = attention_truth(q, k[:, :, kept], v[:, :, kept], [39], 0.5)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
    k[0, 0, 20] = NAN
    for result in block_attention.block_attention(q, k, v, None, 0.5):
        assert result.isnan().all()
    k[:] = -INF
    out, lse = block_attention.block_attention(q, k, v, None, 0.5)
    assert not out.any()
    assert (lse == -INF).all()


@interpreted
def test_attention_refuses_what_it_cannot() -> None:
    for shape, dtype, error_type, message in (
        ((1, 1, 1, 4), torch.float64, TypeError, "q: .*float64"),
        ((1, 1, 1, 257), torch.float32, ValueError, "q: .*at most 256.*257"),
    ):
        q = torch.zeros(shape, dtype=dtype)
        with pytest.raises(error_type, match=message):
            block_attention.block_attention(q, q, q, None, 1.0)


# ---- both


@interpreted
def test_offsets_are_64_bits(far_memory: Tensor) -> None:
    """Strides fit into 32 bits, offsets do not."""
    far = 2**30
    sizes = {0: 1, 1: 4, far: 3}
    for strides in ((0, 16, far, 1), (0, far, 8, 1), (far, 32, 8, 1), (0, 32, 8, far)):
        cache = far_memory.as_strided([sizes.get(stride, 2) for stride in strides], strides)
        k, v = randn(*cache.shape, dtype=torch.float16), randn(*cache.shape, seed=1, dtype=torch.float16)
        positions = torch.arange(cache.shape[2]).expand(cache.shape[0], -1)
        other = torch.zeros(cache.shape, dtype=torch.float16)
        kv_block_write.kv_block_write(cache, other, k, v, positions, None, None, False)
        assert torch.equal(cache, k)
        kv_block_write.kv_block_write(other, cache, k, v, positions, None, None, False)
        assert torch.equal(cache, v)
        kv_block_write.kv_block_write(other, other.clone(), cache, cache, positions, None, None, False)
        assert torch.equal(other, cache)
        for keys in (v.shape[1], 1):  # of every query head its own, or of all the same
            want = block_attention.block_attention(v, v[:, :keys], v[:, :keys], None, 0.5)
            got = block_attention.block_attention(cache, cache[:, :keys], cache[:, :keys], None, 0.5)
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
