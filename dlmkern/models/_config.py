"""Checks of configuration fields; their errors name the field."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig


def check_supported(fields: Mapping[str, Any], only_supported: Mapping[str, Any]) -> None:
    """Fields with a single supported value have it, or are left out."""
    for name, supported in only_supported.items():
        if fields.get(name, supported) != supported:
            raise ValueError(
                f"config field {name} = {fields[name]!r} is not supported (only {supported!r} is)"
            )


def check_positive_integers(config: PretrainedConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config field {name} = {value!r} must be a positive integer")


def check_positive_numbers(config: PretrainedConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"config field {name} = {value!r} must be a positive number")


def check_booleans(config: PretrainedConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"config field {name} = {value!r} must be true or false")


def check_token_ids(config: PretrainedConfig, stop: int, *names: str) -> None:
    """Each is None or in `[0, stop)`."""
    for name in names:
        value = getattr(config, name)
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_int and 0 <= value < stop):
            raise ValueError(f"config field {name} = {value!r} must be a token id in [0, {stop})")


def check_heads(config: PretrainedConfig, width: str, heads: str, kv_heads: str) -> None:
    """The fields of these names allow heads of an even size, and as many of them to each key/value head."""
    n, n_heads, n_kv_heads = (getattr(config, name) for name in (width, heads, kv_heads))
    if n % (2 * n_heads):
        raise ValueError(f"config field {width} = {n} must be a multiple of twice {heads} = {n_heads}")
    if n_heads % n_kv_heads:
        raise ValueError(f"config field {kv_heads} = {n_kv_heads} must divide {heads} = {n_heads}")


def architecture(
    config: PretrainedConfig, config_class: type[PretrainedConfig], only_supported: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that `config_class` takes, and those with a single supported value."""
    fields = config.to_dict()
    names = [*only_supported, *inspect.signature(config_class.__init__).parameters]
    return {name: fields[name] for name in names if name in fields}
