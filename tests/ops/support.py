"""What the tests of the ops share."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

DATA = Path(__file__).parents[1] / "data"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    """The dtypes of logits that a backend takes."""
    return DTYPES[1:] if backend == "triton" else DTYPES


def ulp(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def make_logits(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int, scale: float = 4.0
) -> Tensor:
    """Peaked rows, as those of a language model are."""
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(shape, generator=generator)
    best = torch.randint(shape[-1], shape[:-1], generator=generator)
    peak = 12 * torch.rand(shape[:-1], generator=generator)
    return x.scatter_add(-1, best[..., None], peak[..., None]).to(device, dtype)


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views with the values of ``x`` [B, n, V] that lie differently in memory."""
    batch, n, vocabulary = x.shape
    yield "vocabulary outermost", x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    yield "batch and positions swapped", x.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((batch + 1, n + 2, vocabulary + 5), torch.nan, dtype=x.dtype, device=x.device)
    wide[1:, 1:-1, 3:-2] = x
    yield "slice of something larger", wide[1:, 1:-1, 3:-2]
    every_other = torch.full((batch, n, 2 * vocabulary), torch.nan, dtype=x.dtype, device=x.device)
    every_other[..., ::2] = x
    yield "every other element", every_other[..., ::2]
    offset = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    offset[1:] = x.flatten()
    yield "off alignment", offset[1:].view(x.shape)


def to_numpy(x: Tensor | np.ndarray) -> np.ndarray:
    return x.cpu().numpy() if isinstance(x, Tensor) else x


def assert_same(actual: Tensor, expected: Tensor | np.ndarray, what: str = "") -> None:
    """Equal in every element; NaN equals NaN."""
    np.testing.assert_array_equal(to_numpy(actual), to_numpy(expected), err_msg=what)


def assert_close(actual: Tensor, expected: np.ndarray, absolute: float, relative: float = 0.0) -> None:
    """NaN and the infinities in the same places, the rest within the bound."""
    np.testing.assert_allclose(to_numpy(actual), expected, rtol=relative, atol=absolute)


def opcheck(name: str, *arguments: Any) -> None:
    torch.library.opcheck(getattr(torch.ops.dlmkern, name).default, arguments)


def depcap_cases(device: torch.device, every: int = 1) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Settings and tensors of the recorded cases of DepCap's official code."""
    settings = json.loads((DATA / "depcap_ops.json").read_text())
    tensors = load_file(DATA / "depcap_ops.safetensors", device=str(device))
    cases = []
    for case in settings[::every]:
        prefix = f"case{case['case']:02d}."
        own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        n = case["n_candidates"]
        for name, shape in (
            ("cand_idx", (n,)),
            ("high", (n,)),
            ("selected", (n,)),
            ("D", (n, n)),
            ("conflict", (n, n)),
        ):
            own.setdefault(name, torch.zeros(shape, dtype=torch.int64, device=device))  # left out where empty
        cases.append((case, own))
    return cases
