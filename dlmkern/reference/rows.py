"""Row-wise softmax arithmetic in float64, a bounded number of rows at a time."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 2 << 20  # of one float64 copy of the rows in work; about six such copies live at the same time


def row_chunks(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cuts ``[B, n, V]`` into index pairs, so that ``logits[pair]`` is small whatever the vocabulary is."""
    batch, n, vocab = logits.shape
    if n == 0:
        return
    rows = max(1, CHUNK_BYTES // (8 * vocab))
    if n <= rows:
        step = max(1, rows // n)
        for b in range(0, batch, step):
            yield slice(b, b + step), slice(None)
    else:
        for b in range(batch):
            for i in range(0, n, rows):
                yield slice(b, b + 1), slice(i, i + rows)


class RowSoftmax(NamedTuple):
    """Softmax of float64 rows ``[..., V]``; rows that define no distribution are NaN and have token -1.

    The best term is kept out of the sum of the others, because ``1 / (1 + rest)`` tells confidences near one
    apart which ``exp(x - logsumexp)`` rounds together.
    """

    token: Tensor  # [...] int64, the lowest index of the largest logit
    log_prob: Tensor  # [..., V]
    prob: Tensor  # [..., V]
    confidence: Tensor  # [...]
    logsumexp: Tensor  # [...]


def row_softmax(x: Tensor) -> RowSoftmax:
    best, token = x.max(dim=-1, keepdim=True)
    valid = best.isfinite()  # false for a NaN or +inf anywhere in the row, and for nothing but -inf
    shifted = torch.where(valid, x - best, torch.nan)
    rest = shifted.exp().scatter(-1, token, 0.0).sum(dim=-1, keepdim=True)
    rest = torch.where(valid, rest, torch.nan)
    log_prob = shifted - rest.log1p()
    return RowSoftmax(
        token=torch.where(valid, token, -1).squeeze(-1),
        log_prob=log_prob,
        prob=log_prob.exp(),
        confidence=(1.0 / (1.0 + rest)).squeeze(-1),
        logsumexp=(best + rest.log1p()).squeeze(-1),
    )


def float64_rows(x: Tensor, banned_token: int) -> Tensor:
    """A float64 copy of rows with the banned token's logit at -inf; -1 bans none."""
    x = x.to(torch.float64, copy=True)
    if banned_token >= 0:
        x[..., banned_token].fill_(-torch.inf)
    return x
