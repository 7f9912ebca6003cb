"""A step waits for nothing: no value travels from the device to the host, and no host data to the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dlmkern import decoders as d
from dlmkern import reference
from dlmkern.backends import registry
from dlmkern.decoders.state import State, initial_state
from dlmkern.decoders.step import Plan, step
from tests.decoders.support import MASK, VOCAB, graph_of, left_out

G = 24
PROMPTS = [[1, 2], [3], [4, 5, 6]]

DECODERS = {
    "vanilla": d.vanilla(8),
    "vanilla with steps": d.vanilla(8, 6),
    "random remasking": d.vanilla(None, remasking="random"),
    "threshold": d.threshold(0.9, 8),
    "factor": d.factor(1.0, 8),
    "factor, official": d.factor(1.0, 8, compat="official"),
    "dream": d.dream(block_length=8, alg_temp=0.5),
    "dream with steps": d.dream("maskgit_plus", 6, 8),
    "dream, origin": d.dream("origin"),
    "dream, margin": d.dream("topk_margin"),
    "dream, sure": d.dream("confidence_threshold", 4, compat="official"),
    "dapd": d.dapd(block_length=8),
    "dapd, direct": d.dapd("direct", delayed_token_id=2, compat="official"),
    "dapd, late without graph": d.dapd(block_length=8, late_graph=False, symmetric=True),
    "dapd, adaptive": d.Decoder(d.DepGABlocks(l_min=2, l_max=6), d.DAPD()),
    "wino": d.wino(8),
    "saber": d.saber(8, compat="official"),
    "cover": d.cover(block_length=8),
    "cover, exact": d.cover(block_length=8, verify="exact", seeds_by="random", draft_most=2),
    "cover, adaptive": d.Decoder(
        d.DepGABlocks(l_min=2, l_max=6),
        d.DAPD(),
        d.COVER(0.9, 1, most=3, combine="sum", suspects="above_mean", layers=0.3),
    ),
    "depcap": d.depcap(l_min=2, l_max=6),
    "depcap, official": d.depcap(l_min=2, l_max=6, kl="topk", topk=4, compat="official"),
    "depcap, exact, official": d.depcap(l_min=2, l_max=6, padding="reflect", compat="official"),
}


class ForbidHostData(TorchFunctionMode):
    """Refuses tensors made from host data; on a fake device these do not reach the dispatcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy):
            raise AssertionError(f"{func} in a step")
        return func(*args, **(kwargs or {}))


class ForbidReads(TorchDispatchMode):
    """Refuses what makes the host wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal"):
            raise AssertionError(f"{func} in a step")
        if name in ("index", "index_put", "index_put_"):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise AssertionError(f"{func} with a mask in a step")
        out = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in args if isinstance(x, Tensor) and x.dim() > 0}
        if isinstance(out, Tensor) and devices and devices != {out.device.type}:
            raise AssertionError(f"{func} from {devices} to {out.device.type} in a step")
        return out


@contextmanager
def forbid() -> Iterator[None]:
    with ForbidHostData(), ForbidReads():
        yield


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that is not the host; the ops' reference runs in full, not only their shape functions.

    A fake "meta" device serves where torch is built without CUDA, in which indexing fake CUDA tensors fails.
    """
    for name in registry.OPS:
        monkeypatch.setattr(importlib.import_module(f"dlmkern.ops.{name}"), "_op", getattr(reference, name))
    return torch.device("meta")


def states(plan: Plan, device: torch.device) -> State:
    state = initial_state(PROMPTS, plan.gen_length, plan.mask_token_id, [1, 2, 3], device)
    revise = plan.decoder.revise
    return state if revise is None else state._replace(memory=revise.start(state))


def run_steps(plan: Plan, state: State, logits: Callable[[int], Tensor], between: Any) -> None:
    """The opening step of the first block, one inside it, and the opening of another block."""
    blocks = plan.decoder.blocks
    for opens in (True, False, True):
        width = blocks.window(plan.gen_length) if opens else blocks.longest(plan.gen_length)
        x = logits(width)
        with between():
            state = step(x, state, plan, opens, graph_of(x, state, plan), left_out(x, state, plan))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("eos", [None, 3])
@pytest.mark.parametrize("name", DECODERS)
def test_a_step_reads_nothing(
    fake_device: torch.device, name: str, eos: int | None, temperature: float
) -> None:
    plan = Plan(
        DECODERS[name], G, MASK, VOCAB, eos, temperature, top_p=0.9, top_k=5, first_alone=eos is not None
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = states(plan, fake_device)
        run_steps(
            plan,
            state,
            lambda width: torch.empty(len(PROMPTS), width, VOCAB + 4, device=fake_device),
            forbid,
        )


PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "condition": lambda x: bool(x.any()),
    "list": lambda x: x.tolist(),
    "copy to the host": lambda x: x.cpu(),
    "mask": lambda x: x[x > 0],
    "assignment by mask": lambda x: x.__setitem__(x > 0, torch.zeros(3, device=x.device)),
    "nonzero": lambda x: x.nonzero(),
    "host data": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "host data on its way": lambda x: x + torch.as_tensor([1.0, 2.0, 3.0]).to(x.device),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_check_finds_planted_reads(fake_device: torch.device, name: str) -> None:
    """Each way to break the rule is noticed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, device=fake_device)
        with forbid(), pytest.raises(Exception, match=r"in a step|data-dependent|[Dd]ynamic|item|convert"):
            PLANTED[name](x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", DECODERS)
def test_a_step_on_a_gpu_reads_nothing(name: str) -> None:
    device = torch.device("cuda")
    plan = Plan(DECODERS[name], G, MASK, VOCAB, 3, 0.8, top_p=0.9, top_k=5, first_alone=True)

    class Strict:
        def __enter__(self) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_: object) -> None:
            torch.cuda.set_sync_debug_mode("default")

    generator = torch.Generator(device).manual_seed(0)
    for _ in range(2):  # the first round compiles kernels
        run_steps(
            plan,
            states(plan, device),
            lambda width: torch.randn(len(PROMPTS), width, VOCAB + 4, device=device, generator=generator),
            Strict,
        )


@pytest.mark.parametrize("name", ["depcap", "cover", "saber", "wino"])
def test_a_step_leaves_its_input_alone(name: str) -> None:
    """The state before a step can be kept."""
    plan = Plan(DECODERS[name], G, MASK, VOCAB, 3, 0.8)
    state = states(plan, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for opens in (True, False, True):
        width = plan.decoder.blocks.window(G) if opens else plan.decoder.blocks.longest(G)
        logits = torch.randn(len(PROMPTS), width, VOCAB + 4, generator=generator)
        parts = (*state[:-2], *state.memory, *(state.previous or ()), logits)
        copies = [x.clone() for x in parts]
        graph, without = graph_of(logits, state, plan), left_out(logits, state, plan)
        after = step(logits, state, plan, opens, graph, without)
        for x, copy in zip(parts, copies, strict=True):
            assert (
                torch.equal(x.nan_to_num(-7), copy.nan_to_num(-7)) if x.is_floating_point() else x.equal(copy)
            )
        state = after
