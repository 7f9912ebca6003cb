import torch
from torch import Tensor

from dlmkern.reference.independent_set import independent_set

LEAST_PEAK = 1e-8  # of a row's weights, as in the official code
LARGEST = torch.finfo(torch.float32).max


def dapd_select(
    scores: Tensor,
    confidence: Tensor,
    valid: Tensor | None,
    tau: Tensor,
    certain: Tensor,
    late: Tensor,
    symmetric: bool,
) -> Tensor:
    c = confidence.double()
    many = c.shape[1]
    if many == 0:
        return torch.zeros_like(c, dtype=torch.bool)
    candidate = c.isfinite() if valid is None else valid & c.isfinite()
    a = scores.double()
    a = torch.where(a.abs() <= LARGEST, a, 0.0)
    pair = candidate[:, :, None] & candidate[:, None, :]
    pair &= ~torch.eye(many, dtype=torch.bool, device=c.device)
    weight = torch.where(pair, (a + a.mT) / 2, 0.0)
    degree = torch.zeros_like(c)
    for j in range(many):  # in order, so that every backend rounds alike and ties are ties
        degree += weight[:, :, j]
    peak = weight.amax(dim=-1, keepdim=True).clamp(min=LEAST_PEAK)
    edge = weight / peak > tau[:, None, None]
    if symmetric:
        edge = edge | edge.mT
    sure = candidate & (c >= certain[:, None])
    independent = independent_set(edge, degree * c, candidate & ~sure, None)
    return independent | sure | (candidate & (c >= late[:, None]))
