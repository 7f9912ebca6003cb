"""The weights of DAPD's dependency graph (arXiv 2603.12996), collected during a forward pass."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

import dlmkern.ops  # noqa: F401  # defines the op
from dlmkern.ops._check import is_int, is_number

# Without the checks of `dlmkern.attention_graph`: the forward pass has made them.
_attention_graph = torch.ops.dlmkern.attention_graph.default


class AttentionGraph:
    """How much some positions of each row attend to each other: the mean over heads and over some layers.

    It is for one forward pass. `MaskedLM.forward(..., graph=...)` feeds it, and so does
    `transformers_graph.feeding`; whoever has queries and keys, or attention maps, calls `add` or `add_map`.
    Nothing is read on the host, and no `add` makes a map `[B, H, L, L]`.

    Args:
        positions: int64 `[B, M]`, the places in their rows of the positions; -1 is padding. A pass may have
            more rows: its first B count, as in classifier-free guidance, which doubles the batch.
        layers: the share of the layers that are taken, the last `n - int(n * (1 - layers))` of n (of LLaDA's
            32 at 0.3 those from 22 on, of Dream's 28 those from 19 on), in (0, 1]; or their indices.
        rows: int64 `[B, M]`, which of the positions that the pass computes each one is, where it computes
            some only (with a KV cache); -1 is padding. None: all are computed.

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: a shape does not fit, or `layers` is out of range or names no layer.
    """

    def __init__(
        self, positions: Tensor, layers: float | Collection[int] = 0.3, *, rows: Tensor | None = None
    ) -> None:
        for name, x in (("positions", positions), ("rows", rows)):
            if x is None and name == "rows":
                continue
            if not isinstance(x, Tensor) or x.dtype != torch.int64:
                raise TypeError(
                    f"{name} must be an int64 tensor, got {getattr(x, 'dtype', type(x).__name__)}"
                )
            if x.dim() != 2:
                raise ValueError(f"{name} must have shape [*, *], got {list(x.shape)}")
        if rows is not None and (rows.shape != positions.shape or rows.device != positions.device):
            raise ValueError(
                f"rows must be like positions, {list(positions.shape)} on {positions.device}, "
                f"got {list(rows.shape)} on {rows.device}"
            )
        self.positions = positions
        self.rows = rows
        self.layers = _indices(layers) if isinstance(layers, Collection) else _share(layers)
        self._sum: Tensor | None = None
        self._added = 0

    def wants(self, layer: int, n_layers: int) -> bool:
        """Whether layer `layer`, counted from 0, of `n_layers` is one of those to add.

        Raises:
            ValueError: `layers` has an index that is not below `n_layers`.
        """
        if isinstance(self.layers, float):
            return layer >= int(n_layers * (1 - self.layers))
        if max(self.layers) >= n_layers:
            raise ValueError(f"layers must lie in [0, {n_layers}), got {sorted(self.layers)}")
        return layer in self.layers

    def add(
        self,
        q: Tensor,
        k: Tensor,
        *,
        lengths: Tensor | None = None,
        key_mask: Tensor | None = None,
        lse: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Add a layer.

        Args:
            q: queries `[R, Hq, n, d]`, rotated, R >= B.
            k: keys `[R, Hkv, L, d]`, rotated; `Hkv` divides `Hq`. n = L without `rows`.
            lengths: int64 `[R]`, where the keys of each row end. None: all L.
            key_mask: bool `[R, L]`, True where a key is real, for rows that are not left-aligned; a position
                that it hides is padding. Not together with `lengths`. It costs a copy of the keys.
            lse: `[R, Hq, n]` float32, or float64 for float64 `q`: the log-sum-exp of each query's scores over
                the keys, in nats. None: to be computed.
            scale: of q k before the softmax. None: `1 / sqrt(d)`.

        Raises:
            ValueError: a shape does not fit.
        """
        batch = len(self.positions)
        self._check_pass(len(q), q.shape[2], k.shape[2])
        q, k = q.detach()[:batch], k.detach()[:batch]
        positions, rows = self.positions, self.rows
        if key_mask is not None:
            if lengths is not None:
                raise ValueError("give either lengths or key_mask, not both")
            rows = positions if rows is None else rows
            k, positions, lengths = _left_aligned(k, positions, key_mask[:batch])
        if self._sum is None:
            self._sum = self._zeros(q)
        _attention_graph(
            q,
            k,
            positions,
            rows,
            None if lengths is None else lengths[:batch],
            None if lse is None else lse.detach()[:batch],
            1 / math.sqrt(q.shape[-1]) if scale is None else scale,
            self._sum,
        )
        self._added += 1

    def add_map(self, attention: Tensor) -> None:
        """Add a layer by its attention weights `[R, H, n, L]`, as `output_attentions=True` returns them.

        Raises:
            TypeError: it is not a tensor.
            ValueError: a shape does not fit.
        """
        if not isinstance(attention, Tensor):
            raise TypeError(f"attention must be a tensor, got {type(attention).__name__}")
        if attention.dim() != 4:
            raise ValueError(f"attention must have shape [R, H, n, L], got {list(attention.shape)}")
        batch, (n, length) = len(self.positions), attention.shape[2:]
        self._check_pass(len(attention), n, length)
        if self._sum is None:
            self._sum = self._zeros(attention)
        rows = self.positions if self.rows is None else self.rows
        real = (self.positions >= 0) & (self.positions < length) & (rows >= 0) & (rows < n)
        place, row = self.positions.clamp(0, length - 1), rows.clamp(0, n - 1)
        index = torch.arange(batch, device=place.device)[:, None, None]
        weights = attention.detach()[index, :, row[:, :, None], place[:, None, :]]  # [B, M, M, H]
        weights = weights.mean(-1, dtype=self._sum.dtype)
        self._sum += torch.where(real[:, :, None] & real[:, None, :], weights, 0.0)
        self._added += 1

    def scores(self) -> Tensor:
        """`[B, M, M]` float32, or float64: row i, column j is how much position i attends to position j.

        0 for padding.

        Raises:
            ValueError: no layer was added.
        """
        if self._sum is None:
            raise ValueError(
                f"the attention graph got no layer: either no forward pass had it, or layers = {self.layers} "
                "is none of the model's"
            )
        return self._sum / self._added

    def _zeros(self, x: Tensor) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        batch, many = self.positions.shape
        return x.new_zeros((batch, many, many), dtype=dtype)

    def _check_pass(self, rows: int, n: int, length: int) -> None:
        if rows < len(self.positions):
            raise ValueError(
                f"the graph has {len(self.positions)} rows of positions, the pass has {rows} rows"
            )
        if self.rows is None and n != length:
            raise ValueError(f"the graph needs rows, as the pass computes {n} of {length} positions")


def _left_aligned(k: Tensor, positions: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys with the real ones first, where the positions are among them, and how many these are."""
    order = key_mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    k = k.gather(2, order[:, None, :, None].expand_as(k))
    place = (key_mask.cumsum(-1) - 1).masked_fill(~key_mask, -1)
    inside = (positions >= 0) & (positions < key_mask.shape[1])
    place = place.gather(1, positions.masked_fill(~inside, 0)).masked_fill(~inside, -1)
    return k, place, key_mask.sum(-1)


def _share(layers: float) -> float:
    if not is_number(layers):
        raise TypeError(f"layers must be a number or a collection of ints, got {layers!r}")
    if not 0 < layers <= 1:
        raise ValueError(f"layers must be a share in (0, 1] or indices of layers, got {layers!r}")
    return float(layers)


def _indices(layers: Collection[int]) -> frozenset[int]:
    if any(not is_int(layer) for layer in layers):
        raise TypeError(f"layers must be a number or a collection of ints, got {layers!r}")
    if not layers or min(layers) < 0:
        raise ValueError(f"layers must be a share in (0, 1] or indices of layers, got {layers!r}")
    return frozenset(layers)
