import torch
from torch import Tensor


def topk_kl(ids: Tensor, logp: Tensor, prev_ids: Tensor, prev_logp: Tensor, prev_floor: Tensor) -> Tensor:
    # [B, n, k, k]: a current id against every previous one
    same = ids[..., :, None] == prev_ids[..., None, :]
    found = torch.where(same, prev_logp[..., None, :], 0.0).sum(-1)
    log_q = torch.where(same.any(-1), found, prev_floor[..., None])
    p = logp.exp()
    return torch.where(p == 0, 0.0, p * (logp - log_q)).sum(-1)
