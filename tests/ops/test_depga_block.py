"""depga_block against the rule with Python lists."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from tests.ops.support import assert_same, opcheck

OP = "depga_block"


def normalise(x: list[float], reflect: bool) -> list[float]:
    w = len(x)
    left, right = (x[0], x[-1]) if reflect else (0.0, 0.0)
    padded = [left, *x, right]
    smooth = [(padded[k] + padded[k + 1] + padded[k + 2]) / 3 for k in range(w)]
    ordered = sorted(smooth, key=lambda value: (math.isnan(value), value))
    median = ordered[(w - 1) // 2]
    spread = abs(ordered[math.floor(0.75 * (w - 1))] - ordered[math.floor(0.25 * (w - 1))])
    spread = spread if math.isnan(spread) else max(spread, 1e-15)
    return [(value - median) / spread for value in smooth]


def truth(
    kl: list[float],
    entropy: list[float],
    remaining: int,
    lam: float = 1.2,
    l_min: int = 8,
    l_max: int = 128,
    reflect: bool = False,
) -> int:
    w = min(len(kl), l_max, remaining)
    leading = 0
    if w > 0:
        pairs = zip(normalise(kl[:w], reflect), normalise(entropy[:w], reflect), strict=True)
        score = [a - lam * b for a, b in pairs]
        leading = next((k for k, s in enumerate(score) if not s >= 0), w)
    return remaining if remaining < l_min else min(max(leading, l_min), l_max, remaining)


def signals(batch: int, width: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Influence that falls off and entropy that grows, so that blocks end at different places."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(width, dtype=torch.float64)
    end = width * torch.rand((batch, 1), generator=generator, dtype=torch.float64)
    noise = torch.rand((2, batch, width), generator=generator, dtype=torch.float64)
    kl = (position < end) * 3.0 + noise[0]
    entropy = (position >= end) * 2.0 + noise[1]
    return kl.to(device), entropy.to(device)


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("width", [0, 1, 2, 3, 4, 5, 17, 64, 130])
def test_against_truth(backend: str, device: torch.device, width: int, reflect: bool) -> None:
    lengths = set()
    for seed, (lam, l_min, l_max) in enumerate(
        [(1.2, 8, 128), (0.5, 1, 32), (1.0, 1, 7), (2.0, 3, 300), (0.0, 1, 200)]
    ):
        kl, entropy = signals(4, width, seed, device)
        remaining = torch.tensor([0, 2, width, 1000], device=device)
        options = {"lam": lam, "l_min": l_min, "l_max": l_max}
        expected = [
            truth(a, b, r, **options, reflect=reflect)  # type: ignore[arg-type]
            for a, b, r in zip(kl.tolist(), entropy.tolist(), remaining.tolist(), strict=True)
        ]
        padding = "reflect" if reflect else "zero"
        length = dlmkern.depga_block(kl, entropy, remaining, **options, padding=padding)
        assert length.dtype == torch.int64
        assert length.tolist() == expected
        alone = dlmkern.depga_block(kl[2], entropy[2], width, **options, padding=padding)
        assert alone.shape == ()
        assert alone.item() == expected[2]
        lengths.update(expected)
    assert width < 17 or len(lengths) > 5


def test_options_may_differ_by_row(backend: str, device: torch.device) -> None:
    kl, entropy = signals(3, 40, 1, device)
    remaining, l_min, l_max = [50, 9, 12], [1, 4, 20], [10, 40, 25]
    lam = [1.2, 0.3, 2.5]
    expected = [
        truth(kl[b].tolist(), entropy[b].tolist(), remaining[b], lam[b], l_min[b], l_max[b]) for b in range(3)
    ]
    columns = [torch.tensor(x, device=device) for x in (remaining, lam, l_min, l_max)]
    columns[1] = torch.tensor(lam, dtype=torch.float64, device=device)
    assert dlmkern.depga_block(kl, entropy, *columns).tolist() == expected
    columns[0] = columns[0].int()
    assert dlmkern.depga_block(kl, entropy, *columns).tolist() == expected


def test_what_lies_beyond_the_window_is_not_read(backend: str, device: torch.device) -> None:
    kl, entropy = signals(2, 30, 2, device)
    for padding in ("zero", "reflect"):
        for remaining, l_max in ((12, 128), (100, 12)):
            short = dlmkern.depga_block(
                kl[:, :12], entropy[:, :12], remaining, l_min=1, l_max=l_max, padding=padding
            )
            for garbage in (math.nan, math.inf, 1e30):
                long = [x.clone() for x in (kl, entropy)]
                for x in long:
                    x[:, 12:] = garbage
                length = dlmkern.depga_block(*long, remaining, l_min=1, l_max=l_max, padding=padding)
                assert torch.equal(length, short)


def test_nan_and_infinities(backend: str, device: torch.device) -> None:
    inf, nan = math.inf, math.nan
    base_kl, base_entropy = (x[0].tolist() for x in signals(1, 12, 3, device))
    for value in (nan, inf, -inf):
        for where in ([0], [5], [11], [8, 9], [2, 3, 4, 5, 6, 7, 8], range(12)):
            for signal in (0, 1):
                pair = [list(base_kl), list(base_entropy)]
                for k in where:
                    pair[signal][k] = value
                expected = truth(*pair, 100, l_min=1)
                x = [torch.tensor(s, dtype=torch.float64, device=device) for s in pair]
                assert dlmkern.depga_block(*x, 100, l_min=1).item() == expected, (value, list(where), signal)


def test_unchecked_values_have_an_answer(backend: str, device: torch.device) -> None:
    # on an accelerator nobody looks at the numbers: a NaN weight ends the block at once
    kl, entropy = signals(3, 12, 6, device)
    counts = torch.full((3,), 30, device=device)
    least, most = torch.full((3,), 2, device=device), torch.full((3,), 9, device=device)
    lam = torch.tensor([1.2, math.nan, math.inf], dtype=torch.float64, device=device)
    length = torch.ops.dlmkern.depga_block(kl, entropy, counts, lam, least, most, False).tolist()
    expected = [
        truth(a, b, 30, x, 2, 9) for a, b, x in zip(kl.tolist(), entropy.tolist(), lam.tolist(), strict=True)
    ]
    assert length == expected
    assert length[1] == 2


def test_plateaus_extend_the_block(backend: str, device: torch.device) -> None:
    # with reflected edges everything is the median, S is 0 throughout and the block takes the whole window
    flat = torch.full((1, 20), 0.25, device=device)
    assert dlmkern.depga_block(flat, flat, 50, l_min=1, padding="reflect").tolist() == [20]
    assert dlmkern.depga_block(flat, flat, 50, l_min=1, padding="reflect", l_max=6).tolist() == [6]
    # zero padding pulls the first position below the median: S_0 = -x / 3 / 1e-15 (1 - lam)
    assert dlmkern.depga_block(flat, flat, 50, lam=0.5, l_min=1).tolist() == [1]
    assert dlmkern.depga_block(flat, flat, 50, lam=1.5, l_min=1).tolist() == [20]


def test_range_is_at_least_1e_15(backend: str, device: torch.device) -> None:
    # all quantiles of the influence are 0: smoothed 2e-15 and 1e-15 are scored as 2 and 1
    kl = [3e-15] + [0.0] * 11
    entropy = [2.3, 1.6, 1.3, 1.9, 1.0, 2.0, 1.5, 0.6, 1.4, 0.4, 1.8, 0.2]
    scores = [a - 1.2 * b for a, b in zip(normalise(kl, True), normalise(entropy, True), strict=True)]
    assert scores[0] > 0.05
    assert 0.05 < scores[1] < 0.9
    assert scores[2] < -0.05
    x = [torch.tensor(signal, dtype=torch.float64, device=device) for signal in (kl, entropy)]
    assert dlmkern.depga_block(*x, 50, l_min=1, padding="reflect").item() == 2


def test_fault_windows_of_one_and_two_positions(backend: str, device: torch.device) -> None:
    # the interquartile range is 0 and 1e-15 takes its place: lengths stay defined and within the limits
    for width in (1, 2):
        kl, entropy = signals(5, width, width, device)
        expected = [truth(a, b, width, l_min=1) for a, b in zip(kl.tolist(), entropy.tolist(), strict=True)]
        length = dlmkern.depga_block(kl, entropy, width, l_min=1)
        assert length.tolist() == expected
        assert ((length >= 1) & (length <= width)).all()


def test_dtypes_and_layouts(backend: str, device: torch.device) -> None:
    kl, entropy = signals(3, 24, 4, device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = kl.to(dtype), entropy.to(dtype)
        expected = dlmkern.depga_block(a.double(), b.double(), 100, l_min=1)
        assert torch.equal(dlmkern.depga_block(a, b, 100, l_min=1), expected)
        assert torch.equal(dlmkern.depga_block(a, b.double(), 100, l_min=1), expected)
    expected = dlmkern.depga_block(kl, entropy, 100, l_min=1)
    wide = entropy.repeat_interleave(2, dim=1)[:, ::2]
    assert torch.equal(dlmkern.depga_block(kl.T.contiguous().T, wide, 100, l_min=1), expected)


@settings(deadline=None, max_examples=40)
@given(
    width=st.integers(0, 40),
    remaining=st.integers(0, 60),
    l_min=st.integers(1, 20),
    extra=st.integers(0, 40),
    lam=st.floats(-1, 3),
    seed=st.integers(0, 2**16),
    padding=st.sampled_from(["zero", "reflect"]),
    backend_name=st.sampled_from(["reference", "auto"]),
)
def test_length_stays_within_its_limits(
    width: int,
    remaining: int,
    l_min: int,
    extra: int,
    lam: float,
    seed: int,
    padding: str,
    backend_name: str,
) -> None:
    kl, entropy = signals(1, width, seed, torch.device("cpu"))
    with dlmkern.use_backend(backend_name):
        length = dlmkern.depga_block(
            kl, entropy, remaining, lam, l_min, l_min + extra, padding=padding
        ).item()
    options = {"lam": lam, "l_min": l_min, "l_max": l_min + extra, "reflect": padding == "reflect"}
    assert length == truth(kl[0].tolist(), entropy[0].tolist(), remaining, **options)  # type: ignore[arg-type]
    assert min(l_min, remaining) <= length <= min(l_min + extra, remaining)


def test_zero_rows(backend: str, device: torch.device) -> None:
    none = torch.zeros((0, 5), device=device)
    no_row = torch.zeros(0, dtype=torch.int64, device=device)
    assert dlmkern.depga_block(none, none, no_row, l_min=no_row, l_max=no_row).shape == (0,)
    assert_same(dlmkern.depga_block(none, none, 10), torch.zeros(0, dtype=torch.int64))


def test_errors() -> None:
    x = torch.zeros(2, 5)
    for arguments, keywords, error, message in (
        ((x.long(), x, 5), {}, TypeError, "kl: expected dtype"),
        ((x[None], x, 5), {}, ValueError, "kl: expected shape"),
        ((x, x[0], 5), {}, ValueError, "entropy: expected shape"),
        ((x, x.bool(), 5), {}, TypeError, "entropy: expected dtype"),
        ((x, None, 5), {}, TypeError, "entropy: expected a tensor"),
        ((x, x.to("meta"), 5), {}, ValueError, "entropy: expected device"),
        ((x, x, 5.0), {}, TypeError, "remaining: expected an int"),
        ((x, x, -1), {}, ValueError, "remaining: expected a count"),
        ((x, x, torch.tensor([5, -1])), {}, ValueError, "remaining: expected a count"),
        ((x, x, torch.tensor([5.0, 1.0])), {}, TypeError, "remaining: expected dtype"),
        ((x, x, torch.tensor([5, 5, 5])), {}, ValueError, "remaining: expected a number or shape"),
        ((x, x, 5), {"lam": math.nan}, ValueError, "lam: expected a number"),
        ((x, x, 5), {"lam": True}, TypeError, "lam: expected a float"),
        ((x, x, 5), {"l_min": 0}, ValueError, "l_min: expected a length"),
        ((x, x, 5), {"l_min": 9, "l_max": 8}, ValueError, "l_min: expected at most l_max"),
        ((x, x, 5), {"l_min": torch.tensor([1, 200])}, ValueError, "l_min: expected at most l_max"),
        ((x, x, 5), {"l_max": 1.5}, TypeError, "l_max: expected an int"),
        ((x, x, 5), {"padding": "edge"}, ValueError, "padding: expected one of"),
    ):
        with pytest.raises(error, match=message):
            dlmkern.depga_block(*arguments, **keywords)  # type: ignore[arg-type]


def test_registration_and_compilation(backend: str, device: torch.device) -> None:
    kl, entropy = signals(2, 12, 5, device)
    remaining, l_min, l_max = (torch.full((2,), value, device=device) for value in (30, 1, 12))
    lam = torch.full((2,), 1.2, dtype=torch.float64, device=device)
    opcheck(OP, kl, entropy, remaining, lam, l_min, l_max, True)
    compiled = torch.compile(
        lambda a, b, r: dlmkern.depga_block(a, b, r, l_min=1), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(kl, entropy, remaining), dlmkern.depga_block(kl, entropy, 30, l_min=1))
