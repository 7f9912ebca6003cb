import torch
from torch import Tensor


def independent_set(
    conflict: Tensor, priority: Tensor, eligible: Tensor | None, preselected: Tensor | None
) -> Tensor:
    n = priority.shape[1]
    selected = torch.zeros_like(priority, dtype=torch.bool) if preselected is None else preselected.clone()
    candidate = ~priority.isnan() & ~selected
    if eligible is not None:
        candidate &= eligible
    order = priority.argsort(dim=1, descending=True, stable=True)
    for rank in range(n):
        i = order[:, rank, None]  # [B, 1]: one position of each sequence
        row = conflict.take_along_dim(i[..., None], dim=1).squeeze(1)  # [B, n]
        blocked = (row & selected).any(dim=1, keepdim=True)
        joins = candidate.gather(1, i) & ~blocked
        selected.scatter_(1, i, selected.gather(1, i) | joins)
    return selected
