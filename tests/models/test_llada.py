"""The LLaDA forward pass against recorded official logits and an independent float64 implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlmkern.attention import attention
from dlmkern.models import LLaDAConfig, LLaDAModelLM, load_model
from tests.models.support import DATA, ids

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("prompt", [0, 1])
def test_official_logits(prompt: int) -> None:
    recorded = load_file(DATA / "llada_logits.safetensors")
    input_ids, expected = (recorded[f"seed0.prompt{prompt}.{key}"] for key in ("input_ids", "logits"))
    logits = load_model(DATA / "models/llada_seed0")(input_ids).logits
    truth = load_model(DATA / "models/llada_seed0", dtype="float64")(input_ids).logits
    assert logits.dtype == torch.float32
    assert truth.dtype == torch.float64
    assert (logits - expected).abs().max() <= 5e-5
    # No further from the truth than the recorded float32 logits themselves, up to another order of summation.
    assert (logits - truth).abs().max() <= 2 * (expected - truth).abs().max()


def test_bias_for_layer_norm_follows_include_bias(checkpoint: Checkpoint) -> None:
    stated = load_model(checkpoint(include_bias=True, bias_for_layer_norm=True))
    implied = LLaDAModelLM(LLaDAConfig(**{**stated.config.to_dict(), "bias_for_layer_norm": None}))
    assert implied.state_dict().keys() == stated.state_dict().keys()


def test_attention_hides_masked_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 7, 4, generator=generator).double() for heads in (4, 2, 2))
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[0, ..., 5:] = False
    out = attention(q, k, v, mask)
    torch.testing.assert_close(out[0], attention(q[:1], k[:1, :, :5], v[:1, :, :5])[0])
    torch.testing.assert_close(out[1], attention(q[1:], k[1:], v[1:])[0])


def test_full_lengths_take_the_path_without_mask(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint())
    batch = ids(2, 9)
    expected = model(batch).logits
    assert torch.equal(model(batch, lengths=torch.tensor([9, 9])).logits, expected)
    assert torch.equal(model(batch, attention_mask=torch.ones(2, 9, dtype=torch.long)).logits, expected)


def test_left_padding_through_attention_mask(checkpoint: Checkpoint) -> None:
    """Rotary positions are relative, so a row shifted to the right behind hidden padding keeps its logits."""
    model = load_model(checkpoint(), dtype="float64")
    row = ids(1, 8)
    shifted = torch.cat((torch.full((1, 3), 49), row), dim=1)
    mask = torch.arange(11)[None] >= 3
    torch.testing.assert_close(model(shifted, attention_mask=mask).logits[:, 3:], model(row).logits)


def test_positions(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint(), dtype="float64")
    batch = ids(2, 12)
    positions = torch.tensor([[3, 4, 5], [11, 0, 3]])
    logits = model(batch, positions=positions).logits
    assert logits.shape == (2, 3, 64)
    expected = model(batch).logits.gather(1, positions[..., None].expand(-1, -1, 64))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_empty_inputs(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint())
    assert model(ids(0, 5)).logits.shape == (0, 5, 64)
    assert model(ids(2, 0)).logits.shape == (2, 0, 64)
    assert model(ids(2, 5), positions=torch.empty((2, 0), dtype=torch.long)).logits.shape == (2, 0, 64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": ids(1, 5).int()}, TypeError, "input_ids must be an int64 tensor, got torch.int32"),
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids must be an int64 tensor, got list"),
        ({"input_ids": ids(5)}, ValueError, r"input_ids must have shape \[\*, \*\], got \[5\]"),
        ({"input_ids": ids(2, 5) + 60}, ValueError, r"input_ids must lie in \[0, 64\)"),
        ({"input_ids": ids(2, 5) - 50}, ValueError, r"input_ids must lie in \[0, 64\)"),
        (
            {"lengths": torch.tensor([5, 6])},
            ValueError,
            r"lengths must lie in \[1, 6\), got values from 5 to 6",
        ),
        ({"lengths": torch.tensor([0, 5])}, ValueError, r"lengths must lie in \[1, 6\)"),
        ({"lengths": torch.tensor([5])}, ValueError, r"lengths must have shape \[2\], got \[1\]"),
        ({"lengths": torch.tensor([5.0, 5.0])}, TypeError, "lengths must be an int64 tensor"),
        ({"attention_mask": torch.ones(2, 4).long()}, ValueError, r"attention_mask must have shape \[2, 5\]"),
        ({"attention_mask": torch.ones(2, 5)}, TypeError, "attention_mask must be a bool or integer tensor"),
        ({"attention_mask": torch.zeros(2, 5).long()}, ValueError, "hides every key"),
        (
            {"attention_mask": torch.ones(2, 5).long(), "lengths": torch.tensor([5, 5])},
            ValueError,
            "either attention_mask or lengths",
        ),
        ({"positions": torch.tensor([[5], [0]])}, ValueError, r"positions must lie in \[0, 5\)"),
        (
            {"positions": torch.tensor([[0]])},
            ValueError,
            r"positions must have shape \[2, \*\], got \[1, 1\]",
        ),
    ],
)
def test_bad_input(
    checkpoint: Checkpoint, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = load_model(checkpoint())
    with pytest.raises(error, match=message):
        model(**{"input_ids": ids(2, 5), **arguments})


@pytest.mark.usefixtures("empty_compiler")
def test_lengths_are_not_read_while_tracing(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint())
    batch, lengths = ids(2, 9), torch.tensor([4, 9])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(batch, lengths=lengths).logits, model(batch, lengths=lengths).logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", True),
        ("rope", False),
        ("block_type", "sequential"),
        ("block_group_size", 2),
        ("activation_type", "gelu"),
        ("layer_norm_type", "default"),
        ("layer_norm_with_affine", False),
        ("attention_layer_norm", True),
        ("input_emb_norm", True),
        ("clip_qkv", 8.0),
        ("attention_dropout", 0.1),
        ("residual_dropout", 0.1),
        ("embedding_dropout", 0.1),
        ("d_model", 0),
        ("d_model", "64"),
        ("d_model", 36),
        ("n_layers", True),
        ("n_kv_heads", 3),
        ("rope_theta", -1.0),
        ("rms_norm_eps", float("nan")),
        ("embedding_size", 10),
        ("mask_token_id", 64),
        ("eos_token_id", -1),
    ],
)
def test_unsupported_config_names_the_field(checkpoint: Checkpoint, field: str, value: object) -> None:
    config = load_model(checkpoint()).config.to_dict()
    with pytest.raises(ValueError, match=f"config field {field} = "):
        LLaDAConfig(**{**config, field: value})


def test_contradicting_key_value_heads() -> None:
    with pytest.raises(ValueError, match="n_kv_heads = 2 contradicts multi_query_attention"):
        LLaDAConfig(n_kv_heads=2, multi_query_attention=True)


def test_derived_config_fields() -> None:
    config = LLaDAConfig(d_model=32, n_heads=4, mlp_hidden_size=None, mlp_ratio=3, vocab_size=7)
    assert (config.n_kv_heads, config.mlp_hidden_size, config.embedding_size) == (4, 96, 7)
    assert LLaDAConfig(multi_query_attention=True).n_kv_heads == 1


def test_rotation_in_the_models_dtype(checkpoint: Checkpoint) -> None:
    """rope_full_precision decides whether a bfloat16 model rotates in float32."""
    input_ids = ids(1, 30)
    truth = load_model(checkpoint(), dtype="float64")(input_ids).logits
    error = {}
    for full in (True, False):
        model = load_model(checkpoint(rope_full_precision=full), dtype="bfloat16")
        error[full] = (model(input_ids).logits - truth).abs().mean()
    assert error[True] < error[False]
