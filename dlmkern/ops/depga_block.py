"""depga_block: the length of the next block."""

import math

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define

PADDINGS = ("zero", "reflect")


def _fake(
    kl: Tensor, entropy: Tensor, remaining: Tensor, lam: Tensor, l_min: Tensor, l_max: Tensor, reflect: bool
) -> Tensor:
    return kl.new_empty(kl.shape[:1], dtype=torch.int64)


_op = define(
    "depga_block(Tensor kl, Tensor entropy, Tensor remaining, Tensor lam, Tensor l_min, Tensor l_max,"
    " bool reflect) -> Tensor",
    _fake,
)


def depga_block(
    kl: Tensor,
    entropy: Tensor,
    remaining: int | Tensor,
    lam: float | Tensor = 1.2,
    l_min: int | Tensor = 8,
    l_max: int | Tensor = 128,
    *,
    padding: str = "zero",
) -> Tensor:
    """Length of the next block (DepCap's DepGA-Block, arXiv 2604.15750).

    The block goes on while the influence of the last block outweighs the entropy: both signals are smoothed
    with a centred moving average of three, made comparable by (x - median) / interquartile range, and the
    block ends before the first position with S = kl~ - lam * entropy~ < 0 (or NaN). In float64, over the
    window of min(W, l_max, remaining) positions; what lies beyond it is not read. The quantiles are elements
    of the window: of w values, the floor(q (w - 1))-th smallest; NaN sorts last, and the range is at least
    1e-15.

    Args:
        kl: float ``[B, W]`` or ``[W]``: influence of the last block from the block's first position on, in
            nats: token_stats' `kl` or topk_kl.
        entropy: float, the shape of `kl`, in nats.
        remaining: positions of the sequence from there on, an int >= 0 or one a row ``[B]``.
        lam: weight of the entropy, a number or ``[B]``; not NaN.
        l_min, l_max: least and greatest length, 1 <= l_min <= l_max, ints or ``[B]``.
        padding: of the moving average: ``"zero"`` as in the official code, which pulls the first position
            down by a third, or ``"reflect"``, which repeats the edge.

    Returns:
        int64 ``[B]``, or a 0-dimensional tensor for ``[W]``: remaining if that is less than l_min, else the
        length clipped to [l_min, min(l_max, remaining)]. Values on an accelerator are not checked.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(kl, entropy):
        return _arrays.call(
            depga_block,
            {"kl": kl, "entropy": entropy},
            {"remaining": remaining, "lam": lam, "l_min": l_min, "l_max": l_max},
            padding=padding,
        )
    influence = _check.tensor("kl", kl, _check.FLOATS)
    if influence.ndim not in (1, 2):
        raise ValueError(f"kl: expected shape [W] or [B, W], got {list(influence.shape)}")
    uncertainty = _check.companion("entropy", entropy, "kl", influence, influence.shape, _check.FLOATS)
    if influence.dtype != uncertainty.dtype or influence.dtype not in _check.STATISTICS:
        influence, uncertainty = influence.double(), uncertainty.double()
    if influence.ndim == 1:
        influence, uncertainty = influence.unsqueeze(0), uncertainty.unsqueeze(0)
    if padding not in PADDINGS:
        raise ValueError(f"padding: expected one of {', '.join(PADDINGS)}, got {padding!r}")
    batch, device = influence.shape[0], influence.device
    rest = _check.per_row("remaining", remaining, batch, torch.int64, device)
    weight = _check.per_row("lam", lam, batch, torch.float64, device)
    shortest = _check.per_row("l_min", l_min, batch, torch.int64, device)
    longest = _check.per_row("l_max", l_max, batch, torch.int64, device)
    leasts = _check.host_values(l_min, batch)
    _check.in_range("remaining", _check.host_values(remaining, batch), 0, math.inf, "a count of at least 0")
    _check.in_range("lam", _check.host_values(lam, batch), -math.inf, math.inf, "a number")
    _check.in_range("l_min", leasts, 1, math.inf, "a length of at least 1")
    _check.in_order("l_min", leasts, "l_max", _check.host_values(l_max, batch))
    length: Tensor = _op(influence, uncertainty, rest, weight, shortest, longest, padding == "reflect")
    return length.squeeze(0) if kl.ndim == 1 else length
