"""topk_kl: DepCap's official truncated KL between two snapshots."""

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define
from dlmkern.ops.topk_snapshot import TopKSnapshot


def _fake(ids: Tensor, logp: Tensor, prev_ids: Tensor, prev_logp: Tensor, prev_floor: Tensor) -> Tensor:
    return logp.new_empty(ids.shape[:2], dtype=torch.float64)


_op = define(
    "topk_kl(Tensor ids, Tensor logp, Tensor prev_ids, Tensor prev_logp, Tensor prev_floor) -> Tensor", _fake
)


def topk_kl(curr: TopKSnapshot, prev: TopKSnapshot) -> Tensor:
    """KL(p || q) in nats, cut down to the current snapshot's tokens: DepCap's influence as its official code
    has it.

    sum over v in curr.ids of p(v) (log p(v) - log q(v)), where log q(v) is prev's log-probability of v, or
    its floor if v is not among its ids. p(v) = 0 adds 0. There is no term for the tail, so the result can be
    slightly negative (arXiv 2604.15750; the paper's text has the exact KL, which is token_stats' `kl`).

    Args:
        curr, prev: snapshots of the same positions with the same k (TopKSnapshot, from topk_snapshot).

    Returns:
        float64 ``[B, n]``, or ``[n]`` for snapshots without B; NaN where either row defines no distribution.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    curr, prev = _snapshot("curr", curr), _snapshot("prev", prev)
    if not _arrays.all_tensors(*curr, *prev):
        return _arrays.call(topk_kl, {"curr": curr, "prev": prev})
    ids = _check.tensor("curr.ids", curr.ids, _check.INTEGERS).long()
    if ids.ndim not in (2, 3):
        raise ValueError(f"curr.ids: expected shape [n, k] or [B, n, k], got {list(ids.shape)}")

    def part(name: str, x: Tensor, shape: tuple[int, ...], dtypes: _check.Dtypes) -> Tensor:
        return _check.companion(name, x, "curr.ids", ids, shape, dtypes)

    rows = ids.shape[:-1]
    logp = part("curr.logp", curr.logp, ids.shape, _check.STATISTICS).double()
    prev_ids = part("prev.ids", prev.ids, ids.shape, _check.INTEGERS).long()
    prev_logp = part("prev.logp", prev.logp, ids.shape, _check.STATISTICS).double()
    prev_floor = part("prev.floor", prev.floor, rows, _check.STATISTICS).double()
    if ids.ndim == 3:
        return _op(ids, logp, prev_ids, prev_logp, prev_floor)  # type: ignore[no-any-return]
    kl: Tensor = _op(*(x.unsqueeze(0) for x in (ids, logp, prev_ids, prev_logp, prev_floor)))
    return kl.squeeze(0)


def _snapshot(name: str, value: TopKSnapshot) -> TopKSnapshot:
    if not isinstance(value, tuple) or len(value) != 3:
        raise TypeError(f"{name}: expected a TopKSnapshot, got {type(value).__name__}")
    return TopKSnapshot(*value)
