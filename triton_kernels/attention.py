"""What the attentions share: which heads they take, how they divide the work, and the softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 256
# How the work is split: by reasoning, not by measurement.
_PROGRAMS = 256  # enough for every multiprocessor of the largest GPUs
_MOST_SPLITS = 32


def check_heads(q: torch.Tensor) -> None:
    """TypeError or ValueError for queries that the kernels do not take."""
    if q.dtype not in _DTYPES:
        raise TypeError(f"q: the Triton kernel takes float16, bfloat16 or float32, got {q.dtype}")
    check_size(q, LARGEST_HEAD)


def check_size(q: torch.Tensor, most: int) -> None:
    """ValueError for heads of more than that many numbers."""
    if q.shape[-1] > most:
        raise ValueError(f"q: the Triton kernel takes heads of at most {most} numbers, got {q.shape[-1]}")


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


@triton.jit
def online_softmax(score, peak, total):
    """One more tile of scores [ROWS, KEYS], in bits, -inf where there is no key.

    The weights 2^(score - peak), the factor that brings what was weighted before to the new peak, and the
    largest score and the sum of weights of each row so far.
    """
    new_peak = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(peak - base)
    return weight, shrink, new_peak, total * shrink + tl.sum(weight, 1)
