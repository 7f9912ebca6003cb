"""Decoders: how the masks of an answer are filled in.

`loop.py` alternates forward passes (`forward.py`) and steps (`step.py`); a step asks the block schedule
(`blocks.py`) where a block ends and the unmasking rule (`unmask*.py`) what to commit. A KV cache (`cache.py`)
says what a forward pass computes. `presets.py` holds the published methods.
"""

from dlmkern.decoders.blocks import BlockSchedule, DepGABlocks, FixedBlocks, WholeSequence
from dlmkern.decoders.cache import DualCache, NoCache, PrefixCache
from dlmkern.decoders.decoder import Decoder
from dlmkern.decoders.presets import (
    PRESETS,
    dapd,
    depcap,
    dream,
    factor,
    find_decoder,
    threshold,
    vanilla,
)
from dlmkern.decoders.state import Reason
from dlmkern.decoders.unmask import CAP, Factor, Graph, OnePerStep, Threshold, UnmaskingRule
from dlmkern.decoders.unmask_dapd import DAPD
from dlmkern.decoders.unmask_dream import DreamSchedule

__all__ = [
    "CAP",
    "DAPD",
    "PRESETS",
    "BlockSchedule",
    "Decoder",
    "DepGABlocks",
    "DreamSchedule",
    "DualCache",
    "Factor",
    "FixedBlocks",
    "Graph",
    "NoCache",
    "OnePerStep",
    "PrefixCache",
    "Reason",
    "Threshold",
    "UnmaskingRule",
    "WholeSequence",
    "dapd",
    "depcap",
    "dream",
    "factor",
    "find_decoder",
    "threshold",
    "vanilla",
]
