"""The forward pass, padding, lengths and files, which are the same for both models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from dlmkern.models import DreamModel, LLaDAModelLM, load_model
from tests.models.support import DATA, FIELDS, PlainModel, ids

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("no_grad")
both_models = pytest.mark.parametrize("model_type", FIELDS)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llada", {}),
        ("llada", {"n_kv_heads": 4}),
        ("llada", {"n_kv_heads": 1, "multi_query_attention": True}),
        ("llada", {"include_qkv_bias": True}),
        ("llada", {"include_bias": True, "bias_for_layer_norm": True}),
        ("llada", {"weight_tying": True, "scale_logits": True}),
        ("Dream", {}),
        ("Dream", {"num_key_value_heads": 4}),
        ("Dream", {"num_key_value_heads": None}),
        ("Dream", {"num_key_value_heads": 1}),
        ("Dream", {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_against_plain_float64(checkpoint: Checkpoint, model_type: str, changes: dict[str, Any]) -> None:
    folder = checkpoint(model_type=model_type, **changes)
    model = load_model(folder, dtype="float64")
    input_ids = ids(2, 7)
    expected = torch.stack([*map(PlainModel(folder, model.config), input_ids)])
    torch.testing.assert_close(model(input_ids).logits, expected, rtol=0, atol=1e-9)
    single = load_model(folder)(input_ids).logits
    assert (single - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@both_models
def test_padded_batch_equals_solo(checkpoint: Checkpoint, model_type: str, dtype: str) -> None:
    model = load_model(checkpoint(model_type=model_type), dtype=dtype)
    lengths = torch.tensor([9, 14, 1, 20])
    batch = ids(4, 20)
    mask = torch.arange(20) < lengths[:, None]
    tolerance = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 0.2}[dtype]
    by_lengths = model(batch, lengths=lengths).logits
    assert torch.equal(by_lengths, model(batch, attention_mask=mask.long()).logits)
    for row, length in enumerate(lengths.tolist()):
        solo = model(batch[row : row + 1, :length]).logits[0]
        torch.testing.assert_close(by_lengths[row, :length], solo, rtol=0, atol=tolerance)
    elsewhere = torch.where(mask, batch, (batch + 1) % 50)
    assert torch.equal(model(elsewhere, lengths=lengths).logits[mask], by_lengths[mask])


@both_models
def test_longest_sequence(checkpoint: Checkpoint, model_type: str) -> None:
    model = load_model(checkpoint(model_type=model_type))
    assert model(ids(1, 40)).logits.shape == (1, 40, 64)
    with pytest.raises(ValueError, match="41 tokens exceed max_sequence_length = 40"):
        model(ids(1, 41))


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM])
@pytest.mark.parametrize(("name", "own"), [("llada_seed0", LLaDAModelLM), ("dream_seed0", DreamModel)])
def test_auto_classes(name: str, own: type, auto: type) -> None:
    folder = DATA / "models" / name
    model = auto.from_pretrained(folder)
    assert type(model) is own
    input_ids = ids(1, 9)
    assert torch.equal(model(input_ids).logits, load_model(folder)(input_ids).logits)


@pytest.mark.parametrize(
    ("model_type", "changes", "implied"),
    [
        (
            "llada",
            {"include_qkv_bias": True},
            {
                "block_type": "llama",
                "layer_norm_type": "rms",
                "activation_type": "silu",
                "rope": True,
                "weight_tying": False,
            },
        ),
        *(
            (
                "Dream",
                {"tie_word_embeddings": tied, "initializer_range": 0.5},
                {"hidden_act": "silu", "use_sliding_window": False},
            )
            for tied in (False, True)
        ),
    ],
    ids=["llada", "dream", "dream-tied"],
)
def test_save_pretrained_round_trip(
    checkpoint: Checkpoint,
    tmp_path: Path,
    model_type: str,
    changes: dict[str, Any],
    implied: dict[str, Any],
) -> None:
    model = load_model(checkpoint(model_type=model_type, **changes))
    model.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
    # The official code's defaults are others, so the file must state the whole architecture, by its names.
    written = json.loads((tmp_path / "saved/config.json").read_text())
    expected = FIELDS[model_type] | changes | implied
    assert {name: written.get(name) for name in expected} == expected
    assert {name: getattr(again.config, name) for name in expected} == expected
    assert not {*type(model.config).attribute_map, "head_dim"} & written.keys()
    input_ids = ids(1, 9)
    assert torch.equal(again(input_ids).logits, model(input_ids).logits)
