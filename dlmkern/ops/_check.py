"""Checks of what callers pass in. Every error names the argument, what came and what was expected."""

import math
from numbers import Integral, Real
from typing import TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

Number: TypeAlias = float | Tensor
Dtypes: TypeAlias = tuple[torch.dtype, ...]

FLOATS: Dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STATISTICS: Dtypes = (torch.float64, torch.float32)
INTEGERS: Dtypes = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
BOOL: Dtypes = (torch.bool,)


def tensor(name: str, x: Tensor | None, dtypes: Dtypes) -> Tensor:
    """`x`, cut off from autograd, if it is a dense tensor of one of `dtypes`."""
    if x is None:
        raise TypeError(f"{name}: expected a tensor or array, got None")
    if x.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected dtype {expected}, got {str(x.dtype).removeprefix('torch.')}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {kind}")
    return x.detach() if x.requires_grad else x


def vocabulary_rows(name: str, x: Tensor | None) -> Tensor:
    """Logits or probabilities as ``[B, n, V]``; ``[n, V]`` becomes ``[1, n, V]``."""
    x = tensor(name, x, FLOATS)
    if x.ndim not in (2, 3):
        raise ValueError(f"{name}: expected shape [n, V] or [B, n, V], got {list(x.shape)}")
    if x.shape[-1] == 0:
        raise ValueError(f"{name}: expected at least one token in the vocabulary, got shape {list(x.shape)}")
    return x.unsqueeze(0) if x.ndim == 2 else x


def companion(
    name: str, x: Tensor | None, leader_name: str, leader: Tensor, shape: tuple[int, ...], dtypes: Dtypes
) -> Tensor:
    """`x`, which must have `shape` and the device of `leader`."""
    x = tensor(name, x, dtypes)
    same_device(name, x, leader_name, leader)
    if x.shape != shape:
        raise ValueError(
            f"{name}: expected shape {list(shape)} to go with {leader_name}, got {list(x.shape)}"
        )
    return x


def same_device(name: str, x: Tensor, leader_name: str, leader: Tensor) -> None:
    if x.device != leader.device:
        raise ValueError(f"{name}: expected device {leader.device} like {leader_name}, got {x.device}")


def query_and_key(q: Tensor | None, k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries ``[B, Hq, n, d]`` and keys ``[B, Hkv, L, d]`` that go with them: Hkv divides Hq."""
    q = tensor("q", q, FLOATS)
    if q.ndim != 4 or q.shape[3] == 0:
        raise ValueError(f"q: expected shape [B, Hq, n, d] with d >= 1, got {list(q.shape)}")
    batch, heads, _, size = q.shape
    k = tensor("k", k, (q.dtype,))
    same_device("k", k, "q", q)
    if k.ndim != 4 or k.shape[0] != batch or k.shape[3] != size:
        raise ValueError(f"k: expected shape [{batch}, Hkv, L, {size}] to go with q, got {list(k.shape)}")
    kv_heads = k.shape[1]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"k: expected a number of heads that divides the {heads} of q, got {kv_heads}")
    return q, k


def scale(value: object, size: int) -> float:
    """The factor of q k for heads of `size` numbers; None for its default."""
    if value is None:
        return 1.0 / math.sqrt(size)
    if not is_number(value):
        raise TypeError(f"scale: expected a number or None, got {type(value).__name__}")
    number = as_float("scale", value)
    if not math.isfinite(number):
        raise ValueError(f"scale: expected a finite number, got {number}")
    return number


def writable(name: str, x: Tensor) -> None:
    """Refuses a tensor with two elements in one place, such as an expanded one."""
    strides = x.stride()
    if 0 in strides and any(stride == 0 and size > 1 for size, stride in zip(x.shape, strides, strict=True)):
        raise ValueError(f"{name}: expected a place of its own for every element, got strides {strides}")


def banned_token(value: object, vocabulary: int) -> int:
    """The banned token as the torch ops take it: -1 for none."""
    if value is None:
        return -1
    if not is_int(value):
        raise TypeError(f"banned_token: expected an int or None, got {type(value).__name__}")
    if not 0 <= value < vocabulary:
        raise ValueError(f"banned_token: expected an id in [0, {vocabulary}), got {value}")
    return int(value)


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, (bool, np.bool_))


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, (bool, np.bool_))


def as_float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name}: expected a number that a float can hold, got one beyond 1e308") from error


def count(name: str, value: object, most: int, meaning: str) -> None:
    """Refuses what is no int in [1, most]."""
    if not is_int(value):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not 1 <= value <= most:
        raise ValueError(f"{name}: expected 1 <= {name} <= {most}, {meaning}, got {value}")


def per_row(name: str, value: object, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number, or a tensor of one number a row, as a tensor ``[B]`` of `dtype` on `device`."""
    if isinstance(value, Tensor):
        kinds = INTEGERS if dtype == torch.int64 else FLOATS + INTEGERS
        x = tensor(name, value, kinds)
        if x.device != device:
            raise ValueError(f"{name}: expected device {device}, got {x.device}")
        if x.shape not in ((), (batch,)):
            raise ValueError(f"{name}: expected a number or shape [{batch}], got {list(x.shape)}")
        return x.to(dtype).expand(batch)
    if dtype == torch.int64:
        if not is_int(value):
            raise TypeError(f"{name}: expected an int or a tensor, got {type(value).__name__}")
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{name}: expected an int of 64 bits, got {value}")
        return torch.full((batch,), int(value), dtype=dtype, device=device)
    if not is_number(value):
        raise TypeError(f"{name}: expected a float or a tensor, got {type(value).__name__}")
    return torch.full((batch,), as_float(name, value), dtype=dtype, device=device)


def on_host(x: Tensor) -> bool:
    """Whether the values can be read without waiting for a device."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.is_cpu


def host_values(value: Number, batch: int) -> list[float]:
    """What per_row takes, one number a row, if it can be read without waiting for a device, else nothing."""
    if not isinstance(value, Tensor):
        return [value] * max(batch, 1)
    if not on_host(value):
        return []
    return value.tolist() if value.ndim else [value.item()] * max(batch, 1)


def in_range(name: str, values: list[float], low: float, high: float, expected: str) -> None:
    """Refuses host_values outside [low, high], NaN included."""
    for number in values:
        if not low <= number <= high:
            raise ValueError(f"{name}: expected {expected}, got {number}")


def elements_in_range(name: str, x: Tensor, low: int, high: int) -> None:
    """Refuses integers ``[n]`` or ``[B, n]`` on the host with one outside [low, high]."""
    if on_host(x) and x.numel():
        values = x.tolist()  # the fastest for the few numbers that these tensors hold
        for row in values if x.ndim == 2 else (values,):
            for number in (min(row), max(row)):
                if not low <= number <= high:
                    raise ValueError(f"{name}: expected values in [{low}, {high}], got {number}")


def in_order(low_name: str, lows: list[float], high_name: str, highs: list[float]) -> None:
    """Refuses host_values with low > high in any row."""
    for low, high in zip(lows, highs, strict=False):
        if low > high:
            raise ValueError(f"{low_name}: expected at most {high_name}={high}, got {low}")
