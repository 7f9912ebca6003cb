"""KV caches: what each forward pass computes anew, and what it takes from an earlier one (Fast-dLLM).

The keys and values of a masked diffusion model change with every committed token, so a cache is an
approximation: those outside the computed positions are as old as the last whole pass. The pass that opens a
block is always a whole one, and it is the block's first denoising step.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlmkern.decoders import _check


def _check_refresh(refresh: int | None) -> None:
    if refresh is not None:
        _check.positive_int("refresh", refresh)


@dataclass(frozen=True)
class NoCache:
    """Every forward pass computes whole rows."""


@dataclass(frozen=True)
class PrefixCache:
    """Inside a block, only the block and all that follows it are computed; what precedes it is cached.

    Args:
        refresh: forward passes from one whole pass to the next inside a block; 1 caches nothing. None: whole
            passes open blocks, and all others use the cache (the paper).
    """

    refresh: int | None = None

    def __post_init__(self) -> None:
        _check_refresh(self.refresh)


@dataclass(frozen=True)
class DualCache:
    """Inside a block, only the block is computed; what precedes and what follows it is cached.

    Args:
        refresh: as in `PrefixCache`.
    """

    refresh: int | None = None

    def __post_init__(self) -> None:
        _check_refresh(self.refresh)


Cache = NoCache | PrefixCache | DualCache

_BY_NAME: dict[str | None, Cache] = {None: NoCache(), "prefix": PrefixCache(), "dual": DualCache()}


def find_cache(cache: str | Cache | None) -> Cache:
    """A cache by name: None, "prefix" or "dual", with the default settings; a `Cache` is returned as it is.

    Raises:
        ValueError: anything else.
    """
    if isinstance(cache, Cache):
        return cache
    if (cache is None or isinstance(cache, str)) and cache in _BY_NAME:
        return _BY_NAME[cache]
    raise ValueError(
        f'cache must be None, "prefix", "dual", or a NoCache, PrefixCache or DualCache, got {cache!r}'
    )
