"""What the transformers of this package are built from."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms and rotations: float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension, in float32 (for float64 input, in float64)."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(compute_dtype(x.dtype))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * y.to(x.dtype)
        return y if self.bias is None else y + self.bias


def rotary_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al., 2021, arXiv:2104.09864).

    Args:
        positions: token positions, `[n]` or `[B, 1, n]` (the 1 stands for the heads).
        head_dim: size of a head.
        theta: base of the frequencies; pair `i` turns by `positions / theta ** (2 * i / head_dim)`.
        dtype: float32 or float64.

    Returns:
        cos, sin: `[..., n, head_dim]`; each frequency appears twice, at `i` and at `i + head_dim / 2`.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    angles = positions.to(dtype).unsqueeze(-1) * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys `[B, H, n, head_dim]` by a `rotary_table`; computed in the dtype of the table."""
    cos, sin = table
    y = x.to(cos.dtype)
    first, second = y.chunk(2, dim=-1)
    return (y * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
