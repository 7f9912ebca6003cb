"""LLaDA: a transformer with bidirectional attention that fills masked tokens (Nie et al., arXiv:2502.09992).

The parameter names and `config.json` fields are those of the official checkpoints (LLaDA-8B, LLaDA-1.5), so
these load without remote code, through `dlmkern.load_model` or through transformers' `AutoModel`.

The forward pass is built from a few small functions (`LLaDATransformer.rope` and `head`, `LLaDABlock.qkv` and
`finish`, `attention`). Whoever keeps keys and values between forward passes, or wants the queries, walks
over the blocks with them as `LLaDAModelLM.forward` does.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

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
        for name, supported in _ONLY_SUPPORTED.items():
            if kwargs.get(name, supported) != supported:
                raise ValueError(
                    f"config field {name} = {kwargs[name]!r} is not supported (only {supported!r} is)"
                )
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

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: all fields of the architecture (official defaults differ)."""
        everything = self.to_dict()
        architecture = [*_ONLY_SUPPORTED, *inspect.signature(LLaDAConfig.__init__).parameters]
        return super().to_diff_dict() | {
            name: everything[name] for name in architecture if name in everything
        }

    def _check(self) -> None:
        for name in (
            "d_model",
            "n_heads",
            "n_kv_heads",
            "n_layers",
            "mlp_hidden_size",
            "vocab_size",
            "embedding_size",
            "max_sequence_length",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config field {name} = {value!r} must be a positive integer")
        for name in (
            "rope_full_precision",
            "include_bias",
            "include_qkv_bias",
            "weight_tying",
            "scale_logits",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"config field {name} = {value!r} must be true or false")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"config field {name} = {value!r} must be a positive number")
        if self.d_model % (2 * self.n_heads):
            raise ValueError(
                f"config field d_model = {self.d_model} must be a multiple of twice n_heads = {self.n_heads}"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"config field n_kv_heads = {self.n_kv_heads} must divide n_heads = {self.n_heads}"
            )
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
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_int and 0 <= value < self.embedding_size):
                raise ValueError(
                    f"config field {name} = {value!r} must be a token id in [0, {self.embedding_size})"
                )


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms and rotations: float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension, in float32 (for float64 input, in float64)."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(_compute_dtype(x.dtype))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * y.to(x.dtype)
        return y if self.bias is None else y + self.bias


def rotary_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al., 2021, arXiv:2104.09864).

    Args:
        positions: token positions, `[n]` or `[B, 1, n]` (the 1 stands for the heads).
        head_dim: size of a head.
        theta: base of the frequencies; pair `i` turns by `positions / theta ** (2 * i / head_dim)`.
        dtype: float32 or float64.

    Returns:
        cos, sin: `[..., n, head_dim]`; each frequency appears twice, at `i` and at `i + head_dim / 2`.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    angles = positions.to(dtype).unsqueeze(-1) * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys `[B, H, n, head_dim]` by a `rotary_table`; computed in the dtype of the table."""
    cos, sin = table
    y = x.to(cos.dtype)
    first, second = y.chunk(2, dim=-1)
    return (y * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Bidirectional attention with grouped key/value heads.

    Args:
        q: queries `[B, Hq, n, head_dim]`, rotated.
        k: keys `[B, Hkv, L, head_dim]`, rotated; `Hkv` divides `Hq`.
        v: values `[B, Hkv, L, head_dim]`.
        key_mask: bool, broadcastable to `[B, Hq, n, L]`; True where the key takes part. None: all keys do.

    Returns:
        `[B, Hq, n, head_dim]`.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    return scaled_dot_product_attention(q, k, v, attn_mask=key_mask)


class LLaDABlock(nn.Module):
    """One transformer block: `x + attention(norm(x))`, then `x + SwiGLU(norm(x))`."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.head_dim = config.d_model // config.n_heads
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
        """From `x [B, n, d]`: queries `[B, Hq, n, head_dim]`, keys and values `[B, Hkv, n, head_dim]`.

        Queries and keys are rotated by `rope`.
        """
        h = self.attn_norm(x)
        q, k, v = (
            proj(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, rope), rotate(k, rope), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output `[B, n, d]` from its input `x` and what `attention` returned."""
        x = x + self.attn_out(attended.transpose(1, 2).flatten(-2))
        h = self.ff_norm(x)
        mlp: Tensor = self.ff_out(silu(self.ff_proj(h)) * self.up_proj(h))
        return x + mlp

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], key_mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x, rope)
        return self.finish(x, attention(q, k, v, key_mask))


class LLaDATransformer(nn.Module):
    """Embedding, blocks, final norm and output head."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.config = config
        norm_bias = config.include_bias if config.bias_for_layer_norm is None else config.bias_for_layer_norm
        self.wte = nn.Embedding(config.embedding_size, config.d_model)
        self.blocks = nn.ModuleList(LLaDABlock(config) for _ in range(config.n_layers))
        self.ln_f = RMSNorm(config.d_model, config.rms_norm_eps, norm_bias)
        if not config.weight_tying:
            self.ff_out = nn.Linear(config.d_model, config.embedding_size, bias=config.include_bias)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The `rotary_table` of positions `[n]` or `[B, 1, n]`, in the dtype of this model's rotations."""
        dtype = self.wte.weight.dtype
        config = self.config
        cos, sin = rotary_table(
            positions, config.d_model // config.n_heads, config.rope_theta, _compute_dtype(dtype)
        )
        return (cos, sin) if config.rope_full_precision else (cos.to(dtype), sin.to(dtype))

    def head(self, x: Tensor) -> Tensor:
        """Logits `[B, n, embedding_size]` from the last block's output `x [B, n, d]`."""
        x = self.ln_f(x)
        logits = linear(x, self.wte.weight) if self.config.weight_tying else self.ff_out(x)
        return logits / math.sqrt(self.config.d_model) if self.config.scale_logits else logits


class LLaDAModelLM(PreTrainedModel):
    """LLaDA with its output head. `model(input_ids).logits` are the raw logits of every position."""

    config_class = LLaDAConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__(config)
        # The extra level gives the parameters their official names, model.transformer.*.
        self.model = nn.ModuleDict({"transformer": LLaDATransformer(config)})
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    @property
    def transformer(self) -> LLaDATransformer:
        """The part that holds all parameters."""
        transformer = self.model["transformer"]
        assert isinstance(transformer, LLaDATransformer)
        return transformer

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> MaskedLMOutput:
        """Predict every token of every row from the whole row.

        Rows of different lengths are left-aligned: row `b` is `input_ids[b, :lengths[b]]`, and what follows
        is padding that no real position sees (the official implementation lets it be seen). Leave `lengths`
        out when all rows are full: attention without a mask is faster. Tensors on an accelerator are never
        read on the host; on the CPU their values are checked, and a mask that hides nothing is dropped.

        Args:
            input_ids: token ids, int64 `[B, L]`, `L <= max_sequence_length`.
            attention_mask: bool or integer `[B, L]`, zero where a key is hidden; not together with `lengths`.
            lengths: int64 `[B]`, number of real tokens of each row, in `[1, L]`.
            positions: int64 `[B, n]`, the positions whose logits are wanted. None: all of them, in order.

        Returns:
            `logits [B, n, embedding_size]` in the model's dtype, padded vocabulary rows included. Those at
            padding positions mean nothing.

        Raises:
            TypeError: an argument is not a tensor of the dtype above.
            ValueError: a shape does not fit, the sequence is too long, or a value on the CPU is out of range.
        """
        _check_ids("input_ids", input_ids, (None, None), 0, self.config.embedding_size)
        batch, length = input_ids.shape
        if length > self.config.max_sequence_length:
            raise ValueError(
                f"input_ids: {length} tokens exceed max_sequence_length = {self.config.max_sequence_length}"
            )
        if positions is not None:
            _check_ids("positions", positions, (batch, None), 0, length)
        key_mask = _key_mask(batch, length, attention_mask, lengths, input_ids.device)
        transformer = self.transformer
        rope = transformer.rope(torch.arange(length, device=input_ids.device))
        x = transformer.wte(input_ids)
        for block in transformer.blocks:
            x = block(x, rope, key_mask)
        if positions is not None:
            x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        # What transformers calls the type of logits differs between its versions.
        return MaskedLMOutput(logits=cast(Any, transformer.head(x)))


def _readable(x: Tensor) -> bool:
    """Whether the values may be looked at: they are in host memory, and nobody is tracing."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_ids(name: str, x: Tensor, shape: tuple[int | None, ...], low: int, stop: int) -> None:
    """Check an int64 tensor: its dtype, its shape (None stands for any size) and, on the CPU, its range."""
    if not isinstance(x, Tensor) or x.dtype != torch.int64:
        raise TypeError(f"{name} must be an int64 tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() != len(shape) or any(
        want not in (None, got) for want, got in zip(shape, x.shape, strict=True)
    ):
        expected = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{expected}], got {list(x.shape)}")
    if _readable(x) and x.numel() and (x.min() < low or x.max() >= stop):
        raise ValueError(f"{name} must lie in [{low}, {stop}), got values from {x.min()} to {x.max()}")


def _key_mask(
    batch: int, length: int, attention_mask: Tensor | None, lengths: Tensor | None, device: torch.device
) -> Tensor | None:
    """Bool `[B, 1, 1, L]`, True where a key is real; None if no key is hidden."""
    if lengths is not None:
        if attention_mask is not None:
            raise ValueError("give either attention_mask or lengths, not both")
        _check_ids("lengths", lengths, (batch,), 1, length + 1)
        mask = torch.arange(length, device=lengths.device) < lengths[:, None]
    elif attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.is_floating_point():
            got = getattr(attention_mask, "dtype", type(attention_mask).__name__)
            raise TypeError(f"attention_mask must be a bool or integer tensor, got {got}")
        if attention_mask.shape != (batch, length):
            raise ValueError(
                f"attention_mask must have shape [{batch}, {length}], got {list(attention_mask.shape)}"
            )
        mask = attention_mask != 0
    else:
        return None
    if _readable(mask):
        if not mask.any(-1).all():
            raise ValueError("attention_mask hides every key of a row")
        if mask.all():
            return None
    return mask[:, None, None, :].to(device)
