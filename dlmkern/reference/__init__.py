"""The definition of every op in plain torch: what the faster backends must equal, and what runs where none
of them does.

Written to be read next to the papers. Every function runs on any device, reads no value back to the host and
takes the arguments of the ``torch.ops.dlmkern`` op of its name.
"""

from dlmkern.reference.attention_graph import attention_graph
from dlmkern.reference.block_attention import block_attention
from dlmkern.reference.cap_select import cap_select
from dlmkern.reference.confidence_select import confidence_select
from dlmkern.reference.conflict_matrix import conflict_matrix
from dlmkern.reference.cover_attention import cover_attention
from dlmkern.reference.cover_seeds import cover_seeds
from dlmkern.reference.cover_verify import cover_verify
from dlmkern.reference.dapd_select import dapd_select
from dlmkern.reference.depga_block import depga_block
from dlmkern.reference.diagonal_correction import diagonal_correction
from dlmkern.reference.independent_set import independent_set
from dlmkern.reference.kv_block_write import kv_block_write
from dlmkern.reference.token_stats import token_stats
from dlmkern.reference.topk_kl import topk_kl
from dlmkern.reference.topk_snapshot import topk_snapshot

__all__ = [
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
    "kv_block_write",
    "token_stats",
    "topk_kl",
    "topk_snapshot",
]
