"""Small random checkpoints in LLaDA's official format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

FIELDS: dict[str, Any] = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "mlp_hidden_size": 48,
    "vocab_size": 50,
    "embedding_size": 64,
    "max_sequence_length": 40,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "mask_token_id": 49,
    "eos_token_id": 48,
}


def random_weights(fields: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights under their official names; spelt out here so that the model's own names are checked."""
    generator = torch.Generator().manual_seed(seed)
    width, hidden = fields["d_model"], fields["mlp_hidden_size"]
    kv_width = width // fields["n_heads"] * fields["n_kv_heads"]
    prefix = "model.transformer."
    shapes: dict[str, list[int]] = {prefix + "wte.weight": [fields["embedding_size"], width]}
    linear = {
        "q_proj": [width, width],
        "k_proj": [kv_width, width],
        "v_proj": [kv_width, width],
        "attn_out": [width, width],
        "ff_proj": [hidden, width],
        "up_proj": [hidden, width],
        "ff_out": [width, hidden],
    }
    for layer in range(fields["n_layers"]):
        block = f"{prefix}blocks.{layer}."
        for name, shape in linear.items():
            shapes[f"{block}{name}.weight"] = shape
            is_qkv = name in ("q_proj", "k_proj", "v_proj")
            if fields.get("include_bias") or (is_qkv and fields.get("include_qkv_bias")):
                shapes[f"{block}{name}.bias"] = shape[:1]
        for name in ("attn_norm", "ff_norm"):
            shapes[f"{block}{name}.weight"] = [width]
            if fields.get("bias_for_layer_norm"):
                shapes[f"{block}{name}.bias"] = [width]
    shapes[prefix + "ln_f.weight"] = [width]
    if fields.get("bias_for_layer_norm"):
        shapes[prefix + "ln_f.bias"] = [width]
    if not fields.get("weight_tying"):
        shapes[prefix + "ff_out.weight"] = [fields["embedding_size"], width]
        if fields.get("include_bias"):
            shapes[prefix + "ff_out.bias"] = [fields["embedding_size"]]
    return {
        name: torch.randn(shape, generator=generator) * (1.0 if len(shape) == 1 else 0.3)
        for name, shape in shapes.items()
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write a random checkpoint, weights in dtype `stored`; other keywords replace fields of its config."""

    def write(name: str = "checkpoint", stored: torch.dtype = torch.float32, **changes: Any) -> Path:
        fields = FIELDS | changes
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields))
        weights = {name: value.to(stored) for name, value in random_weights(fields).items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return write
