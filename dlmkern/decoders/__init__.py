"""Decoders: how the masks of an answer are filled in.

`loop.py` alternates forward passes (`forward.py`) and steps (`step.py`); a step asks the block schedule
(`blocks.py`) where a block ends and the unmasking rule (`unmask.py`) what to commit. `presets.py` holds the
published methods.
"""

from dlmkern.decoders.blocks import BlockSchedule, DepGABlocks, FixedBlocks, WholeSequence
from dlmkern.decoders.decoder import Decoder
from dlmkern.decoders.presets import PRESETS, depcap, find_decoder, threshold, vanilla
from dlmkern.decoders.state import Reason
from dlmkern.decoders.unmask import CAP, OnePerStep, Threshold, UnmaskingRule

__all__ = [
    "CAP",
    "PRESETS",
    "BlockSchedule",
    "Decoder",
    "DepGABlocks",
    "FixedBlocks",
    "OnePerStep",
    "Reason",
    "Threshold",
    "UnmaskingRule",
    "WholeSequence",
    "depcap",
    "find_decoder",
    "threshold",
    "vanilla",
]
