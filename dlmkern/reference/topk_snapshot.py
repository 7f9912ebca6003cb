import torch
from torch import Tensor

from dlmkern.reference.rows import row_chunks, row_softmax


def topk_snapshot(logits: Tensor, k: int, banned_token: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, _ = logits.shape
    ids = torch.empty((batch, n, k), dtype=torch.int64, device=logits.device)
    logp = torch.empty((batch, n, k), dtype=torch.float64, device=logits.device)
    floor = torch.empty((batch, n), dtype=torch.float64, device=logits.device)
    for rows in row_chunks(logits):
        x = logits[rows].double()
        if banned_token >= 0:
            x = torch.cat([x[..., :banned_token], x[..., banned_token + 1 :]], dim=-1)
        p = row_softmax(x)
        valid = (p.token >= 0)[..., None]
        order = x.argsort(dim=-1, descending=True, stable=True)
        log_prob = p.log_prob.gather(-1, order)
        top = order[..., :k]
        if banned_token >= 0:
            top = top + (top >= banned_token)
        ids[rows] = torch.where(valid, top, -1)
        logp[rows] = log_prob[..., :k]
        tail = log_prob[..., k:].exp().sum(-1)  # summed by itself: 1 - sum(top) would cancel
        spread = tail.clamp(min=1e-12) / max(x.shape[-1] - k, 1)
        floor[rows] = torch.where(valid.squeeze(-1), spread.log(), torch.nan)
    return ids, logp, floor
