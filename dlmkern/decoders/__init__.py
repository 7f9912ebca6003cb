"""Decoders: how the masks of an answer are filled in.

`loop.py` alternates forward passes (`forward.py`) and steps (`step.py`); a step asks the block schedule
(`blocks.py`) where a block ends, the unmasking rule (`unmask*.py`) what to commit, and the revision rule
(`revise*.py`) what to take back. A KV cache (`cache.py`) says what a forward pass computes. `presets.py`
holds the published methods.
"""

from dlmkern.decoders.blocks import BlockSchedule, DepGABlocks, FixedBlocks, WholeSequence
from dlmkern.decoders.cache import DualCache, NoCache, PrefixCache
from dlmkern.decoders.decoder import Decoder
from dlmkern.decoders.presets import (
    PRESETS,
    cover,
    dapd,
    depcap,
    dream,
    factor,
    find_decoder,
    saber,
    threshold,
    vanilla,
    wino,
)
from dlmkern.decoders.revise import WINO, Revision, RevisionRule, Saber, Verification
from dlmkern.decoders.revise_cover import COVER
from dlmkern.decoders.state import Reason, State
from dlmkern.decoders.unmask import (
    CAP,
    Candidates,
    Factor,
    Graph,
    MeanThreshold,
    OnePerStep,
    Selection,
    Threshold,
    UnmaskingRule,
    WideThreshold,
)
from dlmkern.decoders.unmask_dapd import DAPD
from dlmkern.decoders.unmask_dream import DreamSchedule

__all__ = [
    "CAP",
    "COVER",
    "DAPD",
    "PRESETS",
    "WINO",
    "BlockSchedule",
    "Candidates",
    "Decoder",
    "DepGABlocks",
    "DreamSchedule",
    "DualCache",
    "Factor",
    "FixedBlocks",
    "Graph",
    "MeanThreshold",
    "NoCache",
    "OnePerStep",
    "PrefixCache",
    "Reason",
    "Revision",
    "RevisionRule",
    "Saber",
    "Selection",
    "State",
    "Threshold",
    "UnmaskingRule",
    "Verification",
    "WholeSequence",
    "WideThreshold",
    "cover",
    "dapd",
    "depcap",
    "dream",
    "factor",
    "find_decoder",
    "saber",
    "threshold",
    "vanilla",
    "wino",
]
