"""cover_attention: what COVER's seeds predict and what all others see, in one attention."""

from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define


class CoverAttention(NamedTuple):
    """What the queries gathered."""

    out: Tensor  # [B, Hq, L, d], the dtype of q
    lse: Tensor  # [B, Hq, L] float32 (float64 for float64 q): log sum exp(scale q k), in nats


def _fake(
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
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide)


_op = define(
    "cover_attention(Tensor q, Tensor k, Tensor v, Tensor k_cached, Tensor v_cached, Tensor seeds,"
    " Tensor? lengths, int shift, float scale) -> (Tensor out, Tensor lse)",
    _fake,
)


def cover_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cached: Tensor,
    v_cached: Tensor,
    seeds: Tensor,
    lengths: Tensor | None = None,
    *,
    shift: int = 0,
    scale: float | None = None,
) -> CoverAttention:
    """Attention of a pass in which the seeds are masked, yet seen as they were (COVER, arXiv 2602.06161).

    The pass shows a mask at every seed, a committed token that is to be verified. All queries see the seeds'
    columns as an earlier pass cached them, when their tokens were shown. Only the query that predicts a seed
    sees that seed's own column as this pass has it, masked: so the token does not vote for itself (its
    appendix B; in this layer only, see docs/cover.md). Scores and sums are float32 or better, and no row is
    the difference of two.

    Args:
        q: float ``[B, Hq, L, d]``, after the rotary embedding, of the masked input.
        k, v: ``[B, Hkv, L, d]`` of the same dtype, of the masked input; Hkv divides Hq, and query head h goes
            with key head h // (Hq / Hkv).
        k_cached, v_cached: the same, of the earlier pass; read where there are seeds, and finite there.
        seeds: bool ``[B, L]``.
        lengths: integers ``[B]`` in [0, L]: the keys of sequence b end there, whatever follows, even NaN, and
            what follows is no seed; None for all L.
        shift: 1 for a model whose output at a position predicts the token after it (Dream): the query before
            a seed predicts it. 0: the query at the seed does.
        scale: of q k before the softmax; None for 1 / sqrt(d).

    Returns:
        CoverAttention. Without any key, `out` is 0 and `lse` -inf. Lengths on an accelerator are not checked:
        there are never less than 0 or more than L keys. The results carry no gradient.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(q, k, v, k_cached, v_cached, seeds, lengths):
        return _arrays.call(
            cover_attention,
            {
                "q": q, "k": k, "v": v, "k_cached": k_cached, "v_cached": v_cached, "seeds": seeds,
                "lengths": lengths,
            },
            shift=shift, scale=scale,
        )  # fmt: skip
    q, k = _check.query_and_key(q, k)
    batch, _, length, size = q.shape
    if k.shape[2] != length:
        raise ValueError(f"k: expected the {length} positions of q, got {k.shape[2]}")
    same = (q.dtype,)
    v = _check.companion("v", v, "k", k, k.shape, same)
    k_cached = _check.companion("k_cached", k_cached, "k", k, k.shape, same)
    v_cached = _check.companion("v_cached", v_cached, "k", k, k.shape, same)
    seeds = _check.companion("seeds", seeds, "q", q, (batch, length), _check.BOOL)
    lengths = checked_lengths(lengths, q, length)
    return CoverAttention(
        *_op(q, k, v, k_cached, v_cached, seeds, lengths, checked_shift(shift), _check.scale(scale, size))
    )


def checked_lengths(lengths: Tensor | None, q: Tensor, most: int) -> Tensor | None:
    if lengths is None:
        return None
    lengths = _check.companion("lengths", lengths, "q", q, (q.shape[0],), _check.INTEGERS)
    _check.elements_in_range("lengths", lengths, 0, most)
    return lengths.long()


def checked_shift(shift: object) -> int:
    if not _check.is_int(shift):
        raise TypeError(f"shift: expected an int, got {type(shift).__name__}")
    if shift not in (0, 1):
        raise ValueError(f"shift: expected 0 or 1, got {shift}")
    return int(shift)
