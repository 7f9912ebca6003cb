"""cover_attention against float64 attention with the keys of every query written out."""

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from tests.ops.cover_support import (
    INF,
    NAN,
    Pass,
    assert_rule,
    corrected_rows,
    layouts,
    lse_bound,
    plain,
    random_pass,
    truth,
)
from tests.ops.support import DTYPES, assert_close, assert_same, opcheck, ulp

OP = "cover_attention"
SHAPES = (  # B, Hq, Hkv, n, L, d
    (1, 1, 1, 1, 1, 1),
    (2, 4, 2, 9, 9, 16),
    (1, 6, 1, 37, 37, 32),
    (1, 3, 3, 70, 70, 20),
)
SMALL = (2, 2, 1, 6, 6, 16)


def check(case: Pass, found: dlmkern.CoverAttention) -> None:
    """torch's attention for 16 bits on the CPU has a log-sum-exp of four digits after the point."""
    assert_rule(case, found, 1e-4 if case.q.element_size() == 2 else 0.0)


def attend(case: Pass) -> dlmkern.CoverAttention:
    return dlmkern.cover_attention(*case.tensors(), **case.options())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_truth(
    backend: str, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    few = backend == "triton"
    if few and shape in SHAPES[2:] and dtype != torch.float32:
        pytest.skip("as many positions of other dtypes take too long in Triton's interpreter")
    batch, length = shape[0], shape[3]
    for shift, lengths, share in (
        (0, None, 0.4),
        (1, [length] * batch, 0.4),
        (0, [(length + 1) // 2, length][:batch], 1.0),
        (1, [length - 1, 0][:batch], 0.7),
    )[:: 4 if few else 1]:
        where = None if lengths is None else torch.tensor(lengths, device=device)
        case = random_pass(shape, dtype, device, shift, share=share, lengths=where, shift=shift)
        check(case, attend(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_seed_is_plain_attention(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    for shift in (0, 1):
        case = random_pass(SMALL, dtype, device, shift, share=0.0, shift=shift)
        found = attend(case._replace(k_cached=case.k * NAN, v_cached=case.v * INF))  # nobody reads them
        check(case, found)
        with dlmkern.use_backend("reference"):
            expected = dlmkern.block_attention(case.q, case.k, case.v)
        assert_close(found.out.float(), expected.out.float().cpu().numpy(), max(1e-5, 4 * ulp(dtype)))
        assert_close(found.lse, expected.lse.cpu().numpy(), max(lse_bound(case), ulp(dtype) / 32))


def test_by_hand(backend: str, device: torch.device) -> None:
    def column(*numbers: float) -> Tensor:
        return torch.tensor(numbers, device=device)[None, None, :, None]

    # query 1 predicts a seed; all others have scores 0, log 3, log 4 and values 8, 16, 32
    q = torch.ones((1, 1, 3, 1), device=device)
    k, v = column(0.0, math.log(15), math.log(4)), column(8.0, 64.0, 32.0)
    k_cached, v_cached = column(NAN, math.log(3), NAN), column(NAN, 16.0, NAN)
    seeds = torch.tensor([[False, True, False]], device=device)
    arguments = q, k, v, k_cached, v_cached, seeds
    found = dlmkern.cover_attention(*arguments, scale=1.0)
    other, own = (8 + 3 * 16 + 4 * 32) / 8, (8 + 15 * 64 + 4 * 32) / 20
    assert_close(found.out.flatten(), torch.tensor([other, own, other]).numpy(), 1e-5)
    assert_close(found.lse.flatten().exp(), torch.tensor([8.0, 20.0, 8.0]).numpy(), 1e-5)
    # query 0 does, where queries predict the token after them
    found = dlmkern.cover_attention(*arguments, scale=1.0, shift=1)
    assert_close(found.out.flatten(), torch.tensor([own, other, other]).numpy(), 1e-5)
    # nobody sees the last column
    length = torch.tensor([2], device=device)
    found = dlmkern.cover_attention(*arguments, length, scale=1.0)
    assert_close(found.out.flatten(), torch.tensor([14.0, 60.5, 14.0]).numpy(), 1e-5)
    assert_close(found.lse.flatten().exp(), torch.tensor([4.0, 16.0, 4.0]).numpy(), 1e-5)
    # the default scale is 1 / sqrt(d)
    wider = [torch.cat([x] * 4, dim=3) for x in arguments[:5]]
    scaled = dlmkern.cover_attention(*wider, seeds)
    expected = dlmkern.cover_attention(*wider, seeds, scale=0.5)
    assert_same(scaled.out, expected.out)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_seed_alone_in_its_own_column(backend: str, device: torch.device, shift: int) -> None:
    """The cached column of a seed does not reach the query that predicts it, and the fresh one nobody
    else."""
    case = random_pass((1, 4, 2, 9, 9, 16), torch.float32, device, share=0.0, shift=shift)
    seeds = case.seeds.clone()
    seeds[0, [4, 5, 8]] = True  # two of them adjacent
    case = case._replace(seeds=seeds)
    before = attend(case)
    touched = torch.zeros(9, dtype=torch.bool)
    touched[5 - shift] = True
    cached = [x.index_fill(2, torch.tensor([5], device=device), 3.0) for x in (case.k_cached, case.v_cached)]
    after = attend(case._replace(k_cached=cached[0], v_cached=cached[1]))
    assert_close(after.out[:, :, touched], before.out[:, :, touched].cpu().numpy(), 1e-5)
    assert_close(after.lse[:, :, touched], before.lse[:, :, touched].cpu().numpy(), lse_bound(case))
    assert (after.lse[:, :, ~touched] != before.lse[:, :, ~touched]).all()
    fresh = [x.index_fill(2, torch.tensor([5], device=device), 3.0) for x in (case.k, case.v)]
    after = attend(case._replace(k=fresh[0], v=fresh[1]))
    assert_same(after.out[:, :, ~touched], before.out[:, :, ~touched])
    assert_same(after.lse[:, :, ~touched], before.lse[:, :, ~touched])
    assert (after.lse[:, :, touched] != before.lse[:, :, touched]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_beyond_the_length_counts(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    lengths = torch.tensor([0, 7, 12], device=device)
    for shift in (0, 1):
        case = random_pass((3, 2, 1, 12, 12, 16), dtype, device, share=0.6, lengths=lengths, shift=shift)
        clean = attend(case)
        check(case, clean)
        assert (clean.out[0] == 0).all()
        assert (clean.lse[0] == -INF).all()
        for junk in (NAN, INF, 1e30)[: 1 if backend == "triton" else 3]:
            for b, length in enumerate(lengths.tolist()):
                for x in case[1:5]:
                    x[b, :, length:] = junk
            for seeds in (case.seeds, case.seeds | (torch.arange(12, device=device) >= lengths[:, None])):
                found = attend(case._replace(seeds=seeds))
                assert_same(found.out.float(), clean.out.float())
                assert_same(found.lse, clean.lse)


def test_what_nobody_reads(backend: str, device: torch.device) -> None:
    """The caches where there is no seed, and this pass at a seed that no query predicts."""
    case = random_pass(SMALL, torch.float32, device, shift=1)
    case.seeds[:, 0] = True
    clean = attend(case)
    unread = ~case.seeds[:, None, :, None]
    k_cached, v_cached = (x.masked_fill(unread, NAN) for x in (case.k_cached, case.v_cached))
    first = torch.zeros_like(unread)
    first[:, :, 0] = True
    k, v = case.k.masked_fill(first, NAN), case.v.masked_fill(first, NAN)
    found = attend(case._replace(k=k, v=v, k_cached=k_cached, v_cached=v_cached))
    assert_same(found.out, clean.out)
    assert_same(found.lse, clean.lse)


def test_a_nan_stays_in_its_query(backend: str, device: torch.device) -> None:
    # torch's attention on the CPU makes a zero of a NaN if there are less than 8 keys
    case = random_pass((2, 2, 1, 9, 9, 16), torch.float32, device, share=0.0)
    case.seeds[:, 3] = True
    clean = attend(case)

    def only(found: dlmkern.CoverAttention, b: int, heads: slice, row: int) -> None:
        touched = torch.zeros((2, 2, 9), dtype=torch.bool, device=device)
        touched[b, heads, row] = True
        assert found.out[touched].isnan().all()
        assert found.lse[touched].isnan().all()
        assert_same(found.out[~touched], clean.out[~touched])
        assert_same(found.lse[~touched], clean.lse[~touched])

    q = case.q.clone()
    q[0, 1, 2, 3] = NAN
    only(attend(case._replace(q=q)), 0, slice(1, 2), 2)
    k = case.k.clone()
    k[1, 0, 3, 0] = NAN  # of a seed: only its own query sees it
    only(attend(case._replace(k=k)), 1, slice(0, 2), 3)


def test_scores_far_from_zero(backend: str, device: torch.device) -> None:
    case = random_pass((1, 2, 2, 9, 9, 16), torch.float32, device, share=0.5)
    for spread in (1e-20, 40.0, 1e4):
        large = case._replace(q=spread * case.q)
        found, (out, lse) = attend(large), truth(large)
        assert_close(found.out, out.numpy(), 1e-4 + 1e-6 * spread)
        assert_close(found.lse, lse.numpy(), 1e-6 * (spread + 4))
    for scale in (0.0, -0.3, 2.0):
        check(case._replace(scale=scale), attend(case._replace(scale=scale)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_own_score_far_from_the_others(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """A seed as this pass has it, far above and far below all that the cache holds, and the other way
    round."""
    for own, cached in ((3e4, 0.0), (-3e4, 0.0), (0.0, 3e4), (0.0, -3e4), (3e4, 2.9e4), (-3e4, -3e4)):
        case = random_pass((1, 1, 1, 5, 5, 4), dtype, device, share=0.0, scale=1.0)
        case.seeds[0, 2] = True
        q, k, k_cached = case.q.fill_(1.0), case.k, case.k_cached
        k[:, :, 2, 0], k_cached[:, :, 2, 0] = own, cached
        found, (out, lse) = attend(case), truth(case)
        assert q.isfinite().all()
        assert_close(found.out.double(), out.numpy(), 1e-4 + 4 * ulp(dtype))
        assert_close(found.lse.double(), lse.numpy(), 1e-4, 4 * ulp(torch.float32))
        if own == 3e4 and not cached:
            assert_same(found.out[0, :, 2].float(), case.v[0, :, 2].float())


def test_one_position(backend: str, device: torch.device) -> None:
    case = random_pass((2, 2, 1, 1, 1, 8), torch.float32, device, share=1.0)
    found = attend(case)
    assert_same(found.out, case.v.expand_as(found.out))
    found = attend(case._replace(shift=1))  # nothing predicts the first token
    assert_same(found.out, case.v_cached.expand_as(found.out))


def test_is_diagonal_correction_of_what_all_see(backend: str, device: torch.device) -> None:
    lengths = torch.tensor([6, 4], device=device)
    for shift in (0, 1):
        case = random_pass(SMALL, torch.float32, device, 5, share=0.6, shift=shift, lengths=lengths)
        found = attend(case)
        with dlmkern.use_backend("reference"):
            corrected = dlmkern.diagonal_correction(*plain(case), *case.tensors(), shift=shift)  # type: ignore[arg-type]
        assert_close(found.out, corrected.out.cpu().numpy(), 4e-6)
        assert_close(found.lse, corrected.lse.cpu().numpy(), lse_bound(case))


def test_query_heads_share_keys_in_order(backend: str, device: torch.device) -> None:
    case = random_pass((1, 4, 2, 7, 7, 8), torch.float32, device, share=0.5)
    found = attend(case)
    for h in range(4):
        group = slice(h // 2, h // 2 + 1)
        alone = Pass(case.q[:, h : h + 1], *(x[:, group] for x in case[1:5]), case.seeds)
        assert_close(found.out[:, h : h + 1], attend(alone).out.cpu().numpy(), 1e-6)


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    case = random_pass((2, 2, 1, 11, 11, 16), torch.float32, device)
    expected = attend(case)
    for views in zip(*(layouts(x) for x in case[:6] if isinstance(x, Tensor)), strict=True):
        found = attend(Pass(*(view for _, view in views)))
        assert_close(found.out, expected.out.cpu().numpy(), 1e-6)
        assert_close(found.lse, expected.lse.cpu().numpy(), 1e-6)
    shared = attend(case.map(lambda x: x[:1].expand_as(x)))
    assert_close(shared.out[0], expected.out[0].cpu().numpy(), 1e-6)
    assert_close(shared.out[1], expected.out[0].cpu().numpy(), 1e-6)


@pytest.mark.parametrize("shape", [(0, 2, 1, 5, 4), (2, 0, 1, 5, 4), (2, 0, 0, 5, 4), (2, 2, 1, 0, 4)])
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    batch, heads, kv_heads, length, size = shape
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    case = random_pass((batch, heads, kv_heads, length, length, size), torch.float32, device)
    for options in ({}, {"shift": 1}, {"lengths": lengths}):
        found = attend(case._replace(**options))
        assert (found.out.shape, found.lse.shape) == (case.q.shape, case.q.shape[:3])


def test_lengths_beyond_the_ends(backend: str, device: torch.device) -> None:
    """On an accelerator nobody looks at them."""
    case = random_pass((3, 2, 1, 9, 9, 16), torch.float32, device)
    out, lse = torch.ops.dlmkern.cover_attention(
        *case[:6], torch.tensor([-5, 9, 2**40], device=device), 0, 0.25
    )
    every = attend(case)
    assert (out[0] == 0).all()
    assert (lse[0] == -INF).all()
    assert_close(out[1:], every.out[1:].cpu().numpy(), 1e-6)
    assert_close(lse[1:], every.lse[1:].cpu().numpy(), 1e-5)


def test_lengths_of_any_integer_dtype(backend: str, device: torch.device) -> None:
    case = random_pass((1, 2, 1, 5, 5, 16), torch.float32, device)
    expected = attend(case._replace(lengths=torch.tensor([3], device=device)))
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        found = attend(case._replace(lengths=torch.tensor([3], dtype=dtype, device=device)))
        assert_same(found.out, expected.out)


def test_more_than_fits_one_thread(backend: str, device: torch.device) -> None:
    if backend == "triton":
        pytest.skip("Triton's interpreter has one thread")
    length = 100
    lengths = torch.tensor([length, length - 11], device=device)
    case = random_pass((2, 2, 1, length, length, 64), torch.float32, device, lengths=lengths, shift=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = attend(case)
    finally:
        torch.set_num_threads(threads)
    check(case, found)


def test_chunks_of_queries(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = torch.tensor([20, 11], device=device)
    case = random_pass((2, 4, 2, 20, 20, 16), torch.float32, device, lengths=lengths)
    module = sys.modules["dlmkern.reference.cover_attention"]  # the function of that name hides it
    with dlmkern.use_backend("reference"):
        expected = attend(case)
        for queries in (0, 1, 3):
            monkeypatch.setattr(module, "CHUNK_BYTES", queries * 4 * 2 * 4 * 20)
            found = attend(case)
            assert_close(found.out, expected.out.cpu().numpy(), 1e-6)
            assert_close(found.lse, expected.lse.cpu().numpy(), 1e-6)


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (4, 1)]),
    length=st.integers(1, 7),
    size=st.integers(1, 5),
    shift=st.integers(0, 1),
    share=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    seed=st.integers(0, 2**16),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_invariants(
    batch: int,
    heads: tuple[int, int],
    length: int,
    size: int,
    shift: int,
    share: float,
    seed: int,
    backend_name: str,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, length + 1, (batch,), generator=generator)
    case = random_pass(
        (batch, *heads, length, length, size),
        torch.float64,
        torch.device("cpu"),
        seed,
        share=share,
        shift=shift,
        lengths=lengths,
    )
    with dlmkern.use_backend(backend_name):
        found = attend(case)
        for one, other in zip(found, truth(case), strict=True):
            assert_close(one, other.numpy(), 1e-12)
        for b, own in enumerate(lengths.tolist()):
            # alone, and without what lies beyond the length
            row = case.row(b)
            alone = attend(row)
            parts = (x[..., :own, :] for x in row[:5])
            short = attend(Pass(*parts, row.seeds[:, :own], shift=shift))
            for i in range(2):
                assert_close(alone[i][0], found[i][b].numpy(), 1e-12)
                assert_close(short[i][0], found[i][b, :, :own].numpy(), 1e-12)
        # rows that predict no seed are those of attention over what all see
        everyone = dlmkern.CoverAttention(*truth(case, own=False))
        others = ~corrected_rows(case)[:, None].expand(found.lse.shape)
        assert_close(found.out[others], everyone.out[others].numpy(), 1e-12)
        # a seed with the cached key and value is nothing to correct
        same = attend(case._replace(k=case.k_cached, v=case.v_cached))
        with_none = attend(case._replace(k=case.k_cached, v=case.v_cached, seeds=case.seeds & False))
        assert_close(same.out, with_none.out.numpy(), 1e-12)


def test_gradients_do_not_flow(backend: str, device: torch.device) -> None:
    case = random_pass(SMALL, torch.float32, device)
    expected = attend(case)
    found = attend(case.map(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x))
    assert not found.out.requires_grad
    assert not found.lse.requires_grad
    assert_same(found.out, expected.out)


def test_meta_tensors_have_shapes() -> None:
    case = random_pass(SMALL, torch.bfloat16, torch.device("meta"))
    found = attend(case)
    assert (found.out.shape, found.out.dtype) == ((2, 2, 6, 16), torch.bfloat16)
    assert (found.lse.shape, found.lse.dtype, found.lse.device.type) == ((2, 2, 6), torch.float32, "meta")


def test_errors() -> None:
    case = random_pass((2, 4, 2, 5, 5, 8), torch.float32, torch.device("cpu"))
    lengths = torch.tensor([5, 2])
    good = dict(zip(Pass._fields[:6], case, strict=False)) | {"lengths": lengths}
    q, k, seeds = case.q, case.k, case.seeds
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"q": q.long()}, TypeError, "q: expected dtype float64 or .*, got int64"),
        ({"q": q[0]}, ValueError, r"q: expected shape \[B, Hq, n, d\] with d >= 1, got \[4, 5, 8\]"),
        ({"q": q.to_sparse()}, TypeError, "q: expected a dense tensor"),
        ({"q": None}, TypeError, "q: expected a tensor or array, got None"),
        ({"q": q[:, :3]}, ValueError, "k: expected a number of heads that divides the 3 of q, got 2"),
        ({"q": q[:, :, :4]}, ValueError, "k: expected the 4 positions of q, got 5"),
        ({"k": k[:, :, :4]}, ValueError, "k: expected the 5 positions of q, got 4"),
        ({"k": k[0]}, ValueError, r"k: expected shape \[2, Hkv, L, 8\]"),
        ({"seeds": seeds.long()}, TypeError, "seeds: expected dtype bool, got int64"),
        ({"seeds": seeds[:, :4]}, ValueError, r"seeds: expected shape \[2, 5\] to go with q, got \[2, 4\]"),
        ({"seeds": seeds[0]}, ValueError, r"seeds: expected shape \[2, 5\]"),
        ({"seeds": seeds.to("meta")}, ValueError, "seeds: expected device cpu like q, got meta"),
        ({"seeds": None}, TypeError, "seeds: expected a tensor or array, got None"),
        ({"seeds": [[True]]}, TypeError, "seeds: expected a tensor or an array with __dlpack__, got list"),
        ({"lengths": lengths.float()}, TypeError, "lengths: expected dtype int64"),
        ({"lengths": lengths[:1]}, ValueError, r"lengths: expected shape \[2\] to go with q, got \[1\]"),
        ({"lengths": lengths + 1}, ValueError, r"lengths: expected values in \[0, 5\], got 6"),
        ({"lengths": lengths - 3}, ValueError, r"lengths: expected values in \[0, 5\], got -1"),
        ({"lengths": lengths.to("meta")}, ValueError, "lengths: expected device cpu like q, got meta"),
        ({"lengths": 5}, TypeError, "lengths: expected a tensor or an array"),
        ({"shift": "1"}, TypeError, "shift: expected an int, got str"),
        ({"shift": True}, TypeError, "shift: expected an int, got bool"),
        ({"shift": 1.0}, TypeError, "shift: expected an int, got float"),
        ({"shift": 2}, ValueError, "shift: expected 0 or 1, got 2"),
        ({"shift": -1}, ValueError, "shift: expected 0 or 1, got -1"),
        ({"scale": "1"}, TypeError, "scale: expected a number or None, got str"),
        ({"scale": NAN}, ValueError, "scale: expected a finite number, got nan"),
        ({"scale": 10**400}, ValueError, "scale: expected a number that a float can hold"),
    ]
    for name in ("k", "v", "k_cached", "v_cached"):
        x: Any = good[name]
        cases += [
            ({name: x.double()}, TypeError, f"{name}: expected dtype float32, got float64"),
            ({name: x[:1]}, ValueError, rf"{name}: expected shape \[2, .*, got \[1, 2, 5, 8\]"),
            ({name: x[..., :4]}, ValueError, rf"{name}: expected shape \[2, .*, got \[2, 2, 5, 4\]"),
            ({name: x.to("meta")}, ValueError, f"{name}: expected device cpu like ., got meta"),
            ({name: None}, TypeError, f"{name}: expected a tensor or array, got None"),
            ({name: x.numpy()}, TypeError, f"{name}: expected the same kind of array as q"),
        ]
    for changes, error, message in cases:
        arguments: dict[str, Any] = good | changes
        with pytest.raises(error, match=message):
            dlmkern.cover_attention(**arguments)


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    lengths = torch.tensor([6, 3], device=device)
    case = random_pass(SMALL, torch.float32, device)
    small = case.row(0).map(lambda x: x[:, :1])._replace(seeds=case.seeds[:1])
    opcheck(OP, *small[:6], None, 0, 0.25)
    opcheck(OP, *small[:6], lengths[:1], 1, 0.25)
    compiled = torch.compile(dlmkern.cover_attention, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(*case[:6], lengths), attend(case._replace(lengths=lengths)), strict=True):
        assert_same(one, other)
