"""token_stats: the best token of each position and its statistics, from one read of the logits.

A program reads one slice of a row, block by block. It keeps the slice's largest logit ``top``, where that is
(``at``) and, lane by lane, sums over it. With e_v = exp(x_v - top) and y the earlier step's row, these are

    rest   e_v, the best token's left out      confidence = 1 / (1 + rest), resolved near one
    slope  e_v (x_v - top)                     entropy = log(1 + rest) - slope / (1 + rest)
    cross  e_v ((x_v - top) - (y_v - top_y))   kl = cross / (1 + rest) - log(1 + rest) + log(1 + rest_y)

The lanes are float32; once they are added up everything is float64. With many rows a slice is a whole row and
its program writes the results; with few rows a second kernel merges the slices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, run

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FIELDS = 8  # numbers in the partial result of a slice: top, at, rest, slope, top_y, rest_y, cross, lost


class Config(NamedTuple):
    """How a row is cut: a program walks ``slice_width`` logits, ``block`` at a time."""

    block: int
    num_warps: int
    slice_width: int
    slices: int


# (bytes of a logit, is there an earlier step) -> logits that a program of 8 warps reads at a time. A thread
# then holds 8 or 16 of each row: one or two 16-byte loads, and few enough accumulators that several programs
# fit on a multiprocessor.
_BLOCK = {(2, False): 4096, (2, True): 2048, (4, False): 2048, (4, True): 2048}
_PROGRAMS = 1024  # enough to fill every multiprocessor of the largest GPUs several programs deep
_MOST_SLICES = 64


def config(rows: int, vocabulary: int, element_size: int, has_prev: bool) -> Config:
    """The configuration for ``rows`` rows of ``vocabulary`` logits of ``element_size`` bytes."""
    block = min(_BLOCK[element_size, has_prev], max(128, triton.next_power_of_2(vocabulary)))
    num_warps = max(block // 256, 1) if block < 2048 else 8
    wanted = min(triton.cdiv(_PROGRAMS, rows), _MOST_SLICES)
    slice_width = block * triton.cdiv(triton.cdiv(vocabulary, block), wanted)
    return Config(block, num_warps, slice_width, triton.cdiv(vocabulary, slice_width))


@triton.jit
def _finish(
    row,
    at,
    top,
    rest,
    slope,
    top_y,
    rest_y,
    cross,
    lost,
    token_ptr,
    confidence_ptr,
    logsumexp_ptr,
    entropy_ptr,
    kl_ptr,
):
    """Write the results of a row from its float64 sums."""
    nan = float("nan")
    total = 1.0 + rest
    log_total = tl.log(total)
    valid = (top > -float("inf")) & (top < float("inf")) & (rest == rest)
    tl.store(token_ptr + row, tl.where(valid, at, -1).to(tl.int64))
    tl.store(confidence_ptr + row, tl.where(valid, 1.0 / total, nan))
    tl.store(logsumexp_ptr + row, tl.where(valid, top + log_total, nan))
    tl.store(entropy_ptr + row, tl.where(valid, log_total - slope / total, nan))
    if kl_ptr is not None:
        both = valid & (top_y > -float("inf")) & (top_y < float("inf")) & (rest_y == rest_y)
        kl = tl.where(lost > 0, float("inf"), cross / total - log_total + tl.log(1.0 + rest_y))
        tl.store(kl_ptr + row, tl.where(both, kl, nan))


@triton.jit(do_not_specialize=["n", "m", "banned_token"])
def token_stats_kernel(
    logits_ptr,
    prev_ptr,
    prev_rows_ptr,
    token_ptr,
    confidence_ptr,
    logsumexp_ptr,
    entropy_ptr,
    kl_ptr,
    partial_ptr,
    n,
    m,
    V,
    slice_width,
    banned_token,
    stride_b,
    stride_n,
    stride_v,
    prev_stride_b,
    prev_stride_n,
    prev_stride_v,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Scan slice ``program_id(1)`` of row ``program_id(0)``; a pointer that is None leaves its part out."""
    row = tl.program_id(0).to(tl.int64)
    batch, position = row // n, row % n
    lane = tl.arange(0, BLOCK)
    x_ptr = logits_ptr + batch * stride_b + position * stride_n
    inf = float("inf")

    top, at = tl.full((), -inf, tl.float32), tl.full((), -1, tl.int32)
    rest = tl.zeros((BLOCK,), tl.float32)
    slope = tl.zeros((BLOCK,), tl.float32)
    if prev_ptr is not None:
        prev_row = position
        if prev_rows_ptr is not None:
            prev_row = tl.load(prev_rows_ptr + row)
        has_prev = tl.where((prev_row >= 0) & (prev_row < m), tl.full((BLOCK,), 1, tl.int32), 0) > 0
        y_ptr = prev_ptr + batch * prev_stride_b + prev_row * prev_stride_n
        top_y = tl.full((), -inf, tl.float32)
        rest_y = tl.zeros((BLOCK,), tl.float32)
        cross = tl.zeros((BLOCK,), tl.float32)
        lost = tl.zeros((BLOCK,), tl.int1)  # a token that the earlier step ruled out is possible now

    first = tl.program_id(1) * slice_width
    for start in range(first, tl.minimum(first + slice_width, V), BLOCK):
        v = start + lane
        inside = v < V
        # The ban is applied after the load: in its mask it would split the wide loads up.
        allowed = v != banned_token
        offset = v.to(tl.int64)
        x = tl.load(x_ptr + offset * stride_v, mask=inside, other=-inf).to(tl.float32)
        x = tl.where(allowed, x, -inf)
        # The best token's e, which is 1, is in no lane of rest.
        all_e = rest + tl.where(lane == 0, tl.where(top > -inf, 1.0, 0.0), 0.0)

        if prev_ptr is not None:
            y = tl.load(y_ptr + offset * prev_stride_v, mask=inside & has_prev, other=-inf).to(tl.float32)
            y = tl.where(allowed, y, -inf)
            at_y = tl.full((), -1, tl.int32)
            block_top = tl.max(y, 0)
            if block_top > top_y:
                at_y = tl.min(tl.where(y == block_top, v, V), 0)
                if top_y > -inf:
                    rest_y = (rest_y + tl.where(lane == 0, 1.0, 0.0)) * tl.exp(top_y - block_top)
                    cross -= all_e * (top_y - block_top)
                top_y = block_top

        at_x = tl.full((), -1, tl.int32)
        block_top = tl.max(x, 0)
        if block_top > top:
            at_x = tl.min(tl.where(x == block_top, v, V), 0)
            if top > -inf:
                shift = top - block_top
                scale = tl.exp(shift)
                rest = all_e * scale
                # Where nothing of the old sums is left, they may be too large to be multiplied by 0.
                slope = tl.where(scale > 0.0, scale * (slope + all_e * shift), 0.0)
                if prev_ptr is not None:
                    cross = tl.where(scale > 0.0, scale * (cross + all_e * shift), 0.0)
            top, at = block_top, at_x

        dx = x - tl.where(top > -inf, top, 0.0)
        e = tl.exp(dx)
        rest += tl.where(v == at_x, 0.0, e)
        slope += e * tl.where(e > 0.0, dx, 0.0)
        if prev_ptr is not None:
            dy = y - tl.where(top_y > -inf, top_y, 0.0)
            rest_y += tl.where(v == at_y, 0.0, tl.exp(dy))
            lost |= (x > -inf) & (y == -inf)
            cross += e * tl.where((e > 0.0) & (y > -inf), dx - dy, 0.0)

    top64 = top.to(tl.float64)
    rest64 = tl.sum(rest.to(tl.float64), 0)
    slope64 = tl.sum(slope.to(tl.float64), 0)
    top_y64, rest_y64, cross64, any_lost = top64, rest64, slope64, at
    if prev_ptr is not None:
        top_y64 = top_y.to(tl.float64)
        rest_y64 = tl.sum(rest_y.to(tl.float64), 0)
        cross64 = tl.sum(cross.to(tl.float64), 0)
        any_lost = tl.max(lost.to(tl.int32), 0)

    if partial_ptr is None:
        _finish(
            row,
            at,
            top64,
            rest64,
            slope64,
            top_y64,
            rest_y64,
            cross64,
            any_lost,
            token_ptr,
            confidence_ptr,
            logsumexp_ptr,
            entropy_ptr,
            kl_ptr,
        )
    else:
        slot = partial_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * FIELDS
        tl.store(slot, top64)
        tl.store(slot + 1, at.to(tl.float64))
        tl.store(slot + 2, rest64)
        tl.store(slot + 3, slope64)
        if prev_ptr is not None:
            tl.store(slot + 4, top_y64)
            tl.store(slot + 5, rest_y64)
            tl.store(slot + 6, cross64)
            tl.store(slot + 7, any_lost.to(tl.float64))


@triton.jit
def _rebase(top):
    """The largest top, and by slice what its logits and its e change by when they refer to that one."""
    best = tl.max(top, 0)
    shift = tl.where(top > -float("inf"), top - best, 0.0)
    scale = tl.where(top > -float("inf"), tl.exp(shift), 0.0)
    return best, shift, scale


@triton.jit(do_not_specialize=["slices"])
def merge_slices_kernel(
    partial_ptr,
    token_ptr,
    confidence_ptr,
    logsumexp_ptr,
    entropy_ptr,
    kl_ptr,
    slices,
    MOST_SLICES: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Merge the slices of row ``program_id(0)``, in float64, and write its results."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, MOST_SLICES)
    inside = k < slices
    slot = partial_ptr + (row * slices + k) * FIELDS
    inf = float("inf")

    top = tl.load(slot, mask=inside, other=-inf)
    at = tl.load(slot + 1, mask=inside, other=-1.0)
    rest = tl.load(slot + 2, mask=inside, other=0.0)
    slope = tl.load(slot + 3, mask=inside, other=0.0)
    best, shift, scale = _rebase(top)
    winner = tl.min(tl.where(top == best, k, MOST_SLICES), 0)
    one = tl.where(top > -inf, 1.0, 0.0)  # the e of a slice's best token
    all_e = rest + one
    token = tl.sum(tl.where(k == winner, at, 0.0), 0)
    total_rest = tl.sum(scale * tl.where(k == winner, rest, all_e), 0)
    total_slope = tl.sum(tl.where(scale > 0.0, scale * (slope + all_e * shift), 0.0), 0)

    best_y, total_rest_y, total_cross, lost = best, total_rest, total_slope, winner
    if kl_ptr is not None:
        top_y = tl.load(slot + 4, mask=inside, other=-inf)
        rest_y = tl.load(slot + 5, mask=inside, other=0.0)
        cross = tl.load(slot + 6, mask=inside, other=0.0)
        lost = tl.max(tl.load(slot + 7, mask=inside, other=0.0), 0).to(tl.int32)
        best_y, shift_y, scale_y = _rebase(top_y)
        winner_y = tl.min(tl.where(top_y == best_y, k, MOST_SLICES), 0)
        all_y = rest_y + tl.where(top_y > -inf, 1.0, 0.0)
        total_rest_y = tl.sum(scale_y * tl.where(k == winner_y, rest_y, all_y), 0)
        moved = tl.where(scale > 0.0, scale * (cross + all_e * (shift - shift_y)), 0.0)
        total_cross = tl.sum(moved, 0)

    _finish(
        row,
        token,
        best,
        total_rest,
        total_slope,
        best_y,
        total_rest_y,
        total_cross,
        lost,
        token_ptr,
        confidence_ptr,
        logsumexp_ptr,
        entropy_ptr,
        kl_ptr,
    )


def plan(
    logits: torch.Tensor,
    prev_logits: torch.Tensor | None,
    prev_rows: torch.Tensor | None,
    banned_token: int,
    out_dtype: torch.dtype,
) -> tuple[list[Launch], tuple[torch.Tensor, ...]]:
    """Kernel launches, in order, and what they write: token, confidence, logsumexp, entropy and kl."""
    if logits.dtype not in _DTYPES:
        raise TypeError(f"logits: the Triton kernel takes float16, bfloat16 or float32, got {logits.dtype}")
    B, n, V = logits.shape
    shape, device = (B, n), logits.device
    token = torch.empty(shape, dtype=torch.int64, device=device)
    confidence, logsumexp, entropy = (torch.empty(shape, dtype=out_dtype, device=device) for _ in range(3))
    kl = torch.empty(shape if prev_logits is not None else (0,), dtype=out_dtype, device=device)
    outputs = (token, confidence, logsumexp, entropy, kl)
    if B * n == 0:
        return [], outputs

    cut = config(B * n, V, logits.element_size(), prev_logits is not None)
    results = {
        "token_ptr": token,
        "confidence_ptr": confidence,
        "logsumexp_ptr": logsumexp,
        "entropy_ptr": entropy,
        "kl_ptr": None if prev_logits is None else kl,
    }
    partial = None
    if cut.slices > 1:
        partial = torch.empty((B * n, cut.slices, _FIELDS), dtype=torch.float64, device=device)
    prev_strides = (0, 0, 0) if prev_logits is None else prev_logits.stride()
    scan = Launch(
        token_stats_kernel,
        (B * n, cut.slices),
        {
            "logits_ptr": logits,
            "prev_ptr": prev_logits,
            "prev_rows_ptr": None if prev_rows is None else prev_rows.contiguous(),
            **results,
            "partial_ptr": partial,
            "n": n,
            "m": 0 if prev_logits is None else prev_logits.shape[1],
            "V": V,
            "slice_width": cut.slice_width,
            "banned_token": banned_token,
            **dict(zip(("stride_b", "stride_n", "stride_v"), logits.stride(), strict=True)),
            **dict(zip(("prev_stride_b", "prev_stride_n", "prev_stride_v"), prev_strides, strict=True)),
            "BLOCK": cut.block,
            "FIELDS": _FIELDS,
        },
        cut.num_warps,
    )
    if partial is None:
        return [scan], outputs
    merge = Launch(
        merge_slices_kernel,
        (B * n,),
        {
            "partial_ptr": partial,
            **results,
            "slices": cut.slices,
            "MOST_SLICES": _MOST_SLICES,
            "FIELDS": _FIELDS,
        },
        1,
    )
    return [scan, merge], outputs


def token_stats(
    logits: torch.Tensor,
    prev_logits: torch.Tensor | None,
    prev_rows: torch.Tensor | None,
    banned_token: int,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Token, confidence, logsumexp, entropy and kl, [B, n] each; kl is empty without prev_logits.

    logits: [B, n, V] float16, bfloat16 or float32, else TypeError. prev_logits: [B, m, V] of the same dtype.
    prev_rows: [B, n] int64, which row of prev_logits goes with each position; outside [0, m) means none.
    banned_token: left out of both distributions; -1 for none. out_dtype: float32 or float64; a kl beyond the
    range of float32 is +inf in either.
    """
    launches, outputs = plan(logits, prev_logits, prev_rows, banned_token, out_dtype)
    run(launches, logits.device)
    return outputs
