"""diagonal_correction against float64 attention with the keys of every query written out."""

import math
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
    wide,
)
from tests.ops.support import DTYPES, assert_close, assert_same, opcheck, ulp

OP = "diagonal_correction"
SHAPES = (  # B, Hq, Hkv, n, L, d; rows at positions where n differs from L
    (1, 1, 1, 1, 1, 1),
    (2, 4, 2, 9, 9, 16),
    (1, 6, 2, 7, 40, 32),
    (1, 3, 3, 70, 70, 20),
)
WHOLE, BLOCK = (2, 2, 1, 6, 6, 16), (2, 2, 1, 4, 7, 16)
BELOW = (0.5, INF)  # what is recomputed: what has to be, and everything


def some_pass(shape: tuple[int, ...], *arguments: Any, **options: Any) -> Pass:
    return random_pass(shape, *arguments, block=shape[3] != shape[4], **options)


def correct(
    case: Pass, start: tuple[Tensor, Tensor] | None = None, recompute_below: float = 0.5
) -> dlmkern.CoverAttention:
    """From what all queries see, if not from something else."""
    return dlmkern.diagonal_correction(
        *(plain(case) if start is None else start),
        *case.tensors(),  # type: ignore[arg-type]
        **case.options(),
        recompute_below=recompute_below,
    )


def assert_bits(case: Pass, found: tuple[Tensor, Tensor], start: tuple[Tensor, Tensor]) -> None:
    """Rows that predict no seed are as they were."""
    others = ~corrected_rows(case)[:, None].expand(found[1].shape)
    for one, other in zip(found, start, strict=True):
        integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()]
        assert torch.equal(one[others].view(integers), other[others].view(integers))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_truth(
    backend: str, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    few = backend == "triton"  # in the interpreter, where a seed takes tens of milliseconds a head
    if few and shape in SHAPES[2:] and dtype != torch.float32:
        pytest.skip("as many positions of other dtypes take too long in Triton's interpreter")
    batch, length = shape[0], shape[4]
    for shift, lengths, share in (
        (0, None, 0.15 if few else 0.4),
        (1, [length] * batch, 0.4),
        (0, [(length + 1) // 2, length][:batch], 1.0),
        (1, [length - 1, 0][:batch], 0.7),
    )[:: 4 if few else 1]:
        where = None if lengths is None else torch.tensor(lengths, device=device)
        case = some_pass(shape, dtype, device, shift, share=share, lengths=where, shift=shift)
        start = plain(case)
        kept = start[0].clone(), start[1].clone()
        for recompute_below in BELOW[DTYPES.index(dtype) % 2 :: 2] if few else BELOW:
            found = correct(case, start, recompute_below)
            assert_rule(case, found)
            assert_bits(case, found, start)
        for one, other in zip(start, kept, strict=True):
            assert torch.equal(one, other)


def test_by_hand(backend: str, device: torch.device) -> None:
    def column(*numbers: float) -> Tensor:
        return torch.tensor(numbers, device=device)[None, None, :, None]

    # all see weights 1/8, 3/8, 4/8 and values 8, 16, 32; with 15 for the 3 they are 1/20, 15/20, 4/20
    q = torch.ones((1, 1, 3, 1), device=device)
    k, v = column(0.0, math.log(15), math.log(4)), column(8.0, 64.0, 32.0)
    k_cached, v_cached = column(NAN, math.log(3), NAN), column(NAN, 16.0, NAN)
    seeds = torch.tensor([[False, True, False]], device=device)
    out = torch.full((1, 1, 3, 1), 184 / 8, device=device)
    lse = torch.full((1, 1, 3), math.log(8), device=device)
    arguments = out, lse, q, k, v, k_cached, v_cached, seeds
    other, own = 184 / 8, (8 + 15 * 64 + 4 * 32) / 20
    for recompute_below in (0.0, 0.5, INF):
        options: dict[str, Any] = {"scale": 1.0, "recompute_below": recompute_below}
        found = dlmkern.diagonal_correction(*arguments, **options)
        assert_close(found.out.flatten(), torch.tensor([other, own, other]).numpy(), 2e-5)
        assert_close(found.lse.flatten().exp(), torch.tensor([8.0, 20.0, 8.0]).numpy(), 2e-5)
        found = dlmkern.diagonal_correction(*arguments, **options, shift=1)
        assert_close(found.out.flatten(), torch.tensor([own, other, other]).numpy(), 2e-5)
        # the same row by itself, at place 1 of a cache of all three
        cached = column(0.0, math.log(3), math.log(4)), column(8.0, 16.0, 32.0)
        found = dlmkern.diagonal_correction(
            *(x[:, :, 1:2] for x in (out, lse, q, k, v)),
            *cached,
            seeds[:, 1:2],
            positions=torch.tensor([[1]], device=device),
            **options,
        )
        assert_close(found.out.flatten(), torch.tensor([own]).numpy(), 2e-5)
        assert_close(found.lse.flatten().exp(), torch.tensor([20.0]).numpy(), 2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_formula_makes_of_anything(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """`out` and `lse` are taken as they are given where nothing is recomputed."""
    for shape in (BLOCK, WHOLE)[: 1 + (backend != "triton")]:
        case = some_pass(shape, dtype, device, share=1.0, spread=0.3)
        generator = torch.Generator().manual_seed(1)
        start = (
            torch.randn(case.q.shape, generator=generator).to(device, dtype),
            (3 + torch.rand(case.q.shape[:3], generator=generator)).to(device, wide(dtype)),
        )
        found = correct(case, start)
        assert_bits(case, found, start)
        x, (out, lse) = case.map(lambda y: y.cpu().double()), (y.cpu().double() for y in start)
        for b, row in enumerate(corrected_rows(case).tolist()):
            for i, corrected in enumerate(row):
                c = i if case.positions is None else int(case.positions[b, i])
                for h in range(2 if corrected else 0):
                    g = 0
                    a = math.exp(case.factor * x.q[b, h, i] @ x.k_cached[b, g, c] - lse[b, h, i])
                    w = math.exp(case.factor * x.q[b, h, i] @ x.k[b, g, i] - lse[b, h, i])
                    r = 1 - a + w
                    assert r > 0.5
                    expected = (out[b, h, i] - a * x.v_cached[b, g, c] + w * x.v[b, g, i]) / r
                    bound = 4 * ulp(dtype) * float(expected.abs().max()) + 8 * ulp(wide(dtype))
                    assert_close(found.out[b, h, i].double(), expected.numpy(), bound)
                    assert abs(found.lse[b, h, i].item() - lse[b, h, i] - math.log(r)) < 8 * ulp(wide(dtype))


def weighted(a: float, b: float, dtype: torch.dtype, device: torch.device) -> Pass:
    """One query whose cached key has the weight a, and whose own the weight b in the same measure."""
    others = math.log1p(-a) - math.log(3)
    case = random_pass((1, 1, 1, 4, 4, 4), dtype, device, share=0.0, scale=1.0)
    case.seeds[0, 2] = True
    case.q.zero_()[..., 0] = 1.0
    case.k[..., 0], case.k_cached[..., 0] = others, math.log(a)
    case.k[0, 0, 2, 0] = math.log(b)
    return case


WEIGHTS = (1e-12, 1e-6, 1e-3, 0.5, 0.9, 1 - 1e-3, 1 - 1e-6, 1 - 1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_diagonal_weights(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """From next to nothing to nearly all, before and after: what is recomputed is exact, and the formula
    loses as many digits as r has zeros."""
    narrow, few = wide(dtype), backend == "triton"
    for a in WEIGHTS[:: 7 if few else 1]:
        for b in (1e-12, 0.3, 1 - 1e-12, 1e6)[:: 2 if few else 1]:
            case = weighted(a, b, dtype, device)
            start, (out, lse) = plain(case), truth(case)
            # of the inputs as they are rounded
            column = case.k_cached[0, 0, 2, 0].double().exp().item(), case.k[0, 0, 2, 0].double().exp().item()
            r = 1 + (column[1] - column[0]) / truth(case, own=False)[1][0, 0, 2].exp().item()
            largest = float(max(x.abs().max() for x in (case.v, case.v_cached)))
            rounding = ulp(dtype) * largest + 4 * ulp(narrow) * largest * (1 + abs(lse_of(start)))
            for recompute_below in BELOW:
                found = correct(case, start, recompute_below)
                error = (found.out.double().cpu() - out).abs().max()
                assert error <= 3 * rounding, (a, b, recompute_below)
                error = (found.lse.double().cpu() - lse).abs().max()
                assert error <= 8 * ulp(narrow) * (2 + lse.abs().max()), (a, b, recompute_below)
            found = correct(case, start, 0.0)
            error = (found.out.double().cpu() - out).abs().max()
            assert error <= 3 * rounding * max(1.0, 1 / abs(r)) + 1e-30 or r < 4 * ulp(narrow), (a, b)


def lse_of(start: tuple[Tensor, Tensor]) -> float:
    return float(start[1].abs().max())


def test_the_formula_alone_loses_what_is_recomputed(backend: str, device: torch.device) -> None:
    case = weighted(1 - 1e-6, 1e-6, torch.float32, device)
    expected = truth(case)[0]
    errors = [float((correct(case, None, below).out.cpu() - expected).abs().max()) for below in (0.0, 0.5)]
    assert errors[1] < 1e-6 < 1e-3 < errors[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_own_score_far_from_the_others(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """A seed as this pass has it, far above and far below all that the cache holds, and the other way
    round: nothing overflows."""
    for own, cached in ((3e4, 0.0), (-3e4, 0.0), (0.0, 3e4), (0.0, -3e4), (3e4, 2.9e4), (-3e4, -3e4)):
        for block in (False, True)[backend == "triton" :]:
            case = random_pass((1, 1, 1, 5, 5, 4), dtype, device, share=0.0, scale=1.0)
            case.seeds[0, 2] = True
            case.q.fill_(1.0)
            case.k[:, :, 2, 0], case.k_cached[:, :, 2, 0] = own, cached
            if block:
                case = case._replace(positions=torch.arange(5, device=device).expand(1, 5))
            start, (out, lse) = plain(case), truth(case)
            for below in (0.0, 0.5, INF)[backend == "triton" :]:
                if below == 0 and cached > own:
                    continue  # r is nothing but its own rounding
                found = correct(case, start, below)
                assert_close(found.out.double(), out.numpy(), 1e-4 + 4 * ulp(dtype))
                assert_close(found.lse.double(), lse.numpy(), 1e-4, 4 * ulp(torch.float32))
                if own == 3e4 and not cached:
                    assert_same(found.out[0, :, 2].float(), case.v[0, :, 2].float())


def test_nothing_is_divided_by_zero(backend: str, device: torch.device) -> None:
    """The only key, its cached weight 1, gets a weight that is none at all in float64."""
    for dtype in (torch.float32, torch.bfloat16):
        case = random_pass((1, 1, 1, 1, 1, 2), dtype, device, share=1.0, scale=1.0)
        case.q.fill_(1.0)
        case.k.fill_(-1024.0)
        case.k_cached.fill_(0.0)
        for below in (0.0, 0.5, INF):
            found = correct(case, (case.v_cached.clone(), torch.zeros((1, 1, 1), device=device)), below)
            assert_same(found.out.float(), case.v.float())
            assert found.lse.item() == -2048.0


def test_recomputing_all_needs_neither_out_nor_lse(backend: str, device: torch.device) -> None:
    for shape in (WHOLE, BLOCK):
        lengths = torch.tensor([6, 4], device=device)
        case = some_pass(shape, torch.float32, device, share=0.5, lengths=lengths)
        start = plain(case)
        rows = corrected_rows(case)[:, None, :, None]
        assert rows.any()
        junk = start[0].masked_fill(rows, NAN), start[1].masked_fill(rows[..., 0], -INF)
        found = correct(case, junk, INF)
        assert_rule(case, found)
        assert_bits(case, found, junk)


def test_threshold(backend: str, device: torch.device) -> None:
    """r = 1 - a + b, and not 1 - a, decides."""
    for a, b, recomputed in ((0.25, 0.05, False), (0.9, 0.05, True), (0.9, 0.8, False), (0.9, 1e3, False)):
        case = weighted(a, b, torch.float32, device)
        out, lse = plain(case)
        marked = correct(case, (out + 1.0, lse))
        off = float((marked.out - correct(case, (out, lse)).out)[0, 0, 2].abs().max())
        assert (off == 0.0) == recomputed, (a, b)
        assert recomputed or abs(off - 1 / (1 - a + b)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_nothing_beyond_the_length_counts(
    backend: str, device: torch.device, dtype: torch.dtype, shift: int
) -> None:
    few = backend == "triton"
    if few and shift == (dtype == torch.float32):
        pytest.skip("both shifts of both dtypes take too long in Triton's interpreter")
    lengths = torch.tensor([0, 3, 8], device=device)
    for n in (8, 4)[shift if few else 0 :: 2 if few else 1]:
        case = some_pass((3, 1, 1, n, 8, 16), dtype, device, share=0.8, lengths=lengths, shift=shift)
        start = plain(case)
        for below in BELOW:
            clean = correct(case, start, below)
            assert_rule(case, clean)
            junked = case.map(Tensor.clone)
            for junk in (NAN, INF, 1e30)[: 1 if few else 3]:
                for b, length in enumerate(lengths.tolist()):
                    for x in (junked.k_cached, junked.v_cached):
                        x[b, :, length:] = junk
                    for i in range(n):
                        place = i if junked.positions is None else int(junked.positions[b, i])
                        if not 0 <= place < length:
                            junked.k[b, :, i], junked.v[b, :, i] = junk, junk
                            junked.seeds[b, i] = True
                found = correct(junked, start, below)
                assert_same(found.out.float(), clean.out.float())
                assert_same(found.lse, clean.lse)


def test_what_nobody_reads(backend: str, device: torch.device) -> None:
    """The caches where there is no seed, in a whole pass; in that of a block, rows that are none; and a seed
    that no query predicts."""
    for shape in (WHOLE, BLOCK):
        case = some_pass(shape, torch.float32, device, shift=1)
        case.seeds[:, 0] = True
        start = plain(case)
        nothing, first = torch.zeros_like(case.seeds), torch.zeros_like(case.seeds)
        first[:, 0] = True
        fresh = first if case.positions is None else first | ~case.seeds
        cached = ~case.seeds if case.positions is None else nothing.new_zeros(2, shape[4])
        k, v = (x.masked_fill(fresh[:, None, :, None], NAN) for x in case[1:3])
        k_cached, v_cached = (x.masked_fill(cached[:, None, :, None], NAN) for x in case[3:5])
        bare = case._replace(k=k, v=v, k_cached=k_cached, v_cached=v_cached)
        for below in BELOW:
            clean, found = correct(case, start, below), correct(bare, start, below)
            assert_same(found.out, clean.out)
            assert_same(found.lse, clean.lse)


def test_a_nan_stays_in_its_row(backend: str, device: torch.device) -> None:
    for shape in (WHOLE, BLOCK):
        case = some_pass(shape, torch.float32, device, share=0.0)
        if case.positions is not None:
            case.positions[case.positions == 6] = -1
            case.positions[:, 3] = 6
        case.seeds[:, 3] = True
        start = plain(case)
        clean = correct(case, start)
        k, q, v = case.k.clone(), case.q.clone(), case.v.clone()
        k[1, 0, 3, 0] = q[0, 1, 3, 2] = v[0, 0, 3, 5] = NAN
        for below in BELOW:
            clean, found = correct(case, start, below), correct(case._replace(k=k, q=q, v=v), start, below)
            rows = torch.zeros_like(start[1], dtype=torch.bool)
            rows[1, :, 3] = rows[0, 1, 3] = True
            assert found.lse[rows].isnan().all()
            assert_same(found.lse[~rows], clean.lse[~rows])
            numbers = rows.unsqueeze(-1).repeat(1, 1, 1, 16)
            numbers[0, 0, 3, 5] = True
            assert found.out[numbers].isnan().all()
            assert_same(found.out[~numbers], clean.out[~numbers])


def test_padding_and_shared_places(backend: str, device: torch.device) -> None:
    """Rows at -1 are none; two rows at one place are corrected each by its own key, and a row that is no
    seed changes nothing."""
    case = random_pass((1, 2, 1, 6, 9, 16), torch.float32, device, share=0.0, block=True)
    for places, seeds, shift in (
        ([3, -1, 3, 8, -1, 0], [True, True, True, False, False, True], 0),
        ([3, -1, 3, 3, 5, 0], [True, False, False, True, True, True], 0),
        ([3, -1, 3, 8, -1, 0], [True, True, True, False, False, True], 1),
        ([-1] * 6, [True] * 6, 0),
    ):
        case = case._replace(
            positions=torch.tensor([places], device=device),
            seeds=torch.tensor([seeds], device=device),
            shift=shift,
        )
        start = plain(case)
        for below in BELOW:
            found = correct(case, start, below)
            assert_rule(case, found)
            assert_bits(case, found, start)
    assert_same(found.out, start[0])


def test_whatever_lies_outside_is_no_seed(backend: str, device: torch.device) -> None:
    """On an accelerator nobody looks at the numbers."""
    case = random_pass((3, 2, 1, 6, 9, 16), torch.float32, device, share=1.0, block=True)
    case = case._replace(
        positions=torch.tensor([[0, 9, -2, 2**40, -(2**63), 5]] * 3, device=device),
        lengths=torch.tensor([-5, 9, 2**40], device=device),
    )
    start = plain(case)
    for below in BELOW:
        found = start[0].clone(), start[1].clone()
        torch.ops.dlmkern.diagonal_correction(*found, *case[:8], 0, 0.25, below)
        assert corrected_rows(case).sum() == 4
        assert_rule(case, found)
        assert_bits(case, found, start)


def test_is_cover_attention(backend: str, device: torch.device) -> None:
    lengths = torch.tensor([6, 4], device=device)
    for shift in (0, 1):
        case = random_pass(WHOLE, torch.float32, device, 5, share=0.6, shift=shift, lengths=lengths)
        with dlmkern.use_backend("reference"):
            expected = dlmkern.cover_attention(*case.tensors(), shift=shift)  # type: ignore[arg-type]
        found = correct(case)
        assert_close(found.out, expected.out.cpu().numpy(), 4e-6)
        assert_close(found.lse, expected.lse.cpu().numpy(), lse_bound(case))


def test_query_heads_share_keys_in_order(backend: str, device: torch.device) -> None:
    for shape in ((1, 4, 2, 7, 7, 8), (1, 4, 2, 7, 9, 8)):
        case = some_pass(shape, torch.float32, device, share=0.7)
        start = plain(case)
        found = correct(case, start)
        for h in range(4):
            own, group = slice(h, h + 1), slice(h // 2, h // 2 + 1)
            alone = case._replace(
                q=case.q[:, own], **{x: getattr(case, x)[:, group] for x in Pass._fields[1:5]}
            )
            single = correct(alone, (start[0][:, own], start[1][:, own]))
            assert_close(found.out[:, own], single.out.cpu().numpy(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [WHOLE, BLOCK], ids=str)
def test_layouts_do_not_matter(
    backend: str, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    few = backend == "triton"
    if few and (shape == WHOLE) != (dtype == torch.float32):
        pytest.skip("every layout of everything takes too long in Triton's interpreter")
    lengths = torch.tensor([6, 4], device=device)
    case = some_pass(shape, dtype, device, lengths=lengths, share=0.4)
    start = plain(case)
    for below in BELOW[shape == WHOLE :: 2] if few else BELOW:
        expected = correct(case, start, below)
        tensors = *start, *case[:6]
        for views in zip(*(layouts(x) for x in tensors if isinstance(x, Tensor)), strict=True):
            out, lse, *others = (view for _, view in views)
            moved = Pass(*others, lengths=lengths, positions=case.positions)
            if case.positions is not None:
                moved = moved._replace(positions=case.positions.T.contiguous().T)
            copies = [] if few else [correct(moved, (out, lse), below)]
            torch.ops.dlmkern.diagonal_correction(out, lse, *moved[:8], 0, 0.25, below)  # where they lie
            for one in (*copies, (out, lse)):
                assert_close(one[0].float(), expected.out.float().cpu().numpy(), max(1e-6, ulp(dtype)))
                assert_close(one[1], expected.lse.cpu().numpy(), 1e-6)
        shared = correct(
            case.map(lambda x: x[:1].expand_as(x)), tuple(x[:1].expand_as(x) for x in start), below
        )
        for row in shared.out.float():
            assert_close(row, expected.out[0].float().cpu().numpy(), max(1e-6, ulp(dtype)))


@pytest.mark.parametrize(
    "shape",
    [(0, 2, 1, 5, 5, 4), (2, 0, 1, 5, 5, 4), (2, 0, 0, 3, 5, 4), (2, 2, 1, 0, 0, 4), (2, 2, 1, 0, 5, 4)],
    ids=str,
)
def test_empty(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    case = some_pass(shape, torch.float32, device)
    lengths = torch.zeros(shape[0], dtype=torch.int64, device=device)
    for options in ({}, {"shift": 1}, {"lengths": lengths}):
        found = correct(case._replace(**options), (case.q, case.q[..., 0]))
        assert (found.out.shape, found.lse.shape) == (case.q.shape, case.q.shape[:3])


def test_an_empty_cache_has_no_seed(backend: str, device: torch.device) -> None:
    case = random_pass((2, 2, 1, 3, 0, 4), torch.float32, device, share=1.0)
    case = case._replace(positions=torch.full((2, 3), -1, device=device))
    start = plain(case)
    assert_bits(case, correct(case, start, INF), start)


def test_integers_of_any_dtype(backend: str, device: torch.device) -> None:
    case = random_pass((1, 2, 1, 3, 9, 16), torch.float32, device, share=1.0, block=True)
    case = case._replace(
        positions=torch.tensor([[8, 0, 5]], device=device), lengths=torch.tensor([8], device=device)
    )
    start = plain(case)
    expected = correct(case, start)
    assert not torch.equal(expected.out, start[0])
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        positions, lengths = (x.to(dtype) for x in (case.positions, case.lengths))  # type: ignore[union-attr]
        found = correct(case._replace(positions=positions, lengths=lengths), start)
        assert_same(found.out, expected.out)


def test_more_than_fits_one_thread(backend: str, device: torch.device) -> None:
    if backend == "triton":
        pytest.skip("Triton's interpreter has one thread")
    length = 100
    lengths = torch.tensor([length, length - 11], device=device)
    case = random_pass((2, 2, 1, length, length, 64), torch.float32, device, lengths=lengths, shift=1)
    start = plain(case)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [correct(case, start, below) for below in BELOW]
    finally:
        torch.set_num_threads(threads)
    for one in found:
        assert_rule(case, one)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (4, 1)]),
    n=st.integers(1, 6),
    length=st.integers(1, 7),
    size=st.integers(1, 5),
    block=st.booleans(),
    shift=st.integers(0, 1),
    share=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    below=st.sampled_from([0.2, 0.5, 1.0, INF]),
    seed=st.integers(0, 2**16),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_invariants(
    batch: int,
    heads: tuple[int, int],
    n: int,
    length: int,
    size: int,
    block: bool,
    shift: int,
    share: float,
    below: float,
    seed: int,
    backend_name: str,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = n if block else length
    case = random_pass(
        (batch, *heads, n, length, size),
        torch.float64,
        torch.device("cpu"),
        seed,
        share=share,
        block=block,
        shift=shift,
        lengths=torch.randint(0, length + 1, (batch,), generator=generator),
    )
    start = plain(case)
    with dlmkern.use_backend(backend_name):
        found = correct(case, start, below)
        for one, other in zip(found, truth(case), strict=True):
            assert_close(one, other.numpy(), 1e-11)
        assert_bits(case, found, start)
        # each sequence by itself
        for b in range(batch):
            alone = correct(case.row(b), (start[0][b : b + 1], start[1][b : b + 1]), below)
            assert torch.equal(alone.out[0], found.out[b])
            assert torch.equal(alone.lse[0], found.lse[b])
        # back again: the cached keys and values are those of this pass, and the other way round
        if block and not shift:
            back = case.map(Tensor.clone)
            distinct = True
            for b, row in enumerate(corrected_rows(case).tolist()):
                places = [int(case.positions[b, i]) for i in range(n) if row[i]]  # type: ignore[index]
                distinct = distinct and len(places) <= 1
                for i in range(n):
                    if row[i]:
                        place = int(case.positions[b, i])  # type: ignore[index]
                        back.k_cached[b, :, place], back.k[b, :, i] = (
                            case.k[b, :, i],
                            case.k_cached[b, :, place],
                        )
                        back.v_cached[b, :, place], back.v[b, :, i] = (
                            case.v[b, :, i],
                            case.v_cached[b, :, place],
                        )
            if distinct:
                for one, other in zip(correct(back, found, below), start, strict=True):
                    assert_close(one, other.numpy(), 1e-10)


def test_gradients_do_not_flow(backend: str, device: torch.device) -> None:
    case = random_pass(WHOLE, torch.float32, device)
    start = plain(case)
    expected = correct(case, start)
    found = correct(
        case.map(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x),
        (start[0].clone().requires_grad_(), start[1].clone().requires_grad_()),
    )
    assert not found.out.requires_grad
    assert not found.lse.requires_grad
    assert_same(found.out, expected.out)


def test_meta_tensors_have_shapes() -> None:
    for shape in (WHOLE, BLOCK):
        case = random_pass(shape, torch.bfloat16, torch.device("meta"))
        if shape is BLOCK:
            case = case._replace(positions=torch.zeros((2, 4), dtype=torch.int64, device="meta"))
        found = correct(case, (case.q, case.q[..., 0].float()))
        assert (found.out.shape, found.out.dtype) == (case.q.shape, torch.bfloat16)
        assert (found.lse.shape, found.lse.dtype, found.lse.device.type) == (
            case.q.shape[:3],
            torch.float32,
            "meta",
        )


def test_errors() -> None:
    case = random_pass((2, 4, 2, 3, 5, 8), torch.float32, torch.device("cpu"), block=True)
    lengths, positions = torch.tensor([5, 2]), torch.tensor([[4, -1, 0], [1, 2, 3]])
    out, lse = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3)
    good = {"out": out, "lse": lse} | dict(zip(Pass._fields[:6], case, strict=False))
    good |= {"lengths": lengths, "positions": positions}
    q, k, seeds = case.q, case.k, case.seeds
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"q": q.long()}, TypeError, "q: expected dtype float64 or .*, got int64"),
        ({"q": q[0]}, ValueError, r"q: expected shape \[B, Hq, n, d\] with d >= 1, got \[4, 3, 8\]"),
        ({"q": None}, TypeError, "q: expected a tensor or array, got None"),
        ({"q": q[:, :3]}, ValueError, "k: expected a number of heads that divides the 3 of q, got 2"),
        ({"q": q[:, :, :2]}, ValueError, "k: expected the 2 rows of q, got 3"),
        ({"k": k[:, :, :2]}, ValueError, "k: expected the 3 rows of q, got 2"),
        ({"k": k[0]}, ValueError, r"k: expected shape \[2, Hkv, L, 8\]"),
        ({"k": k.double()}, TypeError, "k: expected dtype float32, got float64"),
        (
            {"v": case.v[:, :1]},
            ValueError,
            r"v: expected shape \[2, 2, 3, 8\] to go with k, got \[2, 1, 3, 8\]",
        ),
        (
            {"k_cached": case.k_cached[0]},
            ValueError,
            r"k_cached: expected shape \[B, Hkv, L, d\], got \[2, 5, 8\]",
        ),
        (
            {"k_cached": case.k_cached[:, :1]},
            ValueError,
            r"k_cached: expected shape \[2, 2, 5, 8\] to go with k",
        ),
        (
            {"v_cached": case.v_cached[:, :, :4]},
            ValueError,
            r"v_cached: expected shape \[2, 2, 5, 8\] to go with",
        ),
        (
            {"positions": None},
            ValueError,
            r"k_cached: expected shape \[2, 2, 3, 8\] to go with k, got \[2, 2, 5, 8\]",
        ),
        (
            {"out": out[:, :, :2]},
            ValueError,
            r"out: expected shape \[2, 4, 3, 8\] to go with q, got \[2, 4, 2, 8\]",
        ),
        ({"lse": lse.half()}, TypeError, "lse: expected dtype float32, got float16"),
        ({"lse": lse.double()}, TypeError, "lse: expected dtype float32, got float64"),
        ({"lse": lse[:, :2]}, ValueError, r"lse: expected shape \[2, 4, 3\] to go with q, got \[2, 2, 3\]"),
        ({"lse": lse.to("meta")}, ValueError, "lse: expected device cpu like q, got meta"),
        ({"lse": None}, TypeError, "lse: expected a tensor or array, got None"),
        (
            {x: y.double() for x, y in good.items() if y.is_floating_point()} | {"lse": lse},
            TypeError,
            "lse: expected dtype float64, got float32",
        ),
        ({"seeds": seeds.long()}, TypeError, "seeds: expected dtype bool, got int64"),
        ({"seeds": seeds[:, :2]}, ValueError, r"seeds: expected shape \[2, 3\] to go with q, got \[2, 2\]"),
        ({"seeds": seeds.to("meta")}, ValueError, "seeds: expected device cpu like q, got meta"),
        ({"seeds": None}, TypeError, "seeds: expected a tensor or array, got None"),
        ({"lengths": lengths.float()}, TypeError, "lengths: expected dtype int64"),
        ({"lengths": lengths[:1]}, ValueError, r"lengths: expected shape \[2\] to go with q, got \[1\]"),
        ({"lengths": lengths + 1}, ValueError, r"lengths: expected values in \[0, 5\], got 6"),
        ({"lengths": lengths - 3}, ValueError, r"lengths: expected values in \[0, 5\], got -1"),
        ({"lengths": lengths.to("meta")}, ValueError, "lengths: expected device cpu like q, got meta"),
        ({"positions": positions.float()}, TypeError, "positions: expected dtype int64 or .*, got float32"),
        ({"positions": positions[:, :2]}, ValueError, r"positions: expected shape \[2, 3\] to go with q"),
        ({"positions": positions + 1}, ValueError, r"positions: expected values in \[-1, 4\], got 5"),
        ({"positions": positions - 1}, ValueError, r"positions: expected values in \[-1, 4\], got -2"),
        ({"positions": positions.to("meta")}, ValueError, "positions: expected device cpu like q, got meta"),
        (
            {"positions": [[0]]},
            TypeError,
            "positions: expected a tensor or an array with __dlpack__, got list",
        ),
        ({"shift": "1"}, TypeError, "shift: expected an int, got str"),
        ({"shift": True}, TypeError, "shift: expected an int, got bool"),
        ({"shift": 2}, ValueError, "shift: expected 0 or 1, got 2"),
        ({"scale": True}, TypeError, "scale: expected a number or None, got bool"),
        ({"scale": INF}, ValueError, "scale: expected a finite number, got inf"),
        ({"recompute_below": "0.5"}, TypeError, "recompute_below: expected a number, got str"),
        ({"recompute_below": None}, TypeError, "recompute_below: expected a number, got NoneType"),
        ({"recompute_below": -0.1}, ValueError, "recompute_below: expected at least 0, got -0.1"),
        ({"recompute_below": NAN}, ValueError, "recompute_below: expected at least 0, got nan"),
        (
            {"recompute_below": 10**400},
            ValueError,
            "recompute_below: expected a number that a float can hold",
        ),
    ]
    for name in ("out", "v", "k_cached", "v_cached"):
        x: Any = good[name]
        cases += [
            ({name: x.half()}, TypeError, f"{name}: expected dtype float32, got float16"),
            ({name: x[:1]}, ValueError, rf"{name}: expected shape \[2, .*, got \[1, "),
            ({name: x[..., :4]}, ValueError, rf"{name}: expected shape \[2, .*, got \[2, ., ., 4\]"),
            ({name: x.to("meta")}, ValueError, f"{name}: expected device cpu like .*, got meta"),
            ({name: x.to_sparse()}, TypeError, f"{name}: expected a dense tensor, got layout"),
            ({name: None}, TypeError, f"{name}: expected a tensor or array, got None"),
            ({name: x.numpy()}, TypeError, ": expected the same kind of array as"),
        ]
    for changes, error, message in cases:
        arguments: dict[str, Any] = good | changes
        with pytest.raises(error, match=message):
            dlmkern.diagonal_correction(**arguments)
    assert not out.any()
    assert not lse.any()


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    lengths = torch.tensor([6, 3], device=device)
    whole, block = random_pass(WHOLE, torch.float32, device), some_pass(BLOCK, torch.float32, device)
    small = whole.row(0).map(lambda x: x[:, :1])._replace(seeds=whole.seeds[:1])
    opcheck(OP, *plain(small), *small[:6], None, None, 0, 0.25, 0.5)
    small = (
        block.row(0).map(lambda x: x[:, :1])._replace(seeds=block.seeds[:1], positions=block.positions[:1])
    )
    opcheck(OP, *plain(small), *small[:6], lengths[:1], small.positions, 1, 0.25, INF)

    def both(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        corrected = dlmkern.diagonal_correction(out, lse, *whole[:6], lengths)
        inside = out.clone(), lse.clone()
        torch.ops.dlmkern.diagonal_correction(*inside, *whole[:6], None, None, 0, 0.25, 0.5)
        return *corrected, 2 * inside[0]  # what follows sees what was written

    start = plain(whole)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for one, expected in zip(compiled(*start), both(*start), strict=True):
        assert_same(one, expected)
