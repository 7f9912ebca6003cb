"""Models that read the official checkpoints.

Importing this package registers them with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from dlmkern.graph import AttentionGraph
from dlmkern.models.dream import DreamConfig, DreamModel
from dlmkern.models.llada import LLaDAConfig, LLaDAModelLM
from dlmkern.models.load import MODELS, load_model, load_tokenizer
from dlmkern.models.tiny import tiny

__all__ = [
    "AttentionGraph",
    "DreamConfig",
    "DreamModel",
    "LLaDAConfig",
    "LLaDAModelLM",
    "load_model",
    "load_tokenizer",
    "tiny",
]

for _name, _model in MODELS.items():
    AutoConfig.register(_name, _model.config_class)
    for _auto in (AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM):
        _auto.register(_model.config_class, _model)
