"""confidence_select: which positions a confidence rule commits."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define
from dlmkern.ops.token_stats import token_stats

# The argument of each rule, its dtype, its least value and what an error says is expected; in the order of
# dlmkern_rule in the C API.
ARGUMENTS: dict[str, tuple[str, torch.dtype, float, str]] = {
    "threshold": ("tau", torch.float64, -math.inf, "a number"),
    "factor": ("factor", torch.float64, math.ulp(0.0), "a number above 0"),
    "schedule": ("count", torch.int64, 0, "a count of at least 0"),
}
RULES = tuple(ARGUMENTS)
FACTOR_OFFICIAL = len(RULES)


class ConfidenceSelection(NamedTuple):
    """Per position, each ``[B, n]`` (``[n]`` for input without B)."""

    selected: Tensor  # bool
    token: Tensor | None  # int64, -1 where the row defines no distribution; None where `confidence` was given
    confidence: Tensor  # float64 p(token), or as given


def _fake(confidence: Tensor, mask: Tensor | None, parameter: Tensor, rule: int) -> Tensor:
    return confidence.new_empty(confidence.shape, dtype=torch.bool)


_op = define(
    "confidence_select(Tensor confidence, Tensor? mask, Tensor parameter, int rule) -> Tensor", _fake
)


def confidence_select(
    logits: Tensor | None = None,
    mask: Tensor | None = None,
    rule: str = "threshold",
    *,
    confidence: Tensor | None = None,
    tau: float | Tensor = 0.9,
    factor: float | Tensor = 1.0,
    count: int | Tensor | None = None,
    banned_token: int | None = None,
    compat: str | None = None,
) -> ConfidenceSelection:
    """Chooses the positions to commit together by a rule on their confidences (Fast-dLLM, arXiv 2505.22618;
    LLaDA, arXiv 2502.09992).

    The m candidates are the masked positions whose confidence is not NaN. In float64, with c the confidence
    of a candidate and r its rank by falling confidence, from 1 on, ties to the lower index:

    - ``"threshold"`` commits r = 1 and every c >= tau.
    - ``"factor"`` commits r = 1 and every (r + 1)(1 - c) < factor, the bound under which parallel greedy
      decoding equals greedy decoding one by one (theorem 1).
    - ``"schedule"`` commits r <= count: a quota, as in LLaDA's own decoding.

    Args:
        logits: float ``[B, n, V]`` or ``[n, V]``, read once for tokens and confidences; or else
        mask: bool ``[B, n]`` or ``[n]``: the positions that may be committed; None for all.
        rule: ``"threshold"``, ``"factor"`` or ``"schedule"``.
        confidence: float32 or float64 ``[B, n]`` or ``[n]`` in place of logits, exactly one of the two.
        tau: the threshold, a number or one a row ``[B]``; not NaN.
        factor: a number above 0 or ``[B]``.
        count: how many, an int >= 0 or ``[B]``; with the rule ``"schedule"`` and no other. More than there
            are candidates commits them all.
        banned_token: a token that no position may commit, left out of the distribution; with logits only.
        compat: ``"official"`` commits by the factor rule what Fast-dLLM's code commits: the limit itself
            passes, c >= 1 - factor / (r + 1); and if only the last of the m ranks fails, it is committed too.

    Returns:
        ConfidenceSelection. Of the rules' parameters, only the one of `rule` is looked at. Values on an
        accelerator are not checked: a NaN there passes no test.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(logits, mask, confidence):
        return _arrays.call(
            confidence_select,
            {"logits": logits, "mask": mask, "confidence": confidence},
            {"tau": tau, "factor": factor, "count": count},
            rule=rule,
            banned_token=banned_token,
            compat=compat,
        )
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    if compat not in (None, "official"):
        raise ValueError(f"compat: expected None or 'official', got {compat!r}")
    if (count is None) == (rule == "schedule"):
        given = "None" if count is None else "one"
        raise ValueError(f"count: expected with rule 'schedule' and with no other, got {given} with {rule!r}")
    if (logits is None) == (confidence is None):
        raise ValueError("logits, confidence: expected exactly one of the two")
    token = None
    if logits is not None:
        stats = token_stats(logits, banned_token=banned_token, out_dtype=torch.float64)
        name, token, confidence = "logits", stats.token, stats.confidence
    else:
        name, confidence = "confidence", _check.tensor("confidence", confidence, _check.STATISTICS)
        if banned_token is not None:
            raise ValueError("banned_token: expected None where confidence is given")
        if confidence.ndim not in (1, 2):
            raise ValueError(f"confidence: expected shape [n] or [B, n], got {list(confidence.shape)}")
    if mask is not None:
        mask = _check.companion("mask", mask, name, confidence, confidence.shape, _check.BOOL)
    single = confidence.ndim == 1
    batch = 1 if single else confidence.shape[0]
    argument, dtype, least, expected = ARGUMENTS[rule]
    value: Any = {"tau": tau, "factor": factor, "count": count}[argument]
    parameter = _check.per_row(argument, value, batch, dtype, confidence.device).double()
    _check.in_range(argument, _check.host_values(value, batch), least, math.inf, expected)
    official = rule == "factor" and compat is not None
    selected: Tensor = _op(
        confidence.unsqueeze(0) if single else confidence,
        mask.unsqueeze(0) if single and mask is not None else mask,
        parameter,
        FACTOR_OFFICIAL if official else RULES.index(rule),
    )
    return ConfidenceSelection(selected.squeeze(0) if single else selected, token, confidence)
