"""conflict_matrix: D_ij = log p_i(token_j) + log p_j(token_i), from 2 n^2 gathers and float64 arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Launch, run

_BLOCK = 32  # a program writes a tile of 32 x 32
_NUM_WARPS = 4


@triton.jit
def log_prob(input_ptr, row, stride_n, token, stride_v, logsumexp, mask, LOGITS: tl.constexpr):
    """log p_row(token) in float64, from logits or probabilities; NaN where mask is off."""
    pointer = input_ptr + row.to(tl.int64) * stride_n + token.to(tl.int64) * stride_v
    value = tl.load(pointer, mask=mask, other=float("nan")).to(tl.float64)
    if LOGITS:
        value -= logsumexp
    else:
        value = tl.log(value)
    return value


@triton.jit(do_not_specialize=["n", "V"])
def conflict_matrix_kernel(
    logits_ptr,
    token_ptr,
    logsumexp_ptr,
    conflict_ptr,
    n,
    V,
    stride_b,
    stride_n,
    stride_v,
    BLOCK: tl.constexpr,
):
    """Tile ``program_id(0)`` of all the tiles of all the matrices, row by row."""
    tiles = tl.cdiv(n, BLOCK)
    tile = tl.program_id(0).to(tl.int64)
    batch = tile // (tiles * tiles)
    i = (tile // tiles % tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    j = (tile % tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)

    row = batch * n
    token_i = tl.load(token_ptr + row + i, mask=i < n, other=-1)[:, None]
    token_j = tl.load(token_ptr + row + j, mask=j < n, other=-1)[None, :]
    lse_i = tl.load(logsumexp_ptr + row + i, mask=i < n, other=0.0).to(tl.float64)[:, None]
    lse_j = tl.load(logsumexp_ptr + row + j, mask=j < n, other=0.0).to(tl.float64)[None, :]
    known = (token_i >= 0) & (token_i < V) & (token_j >= 0) & (token_j < V)

    logits_ptr += batch * stride_b
    from_i = log_prob(logits_ptr, i[:, None], stride_n, token_j, stride_v, lse_i, known, True)
    from_j = log_prob(logits_ptr, j[None, :], stride_n, token_i, stride_v, lse_j, known, True)
    inside = (i[:, None] < n) & (j[None, :] < n)
    tl.store(
        conflict_ptr + (row + i[:, None]) * n + j[None, :], (from_i + from_j).to(tl.float32), mask=inside
    )


def plan(
    logits: torch.Tensor, token: torch.Tensor, logsumexp: torch.Tensor
) -> tuple[list[Launch], torch.Tensor]:
    """Kernel launches and the conflict matrix that they write."""
    B, n, V = logits.shape
    conflict = torch.empty((B, n, n), dtype=torch.float32, device=logits.device)
    if B * n == 0:
        return [], conflict
    stride_b, stride_n, stride_v = logits.stride()
    arguments = {
        "logits_ptr": logits,
        "token_ptr": token.contiguous(),
        "logsumexp_ptr": logsumexp.contiguous(),
        "conflict_ptr": conflict,
        "n": n,
        "V": V,
        "stride_b": stride_b,
        "stride_n": stride_n,
        "stride_v": stride_v,
        "BLOCK": _BLOCK,
    }
    grid = (B * triton.cdiv(n, _BLOCK) ** 2,)
    return [Launch(conflict_matrix_kernel, grid, arguments, _NUM_WARPS)], conflict


def conflict_matrix(logits: torch.Tensor, token: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """D, float32 [B, n, n], symmetric to the bit.

    logits: [B, n, V]. token: [B, n] int64. logsumexp: [B, n], of the same rows.
    The diagonal is 2 log p_i(token_i). A token outside [0, V) makes its row and column NaN.
    """
    launches, conflict = plan(logits, token, logsumexp)
    run(launches, logits.device)
    return conflict
