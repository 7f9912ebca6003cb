"""conflict_matrix: how likely two positions predict each other's token."""

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define
from dlmkern.ops.token_stats import token_stats


def _fake(logits: Tensor, token: Tensor, logsumexp: Tensor) -> Tensor:
    batch, n, _ = logits.shape
    return logits.new_empty((batch, n, n), dtype=torch.float32)


_op = define("conflict_matrix(Tensor logits, Tensor token, Tensor logsumexp) -> Tensor", _fake)


def conflict_matrix(logits: Tensor, token: Tensor | None = None, logsumexp: Tensor | None = None) -> Tensor:
    """D_ij = log p_i(token_j) + log p_j(token_i) in nats, the conflict score of DepCap (arXiv 2604.15750,
    CAP-Decoding).

    No ``[n, n, V]`` temporary is made. The sum is formed in float64 and is symmetric to the bit; the
    diagonal is 2 log p_i(token_i).

    Args:
        logits: float ``[B, n, V]`` or ``[n, V]``.
        token: integers ``[B, n]``, the token of each position; one outside [0, V) makes its row and column
            NaN.
        logsumexp: float32 or float64 ``[B, n]``, of the same logits. `token` and `logsumexp` come together,
            from token_stats; without them they are computed.

    Returns:
        float32 ``[B, n, n]``, or ``[n, n]`` for ``[n, V]``. It carries no gradient.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(logits, token, logsumexp):
        return _arrays.call(conflict_matrix, {"logits": logits, "token": token, "logsumexp": logsumexp})
    x = _check.vocabulary_rows("logits", logits)
    if (token is None) != (logsumexp is None):
        missing = "token" if token is None else "logsumexp"
        raise ValueError(f"{missing}: expected token and logsumexp together, got only one of them")
    if token is None or logsumexp is None:
        stats = token_stats(x, out_dtype=torch.float64)
        token, logsumexp = stats.token, stats.logsumexp
    else:
        rows = logits.shape[:-1]
        token = _check.companion("token", token, "logits", logits, rows, _check.INTEGERS).long()
        logsumexp = _check.companion("logsumexp", logsumexp, "logits", logits, rows, _check.STATISTICS)
        if logits.ndim == 2:
            token, logsumexp = token.unsqueeze(0), logsumexp.unsqueeze(0)
    conflict: Tensor = _op(x, token, logsumexp)
    return conflict.squeeze(0) if logits.ndim == 2 else conflict
