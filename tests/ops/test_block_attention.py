"""block_attention against softmax attention in float64."""

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dlmkern
from tests.ops.support import DTYPES, assert_close, assert_same, opcheck, ulp

OP = "block_attention"
NAN, INF = math.nan, math.inf
SHAPES = (  # B, Hq, Hkv, n, L, d
    (1, 1, 1, 1, 1, 1),
    (2, 4, 2, 5, 37, 16),
    (1, 6, 1, 33, 70, 32),
    (2, 3, 3, 2, 130, 20),
)


def random_case(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0, spread: float = 2.0
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, n, length, size = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(s, generator=generator)
        for s in ((batch, heads, n, size), *((batch, kv_heads, length, size),) * 2)
    )
    return (spread * q).to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def truth(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int] | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """In float64 on the CPU, one sequence and head at a time."""
    batch, heads, n, size = q.shape
    q, k, v = (x.double().cpu() for x in (q, k, v))
    out, lse = torch.zeros_like(q), torch.full((batch, heads, n), -INF, dtype=torch.float64)
    group = heads // max(k.shape[1], 1)
    for b in range(batch):
        length = k.shape[2] if lengths is None else lengths[b]
        for h in range(heads if length else 0):
            keys, values = k[b, h // group, :length], v[b, h // group, :length]
            scores = q[b, h] @ keys.T * (size**-0.5 if scale is None else scale)
            lse[b, h] = scores.logsumexp(-1)
            out[b, h] = scores.softmax(-1) @ values
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_truth(
    backend: str, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    q, k, v = random_case(shape, dtype, device)
    length = shape[4]
    for lengths in (None, [length] * shape[0], [(length + 1) // 2, length][: shape[0]]):
        where = None if lengths is None else torch.tensor(lengths, device=device)
        found = dlmkern.block_attention(q, k, v, where)
        out, lse = truth(q, k, v, lengths)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert (found.out.dtype, found.lse.dtype) == (dtype, wide)
        assert_close(found.lse.double(), lse.numpy(), 16 * ulp(wide), 16 * ulp(wide))
        # the error rule: at most twice that of torch's attention in the same dtype
        keys = torch.arange(length, device=device)
        mask = None if where is None else (keys < where[:, None])[:, None, None, :]
        torchs = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).double().cpu()
        error, allowed = ((x - out).abs().amax() for x in (found.out.double().cpu(), torchs))
        assert error <= 2 * allowed + 4 * ulp(dtype)


def test_by_hand(backend: str, device: torch.device) -> None:
    # scores 0 and log 3: weights 1/4 and 3/4
    q = torch.tensor([1.0, 1.0], device=device).expand(1, 1, 1, 2)
    k = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], device=device)[None, None]
    v = torch.tensor([[8.0, 0.0], [0.0, 4.0]], device=device)[None, None]
    found = dlmkern.block_attention(q, k, v, scale=1.0)
    assert_close(found.out[0, 0, 0], torch.tensor([2.0, 3.0]).numpy(), 1e-6)
    assert_close(found.lse[0, 0], torch.tensor([math.log(4)]).numpy(), 1e-6)
    found = dlmkern.block_attention(q, k, v, torch.tensor([1], device=device))
    assert found.out.flatten().tolist() == [8.0, 0.0]
    assert found.lse.item() == 0.0
    # with the default scale the second score is log 3 / sqrt 2
    found = dlmkern.block_attention(q, k, v)
    assert_close(found.lse[0, 0], torch.tensor([math.log1p(3 ** (0.5**0.5))]).numpy(), 1e-6)


def test_query_heads_share_keys_in_order(backend: str, device: torch.device) -> None:
    # query heads 0 and 1 read key head 0, 2 and 3 read key head 1
    q, k, v = random_case((1, 4, 2, 3, 5, 8), torch.float32, device)
    found = dlmkern.block_attention(q, k, v)
    repeated = dlmkern.block_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    assert_close(found.out, repeated.out.cpu().numpy(), 1e-6)
    for h in range(4):
        alone = dlmkern.block_attention(q[:, h : h + 1], k[:, h // 2, None], v[:, h // 2, None])
        assert_close(found.out[:, h : h + 1], alone.out.cpu().numpy(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_beyond_the_length_counts(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    q, k, v = random_case((3, 2, 1, 4, 40, 16), dtype, device)
    lengths = torch.tensor([0, 17, 33], device=device)
    clean = dlmkern.block_attention(q, k, v, lengths)
    for garbage in (NAN, INF, -INF, 1e30):
        for b, length in enumerate(lengths.tolist()):
            k[b, :, length:] = garbage
            v[b, :, length:] = garbage
        found = dlmkern.block_attention(q, k, v, lengths)
        assert_same(found.out.float(), clean.out.float())
        assert_same(found.lse, clean.lse)
    assert (found.out[0] == 0).all()
    assert (found.lse[0] == -INF).all()
    assert_close(found.lse[1:].double(), truth(q, k, v, [0, 17, 33])[1][1:].numpy(), 1e-4)


def test_lengths_beyond_the_ends(backend: str, device: torch.device) -> None:
    """On an accelerator nobody looks at them."""
    q, k, v = random_case((3, 2, 1, 2, 9, 16), torch.float32, device)
    lengths = torch.tensor([-5, 9, 2**40], device=device)
    out, lse = torch.ops.dlmkern.block_attention(q, k, v, lengths, 0.25)
    every = dlmkern.block_attention(q, k, v)
    assert (out[0] == 0).all()
    assert (lse[0] == -INF).all()
    assert_close(out[1:], every.out[1:].cpu().numpy(), 1e-6)
    assert_close(lse[1:], every.lse[1:].cpu().numpy(), 1e-5)


def test_scores_far_from_zero(backend: str, device: torch.device) -> None:
    q, k, v = random_case((1, 2, 2, 3, 50, 16), torch.float32, device)
    for spread in (1e-20, 40.0, 1e4):
        found = dlmkern.block_attention(spread * q, k, v)
        out, lse = truth(spread * q, k, v)
        assert_close(found.out, out.numpy(), 1e-4 + 1e-6 * spread)
        assert_close(found.lse, lse.numpy(), 1e-6 * (spread + 4))
    for scale in (0.0, -0.3, 2.0):
        found = dlmkern.block_attention(q, k, v, scale=scale)
        out, lse = truth(q, k, v, scale=scale)
        assert_close(found.out, out.numpy(), 1e-5)
        assert_close(found.lse, lse.numpy(), 1e-5)


def test_a_nan_stays_in_its_query(backend: str, device: torch.device) -> None:
    q, k, v = random_case((2, 4, 2, 5, 20, 16), torch.float32, device)
    clean = dlmkern.block_attention(q, k, v)
    q[0, 1, 2, 3] = NAN
    found = dlmkern.block_attention(q, k, v)
    touched = torch.zeros(2, 4, 5, dtype=torch.bool, device=device)
    touched[0, 1, 2] = True
    assert found.out[touched].isnan().all()
    assert found.lse[touched].isnan().all()
    assert_same(found.out[~touched], clean.out[~touched])
    # a key with a NaN reaches all that attend to it, and nobody else
    q[0, 1, 2, 3] = 0.0
    k[1, 0, 7, 0] = NAN
    found = dlmkern.block_attention(q, k, v, torch.tensor([20, 7], device=device))
    assert not found.out.isnan().any()
    found = dlmkern.block_attention(q, k, v)
    assert found.lse[1, :2].isnan().all()
    assert not found.lse[1, 2:].isnan().any()
    assert not found.lse[0].isnan().any()


def test_parts_combine_through_the_lse(backend: str, device: torch.device) -> None:
    q, k, v = random_case((2, 4, 2, 3, 48, 16), torch.float32, device)
    whole = dlmkern.block_attention(q, k, v)
    parts = [dlmkern.block_attention(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 17), slice(17, 48))]
    lse = torch.stack([part.lse for part in parts])
    weights = lse.softmax(0)[..., None]
    assert_close(lse.logsumexp(0), whole.lse.cpu().numpy(), 1e-5)
    combined = sum(w * part.out for w, part in zip(weights, parts, strict=True))
    assert_close(combined, whole.out.cpu().numpy(), 1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape",
    [(0, 2, 1, 3, 5, 4), (2, 0, 1, 3, 5, 4), (2, 0, 0, 3, 5, 4), (2, 2, 1, 0, 5, 4), (2, 2, 1, 3, 0, 4)],
    ids=str,
)
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    q, k, v = random_case(shape, torch.float32, device)
    for lengths in (None, torch.zeros(shape[0], dtype=torch.int64, device=device)):
        found = dlmkern.block_attention(q, k, v, lengths)
        assert found.out.shape == q.shape
        assert found.lse.shape == q.shape[:3]
        if lengths is not None or not shape[4]:
            assert (found.out == 0).all()
            assert (found.lse == -INF).all()


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    shape = (2, 4, 2, 5, 11, 16)
    q, k, v = random_case(shape, torch.float32, device)
    expected = dlmkern.block_attention(q, k, v)

    def others(x: Tensor) -> list[Tensor]:
        longer = torch.full((*x.shape[:2], x.shape[2] + 7, x.shape[3]), NAN, device=device)
        longer[:, :, 3:-4] = x
        layers = torch.full((*x.shape, 3), NAN, device=device)
        layers[..., 1] = x
        return [x.transpose(1, 2).contiguous().transpose(1, 2), longer[:, :, 3:-4], layers[..., 1]]

    for queries, keys, values in zip(others(q), others(k), others(v), strict=True):
        found = dlmkern.block_attention(queries, keys, values)
        assert_close(found.out, expected.out.cpu().numpy(), 1e-6)
        assert_close(found.lse, expected.lse.cpu().numpy(), 1e-6)
    shared = dlmkern.block_attention(q, k[:1].expand_as(k), v[:1].expand_as(v))
    assert_close(shared.out[0], expected.out[0].cpu().numpy(), 1e-6)


def test_chunks_of_queries(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_case((2, 4, 2, 7, 20, 16), torch.float32, device)
    lengths = torch.tensor([20, 11], device=device)
    with dlmkern.use_backend("reference"):
        expected = dlmkern.block_attention(q, k, v, lengths)
    module = sys.modules["dlmkern.reference.block_attention"]  # the function of that name hides it
    monkeypatch.setattr(module, "CHUNK_BYTES", 3 * 4 * q.shape[0] * q.shape[1] * k.shape[2])  # 3 queries
    with dlmkern.use_backend("reference"):
        found = dlmkern.block_attention(q, k, v, lengths)
    assert_close(found.out, expected.out.cpu().numpy(), 1e-6)
    assert_close(found.lse, expected.lse.cpu().numpy(), 1e-6)


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (4, 1)]),
    n=st.integers(0, 4),
    length=st.integers(0, 9),
    size=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_invariants(
    batch: int, heads: tuple[int, int], n: int, length: int, size: int, seed: int, backend_name: str
) -> None:
    cpu = torch.device("cpu")
    q, k, v = random_case((batch, *heads, n, length, size), torch.float64, cpu, seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, length + 1, (batch,), generator=generator)
    with dlmkern.use_backend(backend_name):
        found = dlmkern.block_attention(q, k, v, lengths)
        out, lse = truth(q, k, v, lengths.tolist())
        assert_close(found.out, out.numpy(), 1e-12)
        assert_close(found.lse, lse.numpy(), 1e-12)
        for b in range(batch):
            own = int(lengths[b])
            order = torch.randperm(own, generator=generator)  # in which order the keys come does not matter
            rows = torch.randperm(n, generator=generator)
            alone = dlmkern.block_attention(
                *(q[b : b + 1, :, rows], k[b : b + 1, :, order], v[b : b + 1, :, order])
            )
            assert_close(alone.out[0], found.out[b, :, rows].numpy(), 1e-12)
            assert_close(alone.lse[0], found.lse[b, :, rows].numpy(), 1e-12)
    if length:
        low, high = (x.repeat_interleave(heads[0] // heads[1], 1)[:, :, None] for x in (v.amin(2), v.amax(2)))
        some = lengths[:, None, None, None] > 0
        assert (((found.out >= low - 1e-12) & (found.out <= high + 1e-12)) | ~some).all()


def test_gradients_do_not_flow(backend: str, device: torch.device) -> None:
    q, k, v = random_case((1, 2, 1, 2, 5, 16), torch.float32, device)
    found = dlmkern.block_attention(q.requires_grad_(), k, v)
    assert not found.out.requires_grad
    assert not found.lse.requires_grad


def test_errors() -> None:
    q, k, v = random_case((2, 4, 2, 3, 5, 8), torch.float32, torch.device("cpu"))
    lengths = torch.tensor([5, 2])
    good = {"q": q, "k": k, "v": v, "lengths": lengths}
    for changes, error, message in (
        ({"q": q.long()}, TypeError, "q: expected dtype"),
        ({"q": q[0]}, ValueError, r"q: expected shape \[B, Hq, n, d\]"),
        ({"q": q[..., :0], "k": k[..., :0], "v": v[..., :0]}, ValueError, "with d >= 1"),
        ({"k": k.double()}, TypeError, "k: expected dtype float32, got float64"),
        ({"k": k[0]}, ValueError, r"k: expected shape \[2, Hkv, L, 8\]"),
        ({"k": k[:1]}, ValueError, r"k: expected shape \[2, Hkv, L, 8\]"),
        ({"k": k[..., :4]}, ValueError, r"k: expected shape \[2, Hkv, L, 8\]"),
        ({"k": k.to("meta")}, ValueError, "k: expected device cpu"),
        ({"q": q[:, :3]}, ValueError, "k: expected a number of heads that divides the 3 of q, got 2"),
        ({"k": k[:, :0], "v": v[:, :0]}, ValueError, "k: expected a number of heads that divides the 4"),
        ({"v": v[:, :, :4]}, ValueError, r"v: expected shape \[2, 2, 5, 8\]"),
        ({"v": v.half()}, TypeError, "v: expected dtype float32"),
        ({"v": None}, TypeError, "v: expected a tensor"),
        ({"lengths": lengths.float()}, TypeError, "lengths: expected dtype"),
        ({"lengths": lengths[:1]}, ValueError, r"lengths: expected shape \[2\]"),
        ({"lengths": lengths + 1}, ValueError, r"lengths: expected values in \[0, 5\], got 6"),
        ({"lengths": lengths - 3}, ValueError, r"lengths: expected values in \[0, 5\], got -1"),
        ({"lengths": 5}, TypeError, "lengths: expected a tensor or an array"),
        ({"scale": "1"}, TypeError, "scale: expected a number or None, got str"),
        ({"scale": True}, TypeError, "scale: expected a number or None, got bool"),
        ({"scale": NAN}, ValueError, "scale: expected a finite number"),
        ({"scale": INF}, ValueError, "scale: expected a finite number"),
        ({"scale": 10**400}, ValueError, "scale: expected a number that a float can hold"),
    ):
        arguments: dict[str, Any] = good | changes
        with pytest.raises(error, match=message):
            dlmkern.block_attention(**arguments)


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    q, k, v = random_case((2, 4, 2, 3, 5, 16), torch.float32, device)
    lengths = torch.tensor([5, 2], device=device)
    opcheck(OP, q, k, v, None, 0.25)
    opcheck(OP, q, k, v, lengths, 0.25)
    compiled = torch.compile(dlmkern.block_attention, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(q, k, v, lengths), dlmkern.block_attention(q, k, v, lengths), strict=True):
        assert_same(one, other)
