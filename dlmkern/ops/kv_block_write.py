"""kv_block_write: keys and values of a block into their places in the cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from dlmkern.ops import _arrays, _check
from dlmkern.ops._library import define


class KVDrift(NamedTuple):
    """How far each written position moved, over all heads; float32 ``[B, n]``, NaN where it was skipped."""

    k_cosine: Tensor  # <old, new> / (|old| |new|)
    k_distance: Tensor  # |new - old| / |old|
    v_cosine: Tensor
    v_distance: Tensor


def _fake(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    drift: bool,
) -> Tensor:
    return k_cache.new_empty((4, *positions.shape) if drift else (0,), dtype=torch.float32)


_op = define(
    "kv_block_write(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor positions,"
    " Tensor? cos, Tensor? sin, bool drift) -> Tensor",
    _fake,
)


def kv_block_write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    drift: bool = False,
) -> KVDrift | None:
    """Writes the keys and values of a block into their places in the cache, in place (Fast-dLLM's DualCache,
    arXiv 2505.22618).

    Row (b, i) of `k` and `v` goes to ``positions[b, i]`` of sequence b. With `rope` the key at position p is
    turned on its way, y = k cos_p + rotate_half(k) sin_p with rotate_half(k) = (-k_{d/2:}, k_{:d/2}), in the
    dtype of the tables, and rounded once to that of the cache.

    Args:
        k_cache, v_cache: float ``[B, H, L, d]`` of any strides, written in place. They are tensors, NumPy
            arrays, or arrays whose ``__dlpack__`` says that its memory is shared and may be written.
            They share no memory with each other, nor with `k` and `v`.
        k, v: ``[B, H, n, d]`` of the same dtype. They get no gradient through the caches.
        positions: integers ``[B, n]`` in [-1, L); -1 skips the row. Of two equal ones in a sequence, either
            row may stay.
        rope: (cos, sin), each ``[P, d]`` with P >= L, float64 for float64 caches and float32 for the others:
            row p turns a key at position p, and element i pairs with i + d/2. None leaves the keys as they
            are.
        drift: compare what is overwritten with what is written, over the H d numbers of a position as the
            cache's dtype holds them.

    Returns:
        KVDrift with `drift`, else None. Cosines and distances are what IEEE division gives for a norm of
        zero. Positions on an accelerator are not checked: whatever lies outside [0, L) is skipped.

    Raises:
        TypeError, ValueError: naming the argument. The caches are as they were then.
    """
    if rope is not None and (not isinstance(rope, tuple) or len(rope) != 2):
        raise TypeError(f"rope: expected a pair (cos, sin) or None, got {type(rope).__name__}")
    cos, sin = rope or (None, None)
    if not _arrays.all_tensors(k_cache, v_cache, k, v, positions, cos, sin):
        return _arrays.call(
            kv_block_write,
            {"k": k, "v": v, "positions": positions, "rope": rope},
            written={"k_cache": k_cache, "v_cache": v_cache},
            drift=drift,
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.requires_grad:
            raise TypeError(f"{name}: expected a tensor that does not require grad")
    k_cache = _check.tensor("k_cache", k_cache, _check.FLOATS)
    if k_cache.ndim != 4:
        raise ValueError(f"k_cache: expected shape [B, H, L, d], got {list(k_cache.shape)}")
    batch, heads, length, size = k_cache.shape
    same = (k_cache.dtype,)
    v_cache = _check.companion("v_cache", v_cache, "k_cache", k_cache, k_cache.shape, same)
    _check.writable("k_cache", k_cache)
    _check.writable("v_cache", v_cache)
    positions = _check.tensor("positions", positions, _check.INTEGERS)
    if positions.ndim != 2 or positions.shape[0] != batch:
        raise ValueError(f"positions: expected shape [{batch}, n], got {list(positions.shape)}")
    _check.same_device("positions", positions, "k_cache", k_cache)
    rows = (batch, heads, positions.shape[1], size)
    k = _check.companion("k", k, "k_cache and positions", k_cache, rows, same)
    v = _check.companion("v", v, "k_cache and positions", k_cache, rows, same)
    _check.elements_in_range("positions", positions, -1, length - 1)
    if cos is not None or sin is not None:
        cos, sin = _tables(k_cache, cos, sin)
    moved: Tensor = _op(k_cache, v_cache, k, v, positions.long(), cos, sin, bool(drift))
    if not torch.compiler.is_compiling():
        # Autograd, which does not see the write, would else take a cache saved for a gradient as unchanged.
        torch.autograd.graph.increment_version((k_cache, v_cache))
    return KVDrift(*moved.unbind()) if drift else None


def _tables(k_cache: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    length, size = k_cache.shape[2:]
    dtypes = (torch.float64 if k_cache.dtype == torch.float64 else torch.float32,)
    cos = _check.tensor("rope's cos", cos, dtypes)
    _check.same_device("rope's cos", cos, "k_cache", k_cache)
    if cos.ndim != 2 or cos.shape[0] < length or cos.shape[1] != size:
        raise ValueError(f"rope's cos: expected shape [P, {size}] with P >= {length}, got {list(cos.shape)}")
    if size % 2:
        raise ValueError(f"rope: expected an even head size, got d = {size}")
    return cos, _check.companion("rope's sin", sin, "cos", cos, cos.shape, dtypes)
