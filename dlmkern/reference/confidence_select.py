import torch
from torch import Tensor


def confidence_select(confidence: Tensor, mask: Tensor | None, parameter: Tensor, rule: int) -> Tensor:
    c = confidence.double()
    candidate = ~c.isnan() if mask is None else mask & ~c.isnan()
    # Candidates by falling confidence, ties to the lower index; NaN, and so everything else, comes last.
    order = torch.where(candidate, -c, torch.nan).argsort(dim=1, stable=True)
    c, candidate = c.gather(1, order), candidate.gather(1, order)
    rank = torch.arange(1, c.shape[1] + 1, device=c.device).double()
    p = parameter[:, None]
    if rule == 0:  # threshold
        passes = (rank == 1) | (c >= p)
    elif rule == 1:  # factor
        passes = (rank == 1) | ((rank + 1) * (1 - c) < p)
    elif rule == 2:  # schedule
        passes = rank <= p
    else:  # factor_official
        passes = (rank == 1) | (c >= 1 - p / (rank + 1))
        # The official scan cannot tell that it stopped at the last rank from that everything passed.
        candidates = candidate.sum(dim=1, keepdim=True)
        passes |= (passes & candidate).sum(dim=1, keepdim=True) == candidates - 1
    return torch.zeros_like(candidate).scatter(1, order, passes & candidate)
