from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dlmkern import attention
from tests.models.support import FIELDS, random_weights


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def no_cpu_flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A version of torch without the kernel that hands out its log-sum-exp."""

    def missing(*_: Any, **__: Any) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(attention, "_cpu_flash", missing)
    attention._has_cpu_flash.cache_clear()
    yield
    attention._has_cpu_flash.cache_clear()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write a random checkpoint, weights in dtype `stored`; other keywords replace fields of its config."""

    def write(
        name: str = "checkpoint",
        model_type: str = "llada",
        stored: torch.dtype = torch.float32,
        **changes: Any,
    ) -> Path:
        fields = FIELDS[model_type] | changes
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields))
        weights = {name: value.to(stored) for name, value in random_weights(fields).items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return write


@pytest.fixture
def empty_compiler() -> None:
    """No compiled code: torch keeps so many versions of a function, whatever models they were for."""
    torch.compiler.reset()
