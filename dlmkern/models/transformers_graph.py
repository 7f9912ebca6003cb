"""Attention graphs of transformers' own models.

    with feeding(model, graph):
        logits = model(input_ids).logits
    graph.scores()

The model computes what it would compute without: its attention is still transformers' SDPA, whose queries and
keys are looked at in passing. What SDPA leaves out (soft caps, attention sinks) is not in the graph either.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dlmkern.graph import AttentionGraph, bidirectional, causal

try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError:  # before 4.53 transformers has no such interface, and none of its models is supported
    ALL_MASK_ATTENTION_FUNCTIONS = ALL_ATTENTION_FUNCTIONS = None  # type: ignore[assignment]

NAME = "dlmkern_attention_graph"
HIDDEN = -1e4
"""In masks that are added to the scores: at or below this, a key's weight is 0 in float32."""


def supports_graph(model: object) -> TypeGuard[PreTrainedModel]:
    """Whether `feeding` can feed a graph from it.

    It can for a model of transformers (4.54 or newer) that is one stack of layers, whose attention goes
    through transformers' attention interface and is "sdpa". Whether all layers do shows only in the pass.
    The models of this package take the graph as an argument.
    """
    return _unsupported(model) is None


@contextlib.contextmanager
def feeding(model: PreTrainedModel, graph: AttentionGraph) -> Iterator[None]:
    """Feed the graph from the one forward pass that the model makes in this context.

    Meanwhile the model's configuration names another attention function, so threads take turns. Keys that an
    attention mask hides do not count, wherever they are. Values of masks on the CPU are always checked; on an
    accelerator, where this would stall it, only in the first pass of a model that has masks.

    Raises:
        TypeError: `graph` is not an AttentionGraph.
        ValueError: `supports_graph` is false; a wanted layer's attention is causal, is limited to a window
            that is shorter than the row, or has a bias; or it was not one forward pass through the layers.
    """
    if not isinstance(graph, AttentionGraph):
        raise TypeError(f"graph must be an AttentionGraph, got {type(graph).__name__}")
    with _switching:
        if reason := _unsupported(model):
            raise ValueError(f"{type(model).__name__} cannot feed an attention graph: {reason}")
        if model.config._attn_implementation == NAME:
            raise ValueError(f"{type(model).__name__} feeds another attention graph already")
        # Parts of a model may have configurations of their own.
        configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
        switched = [config for config in configs if config._attn_implementation == "sdpa"]
        feed = _Feed(model, graph)
        token = _feed.set(feed)
        try:
            for config in switched:
                # `_attn_implementation` would go on to the configurations within this one.
                config._attn_implementation_internal = NAME
            yield
        finally:
            for config in switched:
                config._attn_implementation_internal = "sdpa"
            _feed.reset(token)
        feed.finish()


_switching = threading.RLock()


def _unsupported(model: object) -> str | None:
    """Why the model cannot feed a graph."""
    if not isinstance(model, PreTrainedModel):
        return "it is not a PreTrainedModel of transformers"
    can_switch = getattr(model, "_can_set_attn_implementation", None)
    if can_switch is None or not can_switch():
        return "its attention does not go through transformers' attention interface, of 4.54 or newer"
    if model.config._attn_implementation not in ("sdpa", NAME):  # the latter while another thread feeds
        return f'its attn_implementation is {model.config._attn_implementation!r}, not "sdpa"'
    return None


class _Feed:
    """A forward pass that is under way."""

    def __init__(self, model: PreTrainedModel, graph: AttentionGraph) -> None:
        self.model = model
        self.graph = graph
        self.n_layers: int = model.config.get_text_config().num_hidden_layers
        self.layer = 0
        """Which one's attention is next. Not all models number their layers, so calls are counted."""
        self.masked = False

    def take(
        self, module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> None:
        layer, self.layer = self.layer, self.layer + 1
        if layer >= self.n_layers:
            raise self.error(
                f"more attention than its {self.n_layers} layers have; expected one forward pass, and no "
                "second stack of layers"
            )
        if not self.graph.wants(layer, self.n_layers):
            return
        if options.get("position_bias") is not None:
            raise self.error(f"a bias of the attention in layer {layer}, which a graph cannot represent")
        key_mask = None
        if mask is not None:
            self.masked = True
            # Told by the shape, as values may go unread.
            window = options.get("sliding_window", getattr(module, "sliding_window", None))
            if window is not None and k.shape[2] > window:
                raise self.error(
                    f"a window of {window} positions in layer {layer}, and rows of {k.shape[2]}; expected "
                    "full attention in the layers of the graph"
                )
            key_mask = self.key_mask(mask, len(q), layer)
        else:
            is_causal = options.get("is_causal")
            if getattr(module, "is_causal", True) if is_causal is None else is_causal:
                raise causal(self.model)
        self.graph.add(q, k, key_mask=key_mask, scale=options.get("scaling"))

    def key_mask(self, mask: Tensor, rows: int, layer: int) -> Tensor:
        """Bool `[rows, L]` from the mask of SDPA, `[rows or 1, H or 1, n, L]`."""
        seen = mask if mask.dtype == torch.bool else mask == 0
        if mask.device.type == "cpu" or id(self.model) not in bidirectional:
            if mask.dtype != torch.bool and (mask[~seen] > HIDDEN).any():
                raise self.error(f"a bias of the attention in layer {layer}, which a graph cannot represent")
            if (seen != seen[:, :1, :1]).any():
                length = seen.shape[-1]
                if seen.shape[2] == length and not seen.triu(1).any():
                    raise causal(self.model)
                raise self.error(f"keys in layer {layer} that some queries or heads see and others do not")
        return seen[:, 0, 0].expand(rows, -1)

    def finish(self) -> None:
        if self.layer != self.n_layers:
            raise self.error(
                f"attention in {self.layer} of {self.n_layers} layers through transformers' interface; "
                "expected one forward pass"
            )
        if self.masked:
            bidirectional[id(self.model)] = self.model

    def error(self, what: str) -> ValueError:
        return ValueError(f"{type(self.model).__name__} had {what}")


_feed: ContextVar[_Feed | None] = ContextVar("feed", default=None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: "sdpa", and the graph gets to see queries and keys."""
    feed = _feed.get()
    if feed is not None:
        feed.take(module, query, key, attention_mask, options)
    result: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, **options
    )
    return result


if ALL_ATTENTION_FUNCTIONS is not None:
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
