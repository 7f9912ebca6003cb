"""Decodings by the official code of LLaDA, Dream and Fast-dLLM come out the same from the functions of the
same name, a few of each kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern.drop_in import dream, fast_dllm, llada
from tests.decoders.support import DATA, RECORDED, kind, recorded


def of_kinds(*names: str) -> list[tuple[str, str]]:
    return [
        (name, kind_of) for name in names for kind_of in dict.fromkeys(kind(t) for t in recorded(name)[1])
    ]


def model_and_traces(name: str, kind_of: str) -> tuple[Any, list[tuple[Tensor, list[int], dict[str, Any]]]]:
    """The model, and the first and the last decoding of a kind: prompt, tokens, all that is recorded."""
    prompts, traces = recorded(name)
    traces = [trace for trace in traces if kind(trace) == kind_of]
    some = []
    for trace in (traces[0], traces[-1]):
        prompt = prompts[trace["prompt"]]
        ids = trace["ids"] if "ids" in trace else prompt + trace["answer_ids"]
        some.append((torch.tensor([prompt]), ids, trace))
    return dlmkern.load_model(DATA / "models" / RECORDED[name], dtype="float64"), some


def test_each_kind_is_there() -> None:
    assert len(of_kinds("llada_traces", "chains4_traces")) == 2 * 3 * 3
    assert {kind_of for _, kind_of in of_kinds("dream_traces")} == {
        "diffusion_generate, entropy",
        "diffusion_generate, maskgit_plus",
        "diffusion_generate, topk_margin",
        "diffusion_generate, confidence_threshold",
        "diffusion_generate_block, entropy, prefix",
        "diffusion_generate_block, entropy, dual",
        "diffusion_generate_block, confidence_threshold, prefix",
        "diffusion_generate_block, confidence_threshold, dual",
    }


@pytest.mark.parametrize(("name", "kind_of"), of_kinds("llada_traces", "chains4_traces"))
def test_fast_dllm(name: str, kind_of: str) -> None:
    model, traces = model_and_traces(name, kind_of)
    functions = {
        "generate": fast_dllm.generate,
        "prefix": fast_dllm.generate_with_prefix_cache,
        "dual": fast_dllm.generate_with_dual_cache,
    }
    for prompt, ids, trace in traces:
        called: list[int] = []
        sequences, nfe = functions[trace["fn"]](
            model,
            prompt,
            steps=trace["steps"],
            gen_length=trace["gen_length"],
            block_length=trace["block_length"],
            mask_id=model.config.mask_token_id,
            threshold=trace.get("threshold"),
            factor=trace.get("factor"),
            step_callback=called.append,
            compat="official",
        )
        assert sequences.tolist() == [ids]
        assert nfe == trace["nfe"]
        assert called == list(range(nfe))


@pytest.mark.parametrize("name", ["llada_traces", "chains4_traces"])
def test_llada(name: str) -> None:
    model, traces = model_and_traces(name, "generate, steps")
    for prompt, ids, trace in traces:
        sequences = llada.generate(
            model,
            prompt,
            steps=trace["steps"],
            gen_length=trace["gen_length"],
            block_length=trace["block_length"],
            mask_id=model.config.mask_token_id,
            compat="official",
        )
        assert sequences.tolist() == [ids]


@pytest.mark.parametrize(("name", "kind_of"), of_kinds("dream_traces"))
def test_dream(name: str, kind_of: str) -> None:
    model, traces = model_and_traces(name, kind_of)
    for prompt, ids, trace in traces:
        blocks = {key: trace[key] for key in ("block_length", "dual_cache", "threshold") if key in trace}
        result = model.diffusion_generate(
            prompt,
            max_new_tokens=trace["gen_length"],
            steps=trace["steps"],
            alg=trace["alg"],
            return_dict_in_generate=True,
            output_history=True,
            compat="official",
            **blocks,
        )
        assert isinstance(result, dream.DreamModelOutput)
        assert result.sequences.tolist() == [ids]
        history = torch.cat(result.history)
        assert len(history) == trace["nfe_forwards"]
        still_masked = history[:, prompt.shape[1] :] == model.config.mask_token_id
        assert still_masked.sum(0).tolist() == trace["decided_at_forward"]
