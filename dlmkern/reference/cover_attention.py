import torch
from torch import Tensor

from dlmkern.reference.block_attention import CHUNK_BYTES


def cover_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cached: Tensor,
    v_cached: Tensor,
    seeds: Tensor,
    lengths: Tensor | None,
    shift: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((batch, heads, length), -torch.inf, dtype=wide, device=q.device)
    if out.numel() == 0:
        return out, lse
    here = seeds[:, None, :, None]
    keys, values = torch.where(here, k_cached, k), torch.where(here, v_cached, v)
    column = torch.arange(length, device=q.device) + shift
    column = column.where(column < length, -1).expand(batch, length)  # that each row predicts
    own = column.clamp(min=0)
    column = torch.where(seeds.gather(1, own), column, -1)
    index = own[:, None, :, None].expand(k.shape)
    own_k, own_v = k.gather(2, index), v.gather(2, index)
    return attend(q, keys, values, column, own_k, own_v, lengths, scale)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    column: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    lengths: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention in which row i of `q [B, Hq, n, d]` finds `own_k[:, :, i]` and `own_v[:, :, i]` in the column
    `column[:, i]` (-1: nowhere) of `keys` and `values [B, Hkv, L, d]`. Out, and the log-sum-exp."""
    batch, heads, n, _ = q.shape
    kv_heads, length = keys.shape[1:3]
    groups = heads // kv_heads
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((batch, heads, n), dtype=wide, device=q.device)
    keys, values = keys.to(wide), values.to(wide)
    places = torch.arange(length, device=q.device)
    beyond = None
    if lengths is not None:
        beyond = places >= lengths[:, None]  # [B, L]
        # A weight of zero does not silence a NaN or an infinity.
        values = values.masked_fill(beyond[:, None, :, None], 0.0)
    rows = max(1, CHUNK_BYTES // (wide.itemsize * batch * heads * max(length, 1)))
    for first in range(0, n, rows):
        part = slice(first, first + rows)
        # [B, Hkv, groups, rows, ...]: the query heads that share a key head side by side.
        queries = q[:, :, part].to(wide).unflatten(1, (kv_heads, groups))
        scores = (queries @ keys.unsqueeze(2).mT).mul_(scale)
        mine = (queries * own_k[:, :, None, part].to(wide)).sum(-1, keepdim=True).mul_(scale)
        replaced = (places == column[:, part, None])[:, None, None]  # [B, 1, 1, rows, L]
        hidden = replaced if beyond is None else replaced | beyond[:, None, None, None]
        scores = scores.masked_fill_(hidden, -torch.inf)
        real = (column[:, part] >= 0)[:, None, None, :, None]
        if lengths is not None:
            real = real & (column[:, part] < lengths[:, None])[:, None, None, :, None]
        mine = mine.masked_fill_(~real, -torch.inf)
        peak = torch.maximum(scores.amax(dim=-1, keepdim=True), mine)
        base = torch.where(peak == -torch.inf, 0.0, peak)
        weights, weight = scores.sub_(base).exp_(), (mine - base).exp()
        total = weights.sum(dim=-1, keepdim=True) + weight
        mean = weights @ values.unsqueeze(2)
        mean += torch.where(real, weight * own_v[:, :, None, part].to(wide), 0.0)
        mean /= torch.where(total == 0, 1.0, total)
        out[:, :, part] = mean.flatten(1, 2).to(q.dtype)
        lse[:, :, part] = (peak + total.log()).flatten(1, 2).squeeze(-1)
    return out, lse
