"""diagonal_correction: what the queries of COVER's seeds gather without their own tokens."""

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define
from dlmkern.ops.cover_attention import CoverAttention, checked_lengths, checked_shift


def _fake(
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
    return None


_op = define(
    "diagonal_correction(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, Tensor k_cached,"
    " Tensor v_cached, Tensor seeds, Tensor? lengths, Tensor? positions, int shift, float scale,"
    " float recompute_below) -> ()",
    _fake,
)


def diagonal_correction(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cached: Tensor,
    v_cached: Tensor,
    seeds: Tensor,
    lengths: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    shift: int = 0,
    scale: float | None = None,
    recompute_below: float = 0.5,
) -> CoverAttention:
    """Makes cover_attention of any attention that returns its log-sum-exp (COVER, arXiv 2602.06161,
    appendix B).

    `out` and `lse` are attention over the keys and values that all queries see: the seeds' columns from the
    cache, the others from this pass. In the row that predicts seed s, the column of s becomes that of this
    pass. With a = exp(scale q k_cached_s - lse) and b = exp(scale q k_s - lse), the row is divided by
    r = 1 - a + b:

        out' = (out - a v_cached_s + b v_s) / r,   lse' = lse + log r.

    As r nears 0, which takes a weight a near 1, this loses digits; unless r exceeds `recompute_below` the row
    is computed anew from the keys.

    Args:
        out: float ``[B, Hq, n, d]``.
        lse: ``[B, Hq, n]`` float32 (float64 for float64 `out`), in nats.
        q: ``[B, Hq, n, d]`` of the dtype of `out`.
        k, v: ``[B, Hkv, n, d]``, of this pass; Hkv divides Hq.
        k_cached, v_cached: ``[B, Hkv, L, d]``.
        seeds: bool ``[B, n]``: the rows of `k` and `v` that are seeds.
        lengths: integers ``[B]`` in [0, L]: the keys of sequence b end there, and what follows is no seed;
            None for all L.
        positions: None: n = L, row i is at position i, and the caches are read at seeds only. Or integers
            ``[B, n]`` in [-1, L), the place of each row in the caches, -1 for padding: then `out` is
            attention over the caches, into which all rows but the seeds have been written
            (kv_block_write). Several rows may be at the same place.
        shift: 1: row i predicts what row i + 1 shows (Dream). 0: what row i shows.
        scale: of q k before the softmax; None for 1 / sqrt(d).
        recompute_below: at least 0. What the closed form does to an error in `out` is to divide it by r. 0
            recomputes only where that is impossible, infinity all rows of seeds.

    Returns:
        CoverAttention; rows that predict no seed are those of `out` and `lse`, bit for bit. Values on an
        accelerator are not checked: what lies outside its range is no seed. There is no gradient.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not _arrays.all_tensors(out, lse, q, k, v, k_cached, v_cached, seeds, lengths, positions):
        return _arrays.call(
            diagonal_correction,
            {
                "out": out, "lse": lse, "q": q, "k": k, "v": v, "k_cached": k_cached, "v_cached": v_cached,
                "seeds": seeds, "lengths": lengths, "positions": positions,
            },
            shift=shift, scale=scale, recompute_below=recompute_below,
        )  # fmt: skip
    q, k = _check.query_and_key(q, k)
    batch, heads, n, size = q.shape
    if k.shape[2] != n:
        raise ValueError(f"k: expected the {n} rows of q, got {k.shape[2]}")
    same = (q.dtype,)
    out = _check.companion("out", out, "q", q, q.shape, same)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = _check.companion("lse", lse, "q", q, (batch, heads, n), (wide,))
    v = _check.companion("v", v, "k", k, k.shape, same)
    k_cached = _check.tensor("k_cached", k_cached, same)
    length = n
    if positions is not None:
        if k_cached.ndim != 4:
            raise ValueError(f"k_cached: expected shape [B, Hkv, L, d], got {list(k_cached.shape)}")
        length = k_cached.shape[2]
    cache_shape = (batch, k.shape[1], length, size)
    k_cached = _check.companion("k_cached", k_cached, "k", k, cache_shape, same)
    v_cached = _check.companion("v_cached", v_cached, "k_cached", k, cache_shape, same)
    seeds = _check.companion("seeds", seeds, "q", q, (batch, n), _check.BOOL)
    lengths = checked_lengths(lengths, q, length)
    if positions is not None:
        positions = _check.companion("positions", positions, "q", q, (batch, n), _check.INTEGERS)
        _check.elements_in_range("positions", positions, -1, length - 1)
        positions = positions.long()
    shift = checked_shift(shift)
    if not _check.is_number(recompute_below):
        raise TypeError(f"recompute_below: expected a number, got {type(recompute_below).__name__}")
    if not recompute_below >= 0:
        raise ValueError(f"recompute_below: expected at least 0, got {recompute_below}")
    out, lse = out.clone(), lse.clone()
    _op(
        out, lse, q, k, v, k_cached, v_cached, seeds, lengths, positions, shift, _check.scale(scale, size),
        _check.as_float("recompute_below", recompute_below),
    )  # fmt: skip
    return CoverAttention(out, lse)
