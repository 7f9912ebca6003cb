"""The forward pass that all models of this package share.

It is built from a few small functions: `embed`, `rope` and `head` of the model, `qkv` and `finish` of its
blocks, and between these `attend.PassAttention`. Whoever wants more from it, the queries for example, walks
over the blocks with them as `MaskedLM.forward` does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from dlmkern.graph import AttentionGraph
from dlmkern.models import _check
from dlmkern.models.attend import (
    PassAttention,
    columns_of,
    first_of_last,
    key_mask,
    places_of_columns,
    shadow_mask,
)
from dlmkern.models.kv_cache import KVCache
from dlmkern.models.layers import RMSNorm

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """One transformer block."""

    @abstractmethod
    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """From `x [B, n, d]`: queries `[B, Hq, n, head_dim]`, keys and values `[B, Hkv, n, head_dim]`.

        Queries and keys are rotated by `rope`.
        """

    @abstractmethod
    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output `[B, n, d]` from its input `x` and what `attention` returned."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """`[B, n, d]`; `attend` gets queries, keys and values and returns `[B, Hq, n, head_dim]`."""
        return self.finish(x, attend(*self.qkv(x, rope)))


class MaskedLM(PreTrainedModel):
    """A transformer with bidirectional attention that predicts masked tokens.

    Its configuration has `n_layers`, `n_kv_heads`, `head_dim`, `embedding_size` and `max_sequence_length`.
    """

    base_model_prefix = "model"
    _supports_sdpa = True

    shifted_logits: ClassVar[bool] = False
    """Whether the output at a position predicts the token after it, as in a causal model."""

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The `Block`s in order."""

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """`x [B, n, d]` from token ids `[B, n]`."""

    @abstractmethod
    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The `rotary_table` of positions `[n]` or `[B, 1, n]`, in the dtype of this model's rotations."""

    @abstractmethod
    def head(self, x: Tensor) -> Tensor:
        """Logits `[B, n, embedding_size]` from the last block's output `x [B, n, d]`."""

    def new_cache(self, rows: int, length: int) -> KVCache:
        """A cache for `rows` rows of at most `length` positions, in the model's dtype and on its device."""
        for name, value in (("rows", rows), ("length", length)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be an int of at least 0, got {value!r}")
        layers, heads, head_dim, dtype, device = self._cache_kind()
        return KVCache.empty(layers, rows, heads, length, head_dim, dtype, device)

    def _cache_kind(self) -> tuple[int, int, int, torch.dtype, torch.device]:
        """The `KVCache.kind` of this model's caches."""
        config = self.config
        return config.n_layers, config.n_kv_heads, config.head_dim, self.dtype, self.device

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        cache_rows: Tensor | None = None,
        position_ids: Tensor | None = None,
        graph: AttentionGraph | None = None,
        seeds: Tensor | None = None,
        seed_layers: float = 1.0,
        shadow_positions: Tensor | None = None,
    ) -> MaskedLMOutput:
        """Predict every token of every row from the whole row.

        Rows of different lengths are left-aligned: row `b` is `input_ids[b, :lengths[b]]`, and what follows
        is padding that no real position sees (the official implementations let it be seen). Leave `lengths`
        out when all rows are full: attention without a mask is faster. Tensors on an accelerator are never
        read on the host; on the CPU their values are checked, and a mask that hides nothing is dropped.

        With a cache, a first pass over whole rows fills it, and later ones compute only some positions: these
        replace their keys and values in the cache and see all the others there, as they were when last
        computed. Passes with a cache carry no gradient.

        A pass verifies tokens in one of two ways, both of which show masks in their place. Seeds (COVER,
        arXiv:2602.06161) are masked themselves, and all others see what the cache holds of them, from when
        their tokens were shown. Shadow rows (WINO, arXiv:2507.18578) are masks in addition to the row, which
        nothing else sees.

        Args:
            input_ids: token ids, int64 `[B, n]`: whole rows, or the tokens at `position_ids`; with
                `shadow_positions [B, S]`, int64 `[B, n + S]`, shadow rows last.
            attention_mask: bool or integer `[B, n]`, zero where a key is hidden; not together with `lengths`
                or `position_ids`.
            lengths: int64 `[B]`, number of real tokens of each row, at least 1 and at most the row's size,
                which is `n` or, with `position_ids`, that of the cache.
            positions: int64 `[B, m]`, the columns of `input_ids` whose logits are wanted, shadow rows
                included. None: all of them, in order.
            cache: from `new_cache`.
            cache_rows: int64 `[B]`, which of the cache's rows whole rows go to. None: all of them, in order.
            position_ids: int64 `[B, n]`, where in its row each token of `input_ids` is; -1 is padding.
            graph: to be fed with the attention of the layers that it wants. Of its positions, those that are
                hidden or not computed count as padding. `lengths` is faster here than `attention_mask`.
            seeds: bool `[B, n]`, the columns of `input_ids` that are seeds; what is beyond a row's length or
                padding is none. Needs `cache`, and no `attention_mask`. The cache keeps the keys and values
                that it has of them. All queries see these, but the one that predicts the seed (the seed's
                own, or with `shifted_logits` that of the column before), which sees those of this pass.
            seed_layers: the share in [0, 1] of the layers, the last ones, where this holds. In those before,
                all queries see the seeds' keys and values of this pass. From the second of these layers on, a
                seed's prediction depends on its token after all: through the others, which have seen it. So
                it does in any layer through positions that the pass does not compute.
            shadow_positions: int64 `[B, S]`, where in its row each shadow row is; -1 is padding. A shadow row
                sees all that other rows at its position see, except the key at its own position, and all
                shadow rows of its row. The cache takes none. Not together with `seeds`, and not for models
                with `shifted_logits`, whose shadow row would have to predict its own position.

        Returns:
            `logits [B, n, embedding_size]` in the model's dtype, or `[B, n + S, ...]` with shadow rows, or
            `[B, m, ...]` with `positions`; padded vocabulary rows included. Those at padding positions mean
            nothing.

        Raises:
            TypeError: an argument is not a tensor of the dtype above.
            ValueError: a shape does not fit, the sequence is too long, or a value on the CPU is out of range.
        """
        _check.ids("input_ids", input_ids, (None, None), 0, self.config.embedding_size)
        batch, columns = input_ids.shape
        n = columns
        if shadow_positions is not None:
            _check.shadow_positions(shadow_positions, input_ids, self.shifted_logits)
            n -= shadow_positions.shape[1]
        length = n
        if cache is not None:
            _check.kind(cache, self._cache_kind())
        if position_ids is not None:
            if cache is None or attention_mask is not None or cache_rows is not None:
                raise ValueError("position_ids needs cache, and neither attention_mask nor cache_rows")
            length = cache.length
            _check.ids("position_ids", position_ids, (batch, n), -1, length)
        if length > self.config.max_sequence_length:
            name = "input_ids" if position_ids is None else "cache"
            raise ValueError(
                f"{name}: {length} tokens exceed max_sequence_length = {self.config.max_sequence_length}"
            )
        _check.cache_size(cache, cache_rows, batch, length)
        if positions is not None:
            _check.ids("positions", positions, (batch, None), 0, columns)
        graph_rows = None
        if graph is not None:
            _check.graph(graph, input_ids, length)
            if position_ids is not None:
                graph_rows = columns_of(position_ids, graph.positions, length)
        _check.share("seed_layers", seed_layers)
        if seeds is not None:
            if cache is None or attention_mask is not None or shadow_positions is not None:
                raise ValueError("seeds needs cache, and neither attention_mask nor shadow_positions")
            _check.seeds(seeds, input_ids)
            if _check.readable(seeds) and not seeds.any():
                seeds = None
        mask = key_mask(batch, length, attention_mask, lengths, input_ids.device)
        visible = None
        if shadow_positions is not None:
            _check.in_range("shadow_positions", shadow_positions, -1, length)
            visible = shadow_mask(shadow_positions, mask, length)
        attend = PassAttention(
            n_layers=len(self.blocks),
            key_mask=mask,
            lengths=lengths,
            cache=cache,
            cache_rows=cache_rows,
            position_ids=position_ids,
            graph=graph,
            graph_rows=graph_rows,
            graph_mask=None if mask is None or lengths is not None else mask[:, 0, 0],
            seeds=seeds,
            cover_from=first_of_last(len(self.blocks), seed_layers),
            shift=int(self.shifted_logits),
            shadow_mask=visible,
        )
        # Whatever is kept of a pass is kept without its graph.
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            rope = self.rope(places_of_columns(batch, n, position_ids, shadow_positions, input_ids.device))
            x = self.embed(input_ids)
            for layer, block in enumerate(self.blocks):
                x = block(x, rope, partial(attend, layer))
            if positions is not None:
                x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            # What transformers calls the type of logits differs between its versions.
            return MaskedLMOutput(logits=cast(Any, self.head(x)))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
