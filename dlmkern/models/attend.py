"""What the rows of a forward pass attend to, and what the cache keeps of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import dlmkern.ops  # noqa: F401  # defines the ops
from dlmkern.attention import attention, attention_with_lse
from dlmkern.graph import AttentionGraph
from dlmkern.models import _check
from dlmkern.models.kv_cache import KVCache

# Without the checks of their public functions: the forward pass has made them.
_block_attention = torch.ops.dlmkern.block_attention.default
_cover_attention = torch.ops.dlmkern.cover_attention.default
_diagonal_correction = torch.ops.dlmkern.diagonal_correction.default

_RECOMPUTE_BELOW = 0.5  # the default of dlmkern.diagonal_correction


def first_of_last(layers: int, share: float) -> int:
    """The first of the last `share` of the layers, of which a part counts as a whole one."""
    return layers - math.ceil(round(layers * share, 9))  # rounded, as 0.9 of ten layers is nine


@dataclass
class PassAttention:
    """The attention of one forward pass, layer by layer.

    What is not explained here is as in `MaskedLM.forward`.

    Args:
        n_layers: of the model.
        key_mask: bool `[B, 1, 1, L]`, True where a key is real; None if no key is hidden.
        graph_rows: int64 `[B, M]`, which queries are those of the graph's positions; None: those at them.
        graph_mask: bool `[B, L]`, the `key_mask` where it is not that of `lengths`.
        seeds: None if there are none.
        cover_from: the first layer in which a seed's column of this pass is seen by its own query only.
        shift: 1 if a row predicts what the next one shows, else 0.
        shadow_mask: from `shadow_mask`, if there are shadow rows.
    """

    n_layers: int
    key_mask: Tensor | None
    lengths: Tensor | None
    cache: KVCache | None
    cache_rows: Tensor | None
    position_ids: Tensor | None
    graph: AttentionGraph | None
    graph_rows: Tensor | None
    graph_mask: Tensor | None
    seeds: Tensor | None
    cover_from: int
    shift: int
    shadow_mask: Tensor | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the queries `[B, Hq, n, head_dim]` gather, of the same shape."""
        if self.shadow_mask is None:
            return self._attend(layer, q, k, v)[0]
        n = q.shape[2] - self.shadow_mask.shape[2]
        attended, keys, values = self._attend(layer, q[:, :, :n], k[:, :, :n], v[:, :, :n])
        keys, values = torch.cat((keys, k[:, :, n:]), dim=2), torch.cat((values, v[:, :, n:]), dim=2)
        # To `attention`, the query heads of a group are more queries.
        mask = self.shadow_mask.repeat(1, 1, q.shape[1] // k.shape[1], 1)
        return torch.cat((attended, attention(q[:, :, n:], keys, values, mask)), dim=2)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What all rows but shadows gather, and the keys and values that all of them see."""
        covers = self.seeds is not None and layer >= self.cover_from
        recorded = self.graph if self.graph is not None and self.graph.wants(layer, self.n_layers) else None
        keys, values = self._store(layer, k, v, covers)
        lse: Tensor | None = None
        if covers:
            attended, lse = self._cover(q, k, v, keys, values)
        elif recorded is not None:
            attended, lse = attention_with_lse(q, keys, values, self.key_mask)
        else:
            attended = attention(q, keys, values, self.key_mask)
        if recorded is not None:
            recorded.add(
                q, keys, rows=self.graph_rows, lengths=self.lengths, key_mask=self.graph_mask, lse=lse
            )
        return attended, keys, values

    def _store(self, layer: int, k: Tensor, v: Tensor, covers: bool) -> tuple[Tensor, Tensor]:
        """Write to the cache, if there is one; the keys and values that all queries see."""
        if self.cache is None:
            return k, v
        if self.position_ids is None:
            kept = self.cache.write_rows(layer, k, v, self.cache_rows, self.seeds)
            return kept if covers else (k, v)
        if self.seeds is None:
            return self.cache.write_block(layer, k, v, self.position_ids)
        fresh = None if covers else self.cache.copy_with_block(layer, k, v, self.position_ids)
        kept = self.cache.write_block(layer, k, v, self.position_ids.masked_fill(self.seeds, -1))
        return kept if fresh is None else fresh

    def _cover(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Attention in which only the query that predicts a seed sees the seed's column of this pass.

        Returns:
            `[B, Hq, n, head_dim]` and the log-sum-exp `[B, Hq, n]`.
        """
        lengths = None if self.key_mask is None else self.lengths
        scale = 1 / math.sqrt(q.shape[-1])
        if self.position_ids is None:
            attended, lse = _cover_attention(q, k, v, keys, values, self.seeds, lengths, self.shift, scale)
            return attended, lse
        lse = None
        if q.device.type == "cpu":  # elsewhere torch would attend and hand out none
            attended, lse = attention_with_lse(q, keys, values, self.key_mask)
        if lse is None:
            attended, lse = _block_attention(q, keys, values, lengths, scale)
        _diagonal_correction(
            attended, lse, q, k, v, keys, values, self.seeds, lengths, self.position_ids, self.shift, scale,
            _RECOMPUTE_BELOW,
        )  # fmt: skip
        return attended, lse


def key_mask(
    batch: int, length: int, attention_mask: Tensor | None, lengths: Tensor | None, device: torch.device
) -> Tensor | None:
    """Bool `[B, 1, 1, L]`, True where a key is real; None if no key is hidden."""
    if lengths is not None:
        if attention_mask is not None:
            raise ValueError("give either attention_mask or lengths, not both")
        _check.ids("lengths", lengths, (batch,), 1, length + 1)
        mask = torch.arange(length, device=lengths.device) < lengths[:, None]
    elif attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.is_floating_point():
            got = getattr(attention_mask, "dtype", type(attention_mask).__name__)
            raise TypeError(f"attention_mask must be a bool or integer tensor, got {got}")
        if attention_mask.shape != (batch, length):
            raise ValueError(
                f"attention_mask must have shape [{batch}, {length}], got {list(attention_mask.shape)}"
            )
        mask = attention_mask != 0
    else:
        return None
    if _check.readable(mask):
        if not mask.any(-1).all():
            raise ValueError("attention_mask hides every key of a row")
        if mask.all():
            return None
    return mask[:, None, None, :].to(device)


def shadow_mask(positions: Tensor, key_mask: Tensor | None, length: int) -> Tensor:
    """Which columns shadow rows at `positions [B, S]` see: bool `[B, 1, S, length + S]`, shadows last.

    They see each other, and all keys but that at their own position.
    """
    keys = torch.arange(length, device=positions.device) != positions.unsqueeze(-1)
    if key_mask is not None:
        keys = keys & key_mask[:, 0]
    shadows = (positions >= 0).unsqueeze(1).expand(-1, positions.shape[1], -1)
    return torch.cat((keys, shadows), dim=-1).unsqueeze(1)


def columns_of(position_ids: Tensor, positions: Tensor, length: int) -> Tensor:
    """Where in `position_ids [B, n]` each of `positions [B, M]` is: the last such column, or -1."""
    batch, n = position_ids.shape

    def place(x: Tensor) -> Tensor:  # what lies in no row goes to one more place, at the end
        return torch.where((x >= 0) & (x < length), x, length)

    column = torch.full((batch, length + 1), -1, device=position_ids.device)
    source = torch.arange(n, device=position_ids.device).expand(batch, n)
    column.scatter_reduce_(1, place(position_ids), source, "amax")
    column[:, length] = -1
    return column[: len(positions)].gather(1, place(positions))


def places_of_columns(
    batch: int,
    n: int,
    position_ids: Tensor | None,
    shadow_positions: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Where in its row each column is, shadow rows last: `[n]`, or `[B, 1, n]` where rows differ."""
    if position_ids is None and shadow_positions is None:
        return torch.arange(n, device=device)
    if position_ids is None:
        position_ids = torch.arange(n, device=device).expand(batch, n)
    if shadow_positions is not None:
        position_ids = torch.cat((position_ids, shadow_positions), dim=1)
    return position_ids.clamp(min=0).unsqueeze(1)
