"""The Triton kernels compiled ahead of time for GPUs that need not be there: they compile, and spill nothing.

What is compiled comes from the same plans that the host functions run, specialised by Triton's own rules for
the arguments: dtypes, alignment, divisibility by 16, None and 1.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, CompiledKernel, make_backend
    from triton.runtime.jit import create_function_from_signature

    from dlmkern.triton_kernels import (
        attention_graph,
        block_attention,
        cap_select,
        confidence_select,
        conflict_matrix,
        cover_attention,
        cover_seeds,
        cover_verify,
        dapd_select,
        diagonal_correction,
        independent_set,
        kv_block_write,
        token_stats,
    )
    from dlmkern.triton_kernels.launch import Launch

compiled = pytest.mark.skipif(INTERPRETED, reason="runs in the process that test_in_own_process starts")

V = 126464


@pytest.mark.skipif(not INTERPRETED, reason="this process can compile")
def test_in_own_process(run_again: Callable[[str, bool], None]) -> None:
    run_again(__file__, False)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing that was compiled before counts."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def stats_launches(
    rows: int, V: int, dtype: torch.dtype, prev: bool, out_dtype: torch.dtype, contiguous: bool = True
) -> list[Launch]:
    # The memory is never touched.
    logits = torch.empty(1, rows, V, dtype=dtype) if contiguous else torch.empty(1, V, rows, dtype=dtype).mT
    prev_rows = torch.empty(1, rows, dtype=torch.int64) if prev and contiguous else None
    return token_stats.plan(logits, logits if prev else None, prev_rows, 5, out_dtype)[0]


def conflict_launches(dtype: torch.dtype) -> list[Launch]:
    logits, token = torch.empty(2, 64, V, dtype=dtype), torch.empty(2, 64, dtype=torch.int64)
    return conflict_matrix.plan(logits, token, torch.empty(2, 64, dtype=torch.float64))[0]


def set_launches(n: int, everything: bool) -> list[Launch]:
    conflict, some = torch.empty(2, n, n, dtype=torch.bool), torch.empty(2, n, dtype=torch.bool)
    priority = torch.empty(2, n, dtype=torch.float64 if everything else torch.float32)
    return independent_set.plan(conflict, priority, *((some, some) if everything else (None, None)))[0]


def cap_launches(n: int, dtype: torch.dtype, logits: bool, strict: bool) -> list[Launch]:
    scores, token = torch.empty(2, n, V, dtype=dtype), torch.empty(2, n, dtype=torch.int64)
    mask = torch.empty(2, n, dtype=torch.bool) if logits else None
    logsumexp = torch.empty(2, n, dtype=torch.float64) if logits else None
    threshold = torch.empty(2, dtype=torch.float64)
    return cap_select.plan(scores, token, logsumexp, mask, threshold, threshold, threshold, strict)[0]


def confidence_launches(n: int, rule: int) -> list[Launch]:
    confidence, mask = torch.empty(2, n, dtype=torch.float64), torch.empty(2, n, dtype=torch.bool)
    return confidence_select.plan(confidence, mask, torch.empty(2, dtype=torch.float64), rule)[0]


def write_launches(H: int, n: int, d: int, dtype: torch.dtype, turned: bool, drift: bool) -> list[Launch]:
    cache, k = torch.empty(1, H, 1024, d, dtype=dtype), torch.empty(1, n, H, d, dtype=dtype).transpose(1, 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rope = torch.empty(1024, d, dtype=wide) if turned else None
    positions = torch.empty(1, n, dtype=torch.int64)
    return kv_block_write.plan(cache, cache, k, k, positions, rope, rope, drift)[0]


def attention_launches(
    B: int, Hq: int, Hkv: int, n: int, d: int, dtype: torch.dtype, lengths: bool = True
) -> list[Launch]:
    q, k = torch.empty(B, n, Hq, d, dtype=dtype).transpose(1, 2), torch.empty(B, Hkv, 1024, d, dtype=dtype)
    some = torch.empty(B, dtype=torch.int64) if lengths else None
    return block_attention.plan(q, k, k, some, d**-0.5)[0]


def graph_launches(
    B: int, Hq: int, Hkv: int, M: int, d: int, dtype: torch.dtype, given: bool = False
) -> list[Launch]:
    L = 1024
    q, k = torch.empty(B, L, Hq, d, dtype=dtype).transpose(1, 2), torch.empty(B, Hkv, L, d, dtype=dtype)
    positions, lengths = torch.empty(B, M, dtype=torch.int64), torch.empty(B, dtype=torch.int64)
    rows, lse = (positions, torch.empty(B, Hq, L)) if given else (None, None)
    return attention_graph.plan(q, k, positions, rows, lengths, lse, d**-0.5, torch.empty(B, M, M))[0]


def dapd_launches(M: int, dtype: torch.dtype, symmetric: bool) -> list[Launch]:
    scores, confidence = torch.empty(2, M, M, dtype=dtype), torch.empty(2, M, dtype=dtype)
    valid = torch.empty(2, M, dtype=torch.bool) if symmetric else None
    threshold = torch.empty(2, dtype=torch.float64)
    return dapd_select.plan(scores, confidence, valid, threshold, threshold, threshold, symmetric)[0]


def cover_launches(Hq: int, Hkv: int, L: int, d: int, dtype: torch.dtype) -> list[Launch]:
    q, k = (torch.empty(1, L, H, d, dtype=dtype).transpose(1, 2) for H in (Hq, Hkv))
    cached, seeds = torch.empty(1, Hkv, L, d, dtype=dtype), torch.empty(1, L, dtype=torch.bool)
    lengths = torch.empty(1, dtype=torch.int64)
    return cover_attention.plan(q, k, k, cached, cached, seeds, lengths, 0, d**-0.5)[0]


def correction_launches(Hq: int, Hkv: int, d: int, dtype: torch.dtype, placed: bool) -> list[Launch]:
    n = 32
    q, k = (torch.empty(1, n, H, d, dtype=dtype).transpose(1, 2) for H in (Hq, Hkv))
    lse = torch.empty(1, Hq, n, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    cached, seeds = torch.empty(1, Hkv, 1024 if placed else n, d, dtype=dtype), torch.empty(1, n).bool()
    positions = torch.empty(1, n, dtype=torch.int64) if placed else None
    lengths = torch.empty(1, dtype=torch.int64)
    rest = (seeds, lengths, positions, 0, d**-0.5, 0.5)
    return diagonal_correction.plan(q, lse, q, k, k, cached, cached, *rest)[0]


def seeds_launches(n: int, dtype: torch.dtype, everything: bool) -> list[Launch]:
    x, most = torch.empty(2, n, dtype=dtype), torch.empty(2, dtype=torch.int64)
    rest = (x, x, torch.empty(2, n, dtype=torch.bool)) if everything else (None, None, None)
    return cover_seeds.plan(x, *rest, most, everything, everything)[0]


def verify_launches() -> list[Launch]:
    x, y = torch.empty(2, 32, dtype=torch.int64), torch.empty(2, 32, dtype=torch.float64)
    return cover_verify.plan(y, x, x, torch.empty(2, 32, dtype=torch.bool), x, 0.9, 1)[0]


FEW, MANY = 32, 4096  # rows that are sliced, rows that are not
CASES: dict[str, Callable[[], list[Launch]]] = {
    "token_stats bf16, few rows": partial(stats_launches, FEW, V, torch.bfloat16, False, torch.float64),
    "token_stats bf16, many rows": partial(stats_launches, MANY, V, torch.bfloat16, False, torch.float64),
    "token_stats bf16 prev, few rows": partial(stats_launches, FEW, V, torch.bfloat16, True, torch.float64),
    "token_stats f16 prev, many rows": partial(stats_launches, MANY, V, torch.float16, True, torch.float32),
    "token_stats f32, few rows": partial(stats_launches, FEW, V, torch.float32, False, torch.float32),
    "token_stats f32 prev, many rows": partial(stats_launches, MANY, V, torch.float32, True, torch.float64),
    "token_stats f32 prev, V = 50": partial(stats_launches, FEW, 50, torch.float32, True, torch.float64),
    "token_stats f32 prev, strided V": partial(
        stats_launches, FEW, V, torch.float32, True, torch.float64, contiguous=False
    ),
    "conflict_matrix bf16": partial(conflict_launches, torch.bfloat16),
    "conflict_matrix f32": partial(conflict_launches, torch.float32),
    "independent_set n = 32": partial(set_launches, 32, False),
    "independent_set n = 256": partial(set_launches, 256, True),
    "independent_set n = 2048": partial(set_launches, 2048, True),
    "cap_select bf16, n = 32": partial(cap_launches, 32, torch.bfloat16, True, False),
    "cap_select f16, n = 128": partial(cap_launches, 128, torch.float16, True, False),
    "cap_select f32, n = 256": partial(cap_launches, 256, torch.float32, True, False),
    "cap_select bf16, n = 2048": partial(cap_launches, 2048, torch.bfloat16, True, True),
    "cap_select probabilities, n = 256": partial(cap_launches, 256, torch.float32, False, False),
    "confidence_select threshold, n = 32": partial(confidence_launches, 32, 0),
    "confidence_select factor, n = 256": partial(confidence_launches, 256, 1),
    "confidence_select official, n = 2048": partial(confidence_launches, 2048, 3),
    "kv_block_write bf16, 8 x 64": partial(write_launches, 8, 32, 64, torch.bfloat16, False, False),
    "kv_block_write bf16, 32 x 128": partial(write_launches, 32, 32, 128, torch.bfloat16, True, True),
    "kv_block_write f16, 4 x 128": partial(write_launches, 4, 32, 128, torch.float16, True, False),
    "kv_block_write f32, 32 x 128": partial(write_launches, 32, 32, 128, torch.float32, True, True),
    "kv_block_write f64, 32 x 80": partial(write_launches, 32, 32, 80, torch.float64, True, True),
    "kv_block_write f32, 1 x 1": partial(write_launches, 1, 1, 1, torch.float32, False, True),
    "block_attention bf16, 32 heads of 64": partial(attention_launches, 1, 32, 32, 32, 64, torch.bfloat16),
    "block_attention bf16, 32 of 128": partial(attention_launches, 1, 32, 32, 32, 128, torch.bfloat16),
    "block_attention bf16, batch of 128": partial(
        attention_launches, 16, 32, 32, 32, 128, torch.bfloat16, False
    ),
    "block_attention bf16, 28 to 4 of 128": partial(attention_launches, 1, 28, 4, 32, 128, torch.bfloat16),
    "block_attention f16, 8 of 80": partial(attention_launches, 1, 8, 8, 8, 80, torch.float16),
    "block_attention bf16, 8 to 1 of 256": partial(attention_launches, 1, 8, 1, 32, 256, torch.bfloat16),
    "block_attention f32, 32 of 64": partial(attention_launches, 1, 32, 32, 32, 64, torch.float32),
    "block_attention f32, 32 of 128": partial(attention_launches, 1, 32, 32, 32, 128, torch.float32),
    "block_attention f32, 8 to 1 of 256": partial(attention_launches, 1, 8, 1, 32, 256, torch.float32),
    "block_attention f32, 1 of 1": partial(attention_launches, 1, 1, 1, 1, 1, torch.float32, False),
    "attention_graph bf16, 32 heads of 128": partial(graph_launches, 1, 32, 32, 256, 128, torch.bfloat16),
    "attention_graph f16, 28 to 4 of 80, M = 9": partial(
        graph_launches, 32, 28, 4, 9, 80, torch.float16, True
    ),
    "attention_graph bf16, 8 to 1 of 256": partial(graph_launches, 1, 8, 1, 256, 256, torch.bfloat16),
    "attention_graph f32, 32 of 64": partial(graph_launches, 1, 32, 32, 256, 64, torch.float32),
    "attention_graph f32, 8 to 1 of 256": partial(graph_launches, 16, 8, 1, 256, 256, torch.float32),
    "attention_graph f32, 1 of 1": partial(graph_launches, 1, 1, 1, 1, 1, torch.float32, True),
    "dapd_select f32, M = 32": partial(dapd_launches, 32, torch.float32, False),
    "dapd_select f64, M = 2048": partial(dapd_launches, 2048, torch.float64, True),
    "cover_attention bf16, 28 to 4 of 128": partial(cover_launches, 28, 4, 1024, 128, torch.bfloat16),
    "cover_attention f32, 8 to 1 of 256": partial(cover_launches, 8, 1, 512, 256, torch.float32),
    "cover_attention f64, 8 of 64": partial(cover_launches, 8, 8, 300, 64, torch.float64),
    "diagonal_correction bf16, 32 of 128": partial(correction_launches, 32, 32, 128, torch.bfloat16, False),
    "diagonal_correction f64, 8 of 80": partial(correction_launches, 8, 8, 80, torch.float64, True),
    "cover_seeds f32, n = 32": partial(seeds_launches, 32, torch.float32, False),
    "cover_seeds f64, n = 2048": partial(seeds_launches, 2048, torch.float64, True),
    "cover_verify": verify_launches,
}
# Bytes of shared memory that a program may have; the smaller GPUs of the sm_80 family set its limit.
SHARED = {"sm_80": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


def compile_for(launch: Launch, target: tuple[str, int | str, int]) -> CompiledKernel:
    """What ``launch.kernel[launch.grid](...)`` would compile on that GPU."""
    kernel = launch.kernel
    gpu = GPUTarget(*target)
    backend = make_backend(gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"num_warps": launch.num_warps}
    arguments, specialization, _ = bind(**launch.arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, arguments, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=gpu, options=parsed.__dict__)


@cache
def compiled_case(case: str, target: str) -> list[tuple[Launch, CompiledKernel]]:
    return [(launch, compile_for(launch, TARGETS[target])) for launch in CASES[case]()]


class Usage(NamedTuple):
    """Registers of a thread, and what did not fit into them."""

    registers: int
    spilled: int


def usage(kernel: CompiledKernel, folder: Path) -> Usage:
    if "amdgcn" in kernel.asm:
        entry = {key: int(n) for key, n in re.findall(r"\.(\w+):\s+(\d+)\n", kernel.asm["amdgcn"])}
        # Scalars that do not fit go to lanes of a vector register: what counts is what goes to memory.
        return Usage(entry["vgpr_count"], entry["vgpr_spill_count"] + entry["private_segment_fixed_size"])
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    listing = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    fields = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", listing))
    return Usage(int(fields["REG"]), int(fields["STACK"]) + int(fields["LOCAL"]))


def on(*names: str) -> pytest.MarkDecorator:
    """Once for each target. The tests of a target share a process, so that each kernel is compiled once."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]
    )


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    print(*rows, sep="\n")


@compiled
@on(*TARGETS)
def test_kernels_compile_without_spills(name: str, tmp_path: Path, table: list[str]) -> None:
    spilled = []
    for case in CASES:
        for launch, kernel in compiled_case(case, name):
            registers, spill = usage(kernel, tmp_path)
            shared = kernel.metadata.shared
            table.append(
                f"{name:7} {case:36} {launch.kernel.__name__:24} "
                f"{launch.num_warps:2} warps {registers:3} registers {spill} spilled {shared:6} bytes shared"
            )
            assert registers > 0
            assert shared <= SHARED[name], table[-1]
            spilled += [table[-1]] if spill else []
    assert not spilled, "\n".join(spilled)


@compiled
@pytest.mark.parametrize(("name", "block"), [("sm_90", 2048), ("gfx942", 4096)])
def test_spills_are_seen(name: str, block: int, tmp_path: Path) -> None:
    """The same kernel, with a block that one warp cannot hold."""
    launch = CASES["token_stats f32 prev, many rows"]()[0]
    launch = launch._replace(arguments=launch.arguments | {"BLOCK": block}, num_warps=1)
    assert usage(compile_for(launch, TARGETS[name]), tmp_path).spilled > 0


@compiled
@pytest.mark.xdist_group("sm_90")
@pytest.mark.parametrize("case", ["bf16 prev, few", "f16 prev, many", "f32, few", "f32 prev, many"])
def test_rows_are_read_16_bytes_at_a_time(case: str) -> None:
    _, kernel = compiled_case(f"token_stats {case} rows", "sm_90")[0]
    loads = re.findall(r"ld\.global\S*", kernel.asm["ptx"])
    assert {load for load in loads if not load.endswith("b64")} == {"ld.global.v4.b32"}, loads


def instructions(case: str, target: str, pattern: str) -> set[str]:
    """Of all kernels of the case."""
    return {
        found for _, kernel in compiled_case(case, target) for found in re.findall(pattern, kernel.asm["ptx"])
    }


@compiled
@on("sm_80", "sm_90", "sm_100")
def test_attention_multiplies_on_the_matrix_units(name: str) -> None:
    """float16 and bfloat16 as they are; float32 never, not as tf32 either."""
    wanted = {"bf16": {"bf16.bf16", "kind::f16"}, "f16": {"f16.f16", "kind::f16"}, "f32": set()}
    products = {"block_attention_kernel", "row_lse_kernel", "entries_kernel", "cover_attention_kernel"}
    for case in CASES:
        if kind := re.match(r"(?:block_attention|attention_graph|cover_attention) (f32|b?f16)", case):
            for launch, kernel in compiled_case(case, name):
                if launch.kernel.__name__ in products:
                    ptx = kernel.asm["ptx"]
                    factors = set(re.findall(r"mma\S*?\.((?:b?f16|tf32)\.\w+|kind::\w+)", ptx))
                    assert factors <= wanted[kind[1]], case
                    assert bool(factors) == bool(wanted[kind[1]]), case


@compiled
@pytest.mark.xdist_group("sm_90")
def test_rows_of_the_cache_move_16_bytes_at_a_time() -> None:
    wide = {"ld.global.v4.b32", "st.global.v4.b32", "ld.global.b64"}  # the last: position
    half_table_row = {"ld.global.v2.b32"}  # 64 numbers for the 32 lanes of the only warp
    for case, more in (
        ("kv_block_write bf16, 8 x 64", set()),
        ("kv_block_write f16, 4 x 128", half_table_row),
    ):
        assert instructions(case, "sm_90", r"(?:ld|st)\.global\S*") <= wide | more
    copies = r"cp\.async\.c\S+ \[[^;]*?\], \[[^;]*?\], (\w+)"
    for case in (
        "block_attention bf16, 32 of 128",
        "block_attention f32, 32 of 64",
        "attention_graph bf16, 32 heads of 128",
        "attention_graph f32, 32 of 64",
    ):
        assert instructions(case, "sm_90", copies) == {"0x10"}
    for case in ("cover_attention bf16, 28 to 4 of 128", "cover_attention f32, 8 to 1 of 256"):
        assert instructions(case, "sm_90", copies) == {"0x10", "0x4"}  # the latter: numbers of columns


@compiled
@on(*TARGETS)
def test_dapd_is_rounded_like_the_reference(name: str, tmp_path: Path) -> None:
    """Degrees without fused products, quotients as IEEE 754 has them."""
    for case in CASES:
        if case.startswith("dapd_select"):
            (_, degree), (_, select) = compiled_case(case, name)
            if name == "gfx942":
                assert re.search(r"v_add_f64", degree.asm["amdgcn"])
                assert not re.search(r"v_(fma|mad|pk_fma)\w*_f64", degree.asm["amdgcn"])
                assert re.search(r"v_div_fixup_f64", select.asm["amdgcn"])
            else:
                binary = tmp_path / "kernel.cubin"
                binary.write_bytes(degree.asm["cubin"])
                tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
                listing = subprocess.run([tool, binary], capture_output=True, text=True, check=True).stdout
                assert "DADD" in listing
                assert "DFMA" not in listing
                assert set(re.findall(r"div\S*f64", select.asm["ptx"])) == {"div.rn.f64"}


@compiled
@on(*TARGETS)
def test_seeds_are_rounded_like_the_reference(name: str) -> None:
    """Scores and shares as IEEE 754 has them, sums without fused products."""
    for case in CASES:
        if case.startswith("cover_seeds"):
            (_, score), (_, choose) = compiled_case(case, name)
            for kernel in (score, choose):
                if name == "gfx942":
                    assert re.search(r"v_div_fixup_f64", kernel.asm["amdgcn"])
                else:
                    ptx = kernel.asm["ptx"]
                    assert set(re.findall(r"div\S*f64", ptx)) == {"div.rn.f64"}
                    assert not re.search(r"fma\S*f64", ptx)
                    # Nothing is left to the assembler either: what is multiplied is not added up.
                    assert kernel is score or not re.search(r"mul\S*f64", ptx)
