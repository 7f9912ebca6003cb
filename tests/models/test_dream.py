"""The Dream forward pass against recorded official logits and an independent float64 implementation.

What all models share is in `test_masked_lm.py`, `test_llada.py` and `test_kv_cache.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlmkern.models import DreamConfig, DreamModel, load_model
from tests.models.support import DATA, DREAM, ids, random_weights

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def dream(checkpoint: Checkpoint) -> Checkpoint:
    return lambda name="checkpoint", **changes: checkpoint(name, "Dream", **changes)


@pytest.mark.parametrize("prompt", [0, 1])
def test_official_logits(prompt: int) -> None:
    recorded = load_file(DATA / "dream_logits.safetensors")
    input_ids, expected = (
        recorded[f"seed0.prompt{prompt}.{key}"] for key in ("input_ids", "logits_raw_unshifted")
    )
    logits = load_model(DATA / "models/dream_seed0")(input_ids).logits
    truth = load_model(DATA / "models/dream_seed0", dtype="float64")(input_ids).logits
    assert logits.dtype == torch.float32
    assert truth.dtype == torch.float64
    assert (logits - expected).abs().max() <= 5e-5
    assert (truth - expected).abs().max() <= 5e-5
    # No further from the truth than the recorded float32 logits themselves, up to another order of summation.
    assert (logits - truth).abs().max() <= 2 * (expected - truth).abs().max()
    # The official generation moves them to the right; the first stays where it is.
    shifted = torch.cat((logits[:, :1], logits[:, :-1]), dim=1)
    assert (shifted - recorded[f"seed0.prompt{prompt}.logits_shifted"]).abs().max() <= 5e-5


def test_bfloat16(dream: Checkpoint) -> None:
    folder = dream(stored=torch.bfloat16)
    model = load_model(folder, dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], value) for name, value in weights.items())
    logits = model(ids(2, 9)).logits
    truth = load_model(folder, dtype="float64")(ids(2, 9)).logits
    assert logits.dtype == torch.bfloat16
    # Eight bits of mantissa, a few dozen roundings deep.
    assert (logits - truth).abs().max() < 0.05 * truth.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rotation_in_the_models_dtype(dtype: torch.dtype) -> None:
    """As in the official code, where bfloat16 cosines and sines are the float32 ones, rounded."""
    model = DreamModel(DreamConfig(**DREAM)).to(dtype)
    cos, sin = model.rope(torch.tensor([0, 3, 39]))
    assert (cos.dtype, sin.dtype) == (dtype, dtype)
    angle = torch.tensor(39.0, dtype=torch.float64) / 500 ** (2 / 8)
    for table, exact in ((cos, angle.cos()), (sin, angle.sin())):
        assert table.shape == (3, 8)
        # An angle of float32 is off by up to 2e-6 where it is 8.
        assert (table[2, [1, 5]] - exact).abs().max() <= torch.finfo(dtype).eps / 2 + (
            0 if dtype == torch.float64 else 2e-6
        )


def test_tied_weights_leave_no_room_for_a_head(dream: Checkpoint) -> None:
    folder = dream()
    fields = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"unexpected tensors: lm_head\.weight"):
        load_model(folder)


def test_defaults_are_the_7b_model() -> None:
    config = DreamConfig()
    with torch.device("meta"):
        model = DreamModel(config)
    assert sum(p.numel() for p in model.parameters()) == 7_615_616_512
    assert (config.n_layers, config.n_kv_heads, config.head_dim) == (28, 4, 128)
    assert (config.embedding_size, config.max_sequence_length) == (152064, 131072)
    assert (config.mask_token_id, config.eos_token_id) == (151666, 151643)


def test_new_models_are_usable() -> None:
    """Random initial weights, with biases of zero, give logits of a sensible size."""
    torch.manual_seed(0)
    model = DreamModel(DreamConfig(**DREAM))
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))
    assert model.state_dict().keys() == random_weights(DREAM).keys()
    assert 0.1 < model(ids(2, 9)).logits.std() < 10


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("attention_dropout", 0.1),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("hidden_size", 0),
        ("hidden_size", "32"),
        ("hidden_size", 36),
        ("num_hidden_layers", True),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("max_position_embeddings", None),
        ("rope_theta", -1.0),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", None),
        ("mask_token_id", 64),
        ("bos_token_id", 2.0),
        ("eos_token_id", -1),
        ("pad_token_id", True),
    ],
)
def test_unsupported_config_names_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"config field {field} (= |is not supported)"):
        DreamConfig(**{**DREAM, field: value})


def test_a_sliding_window_that_is_not_used(dream: Checkpoint) -> None:
    expected = load_model(dream())(ids(1, 9)).logits
    folder = dream("windowed", sliding_window=4, max_window_layers=0, rope_scaling=None)
    assert torch.equal(load_model(folder)(ids(1, 9)).logits, expected)
