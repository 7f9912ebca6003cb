"""cover_verify: what becomes of the tokens that COVER has verified."""

from enum import IntEnum

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define


class Verdict(IntEnum):
    """What becomes of a position."""

    NONE = 0
    """It was not verified."""
    KEEP = 1
    REPLACE = 2
    """It gets the token that its surroundings predict."""
    REMASK = 3


def _fake(
    confidence: Tensor,
    token: Tensor,
    predicted: Tensor,
    seeds: Tensor,
    remasks: Tensor,
    tau_replace: float,
    max_remasks: int,
) -> Tensor:
    return token.new_empty(token.shape)


_op = define(
    "cover_verify(Tensor confidence, Tensor token, Tensor predicted, Tensor seeds, Tensor remasks,"
    " float tau_replace, int max_remasks) -> Tensor",
    _fake,
)


def cover_verify(
    token: Tensor,
    predicted: Tensor,
    confidence: Tensor,
    seeds: Tensor,
    remasks: Tensor | None = None,
    *,
    tau_replace: float = 0.9,
    max_remasks: int = 1,
) -> Tensor:
    """Judges seeds by what their surroundings predict in their place (COVER, arXiv 2602.06161, section 5).

    A seed is kept if its token is predicted; replaced if another one is, with a probability of `tau_replace`
    or more; else masked again, or kept if that has happened `max_remasks` times.

    Args:
        token: integers ``[B, n]`` or ``[n]``: the tokens that are there.
        predicted: the likeliest tokens, leave-one-out; integers of the same shape.
        confidence: float, the same shape: their probabilities.
        seeds: bool, the same shape.
        remasks: integers, the same shape: how often each position has been masked again; None for never.
        tau_replace: a number; above 1, nothing is replaced. The paper gives neither this nor the next; those
            of `decoders.COVER` are stricter, for reasons in docs/cover.md.
        max_remasks: at least 0.

    Returns:
        int64 of the shape of `token`: a Verdict for every position.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(token, predicted, confidence, seeds, remasks):
        return _arrays.call(
            cover_verify,
            {
                "token": token, "predicted": predicted, "confidence": confidence, "seeds": seeds,
                "remasks": remasks,
            },
            tau_replace=tau_replace, max_remasks=max_remasks,
        )  # fmt: skip
    y = _check.tensor("token", token, _check.INTEGERS)
    if y.ndim not in (1, 2):
        raise ValueError(f"token: expected shape [n] or [B, n], got {list(y.shape)}")
    shape = y.shape
    x = _check.companion("predicted", predicted, "token", y, shape, _check.INTEGERS)
    p = _check.companion("confidence", confidence, "token", y, shape, _check.FLOATS)
    chosen = _check.companion("seeds", seeds, "token", y, shape, _check.BOOL)
    if remasks is None:
        times = torch.zeros(shape, dtype=torch.int64, device=y.device)
    else:
        times = _check.companion("remasks", remasks, "token", y, shape, _check.INTEGERS)
    if not _check.is_number(tau_replace):
        raise TypeError(f"tau_replace: expected a number, got {type(tau_replace).__name__}")
    if tau_replace != tau_replace:
        raise ValueError(f"tau_replace: expected a number, got {tau_replace}")
    if not _check.is_int(max_remasks):
        raise TypeError(f"max_remasks: expected an int, got {type(max_remasks).__name__}")
    if not 0 <= max_remasks < 2**63:
        raise ValueError(f"max_remasks: expected at least 0 and 64 bits, got {max_remasks}")
    p = p if p.dtype in _check.STATISTICS else p.float()
    rows = [t.unsqueeze(0) if y.ndim == 1 else t for t in (p, y.long(), x.long(), chosen, times.long())]
    verdict: Tensor = _op(*rows, _check.as_float("tau_replace", tau_replace), int(max_remasks))
    return verdict.squeeze(0) if y.ndim == 1 else verdict
