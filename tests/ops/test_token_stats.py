"""token_stats and kl_entropy against sums in exact arithmetic, one row at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dlmkern
from tests.ops.support import DTYPES, assert_close, assert_same, dtypes_of, layouts, make_logits, opcheck, ulp

OP = "token_stats"
NAN_ROW = (-1, math.nan, math.nan, math.nan)


def row_truth(x: list[float], banned: int | None = None) -> tuple[int, float, float, float]:
    """token, confidence, logsumexp, entropy"""
    x = [-math.inf if v == banned else value for v, value in enumerate(x)]
    if any(math.isnan(value) or value == math.inf for value in x) or max(x) == -math.inf:
        return NAN_ROW
    token = x.index(max(x))
    terms = [math.exp(value - x[token]) for value in x]
    rest = math.fsum(term for v, term in enumerate(terms) if v != token)
    log_total = math.log1p(rest)
    total = 1.0 + rest
    entropy = math.fsum(
        term / total * (log_total - (value - x[token]))
        for term, value in zip(terms, x, strict=True)
        if value > -math.inf
    )
    return token, 1.0 / total, x[token] + log_total, entropy


def kl_truth(x: list[float], y: list[float], banned: int | None = None) -> float:
    if row_truth(x, banned)[0] < 0 or row_truth(y, banned)[0] < 0:
        return math.nan
    log_x, log_y = row_truth(x, banned)[2], row_truth(y, banned)[2]
    total = []
    for v, (a, b) in enumerate(zip(x, y, strict=True)):
        if v == banned or a == -math.inf:
            continue
        if b == -math.inf:
            return math.inf
        total.append(math.exp(a - log_x) * ((a - log_x) - (b - log_y)))
    return math.fsum(total)


def truth(logits: Tensor, prev: Tensor | None = None, banned: int | None = None) -> dict[str, np.ndarray]:
    flat = logits.double().cpu().flatten(0, -2).tolist()
    rows = [row_truth(x, banned) for x in flat]
    names = ("token", "confidence", "logsumexp", "entropy")
    found = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    if prev is not None:
        before = prev.double().cpu().flatten(0, -2).tolist()
        found["kl"] = np.array([kl_truth(x, y, banned) for x, y in zip(flat, before, strict=True)])
    return {name: value.reshape(logits.shape[:-1]) for name, value in found.items()}


def plain_torch(logits: Tensor, prev: Tensor) -> dict[str, Tensor]:
    """What one would write without this package, in float32: the yardstick of the error."""
    log_p, log_q = logits.float().log_softmax(-1), prev.float().log_softmax(-1)
    p = log_p.exp()
    return {
        "confidence": p.max(-1).values,
        "logsumexp": logits.float().logsumexp(-1),
        "entropy": -(p * log_p).sum(-1),
        "kl": (p * (log_p - log_q)).sum(-1),
    }


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 500, 1025, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_truth(backend: str, device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    if dtype not in dtypes_of(backend):
        pytest.skip(f"{backend} does not take {dtype} logits")
    logits, prev = (make_logits((2, 3, vocabulary), dtype, device, seed) for seed in (1, 2))
    expected = truth(logits, prev)
    plain = plain_torch(logits, prev)
    for out_dtype in (None, torch.float64) if backend == "triton" else (None, torch.float32, torch.float64):
        stats = dlmkern.token_stats(logits, prev, out_dtype=out_dtype)
        assert_same(stats.token, expected["token"])
        default = torch.float64 if dtype == torch.float64 else torch.float32
        for name in ("confidence", "logsumexp", "entropy", "kl"):
            value = getattr(stats, name)
            assert value.dtype == (out_dtype or default)
            error_of_torch = np.abs(plain[name].double().cpu().numpy() - expected[name])
            # entropy and kl are sums of terms that cancel: their scale is that of the log-probabilities
            scale = 1.0 if name == "confidence" else max(1.0, float(logits.double().abs().max()))
            assert_close(value, expected[name], 2 * error_of_torch.max() + 4 * scale * ulp(torch.float32))


def test_float64_confidence_tells_apart_what_float32_rounds_together(
    backend: str, device: torch.device
) -> None:
    # 64 positions whose confidences lie about 2e-9 apart
    rest = 1e-3 * (1 + 2e-6 * np.random.default_rng(0).permutation(64))
    logits = torch.full((1, 64, 8), -torch.inf, dtype=torch.float64)
    logits[0, :, 5] = 7.0
    logits[0, :, 2] = 7.0 + torch.from_numpy(np.log(rest))
    logits = logits.to(device, torch.float32)
    expected = truth(logits)["confidence"]
    steps = np.diff(np.sort(expected[0]))
    assert np.median(steps) < 3e-9
    confidence = dlmkern.token_stats(logits, out_dtype=torch.float64).confidence
    assert_close(confidence, expected, 4e-9)
    distinct = steps.min() > 1e-12  # float32 logits may coincide; those that do not are in the right order
    ours, theirs = confidence[0].cpu().numpy(), expected[0]
    order = np.argsort(theirs, kind="stable")
    assert (np.diff(ours[order]) >= 0).all()
    assert len(np.unique(ours)) >= len(np.unique(theirs)) - (not distinct)
    in_float32 = dlmkern.token_stats(logits, out_dtype=torch.float32).confidence
    assert in_float32.unique().numel() < confidence.unique().numel()


def test_special_rows(backend: str, device: torch.device) -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor(
        [
            [0.0, nan, 1.0, 2.0],
            [0.0, inf, 1.0, 2.0],
            [-inf, -inf, -inf, -inf],
            [-inf, 3.0, -inf, -inf],
            [3.0, 3.0, -inf, 3.0],
            [-300.0, 300.0, 0.0, -inf],
            [-3e38, -3e38, -3e38, -3.2e38],
            [3e38, 3.2e38, 0.0, -3e38],
        ],
        device=device,
    )
    stats = dlmkern.token_stats(x, x.flip(0))
    expected = truth(x, x.flip(0))
    assert_same(stats.token, expected["token"])
    assert stats.token.tolist()[:5] == [-1, -1, -1, 1, 0]
    for name in ("confidence", "logsumexp", "entropy", "kl"):
        assert_close(getattr(stats, name), expected[name], 1e-6, relative=1e-6)


def test_special_values_anywhere_in_long_rows(backend: str, device: torch.device) -> None:
    vocabulary = 3001
    places = (0, 1, 1500, 2999, 3000)
    for value in (math.nan, math.inf):
        x, y = (
            make_logits((1, len(places) + 1, vocabulary), torch.float32, device, seed) for seed in (19, 20)
        )
        for i, v in enumerate(places):
            x[0, i, v] = value
        stats = dlmkern.token_stats(x, y)
        assert_same(stats.token, truth(x)["token"])
        assert stats.token[0].tolist()[:-1] == [-1] * len(places)
        for column in stats[1:]:
            assert column.isnan()[0].tolist() == [True] * len(places) + [False]
        assert dlmkern.token_stats(y, x).kl.isnan()[0].tolist() == [True] * len(places) + [False]
    x = torch.full((1, len(places), vocabulary), -math.inf, device=device)
    for i, v in enumerate(places):
        x[0, i, v] = 3.0
    stats = dlmkern.token_stats(x, x)
    assert stats.token[0].tolist() == list(places)
    for column, expected in zip(stats[1:], (1.0, 3.0, 0.0, 0.0), strict=True):
        assert_close(column, np.full((1, len(places)), expected), 1e-6)
    assert (dlmkern.token_stats(torch.full_like(x, -math.inf)).token == -1).all()


def test_kl_weighs_what_was_far_below(backend: str, device: torch.device) -> None:
    for vocabulary in (9, 3001):
        x, y = (make_logits((1, 4, vocabulary), torch.float32, device, seed) for seed in (21, 22))
        x[0, :, 5] = x[0].amax(-1)
        y[0, 0, 5] = -400.0
        y[0, 1, 5] = -3e4
        y[0, 2, 5] = -3e38
        x[0, 3, 5] = -150.0  # both negligible
        y[0, 3, 5] = -400.0
        expected = truth(x, y)["kl"]
        assert_close(dlmkern.token_stats(x, y).kl, expected, 1e-5, relative=1e-6)


def test_a_whole_vocabulary(backend: str, device: torch.device) -> None:
    if backend == "triton":
        pytest.skip("a row of 126464 logits takes too long in Triton's interpreter")
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (make_logits((1, 2, 126_464), dtype, device, seed, scale=2.0) for seed in (23, 24))
        x[0, 1] *= 0.25  # nearly flat: the sums have 126464 terms that count
        expected = truth(x, y)
        stats = dlmkern.token_stats(x, y)
        assert_same(stats.token, expected["token"])
        for name in ("confidence", "logsumexp", "entropy", "kl"):
            assert_close(getattr(stats, name), expected[name], 1e-6, relative=1e-6)


def test_broadcast_inputs(backend: str, device: torch.device) -> None:
    for vocabulary in (7, 2000):
        row = make_logits((1, 1, vocabulary), torch.float32, device, 25)
        stats = dlmkern.token_stats(row.expand(2, 3, -1), row.expand(2, 3, -1))
        expected = truth(row)
        assert_same(stats.token, np.broadcast_to(expected["token"], (2, 3)))
        assert_close(stats.entropy, np.broadcast_to(expected["entropy"], (2, 3)), 1e-5, relative=1e-6)
        assert_close(stats.kl, np.zeros((2, 3)), 1e-6)
        one_value = torch.ones(1, device=device).expand(1, 2, vocabulary)
        uniform = dlmkern.token_stats(one_value)
        assert uniform.token.tolist() == [[0, 0]]
        assert_close(uniform.entropy, np.full((1, 2), math.log(vocabulary)), 1e-6, relative=1e-6)


def test_kl_counts_what_is_banned_not_what_underflows(backend: str, device: torch.device) -> None:
    inf = math.inf
    pairs = [
        ([0.0, -inf], [0.0, 0.0], math.log(2)),
        ([0.0, -200.0], [0.0, -inf], inf),
        ([0.0, -1e4], [0.0, -inf], inf),
        ([0.0, 0.0], [0.0, -inf], inf),
        ([0.0, -200.0], [0.0, -190.0], 0.0),
        ([0.0, -1e4], [0.0, -3e4], 0.0),
        ([-inf, 0.0], [0.0, -inf], inf),
    ]
    now, before, expected = (torch.tensor(column, device=device) for column in zip(*pairs, strict=True))
    assert_close(dlmkern.token_stats(now, before).kl, expected.cpu().numpy(), 1e-6)
    long_now, long_before = (torch.full((len(pairs), 2500), -inf, device=device) for _ in range(2))
    long_now[:, [7, 2400]], long_before[:, [7, 2400]] = now, before
    assert_close(dlmkern.token_stats(long_now, long_before).kl, expected.cpu().numpy(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ties_go_to_the_lowest_index(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    for vocabulary in (7, 300, 2051):
        generator = torch.Generator().manual_seed(vocabulary)
        x = torch.randint(0, 3, (1, 4, vocabulary), generator=generator).to(device, dtype)
        assert_same(dlmkern.token_stats(x).token, truth(x)["token"])
        late = torch.zeros((1, 1, vocabulary), dtype=dtype, device=device)
        late[..., -2:] = 1
        assert dlmkern.token_stats(late).token.item() == vocabulary - 2


def test_banned_token_equals_minus_infinity(backend: str, device: torch.device) -> None:
    for vocabulary in (5, 1500):
        x, y = (make_logits((1, 3, vocabulary), torch.float32, device, seed) for seed in (3, 4))
        banned = int(x[0, 0].argmax())
        y[0, 0, banned] = torch.nan  # neither row looks at the banned column
        x[0, 1, banned] = torch.inf
        expected = truth(x, y, banned)
        stats = dlmkern.token_stats(x, y, banned_token=banned)
        assert (expected["token"] >= 0).all()
        assert_same(stats.token, expected["token"])
        for name in ("confidence", "logsumexp", "entropy", "kl"):
            assert_close(getattr(stats, name), expected[name], 2e-6, relative=2e-6)
    alone = dlmkern.token_stats(torch.zeros((1, 1, 1), device=device), banned_token=0)
    assert alone.token.item() == -1
    assert alone.confidence.isnan().all()


def test_prev_rows_choose_the_previous_row(backend: str, device: torch.device) -> None:
    x = make_logits((2, 3, 40), torch.float32, device, 5)
    y = make_logits((2, 4, 40), torch.float32, device, 6)
    rows = torch.tensor([[3, 0, 0], [-1, 4, 2]], device=device)
    kl = dlmkern.token_stats(x, y, prev_rows=rows).kl
    assert kl is not None
    chosen = torch.stack([y[b, row.clamp(0, 3)] for b, row in enumerate(rows)])
    expected = truth(x, chosen)["kl"]
    expected[1, :2] = math.nan
    assert_close(kl, expected, 2e-6)
    nothing = dlmkern.token_stats(x, y[:, :0], prev_rows=rows)
    assert nothing.kl is not None
    assert nothing.kl.isnan().all()
    assert_same(nothing.token, truth(x)["token"])


def test_layouts_do_not_matter(backend: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (make_logits((2, 3, 70), dtype, device, seed) for seed in (7, 8))
        expected = dlmkern.token_stats(x, y, out_dtype=torch.float64)
        for name, view in layouts(x):
            stats = dlmkern.token_stats(view, y, out_dtype=torch.float64)
            assert_same(stats.token, expected.token, name)
            for one, other in zip(stats[1:], expected[1:], strict=True):
                assert_close(one, other.cpu().numpy(), 1e-6, relative=1e-6)
        for _, view in layouts(y):
            kl = dlmkern.token_stats(x, view, out_dtype=torch.float64).kl
            assert kl is not None
            assert expected.kl is not None
            assert_close(kl, expected.kl.cpu().numpy(), 1e-6, relative=1e-6)


def test_every_row_stands_alone(backend: str, device: torch.device) -> None:
    x, y = (make_logits((3, 4, 90), torch.float32, device, seed) for seed in (9, 10))
    together = dlmkern.token_stats(x, y, out_dtype=torch.float64)
    broken = x.clone()
    broken[1] = torch.nan
    beside_nan = dlmkern.token_stats(broken, y, out_dtype=torch.float64)
    alone = [dlmkern.token_stats(x[b], y[b], out_dtype=torch.float64) for b in range(3)]
    for name in dlmkern.TokenStats._fields:
        both = getattr(together, name)
        for b in range(3):
            assert_same(getattr(alone[b], name), both[b])
        assert_same(getattr(beside_nan, name)[::2], both[::2])


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (0, 5), (1, 1), (2, 1, 1)])
def test_small_shapes(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    stats = dlmkern.token_stats(torch.zeros(shape, device=device), torch.zeros(shape, device=device))
    for value in stats:
        assert value is not None
        assert value.shape == shape[:-1]
    if shape[-1] == 1:
        assert (stats.token == 0).all()
        assert (stats.confidence == 1).all()
        assert (stats.entropy == 0).all()
        assert (stats.kl == 0).all()


def test_kl_entropy_is_two_of_the_fields(backend: str, device: torch.device) -> None:
    x, y = (make_logits((2, 3, 20), torch.float32, device, seed) for seed in (11, 12))
    stats = dlmkern.token_stats(x, y, banned_token=3, out_dtype=torch.float64)
    kl, entropy = dlmkern.kl_entropy(x, y, banned_token=3, out_dtype=torch.float64)
    assert torch.equal(kl, stats.kl)
    assert torch.equal(entropy, stats.entropy)
    with pytest.raises(TypeError, match="prev_logits"):
        dlmkern.kl_entropy(x, None)  # type: ignore[arg-type]


def test_without_prev_there_is_no_kl(backend: str, device: torch.device) -> None:
    assert dlmkern.token_stats(torch.zeros((2, 3), device=device)).kl is None


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_permuting_the_vocabulary_permutes_the_token(data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(1, 40))
    seed = data.draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    # distinct values, so that no tie is broken by the index
    x = (torch.randperm(vocabulary, generator=generator).float() / 4)[None]
    order = torch.randperm(vocabulary, generator=generator)
    for name in ("reference", "auto"):
        with dlmkern.use_backend(name):
            one, other = dlmkern.token_stats(x), dlmkern.token_stats(x[:, order])
        assert order[other.token] == one.token
        torch.testing.assert_close(other[1:4], one[1:4])


def test_errors() -> None:
    x = torch.zeros(2, 3, 5)
    for arguments, keywords, error, message in (
        ((x.long(),), {}, TypeError, "logits: expected dtype"),
        ((torch.zeros(5),), {}, ValueError, "logits: expected shape"),
        ((torch.zeros(1, 2, 3, 5),), {}, ValueError, "logits: expected shape"),
        ((torch.zeros(2, 0),), {}, ValueError, "logits: expected at least one token"),
        ((x.to_sparse(),), {}, TypeError, "logits: expected a dense tensor"),
        ((x, x.half()), {}, TypeError, "prev_logits: expected dtype"),
        ((x, x[:, :2]), {}, ValueError, "prev_logits: expected shape"),
        ((x, x[..., :4]), {}, ValueError, "prev_logits: expected shape"),
        ((x, x[0]), {}, ValueError, "prev_logits: expected shape"),
        ((x, x.to("meta")), {}, ValueError, "prev_logits: expected device"),
        ((x,), {"prev_rows": torch.zeros(2, 3).long()}, ValueError, "prev_rows: expected prev_logits"),
        ((x, x), {"prev_rows": torch.zeros(2, 3)}, TypeError, "prev_rows: expected dtype"),
        ((x, x), {"prev_rows": torch.zeros(2, 2).long()}, ValueError, "prev_rows: expected shape"),
        ((x,), {"banned_token": 5}, ValueError, "banned_token: expected an id"),
        ((x,), {"banned_token": -1}, ValueError, "banned_token: expected an id"),
        ((x,), {"banned_token": 1.0}, TypeError, "banned_token: expected an int"),
        ((x,), {"banned_token": True}, TypeError, "banned_token: expected an int"),
        ((x,), {"out_dtype": torch.float16}, TypeError, "out_dtype"),
    ):
        with pytest.raises(error, match=message):
            dlmkern.token_stats(*arguments, **keywords)  # type: ignore[arg-type]


def test_registration(backend: str, device: torch.device) -> None:
    x, y = (make_logits((2, 3, 9), torch.float32, device, seed) for seed in (13, 14))
    rows = torch.zeros((2, 3), dtype=torch.int64, device=device)
    opcheck(OP, x, None, None, -1, torch.float32)
    opcheck(OP, x, y, rows, 3, torch.float64)


def test_compiles_to_one_graph(backend: str, device: torch.device) -> None:
    x, y = (make_logits((2, 3, 9), torch.float32, device, seed) for seed in (15, 16))
    compiled = torch.compile(
        lambda a, b: dlmkern.token_stats(a, b, banned_token=2)[:4], fullgraph=True, backend="aot_eager"
    )
    for one, other in zip(compiled(x, y), dlmkern.token_stats(x, y, banned_token=2), strict=False):
        assert torch.equal(one, other)


def test_gradients_stop(backend: str, device: torch.device) -> None:
    x = make_logits((1, 2, 6), torch.float32, device, 17).requires_grad_()
    stats = dlmkern.token_stats(x)
    assert not stats.entropy.requires_grad
    assert_same(stats.token, truth(x.detach())["token"])


def test_lazily_negated_views(backend: str, device: torch.device) -> None:
    x = torch.complex(torch.zeros(2, 6), make_logits((2, 6), torch.float32, torch.device("cpu"), 18)).to(
        device
    )
    negated = x.conj().imag
    assert negated.is_neg()
    assert_same(dlmkern.token_stats(negated).token, (-x.imag).argmax(-1).cpu().numpy())
