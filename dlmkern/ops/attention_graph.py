"""attention_graph: how much positions attend to each other, without the attention map."""

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define


def _fake(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    rows: Tensor | None,
    lengths: Tensor | None,
    lse: Tensor | None,
    scale: float,
    out: Tensor,
) -> None:
    return None


_op = define(
    "attention_graph(Tensor q, Tensor k, Tensor positions, Tensor? rows, Tensor? lengths, Tensor? lse,"
    " float scale, Tensor(a!) out) -> ()",
    _fake,
)


def attention_graph(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    counts: Tensor | None = None,
    out: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    lengths: Tensor | None = None,
    lse: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Adds up how much some positions attend to each other, the mean over the heads of a layer (DAPD,
    arXiv 2603.12996, the weights of its dependency graph).

    out[i, j] += mean_h exp(scale q_hi k_hj - lse_hi): a weight of the softmax over all keys, not only those
    of the positions. Query head h goes with key head h // (Hq / Hkv). Products and sums are float32 or
    better. Memory is O(M M + L d); there never is a map ``[B, H, L, L]``.

    Args:
        q: float ``[B, Hq, n, d]``, after the rotary embedding.
        k: ``[B, Hkv, L, d]`` of the same dtype; Hkv divides Hq.
        positions: integers ``[B, M]`` in [-1, L): the places of the keys. -1, and what is at or beyond the
            sequence's length, is padding.
        counts: integers ``[B]`` in [0, M]: of sequence b all from counts[b] on is padding, whatever it holds;
            None for no such.
        out: ``[B, M, M]`` float32 (float64 for float64 q) to add to, in place: one call a layer gives their
            sum. What it holds for padding stays. A tensor, or an array that may be written like
            kv_block_write's caches. None for zeros.
        rows: integers ``[B, M]`` in [-1, n): which row of `q` is the query of each position, where `q` holds
            some positions only, -1 for padding; None for the position itself, and n = L.
        lengths: integers ``[B]`` in [0, L]: the keys of sequence b end there, whatever follows, even NaN;
            None for all L.
        lse: ``[B, Hq, n]`` float32 (float64 for float64 q): log sum exp(scale q k) over the keys, in nats, as
            block_attention returns it. With it the work is O(M M H d). None to compute it, O(M L H d).
        scale: of q k before the softmax; None for 1 / sqrt(d).

    Returns:
        `out`. Values on an accelerator are not checked: what lies outside its range is padding. There is no
        gradient.

    Raises:
        TypeError, ValueError: naming the argument. `out` is as it was then.
    """
    if not _arrays.all_tensors(q, k, positions, counts, out, rows, lengths, lse):
        return _arrays.call(
            attention_graph,
            {
                "q": q, "k": k, "positions": positions, "counts": counts, "rows": rows, "lengths": lengths,
                "lse": lse,
            },
            written={"out": out},
            scale=scale,
        )  # fmt: skip
    if out is not None and out.requires_grad:
        raise TypeError("out: expected a tensor that does not require grad")
    q, k = _check.query_and_key(q, k)
    batch, heads, n, size = q.shape
    length = k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    positions = _check.tensor("positions", positions, _check.INTEGERS)
    if positions.ndim != 2 or positions.shape[0] != batch:
        raise ValueError(f"positions: expected shape [{batch}, M], got {list(positions.shape)}")
    _check.same_device("positions", positions, "q", q)
    many = positions.shape[1]
    if counts is not None:
        counts = _check.companion("counts", counts, "q", q, (batch,), _check.INTEGERS)
        _check.elements_in_range("counts", counts, 0, many)
        beyond = torch.arange(many, device=q.device) >= counts[:, None]
        positions = positions.long().masked_fill(beyond, -1)
    _check.elements_in_range("positions", positions, -1, length - 1)
    if rows is not None:
        rows = _check.companion("rows", rows, "positions", positions, (batch, many), _check.INTEGERS)
        rows = rows.long().masked_fill(positions < 0, -1)
        _check.elements_in_range("rows", rows, -1, n - 1)
    elif n != length:
        raise ValueError(f"rows: expected where q has {n} rows and k {length} positions, got None")
    if lengths is not None:
        lengths = _check.companion("lengths", lengths, "q", q, (batch,), _check.INTEGERS)
        _check.elements_in_range("lengths", lengths, 0, length)
        lengths = lengths.long()
    if lse is not None:
        lse = _check.companion("lse", lse, "q", q, (batch, heads, n), (wide,))
    shape = (batch, many, many)
    if out is None:
        out = q.new_zeros(shape, dtype=wide)
    else:
        out = _check.companion("out", out, "positions", q, shape, (wide,))
        _check.writable("out", out)
    _op(q, k, positions.long(), rows, lengths, lse, _check.scale(scale, size), out)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(out)  # autograd does not see the write
    return out
