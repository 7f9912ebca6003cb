"""Dream: Qwen2's transformer with bidirectional attention, which fills masked tokens (arXiv:2508.15487).

The parameter names and `config.json` fields are those of the official checkpoints (Dream-v0-Base-7B,
Dream-v0-Instruct-7B), so these load without remote code, through `dlmkern.load_model` or through
transformers' `AutoModel`.

The forward pass is `MaskedLM.forward`. Dream was made from a causal model and still predicts as one: the
logits at a position are about the token after it. They are returned as they are; `shifted_logits` tells a
decoder of it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PretrainedConfig
from transformers.utils.generic import ModelOutput

from dlmkern.models import _config
from dlmkern.models.layers import RMSNorm, compute_dtype, rotary_table, rotate
from dlmkern.models.masked_lm import Block, MaskedLM

# Fields of the official configuration with a single supported value. Any other would change the outputs.
_ONLY_SUPPORTED: dict[str, Any] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_dropout": 0.0,
}


class DreamConfig(PretrainedConfig):
    """Configuration of a Dream model; the defaults are those of the 7B checkpoints.

    Fields that do not matter for inference (`initializer_range`, `use_cache`, `max_window_layers`, ...) are
    kept but have no effect.

    Args:
        vocab_size: rows of the embedding and of the output head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU layer.
        num_hidden_layers: number of blocks.
        num_attention_heads: number of query heads; divides `hidden_size`.
        num_key_value_heads: number of key/value heads; divides `num_attention_heads`. None: as many.
        max_position_embeddings: longest sequence the model accepts, in tokens.
        rms_norm_eps: epsilon of RMSNorm.
        rope_theta: base of the rotary frequencies.
        tie_word_embeddings: the output head is the embedding matrix.
        mask_token_id: id of the mask token.
        bos_token_id: id of the token that the base model's prompts begin with.
        eos_token_id: id of the end-of-sequence token.
        pad_token_id: id of the padding token.

    Raises:
        ValueError: a field has a value that this implementation cannot honour; the message names the field.
    """

    model_type = "Dream"
    # What MaskedLM reads.
    attribute_map: ClassVar[dict[str, str]] = {
        "n_layers": "num_hidden_layers",
        "n_kv_heads": "num_key_value_heads",
        "embedding_size": "vocab_size",
        "max_sequence_length": "max_position_embeddings",
    }

    def __init__(
        self,
        vocab_size: int = 152064,
        hidden_size: int = 3584,
        intermediate_size: int = 18944,
        num_hidden_layers: int = 28,
        num_attention_heads: int = 28,
        num_key_value_heads: int | None = 4,
        max_position_embeddings: int = 131072,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1000000.0,
        tie_word_embeddings: bool = False,
        mask_token_id: int | None = 151666,
        bos_token_id: int | None = 151643,
        eos_token_id: int | None = 151643,
        pad_token_id: int | None = 151643,
        **kwargs: Any,
    ) -> None:
        _config.check_supported(kwargs, _ONLY_SUPPORTED)
        # Two names of one thing, the second of newer versions of transformers. Not handed on, because these
        # warn of the first.
        for name in ("rope_scaling", "rope_parameters"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"config field {name} is not supported (only null is, besides rope_theta)")
        super().__init__(**(_ONLY_SUPPORTED | kwargs))
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.tie_word_embeddings = tie_word_embeddings
        self.mask_token_id = mask_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self._check()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: all fields of the architecture (official defaults differ)."""
        return super().to_diff_dict() | _config.architecture(self, DreamConfig, _ONLY_SUPPORTED)

    def _check(self) -> None:
        _config.check_positive_integers(
            self,
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
        _config.check_positive_numbers(self, "rope_theta", "rms_norm_eps")
        _config.check_booleans(self, "tie_word_embeddings")
        _config.check_heads(self, "hidden_size", "num_attention_heads", "num_key_value_heads")
        tokens = ("mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
        _config.check_token_ids(self, self.vocab_size, *tokens)


class DreamAttention(nn.Module):
    """The projections around `attention`, by their official names. Only the last has no bias."""

    def __init__(self, config: DreamConfig) -> None:
        super().__init__()
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=True)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)


class DreamMLP(nn.Module):
    """SwiGLU (Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, config: DreamConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class DreamBlock(Block):
    """One transformer block: `x + attention(norm(x))`, then `x + SwiGLU(norm(x))`."""

    def __init__(self, config: DreamConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, bias=False)
        self.self_attn = DreamAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, bias=False)
        self.mlp = DreamMLP(config)

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        h = self.input_layernorm(x)
        attn = self.self_attn
        q, k, v = (
            proj(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        return rotate(q, rope), rotate(k, rope), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(attended.transpose(1, 2).flatten(-2))
        mlp: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + mlp


class DreamTransformer(nn.Module):
    """Embedding, blocks and final norm, by their official names."""

    def __init__(self, config: DreamConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DreamBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, bias=False)


class DreamModel(MaskedLM):
    """Dream with its output head. `model(input_ids).logits` are the raw logits, about the next token."""

    config_class = DreamConfig
    shifted_logits = True

    def __init__(self, config: DreamConfig) -> None:
        super().__init__(config)
        self.model = DreamTransformer(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embed_tokens

    @property
    def transformer(self) -> DreamTransformer:
        """The part that holds all parameters but those of the output head."""
        transformer = self.model
        assert isinstance(transformer, DreamTransformer)
        return transformer

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.layers

    def embed(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.transformer.embed_tokens(input_ids)
        return x

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Rounded to the model's dtype, as in the official code: a bfloat16 model rotates in bfloat16.
        dtype = self.transformer.embed_tokens.weight.dtype
        config = self.config
        cos, sin = rotary_table(positions, config.head_dim, config.rope_theta, compute_dtype(dtype))
        return cos.to(dtype), sin.to(dtype)

    def head(self, x: Tensor) -> Tensor:
        x = self.transformer.norm(x)
        tied = self.config.tie_word_embeddings
        logits: Tensor = linear(x, self.transformer.embed_tokens.weight) if tied else self.lm_head(x)
        return logits

    def diffusion_generate(
        self, inputs: Tensor, generation_config: object = None, **kwargs: Any
    ) -> Tensor | ModelOutput:
        """`dlmkern.drop_in.dream.diffusion_generate` with this model, by the official name."""
        from dlmkern.drop_in.dream import diffusion_generate  # decoding builds on models

        return diffusion_generate(self, inputs, generation_config, **kwargs)
