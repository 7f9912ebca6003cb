"""Checks of a decoder's settings."""

from __future__ import annotations

import math
import sys

from dlmkern.ops._check import is_int, is_number

_INT_STOP = 2**31


def positive_int(name: str, value: object) -> None:
    if not is_int(value) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value >= _INT_STOP:
        raise ValueError(f"{name} must be below {_INT_STOP}, got {value!r}")


def number(name: str, value: object) -> None:
    """Any float but NaN."""
    finite = is_number(value) and abs(value) <= sys.float_info.max
    if not finite and not (isinstance(value, float) and math.isinf(value)):
        raise ValueError(f"{name} must be a number, got {value!r}")


def finite_number(name: str, value: object) -> None:
    number(name, value)
    if math.isinf(value):  # type: ignore[arg-type]
        raise ValueError(f"{name} must be finite, got {value!r}")


def finite_number_from_zero(name: str, value: object) -> None:
    if not is_number(value) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")


def probability(name: str, value: object) -> None:
    number(name, value)
    if not 0 <= value <= 1:  # type: ignore[operator]
        raise ValueError(f"{name} must lie in [0, 1], got {value!r}")


def token_id(name: str, value: object) -> None:
    if not is_int(value) or not 0 <= value < _INT_STOP:
        raise ValueError(f"{name} must be a token id, got {value!r}")


def known_blocks(blocks: int | None) -> int:
    if blocks is None:
        raise ValueError("steps needs blocks whose number is known beforehand; leave it out")
    return blocks


def compat(value: object) -> None:
    if value not in (None, "official"):
        raise ValueError(f'compat must be None or "official", got {value!r}')
