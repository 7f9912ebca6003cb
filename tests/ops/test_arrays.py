"""NumPy arrays, JAX arrays and anything with ``__dlpack__`` through every op."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dlmkern
from tests.ops.support import make_logits


def shelf_from_dlpack(x: Any) -> "Shelf":
    return Shelf(np.from_dlpack(x))


class Shelf:
    """An array of another library: all that is known of it is ``__dlpack__``."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return ShelfLibrary


class ShelfLibrary:
    from_dlpack = staticmethod(shelf_from_dlpack)


class OldShelf(Shelf):
    """DLPack as it was before versions."""

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__()


def calls() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Every op that writes to none of its arguments, with the arrays that it takes."""
    cpu = torch.device("cpu")
    x, y = (make_logits((2, 5, 12), torch.float32, cpu, seed) for seed in (1, 2))
    stats = dlmkern.token_stats(x)
    mask = torch.tensor([[True, True, False, True, True]] * 2)
    rows = torch.tensor([[0, 1, 2, 3, 9]] * 2)
    conflict = dlmkern.conflict_matrix(x) > -8
    now, before = dlmkern.topk_snapshot(x, 4), dlmkern.topk_snapshot(y, 4)
    numbers = torch.tensor([0.3, 0.5])
    queries, keys, ends = x[:, None], y[:, None], torch.tensor([3, 5])
    seeded = queries, keys, keys, queries, queries, mask
    return [
        (dlmkern.token_stats, (x, y), {"prev_rows": rows, "banned_token": 3}),
        (dlmkern.token_stats, (x,), {"out_dtype": torch.float64}),
        (dlmkern.kl_entropy, (x, y), {}),
        (dlmkern.conflict_matrix, (x, stats.token, stats.logsumexp), {}),
        (dlmkern.independent_set, (conflict, stats.confidence, mask, ~mask), {}),
        (dlmkern.cap_select, (x.softmax(-1), mask), {"tau_low": numbers, "tau_high": 0.9}),
        (dlmkern.cap_select, (), {"logits": x, "mask": mask, "tau_low": 0.2, "return_stats": True}),
        (dlmkern.topk_snapshot, (x, 4), {}),
        (dlmkern.topk_kl, (now, before), {}),
        (dlmkern.depga_block, (x[..., 0].abs(), y[..., 0].abs(), torch.tensor([5, 9])), {"l_min": 1}),
        (dlmkern.confidence_select, (x, mask), {"tau": numbers}),
        (dlmkern.confidence_select, (), {"confidence": stats.confidence, "rule": "schedule", "count": 2}),
        (dlmkern.block_attention, (queries, keys, keys, ends), {}),
        (dlmkern.attention_graph, (queries, keys, rows % 5, ends), {}),
        (
            dlmkern.attention_graph,
            (queries, keys, rows % 5),
            {"rows": rows % 4, "lengths": ends, "lse": stats.logsumexp[:, None]},
        ),
        (dlmkern.dapd_select, (conflict.float(), stats.confidence, mask, numbers), {"progress": numbers}),
        (dlmkern.dapd_select, (y[..., :5], stats.confidence, None, 0.1), {"variant": "direct"}),
        (dlmkern.cover_attention, (*seeded, ends), {"shift": 1}),
        (dlmkern.diagonal_correction, (*dlmkern.block_attention(queries, keys, keys), *seeded, ends), {}),
        (
            dlmkern.diagonal_correction,
            (queries, 9 + stats.logsumexp[:, None], *seeded),
            {"positions": rows % 5},
        ),
        (dlmkern.cover_seeds, (1 - stats.confidence, stats.entropy, stats.confidence, mask), {"most": 2}),
        (dlmkern.cover_seeds, (stats.entropy,), {"most": torch.tensor([1, 3]), "combine": "sum"}),
        (dlmkern.cover_verify, (stats.token, rows, stats.confidence, mask, rows % 2), {"tau_replace": 0.5}),
        (dlmkern.cover_verify, (rows[0], stats.token[0], stats.confidence[0], mask[0]), {}),
    ]


def converted(value: Any, convert: Any) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, tuple):
        parts = [converted(part, convert) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def check_every_op(convert: Any, kind: type, to_numpy: Any, narrow: bool = False) -> None:
    """`narrow`: the library has no 64-bit numbers."""
    for op, arguments, options in calls():
        expected = op(*arguments, **options)
        foreign = {name: converted(value, convert) for name, value in options.items()}
        actual = op(*(converted(value, convert) for value in arguments), **foreign)
        assert isinstance(actual, type(expected) if isinstance(expected, tuple) else kind), op
        if not isinstance(expected, tuple):
            actual, expected = (actual,), (expected,)
        for one, other in zip(actual, expected, strict=True):
            if other is None:
                assert one is None
                continue
            assert isinstance(one, kind), op
            if narrow:
                np.testing.assert_allclose(to_numpy(one), other.numpy(), rtol=1e-6, err_msg=str(op))
            else:
                np.testing.assert_array_equal(to_numpy(one), other.numpy(), err_msg=str(op))
                assert to_numpy(one).dtype == other.numpy().dtype


def test_numpy_in_numpy_out() -> None:
    check_every_op(lambda x: x.numpy(), np.ndarray, lambda x: x)


@pytest.mark.parametrize("kind", [Shelf, OldShelf])
def test_dlpack_in_and_out(kind: type) -> None:
    check_every_op(lambda x: kind(x.numpy()), Shelf, lambda x: x.array)


def test_jax_in_jax_out() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed: its arrays go through __dlpack__")
    check_every_op(lambda x: jax.numpy.asarray(x.numpy()), jax.Array, np.asarray, narrow=True)
    half = jax.numpy.ones((2, 3), dtype="bfloat16")
    assert isinstance(dlmkern.token_stats(half).token, jax.Array)
    with pytest.raises(TypeError, match="logits"):
        jax.jit(dlmkern.token_stats)(half)


def layouts_of(x: np.ndarray) -> dict[str, np.ndarray]:
    """NumPy arrays with the values of x [n, V] that torch.from_numpy refuses, warns of or copies."""
    read_only = x.copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + x.tobytes(), dtype=x.dtype, offset=1).reshape(x.shape)
    record = np.zeros(x.shape, dtype=[("flag", np.int8), ("value", x.dtype)])
    record["value"] = x
    return {
        "negative strides": x[::-1, ::-1].copy()[::-1, ::-1],
        "big-endian": x.astype(x.dtype.newbyteorder(">")),
        "big-endian and reversed": x[::-1].astype(x.dtype.newbyteorder(">"))[::-1],
        "read-only": read_only,
        "broadcast": np.broadcast_to(x, (1, *x.shape))[0],
        "Fortran order": np.asfortranarray(x),
        "unaligned": unaligned,
        "field of a record": record["value"],
        "subclass": x.view(np.matrix),
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_numpy_layouts(dtype: type) -> None:
    x = make_logits((3, 9), torch.float32, torch.device("cpu"), 3).numpy().astype(dtype)
    expected = dlmkern.token_stats(torch.from_numpy(x.copy()))
    for name, array in layouts_of(x).items():
        kept = np.array(array)
        stats = dlmkern.token_stats(array)
        for one, other in zip(stats[:4], expected[:4], strict=True):
            np.testing.assert_array_equal(one, other.numpy(), err_msg=name)
        np.testing.assert_array_equal(array, kept)


def test_read_only_memory_is_shared_not_copied() -> None:
    from dlmkern.ops._arrays import to_tensor

    x = np.arange(6.0)
    x.flags.writeable = False
    assert to_tensor("x", x).data_ptr() == x.ctypes.data
    assert to_tensor("x", Shelf(x)).data_ptr() == x.ctypes.data


def test_arrays_are_written_in_place() -> None:
    """kv_block_write, through the memory of the arrays or not at all."""
    caches = [np.zeros((1, 2, 5, 4), dtype=np.float32) for _ in range(2)]
    k, v = (np.random.default_rng(seed).standard_normal((1, 2, 3, 4), dtype=np.float32) for seed in (1, 2))
    positions = np.array([[4, -1, 0]], dtype=np.int32)
    table = np.ones((5, 4), dtype=np.float32), np.zeros((5, 4), dtype=np.float32)
    for kind in (np.asarray, Shelf):
        for cache in caches:
            cache[:] = 0
        drift = dlmkern.kv_block_write(
            *(kind(x) for x in (*caches, k, v, positions)),
            rope=tuple(kind(x) for x in table),
            drift=True,
        )
        for cache, new in zip(caches, (k, v), strict=True):
            np.testing.assert_array_equal(cache[:, :, [4, 0]], new[:, :, [0, 2]])
            assert not cache[:, :, 1:4].any()
        for part in drift:
            assert isinstance(part, np.ndarray if kind is np.asarray else Shelf)
    slices = np.zeros((2, 1, 5, 2, 9), dtype=np.float32).swapaxes(2, 3)[..., 1::2]
    assert dlmkern.kv_block_write(*slices, k, v, positions) is None
    np.testing.assert_array_equal(slices[:, :, :, [4, 0]], np.stack((k, v))[:, :, :, [0, 2]])


def test_a_graph_is_added_to_in_place() -> None:
    q, k = (np.random.default_rng(seed).standard_normal((1, 2, 5, 4), dtype=np.float32) for seed in (1, 2))
    positions = np.array([[4, -1, 0]], dtype=np.int32)
    expected = 1 + 2 * dlmkern.attention_graph(q, k, positions)
    for out in (
        np.ones((1, 3, 3), dtype=np.float32),
        np.ones((1, 6, 5), dtype=np.float32).swapaxes(1, 2)[:, 2:, ::2],
    ):
        assert np.shares_memory(dlmkern.attention_graph(q, k, positions, out=out), out)
        added = dlmkern.attention_graph(*(Shelf(x) for x in (q, k, positions)), out=Shelf(out))
        assert np.shares_memory(added.array, out)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
    read_only = np.ones((1, 3, 3), dtype=np.float32)
    read_only.flags.writeable = False
    with pytest.raises(TypeError, match=r"out: .*cannot be written in place: it is read-only"):
        dlmkern.attention_graph(q, k, positions, out=read_only)
    with pytest.raises(TypeError, match=r"out: .*cannot be written in place: .*negative strides"):
        dlmkern.attention_graph(q, k, positions, out=out[:, ::-1])
    with pytest.raises(TypeError, match=r"out: expected the same kind of array as q \(numpy\), got torch"):
        dlmkern.attention_graph(q, k, positions, out=torch.ones(1, 3, 3))


def test_arrays_that_cannot_be_written_in_place() -> None:
    class Copies(Shelf):
        def __dlpack__(self, **arguments: Any) -> Any:
            return self.array.__dlpack__(**arguments | {"copy": True})

    cache = np.zeros((1, 2, 5, 4), dtype=np.float32)
    k = np.ones((1, 2, 3, 4), dtype=np.float32)
    positions = np.array([[4, -1, 0]])
    read_only = cache.copy()
    read_only.flags.writeable = False
    shelved = tuple(Shelf(x) for x in (k, k, positions))
    for bad, others, message in (
        (read_only, (k, k, positions), "cannot be written in place: it is read-only"),
        (cache[::-1, ::-1], (k, k, positions), "cannot be written in place: .*negative strides"),
        (cache.astype(">f4"), (k, k, positions), "cannot be written in place: .*byte order"),
        (Shelf(read_only), shelved, "cannot be written in place: it is read-only"),
        (Copies(cache), shelved, "cannot be written in place: it is a copy"),
        (OldShelf(cache), shelved, "cannot be written in place: .*cannot say whether it may be written"),
    ):
        good = cache if isinstance(bad, np.ndarray) else Shelf(cache)
        with pytest.raises(TypeError, match=f"k_cache: .*{message}"):
            dlmkern.kv_block_write(bad, good, *others)
        with pytest.raises(TypeError, match=f"v_cache: .*{message}"):
            dlmkern.kv_block_write(good, bad, *others)
    assert not cache.any()
    with pytest.raises(TypeError, match=r"v: expected the same kind of array as k \(torch\), got numpy"):
        dlmkern.kv_block_write(cache, cache.copy(), torch.from_numpy(k), k, positions)


def test_mask_token_and_number_dtypes() -> None:
    x = make_logits((3, 9), torch.float32, torch.device("cpu"), 4).numpy()
    stats = dlmkern.token_stats(x)
    for dtype in (np.int32, np.int16, np.uint8, np.dtype(">i8")):
        conflict = dlmkern.conflict_matrix(x, stats.token.astype(dtype), stats.logsumexp)
        np.testing.assert_array_equal(conflict, dlmkern.conflict_matrix(x, stats.token, stats.logsumexp))
    for number in (np.float32(0.25), np.float64(0.25), np.array(0.25), np.full(1, 0.25), np.int64(0)):
        selected = dlmkern.cap_select(x, tau_low=number) if np.ndim(number) == 0 else None
        batched = dlmkern.cap_select(logits=x[None], tau_low=number, tau_high=0.5)
        plain = dlmkern.cap_select(logits=x[None], tau_low=float(np.ravel(number)[0]), tau_high=0.5)
        np.testing.assert_array_equal(batched, plain)
        assert selected is None or isinstance(selected, np.ndarray)
    lengths = dlmkern.depga_block(np.ones(9), np.ones(9), np.int64(5), l_min=np.int32(2))
    assert isinstance(lengths, np.ndarray)


def test_bfloat16_arrays() -> None:
    ml_dtypes = pytest.importorskip(
        "ml_dtypes", reason="ml_dtypes is not installed: NumPy has no bfloat16 without it"
    )
    x = make_logits((3, 9), torch.bfloat16, torch.device("cpu"), 5)
    array = x.float().numpy().astype(ml_dtypes.bfloat16)
    for one, other in zip(dlmkern.token_stats(array)[:4], dlmkern.token_stats(x)[:4], strict=True):
        np.testing.assert_array_equal(one, other.numpy())


def test_what_is_no_array_of_numbers() -> None:
    x = np.zeros((3, 9), dtype=np.float32)
    for bad, message in (
        ([[0.0, 1.0]], "logits: expected a tensor or an array with __dlpack__, got list"),
        (1.0, "logits: expected a tensor or an array with __dlpack__, got float"),
        (np.float32(1), "logits: expected a tensor or an array with __dlpack__, got float32"),
        (x.astype(object), "logits: .*object"),
        (x.astype(np.complex64), r"logits: expected dtype .* got complex64"),
        (x.astype(np.int32), "logits: expected dtype .* got int32"),
        (x.astype(np.longdouble), "logits: .*float128|logits: .*longdouble"),
        (x.astype("U4"), "logits: .*U4"),
        (x.astype(bool), "logits: expected dtype .* got bool"),
        (np.ma.masked_equal(x, 1), "logits: .*mask would be lost"),
        (Shelf(x.astype(np.complex64)), r"logits: expected dtype .* got complex64"),
        (Shelf(x.astype(object)), "logits: .*cannot be made a tensor"),
        (Shelf(x.astype(">f4")), "logits: .*cannot be made a tensor"),
        (Shelf(x[::-1]), "logits: .*strides are negative"),
        (OldShelf(x[:, ::-1]), "logits: .*strides are negative"),
    ):
        with pytest.raises(TypeError, match=message):
            dlmkern.token_stats(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"mask: .*object"):
        dlmkern.cap_select(x, np.array([None] * 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"curr\.ids: expected a tensor or an array"):
        dlmkern.topk_kl(([1], x, x), (x, x, x))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tau_low: expected a float or a tensor, got list"):
        dlmkern.cap_select(x, tau_low=[0.5])  # type: ignore[arg-type]


def test_broken_producers() -> None:
    class NoCapsule(Shelf):
        def __dlpack__(self, **arguments: Any) -> Any:
            return object()

    class Refuses(Shelf):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise BufferError("not today")

    class Homeless:
        def __dlpack__(self, **arguments: Any) -> Any: ...

    x = np.zeros((3, 9), dtype=np.float32)
    for bad, message in (
        (NoCapsule(x), "logits: .*no DLPack capsule"),
        (Refuses(x), "logits: .*not today"),
        (Homeless(), "logits: .* has no from_dlpack"),
    ):
        with pytest.raises(TypeError, match=message):
            dlmkern.token_stats(bad)  # type: ignore[arg-type]


def test_kinds_do_not_mix() -> None:
    x = np.zeros((3, 9), dtype=np.float32)
    mask = np.ones(3, dtype=bool)
    for arguments, options, message in (
        ((x, torch.from_numpy(mask)), {}, r"mask: .* as probs \(numpy\), got torch"),
        ((torch.from_numpy(x), mask), {}, r"mask: .* as probs \(torch\), got numpy"),
        ((x, Shelf(mask)), {}, r"mask: .* as probs \(numpy\), got ShelfLibrary"),
        ((x, mask), {"tau_low": torch.tensor([0.5])}, r"tau_low: .* as probs \(numpy\), got torch"),
        ((torch.from_numpy(x),), {"tau_low": np.array([0.5])}, "tau_low: expected a float or a tensor"),
    ):
        with pytest.raises(TypeError, match=message):
            dlmkern.cap_select(*arguments, **options)  # type: ignore[arg-type]


def test_values_are_checked_as_for_tensors() -> None:
    x = np.zeros((2, 3, 9), dtype=np.float32)
    with pytest.raises(ValueError, match="tau_low: expected a threshold"):
        dlmkern.cap_select(x, tau_low=np.array([0.5, math.nan]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask: expected shape"):
        dlmkern.cap_select(x, np.ones(3, dtype=bool))  # type: ignore[arg-type]
