"""Kernel launches as data: what a host function runs is what the ahead-of-time checks compile."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton


class Launch(NamedTuple):
    """One kernel launch, ``kernel[grid](**arguments, num_warps=num_warps)``; constexprs are arguments too."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            yield
    elif device.type == "cpu":
        with warnings.catch_warnings():  # the interpreter is NumPy, which warns of every NaN
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    else:
        yield


def run(launches: Sequence[Launch], device: torch.device) -> None:
    """Enqueue the launches, in order, on the current stream of ``device``."""
    with _on(device):
        for launch in launches:
            launch.kernel[launch.grid](**launch.arguments, num_warps=launch.num_warps)


def one_program(n: int) -> tuple[int, int]:
    """Block (a power of two) and warps of a program that holds all n positions of a sequence."""
    block = max(32, triton.next_power_of_2(n))
    return block, min(block // 32, 16)
