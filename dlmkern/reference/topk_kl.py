import torch
from torch import Tensor


def topk_kl(ids: Tensor, logp: Tensor, prev_ids: Tensor, prev_logp: Tensor, prev_floor: Tensor) -> Tensor:
    same = (
        ids[..., :, None] == prev_ids[..., None, :]
    )  # [B, n, k, k]: a current id against every previous one
    found = torch.where(same, prev_logp[..., None, :], 0.0).sum(-1)
    log_q = torch.where(same.any(-1), found, prev_floor[..., None])
    return torch.where(logp == -torch.inf, 0.0, logp.exp() * (logp - log_q)).sum(-1)
