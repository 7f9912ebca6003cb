"""What the transformers of this package are built from."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


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


def attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Bidirectional attention with grouped key/value heads.

    Args:
        q: queries `[B, Hq, n, head_dim]`, rotated.
        k: keys `[B, Hkv, L, head_dim]`, rotated; `Hkv` divides `Hq`.
        v: values `[B, Hkv, L, head_dim]`.
        key_mask: bool `[B, 1, 1, L]`, True where the key takes part. None: all keys do.

    Returns:
        `[B, Hq, n, head_dim]`.
    """
    batch, heads, n, size = q.shape
    # The query heads of a group see the same keys: as more queries of one head they need no copies of these.
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1] * n, size)
    attended: Tensor = scaled_dot_product_attention(grouped, k, v, attn_mask=key_mask)
    return attended.reshape(batch, heads, n, size)


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`attention`, bit for bit, and the log-sum-exp where its kernel hands that out.

    Returns:
        `[B, Hq, n, head_dim]`, and `[B, Hq, n]` in float32 (float64 for float64 `q`): the logarithm, in nats,
        of the sum over the keys of exp(q k / sqrt(head_dim)). None where it would take a second computation.
    """
    batch, heads, n, size = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1] * n, size)
    if not _picks_cpu_flash(grouped, k, v, key_mask):
        return attention(q, k, v, key_mask), None
    bias = None if key_mask is None else _additive(key_mask, q.dtype)
    attended, lse = _cpu_flash(grouped, k, v, attn_mask=bias)
    return attended.reshape(batch, heads, n, size), lse.reshape(batch, heads, n)


def _picks_cpu_flash(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> bool:
    """Whether torch would take its flash kernel for the CPU, and that is as it is known to be."""
    if q.device.type != "cpu" or torch.compiler.is_compiling() or not _has_cpu_flash():
        return False
    choice: int = torch._fused_sdp_choice(q, k, v, attn_mask=key_mask)
    return choice == _FLASH


def _additive(key_mask: Tensor, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(key_mask.shape, dtype=dtype, device=key_mask.device)
    return bias.masked_fill_(~key_mask, -torch.inf)


# Both are private to torch, which may change or drop them.
_FLASH = 1  # of torch._fused_sdp_choice


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """What `scaled_dot_product_attention` calls."""
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=attn_mask
    )
    return result


@functools.cache
def _has_cpu_flash() -> bool:
    """Whether this version of torch has the kernel, and it does what is expected of it."""
    q, k, v = torch.linspace(-1, 1, 96).reshape(3, 2, 1, 2, 8).unbind()
    mask = torch.tensor([True, False]).expand(2, 1, 1, 2)
    try:
        torch._fused_sdp_choice(q, k, v, attn_mask=mask)
        attended, lse = _cpu_flash(q, k, v, _additive(mask, q.dtype))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    scores = (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf)
    same = torch.allclose(attended, scores.softmax(-1) @ v, atol=1e-6)
    return same and lse.shape == q.shape[:3] and torch.allclose(lse, scores.logsumexp(-1), atol=1e-6)
