"""The choice of a backend for an op, a device and a dtype."""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

OPS = (
    "token_stats",
    "conflict_matrix",
    "independent_set",
    "cap_select",
    "topk_snapshot",
    "topk_kl",
    "depga_block",
    "confidence_select",
    "kv_block_write",
    "block_attention",
    "attention_graph",
    "dapd_select",
    "cover_attention",
    "diagonal_correction",
    "cover_seeds",
    "cover_verify",
)
BACKENDS = ("reference", "cpu", "cuda", "triton")
# What "auto" tries, best first; any other device gets the reference.
AUTO = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}


class BackendUnavailableError(RuntimeError):
    """A backend that was asked for by name cannot run the op; the message says why."""


def _checked(name: str, source: str) -> str:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"{source}: expected one of {', '.join(('auto', *BACKENDS))}, got {name!r}")
    return name


DEFAULT = os.environ.get("DLMKERN_BACKEND", "auto")  # checked at the first use, so that the import succeeds
_choice = ContextVar("dlmkern_backend", default=DEFAULT)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, in this thread or task, every op runs on the backend `name`.

    `name` is ``"reference"``, ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"auto"``. ``"auto"``, the default,
    takes the fastest backend that serves the op, device and dtype; one that is named and cannot serve them
    raises BackendUnavailableError. The environment variable DLMKERN_BACKEND, read when dlmkern is imported,
    sets the default.
    """
    token = _choice.set(_checked(name, "use_backend"))
    try:
        yield
    finally:
        _choice.reset(token)


def resolve(op: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """The function that runs `op` on tensors of `device`; `dtype` is that of the op's first tensor."""
    return _resolve(_choice.get(), op, device.type, dtype)


@cache
def _resolve(choice: str, op: str, device: str, dtype: torch.dtype) -> Callable[..., Any]:
    if choice != "auto":
        return _function(_checked(choice, "DLMKERN_BACKEND"), op, device, dtype)
    for backend in AUTO.get(device, ()):
        try:
            return _function(backend, op, device, dtype)
        except BackendUnavailableError:
            continue
    return _function("reference", op, device, dtype)


def _function(backend: str, op: str, device: str, dtype: torch.dtype) -> Callable[..., Any]:
    def refuse(why: str) -> BackendUnavailableError:
        return BackendUnavailableError(f"{op}: backend {backend!r} is not available: {why}")

    if backend == "reference":
        return getattr(importlib.import_module("dlmkern.reference"), op)  # type: ignore[no-any-return]
    if backend == "triton":
        if dtype == torch.float64 and op in ("token_stats", "block_attention", "attention_graph"):
            raise refuse("it takes float32, bfloat16 and float16, not float64")
        return _triton_function(op, device, refuse)
    from dlmkern.backends import native

    try:
        return native.load(backend, op, device)
    except ImportError as error:
        raise refuse(str(error)) from error


def _triton_function(
    op: str, device: str, refuse: Callable[[str], BackendUnavailableError]
) -> Callable[..., Any]:
    if find_spec("triton") is None:
        raise refuse("triton is not installed")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise refuse("the tensors are on the CPU; Triton runs there only under TRITON_INTERPRET=1")
    if device not in ("cpu", "cuda"):
        raise refuse(f"the tensors are on {device!r}")
    module = f"dlmkern.triton_kernels.{op}"
    if find_spec(module) is None:
        raise refuse("it has no such kernel")
    return getattr(importlib.import_module(module), op)  # type: ignore[no-any-return]


def table() -> dict[str, dict[str, str]]:
    """``table()[op][backend]`` is ``"yes"`` or why not, on the device that the backend is made for."""
    home = {"reference": "cpu", "cpu": "cpu", "cuda": "cuda", "triton": "cuda"}
    return {
        op: {backend: _why_not(backend, op, home[backend]) or "yes" for backend in BACKENDS} for op in OPS
    }


def _why_not(backend: str, op: str, device: str) -> str | None:
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    try:
        _function(backend, op, device, torch.float32)
    except BackendUnavailableError as error:
        return str(error).partition("is not available: ")[2]
    return None
