"""Models that are cheap and exact, recorded decodings, and comparisons."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlmkern import decoders as d
from dlmkern.decoders.state import State
from dlmkern.decoders.step import LeaveOneOut, Plan, block_positions, masked_positions, seed_positions
from dlmkern.decoders.unmask import Graph
from dlmkern.generation import GenerationOutput

DATA = Path(__file__).parents[1] / "data"
MASK = 9
VOCAB = 12


class HashModel:
    """Logits that depend on all tokens of a row and on nothing else, to the bit: a random row of a random
    table.

    Position `i` of a row with ids `x` gets the table's row `(sum_j x_j * (7 j + 3) + 5 i) mod K`.
    """

    def __init__(self, vocab: int = VOCAB, peak: float = 6.0, seed: int = 0, size: int = 257) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn((size, vocab), generator=generator, dtype=torch.float64) * peak

    def __call__(self, ids: Tensor) -> Tensor:
        position = torch.arange(ids.shape[1], device=ids.device)
        key = (ids * (7 * position + 3)).sum(1, keepdim=True) + 5 * position
        return self.table.to(ids.device)[key % self.table.shape[0]]


def graph_of(logits: Tensor, state: State, plan: Plan) -> Graph | None:
    """Some graph of the positions of a step's block, if a rule asks for one."""
    decoder = plan.decoder
    if decoder.attention_layers([0.0]) is None:
        return None
    width = min(logits.shape[1], decoder.blocks.longest(plan.gen_length))
    scores = logits[:, :width, :1].float().sigmoid()
    if decoder.revise is not None and decoder.revise.attention_layers() is not None:
        return Graph(block_positions(state, width), scores * scores.mT)
    return Graph(masked_positions(state, width, width, plan), scores * scores.mT)


def left_out(logits: Tensor, state: State, plan: Plan) -> LeaveOneOut | None:
    """Some predictions of what a step verifies, if its revision rule asks for them."""
    view = "plain" if plan.decoder.revise is None else plan.decoder.revise.view
    if view == "shadow":
        return LeaveOneOut(logits.flip(1), block_positions(state, logits.shape[1]))
    if view == "exact":
        return LeaveOneOut(logits.flip(1), seed_positions(state, logits.shape[1]))
    return None


def constant_model(logits: Tensor) -> Callable[[Tensor], Tensor]:
    """Row `b` of the batch always gets `logits[b]`, whatever its tokens are."""

    def model(ids: Tensor) -> Tensor:
        return logits[: ids.shape[0], : ids.shape[1]].clone()

    return model


def same(a: GenerationOutput, b: GenerationOutput, row_a: int, row_b: int) -> bool:
    """Whether two rows have been decoded in exactly the same way; confidences may differ by rounding."""
    return (
        a.sequences[row_a].tolist() == b.sequences[row_b].tolist()
        and a.nfe[row_a] == b.nfe[row_b]
        and a.block_lengths[row_a] == b.block_lengths[row_b]
        and a.step_map[row_a].tolist() == b.step_map[row_b].tolist()
        and a.reason[row_a].tolist() == b.reason[row_b].tolist()
        and a.revisions[row_a] == b.revisions[row_b]
        and torch.allclose(a.confidence[row_a], b.confidence[row_b], rtol=1e-4, atol=1e-5, equal_nan=True)
    )


RECORDED = {
    "llada_traces": "llada_seed0",
    "chains4_traces": "chains4",
    "dream_traces": "dream_seed0",
    "depcap_llada_traces": "llada_seed0",
    "depcap_dream_traces": "dream_seed0",
    "dapd_traces": "llada_seed0",
    "wino_traces": "llada_seed0",
    "saber_traces": "llada_seed0",
}
"""Files of decodings by the official code of LLaDA, Dream, Fast-dLLM, DepCap, WINO and Saber, and by a
transcription of DAPD's, and their models."""


def recorded(name: str) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts and decodings of a file."""
    with gzip.open(DATA / f"{name}.json.gz", "rt") as file:
        data = json.load(file)
    return data["prompts"], data["traces"]


def kind(trace: dict[str, Any]) -> str:
    """What the decoding is an example of."""
    if "tau_min" in trace:
        return f"{trace['fn']}, {trace['alg']}"
    if "events" in trace:
        return str(trace["fn"])
    if "impl" not in trace:
        return f"{trace['fn']}, {trace.get('mode') or trace['block']}"
    cache = "" if "dual_cache" not in trace else ", dual" if trace["dual_cache"] else ", prefix"
    return f"{trace['impl']}, {trace['alg']}{cache}"


def decoder_of(trace: dict[str, Any], compat: str | None) -> d.Decoder:
    cache = {"prefix": "prefix", "dual": "dual"}.get(trace.get("fn", ""))
    if trace.get("fn") == "decoding_wino":
        return d.wino(trace["block_length"], trace["threshold"], trace["threshold_back"], compat=compat)
    if trace.get("fn") == "generate_with_saber":
        return d.saber(trace["block_length"], trace["n"], compat=compat)
    if "tau_min" in trace:
        variant = trace["alg"].removeprefix("dapd_")
        return d.dapd(variant, trace["tau_min"], trace["tau_max"], trace["block_length"], compat=compat)
    if "L_min" in trace:
        return d.depcap(
            lam=trace["lambda_u"],
            l_min=trace["L_min"],
            l_max=trace["L_max"],
            tau_low=trace["tau_low"],
            tau_high=trace["tau_high"],
            gamma=trace["gamma"],
            kl="topk",
            topk=trace["topk_cache"],
            cache=cache,
            compat=compat,
        )
    if "impl" in trace:
        if "block_length" in trace:
            cache = "dual" if trace["dual_cache"] else "prefix"
        return d.dream(
            trace["alg"],
            trace["steps"],
            trace.get("block_length"),
            cache,
            tau=trace.get("threshold", 0.9),
            compat=compat,
        )
    if trace["mode"] == "steps":
        return d.vanilla(trace["block_length"], trace["steps"], cache, compat=compat)
    if trace["mode"] == "threshold":
        return d.threshold(trace["threshold"], trace["block_length"], cache, compat=compat)
    return d.factor(trace["factor"], trace["block_length"], cache, compat=compat)


def equals(output: GenerationOutput, prompt: list[int], trace: dict[str, Any]) -> bool:
    ids = trace["ids"] if "ids" in trace else prompt + trace["answer_ids"]
    blocks = trace.get("block_lengths") or block_lengths(
        trace["gen_length"], trace.get("block_length", trace["gen_length"])
    )
    if trace.get("fn") == "generate_with_saber":  # its blocks reach back to the start
        blocks = [sum(blocks[: i + 1]) for i in range(len(blocks))]
    return (
        output.sequences[0].tolist() == ids
        and output.nfe.tolist() == [trace["nfe_forwards"]]
        and output.step_map[0].tolist() == trace["decided_at_forward"]
        and output.block_lengths[0] == blocks
    )


def block_lengths(gen_length: int, block_length: int) -> list[int]:
    whole, rest = divmod(gen_length, block_length)
    return [block_length] * whole + [rest] * (rest > 0)
