"""What a step on an accelerator relies on: no op waits for the device or copies the logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import dlmkern
from dlmkern import reference

B, N, V, K = 2, 5, 40, 4
# torch cannot index fake tensors of a device that it was built without; there only reads of values show.
FAKE = "cuda" if torch.cuda.is_available() else "cpu"


class Watch(TorchDispatchMode):
    """Records the largest tensor made, and refuses to read one on the host or to make one from host data."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        assert name not in self.FORBIDDEN, f"{name} waits for the device"
        result = func(*args, **(kwargs or {}))
        on = {x.device.type for x in args if isinstance(x, Tensor)}
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                assert not on or x.device.type in on, f"{name} moves a tensor to {x.device}"
                if x.untyped_storage().nbytes() and not func.is_view:
                    self.largest = max(self.largest, x.numel() * x.element_size())
        return result


def rows(device: str, dtype: torch.dtype = torch.float64, n: int = N) -> Tensor:
    return torch.zeros((B, n), dtype=dtype, device=device)


def arguments(device: str) -> dict[str, tuple[Any, ...]]:
    """For each op, what the torch op of its name takes."""
    logits = torch.zeros((B, N, V), dtype=torch.bfloat16, device=device)
    flags, tokens, statistics = rows(device, torch.bool), rows(device, torch.int64), rows(device)
    numbers, counts = statistics[:, 0], tokens[:, 0]
    conflict = torch.zeros((B, N, N), dtype=torch.bool, device=device)
    ids = torch.zeros((B, N, K), dtype=torch.int64, device=device)
    cache, table = torch.zeros((B, 2, 9, 4), device=device), torch.zeros((9, 4), device=device)
    block, graph = cache[:, :, :N], torch.zeros((B, N, N), device=device)
    fresh = block, block, block
    return {
        "token_stats": (logits, logits, tokens, 3, torch.float32),
        "conflict_matrix": (logits, tokens, statistics),
        "independent_set": (conflict, statistics, flags, flags),
        "cap_select": (logits, tokens, statistics, flags, numbers, numbers, numbers, False),
        "topk_snapshot": (logits, K, 3),
        "topk_kl": (ids, ids.double(), ids, ids.double(), statistics),
        "depga_block": (statistics, statistics, counts, numbers, counts, counts, True),
        "confidence_select": (statistics, flags, numbers, 3),
        "kv_block_write": (cache, cache.clone(), block, block, tokens, table, table, True),
        "block_attention": (block, cache[:, :1], cache[:, 1:], counts, 0.5),
        "attention_graph": (block, cache[:, :1], tokens, tokens, counts, block[..., 0], 0.5, graph),
        "dapd_select": (graph, statistics, flags, numbers, numbers, numbers, True),
        "cover_attention": (*fresh, block, block, flags, counts, 1, 0.5),
        "diagonal_correction": (
            *(block.clone(), block[..., 0].clone(), *fresh, cache, cache),
            *(flags, counts, tokens, 1, 0.5, 0.5),
        ),
        "cover_seeds": (statistics, statistics, statistics, flags, counts, False, True),
        "cover_verify": (statistics, tokens, tokens, flags, tokens, 0.9, 1),
    }


@pytest.mark.parametrize("op", arguments("cpu"))
def test_reference_never_waits_for_the_device(op: str) -> None:
    with FakeTensorMode() as mode:
        taken = arguments(FAKE)[op]
        with Watch():
            results = getattr(reference, op)(*taken)
        if results is None:
            results = tuple(x for x in taken if isinstance(x, Tensor))  # it has written to some of them
        for result in results if isinstance(results, tuple) else (results,):
            assert result.device.type == FAKE
            assert result.fake_mode is mode


def public_calls() -> dict[str, Callable[[], Any]]:
    def logits() -> Tensor:
        return torch.zeros((B, N, V), device=FAKE)

    def numbers(dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(B, dtype=dtype, device=FAKE)

    def scores() -> Tensor:
        return torch.zeros((B, N, N), device=FAKE)

    def cache(length: int = 9) -> Tensor:
        return torch.zeros((B, 2, length, 4), device=FAKE)

    def write(**options: Any) -> Any:
        return dlmkern.kv_block_write(cache(), cache(), cache(N), cache(N), rows(FAKE, counts), **options)

    counts = torch.int64
    return {
        "token_stats": lambda: dlmkern.token_stats(logits(), logits(), prev_rows=rows(FAKE, counts)),
        "kl_entropy": lambda: dlmkern.kl_entropy(logits(), logits()),
        "conflict_matrix": lambda: dlmkern.conflict_matrix(logits()),
        "independent_set": lambda: dlmkern.independent_set(dlmkern.conflict_matrix(logits()) > 0, rows(FAKE)),
        "cap_select": lambda: dlmkern.cap_select(
            logits=logits(), tau_low=numbers(), tau_high=numbers(), gamma=numbers()
        ),
        "cap_select with numbers": lambda: dlmkern.cap_select(logits(), rows(FAKE, torch.bool)),
        "topk": lambda: dlmkern.topk_kl(*[dlmkern.topk_snapshot(logits(), K)] * 2),
        "depga_block": lambda: dlmkern.depga_block(
            rows(FAKE), rows(FAKE), numbers(counts), numbers(), numbers(counts), numbers(counts)
        ),
        "confidence_select": lambda: dlmkern.confidence_select(logits(), rows(FAKE, torch.bool)),
        "confidence_select by row": lambda: dlmkern.confidence_select(
            confidence=rows(FAKE), rule="schedule", count=numbers(counts)
        ),
        "kv_block_write": write,
        "kv_block_write with drift": lambda: write(rope=(cache()[0, 0], cache()[0, 0]), drift=True),
        "block_attention": lambda: dlmkern.block_attention(cache(N), cache(), cache(), numbers(counts)),
        "attention_graph": lambda: dlmkern.attention_graph(
            cache(), cache(), rows(FAKE, counts), numbers(counts), lengths=numbers(counts)
        ),
        "attention_graph of some rows": lambda: dlmkern.attention_graph(
            cache(N), cache(), rows(FAKE, counts), rows=rows(FAKE, counts), lse=cache(N)[..., 0]
        ),
        "dapd_select": lambda: dlmkern.dapd_select(scores(), rows(FAKE), rows(FAKE, torch.bool), 0.1),
        "dapd_select, direct": lambda: dlmkern.dapd_select(
            scores(), rows(FAKE), None, numbers(), variant="direct", certain_dtype=torch.bfloat16
        ),
        "dapd_select, late": lambda: dlmkern.dapd_select(
            scores(), rows(FAKE), None, 0.1, progress=numbers(), late_graph=False
        ),
        "cover_attention": lambda: dlmkern.cover_attention(
            *[cache(N)] * 5, rows(FAKE, torch.bool), numbers(counts), shift=1
        ),
        "diagonal_correction": lambda: dlmkern.diagonal_correction(
            cache(N), cache(N)[..., 0], *[cache(N)] * 5, rows(FAKE, torch.bool)
        ),
        "diagonal_correction of a block": lambda: dlmkern.diagonal_correction(
            *(cache(N), cache(N)[..., 0], *[cache(N)] * 3, cache(), cache(), rows(FAKE, torch.bool)),
            lengths=numbers(counts),
            positions=rows(FAKE, counts),
        ),
        "cover_seeds": lambda: dlmkern.cover_seeds(
            rows(FAKE), rows(FAKE), rows(FAKE), rows(FAKE, torch.bool)
        ),
        "cover_seeds by row": lambda: dlmkern.cover_seeds(
            rows(FAKE), None, rows(FAKE), combine="sum", suspects="above_mean", most=numbers(counts)
        ),
        "cover_verify": lambda: dlmkern.cover_verify(
            rows(FAKE, counts), rows(FAKE, counts), rows(FAKE), rows(FAKE, torch.bool)
        ),
    }


@pytest.mark.parametrize("name", public_calls())
def test_public_functions_never_wait_for_the_device(name: str) -> None:
    with FakeTensorMode(), Watch():
        result = public_calls()[name]()
    for x in result if isinstance(result, tuple) else (result,):
        assert x is None or x.device.type == FAKE


@pytest.mark.parametrize("known", [True, False])
def test_attention_graph_makes_no_map_of_all_positions(known: bool) -> None:
    heads, length, size, many = 32, 4096, 32, 64
    q = torch.zeros((1, heads, length, size), dtype=torch.bfloat16)
    positions = torch.zeros((1, many), dtype=torch.int64)
    lse = torch.zeros((1, heads, length)) if known else None
    with FakeTensorMode(allow_non_fake_inputs=True), Watch() as watch:
        dlmkern.attention_graph(q, q[:, ::8], positions, lse=lse)
    most = 4 * max(length * size, many * many if known else many * length)
    assert 0 < watch.largest <= most < 4 * heads * many * length


@pytest.mark.parametrize("op", ["token_stats", "conflict_matrix", "cap_select", "topk_snapshot"])
def test_reference_makes_no_copy_of_the_logits(op: str) -> None:
    n, vocabulary = 48, 30_000
    logits = torch.zeros((1, n, vocabulary), dtype=torch.bfloat16)
    tokens, statistics = torch.zeros((1, n), dtype=torch.int64), torch.zeros((1, n), dtype=torch.float64)
    numbers = statistics[:, 0]
    taken: tuple[Any, ...] = {
        "token_stats": (logits, logits, tokens, 3, torch.float32),
        "conflict_matrix": (logits, tokens, statistics),
        "cap_select": (logits, tokens, statistics, None, numbers, numbers, numbers, False),
        "topk_snapshot": (logits, 8, 3),
    }[op]
    with FakeTensorMode(allow_non_fake_inputs=True), Watch() as watch:
        getattr(reference, op)(*taken)
    assert 0 < watch.largest <= reference.rows.CHUNK_BYTES < logits.numel() * logits.element_size()
