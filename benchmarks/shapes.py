"""Every op once on a few awkward shapes, compared with the reference: what compute-sanitizer watches.

``python -m benchmarks.shapes cuda`` names the backend; the tensors are on the GPU, or on the CPU for "cpu".
"""

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dlmkern
from benchmarks.__main__ import agree
from dlmkern.backends import registry

SHAPES = ((1, 1, 1), (2, 5, 33), (1, 40, 1031))  # [B, n, V]
DTYPES = (torch.float32, torch.bfloat16)


def calls(device: torch.device) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Op, shape, and a call of it."""
    generator = torch.Generator().manual_seed(0)
    for batch, n, vocabulary in SHAPES:
        for dtype in DTYPES:
            shape = (batch, n, vocabulary)
            logits, prev = ((4 * torch.randn(shape, generator=generator)).to(device, dtype) for _ in range(2))
            with dlmkern.use_backend("reference"):
                stats = dlmkern.token_stats(logits, prev)
                conflict = dlmkern.conflict_matrix(logits, stats.token, stats.logsumexp) > -8
                k = min(8, vocabulary)
                curr, last = dlmkern.topk_snapshot(logits, k), dlmkern.topk_snapshot(prev, k)
            yield from (
                (op, f"{list(shape)} {dtype}", call)
                for op, call in op_calls(logits, prev, stats, conflict, k, curr, last)
            )


def op_calls(
    logits: Tensor,
    prev: Tensor,
    stats: dlmkern.TokenStats,
    conflict: Tensor,
    k: int,
    curr: dlmkern.TopKSnapshot,
    last: dlmkern.TopKSnapshot,
) -> Iterator[tuple[str, Callable[[], Any]]]:
    # Everything but the op itself has been computed by the reference, so a backend may lack some of the ops.
    token, lse = stats.token, stats.logsumexp
    yield "token_stats", lambda: dlmkern.token_stats(logits, prev)
    yield "conflict_matrix", lambda: dlmkern.conflict_matrix(logits, token, lse)
    yield "independent_set", lambda: dlmkern.independent_set(conflict, stats.confidence)
    yield "cap_select", lambda: dlmkern.cap_select(logits=logits, token=token, logsumexp=lse, tau_low=0.1)
    yield "topk_snapshot", lambda: dlmkern.topk_snapshot(logits, k)
    yield "topk_kl", lambda: dlmkern.topk_kl(curr, last)
    yield "depga_block", lambda: dlmkern.depga_block(stats.confidence, stats.entropy, 64)
    yield "confidence_select", lambda: dlmkern.confidence_select(confidence=stats.confidence, rule="factor")
    batch, n, _ = logits.shape
    generator = torch.Generator().manual_seed(n)
    cache, block = (torch.randn((batch, 2, rows, 32), generator=generator).to(logits) for rows in (n + 9, n))
    positions = torch.arange(n, device=logits.device).expand(batch, n) + 4
    angles = torch.rand((n + 9, 32), generator=generator).to(stats.confidence)

    def write() -> tuple[Tensor, ...]:
        k_cache, v_cache = cache.clone(), cache.clone()
        drift = dlmkern.kv_block_write(
            k_cache, v_cache, block, block, positions, rope=(angles.cos(), angles.sin()), drift=True
        )
        assert drift is not None
        return k_cache, v_cache, *drift

    yield "kv_block_write", write
    yield "block_attention", lambda: dlmkern.block_attention(block, cache[:, :1], cache[:, 1:])
    lengths = torch.full((batch,), n + 2, device=logits.device)
    rows = torch.arange(n, device=logits.device).flip(0).expand(batch, n)

    def graph() -> Tensor:
        known = positions.masked_fill(positions % 7 == 5, -1)
        out = torch.full((batch, n, n), 0.5, dtype=angles.dtype, device=logits.device)
        return dlmkern.attention_graph(block, cache[:, :1], known, out=out, rows=rows, lengths=lengths)

    yield "attention_graph", graph
    scores = torch.rand((batch, n, n), generator=generator).to(stats.confidence)
    yield "dapd_select", lambda: dlmkern.dapd_select(scores, stats.confidence, None, 0.6)
    yield (
        "dapd_select",
        lambda: dlmkern.dapd_select(
            scores, stats.confidence, token % 5 != 0, 0.6, variant="direct", certain=0.3, symmetric=True
        ),
    )
    seeds = token % 3 == 0
    keys, cached = block[:, :1], cache[:, :1, :n]
    yield "cover_attention", lambda: dlmkern.cover_attention(block, keys, keys, cached, cached, seeds)
    yield (
        "cover_attention",
        lambda: dlmkern.cover_attention(
            block, keys, keys, cached, cached, seeds, lengths.clamp(max=n) - 1, shift=1
        ),
    )
    with dlmkern.use_backend("reference"):
        shown = dlmkern.block_attention(block, keys, cached)

    def correct(recompute_below: float) -> dlmkern.CoverAttention:
        return dlmkern.diagonal_correction(
            *(*shown, block, keys, keys, cache[:, :1], cache[:, 1:], seeds, lengths),
            positions=positions.masked_fill(positions % 7 == 5, -1),
            shift=1,
            recompute_below=recompute_below,
        )

    yield "diagonal_correction", partial(correct, 0.5)
    yield "diagonal_correction", partial(correct, math.inf)
    yield "cover_seeds", lambda: dlmkern.cover_seeds(1 - stats.confidence, stats.entropy, scores[:, 0], seeds)
    yield (
        "cover_seeds",
        lambda: dlmkern.cover_seeds(stats.entropy, combine="sum", suspects="above_mean", most=3),
    )
    yield (
        "cover_verify",
        lambda: dlmkern.cover_verify(token, token % 2, stats.confidence, seeds, token % 3, tau_replace=0.3),
    )


def main(backend: str) -> int:
    device = torch.device("cpu" if backend in ("cpu", "reference") else "cuda")
    wrong = ran = 0
    for op, shape, call in calls(device):
        try:
            with dlmkern.use_backend(backend):
                registry.resolve(op, device, torch.float32)
                result = call()
        except dlmkern.BackendUnavailableError:
            continue
        with dlmkern.use_backend("reference"):
            expected = call()
        ran += 1
        if not agree(result, expected):
            wrong += 1
            print(f"{op} on {shape}: {backend} differs from the reference")
    print(f"{ran} calls on {backend}, {wrong} wrong")
    return 1 if wrong or not ran else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
