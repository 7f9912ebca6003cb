import torch
from torch import Tensor

from dlmkern.reference.cover_attention import attend


def diagonal_correction(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cached: Tensor,
    v_cached: Tensor,
    seeds: Tensor,
    lengths: Tensor | None,
    positions: Tensor | None,
    shift: int,
    scale: float,
    recompute_below: float,
) -> None:
    batch, heads, n, _ = q.shape
    kv_heads, length = k_cached.shape[1:3]
    if out.numel() == 0 or length == 0:
        return
    rows = torch.arange(n, device=q.device)
    shown = (rows + shift).clamp(max=n - 1)  # the row that shows what each row predicts
    place = (rows.expand(batch, n) if positions is None else positions)[:, shown]
    end = length if lengths is None else lengths.clamp(0, length)[:, None]
    verified = seeds[:, shown] & (rows + shift < n) & (place >= 0) & (place < end)
    column = torch.where(verified, place, -1)

    def each_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(heads // kv_heads, dim=1).double()

    own_k, own_v = k[:, :, shown], v[:, :, shown]
    index = column.clamp(min=0)[:, None, :, None].expand(own_k.shape)
    cached_k, cached_v = each_head(k_cached.gather(2, index)), each_head(v_cached.gather(2, index))
    before = lse.double()
    a = (scale * (q * cached_k).sum(-1) - before).exp()
    gap = scale * (q * each_head(own_k)).sum(-1) - before  # log b
    # Both of 1 - a and b divided by exp(top), so that neither overflows.
    top = gap.clamp(min=0)
    small, b = (-top).exp(), (gap - top).exp()
    r = (1 - a) * small + b
    weights = [x.unsqueeze(-1) for x in (small / r, a * small / r, b / r)]
    closed = weights[0] * out - weights[1] * cached_v + weights[2] * each_head(own_v)

    if positions is None:
        here = seeds[:, None, :, None]
        keys, values = torch.where(here, k_cached, k), torch.where(here, v_cached, v)
    else:
        keys, values = k_cached, v_cached
    anew, lse_anew = attend(q, keys, values, column, own_k, own_v, lengths, scale)
    trusted = r > recompute_below * small
    verified = verified[:, None]
    corrected = torch.where(trusted.unsqueeze(-1), closed.to(out.dtype), anew)
    out.copy_(torch.where(verified.unsqueeze(-1), corrected, out))
    corrected = torch.where(trusted, (before + top + r.log()).to(lse.dtype), lse_anew)
    lse.copy_(torch.where(verified, corrected, lse))
