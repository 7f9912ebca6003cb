import torch
from torch import Tensor


def cover_seeds(
    uncertainty: Tensor,
    influence: Tensor | None,
    drift: Tensor | None,
    eligible: Tensor | None,
    most: Tensor,
    additive: bool,
    above_mean: bool,
) -> tuple[Tensor, Tensor]:
    parts = [x.double() for x in (uncertainty, influence, drift) if x is not None]
    ok = torch.ones_like(uncertainty, dtype=torch.bool) if eligible is None else eligible
    for x in parts:
        ok = ok & x.isfinite()
    n = ok.shape[1]
    if n == 0:
        return ok, torch.zeros_like(uncertainty, dtype=torch.float64)

    def share(x: Tensor) -> Tensor:
        x = torch.where(ok, x.clamp(min=0), 0.0)
        largest = x.amax(-1, keepdim=True)
        return x / torch.where(largest > 0, largest, 1.0)

    factors = [share(x) for x in parts]
    if drift is not None:
        factors[-1] = 1 - factors[-1]
    score = factors[0]
    for factor in factors[1:]:
        score = score + factor if additive else score * factor
    score = torch.where(ok, score, 0.0)
    total = torch.zeros_like(score[:, 0])
    for i in range(n):  # in order, so that every backend rounds alike
        total = total + score[:, i]
    if above_mean:
        suspects = (ok & (score > (total / ok.sum(-1).clamp(min=1))[:, None])).sum(-1).double()
    else:
        largest = score.amax(-1)
        suspects = total / torch.where(largest > 0, largest, 1.0)
    # The first ceil(sqrt(suspects)) ranks r, counted from 0, are those with r * r < suspects.
    order = score.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(n, device=order.device).expand_as(order))
    seeds = (score > 0) & (rank * rank < suspects[:, None]) & (rank < most[:, None])
    return seeds, score
