"""A decoding step on a GPU: captured in a CUDA graph, and without any wait of the host for the device."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import dlmkern
from dlmkern import decoders
from dlmkern.decoders.state import State, initial_state
from dlmkern.decoders.step import Plan, step
from tests.decoders.support import graph_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MASK, VOCABULARY, PROMPT, GENERATED, BATCH = 98, 99, 5, 48, 3
DECODERS = {
    "vanilla": decoders.vanilla(block_length=16),
    "threshold": decoders.threshold(block_length=16),
    "factor": decoders.factor(block_length=16),
    "dream": decoders.dream(block_length=16, alg_temp=0.5),
    "dream with steps": decoders.dream("topk_margin", 6, 16),
    "CAP": decoders.Decoder(decoders.FixedBlocks(16), decoders.CAP()),
    "dapd": decoders.dapd(block_length=16),
    "dapd, direct": decoders.dapd("direct", symmetric=True),
    "depcap": decoders.depcap(l_max=16),
    "depcap, top-k": decoders.depcap(l_max=16, kl="topk", topk=8),
    "depcap, official": decoders.depcap(l_max=16, kl="topk", compat="official"),
}


@pytest.fixture(params=["auto", "cuda", "triton", "reference"])
def gpu_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with dlmkern.use_backend(request.param):
        yield


@pytest.fixture(params=DECODERS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return Plan(DECODERS[request.param], GENERATED, MASK, VOCABULARY, temperature=0.5)


def logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(BATCH, GENERATED, VOCABULARY, generator=generator)
    spike = torch.randint(VOCABULARY - 1, (BATCH, GENERATED, 1), generator=generator)
    return x.scatter_(2, spike, 12.0).cuda()


def first_state() -> State:
    prompts = [[row + 1] * PROMPT for row in range(BATCH)]
    return initial_state(prompts, GENERATED, MASK, [1, 2, 3], torch.device("cuda"))


def commit(x: Tensor, state: State, plan: Plan, opens: bool) -> State:
    """A step, with a graph for the rules that want one."""
    return step(x, state, plan, opens, graph_of(x, state, plan))


def opened(plan: Plan) -> State:
    """The state after the step that opens the first block."""
    try:
        return commit(logits(0), first_state(), plan, True)
    except dlmkern.BackendUnavailableError as error:
        pytest.skip(str(error))


def tensors(state: State) -> list[Tensor]:
    return [x for x in state if isinstance(x, Tensor)] + list(state.previous or ())


def assert_same(one: State, other: State) -> None:
    for a, b in zip(tensors(one), tensors(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("opens", [True, False])
def test_a_captured_step_replays_with_new_logits(gpu_backend: None, plan: Plan, opens: bool) -> None:
    state, static = opened(plan), logits(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and loads whatever the first call does
        commit(static, state, plan, opens)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = commit(static, state, plan, opens)
    for seed in (2, 3):
        static.copy_(logits(seed))
        graph.replay()
        with dlmkern.use_backend("reference"):
            expected = commit(logits(seed), state, plan, opens)
        assert_same(captured, expected)


@pytest.mark.parametrize("opens", [True, False])
def test_a_step_does_not_wait_for_the_device(gpu_backend: None, plan: Plan, opens: bool) -> None:
    state, current = opened(plan), logits(1)
    commit(current, state, plan, opens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = commit(current, state, plan, opens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with dlmkern.use_backend("reference"):
        assert_same(result, commit(current, state, plan, opens))
