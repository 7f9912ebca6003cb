"""LLaDA: a transformer with bidirectional attention that fills masked tokens (Nie et al., arXiv:2502.09992).

The parameter names and `config.json` fields are those of the official checkpoints (LLaDA-8B, LLaDA-1.5), so
these load without remote code, through `dlmkern.load_model` or through transformers' `AutoModel`.

The forward pass is `MaskedLM.forward`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PretrainedConfig

from dlmkern.models import _config
from dlmkern.models.layers import RMSNorm, compute_dtype, rotary_table, rotate
from dlmkern.models.masked_lm import Block, MaskedLM

# Fields of the official configuration with a single supported value. Any other would change the outputs.
_ONLY_SUPPORTED: dict[str, Any] = {
    "block_type": "llama",
    "block_group_size": 1,
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "rope": True,
    "alibi": False,
    "clip_qkv": None,
    "residual_dropout": 0.0,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
}


class LLaDAConfig(PretrainedConfig):
    """Configuration of a LLaDA model; the defaults are those of LLaDA-8B.

    Fields that do not matter for inference (`init_fn`, `precision`, `flash_attention`, ...) are kept
    but have no effect.

    Args:
        d_model: width of the residual stream.
        n_heads: number of query heads; divides `d_model`.
        n_kv_heads: number of key/value heads; divides `n_heads`. None: 1 if `multi_query_attention`, else
            `n_heads`.
        n_layers: number of blocks.
        mlp_hidden_size: width of the SwiGLU layer. None: `mlp_ratio * d_model`.
        mlp_ratio: see `mlp_hidden_size`.
        vocab_size: number of tokens.
        embedding_size: rows of the embedding and of the output head, `>= vocab_size`. None: `vocab_size`.
            The rows beyond `vocab_size` are padding, not tokens; the model still returns their logits.
        max_sequence_length: longest sequence the model accepts, in tokens.
        rope_theta: base of the rotary frequencies.
        rope_full_precision: rotate queries and keys in float32 (float64 models: in float64), not in the
            model's dtype.
        rms_norm_eps: epsilon of RMSNorm.
        include_bias: all linear layers have a bias.
        include_qkv_bias: the query, key and value projections have a bias.
        bias_for_layer_norm: the norms have a bias. None: as `include_bias`.
        multi_query_attention: see `n_kv_heads`.
        weight_tying: the output head is the embedding matrix.
        scale_logits: divide the logits by `sqrt(d_model)`.
        mask_token_id: id of the mask token.
        eos_token_id: id of the end-of-sequence token.
        pad_token_id: id of the padding token.

    Raises:
        ValueError: a field has a value that this implementation cannot honour; the message names the field.
    """

    model_type = "llada"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_sequence_length",
    }

    def __init__(
        self,
        d_model: int = 4096,
        n_heads: int = 32,
        n_kv_heads: int | None = None,
        n_layers: int = 32,
        mlp_hidden_size: int | None = 12288,
        mlp_ratio: int = 4,
        vocab_size: int = 126464,
        embedding_size: int | None = None,
        max_sequence_length: int = 4096,
        rope_theta: float = 500000.0,
        rope_full_precision: bool = True,
        rms_norm_eps: float = 1e-5,
        include_bias: bool = False,
        include_qkv_bias: bool = False,
        bias_for_layer_norm: bool | None = False,
        multi_query_attention: bool | None = None,
        weight_tying: bool = False,
        scale_logits: bool = False,
        mask_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        _config.check_supported(kwargs, _ONLY_SUPPORTED)
        # Not handed on, because transformers warns of the name.
        if kwargs.pop("rope_scaling", None) is not None:
            raise ValueError("config field rope_scaling is not supported (only null is)")
        super().__init__(**(_ONLY_SUPPORTED | kwargs))
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_layers = n_layers
        self.n_kv_heads = n_kv_heads if n_kv_heads is not None else 1 if multi_query_attention else n_heads
        self.mlp_hidden_size = mlp_hidden_size if mlp_hidden_size is not None else mlp_ratio * d_model
        self.mlp_ratio = mlp_ratio
        self.vocab_size = vocab_size
        self.embedding_size = embedding_size if embedding_size is not None else vocab_size
        self.max_sequence_length = max_sequence_length
        self.rope_theta = rope_theta
        self.rope_full_precision = rope_full_precision
        self.rms_norm_eps = rms_norm_eps
        self.include_bias = include_bias
        self.include_qkv_bias = include_qkv_bias
        self.bias_for_layer_norm = bias_for_layer_norm
        self.multi_query_attention = multi_query_attention
        self.weight_tying = weight_tying
        self.scale_logits = scale_logits
        self.mask_token_id = mask_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self._check()

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: all fields of the architecture (official defaults differ)."""
        return super().to_diff_dict() | _config.architecture(self, LLaDAConfig, _ONLY_SUPPORTED)

    def _check(self) -> None:
        _config.check_positive_integers(
            self,
            "d_model",
            "n_heads",
            "n_kv_heads",
            "n_layers",
            "mlp_hidden_size",
            "vocab_size",
            "embedding_size",
            "max_sequence_length",
        )
        _config.check_booleans(
            self,
            "rope_full_precision",
            "include_bias",
            "include_qkv_bias",
            "weight_tying",
            "scale_logits",
        )
        _config.check_positive_numbers(self, "rope_theta", "rms_norm_eps")
        _config.check_heads(self, "d_model", "n_heads", "n_kv_heads")
        if self.multi_query_attention is not None:
            expected = 1 if self.multi_query_attention else self.n_heads
            if self.n_kv_heads != expected:
                raise ValueError(
                    f"config field n_kv_heads = {self.n_kv_heads} contradicts "
                    f"multi_query_attention = {self.multi_query_attention}"
                )
        if self.embedding_size < self.vocab_size:
            raise ValueError(
                f"config field embedding_size = {self.embedding_size} is below vocab_size = {self.vocab_size}"
            )
        _config.check_token_ids(self, self.embedding_size, "mask_token_id", "eos_token_id", "pad_token_id")


class LLaDABlock(Block):
    """One transformer block: `x + attention(norm(x))`, then `x + SwiGLU(norm(x))`."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.n_kv_heads * self.head_dim
        norm_bias = config.include_bias if config.bias_for_layer_norm is None else config.bias_for_layer_norm
        qkv_bias = config.include_bias or config.include_qkv_bias
        self.attn_norm = RMSNorm(config.d_model, config.rms_norm_eps, norm_bias)
        self.ff_norm = RMSNorm(config.d_model, config.rms_norm_eps, norm_bias)
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=qkv_bias)
        self.k_proj = nn.Linear(config.d_model, kv_size, bias=qkv_bias)
        self.v_proj = nn.Linear(config.d_model, kv_size, bias=qkv_bias)
        self.attn_out = nn.Linear(config.d_model, config.d_model, bias=config.include_bias)
        self.ff_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=config.include_bias)
        self.up_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=config.include_bias)
        self.ff_out = nn.Linear(config.mlp_hidden_size, config.d_model, bias=config.include_bias)

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        h = self.attn_norm(x)
        q, k, v = (
            proj(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, rope), rotate(k, rope), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.attn_out(attended.transpose(1, 2).flatten(-2))
        h = self.ff_norm(x)
        mlp: Tensor = self.ff_out(silu(self.ff_proj(h)) * self.up_proj(h))
        return x + mlp


class LLaDATransformer(nn.Module):
    """Embedding, blocks, final norm and output head, by their official names."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        norm_bias = config.include_bias if config.bias_for_layer_norm is None else config.bias_for_layer_norm
        self.wte = nn.Embedding(config.embedding_size, config.d_model)
        self.blocks = nn.ModuleList(LLaDABlock(config) for _ in range(config.n_layers))
        self.ln_f = RMSNorm(config.d_model, config.rms_norm_eps, norm_bias)
        if not config.weight_tying:
            self.ff_out = nn.Linear(config.d_model, config.embedding_size, bias=config.include_bias)


class LLaDAModelLM(MaskedLM):
    """LLaDA with its output head. `model(input_ids).logits` are the raw logits of every position."""

    config_class = LLaDAConfig

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__(config)
        # The extra level gives the parameters their official names, model.transformer.*.
        self.model = nn.ModuleDict({"transformer": LLaDATransformer(config)})
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    @property
    def transformer(self) -> LLaDATransformer:
        """The part that holds all parameters."""
        transformer = self.model["transformer"]
        assert isinstance(transformer, LLaDATransformer)
        return transformer

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.blocks

    def embed(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.transformer.wte(input_ids)
        return x

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        dtype = self.transformer.wte.weight.dtype
        config = self.config
        cos, sin = rotary_table(positions, config.head_dim, config.rope_theta, compute_dtype(dtype))
        return (cos, sin) if config.rope_full_precision else (cos.to(dtype), sin.to(dtype))

    def head(self, x: Tensor) -> Tensor:
        transformer = self.transformer
        x = transformer.ln_f(x)
        weight = transformer.wte.weight
        logits = linear(x, weight) if self.config.weight_tying else transformer.ff_out(x)
        return logits / math.sqrt(self.config.d_model) if self.config.scale_logits else logits
