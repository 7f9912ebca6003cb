import torch
from torch import Tensor


def depga_block(
    kl: Tensor, entropy: Tensor, remaining: Tensor, lam: Tensor, l_min: Tensor, l_max: Tensor, reflect: bool
) -> Tensor:
    width = torch.minimum(l_max, remaining).clamp(0, kl.shape[1])[:, None]
    inside = torch.arange(kl.shape[1], device=kl.device) < width  # [B, W]
    influence = normalise(smooth(kl.double(), inside, reflect), width)
    uncertainty = normalise(smooth(entropy.double(), inside, reflect), width)
    score = influence - lam[:, None] * uncertainty
    leading = (inside & (score >= 0)).long().cumprod(dim=1).sum(dim=1)
    length = torch.minimum(torch.minimum(torch.maximum(leading, l_min), l_max), remaining)
    return torch.where(remaining < l_min, remaining, length)


def smooth(x: Tensor, inside: Tensor, reflect: bool) -> Tensor:
    """Centred moving average of three over each row's window; NaN outside the window."""
    edge = torch.zeros_like(x[:, :1])
    before = torch.cat([x[:, :1] if reflect else edge, x[:, :-1]], dim=1)
    after = torch.cat([x[:, 1:], edge], dim=1)
    after_inside = torch.cat([inside[:, 1:], edge.bool()], dim=1)
    after = torch.where(after_inside, after, x if reflect else 0.0)
    return torch.where(inside, (before + x + after) / 3, torch.nan)


def normalise(x: Tensor, width: Tensor) -> Tensor:
    """Robust z-score of each row's window, with order statistics that are elements of it."""
    if x.shape[1] == 0:
        return x
    ordered = x.sort(dim=1).values  # NaN last, and so is what lies outside the window
    last = (width - 1).clamp(min=0)

    def quantile(numerator: int) -> Tensor:
        return ordered.gather(1, last * numerator // 4)

    return (x - quantile(2)) / (quantile(3) - quantile(1)).abs().clamp(min=1e-15)
