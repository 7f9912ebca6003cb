import torch
from torch import Tensor

from dlmkern.ops.cover_verify import Verdict


def cover_verify(
    confidence: Tensor,
    token: Tensor,
    predicted: Tensor,
    seeds: Tensor,
    remasks: Tensor,
    tau_replace: float,
    max_remasks: int,
) -> Tensor:
    doubted = torch.where(remasks < max_remasks, Verdict.REMASK, Verdict.KEEP)
    changed = torch.where(confidence.double() >= tau_replace, Verdict.REPLACE, doubted)
    verdict = torch.where(predicted == token, Verdict.KEEP, changed)
    return torch.where(seeds, verdict, Verdict.NONE).long()
