"""The CUDA emulator: every primitive against its definition, every planted bug reported where it stands."""

from __future__ import annotations

import ctypes
import operator
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cuda_emulator.emulator_build import EMULATOR, SANITIZE, build

FORWARD, REVERSE, RANDOM = 0, 1, 2
SCHEDULES = [(FORWARD, 0), (REVERSE, 0), (RANDOM, 1), (RANDOM, 2)]
STEP_LIMIT = 1 << 26

INVALID_VALUE, INVALID_CONFIGURATION, LAUNCH_TIMEOUT, LAUNCH_FAILURE = 1, 9, 702, 719


class Emulated:
    """A shared library of kernels; arrays are passed as pointers, text as C strings."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.dlmkern_emulator_last_message.restype = ctypes.c_char_p

    def configure(self, order: int = FORWARD, seed: int = 0, step_limit: int = STEP_LIMIT) -> None:
        self._library.dlmkern_emulator_configure(order, ctypes.c_uint64(seed), ctypes.c_uint64(step_limit))

    def message(self) -> str:
        message: bytes = self._library.dlmkern_emulator_last_message()
        return message.decode()

    def call(self, function: str, *arguments: object) -> int:
        error: int = getattr(self._library, function)(*map(self._convert, arguments))
        return error

    def check(self, function: str, *arguments: object) -> None:
        error = self.call(function, *arguments)
        assert error == 0, f"{function}: error {error}, {self.message()}"

    @staticmethod
    def _convert(value: object) -> object:
        if isinstance(value, np.ndarray):
            return value.ctypes.data_as(ctypes.c_void_p)
        if isinstance(value, str):
            return value.encode()
        return value


@pytest.fixture(scope="module")
def kernels() -> Emulated:
    return Emulated(build("primitives.so", [EMULATOR / "primitives.cu"]))


@pytest.fixture(scope="module")
def bugs() -> Emulated:
    return Emulated(build("planted_bugs.so", [EMULATOR / "planted_bugs.cu"]))


@pytest.fixture(params=SCHEDULES, ids=["forward", "reverse", "random1", "random2"])
def schedule(request: pytest.FixtureRequest, kernels: Emulated, bugs: Emulated) -> Iterator[tuple[int, int]]:
    for library in (kernels, bugs):
        library.configure(*request.param)
    yield request.param
    for library in (kernels, bugs):
        library.configure()


# ---- Warp collectives --------------------------------------------------------------------------------------


def to_int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def shuffle_source(name: str, lane: int, operand: int, width: int) -> int:
    first = lane - lane % width
    last = first + width - 1
    if name == "shfl":
        return first + operand % width
    distance = operand % 32
    source = {"shfl_up": lane - distance, "shfl_down": lane + distance, "shfl_xor": lane ^ distance}[name]
    lowest = 0 if name == "shfl_xor" else first
    return source if lowest <= source <= last else lane


def expected_warp(name: str, mask: int, operand: int, width: int, values: list[int]) -> dict[int, int | None]:
    """The result of each lane in the mask; None where CUDA leaves it undefined."""
    lanes = [lane for lane in range(32) if mask >> lane & 1]
    if name.startswith("shfl"):
        sources = {lane: shuffle_source(name, lane, operand, width) for lane in lanes}
        return {lane: values[source] if mask >> source & 1 else None for lane, source in sources.items()}
    if name == "match_any":
        return {
            lane: to_int32(sum(1 << other for other in lanes if values[other] == values[lane]))
            for lane in lanes
        }
    chosen = [values[lane] for lane in lanes]
    bits = [value % (1 << 32) for value in chosen]
    result = {
        "ballot": lambda: sum((values[lane] & 1) << lane for lane in lanes),
        "any": lambda: int(any(value & 1 for value in chosen)),
        "all": lambda: int(all(value & 1 for value in chosen)),
        "add": lambda: sum(chosen),
        "min": lambda: min(chosen),
        "max": lambda: max(chosen),
        "min_unsigned": lambda: min(bits),
        "max_unsigned": lambda: max(bits),
        "or": lambda: reduce(operator.or_, bits),
        "and": lambda: reduce(operator.and_, bits),
    }[name]()
    return dict.fromkeys(lanes, to_int32(result))


WARP_PRIMITIVES = [
    *("shfl", "shfl_up", "shfl_down", "shfl_xor", "ballot", "any", "all", "match_any", "add", "min", "max"),
    *("min_unsigned", "max_unsigned", "or", "and"),
]
int32 = st.integers(-(1 << 31), (1 << 31) - 1)


@pytest.mark.parametrize("name", WARP_PRIMITIVES)
@settings(max_examples=30, deadline=None)
@given(
    mask=st.one_of(st.just(0xFFFFFFFF), st.integers(1, 0xFFFFFFFF)),
    operand=st.integers(0, 40),
    width=st.sampled_from([1, 2, 4, 8, 16, 32]),
    values=st.lists(st.one_of(int32, st.integers(-2, 2)), min_size=32, max_size=32),
    schedule=st.sampled_from(SCHEDULES),
)
def test_warp_collective(
    kernels: Emulated,
    name: str,
    mask: int,
    operand: int,
    width: int,
    values: list[int],
    schedule: tuple[int, int],
) -> None:
    kernels.configure(*schedule)
    out = np.full(32, 123456789, np.int32)
    kernels.check(
        "warp_primitive", name, ctypes.c_uint32(mask), operand, width, np.array(values, np.int32), out
    )
    expected = expected_warp(name, mask, operand, width, values)
    for lane in range(32):
        if lane not in expected:
            assert out[lane] == 123456789, lane
        elif expected[lane] is not None:
            assert out[lane] == expected[lane], lane


def test_undefined_shuffle_reads_nan_bytes(kernels: Emulated) -> None:
    out = np.zeros(32, np.int32)
    kernels.check("warp_primitive", "shfl_down", 0xFFFF, 8, 32, np.arange(32, dtype=np.int32), out)
    assert out[:16].tolist() == [8, 9, 10, 11, 12, 13, 14, 15] + [-1] * 8


@pytest.mark.parametrize("width", [0, 3, 64, -1])
def test_shuffle_width_is_checked(kernels: Emulated, width: int) -> None:
    values = np.zeros(32, np.int32)
    assert kernels.call("warp_primitive", "shfl", 0xFFFFFFFF, 0, width, values, values) == LAUNCH_FAILURE
    assert "width" in kernels.message()


def test_shuffles_carry_other_types(kernels: Emulated) -> None:
    doubles, halves = np.zeros(32), np.zeros(32, np.float32)
    kernels.check("shuffled_types", doubles, halves)
    partner = np.arange(32) ^ 1
    np.testing.assert_array_equal(doubles, 0.1 * partner)
    np.testing.assert_array_equal(halves, 0.5 * partner)


# ---- Barriers, atomics, memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["count", "or", "and"])
@pytest.mark.parametrize("threads", [1, 33, 128])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_voting_barrier(
    kernels: Emulated, schedule: tuple[int, int], name: str, threads: int, share: float
) -> None:
    votes = (np.arange(threads) < share * threads).astype(np.int32) * 4
    out = np.full(threads, -1, np.int32)
    kernels.check("block_primitive", name, threads, votes, out)
    expected = {"count": np.count_nonzero(votes), "or": int(votes.any()), "and": int(votes.all())}[name]
    assert out.tolist() == [expected] * threads


ATOMICS = [
    *((name, kind) for name in ("add", "exch") for kind in ("int32", "uint32", "uint64", "float32")),
    *((name, kind) for name in ("min", "max", "or", "and", "cas") for kind in ("int32", "uint32", "uint64")),
    ("add", "float64"),
]


COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "cas": operator.add,
    "min": min,
    "max": max,
    "or": operator.or_,
    "and": operator.and_,
}


@pytest.mark.parametrize(("name", "kind"), ATOMICS)
def test_atomic(kernels: Emulated, schedule: tuple[int, int], name: str, kind: str) -> None:
    values = np.random.default_rng(0).integers(1, 1000, 96).astype(kind)
    start = np.array([500], kind)
    cell, found = start.copy(), np.zeros_like(values)
    kernels.check("atomic_primitive", name, kind, values, cell, found)
    if name == "exch":  # a chain: every value was found once by the next thread, or is the last
        assert sorted([*found.tolist(), cell.item()]) == sorted([*values.tolist(), 500])
        return
    combine = COMBINE[name]
    assert cell.item() == reduce(combine, values.tolist(), 500)
    # What each thread found, and what it made of it, form one chain from the start to the end.
    made = [combine(old, value) for old, value in zip(found.tolist(), values.tolist(), strict=True)]
    assert sorted([500, *made]) == sorted([*found.tolist(), cell.item()])


def test_signed_addition_wraps(kernels: Emulated) -> None:
    cell, found = np.array([(1 << 31) - 1], np.int32), np.zeros(96, np.int32)
    kernels.check("atomic_primitive", "add", "int32", np.ones(96, np.int32), cell, found)
    assert cell.item() == -(1 << 31) + 95


def test_indices(kernels: Emulated, schedule: tuple[int, int]) -> None:
    grid, block = (3, 2, 2), (5, 3, 4)
    threads = np.zeros((12, 60, 3), np.uint32)
    blocks = np.zeros_like(threads)
    kernels.check("indices", np.array(grid, np.uint32), np.array(block, np.uint32), threads, blocks)
    x_fastest = [(x, y, z) for z in range(4) for y in range(3) for x in range(5)]
    assert (threads == np.array(x_fastest)[None]).all()
    assert (
        blocks == np.array([(x, y, z) for z in range(2) for y in range(2) for x in range(3)])[:, None]
    ).all()


def test_shared_memory_starts_as_nan_in_every_block(kernels: Emulated, schedule: tuple[int, int]) -> None:
    found = np.zeros((3, 64), np.float32)
    kernels.check("shared_as_found", 3, found)
    assert np.isnan(found).all()


def test_dynamic_shared_memory(kernels: Emulated, schedule: tuple[int, int]) -> None:
    values = np.arange(1024, dtype=np.float32)
    out = np.zeros_like(values)
    kernels.check("reverse", 1024, values, out)
    assert (out == values[::-1]).all()


def test_static_shared_memory_is_limited(kernels: Emulated) -> None:
    assert kernels.call("too_much_static_shared", np.zeros(1, np.float32)) == LAUNCH_FAILURE
    assert "48 KB" in kernels.message()


def test_16_bit_floats(kernels: Emulated) -> None:
    values = np.random.default_rng(0).normal(size=32).astype(np.float32) * 100
    values[:4] = [np.inf, -np.inf, 0, 1e-8]
    half, brain = np.zeros(32, np.float16), np.zeros(32, np.int16)
    back = np.zeros((32, 2), np.float32)
    kernels.check("conversions", values, half, brain, back)
    expected = torch.from_numpy(values).bfloat16()
    np.testing.assert_array_equal(half, values.astype(np.float16))
    np.testing.assert_array_equal(brain, expected.view(torch.int16).numpy())
    np.testing.assert_array_equal(back[:, 0], half.astype(np.float32))
    np.testing.assert_array_equal(back[:, 1], expected.float().numpy())


def test_vector_types(kernels: Emulated) -> None:
    values = np.arange(32, dtype=np.float32)
    out = np.zeros_like(values)
    kernels.check("vectors", values, out)
    assert (out == values).all()


def test_functions(kernels: Emulated) -> None:
    x = np.linspace(-3, 4, 32, dtype=np.float32)
    out = np.zeros((32, 4), np.float32)
    kernels.check("functions", x, out)
    wide = x.astype(np.float64)
    expected = np.stack([np.exp(wide), np.log(np.abs(wide)), np.exp2(wide), 2 * wide], axis=1)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


# ---- Launches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "block", "shared", "allowed", "error"),
    [
        ((1, 1, 1), (1024, 1, 1), 0, -1, 0),
        ((1, 1, 1), (8, 8, 16), 48 * 1024, -1, 0),
        ((1, 1, 1), (1, 1, 1), 227 * 1024, 227 * 1024, 0),
        ((1, 1, 1), (1, 1, 1), 49 * 1024, 48 * 1024, INVALID_VALUE),
        ((1, 1, 1), (1, 1, 1), 0, 227 * 1024 + 1, INVALID_VALUE),
        ((1, 1, 1), (1025, 1, 1), 0, -1, INVALID_CONFIGURATION),
        ((1, 1, 1), (32, 33, 1), 0, -1, INVALID_CONFIGURATION),
        ((1, 1, 1), (1, 1, 65), 0, -1, INVALID_CONFIGURATION),
        ((1, 1, 1), (0, 1, 1), 0, -1, INVALID_CONFIGURATION),
        ((0, 1, 1), (1, 1, 1), 0, -1, INVALID_CONFIGURATION),
        ((1, 65536, 1), (1, 1, 1), 0, -1, INVALID_CONFIGURATION),
        ((1, 1, 65536), (1, 1, 1), 0, -1, INVALID_CONFIGURATION),
        ((1 << 31, 1, 1), (1, 1, 1), 0, -1, INVALID_CONFIGURATION),
    ],
)
def test_launch_configuration(
    kernels: Emulated,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    shared: int,
    allowed: int,
    error: int,
) -> None:
    shape = np.array(grid, np.uint32), np.array(block, np.uint32)
    assert kernels.call("launch", *shape, ctypes.c_size_t(shared), allowed) == error
    one = np.ones(3, np.uint32)
    assert kernels.call("launch", one, one, ctypes.c_size_t(0), -1) == 0  # errors don't stick


def test_throughput(kernels: Emulated) -> None:
    """Slower than this and the kernels' own tests would not be quick."""
    blocks, threads, rounds = 64, 256, 4
    out = np.zeros(blocks, np.int32)
    begin = time.process_time()
    kernels.check("rounds", blocks, threads, rounds, out)
    rate = blocks * threads / (time.process_time() - begin)
    print(f"{rate:.3g} threads/s, each with {rounds} barriers and shuffles")
    assert out.tolist() == [sum(range(rounds))] * blocks
    assert rate > 1e5


# ---- Planted bugs ------------------------------------------------------------------------------------------

BROKEN_RULES = {
    "divergent_barrier": "divergent barrier: __syncthreads",
    "skipped_barrier": "exited",
    "exited_lane": "",
    "missing_lane": "names lane 16, which has exited or does not exist",
    "foreign_mask": "not in its own mask",
    "mismatched_collective": "mismatched collective",
    "mismatched_mask": "lane exited while others wait for it",
    "deadlock": "deadlock",
    "trapped": "__trap()",
}
WRONG_RESULTS = ["missing_barrier", "missing_warp_barrier", "unwritten_shared", "lost_update"]
SANITIZED = {
    "static_shared_out_of_bounds": "AddressSanitizer",
    "dynamic_shared_out_of_bounds": "AddressSanitizer",
    "global_out_of_bounds": "AddressSanitizer: heap-buffer-overflow",
    "misaligned_vector": "misaligned address",
}


def line_of(bug: str) -> str:
    for number, line in enumerate((EMULATOR / "planted_bugs.cu").read_text().splitlines(), 1):
        if line.endswith(f"// BUG {bug}"):
            return f"planted_bugs.cu:{number}"
    raise LookupError(bug)


def run_bug(bugs: Emulated, name: str, fixed: bool) -> tuple[int, np.ndarray]:
    out = np.zeros(64, np.float32)
    return bugs.call("planted_bug", name, int(fixed), out), out


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_broken_rule_is_reported(bugs: Emulated, schedule: tuple[int, int], name: str) -> None:
    error, _ = run_bug(bugs, name, fixed=False)
    assert error == LAUNCH_FAILURE
    assert BROKEN_RULES[name] in bugs.message()
    assert line_of(name) in bugs.message()
    error, out = run_bug(bugs, name, fixed=True)
    assert error == 0, bugs.message()
    assert (out == 1).all()


def test_spinning_is_reported(bugs: Emulated, schedule: tuple[int, int]) -> None:
    bugs.configure(*schedule, step_limit=10_000)
    error, _ = run_bug(bugs, "spinning", fixed=False)
    assert error == LAUNCH_TIMEOUT
    assert "spinning" in bugs.message()
    assert line_of("spinning") in bugs.message()
    error, out = run_bug(bugs, "spinning", fixed=True)
    assert error == 0, bugs.message()
    assert (out == 1).all()


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_wrong_result_shows_under_some_schedule(bugs: Emulated, name: str) -> None:
    wrong = []
    for schedule in SCHEDULES:
        bugs.configure(*schedule)
        error, out = run_bug(bugs, name, fixed=False)
        assert error == 0, bugs.message()
        wrong.append(bool((out != 1).any()))
        error, out = run_bug(bugs, name, fixed=True)
        assert error == 0, bugs.message()
        assert (out == 1).all(), schedule
    bugs.configure()
    assert any(wrong)


@pytest.fixture(scope="module")
def sanitized_bugs() -> Path:
    return build("planted_bugs", [EMULATOR / "planted_bugs.cu"], flags=SANITIZE)


def run_program(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=1", "UBSAN_OPTIONS": ""}
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("name", SANITIZED)
def test_sanitizers_see_bad_accesses(sanitized_bugs: Path, name: str) -> None:
    result = run_program(sanitized_bugs, name, "planted", str(FORWARD))
    assert result.returncode != 0
    assert SANITIZED[name] in result.stderr
    assert line_of(name) in result.stderr
    result = run_program(sanitized_bugs, name, "fixed", str(FORWARD))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", [*BROKEN_RULES, *WRONG_RESULTS])
def test_sanitizers_accept_the_emulator(sanitized_bugs: Path, name: str) -> None:
    """Fibres that are switched, finished or abandoned raise no false alarm."""
    for variant in ("planted", "fixed"):
        result = run_program(sanitized_bugs, name, variant, str(RANDOM))
        assert not re.search("Sanitizer|runtime error", result.stderr), result.stderr
    assert result.returncode == 0, result.stderr


def test_portable_context_switch() -> None:
    """The fibres of processors other than x86-64 work here too."""
    portable = Emulated(
        build("primitives.so", [EMULATOR / "primitives.cu"], flags=["-DDLMKERN_EMULATOR_UCONTEXT"])
    )
    out = np.zeros(4, np.int32)
    portable.check("rounds", 4, 64, 10, out)
    assert out.tolist() == [45] * 4
