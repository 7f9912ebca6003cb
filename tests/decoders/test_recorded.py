"""Decodings by the official code of LLaDA, Dream, Fast-dLLM, DepCap, WINO and Saber, and by a transcription
of that of DAPD, come out the same.

A few of each kind, or all with ``--all-recorded``; ``-s`` shows the counts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import dlmkern
from dlmkern.generation import GenerationOutput
from tests.decoders.support import DATA, RECORDED, decoder_of, equals, kind, recorded, same

KINDS = [
    (name, kind_of)
    for name in RECORDED
    for kind_of in dict.fromkeys(kind(trace) for trace in recorded(name)[1])
]
SAMPLE = 2


def chosen(name: str, kind_of: str, dtype: str, everything: bool) -> list[dict[str, Any]]:
    """Decodings of a kind: those that this dtype must reproduce, or some of them, spread evenly."""
    traces = [trace for trace in recorded(name)[1] if kind(trace) == kind_of and not faulty(trace)]
    if dtype == "float32" and name != "chains4_traces":
        traces = [trace for trace in traces if trace["robust"]]
    if everything:
        return traces
    return traces[:: max(1, len(traces) // SAMPLE)][:SAMPLE]


def faulty(trace: dict[str, Any]) -> bool:
    """Whether the official code wrote over a committed token, which is not to be repeated (Saber)."""
    return bool(trace.get("counts", {}).get("overwrote_token"))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "kind_of"), KINDS)
def test_recorded_decodings(name: str, kind_of: str, dtype: str, pytestconfig: pytest.Config) -> None:
    """In float64 by the reference; in float32, by the reference and the C++ kernels, those that are robust.

    A decoding is robust if no choice in it hangs on rounding. Those of chains4 are not by that measure, but
    float32 has proved to be enough. Tokens, forward passes, what each of them committed, block lengths and
    the number of positions that each pass computed must be the same.
    """
    traces = chosen(name, kind_of, dtype, pytestconfig.getoption("--all-recorded"))
    assert traces
    prompts, _ = recorded(name)
    model = dlmkern.load_model(DATA / "models" / RECORDED[name], dtype=dtype)
    computed: list[int] = []
    model.register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[1]))
    for backend in ("reference",) if dtype == "float64" else ("reference", "cpu"):
        same = 0
        for trace in traces:
            prompt = prompts[trace["prompt"]]
            computed.clear()
            decoder = decoder_of(trace, "official")
            with dlmkern.use_backend(backend):
                stream = dlmkern.generate_stream(model, [prompt], decoder, trace["gen_length"])
                events = [[step.rows[0].positions, step.rows[0].remasked, []] for step in stream]
            output = stream.result()
            same += (
                equals(output, prompt, trace)
                and computed == lengths_of(trace, output)
                and events == trace.get("events", events)
            )
        print(f"{name}, {kind_of}, {dtype}, {backend}: {same} of {len(traces)} the same")
        assert same == len(traces)


def lengths_of(trace: dict[str, Any], output: GenerationOutput) -> list[int]:
    """The positions of each pass. Those of WINO that open a block verify nothing, and do without the shadow
    that the official code computes there as well."""
    lengths = list(trace["forward_lengths"])
    if trace.get("fn") == "decoding_wino":
        end = 0
        for length in output.block_lengths[0]:
            opening = output.step_map[0, :end].max() + 1 if end else 0
            lengths[int(opening)] -= length
            end += length
    return lengths


@pytest.mark.parametrize(
    "name", ["llada_traces", "chains4_traces", "depcap_llada_traces", "dapd_traces", "wino_traces"]
)
def test_normalisation_seldom_matters(name: str, pytestconfig: pytest.Config) -> None:
    """Without compat="official" the mask and the padded vocabulary take no share of the probabilities.

    That may change a close call. How many of the uncached decodings stay the same is printed; the factor rule
    is left out, in which more differs.
    """
    kinds = [
        of for n, of in KINDS if n == name and of.startswith(("generate", "decoding")) and "factor" not in of
    ]
    everything = pytestconfig.getoption("--all-recorded")
    traces = [trace for of in kinds for trace in chosen(name, of, "float64", everything)]
    prompts, _ = recorded(name)
    model = dlmkern.load_model(DATA / "models" / RECORDED[name], dtype="float64")
    same = sum(
        equals(
            dlmkern.generate(model, [prompts[trace["prompt"]]], decoder_of(trace, None), trace["gen_length"]),
            prompts[trace["prompt"]],
            trace,
        )
        for trace in traces
    )
    print(f"{name}: without compat {same} of {len(traces)} the same")
    assert same >= 0.75 * len(traces) > 0


def test_a_committed_token_is_not_written_over() -> None:
    """Saber's official code does so with n = 4 where fewer masks are left, in three of the decodings.

    Two of them differ in the overwritten token alone. In the third, the code commits a position beyond the
    block, and all that follows differs.
    """
    prompts, traces = recorded("saber_traces")
    model = dlmkern.load_model(DATA / "models" / "llada_seed0", dtype="float64")
    differences = []
    for trace in filter(faulty, traces):
        prompt = prompts[trace["prompt"]]
        out = dlmkern.generate(model, [prompt], decoder_of(trace, "official"), trace["gen_length"])
        pairs = zip(out.sequences[0].tolist(), trace["ids"], strict=True)
        differences.append(sum(a != b for a, b in pairs))
        assert (out.tokens != model.config.mask_token_id).all()
    assert differences[0] == differences[2] == 1 < differences[1]


def test_each_kind_is_there() -> None:
    """Guards the selections above against being emptied by a change of the files."""
    sizes = {name: len(recorded(name)[1]) for name in RECORDED}
    assert sizes == {
        "llada_traces": 120,
        "chains4_traces": 135,
        "dream_traces": 132,
        "depcap_llada_traces": 672,
        "depcap_dream_traces": 224,
        "dapd_traces": 32,
        "wino_traces": 36,
        "saber_traces": 24,
    }
    robust = {name: sum(trace["robust"] for trace in recorded(name)[1]) for name in RECORDED}
    assert robust == {
        "llada_traces": 94,
        "chains4_traces": 0,
        "dream_traces": 107,
        "depcap_llada_traces": 184 + 356,
        "depcap_dream_traces": 192,
        "dapd_traces": 12,
        "wino_traces": 24,
        "saber_traces": 8,
    }
    assert Counter(name for name, _ in KINDS) == {
        "llada_traces": 9,
        "chains4_traces": 9,
        "dream_traces": 8,
        "depcap_llada_traces": 6,
        "depcap_dream_traces": 2,
        "dapd_traces": 4,
        "wino_traces": 1,
        "saber_traces": 1,
    }
    assert sum(faulty(trace) for trace in recorded("saber_traces")[1]) == 3


@pytest.mark.parametrize("name", [name for name in dlmkern.decoders.PRESETS if "-" not in name])
@pytest.mark.parametrize("checkpoint", ["llada_seed0", "dream_seed0"])
def test_batch_of_recorded_prompts(checkpoint: str, name: str) -> None:
    """Prompts of different lengths decode in a batch as they do alone: the model does not see the padding."""
    prompts, _ = recorded("llada_traces")
    prompts = [*prompts, prompts[0][:3], prompts[1][:1]]
    model = dlmkern.load_model(DATA / "models" / checkpoint, dtype="float64")
    settings: dict[str, dict[str, Any]] = {
        "depcap": {"l_min": 4, "l_max": 16, "tau_low": 0.3, "tau_high": 0.6},
        "dream": {"block_length": 9},
        "threshold": {"tau": 0.5, "block_length": 11},
        "dapd": {"tau_min": 0.2, "tau_max": 0.6, "block_length": 16},
        "wino": {"block_length": 13, "tau_draft": 0.3},
        "saber": {"block_length": 13},
        "cover": {"tau_draft": 0.4, "block_length": 13},
    }
    decoder = dlmkern.decoders.PRESETS[name](**settings.get(name, {}))
    if name == "wino" and checkpoint == "dream_seed0":
        with pytest.raises(ValueError, match=r"revise: WINO.* those of DreamModel predict the next"):
            dlmkern.generate(model, prompts, decoder, 40)
        return
    batch = dlmkern.generate(model, prompts, decoder, 40)
    for row, prompt in enumerate(prompts):
        assert same(dlmkern.generate(model, [prompt], decoder, 40), batch, 0, row)
