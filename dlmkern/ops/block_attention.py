"""block_attention: the queries of a block over a cache of keys and values."""

from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define


class BlockAttention(NamedTuple):
    """What the queries gathered, and what it takes to combine it with attention over other keys."""

    out: Tensor  # [B, Hq, n, d], the dtype of q
    lse: Tensor  # [B, Hq, n] float32 (float64 for float64 q): log sum exp(scale q k), in nats


def _fake(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide)


_op = define(
    "block_attention(Tensor q, Tensor k, Tensor v, Tensor? lengths, float scale) -> (Tensor out, Tensor lse)",
    _fake,
)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, *, scale: float | None = None
) -> BlockAttention:
    """Attention of a block's queries over a cache of keys and values, in both directions: no causal mask.

    Query head h attends to key head h // (Hq / Hkv). Scores and sums are float32 or better.

    Args:
        q: float ``[B, Hq, n, d]``.
        k, v: ``[B, Hkv, L, d]`` of the same dtype and any strides; Hkv divides Hq.
        lengths: integers ``[B]`` in [0, L]: sequence b attends to its first lengths[b] keys, whatever lies
            beyond them, even NaN; None for all L.
        scale: of q k before the softmax; None for 1 / sqrt(d).

    Returns:
        BlockAttention. Without any key, `out` is 0 and `lse` -inf. Lengths on an accelerator are not checked:
        there are never less than 0 or more than L keys. The results carry no gradient.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(q, k, v, lengths):
        return _arrays.call(block_attention, {"q": q, "k": k, "v": v, "lengths": lengths}, scale=scale)
    q, k = _check.query_and_key(q, k)
    batch, _, _, size = q.shape
    length = k.shape[2]
    v = _check.companion("v", v, "k", k, k.shape, (q.dtype,))
    if lengths is not None:
        lengths = _check.companion("lengths", lengths, "q", q, (batch,), _check.INTEGERS)
        _check.elements_in_range("lengths", lengths, 0, length)
        lengths = lengths.long()
    return BlockAttention(*_op(q, k, v, lengths, _check.scale(scale, size)))
