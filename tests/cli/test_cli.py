"""The command `dlmkern`: what it prints, and one line for every kind of bad input."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import dlmkern
from dlmkern import cli, decoders, models
from dlmkern.backends.registry import BACKENDS, OPS
from dlmkern.models import chains4

PROMPT = chains4.prompts(1, seed=0)
IDS = ",".join(map(str, PROMPT[0].tolist()))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        code = cli.main(list(arguments))
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    return code, out, err


def test_info_names_every_op_and_backend(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info")
    assert code == 0
    assert dlmkern.__version__ in out
    assert torch.__version__ in out
    header = next(line for line in out.splitlines() if line.startswith("op "))
    assert header.split()[1:] == list(BACKENDS)
    for op in OPS:
        line = next(line for line in out.splitlines() if line.startswith(op + " "))
        reference, cpu = re.findall(r"\b(?:yes|no)\b", line)[:2]
        assert (reference, cpu) == ("yes", "no" if op == "block_attention" else "yes")
    for number in range(1, out.count("no (") + 1):
        assert f"no ({number})" not in out or f"\n({number}) " in out, "a refusal without its reason"


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run(capsys, "info", "--json")[1])
    assert facts["torch"] == torch.__version__
    assert set(facts["ops"]) == set(OPS)


@pytest.mark.parametrize("decoder", list(decoders.PRESETS))
def test_generate_prints_what_the_library_returns(capsys: pytest.CaptureFixture[str], decoder: str) -> None:
    expected = dlmkern.generate(models.tiny(), PROMPT, decoder, gen_length=40)
    code, out, err = run(capsys, "generate", "--model", "tiny", "--prompt-ids", IDS, "--decoder", decoder)
    assert code == 0
    assert out.strip() == chains4.text(expected.tokens[0])
    assert f"{expected.nfe[0]} forwards" in err


def test_help_lists_every_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0
    start = out.index("--decoder NAME", out.index("options:"))
    about = re.sub(r"-\s+", "-", out[start : out.index("--cache", start)])
    for name in decoders.PRESETS:
        assert name.removeprefix("dapd-llada-") in about


def test_generate_with_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = chains4.prompts(9, seed=0)[8:]  # each cache decodes it in another way
    ids = ",".join(map(str, prompt[0].tolist()))
    settings = ("--decoder", "threshold", "--set", "tau=0.4", "--set", "block_length=20", "--json")
    step_maps = []
    for name, cache in (("none", None), ("prefix", "prefix"), ("dual", "dual")):
        code, out, _ = run(
            capsys, "generate", "--model", "tiny", "--prompt-ids", ids, "--cache", name, *settings
        )
        assert code == 0
        expected = dlmkern.generate(models.tiny(), prompt, decoders.threshold(0.4, 20, cache), 40)
        answer = json.loads(out)
        assert answer["tokens"] == expected.tokens[0].tolist()
        assert answer["step_map"] == expected.step_map[0].tolist()
        step_maps.append(answer["step_map"])
    assert all(a != b for a, b in zip(step_maps, step_maps[1:] + step_maps[:1], strict=True))


def test_generate_as_json_with_settings(capsys: pytest.CaptureFixture[str]) -> None:
    decoder = decoders.depcap(kl="topk", gamma=-8.0)
    expected = dlmkern.generate(models.tiny(), PROMPT, decoder, gen_length=20, temperature=1.0, seed=7)
    settings = (
        "--set",
        "kl=topk",
        "--set",
        "gamma=-8.0",
        "--gen-length",
        "20",
        "--temperature",
        "1",
        "--seed",
        "7",
    )
    code, out, _ = run(capsys, "generate", "--model", "tiny", "--prompt-ids", IDS, *settings, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["prompt"] == PROMPT[0].tolist()
    assert answer["tokens"] == expected.tokens[0].tolist()
    assert answer["nfe"] == expected.nfe[0]
    assert answer["block_lengths"] == expected.block_lengths[0]
    assert answer["step_map"] == expected.step_map[0].tolist()
    assert answer["reason"] == [decoders.Reason(reason).name for reason in expected.reason[0].tolist()]


def test_generate_streams_every_token_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "--model", "tiny", "--prompt-ids", IDS, "--stream")
    assert code == 0
    *steps, answer = out.splitlines()
    committed = dict(pair.split("=") for step in steps for pair in step.split(": ")[1].split())
    assert sum(step.count("=") for step in steps) == len(committed) == 40
    assert "".join(committed[str(position)].strip("'") for position in range(40)) == answer


def test_tiny_brings_its_own_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "--model", "tiny", "--json")
    assert code == 0
    assert json.loads(out)["prompt"] == PROMPT[0].tolist()


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("compare", "--model", "tiny", "--count", "3", "--decoders", "vanilla,depcap")
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    vanilla, depcap = json.loads(out)
    assert [vanilla["decoder"], depcap["decoder"]] == ["vanilla", "depcap"]
    assert vanilla["nfe"] == 40
    assert vanilla["tokens_per_forward"] == 1
    prompts = chains4.prompts(3, seed=0)
    for result in (vanilla, depcap):
        expected = dlmkern.generate(models.tiny(), prompts, result["decoder"], gen_length=40)
        assert result["tokens"] == expected.tokens.tolist()
        assert result["valid"] == sum(map(chains4.valid, prompts, expected.tokens))
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert f"{vanilla['valid']} of 3" in out


def test_bench_passes_its_arguments_on(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "--quick", "--threads", "1", "--device", "cpu", "depga_block")
    assert code == 0
    assert "W = 128" in out


TINY = ("generate", "--model", "tiny")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "COMMAND"),
        (("fly",), "fly"),
        (("generate",), "--model"),
        (("generate", "--model", "no/such/folder", "--prompt-ids", "1"), "no/such/folder"),
        ((*TINY, "--prompt-ids", "1,x"), "1,x"),
        ((*TINY, "--prompt-ids", "1", "--prompt", "hello"), "--prompt"),
        ((*TINY, "--prompt", "hello"), "tokenizer"),
        ((*TINY, "--prompt-ids", "12"), "mask token"),
        ((*TINY, "--prompt-ids", "999"), "999"),
        ((*TINY, "--gen-length", "0"), "gen_length"),
        ((*TINY, "--gen-length", "100000"), "max_sequence_length"),
        ((*TINY, "--temperature", "-1"), "temperature"),
        ((*TINY, "--dtype", "int8"), "int8"),
        ((*TINY, "--device", "abacus"), "abacus"),
        ((*TINY, "--decoder", "psychic"), "psychic"),
        ((*TINY, "--set", "tau_low"), "NAME=VALUE"),
        ((*TINY, "--set", "tau_low=2"), "tau_low"),
        ((*TINY, "--set", "shoe_size=2"), "shoe_size"),
        ((*TINY, "--cache", "magic"), "magic"),
        ((*TINY, "--set", "cache=dual"), "--cache"),
        ((*TINY, "--backend", "tpu"), "tpu"),
        (("compare", "--model", "tiny", "--decoders", "depcap,psychic"), "psychic"),
        (("compare", "--model", "tiny", "--count", "0"), "count"),
        ((*TINY, "--wings", "2"), "--wings"),
        (("info", "please"), "please"),
        (("bench", "no_such_op"), "no_such_op"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert named in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a missing device is the point")
def test_a_missing_backend_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *TINY, "--backend", "cuda")
    assert code == 2
    assert "token_stats" in err
    assert "'cuda'" in err


def test_a_bad_environment_is_one_line_too() -> None:
    command = [sys.executable, "-m", "dlmkern", *TINY, "--gen-length", "1"]
    environment = os.environ | {"DLMKERN_BACKEND": "tpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "DLMKERN_BACKEND" in done.stderr
