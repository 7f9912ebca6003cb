"""Timing: every contender in turn, over and over, and the median of each."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Contender = Callable[[], Any]
MIN_SECONDS = 2e-4  # a CPU sample repeats a shorter call until it lasts this long
FLUSH_BYTES = 256 << 20  # more than any GPU's L2


class Clock:
    """Times one call, in seconds: by the wall on the CPU, by events and from a cold L2 on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.start = torch.cuda.Event(enable_timing=True)
            self.end = torch.cuda.Event(enable_timing=True)
            self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, run: Contender, repeats: int) -> float:
        if not self.cuda:
            began = time.perf_counter()
            for _ in range(repeats):
                run()
            return (time.perf_counter() - began) / repeats
        self.flush.zero_()  # also keeps the GPU busy while the call is being launched
        self.start.record()
        run()
        self.end.record()
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / 1e3


def medians(contenders: Mapping[str, Contender], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of each contender over `rounds` rounds that call every one of them once.

    Taking turns spreads what else the machine does over all of them: ratios hold even where times drift.
    """
    clock = Clock(device)
    repeats = {}
    for name, run in contenders.items():
        run()
        repeats[name] = max(1, round(MIN_SECONDS / max(clock(run, 1), 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            samples[name].append(clock(run, repeats[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def read_all(tensors: list[torch.Tensor]) -> Contender:
    """A call that does nothing but read `tensors`: what a kernel that reads them once could at best take.

    On a GPU, where torch's sums fall short of the bandwidth, it copies half of each: the same traffic.
    """
    if tensors[0].is_cuda:
        halves = [x.flatten()[: x.numel() // 2] for x in tensors]
        targets = [torch.empty_like(x) for x in halves]
        return lambda: [target.copy_(x) for target, x in zip(targets, halves, strict=True)]
    words = [x.flatten().view(torch.float32) for x in tensors]  # the fastest sum, whatever the dtype
    return lambda: [x.sum() for x in words]
