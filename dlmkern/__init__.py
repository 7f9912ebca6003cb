"""Kernels and decoders that make masked diffusion language models decode faster without retraining.

The ops, such as ``dlmkern.cap_select``, work on the tensors at hand; ``dlmkern.generate`` decodes with a
model.
"""

import importlib
from typing import Any

from dlmkern._version import __version__
from dlmkern.backends import BackendUnavailableError, use_backend
from dlmkern.ops import (
    BlockAttention,
    CapSelection,
    ConfidenceSelection,
    CoverAttention,
    CoverSeeds,
    KVDrift,
    TokenStats,
    TopKSnapshot,
    Verdict,
    attention_graph,
    block_attention,
    cap_select,
    confidence_select,
    conflict_matrix,
    cover_attention,
    cover_seeds,
    cover_verify,
    dapd_select,
    depga_block,
    diagonal_correction,
    independent_set,
    kl_entropy,
    kv_block_write,
    token_stats,
    topk_kl,
    topk_snapshot,
)

# Imported at first use, because models need transformers.
_LAZY = {
    "decoders": "dlmkern.decoders",
    "drop_in": "dlmkern.drop_in",
    "generate": "dlmkern.generation:generate",
    "generate_stream": "dlmkern.generation:generate_stream",
    "load_model": "dlmkern.models:load_model",
    "models": "dlmkern.models",
}

__all__ = [
    "BackendUnavailableError",
    "BlockAttention",
    "CapSelection",
    "ConfidenceSelection",
    "CoverAttention",
    "CoverSeeds",
    "KVDrift",
    "TokenStats",
    "TopKSnapshot",
    "Verdict",
    "__version__",
    "attention_graph",
    "block_attention",
    "cap_select",
    "confidence_select",
    "conflict_matrix",
    "cover_attention",
    "cover_seeds",
    "cover_verify",
    "dapd_select",
    "decoders",
    "depga_block",
    "diagonal_correction",
    "drop_in",
    "generate",
    "generate_stream",
    "independent_set",
    "kl_entropy",
    "kv_block_write",
    "load_model",
    "models",
    "token_stats",
    "topk_kl",
    "topk_snapshot",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, _, attribute = _LAZY[name].partition(":")
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
