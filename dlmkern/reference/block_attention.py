import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20  # of the scores in work


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, n, size = q.shape
    kv_heads, length = k.shape[1:3]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((batch, heads, n), -torch.inf, dtype=wide, device=q.device)
    if length == 0 or out.numel() == 0:
        return out, lse
    keys, values = k.to(wide), v.to(wide)
    if lengths is not None:
        beyond = torch.arange(length, device=q.device) >= lengths[:, None]  # [B, L]
        # A weight of zero does not silence a NaN or an infinity.
        values = values.masked_fill(beyond[:, None, :, None], 0.0)
    rows = max(1, CHUNK_BYTES // (wide.itemsize * batch * heads * length))
    for first in range(0, n, rows):
        part = slice(first, first + rows)
        # The query heads that share a key head are more queries of it: [B, Hkv, groups * rows, d].
        queries = q[:, :, part].to(wide).reshape(batch, kv_heads, -1, size)
        scores = (queries @ keys.mT).mul_(scale)  # [B, Hkv, groups * rows, L]
        if lengths is not None:
            scores.masked_fill_(beyond[:, None, None, :], -torch.inf)
        peak = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(torch.where(peak == -torch.inf, 0.0, peak)).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        shape = (batch, heads, -1)
        mean = (weights @ values) / torch.where(total == 0, 1.0, total)
        out[:, :, part] = mean.reshape(*shape, size).to(q.dtype)
        lse[:, :, part] = (peak + total.log()).reshape(shape)
    return out, lse
