"""The public ops: documentation, checks and registration with torch; the work is done by a backend.

The ops on logits take ``[n, V]`` or batched ``[B, n, V]``, those on keys and values ``[B, H, n, d]``: torch
tensors, NumPy arrays or anything else with ``__dlpack__``, and they answer in kind. The rows of a batch never
influence each other.
"""

from dlmkern.ops.attention_graph import attention_graph
from dlmkern.ops.block_attention import BlockAttention, block_attention
from dlmkern.ops.cap_select import CapSelection, cap_select
from dlmkern.ops.confidence_select import ConfidenceSelection, confidence_select
from dlmkern.ops.conflict_matrix import conflict_matrix
from dlmkern.ops.cover_attention import CoverAttention, cover_attention
from dlmkern.ops.cover_seeds import CoverSeeds, cover_seeds
from dlmkern.ops.cover_verify import Verdict, cover_verify
from dlmkern.ops.dapd_select import dapd_select
from dlmkern.ops.depga_block import depga_block
from dlmkern.ops.diagonal_correction import diagonal_correction
from dlmkern.ops.independent_set import independent_set
from dlmkern.ops.kv_block_write import KVDrift, kv_block_write
from dlmkern.ops.token_stats import TokenStats, kl_entropy, token_stats
from dlmkern.ops.topk_kl import topk_kl
from dlmkern.ops.topk_snapshot import TopKSnapshot, topk_snapshot

__all__ = [
    "BlockAttention",
    "CapSelection",
    "ConfidenceSelection",
    "CoverAttention",
    "CoverSeeds",
    "KVDrift",
    "TokenStats",
    "TopKSnapshot",
    "Verdict",
    "attention_graph",
    "block_attention",
    "cap_select",
    "confidence_select",
    "conflict_matrix",
    "cover_attention",
    "cover_seeds",
    "cover_verify",
    "dapd_select",
    "depga_block",
    "diagonal_correction",
    "independent_set",
    "kl_entropy",
    "kv_block_write",
    "token_stats",
    "topk_kl",
    "topk_snapshot",
]
