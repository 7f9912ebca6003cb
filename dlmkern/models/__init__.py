"""Models that read the official checkpoints.

Importing this package registers them with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from dlmkern.models.llada import LLaDAConfig, LLaDAModelLM
from dlmkern.models.load import load_model, load_tokenizer
from dlmkern.models.tiny import tiny

__all__ = ["LLaDAConfig", "LLaDAModelLM", "load_model", "load_tokenizer", "tiny"]

AutoConfig.register(LLaDAConfig.model_type, LLaDAConfig)
AutoModel.register(LLaDAConfig, LLaDAModelLM)
AutoModelForCausalLM.register(LLaDAConfig, LLaDAModelLM)
AutoModelForMaskedLM.register(LLaDAConfig, LLaDAModelLM)
