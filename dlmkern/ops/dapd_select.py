"""dapd_select: one commit step of DAPD."""

import math

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define
from dlmkern.ops.confidence_select import confidence_select

VARIANTS = ("staged", "direct")


def _fake(
    scores: Tensor,
    confidence: Tensor,
    valid: Tensor | None,
    tau: Tensor,
    certain: Tensor,
    late: Tensor,
    symmetric: bool,
) -> Tensor:
    return confidence.new_empty(confidence.shape, dtype=torch.bool)


_op = define(
    "dapd_select(Tensor scores, Tensor confidence, Tensor? valid, Tensor tau, Tensor certain, Tensor late,"
    " bool symmetric) -> Tensor",
    _fake,
)


def dapd_select(
    scores: Tensor,
    confidence: Tensor,
    valid: Tensor | None,
    tau: float | Tensor,
    *,
    variant: str = "staged",
    progress: float | Tensor | None = None,
    certain: float = 1.0,
    late: float = 0.9,
    symmetric: bool = False,
    certain_dtype: torch.dtype = torch.float32,
    late_from: float = 0.5,
    late_graph: bool = True,
) -> Tensor:
    """Chooses the positions to commit together in one step of DAPD (arXiv 2603.12996): an independent set of
    the graph that attention draws between them.

    The m candidates are the valid positions of finite confidence c. In float64, over pairs of these only:

    - Weights s_ij = (scores_ij + scores_ji) / 2, s_ii = 0; degree_i = sum_j s_ij, in order of j.
    - There is an edge from i to j where s_ij / max(max_k s_ik, 1e-8) > tau: relative to the largest weight of
      i, so an edge may go one way only.
    - By falling degree_i c_i, ties to the lower index, each candidate is taken unless it has an edge to one
      that was taken before it.

    Args:
        scores: float ``[B, M, M]`` or ``[M, M]``: the attention that attention_graph adds up; only its
            proportions matter. What is not finite in float32 counts as 0.
        confidence: float ``[B, M]`` or ``[M]``.
        valid: bool ``[B, M]`` or ``[M]``: the positions that may be committed; None for all.
        tau: a number or one a row ``[B]``; not NaN.
        variant: ``"staged"`` adds the candidates with c >= late to a row whose progress is `late_from` or
            more. ``"direct"`` keeps those with c >= certain out of the scan and adds them afterwards: they
            block nobody, but count in degrees and maxima.
        progress: share of the answer that is committed, a number or ``[B]``; None: no row is late.
        certain, late: of the variants.
        symmetric: draw each edge in both directions.
        certain_dtype: c is rounded to it before the comparison with `certain`. The official code compares in
            the dtype of the logits: in bfloat16 c > 0.998 is 1.
        late_from: see `variant`.
        late_graph: False: a late row commits c >= late and the most confident candidate, and no graph is used
            (the paper; its code goes on with the graph).

    Returns:
        bool, the shape of `confidence`. A row with a candidate has one selected.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(scores, confidence, valid):
        return _arrays.call(
            dapd_select,
            {"scores": scores, "confidence": confidence, "valid": valid},
            {"tau": tau, "progress": progress},
            variant=variant, certain=certain, late=late, symmetric=symmetric, certain_dtype=certain_dtype,
            late_from=late_from, late_graph=late_graph,
        )  # fmt: skip
    if variant not in VARIANTS:
        raise ValueError(f"variant: expected one of {', '.join(VARIANTS)}, got {variant!r}")
    for name, flag in (("symmetric", symmetric), ("late_graph", late_graph)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}")
    certain, late = _number("certain", certain), _number("late", late)
    late_from = _number("late_from", late_from)
    if certain_dtype not in _check.FLOATS:
        raise TypeError(f"certain_dtype: expected a floating-point dtype, got {certain_dtype!r}")
    a = _check.tensor("scores", scores, _check.FLOATS)
    if a.ndim not in (2, 3) or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"scores: expected shape [M, M] or [B, M, M], got {list(a.shape)}")
    c = _check.companion("confidence", confidence, "scores", a, a.shape[:-1], _check.FLOATS)
    if valid is not None:
        valid = _check.companion("valid", valid, "scores", a, a.shape[:-1], _check.BOOL)
    a, c = (x if x.dtype in _check.STATISTICS else x.float() for x in (a, c))
    single = a.ndim == 2
    if single:
        a, c, valid = a.unsqueeze(0), c.unsqueeze(0), None if valid is None else valid.unsqueeze(0)
    batch = c.shape[0]
    tau = _numbers("tau", tau, batch, c.device)
    never = torch.full((batch,), math.inf, dtype=torch.float64, device=c.device)
    is_late = None
    if variant == "staged" and progress is not None:
        is_late = _numbers("progress", progress, batch, c.device) >= late_from
    sure = never
    if variant == "direct":
        sure = torch.full_like(never, least_that_rounds_up_to(certain, certain_dtype))
    selected: Tensor = _op(
        a, c, valid, tau, sure, never if is_late is None else torch.where(is_late, late, never), symmetric
    )
    if is_late is not None and not late_graph:
        finite = c.isfinite() if valid is None else valid & c.isfinite()
        without = confidence_select(confidence=c, mask=finite, tau=late).selected
        selected = torch.where(is_late[:, None], without, selected)
    return selected.squeeze(0) if single else selected


def _number(name: str, value: object) -> float:
    if not _check.is_number(value):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    number = _check.as_float(name, value)
    _check.in_range(name, [number], -math.inf, math.inf, "a number")
    return number


def _numbers(name: str, value: float | Tensor, batch: int, device: torch.device) -> Tensor:
    rows = _check.per_row(name, value, batch, torch.float64, device)
    _check.in_range(name, _check.host_values(value, batch), -math.inf, math.inf, "a number")
    return rows


def least_that_rounds_up_to(value: float, dtype: torch.dtype) -> float:
    """The least float64 that becomes `value` or more when it is rounded to `dtype`, ties to even."""
    if dtype == torch.float64 or value == -math.inf:
        return value
    info = torch.finfo(dtype)

    def spacing(x: float) -> float:  # of the numbers of `dtype` about x
        return max(math.ldexp(info.eps, math.frexp(x)[1] - 1), info.smallest_normal * info.eps)

    value = min(max(value, info.min), info.max + spacing(info.max))  # what rounds to this is infinite
    step = spacing(value)
    reached = math.ceil(value / step) * step
    step = spacing(math.nextafter(reached, -math.inf))  # down to the next lower number
    middle = reached - step / 2
    return middle if reached / step % 2 == 0 else math.nextafter(middle, math.inf)
