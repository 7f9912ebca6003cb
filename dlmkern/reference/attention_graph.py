import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20  # of the scores in work


def attention_graph(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    rows: Tensor | None,
    lengths: Tensor | None,
    lse: Tensor | None,
    scale: float,
    out: Tensor,
) -> None:
    batch, heads, n, _ = q.shape
    kv_heads, length = k.shape[1:3]
    if rows is None:
        rows = positions
    if heads == 0 or n == 0 or length == 0 or out.numel() == 0:
        return
    end = positions.new_full((batch,), length) if lengths is None else lengths.clamp(max=length)
    real = (positions >= 0) & (positions < end[:, None]) & (rows >= 0) & (rows < n)  # [B, M]
    place, row = (x.clamp(0, limit - 1)[..., None] for x, limit in ((positions, length), (rows, n)))
    hidden = torch.arange(length, device=q.device) >= end[:, None]  # [B, L]
    total = torch.zeros_like(out)
    for head in range(heads):
        queries = q[:, head].take_along_dim(row, dim=1).to(out.dtype) * scale  # [B, M, d]
        keys = k[:, head // (heads // kv_heads)].to(out.dtype)  # [B, L, d]
        if lse is None:
            base = _logsumexp(queries, keys, None if lengths is None else hidden)
        else:
            base = lse[:, head].take_along_dim(row[..., 0], dim=1)
        scores = queries @ keys.take_along_dim(place, dim=1).mT  # [B, M, M]
        total += scores.sub_(base[..., None]).exp_()
    pair = real[:, :, None] & real[:, None, :]
    out.copy_(torch.where(pair, out + total / heads, out))  # adding 0 to padding would lose a -0.0


def _logsumexp(queries: Tensor, keys: Tensor, hidden: Tensor | None) -> Tensor:
    """Over all keys, ``[B, M]``."""
    batch, many, _ = queries.shape
    rows = max(1, CHUNK_BYTES // (queries.itemsize * batch * keys.shape[1]))
    parts = []
    for first in range(0, many, rows):
        scores = queries[:, first : first + rows] @ keys.mT
        if hidden is not None:
            scores.masked_fill_(hidden[:, None, :], -torch.inf)
        parts.append(scores.logsumexp(dim=-1))
    return torch.cat(parts, dim=1)
