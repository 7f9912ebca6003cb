"""Registration of the ops with torch, so that they trace under ``torch.compile(fullgraph=True)``."""

from collections.abc import Callable
from typing import Any

import torch

from dlmkern.backends import registry

_LIBRARY = torch.library.Library("dlmkern", "DEF")


def define(schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``torch.ops.dlmkern.<name>`` and returns it.

    The implementation asks the registry for a backend when it runs: traced Python never sees the choice.
    `fake` makes outputs of the right shapes and dtypes without computing anything.
    """
    name = schema.partition("(")[0]

    def run(*args: Any) -> Any:
        first = args[0]
        return registry.resolve(name, first.device, first.dtype)(*args)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dlmkern::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.dlmkern, name).default
    return op
