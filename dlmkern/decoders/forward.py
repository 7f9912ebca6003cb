"""One forward pass: the logits of each row's window of positions, whatever the model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlmkern.decoders.cache import DualCache, PrefixCache
from dlmkern.decoders.decoder import Decoder
from dlmkern.decoders.state import State
from dlmkern.graph import AttentionGraph

if TYPE_CHECKING:
    from dlmkern.models.kv_cache import KVCache

Model = Callable[..., Any]


class Forward:
    """Runs a model on rows of different lengths, as a decoder wants it run.

    A model whose forward takes `lengths` and `positions`, as those of `dlmkern.models` do, gets all rows in
    one call and computes no other logits than those wanted. Any other callable `ids [B, L] -> logits [B, L,
    V]` (a tensor, or an object with the attribute `logits`) cannot be told about padding: rows of the same
    length share a call. If the model has a true attribute `shifted_logits`, its output at a position predicts
    the token after it.

    How much positions attend to each other comes from the model's attention layers, where it is one of
    `dlmkern.models` or one of transformers whose attention goes through its attention interface; else from
    the maps in the attribute `attentions` of what it returns.

    Args:
        model: the model.
        mask_token_id: the mask, for guidance.
        vocab_size: the least number of logits that the model must return, or None.
        decoder: its guidance, cache, revision rule and `compat` matter.

    Raises:
        ValueError: the model cannot fill a cache, or not show tokens as the revision rule needs it.
    """

    def __init__(self, model: Model, mask_token_id: int, vocab_size: int | None, decoder: Decoder) -> None:
        self.model = model
        self.mask_token_id = mask_token_id
        self.vocab_size = vocab_size
        self.cfg_scale = decoder.cfg_scale
        self.dual = isinstance(decoder.cache, DualCache)
        self.caches = isinstance(decoder.cache, PrefixCache | DualCache)
        if self.caches and not hasattr(model, "new_cache"):
            raise ValueError(
                f"cache: {decoder.cache!r} needs a model of dlmkern.models, which dlmkern.load_model reads; "
                f"got {type(model).__name__}"
            )
        self.cache: KVCache | None = None
        parameters = _parameters(model)
        self.takes_windows = {"lengths", "positions"} <= parameters
        self.takes_graph = "graph" in parameters
        self.shifted = _is_shifted(model)
        # The logits of a block's first position come from the position before it.
        self.left = int(self.shifted and decoder.compat != "official")
        self.view, self.view_layers = "plain", 1.0
        if decoder.revise is not None:
            self.view, self.view_layers = decoder.revise.view, decoder.revise.view_layers
        needed = {"override": "seeds", "shadow": "shadow_positions"}.get(self.view)
        if needed is not None and needed not in parameters:
            raise ValueError(
                f"revise: {decoder.revise!r} needs a model of dlmkern.models, which dlmkern.load_model "
                f"reads; got {type(model).__name__}"
            )
        if self.view == "shadow" and self.shifted:
            raise ValueError(
                f"revise: {decoder.revise!r} needs a model whose logits at a position predict its token; "
                f"those of {type(model).__name__} predict the next"
            )

    def whole(
        self,
        state: State,
        positions: Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
        rows: Tensor | None,
        graph: AttentionGraph | None = None,
        verified: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute whole rows, and fill the cache with them if there is one.

        Args:
            state: `B` rows.
            positions: int64 `[B, W]`, in each row `start, start + 1, ...`, then its last position repeated.
            starts, lengths: `positions[:, 0]` and `state.end`, on the host.
            rows: int64 `[B]`, which of the cache's rows they are; None: all, in order.
            graph: to be fed with the attention of the pass, or None.
            verified: int64 `[B, S]`, the positions that the revision rule verifies, padded with -1; None:
                there is none.

        Returns:
            Logits `[B, W, V]` that predict the tokens at `positions`; and those `[B, S, V]` that predict the
            tokens at `verified` without being shown them, or None: the former do that.

        Raises:
            TypeError, ValueError: what the model returned is not logits of the right shape.
        """
        cached = self.caches or self.view == "override"
        logits = self._whole(state, positions, starts, lengths, rows, graph, verified, cached)
        return self._with_left_out(logits, positions.shape[1], state, lengths, verified)

    def block(
        self,
        state: State,
        positions: Tensor,
        starts: Sequence[int],
        block_lengths: Sequence[int],
        lengths: Sequence[int],
        graph: AttentionGraph | None = None,
        verified: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the blocks, or these and all that follows; the rest comes from the cache.

        Arguments, results and errors are those of `whole`; these are all the rows of the cache.
        """
        assert self.cache is not None
        start = state.block_start
        stop = start + state.block_length if self.dual else state.end
        stops = [a + n for a, n in zip(starts, block_lengths, strict=True)] if self.dual else lengths
        first = (start - self.left).clamp(min=0)
        n = max(b - max(a - self.left, 0) for a, b in zip(starts, stops, strict=True))
        place = first.unsqueeze(1) + torch.arange(n, device=start.device)
        place = torch.where(place < stop.unsqueeze(1), place, -1)
        # What the window holds beyond a short block is not used.
        columns = (positions - int(self.shifted) - first.unsqueeze(1)).clamp(min=0, max=n - 1)
        columns_per_row = columns.shape[1]
        ids = self._doubled(self._shown(state, verified), state)
        place, columns, end = self._twice(place), self._twice(columns), self._twice(state.end)
        seeds = self._twice(state.seeds & ~state.hidden).gather(1, place.clamp(min=0)) & (place >= 0)
        ids = ids.gather(1, place.clamp(min=0))
        ids, columns, keywords = self._verifying(ids, columns, seeds, verified)
        self.cache = self.cache.narrow(self.cache.rows, max(lengths))
        logits = self._call(
            ids,
            columns.shape,
            graph,
            lengths=_ragged(end, lengths),
            positions=columns,
            cache=self.cache,
            position_ids=place,
            **keywords,
        )
        return self._with_left_out(self._guided(logits), columns_per_row, state, lengths, verified)

    def keep(self, rows: Sequence[int]) -> None:
        """Forget the other rows of the cache."""
        if self.cache is not None:
            half = self.cache.rows // 2
            self.cache = self.cache.keep([*rows, *(half + row for row in rows)] if self.cfg_scale else rows)

    def _whole(
        self,
        state: State,
        positions: Tensor,
        starts: Sequence[int] | None,
        lengths: Sequence[int],
        rows: Tensor | None = None,
        graph: AttentionGraph | None = None,
        verified: Tensor | None = None,
        cached: bool = False,
    ) -> Tensor:
        """`whole` without the logits that are left out; `starts` is None where they are not known."""
        # A copy that is contiguous, and with which the model may do what it wants.
        ids = self._shown(state, verified)[:, : max(lengths)].clone(memory_format=torch.contiguous_format)
        seeds = self._twice((state.seeds & ~state.hidden)[:, : max(lengths)])
        if self.shifted:
            positions = (positions - 1).clamp(min=0)
            starts = None if starts is None else [start - 1 for start in starts]
        ids, positions, end = self._doubled(ids, state), self._twice(positions), self._twice(state.end)
        if self.cfg_scale != 0:
            starts, lengths = None if starts is None else [*starts, *starts], [*lengths, *lengths]
        if not self.takes_windows:
            return self._guided(self._windows_by_length(ids, positions, starts, lengths, graph))
        keywords: dict[str, Any] = {}
        if cached:
            if self.cache is None:
                self.cache = self.model.new_cache(*ids.shape)  # type: ignore[attr-defined]
            keywords = {"cache": self.cache, "cache_rows": self._cache_rows(rows)}
        ids, positions, more = self._verifying(ids, positions, seeds, verified)
        ends = _ragged(end, lengths)
        return self._guided(
            self._call(ids, positions.shape, graph, lengths=ends, positions=positions, **keywords, **more)
        )

    def _shown(self, state: State, verified: Tensor | None) -> Tensor:
        """The tokens that the model is shown."""
        if verified is None or self.view not in ("masked", "override"):
            return state.ids
        return torch.where(state.seeds, self.mask_token_id, state.ids)

    def _verifying(
        self, ids: Tensor, positions: Tensor, seeds: Tensor, verified: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The model's input and the wanted columns with what verification adds, and its arguments for it."""
        if verified is not None and self.view == "override":
            return ids, positions, {"seeds": seeds, "seed_layers": self.view_layers}
        if verified is not None and self.view == "shadow":
            verified = self._twice(verified)
            columns = ids.shape[1] + torch.arange(verified.shape[1], device=ids.device)
            return (
                torch.cat((ids, torch.full_like(verified, self.mask_token_id)), dim=1),
                torch.cat((positions, columns.expand_as(verified)), dim=1),
                {"shadow_positions": verified},
            )
        return ids, positions, {}

    def _with_left_out(
        self, logits: Tensor, width: int, state: State, lengths: Sequence[int], verified: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What `whole` and `block` return."""
        if verified is None or self.view not in ("exact", "shadow"):
            return logits, None
        if self.view == "shadow":
            return logits[:, :width], logits[:, width:]
        batch, many = verified.shape
        copies = torch.arange(batch, device=verified.device).repeat_interleave(many)
        state = state._replace(previous=None).select(copies)
        position = verified.reshape(-1, 1).clamp(min=0)
        state = state._replace(ids=state.ids.scatter(1, position, self.mask_token_id))
        without = self._whole(state, position, None, [n for n in lengths for _ in range(many)])
        return logits, without.reshape(batch, many, -1)

    def _twice(self, x: Tensor) -> Tensor:
        """With guidance, the rows of both halves."""
        return x if self.cfg_scale == 0 else torch.cat((x, x))

    def _doubled(self, ids: Tensor, state: State) -> Tensor:
        """With guidance, the tokens of both halves."""
        if self.cfg_scale == 0:
            return ids
        shown = torch.arange(ids.shape[1], device=ids.device) < state.prompt_length.unsqueeze(1)
        return torch.cat((ids, torch.where(shown, self.mask_token_id, ids)))

    def _cache_rows(self, rows: Tensor | None) -> Tensor | None:
        if rows is None or self.cfg_scale == 0:
            return rows
        assert self.cache is not None
        return torch.cat((rows, rows + self.cache.rows // 2))

    def _guided(self, logits: Tensor) -> Tensor:
        if self.cfg_scale == 0:
            return logits
        conditional, unconditional = logits.chunk(2)
        return torch.lerp(unconditional, conditional, self.cfg_scale + 1)

    def _windows_by_length(
        self,
        ids: Tensor,
        positions: Tensor,
        starts: Sequence[int] | None,
        lengths: Sequence[int],
        graph: AttentionGraph | None,
    ) -> Tensor:
        if min(lengths) == max(lengths):
            return self._window_of_equals(ids, positions, starts, graph)
        windows: Tensor | None = None
        for length in sorted(set(lengths)):
            rows = [row for row, other in enumerate(lengths) if other == length]
            index = torch.tensor(rows, device=ids.device)
            part = None if graph is None else graph.select(rows)
            own_starts = None if starts is None else [starts[row] for row in rows]
            logits = self._window_of_equals(ids[index, :length], positions[index], own_starts, part)
            if windows is None:
                windows = logits.new_empty((len(lengths), *logits.shape[1:]))
            windows[index] = logits
            if graph is not None and part is not None:
                graph.put(rows, part)
        assert windows is not None
        return windows

    def _window_of_equals(
        self, ids: Tensor, positions: Tensor, starts: Sequence[int] | None, graph: AttentionGraph | None
    ) -> Tensor:
        """Windows of rows of the same length: a view if they are at the same place and end in the row."""
        logits = self._call(ids, ids.shape, graph)
        width = positions.shape[1]
        if starts is not None and min(starts) == max(starts) and 0 <= starts[0] <= ids.shape[1] - width:
            return logits[:, starts[0] : starts[0] + width]
        rows = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
        return logits[rows, positions]

    def _call(self, ids: Tensor, shape: torch.Size, graph: AttentionGraph | None, **keywords: Any) -> Tensor:
        """The model's logits `[*shape, V]`, and, on the way, its attention."""
        if graph is None:
            output = self.model(ids, **keywords)
        elif self.takes_graph:
            output = self.model(ids, graph=graph, **keywords)
        else:
            output = _call_foreign(self.model, ids, graph, keywords)
        return self._check(output, shape, ids.device)

    def _check(self, output: Any, shape: torch.Size, device: torch.device) -> Tensor:
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"model must return floating-point logits, got {got}")
        if logits.layout is not torch.strided or logits.device != device:
            raise ValueError(
                f"model must return dense logits on {device}, got layout {logits.layout} on {logits.device}"
            )
        if logits.dim() != 3 or logits.shape[:2] != shape:
            raise ValueError(
                f"model must return logits of shape [{shape[0]}, {shape[1]}, V], got {list(logits.shape)}"
            )
        least = self.vocab_size or 1
        if logits.shape[-1] < least:
            raise ValueError(
                f"model returned {logits.shape[-1]} logits a position, fewer than vocab_size = {least}"
            )
        return logits


def _ragged(end: Tensor, lengths: Sequence[int]) -> Tensor | None:
    """The rows' ends where they differ: attention without a mask is faster."""
    return end.clone() if min(lengths) < max(lengths) else None


def _call_foreign(model: Model, ids: Tensor, graph: AttentionGraph, keywords: dict[str, Any]) -> Any:
    if isinstance(model, nn.Module) and sys.modules.get("transformers"):  # else it is none of transformers
        from dlmkern.models.transformers_graph import feeding, supports_graph

        if supports_graph(model):
            with feeding(model, graph):
                return model(ids, **keywords)
    output = model(ids, **keywords)
    maps = getattr(output, "attentions", None)
    if maps is None:
        raise ValueError(
            f"the decoder needs the attention of the model, and {type(model).__name__} does not give it: use "
            'a model of dlmkern.models, one of transformers with attn_implementation="sdpa", or one that '
            "returns the maps [B, H, L, L] of all layers in the attribute attentions (for transformers, "
            "model.config.output_attentions = True)"
        )
    graph.add_maps(maps, ids.shape[1], model)
    return output


def _parameters(model: Model) -> frozenset[str]:
    """The names of what its forward takes."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):  # builtins without a signature
        return frozenset()
    return frozenset(signature.parameters)


def _is_shifted(model: Model) -> bool:
    """Whether it says so, or is Dream's official code."""
    official = getattr(getattr(model, "config", None), "model_type", None) == "Dream"
    return bool(getattr(model, "shifted_logits", official))
