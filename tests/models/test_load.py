"""Reading checkpoint folders: dtypes, shards, strictness, memory, tokenizers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from dlmkern.models import load_model, load_tokenizer

Checkpoint = Callable[..., Path]
# Of each model, a tensor of shape [16, 32], and one that it does not have.
TENSORS = {
    "llada": ("model.transformer.blocks.1.k_proj.weight", "model.transformer.wpe.weight"),
    "Dream": ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.o_proj.bias"),
}
NAME = TENSORS["llada"][0]
both_models = pytest.mark.parametrize("model_type", TENSORS)


def shard(folder: Path) -> None:
    """Turn a whole checkpoint into two shards and their index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {}
    for part, own in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: weights[name] for name in own}, folder / file)
        weight_map |= dict.fromkeys(own, file)
    write_index(folder, weight_map)


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def change_weights(folder: Path, **changes: Any) -> None:
    """Replace tensors, or remove those that are None."""
    weights = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del weights[name]
        else:
            weights[name] = value
    save_file(weights, folder / "model.safetensors")


def change_config(folder: Path, **changes: object) -> None:
    """Replace fields, or remove those that are None."""
    fields = json.loads((folder / "config.json").read_text()) | changes
    fields = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", torch.bfloat16])
def test_dtypes(checkpoint: Checkpoint, stored: torch.dtype, dtype: str | torch.dtype) -> None:
    folder = checkpoint(stored=stored)
    weights = load_file(folder / "model.safetensors")
    model = load_model(folder, dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    state = model.state_dict()
    assert state.keys() == weights.keys()
    for name, value in weights.items():
        assert value.dtype == stored
        assert state[name].dtype == wanted
        assert torch.equal(state[name], value.to(wanted))
    assert model(torch.tensor([[1, 2, 49]])).logits.dtype == wanted
    assert not model.training


def test_config_of_the_model(checkpoint: Checkpoint) -> None:
    config = load_model(checkpoint()).config
    assert (config.mask_token_id, config.eos_token_id, config.vocab_size) == (49, 48, 50)
    assert (config.embedding_size, config.max_sequence_length) == (64, 40)


def test_weights_do_not_depend_on_the_file_after_loading(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    model = load_model(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = folder / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@both_models
def test_shards_equal_the_whole(checkpoint: Checkpoint, model_type: str) -> None:
    folder = checkpoint(model_type=model_type)
    whole = load_model(folder).state_dict()
    shard(folder)
    sharded = load_model(folder).state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], value) for name, value in sharded.items())


@pytest.mark.parametrize("dtype", ["int8", "float", torch.int64, None, 32])
def test_bad_dtype(checkpoint: Checkpoint, dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, float64"):
        load_model(checkpoint(), dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cpu:x"])
def test_bad_device(checkpoint: Checkpoint, device: str) -> None:
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used"):
        load_model(checkpoint(), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_absent_device(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="device 'cuda' cannot be used"):
        load_model(checkpoint(), device="cuda")


def test_no_folder(tmp_path: Path) -> None:
    for load in (load_model, load_tokenizer):
        with pytest.raises(FileNotFoundError, match=r"no such model folder: .*absent"):
            load(tmp_path / "absent")


def test_file_in_place_of_a_folder(checkpoint: Checkpoint) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such model folder: .*config.json"):
        load_model(checkpoint() / "config.json")


def test_no_config(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        load_model(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json must hold a JSON object, got list"),
        ("{}", "unknown model_type None, known: llada, Dream"),
        ('{"model_type": "bert"}', "unknown model_type 'bert', known: llada, Dream"),
        ('{"model_type": "dream"}', "unknown model_type 'dream', known: llada, Dream"),
        ('{"model_type": ["llada"]}', "unknown model_type"),
    ],
)
def test_bad_config(checkpoint: Checkpoint, content: str, message: str) -> None:
    folder = checkpoint()
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_config_that_is_not_text(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        load_model(folder)


@both_models
def test_no_mask_token(checkpoint: Checkpoint, model_type: str) -> None:
    folder = checkpoint(model_type=model_type)
    change_config(folder, mask_token_id=None)
    with pytest.raises(ValueError, match=r"config.json: field mask_token_id is missing"):
        load_model(folder)


@pytest.mark.parametrize(("model_type", "field"), [("llada", "alibi"), ("Dream", "use_sliding_window")])
def test_unsupported_field(checkpoint: Checkpoint, model_type: str, field: str) -> None:
    folder = checkpoint(model_type=model_type)
    change_config(folder, **{field: True})
    with pytest.raises(ValueError, match=rf"config.json: config field {field} = True is not supported"):
        load_model(folder)


def test_no_weights(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"neither model.safetensors nor model.safetensors.index.json"
    ):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_weights(checkpoint: Checkpoint, keep: int) -> None:
    path = checkpoint() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is not a complete safetensors file"):
        load_model(path.parent)


def test_damaged_header(checkpoint: Checkpoint) -> None:
    path = checkpoint() / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[20:40] = b"\xff" * 20
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is not a complete safetensors file"):
        load_model(path.parent)


@both_models
def test_missing_tensor(checkpoint: Checkpoint, model_type: str) -> None:
    folder, (name, _) = checkpoint(model_type=model_type), TENSORS[model_type]
    change_weights(folder, **{name: None})
    with pytest.raises(ValueError, match=f"missing tensors: {re.escape(name)}$"):
        load_model(folder)


def test_many_missing_tensors(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    save_file({NAME: load_file(folder / "model.safetensors")[NAME]}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors: .* and 15 more"):
        load_model(folder)


@both_models
def test_unexpected_tensor(checkpoint: Checkpoint, model_type: str) -> None:
    folder, (_, absent) = checkpoint(model_type=model_type), TENSORS[model_type]
    change_weights(folder, **{absent: torch.zeros(2)})
    with pytest.raises(ValueError, match=f"unexpected tensors: {re.escape(absent)}$"):
        load_model(folder)


@both_models
@pytest.mark.parametrize("shape", [(32, 16), (16, 31), (512,), (1, 16, 32)])
def test_wrong_shape(checkpoint: Checkpoint, model_type: str, shape: tuple[int, ...]) -> None:
    folder, (name, _) = checkpoint(model_type=model_type), TENSORS[model_type]
    change_weights(folder, **{name: torch.zeros(shape)})
    with pytest.raises(ValueError, match=re.escape(f"{name} has shape {list(shape)}, expected [16, 32]")):
        load_model(folder)


@both_models
def test_wrong_dtype(checkpoint: Checkpoint, model_type: str) -> None:
    folder, (name, _) = checkpoint(model_type=model_type), TENSORS[model_type]
    change_weights(folder, **{name: torch.zeros(16, 32, dtype=torch.int8)})
    with pytest.raises(ValueError, match=f"{re.escape(name)} has dtype I8, not one of F64, F32, F16, BF16"):
        load_model(folder)


def test_missing_shard(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors, which does not exist"):
        load_model(folder)


def test_truncated_shard(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    shard(folder)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is not a complete"):
        load_model(folder)


def test_shard_and_index_disagree(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    shard(folder)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = {file: name for name, file in weight_map.items()}
    file = next(file for file in other if file != weight_map[NAME])
    write_index(folder, weight_map | {NAME: file})
    with pytest.raises(ValueError, match=f"disagree about {NAME}"):
        load_model(folder)


@pytest.mark.parametrize("weight_map", [None, ["a"], {NAME: 1}])
def test_bad_index(checkpoint: Checkpoint, weight_map: object) -> None:
    folder = checkpoint()
    (folder / "model.safetensors").unlink()
    write_index(folder, weight_map)
    with pytest.raises(ValueError, match="field weight_map must map tensor names to file names"):
        load_model(folder)


def test_shard_outside_the_folder(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    write_index(folder, {NAME: "../outside.safetensors"})
    with pytest.raises(ValueError, match="is not a file name in this folder"):
        load_model(folder)


def test_tokenizer(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    assert load_tokenizer(folder) is None
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer("b a c")["input_ids"] == [1, 0, 2]


def write_tokenizer_of_dream(folder: Path) -> None:
    """As in the official checkpoints: two vocabulary files, and the class in code that comes with them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, printable), *(chr(256 + i) for i in range(256 - len(printable)))]
    vocabulary = {token: i for i, token in enumerate([*letters, "th", "the"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    special = {
        str(len(vocabulary) + i): {"content": token, "special": True}
        for i, token in enumerate(("<|endoftext|>", "<|mask|>"))
    }
    config = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": special,
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "chat_template": "{% for message in messages %}<{{ message.content }}>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenization_dream.py").write_text("raise AssertionError('this code must not run')")


def test_tokenizer_of_dream(checkpoint: Checkpoint) -> None:
    folder = checkpoint(model_type="Dream")
    write_tokenizer_of_dream(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    # A digit is a token of its own; an accent of its own (NFC) and a character of two bytes come back whole.
    text = "the 12 cafe\u0301<|mask|>"
    tokens = tokenizer(text)["input_ids"]
    assert (tokens[0], tokens[-1], len(tokens)) == (257, 259, 11)
    assert tokenizer.decode(tokens) == "the 12 caf\u00e9<|mask|>"
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id) == (258, 259)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert chat == "<the>"


def test_code_of_a_tokenizer_is_not_run(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "y")  # who is not asked cannot agree to it
    folder = checkpoint()
    write_tokenizer_of_dream(folder)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields["tokenizer_class"] = "OtherTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(folder)


def test_damaged_tokenizer_config(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not valid JSON"):
        load_tokenizer(folder)


LARGE = {
    "d_model": 512,
    "n_heads": 8,
    "n_kv_heads": 8,
    "n_layers": 7,
    "mlp_hidden_size": 2048,
    "vocab_size": 20000,
    "embedding_size": 20000,
}

MEASURE = """
import sys
from pathlib import Path
from dlmkern.models import load_model

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

load_model(sys.argv[1])  # the small one first: what loading imports is not counted
for dtype in ("float32", "bfloat16"):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at what is resident now
    before = resident("VmRSS")
    model = load_model(sys.argv[2], dtype=dtype)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(dtype, size, resident("VmHWM") - before)
    del model
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from Linux's /proc")
def test_peak_memory(checkpoint: Checkpoint) -> None:
    """Loading 200 MB of weights needs little more memory than the weights themselves, in any dtype."""
    command = [sys.executable, "-c", MEASURE, str(checkpoint()), str(checkpoint("large", **LARGE))]
    # What is freed goes back to the system at once, so that the second measurement starts clean.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [dtype for dtype, _, _ in lines] == ["float32", "bfloat16"]
    sizes = {dtype: int(size) for dtype, size, _ in lines}
    assert 190e6 < sizes["float32"] < 220e6
    for dtype, _, peak in lines:
        assert 0.9 * sizes[dtype] < int(peak) < 1.35 * sizes[dtype], (dtype, peak, sizes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("torch_dtype", "nonsense"),
        ("id2label", 5),
        ("scale_logits", "no"),
        ("include_bias", []),
        ("rms_norm_eps", True),
        ("mask_token_id", True),
        ("rope_scaling", {"rope_type": "linear", "factor": 4.0}),
    ],
)
def test_fields_of_the_wrong_kind(checkpoint: Checkpoint, tmp_path: Path, field: str, value: object) -> None:
    config = json.loads((checkpoint() / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(tmp_path)
