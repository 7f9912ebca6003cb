"""cap_select: one commit step of CAP-Decoding (DepCap), one program a sequence.

Conflicts are gathered from the input when a position joins, for the candidates that are left; no matrix is
stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .conflict_matrix import log_prob
from .independent_set import best_candidate
from .launch import Launch, one_program, run


@triton.jit(do_not_specialize=["n", "V"])
def cap_select_kernel(
    input_ptr,
    token_ptr,
    logsumexp_ptr,
    mask_ptr,
    tau_low_ptr,
    tau_high_ptr,
    gamma_ptr,
    selected_ptr,
    confidence_ptr,
    n,
    V,
    stride_b,
    stride_n,
    stride_v,
    STRICT: tl.constexpr,
    LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The selection of sequence ``program_id(0)``."""
    batch = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n
    input_ptr += batch * stride_b
    token_ptr += batch * n
    token = tl.load(token_ptr + i, mask=inside, other=-1)
    known = (token >= 0) & (token < V)
    pointer = input_ptr + i.to(tl.int64) * stride_n + token * stride_v
    confidence = tl.load(pointer, mask=known, other=float("nan")).to(tl.float64)
    token = token.to(tl.int32)  # half the registers
    if LOGITS:
        logsumexp_ptr += batch * n
        logsumexp = tl.load(logsumexp_ptr + i, mask=inside, other=0.0).to(tl.float64)
        confidence = tl.exp(confidence - logsumexp)
    tl.store(confidence_ptr + batch * n + i, confidence, mask=inside)

    open_ = confidence == confidence
    if mask_ptr is not None:
        open_ &= tl.load(mask_ptr + batch * n + i, mask=inside, other=0) != 0
    candidate = open_ & (confidence >= tl.load(tau_low_ptr + batch))
    selected = i == best_candidate(confidence, open_, i, BLOCK)
    high = tl.zeros((BLOCK,), tl.int1)
    if not STRICT:
        high = candidate & (confidence >= tl.load(tau_high_ptr + batch))
        selected |= high
    gamma = tl.load(gamma_ptr + batch)

    # The high tier has the highest confidences, so its positions come first here too; each drops the
    # candidates below that it conflicts with. Once none is left, the rest of that tier has nothing to drop.
    below = candidate & (high == 0)
    while tl.max(below.to(tl.int32), 0) > 0:
        j = best_candidate(confidence, candidate, i, BLOCK)
        selected |= i == j
        candidate &= i != j
        below &= candidate
        token_j = tl.load(token_ptr + j)
        logsumexp_i, logsumexp_j = tl.zeros((BLOCK,), tl.float64), tl.full((), 0.0, tl.float64)
        if LOGITS:  # read again: registers are scarcer
            logsumexp_i = tl.load(logsumexp_ptr + i, mask=below, other=0.0).to(tl.float64)
            logsumexp_j = tl.load(logsumexp_ptr + j).to(tl.float64)
        from_i = log_prob(input_ptr, i, stride_n, token_j, stride_v, logsumexp_i, below, LOGITS)
        from_j = log_prob(input_ptr, j, stride_n, token, stride_v, logsumexp_j, below, LOGITS)
        below &= (from_i + from_j > gamma) == 0
        candidate = (candidate & high) | below
    tl.store(selected_ptr + batch * n + i, selected, mask=inside)


def plan(
    input: torch.Tensor,  # noqa: A002
    token: torch.Tensor,
    logsumexp: torch.Tensor | None,
    mask: torch.Tensor | None,
    tau_low: torch.Tensor,
    tau_high: torch.Tensor,
    gamma: torch.Tensor,
    strict: bool,
) -> tuple[list[Launch], tuple[torch.Tensor, torch.Tensor]]:
    """Kernel launches and the tensors (selected, confidence) that they write."""
    B, n, V = input.shape
    selected = torch.empty((B, n), dtype=torch.bool, device=input.device)
    confidence = torch.empty((B, n), dtype=torch.float64, device=input.device)
    if B * n == 0:
        return [], (selected, confidence)
    block, num_warps = one_program(n)
    stride_b, stride_n, stride_v = input.stride()
    arguments = {
        "input_ptr": input,
        "token_ptr": token.contiguous(),
        "logsumexp_ptr": None if logsumexp is None else logsumexp.contiguous(),
        "mask_ptr": None if mask is None else mask.contiguous(),
        "tau_low_ptr": tau_low.contiguous(),
        "tau_high_ptr": tau_high.contiguous(),
        "gamma_ptr": gamma.contiguous(),
        "selected_ptr": selected,
        "confidence_ptr": confidence,
        "n": n,
        "V": V,
        "stride_b": stride_b,
        "stride_n": stride_n,
        "stride_v": stride_v,
        "STRICT": strict,
        "LOGITS": logsumexp is not None,
        "BLOCK": block,
    }
    return [Launch(cap_select_kernel, (B,), arguments, num_warps)], (selected, confidence)


def cap_select(
    input: torch.Tensor,  # noqa: A002
    token: torch.Tensor,
    logsumexp: torch.Tensor | None,
    mask: torch.Tensor | None,
    tau_low: torch.Tensor,
    tau_high: torch.Tensor,
    gamma: torch.Tensor,
    strict: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selection (bool) and confidence p_i(token_i) (float64), [B, n] each, of CAP-Decoding (DepCap).

    input: [B, n, V] logits if logsumexp [B, n] is given, else probabilities. token: [B, n] int64; outside
    [0, V) means never selected. mask: [B, n] bool, positions that may be committed; None for all. tau_low,
    tau_high, gamma: [B] float64. strict: positions at or above tau_high must be free of conflicts too.
    """
    launches, outputs = plan(input, token, logsumexp, mask, tau_low, tau_high, gamma, strict)
    run(launches, input.device)
    return outputs
