"""What the tests under Triton's interpreter share; two to three times faster than it comes."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

runtime = pytest.importorskip("triton.runtime.interpreter")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="runs in the process that test_in_own_process starts"
)

_patched: set[int] = set()


def randn(*shape: int, seed: int = 0, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel's call of another function, tl.max say.

    Before each such call Triton patches the language modules that the function sees, and leaves them so: once
    for every module that calls is enough.
    """
    module = id(self.fn.__globals__)
    if module not in _patched:
        runtime._patch_lang(self.fn)
        _patched.add(module)
    return self.rewrite()(*args, **kwargs)


def speed_up() -> None:
    runtime.InterpretedFunction.__call__ = _call
