"""Checks of what a forward pass gets."""

from __future__ import annotations

import torch
from torch import Tensor

from dlmkern.graph import AttentionGraph
from dlmkern.models.kv_cache import KVCache
from dlmkern.ops._check import is_number


def readable(x: Tensor) -> bool:
    """Whether the values may be looked at: they are in host memory, and nobody is tracing."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def ids(name: str, x: Tensor, shape: tuple[int | None, ...], low: int, stop: int) -> None:
    """Check an int64 tensor: its dtype, its shape (None stands for any size) and, on the CPU, its range."""
    int64(name, x, shape)
    in_range(name, x, low, stop)


def int64(name: str, x: Tensor, shape: tuple[int | None, ...]) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.int64:
        raise TypeError(f"{name} must be an int64 tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() != len(shape) or any(
        want not in (None, got) for want, got in zip(shape, x.shape, strict=True)
    ):
        expected = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{expected}], got {list(x.shape)}")


def in_range(name: str, x: Tensor, low: int, stop: int) -> None:
    if readable(x) and x.numel() and (x.min() < low or x.max() >= stop):
        raise ValueError(f"{name} must lie in [{low}, {stop}), got values from {x.min()} to {x.max()}")


def kind(cache: KVCache, expected: tuple[int, int, int, torch.dtype, torch.device]) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a KVCache, got {type(cache).__name__}")
    if cache.kind != expected:
        raise ValueError(
            "cache must be from this model's new_cache, with (layers, heads, head_dim, dtype, device) = "
            f"{expected}, got {cache.kind}"
        )


def cache_size(cache: KVCache | None, cache_rows: Tensor | None, batch: int, length: int) -> None:
    if cache is None:
        if cache_rows is not None:
            raise ValueError("cache_rows needs cache")
        return
    if cache_rows is not None:
        ids("cache_rows", cache_rows, (batch,), 0, cache.rows)
    elif cache.rows != batch:
        raise ValueError(f"cache has {cache.rows} rows, input_ids has {batch}")
    if length > cache.length:
        raise ValueError(f"cache holds {cache.length} positions, input_ids has {length}")


def graph(graph: AttentionGraph, input_ids: Tensor, length: int) -> None:
    """Check that the graph fits, before anything is written to the cache."""
    if not isinstance(graph, AttentionGraph):
        raise TypeError(f"graph must be an AttentionGraph, got {type(graph).__name__}")
    rows, batch = len(graph.positions), len(input_ids)
    if rows > batch:
        raise ValueError(f"graph has {rows} rows of positions, input_ids has {batch} rows")
    if graph.positions.device != input_ids.device:
        raise ValueError(f"graph.positions must be on {input_ids.device}, got {graph.positions.device}")
    ids("graph.positions", graph.positions, (None, None), -1, length)


def seeds(seeds: Tensor, input_ids: Tensor) -> None:
    if not isinstance(seeds, Tensor) or seeds.dtype != torch.bool:
        raise TypeError(f"seeds must be a bool tensor, got {getattr(seeds, 'dtype', type(seeds).__name__)}")
    if seeds.shape != input_ids.shape:
        raise ValueError(f"seeds must have shape {list(input_ids.shape)}, got {list(seeds.shape)}")
    if seeds.device != input_ids.device:
        raise ValueError(f"seeds must be on {input_ids.device}, got {seeds.device}")


def share(name: str, value: float) -> None:
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a share in [0, 1], got {value!r}")


def shadow_positions(positions: Tensor, input_ids: Tensor, shifted_logits: bool) -> None:
    """Check all but the values, whose range depends on how many there are."""
    if shifted_logits:
        raise ValueError("shadow_positions needs a model whose output at a position predicts the token there")
    batch, columns = input_ids.shape
    int64("shadow_positions", positions, (batch, None))
    if positions.shape[1] > columns:
        raise ValueError(f"shadow_positions has {positions.shape[1]} columns, input_ids has {columns}")
    if positions.device != input_ids.device:
        raise ValueError(f"shadow_positions must be on {input_ids.device}, got {positions.device}")
