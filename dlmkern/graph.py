"""The weights of DAPD's dependency graph (arXiv:2603.12996), collected during a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dlmkern.ops import _check, attention_graph
from dlmkern.ops._check import is_int, is_number


class AttentionGraph:
    """How much some positions of each row attend to each other: the mean over heads and over some layers.

    It is for one forward pass. `MaskedLM.forward(..., graph=...)` feeds it, and so does
    `transformers_graph.feeding`; whoever has queries and keys, or attention maps, calls `add` or `add_maps`.
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
            raise ValueError(f"positions must have shape [B, M], got {list(positions.shape)}")
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
            TypeError, ValueError: as `dlmkern.attention_graph`, which does the work.
        """
        batch = len(self.positions)
        if len(q) < batch:
            raise ValueError(f"the graph has {batch} rows of positions, the pass has {len(q)} rows")
        q, k = q[:batch], k[:batch]
        positions = self.positions
        if key_mask is not None:
            if lengths is not None:
                raise ValueError("give either lengths or key_mask, not both")
            shape = (batch, k.shape[2])
            key_mask = _check.companion("key_mask", key_mask[:batch], "k", k, shape, _check.BOOL)
            rows = positions if rows is None else rows
            k, positions, lengths = _left_aligned(k, positions, key_mask)
        self._sum = attention_graph(
            q,
            k,
            positions,
            out=self._sum,
            rows=rows,
            lengths=None if lengths is None else lengths[:batch],
            lse=None if lse is None else lse[:batch],
            scale=scale,
        )
        self._added += 1

    def add_maps(self, attentions: Sequence[Tensor], length: int, model: object) -> None:
        """Add the wanted layers by the attention weights of all, `[R, H, L, L]` each.

        So `output_attentions=True` returns them. Once per model, they are checked not to be causal.

        Args:
            attentions: a map of each layer.
            length: L, the positions of a row.
            model: what made them. One that cannot be weakly referenced is checked each time.

        Raises:
            TypeError: they are not floating-point tensors in a tuple or list.
            ValueError: a shape or device does not fit; or above the diagonal all weights of a layer are zero,
                which names the model's class.
        """
        if not isinstance(attentions, list | tuple) or not attentions:
            raise TypeError(f"attentions must be a tuple or list of maps, got {type(attentions).__name__}")
        for layer, weights in enumerate(attentions):
            self._check_map(f"attentions[{layer}]", weights, length)
        if id(model) not in bidirectional and length > 1:
            if any(not weights.triu(1).any() for weights in attentions):
                raise causal(model)
            with contextlib.suppress(TypeError):  # no weak reference
                bidirectional[id(model)] = model
        for layer, weights in enumerate(attentions):
            if self.wants(layer, len(attentions)):
                self._add_map(weights.detach())

    def _add_map(self, attention: Tensor) -> None:
        batch, length = len(self.positions), attention.shape[-1]
        if self._sum is None:
            self._sum = self._zeros(attention)
        real = (self.positions >= 0) & (self.positions < length)
        place = self.positions.clamp(0, length - 1)
        index = torch.arange(batch, device=place.device)[:, None, None]
        weights = attention[index, :, place[:, :, None], place[:, None, :]]  # [B, M, M, H]
        weights = weights.mean(-1, dtype=self._sum.dtype)
        self._sum += torch.where(real[:, :, None] & real[:, None, :], weights, 0.0)
        self._added += 1

    def _check_map(self, name: str, weights: object, length: int) -> None:
        if not isinstance(weights, Tensor) or not weights.is_floating_point():
            got = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
            raise TypeError(f"{name} must be a map of floating-point weights, got {got}")
        least, shape = len(self.positions), weights.shape
        if len(shape) != 4 or shape[2:] != (length, length) or shape[0] < least or shape[1] == 0:
            raise ValueError(
                f"{name} must have shape [R, H, {length}, {length}] with R >= {least} and H >= 1, "
                f"got {list(shape)}"
            )
        if weights.device != self.positions.device:
            raise ValueError(f"{name} must be on {self.positions.device}, got {weights.device}")

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


def causal(model: object) -> ValueError:
    """The error for a model with causal attention."""
    return ValueError(
        f"{type(model).__name__} has causal attention: its weights do not tell how positions depend on each "
        "other; an attention graph needs a model with bidirectional attention"
    )
