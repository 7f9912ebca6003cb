import torch
from torch import Tensor

from dlmkern.reference.conflict_matrix import gather_at_tokens
from dlmkern.reference.independent_set import independent_set


def cap_select(
    input: Tensor,  # noqa: A002
    token: Tensor,
    logsumexp: Tensor | None,
    mask: Tensor | None,
    tau_low: Tensor,
    tau_high: Tensor,
    gamma: Tensor,
    strict: bool,
) -> tuple[Tensor, Tensor]:
    gathered = gather_at_tokens(input, token)
    if logsumexp is None:
        log_prob = gathered.log()
        confidence = gathered.diagonal(dim1=1, dim2=2).clone()
    else:
        log_prob = gathered - logsumexp.double()[..., None]
        confidence = log_prob.diagonal(dim1=1, dim2=2).exp()
    conflict = log_prob + log_prob.mT > gamma[:, None, None]

    open_ = ~confidence.isnan() if mask is None else mask & ~confidence.isnan()
    candidate = open_ & (confidence >= tau_low[:, None])
    high = candidate & (confidence >= tau_high[:, None])
    selected = independent_set(conflict, confidence, candidate, None if strict else high)
    return selected | most_confident(confidence, open_), confidence


def most_confident(confidence: Tensor, open_: Tensor) -> Tensor:
    """The open position of highest confidence, lowest index at a tie, as a [B, n] mask."""
    if confidence.shape[1] == 0:
        return torch.zeros_like(open_)
    best = torch.where(open_, confidence, -torch.inf).argmax(dim=1, keepdim=True)
    return torch.zeros_like(open_).scatter(1, best, True) & open_
