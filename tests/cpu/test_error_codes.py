"""The C functions that select: what they refuse, and what an empty batch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.cpu.capi import DTYPE, NULL, OK, SHAPE, UNAVAILABLE, VALUE, Array, Library, view

B, N, V, K = 2, 3, 5, 4
HEADS, LENGTH, SIZE = 2, 7, 4


def floats(*shape: int) -> Array:
    return np.full(shape, 0.5)


def ints(*shape: int) -> Array:
    return np.ones(shape, np.int64)


def bools(*shape: int) -> Array:
    return np.ones(shape, bool)


# The arguments of each function, and the positions of its outputs and of those that may be NULL.
FUNCTIONS: dict[str, tuple[Callable[[], list[Any]], set[int], set[int]]] = {
    "cpu_conflict_matrix": (
        lambda: [floats(B, N, V), ints(B, N), floats(B, N), floats(B, N, N).astype(np.float32)],
        {3},
        set(),
    ),
    "cpu_independent_set": (
        lambda: [bools(B, N, N), floats(B, N), bools(B, N), bools(B, N), bools(B, N)],
        {4},
        {2, 3},
    ),
    "cpu_cap_select": (
        lambda: [
            floats(B, N, V),
            ints(B, N),
            floats(B, N),
            bools(B, N),
            *(floats(B), floats(B), floats(B)),
            0,
            bools(B, N),
            floats(B, N),
        ],
        {8, 9},
        {2, 3, 9},
    ),
    "cpu_topk_kl": (
        lambda: [
            *(ints(B, N, K), floats(B, N, K)),
            *(ints(B, N, K), floats(B, N, K), floats(B, N)),
            floats(B, N),
        ],
        {5},
        set(),
    ),
    "cpu_depga_block": (
        lambda: [floats(B, N), floats(B, N), ints(B), floats(B), ints(B), ints(B), 0, ints(B)],
        {7},
        set(),
    ),
    "cpu_confidence_select": (
        lambda: [floats(B, N), bools(B, N), floats(B), 1, bools(B, N)],
        {4},
        {1},
    ),
    "cpu_dapd_select": (
        lambda: [
            *(floats(B, N, N), floats(B, N), bools(B, N)),
            *(floats(B), floats(B), floats(B)),
            0,
            bools(B, N),
        ],
        {7},
        {2},
    ),
    "cpu_diagonal_correction": (
        lambda: [
            *(floats(B, 2 * HEADS, N, SIZE), floats(B, 2 * HEADS, N), floats(B, 2 * HEADS, N, SIZE)),
            *(floats(B, HEADS, N, SIZE), floats(B, HEADS, N, SIZE)),
            *(floats(B, HEADS, N, SIZE), floats(B, HEADS, N, SIZE)),
            *(bools(B, N), ints(B), ints(B, N)),
            *(0, 0.5, 0.5),
        ],
        {0, 1},
        {8, 9},
    ),
    "cpu_cover_seeds": (
        lambda: [
            *(floats(B, N), floats(B, N), floats(B, N), bools(B, N), ints(B)),
            *(0, 0),
            *(bools(B, N), floats(B, N)),
        ],
        {7, 8},
        {1, 2, 3},
    ),
    "cpu_cover_verify": (
        lambda: [floats(B, N), ints(B, N), ints(B, N), bools(B, N), ints(B, N), 0.9, 1, ints(B, N)],
        {7},
        set(),
    ),
    "cpu_kv_block_write": (
        lambda: [
            *(floats(B, HEADS, LENGTH, SIZE), floats(B, HEADS, LENGTH, SIZE)),
            *(floats(B, HEADS, N, SIZE), floats(B, HEADS, N, SIZE)),
            np.tile(np.arange(N), (B, 1)),
            *(floats(LENGTH, SIZE), floats(LENGTH, SIZE)),
            floats(4, B, N).astype(np.float32),
        ],
        {0, 1, 7},
        {7},
    ),
    "cpu_attention_graph": (
        lambda: [
            *(floats(B, 2 * HEADS, LENGTH, SIZE), floats(B, HEADS, LENGTH, SIZE)),
            *(ints(B, N), ints(B, N), ints(B)),
            floats(B, 2 * HEADS, LENGTH),
            0.5,
            floats(B, N, N),
        ],
        {7},
        {3, 4, 5},
    ),
}
TENSORS = [
    pytest.param(name, position, id=f"{name}-{position}")
    for name, (arguments, _, _) in FUNCTIONS.items()
    for position, value in enumerate(arguments())
    if isinstance(value, np.ndarray)
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accepts(library: Library, name: str) -> None:
    assert library.call(name, *FUNCTIONS[name][0]()) == OK


@pytest.mark.parametrize(("name", "position"), TENSORS)
def test_every_tensor_is_checked(library: Library, name: str, position: int) -> None:
    """A wrong tensor is refused, whatever is wrong with it, and no output has been touched."""
    make, outputs, optional = FUNCTIONS[name]
    good = make()[position]
    wider = tuple(size + 1 for size in good.shape)
    wrong = [
        (view(good, ndim=good.ndim % 3 + 1), SHAPE),
        (view(good, stride=(*[1] * (good.ndim - 1), -1)), SHAPE),
        (view(good, shape=(*good.shape[:-1], -1)), SHAPE),
        (np.ones(wider, good.dtype), SHAPE),
        (view(good, dtype=6), DTYPE),
        (view(good, dtype=-1), DTYPE),
        (view(good, dtype=5 if good.dtype != bool else 4), DTYPE),
        (view(good, data=None), NULL),
        (None, OK if position in optional else NULL),
    ]
    if position in outputs:
        wrong.append((view(good, stride=(0,) * good.ndim), SHAPE))
    for value, code in wrong:
        arguments = make()
        for output in outputs:
            arguments[output][...] = 1
        before = {output: arguments[output].copy() for output in outputs if output != position}
        arguments[position] = value
        assert library.call(name, *arguments) == code, f"{value} is to give {code}"
        if code != OK:
            for output, was in before.items():
                np.testing.assert_array_equal(arguments[output], was)


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("cpu_cap_select", 7),
        ("cpu_depga_block", 6),
        ("cpu_dapd_select", 6),
        ("cpu_cover_seeds", 5),
        ("cpu_cover_seeds", 6),
    ],
)
def test_flags(library: Library, name: str, position: int) -> None:
    arguments = FUNCTIONS[name][0]()
    arguments[position] = 2
    assert library.call(name, *arguments) == VALUE


@pytest.mark.parametrize(("name", "dtype"), [("cpu_independent_set", bool), ("cpu_dapd_select", np.float32)])
def test_a_square_for_each_sequence(library: Library, name: str, dtype: type) -> None:
    arguments = FUNCTIONS[name][0]()
    arguments[0] = np.ones((B, N, N + 1), dtype)
    assert library.call(name, *arguments) == SHAPE


@pytest.mark.parametrize(("position", "value"), [(2, -1), (4, 0), (5, 0)])
def test_block_lengths(library: Library, position: int, value: int) -> None:
    arguments = FUNCTIONS["cpu_depga_block"][0]()
    arguments[position][1] = value
    assert library.call("cpu_depga_block", *arguments) == VALUE


@pytest.mark.parametrize("rule", [-1, 4])
def test_rules(library: Library, rule: int) -> None:
    arguments = FUNCTIONS["cpu_confidence_select"][0]()
    arguments[3] = rule
    assert library.call("cpu_confidence_select", *arguments) == VALUE


@pytest.mark.parametrize(("position", "value"), [(5, float("nan")), (6, -1)])
def test_bounds_of_a_verdict(library: Library, position: int, value: float) -> None:
    arguments = FUNCTIONS["cpu_cover_verify"][0]()
    arguments[position] = value
    assert library.call("cpu_cover_verify", *arguments) == VALUE


def test_rotary_tables(library: Library) -> None:
    def call(**changes: Any) -> Any:
        arguments = FUNCTIONS["cpu_kv_block_write"][0]()
        for position, value in changes.items():
            arguments[int(position.removeprefix("at"))] = value
        return library.call("cpu_kv_block_write", *arguments)

    longer, shorter = floats(LENGTH + 1, SIZE), floats(LENGTH - 1, SIZE)
    assert call(at5=None, at6=None) == OK
    assert call(at5=longer, at6=longer) == OK
    assert call(at5=shorter, at6=shorter) == SHAPE
    assert call(at5=longer) == SHAPE
    single = floats(LENGTH, SIZE).astype(np.float32)
    assert call(at5=single) == call(at6=single) == call(at5=single, at6=single) == DTYPE
    narrow = [floats(B, HEADS, count, SIZE) for count in (LENGTH, LENGTH, N, N)]
    for dtype in (np.float32, np.float16):
        changes = {f"at{position}": value.astype(dtype) for position, value in enumerate(narrow)}
        assert call(**changes, at5=single, at6=single) == OK
        assert call(**changes) == call(**changes, at5=single) == DTYPE
    odd = [floats(B, HEADS, count, 3) for count in (LENGTH, LENGTH, N, N)]
    changes = {f"at{position}": value for position, value in enumerate(odd)}
    assert call(**changes, at5=floats(LENGTH, 3), at6=floats(LENGTH, 3)) == SHAPE
    assert call(**changes, at5=None, at6=None) == OK


def test_sizes_without_elements(library: Library) -> None:
    """A head size beyond any memory, of no heads."""
    arguments = FUNCTIONS["cpu_kv_block_write"][0]()
    for position in range(4):
        shape = arguments[position].shape
        arguments[position] = view(arguments[position], shape=(B, 0, shape[2], 2**62))
    arguments[5:7] = None, None
    assert library.call("cpu_kv_block_write", *arguments) == OK


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_to_do(library: Library, name: str) -> None:
    """B = 0, with the null pointers that empty tensors have."""
    arguments = FUNCTIONS[name][0]()
    for position, value in enumerate(arguments):
        if isinstance(value, np.ndarray):
            arguments[position] = view(value[:0], data=None)
    if name == "cpu_kv_block_write":  # whose drift and tables begin with other sizes
        arguments[5:] = None, None, view(floats(4, 0, N).astype(np.float32), data=None)
    assert library.call(name, *arguments) == OK


def test_names(library: Library) -> None:
    sentences = {library.call("error_string", code) for code in range(0, -9, -1)}
    assert len(sentences) == 9
    assert library.call("error_string", -1000 - 700) == b"a CUDA call failed"
    assert library.call("has_cuda") == 0


def test_cuda_functions_are_there_without_cuda(library: Library) -> None:
    x, token = np.zeros((1, 1, 5), np.float32), np.zeros((1, 1), np.int64)
    code = library.call("cuda_token_stats", x, None, None, -1, token, *[None] * 4, None, 0, None)
    assert code == UNAVAILABLE
