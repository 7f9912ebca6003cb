"""Decodings by the official code of LLaDA, Dream and Fast-dLLM come out the same from the functions of the
same name, a few of each kind."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern.drop_in import dream, fast_dllm, llada
from tests.decoders.support import DATA

MODELS = {"llada_traces": "llada_seed0", "chains4_traces": "chains4", "dream_traces": "dream_seed0"}


def recorded(name: str) -> tuple[list[list[int]], dict[str, list[dict[str, Any]]]]:
    """Prompts, and the decodings by their kind."""
    with gzip.open(DATA / f"{name}.json.gz", "rt") as file:
        data = json.load(file)
    kinds: dict[str, list[dict[str, Any]]] = {}
    for trace in data["traces"]:
        named = ("fn", "mode", "impl", "alg", "dual_cache")
        kinds.setdefault(" ".join(str(trace[key]) for key in named if key in trace), []).append(trace)
    return data["prompts"], kinds


def of_kinds(*names: str) -> list[tuple[str, str]]:
    return [(name, kind) for name in names for kind in recorded(name)[1]]


def expected_ids(prompt: list[int], trace: dict[str, Any]) -> list[int]:
    ids: list[int] = trace["ids"] if "ids" in trace else prompt + trace["answer_ids"]
    return ids


def model_and_traces(name: str, kind: str) -> tuple[Any, list[tuple[Tensor, list[int], dict[str, Any]]]]:
    prompts, kinds = recorded(name)
    some = [
        (torch.tensor([prompts[trace["prompt"]]]), expected_ids(prompts[trace["prompt"]], trace), trace)
        for trace in kinds[kind][:: len(kinds[kind]) - 1]
    ]
    assert len(some) == 2
    return dlmkern.load_model(DATA / "models" / MODELS[name], dtype="float64"), some


def test_each_kind_is_there() -> None:
    assert len(of_kinds("llada_traces", "chains4_traces")) == 2 * 3 * 3
    assert {kind for _, kind in of_kinds("dream_traces")} == {
        "diffusion_generate entropy",
        "diffusion_generate maskgit_plus",
        "diffusion_generate topk_margin",
        "diffusion_generate confidence_threshold",
        "diffusion_generate_block entropy False",
        "diffusion_generate_block entropy True",
        "diffusion_generate_block confidence_threshold False",
        "diffusion_generate_block confidence_threshold True",
    }


@pytest.mark.parametrize(("name", "kind"), of_kinds("llada_traces", "chains4_traces"))
def test_fast_dllm(name: str, kind: str) -> None:
    model, traces = model_and_traces(name, kind)
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
    model, traces = model_and_traces(name, "generate steps")
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


@pytest.mark.parametrize(("name", "kind"), of_kinds("dream_traces"))
def test_dream(name: str, kind: str) -> None:
    model, traces = model_and_traces(name, kind)
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
