"""libdlmkern through ctypes: the C API on NumPy arrays, with nothing of dlmkern's Python in between."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

FLOAT64, FLOAT32, BFLOAT16, FLOAT16, INT64, BOOL = range(6)
OK, NULL, SHAPE, DTYPE, VALUE, WORKSPACE, UNAVAILABLE, MEMORY = range(0, -8, -1)

CODES = {
    "float64": FLOAT64,
    "float32": FLOAT32,
    "uint16": BFLOAT16,
    "float16": FLOAT16,
    "int64": INT64,
    "bool": BOOL,
}
Array = np.ndarray[Any, Any]


class View(ctypes.Structure):
    """A dlmkern_view."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    )


def view(array: Array, **changes: Any) -> View:
    """The view of an array (an array of uint16 holds bfloat16), with fields replaced by `changes`."""
    strides = [stride // array.itemsize for stride in array.strides]
    fields: dict[str, Any] = {
        "data": array.ctypes.data,
        "dtype": CODES[str(array.dtype)],
        "ndim": array.ndim,
        "shape": array.shape,
        "stride": strides,
        **changes,
    }
    sizes = ctypes.c_int64 * 4
    return View(
        fields["data"], fields["dtype"], fields["ndim"], sizes(*fields["shape"]), sizes(*fields["stride"])
    )


class Library:
    """Functions by their name without the prefix dlmkern_; they return the error code."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        for name in ("version", "error_string", "cpu_isa"):
            getattr(self._library, f"dlmkern_{name}").restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> Any:
        """Arrays and views go by pointer, None as NULL, and every number is 64 bits wide."""
        return getattr(self._library, f"dlmkern_{name}")(*(pass_argument(value) for value in arguments))


def pass_argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = view(value)
    if isinstance(value, View):
        return ctypes.byref(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_int64(value) if isinstance(value, int) else value


def to_bfloat16(array: Array) -> Array:
    """float32 to bfloat16 bits, towards zero; infinities and quiet NaNs stay what they are."""
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def to_float64(array: Array) -> Array:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def cast(array: Array, dtype: int) -> Array:
    if dtype == BFLOAT16:
        return to_bfloat16(array)
    return array.astype({FLOAT64: np.float64, FLOAT32: np.float32, FLOAT16: np.float16}[dtype])
