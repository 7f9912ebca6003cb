"""NumPy arrays and anything else with ``__dlpack__``: made into tensors on the way in, and results into
their kind.

No data is copied where memory can be shared.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dlmkern.ops import _dlpack

T = TypeVar("T")


class Kind(NamedTuple):
    """An array library."""

    name: str
    from_tensor: Callable[[Tensor], Any]


def all_tensors(*arrays: Any) -> bool:
    """Whether there is nothing to convert: every argument is a tensor or None."""
    for x in arrays:  # noqa: SIM110 -- on the way of every call, and twice as fast as all()
        if x is not None and not isinstance(x, Tensor):
            return False
    return True


def call(
    op: Callable[..., T],
    arrays: dict[str, Any],
    numbers: dict[str, Any] | None = None,
    *,
    written: dict[str, Any] | None = None,
    **options: Any,
) -> T:
    """``op(**arrays, **numbers, **options)`` for arrays that are not tensors; the results are of the same
    kind.

    `arrays` may be None or tuples of arrays. `numbers` may be arrays of that kind or plain numbers. `written`
    are arrays that the op writes in place: their memory is shared, or TypeError says why it cannot be.
    """
    first: tuple[str, Kind] | None = None

    def convert(name: str, value: Any, shared: bool = False) -> Any:
        nonlocal first
        if value is None:
            return None
        if isinstance(value, tuple):
            parts = getattr(value, "_fields", range(len(value)))
            return tuple(convert(f"{name}.{part}", x) for part, x in zip(parts, value, strict=True))
        kind = kind_of(name, value)
        if first is None:
            first = name, kind
        elif kind.name != first[1].name:
            raise TypeError(
                f"{name}: expected the same kind of array as {first[0]} ({first[1].name}), got {kind.name}"
            )
        return to_tensor(name, value, shared)

    arguments = {name: convert(name, value) for name, value in arrays.items()}
    for name, value in (written or {}).items():
        arguments[name] = convert(name, value, shared=True)
    for name, value in (numbers or {}).items():
        arguments[name] = convert(name, value) if is_array(value) else value
    if first is None:
        raise TypeError(f"{next(iter(arrays))}: expected an array, got None")
    results: T = _results(first[1], op(**arguments, **options))
    return results


def is_array(x: Any) -> bool:
    return isinstance(x, (Tensor, np.ndarray)) or (hasattr(x, "__dlpack__") and not isinstance(x, np.generic))


def kind_of(name: str, x: Any) -> Kind:
    if isinstance(x, Tensor):
        return Kind("torch", lambda tensor: tensor)
    if isinstance(x, np.ndarray):
        return Kind("numpy", lambda tensor: tensor.numpy())
    if not is_array(x):
        raise TypeError(f"{name}: expected a tensor or an array with __dlpack__, got {type(x).__name__}")
    if hasattr(x, "__array_namespace__"):
        library = x.__array_namespace__()
    else:
        library = sys.modules[type(x).__module__.partition(".")[0]]
    if not hasattr(library, "from_dlpack"):
        raise TypeError(
            f"{name}: {library.__name__} has no from_dlpack to make {type(x).__name__} results with"
        )
    return Kind(library.__name__, library.from_dlpack)


def to_tensor(name: str, x: Any, shared: bool = False) -> Tensor:
    """`x` as a tensor; with `shared`, writing to the tensor writes to `x`."""
    if isinstance(x, Tensor):
        return x
    try:
        return _from_numpy(x, shared) if isinstance(x, np.ndarray) else _dlpack.to_tensor(x, shared)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        what = f"{type(x).__name__} of dtype {getattr(x, 'dtype', 'unknown')}"
        aim = "written in place" if shared else "made a tensor"
        raise TypeError(f"{name}: {what} cannot be {aim}: {error}") from error


def _from_numpy(x: np.ndarray[Any, Any], shared: bool) -> Tensor:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("its mask would be lost")
    if shared and not x.flags.writeable:
        raise ValueError("it is read-only")
    own = x
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    if not x.flags.aligned or any(stride < 0 or stride % max(x.itemsize, 1) for stride in x.strides):
        x = x.copy()
    if shared and x is not own:
        raise ValueError("a tensor has the machine's byte order, aligned elements and no negative strides")
    if not x.flags.writeable:
        x = np.asarray(_Writeable(x))
    if x.dtype.name == "bfloat16":  # of ml_dtypes
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


class _Writeable:
    """A read-only array's memory for torch, which warns of what it could write; ops write to no input."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _results(kind: Kind, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return kind.from_tensor(value)
    parts = [_results(kind, part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
