"""The weights of DAPD's dependency graph (arXiv:2603.12996), collected during a forward pass."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakValueDictionary

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

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: a shape does not fit, or `layers` is out of range or names no layer.
    """

    def __init__(self, positions: Tensor, layers: float | Collection[int] = 0.3) -> None:
        if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
            got = getattr(positions, "dtype", type(positions).__name__)
            raise TypeError(f"positions must be an int64 tensor, got {got}")
        if positions.dim() != 2:
            raise ValueError(f"positions must have shape [*, *], got {list(positions.shape)}")
        self.positions = positions
        self.layers = layer_choice(layers)
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
        rows: Tensor | None = None,
        lengths: Tensor | None = None,
        key_mask: Tensor | None = None,
        lse: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Add a layer.

        Args:
            q: queries `[R, Hq, n, d]`, rotated, R >= B.
            k: keys `[R, Hkv, L, d]`, rotated; `Hkv` divides `Hq`.
            rows: int64 `[B, M]`, where in `q` the query of each position is; -1 is padding. None: n = L, and
                it is at the position.
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
        self._check_pass(len(q), q.shape[2], k.shape[2], rows)
        q, k = q.detach()[:batch], k.detach()[:batch]
        positions = self.positions
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
        """Add a layer by its attention weights `[R, H, L, L]`, as `output_attentions=True` returns them.

        Raises:
            TypeError: it is not a tensor.
            ValueError: a shape does not fit.
        """
        if not isinstance(attention, Tensor):
            raise TypeError(f"attention must be a tensor, got {type(attention).__name__}")
        if attention.dim() != 4:
            raise ValueError(f"attention must have shape [R, H, n, L], got {list(attention.shape)}")
        batch, (n, length) = len(self.positions), attention.shape[2:]
        self._check_pass(len(attention), n, length, None)
        if self._sum is None:
            self._sum = self._zeros(attention)
        real = (self.positions >= 0) & (self.positions < length)
        place = self.positions.clamp(0, length - 1)
        index = torch.arange(batch, device=place.device)[:, None, None]
        weights = attention.detach()[index, :, place[:, :, None], place[:, None, :]]  # [B, M, M, H]
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

    def select(self, rows: Sequence[int]) -> AttentionGraph:
        """A graph of these rows, none of whose layers is added yet; those beyond B are left out."""
        return AttentionGraph(self.positions[[row for row in rows if row < len(self.positions)]], self.layers)

    def put(self, rows: Sequence[int], part: AttentionGraph) -> None:
        """Take over what has been added to `select(rows)`."""
        scores = part.scores()
        if self._sum is None:
            self._sum, self._added = self._zeros(scores), 1
        self._sum[[row for row in rows if row < len(self.positions)]] = scores

    def _zeros(self, x: Tensor) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        batch, many = self.positions.shape
        return x.new_zeros((batch, many, many), dtype=dtype)

    def _check_pass(self, batch: int, n: int, length: int, rows: Tensor | None) -> None:
        if batch < len(self.positions):
            raise ValueError(
                f"the graph has {len(self.positions)} rows of positions, the pass has {batch} rows"
            )
        if rows is None and n != length:
            raise ValueError(f"the graph needs rows, as the pass computes {n} of {length} positions")


def _left_aligned(k: Tensor, positions: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys with the real ones first, where the positions are among them, and how many these are."""
    order = key_mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    k = k.gather(2, order[:, None, :, None].expand_as(k))
    place = (key_mask.cumsum(-1) - 1).masked_fill(~key_mask, -1)
    inside = (positions >= 0) & (positions < key_mask.shape[1])
    place = place.gather(1, positions.masked_fill(~inside, 0)).masked_fill(~inside, -1)
    return k, place, key_mask.sum(-1)


def layer_choice(layers: object) -> float | frozenset[int]:
    """Which layers: the share of the last ones, in (0, 1], or their indices.

    Raises:
        TypeError: neither a number nor a collection of ints.
        ValueError: no share, or no indices.
    """
    if is_number(layers):
        if not 0 < layers <= 1:
            raise ValueError(f"layers must be a share in (0, 1] or indices of layers, got {layers!r}")
        return float(layers)
    if not isinstance(layers, list | tuple | range | set | frozenset) or not all(
        is_int(layer) for layer in layers
    ):
        raise TypeError(f"layers must be a number or a list, tuple or set of ints, got {layers!r}")
    if not layers or min(layers) < 0:
        raise ValueError(f"layers must be a share in (0, 1] or indices of layers, got {layers!r}")
    return frozenset(map(int, layers))


bidirectional: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Models whose attention was looked at, by their id: not all can be hashed."""


def check_bidirectional(attentions: Sequence[Tensor], model: object) -> None:
    """Check, once per model, that its attention maps are not those of causal attention.

    Args:
        attentions: maps `[B, H, n, L]` of the layers, as `output_attentions=True` returns them. One of a
            single position says nothing.
        model: what made them. One that cannot be weakly referenced is checked each time.

    Raises:
        ValueError: above the diagonal all weights of a layer are zero; names the model's class.
    """
    maps = [
        attention for attention in attentions if isinstance(attention, Tensor) and attention.shape[-1] > 1
    ]
    if id(model) in bidirectional or not maps:
        return
    if any(not attention.triu(1).any() for attention in maps):
        raise causal(model)
    with contextlib.suppress(TypeError):  # no weak reference
        bidirectional[id(model)] = model


def causal(model: object) -> ValueError:
    """The error for a model with causal attention."""
    return ValueError(
        f"{type(model).__name__} has causal attention: its weights do not tell how positions depend on each "
        "other; an attention graph needs a model with bidirectional attention"
    )
