"""Small random checkpoints in the official formats, and a plain second implementation of the models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from dlmkern.models.kv_cache import KVCache
from dlmkern.models.masked_lm import MaskedLM

DATA = Path(__file__).parents[1] / "data"

LLADA: dict[str, Any] = {
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

DREAM: dict[str, Any] = {
    "model_type": "Dream",
    "architectures": ["DreamModel"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 40,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "mask_token_id": 49,
    "bos_token_id": 48,
    "eos_token_id": 48,
    "pad_token_id": 48,
}

FIELDS = {fields["model_type"]: fields for fields in (LLADA, DREAM)}


def ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


def random_weights(fields: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights under their official names; spelt out here so that the model's own names are checked."""
    generator = torch.Generator().manual_seed(seed)
    shapes = llada_shapes(fields) if fields["model_type"] == "llada" else dream_shapes(fields)
    return {
        name: torch.randn(shape, generator=generator) * (1.0 if len(shape) == 1 else 0.3)
        for name, shape in shapes.items()
    }


def llada_shapes(fields: dict[str, Any]) -> dict[str, list[int]]:
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
    return shapes


def dream_shapes(fields: dict[str, Any]) -> dict[str, list[int]]:
    width, hidden, heads = (fields[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads"))
    kv_width = width // heads * (fields["num_key_value_heads"] or heads)
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [fields["vocab_size"], width]}
    for layer in range(fields["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        for name, size in {"q": width, "k": kv_width, "v": kv_width}.items():
            shapes[f"{block}self_attn.{name}_proj.weight"] = [size, width]
            shapes[f"{block}self_attn.{name}_proj.bias"] = [size]
        shapes[block + "self_attn.o_proj.weight"] = [width, width]
        shapes[block + "mlp.gate_proj.weight"] = [hidden, width]
        shapes[block + "mlp.up_proj.weight"] = [hidden, width]
        shapes[block + "mlp.down_proj.weight"] = [width, hidden]
        shapes[block + "input_layernorm.weight"] = [width]
        shapes[block + "post_attention_layernorm.weight"] = [width]
    shapes["model.norm.weight"] = [width]
    if not fields.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = [fields["vocab_size"], width]
    return shapes


# embedding, blocks, final norm, head; in a block: its norms, q, k, v, attention's output, gate, up, down.
LLADA_NAMES = (
    ("wte", "blocks", "ln_f", "ff_out"),
    ("attn_norm", "ff_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out"),
)
DREAM_NAMES = (
    ("embed_tokens", "layers", "norm", "lm_head"),
    (
        *("input_layernorm", "post_attention_layernorm"),
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ),
)

KeyValue = tuple[Tensor, Tensor]
Memory = dict[tuple[int, int], KeyValue]
"""By layer and position: the rotated key and the value of all heads, each `[Hkv, head_dim]`."""


def assert_close(got: Tensor, expected: Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def poisoned(model: MaskedLM, rows: int, length: int) -> KVCache:
    """A cache full of finite numbers that would spoil any sum they get into."""
    cache = model.new_cache(rows, length)
    cache.storage.fill_(1e6)
    return cache


def assert_holds(cache: KVCache, row: int, memory: Memory) -> None:
    for (layer, position), kv in memory.items():
        assert_close(cache.storage[layer, :, row, :, position], torch.stack(kv))


class PlainModel:
    """The models for one row, in float64 and one head at a time; rotations multiply by complex numbers.

    `maps` are the last call's attention weights `[H, n, L]`, layer by layer.
    """

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        self.weights = {
            name.removeprefix("model.").removeprefix("transformer."): value.double()
            for name, value in load_file(folder / "model.safetensors").items()
        }
        self.config = config
        self.names = LLADA_NAMES if config.model_type == "llada" else DREAM_NAMES

    def __call__(
        self, tokens: Tensor, places: Sequence[int] | None = None, memory: Memory | None = None
    ) -> Tensor:
        """Logits `[n, V]` of tokens `[n]` that are at these places of the row (None: from 0 on).

        They see all keys and values that are in the memory once their own have replaced what was there.
        """
        config, weights = self.config, self.weights
        places = range(len(tokens)) if places is None else places
        memory = {} if memory is None else memory
        (embedding, blocks, final_norm, head), parts = self.names
        x = weights[embedding + ".weight"][tokens]
        self.maps: list[Tensor] = []
        for layer in range(config.num_hidden_layers):
            norm, mlp_norm, to_q, to_k, to_v, out, gate, up, down = (
                f"{blocks}.{layer}.{part}" for part in parts
            )
            h = self.norm(x, norm)
            q = self.rotated(self.linear(h, to_q), places)
            k = self.rotated(self.linear(h, to_k), places)
            v = self.linear(h, to_v).unflatten(-1, k.shape[1:])
            attended = self.attend(layer, q, k, v, places, memory)
            x = x + self.linear(attended, out)
            h = self.norm(x, mlp_norm)
            y = self.linear(h, gate)
            x = x + self.linear(y / (1 + torch.exp(-y)) * self.linear(h, up), down)
        x = self.norm(x, final_norm)
        logits = self.linear(x, head if head + ".weight" in weights else embedding)
        return logits / math.sqrt(config.hidden_size) if getattr(config, "scale_logits", False) else logits

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, places: Sequence[int], memory: Memory
    ) -> Tensor:
        """`[n, Hq * head_dim]` from queries `[n, Hq, head_dim]`, keys and values `[n, Hkv, head_dim]`."""
        memory.update({(layer, place): (k[i], v[i]) for i, place in enumerate(places)})
        rows = [kv for (owner, _), kv in sorted(memory.items(), key=lambda item: item[0]) if owner == layer]
        keys, values = (torch.stack(part) for part in zip(*rows, strict=True))
        heads, maps = [], []
        for i in range(q.shape[1]):
            shared = i * k.shape[1] // q.shape[1]
            scores = q[:, i] @ keys[:, shared].T / math.sqrt(q.shape[-1])
            maps.append(scores.softmax(-1))
            heads.append(maps[-1] @ values[:, shared])
        self.maps.append(torch.stack(maps))
        return torch.cat(heads, -1)

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[name + ".weight"].T
        return y + self.weights[name + ".bias"] if name + ".bias" in self.weights else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        y = self.weights[name + ".weight"] * y
        return y + self.weights[name + ".bias"] if name + ".bias" in self.weights else y

    def rotated(self, x: Tensor, places: Sequence[int]) -> Tensor:
        """`[n, H, head_dim]` from `[n, H * head_dim]`; i and i + head_dim / 2 make up a complex number."""
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        x = x.unflatten(-1, (-1, 2, head_dim // 2))
        angles = torch.tensor(
            [
                [place / self.config.rope_theta ** (2 * pair / head_dim) for pair in range(head_dim // 2)]
                for place in places
            ],
            dtype=torch.float64,
        ).reshape(len(places), 1, head_dim // 2)
        y = torch.complex(x[:, :, 0], x[:, :, 1]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((y.real, y.imag), -1)


class KeysOfEachQuery(PlainModel):
    """A plain model in which every query has keys of its own, which `seen` gathers.

    `maps` are empty if their numbers differ.
    """

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, places: Sequence[int], memory: Memory
    ) -> Tensor:
        seen = self.seen(layer, [*zip(k, v, strict=True)], places, memory)
        rows, maps = [], []
        for query, own in zip(q, seen, strict=True):
            keys, values = (torch.stack(part) for part in zip(*own, strict=True))  # [L, Hkv, head_dim]
            keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
            weights = (torch.einsum("hd,lhd->hl", query, keys) / math.sqrt(q.shape[-1])).softmax(-1)
            rows.append(torch.einsum("hl,lhd->hd", weights, values).flatten())
            maps.append(weights)
        if len({len(own) for own in seen}) == 1:
            self.maps.append(torch.stack(maps, dim=1))
        return torch.stack(rows)

    def seen(
        self, layer: int, rows: Sequence[KeyValue], places: Sequence[int], memory: Memory
    ) -> list[list[KeyValue]]:
        """For each query the keys and values that it sees. `rows` are those of this pass, at `places`."""
        raise NotImplementedError
