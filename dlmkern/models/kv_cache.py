"""Keys and values that outlive a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import dlmkern.ops  # noqa: F401  # defines the op

# Without the checks of `dlmkern.kv_block_write`: the forward pass has made them.
_kv_block_write = torch.ops.dlmkern.kv_block_write.default


class KVCache:
    """The rotated keys and the values of every position, layer by layer, in one buffer.

    Args:
        storage: `[layers, 2, B, Hkv, L, head_dim]`, keys before values. Every number in it is finite, so that
            what lies beyond a row's end may be read as long as it gets no weight.
    """

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage
        # Made once, as a view costs about as much as writing a block into it.
        self._layers: list[tuple[Tensor, ...]] = [layer.unbind() for layer in storage.unbind()]

    @staticmethod
    def empty(
        layers: int,
        rows: int,
        heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """A buffer for `rows` rows of at most `length` positions."""
        shape = (layers, 2, rows, heads, length, head_dim)
        # An inference tensor could not be written outside inference mode, where decoding may go on.
        with torch.inference_mode(False):
            return KVCache(torch.zeros(shape, dtype=dtype, device=device))

    @property
    def rows(self) -> int:
        return self.storage.shape[2]

    @property
    def length(self) -> int:
        return self.storage.shape[4]

    @property
    def kind(self) -> tuple[int, int, int, torch.dtype, torch.device]:
        """Layers, heads, head_dim, dtype and device: what all caches of a model have in common."""
        layers, _, _, heads, _, head_dim = self.storage.shape
        return layers, heads, head_dim, self.storage.dtype, self.storage.device

    def narrow(self, rows: int, length: int) -> KVCache:
        """The same buffer, as one of its first `rows` rows and `length` positions."""
        if (rows, length) == (self.rows, self.length):
            return self
        return KVCache(self.storage[:, :, :rows, :, :length])

    def keep(self, rows: Sequence[int]) -> KVCache:
        """Move these rows, which are in order, to the front of the buffer; the others are lost."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.storage.device)
        for layer in self._layers:
            for part in layer:
                part[: len(rows)] = part[index]
        return self.narrow(len(rows), self.length)

    def write_rows(
        self, layer: int, k: Tensor, v: Tensor, rows: Tensor | None, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write whole rows, `[n, Hkv, m, head_dim]` from their first position on.

        `rows` says which of the cache's; None: all of them, in order. Where `kept`, bool `[n, m]`, is true,
        the cache stays as it is.

        Returns:
            The keys and values that these positions hold now, of the shape of `k`.
        """
        held = []
        for part, new in zip(self._layers[layer], (k, v), strict=True):
            part = part[:, :, : new.shape[2]]
            if kept is not None:
                old = part if rows is None else part.index_select(0, rows)
                new = torch.where(kept[:, None, :, None], old, new)
            if rows is None:
                part.copy_(new)
            else:
                part.index_copy_(0, rows, new)
            held.append(new)
        return held[0], held[1]

    def write_block(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write `[B, Hkv, n, head_dim]` at `positions [B, n]` (-1: nowhere).

        Returns:
            All keys and all values of the layer, `[B, Hkv, L, head_dim]`.
        """
        keys, values = self._layers[layer]
        _kv_block_write(keys, values, k, v, positions, None, None, False)
        return keys, values

    def copy_with_block(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `write_block` would return, in a copy: the cache stays as it is."""
        keys, values = (part.clone() for part in self._layers[layer])
        _kv_block_write(keys, values, k, v, positions, None, None, False)
        return keys, values
