"""token_stats and kl_entropy: what one read of the logits tells about each position."""

from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define


class TokenStats(NamedTuple):
    """Per position, each ``[B, n]`` (``[n]`` for ``[n, V]`` logits)."""

    token: Tensor  # int64, -1 where the row defines no distribution
    confidence: Tensor  # p(token)
    logsumexp: Tensor  # nats
    entropy: Tensor  # nats
    kl: Tensor | None  # KL(p || p_prev) in nats; None without prev_logits


def _fake(
    logits: Tensor,
    prev_logits: Tensor | None,
    prev_rows: Tensor | None,
    banned_token: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[:2]
    confidence, logsumexp, entropy = (logits.new_empty(rows, dtype=out_dtype) for _ in range(3))
    kl = logits.new_empty(0 if prev_logits is None else rows, dtype=out_dtype)
    return logits.new_empty(rows, dtype=torch.int64), confidence, logsumexp, entropy, kl


_op = define(
    "token_stats(Tensor logits, Tensor? prev_logits, Tensor? prev_rows, int banned_token,"
    " ScalarType out_dtype)"
    " -> (Tensor token, Tensor confidence, Tensor logsumexp, Tensor entropy, Tensor kl)",
    _fake,
)


def token_stats(
    logits: Tensor,
    prev_logits: Tensor | None = None,
    *,
    prev_rows: Tensor | None = None,
    banned_token: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> TokenStats:
    """Best token, its confidence, log-sum-exp, entropy and KL to an earlier step, from one read of the
    logits.

    A row of logits x defines p_v = exp(x_v) / sum_u exp(x_u); -inf is a banned token. A row that holds a NaN
    or +inf, or nothing but -inf, defines no distribution: its token is -1 and its statistics are NaN.

    Args:
        logits: float ``[B, n, V]`` or ``[n, V]``.
        prev_logits: ``[B, m, V]`` or ``[m, V]`` of the same dtype, the logits of an earlier step.
        prev_rows: integers ``[B, n]`` or ``[n]``: which row of `prev_logits` belongs to each position. A
            value outside [0, m) means none, and gives a NaN `kl`. Without it, m must be n and row i goes
            with row i.
        banned_token: a token left out of both distributions, as if its logit were -inf.
        out_dtype: of the statistics: ``torch.float32`` or ``torch.float64``, which resolves confidences near
            one that float32 rounds together. By default float32, and float64 for float64 logits.

    Returns:
        TokenStats. `token` is the lowest index of the largest logit. In `kl`, p_v = 0 adds 0 and
        p_prev,v = 0 < p_v gives +inf. The results carry no gradient.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(logits, prev_logits, prev_rows):
        return _arrays.call(
            token_stats,
            {"logits": logits, "prev_logits": prev_logits, "prev_rows": prev_rows},
            banned_token=banned_token,
            out_dtype=out_dtype,
        )
    x = _check.vocabulary_rows("logits", logits)
    batch, n, vocabulary = x.shape
    single = logits.ndim == 2
    previous, rows = None, None
    if prev_logits is not None:
        previous = _check.vocabulary_rows("prev_logits", prev_logits)
        _check.same_device("prev_logits", previous, "logits", x)
        if previous.dtype != x.dtype:
            raise TypeError(f"prev_logits: expected dtype {x.dtype} like logits, got {previous.dtype}")
        m = n if prev_rows is None else previous.shape[1]
        if previous.shape != (batch, m, vocabulary) or prev_logits.ndim != logits.ndim:
            expected = (batch, "m" if prev_rows is not None else n, vocabulary)[single:]
            raise ValueError(
                f"prev_logits: expected shape [{', '.join(map(str, expected))}] to go with logits,"
                f" got {list(prev_logits.shape)}"
            )
    if prev_rows is not None:
        if prev_logits is None:
            raise ValueError("prev_rows: expected prev_logits with it")
        rows = _check.companion("prev_rows", prev_rows, "logits", logits, logits.shape[:-1], _check.INTEGERS)
        rows = rows.long().reshape(batch, n)
    if out_dtype is None:
        out_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    elif out_dtype not in _check.STATISTICS:
        raise TypeError(f"out_dtype: expected torch.float32, torch.float64 or None, got {out_dtype}")
    stats = _op(x, previous, rows, _check.banned_token(banned_token, vocabulary), out_dtype)
    if single:
        stats = [s.squeeze(0) if s.ndim == 2 else s for s in stats]
    token, confidence, logsumexp, entropy, kl = stats
    return TokenStats(token, confidence, logsumexp, entropy, None if previous is None else kl)


def kl_entropy(
    logits: Tensor,
    prev_logits: Tensor,
    *,
    banned_token: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """KL(p || p_prev) and the entropy of p in nats, each ``[B, n]``: two fields of token_stats, which see."""
    if prev_logits is None:
        raise TypeError("prev_logits: expected a tensor, got None")
    stats = token_stats(logits, prev_logits, banned_token=banned_token, out_dtype=out_dtype)
    assert stats.kl is not None
    return stats.kl, stats.entropy
