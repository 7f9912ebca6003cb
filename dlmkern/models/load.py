"""Read a checkpoint folder in its official format: `config.json` and safetensors, whole or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, Qwen2Tokenizer

from dlmkern.models.dream import DreamModel
from dlmkern.models.llada import LLaDAModelLM
from dlmkern.models.masked_lm import MaskedLM

MODELS: dict[str, type[MaskedLM]] = {"llada": LLaDAModelLM, "Dream": DreamModel}

# Tokenizers whose official code comes with the checkpoint, and the class of transformers that does the same.
_TOKENIZERS = {"DreamTokenizer": Qwen2Tokenizer}

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_STORED_DTYPES = ("F64", "F32", "F16", "BF16")


def load_model(
    folder: str | Path, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu"
) -> MaskedLM:
    """Load a model for inference.

    Nothing is guessed: every tensor of the model must be in the files, under its name and in its shape, and
    nothing else. Tensors are read one at a time, the largest first, so no second copy of the weights ever
    exists.

    Args:
        folder: folder with `config.json` and either `model.safetensors` or `model.safetensors.index.json` and
            the shards it names.
        dtype: "float32", "bfloat16", "float16", "float64", or that torch.dtype.
        device: where the weights go.

    Returns:
        The model in evaluation mode. `model(input_ids).logits` are its raw logits; `model.config` has
        `mask_token_id`, `eos_token_id`, `vocab_size` and `max_sequence_length`.

    Raises:
        FileNotFoundError: the folder, `config.json`, the weights or a shard do not exist.
        ValueError: unknown model type, dtype or device; a config field is missing or not supported; a file is
            damaged; a tensor is missing, unexpected, or of the wrong shape or dtype. The message names it.
    """
    target_dtype = _dtype(dtype)
    target_device = _device(device)
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no such model folder: {folder} (checkpoints are read from local folders, not downloaded)"
        )
    model_class, config = _config(folder)
    with torch.device("meta"):
        model = model_class(config)
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    files = _weight_files(folder)
    _check_weights(folder, shapes, files)
    tensors: dict[str, Tensor] = {}
    for name in sorted(files, key=lambda name: model.get_parameter(name).numel(), reverse=True):
        # One mapping a tensor: pages that were read are given back before the next tensor is.
        with safe_open(files[name], framework="pt") as file:
            tensors[name] = torch.empty(shapes[name], dtype=target_dtype, device=target_device)
            tensors[name].copy_(file.get_tensor(name))
    model.load_state_dict(tensors, assign=True)
    model.eval()
    return model


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint folder, or None if the folder holds none. Code in the folder is not run.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: `tokenizer_config.json` is damaged, or names a class that only code in the folder has.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no such model folder: {folder}")
    config = folder / "tokenizer_config.json"
    if not (config.exists() or (folder / "tokenizer.json").exists()):
        return None
    tokenizer_class = _read_json(config).get("tokenizer_class") if config.exists() else None
    reader = _TOKENIZERS.get(str(tokenizer_class), AutoTokenizer)
    tokenizer: PreTrainedTokenizerBase = reader.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    return tokenizer


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # an unknown name; a backend that torch was built without
        raise ValueError(f"device {device!r} cannot be used: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _config(folder: Path) -> tuple[type[MaskedLM], PretrainedConfig]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    fields = _read_json(path)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise ValueError(f"{path}: unknown model_type {model_type!r}, known: {', '.join(MODELS)}")
    if fields.get("mask_token_id") is None:
        raise ValueError(f"{path}: field mask_token_id is missing")
    model_class = MODELS[model_type]
    config_class = model_class.config_class
    assert config_class is not None
    try:
        return model_class, config_class.from_dict(fields)
    except Exception as error:  # transformers checks its own fields with errors of many types
        raise ValueError(f"{path}: {error}") from error


def _weight_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor in the checkpoint."""
    whole = folder / "model.safetensors"
    if whole.is_file():
        return dict.fromkeys(_tensor_names(whole), whole)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise FileNotFoundError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{index}: field weight_map must map tensor names to file names")
    files: dict[str, Path] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        if Path(shard).name != shard:
            raise ValueError(f"{index}: shard {shard!r} is not a file name in this folder")
        if not path.is_file():
            raise FileNotFoundError(f"{index} names {shard}, which does not exist")
        listed = {name for name, file in weight_map.items() if file == shard}
        if stray := listed ^ set(_tensor_names(path)):
            raise ValueError(f"{path} and {index.name} disagree about {_list(stray)}")
        files |= dict.fromkeys(listed, path)
    return files


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


def _check_weights(folder: Path, shapes: dict[str, list[int]], files: dict[str, Path]) -> None:
    if missing := shapes.keys() - files.keys():
        raise ValueError(f"{folder}: missing tensors: {_list(missing)}")
    if unexpected := files.keys() - shapes.keys():
        raise ValueError(f"{folder}: unexpected tensors: {_list(unexpected)}")
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in sorted(shapes.keys() & file.keys()):
                stored = file.get_slice(name)
                if stored.get_shape() != shapes[name]:
                    raise ValueError(
                        f"{path}: {name} has shape {stored.get_shape()}, expected {shapes[name]}"
                    )
                if stored.get_dtype() not in _STORED_DTYPES:
                    expected = ", ".join(_STORED_DTYPES)
                    raise ValueError(f"{path}: {name} has dtype {stored.get_dtype()}, not one of {expected}")


def _list(names: set[str]) -> str:
    shown = sorted(names)[:5]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
