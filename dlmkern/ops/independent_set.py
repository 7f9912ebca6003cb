"""independent_set: greedy maximal independent set in order of priority."""

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define


def _fake(conflict: Tensor, priority: Tensor, eligible: Tensor | None, preselected: Tensor | None) -> Tensor:
    return priority.new_empty(priority.shape, dtype=torch.bool)


_op = define(
    "independent_set(Tensor conflict, Tensor priority, Tensor? eligible, Tensor? preselected) -> Tensor",
    _fake,
)


def independent_set(
    conflict: Tensor, priority: Tensor, eligible: Tensor | None = None, preselected: Tensor | None = None
) -> Tensor:
    """Goes through the positions by falling priority and takes each that has no conflict with what was taken
    before.

    Args:
        conflict: bool ``[B, n, n]`` or ``[n, n]``: ``conflict[i, j]`` says that i must not join while j is
            in. The candidate's row is what is tested, so an asymmetric matrix is a directed graph. The
            diagonal is ignored.
        priority: float ``[B, n]`` or ``[n]``: higher first, ties to the lower index; NaN is never taken,
            -inf may be.
        eligible: bool ``[B, n]``: the positions that may be taken; None for all.
        preselected: bool ``[B, n]``: in from the start, eligible or not, not tested against each other; None
            for none.

    Returns:
        bool, the shape of `priority`: preselected or taken.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(conflict, priority, eligible, preselected):
        return _arrays.call(
            independent_set,
            {"conflict": conflict, "priority": priority, "eligible": eligible, "preselected": preselected},
        )
    c = _check.tensor("conflict", conflict, _check.BOOL)
    shape = c.shape[:-1]
    if c.ndim not in (2, 3) or c.shape[-1] != c.shape[-2]:
        raise ValueError(f"conflict: expected shape [n, n] or [B, n, n], got {list(c.shape)}")
    p = _check.companion("priority", priority, "conflict", c, shape, _check.FLOATS)
    if p.dtype not in _check.STATISTICS:
        p = p.float()
    if eligible is not None:
        eligible = _check.companion("eligible", eligible, "conflict", c, shape, _check.BOOL)
    if preselected is not None:
        preselected = _check.companion("preselected", preselected, "conflict", c, shape, _check.BOOL)
    if c.ndim == 3:
        return _op(c, p, eligible, preselected)  # type: ignore[no-any-return]
    selected: Tensor = _op(
        c.unsqueeze(0),
        p.unsqueeze(0),
        None if eligible is None else eligible.unsqueeze(0),
        None if preselected is None else preselected.unsqueeze(0),
    )
    return selected.squeeze(0)
