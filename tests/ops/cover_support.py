"""Passes with seeds, and attention in them with each query's keys and values written out."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.ops.support import ulp

NAN, INF = math.nan, math.inf


class Pass(NamedTuple):
    """What cover_attention and diagonal_correction share of their arguments."""

    q: Tensor  # [B, Hq, n, d]
    k: Tensor  # [B, Hkv, n, d]
    v: Tensor
    k_cached: Tensor  # [B, Hkv, L, d]
    v_cached: Tensor
    seeds: Tensor  # [B, n]
    lengths: Tensor | None = None
    positions: Tensor | None = None  # None: n == L
    shift: int = 0
    scale: float | None = None

    @property
    def factor(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:7]

    def options(self) -> dict[str, Any]:
        """Of diagonal_correction; cover_attention knows no positions."""
        given = {"shift": self.shift, "scale": self.scale}
        return given if self.positions is None else given | {"positions": self.positions}

    def map(self, function: Any) -> "Pass":
        return Pass(*(function(x) if isinstance(x, Tensor) else x for x in self))

    def row(self, b: int) -> "Pass":
        """The sequence b alone."""
        return self.map(lambda x: x[b : b + 1])


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def random_pass(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    share: float = 0.4,
    spread: float = 2.0,
    block: bool = False,
    **options: Any,
) -> Pass:
    """`shape` is B, Hq, Hkv, n, L, d; `share` that of the seeds. With `block`, rows at distinct positions,
    some of them padding."""
    batch, heads, kv_heads, n, length, size = shape
    generator = torch.Generator().manual_seed(seed)

    def random(count: int, rows: int) -> Tensor:
        return torch.randn((batch, count, rows, size), generator=generator).to(device, dtype)

    q = (spread * random(heads, n)).to(dtype)
    seeds = torch.rand((batch, n), generator=generator) < share
    positions = None
    if block:
        positions = torch.full((batch, n), -1)
        for row in positions:
            places = torch.randperm(length, generator=generator)[: n - n // 4]
            row[torch.randperm(n, generator=generator)[: len(places)]] = places
        positions = positions.to(device)
    return Pass(
        q,
        *(random(kv_heads, rows) for rows in (n, n, length, length)),
        seeds.to(device),
        positions=positions,
        **options,
    )


def replaced(case: Pass) -> list[list[int | None]]:
    """For every sequence and row, the column that it has for itself, of the seed that it predicts."""
    n, length = case.q.shape[2], case.k_cached.shape[2]
    seeds = case.seeds.tolist()
    places = [list(range(n))] * len(seeds) if case.positions is None else case.positions.tolist()
    columns: list[list[int | None]] = []
    for b, end in enumerate(ends(case)):
        columns.append([])
        for i in range(n):
            shown = i + case.shift
            found = shown < n and seeds[b][shown] and 0 <= places[b][shown] < min(end, length)
            columns[b].append(places[b][shown] if found else None)
    return columns


def ends(case: Pass) -> list[int]:
    length = case.k_cached.shape[2]
    if case.lengths is None:
        return [length] * len(case.q)
    return [min(max(end, 0), length) for end in case.lengths.tolist()]


def corrected_rows(case: Pass) -> Tensor:
    """bool [B, n]: which rows predict a seed."""
    rows = [[column is not None for column in row] for row in replaced(case)]
    return torch.tensor(rows, dtype=torch.bool, device=case.q.device).view(case.seeds.shape)


def seen(case: Pass, own: bool) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """For every sequence and row, the keys and values [Hkv, length, d] that its query sees; with `own`, the
    seed that it predicts as this pass has it."""
    columns = replaced(case)
    for b, end in enumerate(ends(case)):
        memory = case.k_cached[b, :, :end].clone(), case.v_cached[b, :, :end].clone()
        if case.positions is None:
            for j in range(end):
                if not case.seeds[b, j]:
                    memory[0][:, j], memory[1][:, j] = case.k[b, :, j], case.v[b, :, j]
        for i in range(case.q.shape[2]):
            keys, values = memory
            if own and (column := columns[b][i]) is not None:
                keys, values = keys.clone(), values.clone()
                keys[:, column] = case.k[b, :, i + case.shift]
                values[:, column] = case.v[b, :, i + case.shift]
            yield b, i, keys, values


def truth(case: Pass, own: bool = True) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp in float64, on the CPU; without `own`, what all queries see."""
    q = case.q.cpu().double()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -INF, dtype=torch.float64)
    for b, i, keys, values in seen(case.map(Tensor.cpu), own):
        group = q.shape[1] // max(len(keys), 1)
        for h in range(q.shape[1] if keys.shape[1] else 0):
            scores = case.factor * (keys[h // group].double() @ q[b, h, i])
            lse[b, h, i] = scores.logsumexp(0)
            out[b, h, i] = scores.softmax(0) @ values[h // group].double()
    return out, lse


def torchs(case: Pass) -> Tensor:
    """What torch's attention in the dtype of the case makes of it, in float64."""
    case = case.map(Tensor.cpu)
    out = torch.zeros_like(case.q)
    for b, i, keys, values in seen(case, own=True):
        if keys.shape[1]:
            out[b, :, i] = scaled_dot_product_attention(
                case.q[b, :, i, None], keys, values, scale=case.factor, enable_gqa=True
            )[:, 0]
    return out.double()


def plain(case: Pass) -> tuple[Tensor, Tensor]:
    """What all queries see, in the dtypes of the case: out and its log-sum-exp."""
    out, lse = truth(case, own=False)
    return out.to(case.q), lse.to(case.q.device, wide(case.q.dtype))


def lse_bound(case: Pass) -> float:
    """How exact a log-sum-exp has to be: the scores are rounded by their own size."""
    largest = case.q.double().norm(dim=-1).max() * max(
        x.double().norm(dim=-1).max() for x in (case.k, case.k_cached)
    )
    return ulp(wide(case.q.dtype)) * (16 + 4 * float(largest) * abs(case.factor))


def assert_rule(case: Pass, found: tuple[Tensor, Tensor], lse_error: float = 0.0) -> None:
    """The error against float64 is at most twice that of torch in the same dtype, and a few ulp; `lse_error`
    is that of torch's log-sum-exp where it is larger."""
    dtype = case.q.dtype
    assert (found[0].dtype, found[1].dtype) == (dtype, wide(dtype))
    out, lse = truth(case)
    error, allowed = ((x - out).abs().amax() for x in (found[0].double().cpu(), torchs(case)))
    assert error <= 2 * allowed + 4 * ulp(dtype), f"{error} where torch's is {allowed}"
    empty = lse == -INF
    assert (found[1].cpu()[empty] == -INF).all()
    error = (found[1].cpu().double() - lse).masked_fill(empty, 0.0).abs().amax()
    assert error <= max(lse_bound(case), 2 * lse_error)


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views with the values of x that lie differently in memory, among NaN, and in front of flags True."""
    (first, second, *_), last = x.shape, x.shape[-1]
    for name, shape, view in (
        ("a slice", (first + 1, *x.shape[1:-1], last + 5), lambda y: y[1:, ..., 3 : 3 + last]),
        ("the first two swapped", (second, first, *x.shape[2:]), lambda y: y.transpose(0, 1)),
        ("the last two swapped", (*x.shape[:-2], last, x.shape[-2]), lambda y: y.mT),
        ("every other number", (*x.shape[:-1], 2 * last + 1), lambda y: y[..., 1::2]),
        ("off alignment", (x.numel() + 1,), lambda y: y[1:].view(x.shape)),
    ):
        fill: Any = NAN if x.is_floating_point() else True if x.dtype == torch.bool else 77
        buffer = torch.full(shape, fill, dtype=x.dtype, device=x.device)
        view(buffer).copy_(x)
        yield name, view(buffer)
