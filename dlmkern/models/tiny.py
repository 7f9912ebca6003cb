"""The embedded model: a LLaDA of 166,720 parameters, trained on `chains4` by `examples/train_tiny.py`."""

from __future__ import annotations

from pathlib import Path

import torch

from dlmkern.models.load import load_model
from dlmkern.models.masked_lm import MaskedLM

CHECKPOINT = Path(__file__).parent / "tiny_checkpoint"


def tiny(dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu") -> MaskedLM:
    """The embedded model; prompts and answers are those of `dlmkern.models.chains4`.

    It is small enough to decode on one core in milliseconds, and its answers can be checked by rule, so it
    shows what a decoder gains in forward passes and loses in quality. Arguments as in `load_model`.
    """
    return load_model(CHECKPOINT, dtype, device)
