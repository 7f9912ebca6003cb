"""What block_attention and attention_graph share: which heads they take, and how they divide the work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_HEAD = 256
# How the work is split: by reasoning, not by measurement.
_PROGRAMS = 256  # enough for every multiprocessor of the largest GPUs
_MOST_SPLITS = 32


def check_heads(q: torch.Tensor) -> None:
    """TypeError or ValueError for queries that the kernels do not take."""
    if q.dtype not in _DTYPES:
        raise TypeError(f"q: the Triton kernel takes float16, bfloat16 or float32, got {q.dtype}")
    if q.shape[-1] > _LARGEST_HEAD:
        raise ValueError(
            f"q: the Triton kernel takes heads of at most {_LARGEST_HEAD} numbers, got {q.shape[-1]}"
        )


def padded(size: int) -> int:
    """The next size that tl.dot takes."""
    power: int = triton.next_power_of_2(size)
    return max(power, 16)


def split_count(programs: int, most: int) -> int:
    """How many programs, at most ``most``, are to share the work of each of ``programs``."""
    wanted: int = triton.cdiv(_PROGRAMS, programs)
    return max(min(wanted, most, _MOST_SPLITS), 1)


@triton.jit
def key_count(length_ptr, batch, L):
    """The number of keys of a sequence, L for all if there are no lengths."""
    length = L
    if length_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(length_ptr + batch), 0), L).to(tl.int32)
    return length
