"""Decodings by the official code of LLaDA, Fast-dLLM and DepCap come out the same, token by token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import dlmkern
from tests.decoders.support import DATA, decoder_of, equals, recorded

FILES = {"llada_traces": "llada_seed0", "chains4_traces": "chains4", "depcap_llada_traces": "llada_seed0"}


class Remembering:
    """A model that runs once on each input, as the same trace is decoded several times."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self.seen: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, ids: Tensor) -> Tensor:
        key = tuple(ids[0].tolist())
        if key not in self.seen:
            self.seen[key] = self.model(ids).logits
        return self.seen[key]


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", FILES)
def test_recorded_decodings(name: str, dtype: str, part: int) -> None:
    """All of them in float64 by the reference; in float32, by the reference and the C++ kernels, all that are
    robust.

    A decoding is robust if no choice in it hangs on rounding. Those of chains4 are not by that measure, but
    float32 has proved to be enough. Without compat="official" the mask and the padded vocabulary take no
    share of the probabilities, which may change a close call; how many of the decodings stay the same is
    printed.
    """
    prompts, traces = recorded(name)
    traces = traces[part::4]
    if dtype == "float32" and name != "chains4_traces":
        traces = [trace for trace in traces if trace["robust"]]
    assert traces
    model = dlmkern.load_model(DATA / "models" / FILES[name], dtype=dtype)
    runs: list[tuple[str, str | None]] = [("reference", "official")]
    if dtype == "float32":
        runs += [("cpu", "official"), ("cpu", None)]
    same: Counter[tuple[str, str | None]] = Counter()
    for trace in traces:
        remembering = Remembering(model)
        prompt = prompts[trace["prompt"]]
        for backend, compat in runs:
            with dlmkern.use_backend(backend):
                output = dlmkern.generate(
                    remembering, [prompt], decoder_of(trace, compat), trace["gen_length"]
                )
            same[backend, compat] += equals(output, prompt, trace)
    for backend, compat in runs:
        count = same[backend, compat]
        print(f"{name}, {dtype}, {backend}, compat={compat}: {count} of {len(traces)} the same")
        assert count == len(traces) if compat == "official" else count >= 0.75 * len(traces)


def test_each_kind_is_there() -> None:
    """Guards the selections above against being emptied by a change of the files."""
    sizes = {name: len(recorded(name)[1]) for name in FILES}
    assert sizes == {"llada_traces": 32, "chains4_traces": 30, "depcap_llada_traces": 224}
    robust = {name: sum(trace["robust"] for trace in recorded(name)[1]) for name in FILES}
    assert robust == {"llada_traces": 24, "chains4_traces": 0, "depcap_llada_traces": 184}
    kinds = Counter(trace["block"] for trace in recorded("depcap_llada_traces")[1])
    assert kinds["adaptive"] > 0
    assert kinds["fixed"] > 0


@pytest.mark.parametrize("name", ["vanilla", "threshold", "depcap"])
def test_batch_of_recorded_prompts(name: str) -> None:
    """Prompts of different lengths decode in a batch as they do alone: the model does not see the padding."""
    prompts, _ = recorded("llada_traces")
    prompts = [*prompts, prompts[0][:3], prompts[1][:1]]
    model = dlmkern.load_model(DATA / "models" / "llada_seed0", dtype="float64")
    settings: dict[str, Any] = (
        {} if name != "depcap" else {"l_min": 4, "l_max": 16, "tau_low": 0.3, "tau_high": 0.6}
    )
    decoder = dlmkern.decoders.PRESETS[name](**settings)
    batch = dlmkern.generate(model, prompts, decoder, 40)
    for row, prompt in enumerate(prompts):
        alone = dlmkern.generate(model, [prompt], decoder, 40)
        assert alone.sequences[0].tolist() == batch.sequences[row].tolist()
        assert alone.nfe[0] == batch.nfe[row]
        assert alone.block_lengths[0] == batch.block_lengths[row]
        assert torch.equal(alone.step_map[0], batch.step_map[row])
        assert torch.equal(alone.reason[0], batch.reason[row])
        assert torch.allclose(alone.confidence[0], batch.confidence[row], rtol=1e-9)
