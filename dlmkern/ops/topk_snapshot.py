"""topk_snapshot: the k likeliest tokens of each position, for DepCap's truncated KL."""

from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define


class TopKSnapshot(NamedTuple):
    """The k likeliest tokens of each position; the rest of the mass goes evenly to the other tokens."""

    ids: Tensor  # int64 [B, n, k], by falling logit, ties to the lower id; -1 where there is no distribution
    logp: Tensor  # float64 [B, n, k], nats
    floor: Tensor  # float64 [B, n], nats: log-probability of each other token


def _fake(logits: Tensor, k: int, banned_token: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, _ = logits.shape
    return (
        logits.new_empty((batch, n, k), dtype=torch.int64),
        logits.new_empty((batch, n, k), dtype=torch.float64),
        logits.new_empty((batch, n), dtype=torch.float64),
    )


_op = define(
    "topk_snapshot(Tensor logits, int k, int banned_token) -> (Tensor ids, Tensor logp, Tensor floor)", _fake
)


def topk_snapshot(logits: Tensor, k: int = 64, *, banned_token: int | None = None) -> TopKSnapshot:
    """The snapshot that DepCap's official code keeps of a step (arXiv 2604.15750): see topk_kl.

    floor = log(max(1 - sum_k p, 1e-12) / max(V - k, 1)), with the tail of the sum added up by itself in
    float64.

    Args:
        logits: float ``[B, n, V]`` or ``[n, V]``.
        k: tokens to keep, 1 <= k <= V.
        banned_token: a token left out as if its logit were -inf; V above is then the number of the other
            tokens.

    Returns:
        TopKSnapshot; without the leading B for ``[n, V]``. It carries no gradient.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(logits):
        return _arrays.call(topk_snapshot, {"logits": logits}, k=k, banned_token=banned_token)
    x = _check.vocabulary_rows("logits", logits)
    banned = _check.banned_token(banned_token, x.shape[-1])
    allowed = x.shape[-1] - (banned >= 0)
    _check.count("k", k, allowed, "the number of tokens")
    snapshot = TopKSnapshot(*_op(x, int(k), banned))
    return TopKSnapshot(*(part.squeeze(0) for part in snapshot)) if logits.ndim == 2 else snapshot
