"""NumPy arrays and whatever else has ``__dlpack__``: into tensors on the way in, back into their kind on the way out."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def all_tensors(*arrays: Any) -> bool:
    """Whether there is nothing to convert: every argument is a tensor or None."""
    return all(x is None or isinstance(x, Tensor) for x in arrays)


def call(
    op: Callable[..., Any], arrays: dict[str, Any], numbers: dict[str, Any] | None = None, **options: Any
) -> Any:
    raise TypeError("not yet")
