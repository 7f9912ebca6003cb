"""The attention of a pass: torch's, for grouped heads, and its log-sum-exp where torch knows it."""

import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Bidirectional attention with grouped key/value heads.

    Args:
        q: queries `[B, Hq, n, head_dim]`, rotated.
        k: keys `[B, Hkv, L, head_dim]`, rotated; `Hkv` divides `Hq`.
        v: values `[B, Hkv, L, head_dim]`.
        key_mask: bool `[B, 1, 1, L]`, True where the key takes part. None: all keys do.
        scale: of q k before the softmax. None: 1 / sqrt(head_dim).

    Returns:
        `[B, Hq, n, head_dim]`.
    """
    batch, heads, n, size = q.shape
    # The query heads of a group see the same keys: as more queries of one head they need no copies of these.
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1] * n, size)
    attended: Tensor = scaled_dot_product_attention(grouped, k, v, attn_mask=key_mask, scale=scale)
    return attended.reshape(batch, heads, n, size)


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """`attention`, bit for bit, and the log-sum-exp where its kernel hands that out.

    Returns:
        `[B, Hq, n, head_dim]`, and `[B, Hq, n]` in float32 (float64 for float64 `q`): the logarithm, in nats,
        of the sum over the keys of exp(scale q k). None where it would take a second computation.
    """
    batch, heads, n, size = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1] * n, size)
    if not _picks_cpu_flash(grouped, k, v, key_mask):
        return attention(q, k, v, key_mask, scale), None
    bias = None if key_mask is None else _additive(key_mask, q.dtype)
    attended, lse = _cpu_flash(grouped, k, v, attn_mask=bias, scale=scale)
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


def _cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """What `scaled_dot_product_attention` calls."""
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=attn_mask, scale=scale
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
