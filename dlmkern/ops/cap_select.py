"""cap_select: one commit step of CAP-Decoding."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define
from dlmkern.ops.token_stats import token_stats


class CapSelection(NamedTuple):
    """Per position, each ``[B, n]`` (``[n]`` for ``[n, V]`` input)."""

    selected: Tensor  # bool
    token: Tensor  # int64, -1 where the row defines no distribution
    confidence: Tensor  # float64, p(token)


def _fake(
    input: Tensor,  # noqa: A002
    token: Tensor,
    logsumexp: Tensor | None,
    mask: Tensor | None,
    tau_low: Tensor,
    tau_high: Tensor,
    gamma: Tensor,
    strict: bool,
) -> tuple[Tensor, Tensor]:
    rows = input.shape[:2]
    return input.new_empty(rows, dtype=torch.bool), input.new_empty(rows, dtype=torch.float64)


_op = define(
    "cap_select(Tensor input, Tensor token, Tensor? logsumexp, Tensor? mask, Tensor tau_low, Tensor tau_high,"
    " Tensor gamma, bool strict) -> (Tensor selected, Tensor confidence)",
    _fake,
)


def cap_select(
    probs: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    logits: Tensor | None = None,
    token: Tensor | None = None,
    logsumexp: Tensor | None = None,
    tau_low: float | Tensor = 0.8,
    tau_high: float | Tensor = 0.95,
    gamma: float | Tensor = -16.0,
    strict: bool = False,
    banned_token: int | None = None,
    return_stats: bool = False,
) -> Tensor | CapSelection:
    """Chooses the positions to commit together in one step of CAP-Decoding (DepCap, arXiv 2604.15750,
    algorithm 1).

    With c_i = p_i(token_i) and D as in conflict_matrix: the candidates are the masked positions with c_i >=
    tau_low. Those with c_i >= tau_high go in. The others follow by falling c_i (ties to the lower index)
    unless D_ij > gamma for some j that is in. Last, the masked position of highest c_i goes in whatever its
    confidence, so that a row with anything left to commit always commits something. Everything after the
    token scan is done in float64.

    Args:
        probs: probabilities, float ``[B, n, V]`` or ``[n, V]``; or else
        logits: logits of that shape, exactly one of the two.
        mask: bool ``[B, n]`` or ``[n]``: the positions that may be committed; None for all.
        token: integers ``[B, n]`` and
        logsumexp: float32 or float64 ``[B, n]``, both from token_stats of `logits`, spare a second read of
            them. A token outside [0, V) is never selected.
        tau_low, tau_high: confidence thresholds, 0 <= tau_low <= 1 and tau_low <= tau_high, a number or one
            a row ``[B]``. tau_high above 1 leaves the high tier empty. Values on an accelerator are not
            checked.
        gamma: conflict threshold in nats, a number or ``[B]``; not NaN.
        strict: False commits the high tier together, unchecked, as the published algorithm does. True tests
            it for conflicts like the others, so that no two committed positions conflict.
        banned_token: a token that no position may commit, left out of the distribution; only where the
            tokens are computed here.
        return_stats: also return the tokens and confidences.

    Returns:
        selected, bool ``[B, n]`` or ``[n]``; or CapSelection with `return_stats`. Positions whose row
        defines no distribution (token_stats) are never selected.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(probs, mask, logits, token, logsumexp):
        return _arrays.call(
            cap_select,
            {"probs": probs, "mask": mask, "logits": logits, "token": token, "logsumexp": logsumexp},
            {"tau_low": tau_low, "tau_high": tau_high, "gamma": gamma},
            strict=strict,
            banned_token=banned_token,
            return_stats=return_stats,
        )
    if (probs is None) == (logits is None):
        raise ValueError("probs, logits: expected exactly one of the two")
    name, given = ("probs", probs) if logits is None else ("logits", logits)
    assert given is not None
    x = _check.vocabulary_rows(name, given)
    rows = given.shape[:-1]
    batch = x.shape[0]
    if (token is None) != (logsumexp is None) or (token is not None and logits is None):
        raise ValueError("token, logsumexp: expected both, with logits, or neither")
    if mask is not None:
        mask = _check.companion("mask", mask, name, given, rows, _check.BOOL).reshape(x.shape[:2])
    low = _check.per_row("tau_low", tau_low, batch, torch.float64, x.device)
    high = _check.per_row("tau_high", tau_high, batch, torch.float64, x.device)
    conflict = _check.per_row("gamma", gamma, batch, torch.float64, x.device)
    lows, highs = _check.host_values(tau_low, batch), _check.host_values(tau_high, batch)
    _check.in_range("tau_low", lows, 0.0, 1.0, "a threshold in [0, 1]")
    _check.in_range("tau_high", highs, 0.0, math.inf, "a threshold of at least 0")
    _check.in_range("gamma", _check.host_values(gamma, batch), -math.inf, math.inf, "a number")
    _check.in_order("tau_low", lows, "tau_high", highs)

    if token is None or logsumexp is None:
        stats = token_stats(x, banned_token=banned_token, out_dtype=torch.float64)
        token, logsumexp = stats.token, None if logits is None else stats.logsumexp
    else:
        if banned_token is not None:
            raise ValueError("banned_token: expected None where token and logsumexp are given")
        token = _check.companion("token", token, name, given, rows, _check.INTEGERS).long()
        logsumexp = _check.companion("logsumexp", logsumexp, name, given, rows, _check.STATISTICS)
        token, logsumexp = token.reshape(x.shape[:2]), logsumexp.reshape(x.shape[:2])
    selected, confidence = _op(x, token, logsumexp, mask, low, high, conflict, bool(strict))
    if given.ndim == 2:
        selected, token, confidence = selected.squeeze(0), token.squeeze(0), confidence.squeeze(0)
    return CapSelection(selected, token, confidence) if return_stats else selected
