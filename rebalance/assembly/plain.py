"""Dataclasses of a configuration as JSON-ready values, and back."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.migration.serialisation import (
    model_from_dict,
    model_to_dict,
    topology_from_dict,
    topology_to_dict,
)


def to_plain(value: Any) -> Any:
    """Give a value as JSON has it: bytes as hexadecimal digits, paths as text, tuples as lists."""
    if isinstance(value, ModelShape):
        return model_to_dict(value)
    if isinstance(value, Topology):
        return topology_to_dict(value)
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple | list):
        return [to_plain(one) for one in value]
    return value


def from_plain(kind: Any, value: Any) -> Any:
    """Make a ``kind`` of what ``to_plain`` gave.

    Args:
        kind: a dataclass, or the annotation of one of its fields.

    Raises:
        ConfigError: the value is not of that kind.
    """
    try:
        return _build(kind, value)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as exc:  # not shown: it may hold keys
        expected = getattr(kind, "__name__", kind)
        raise ConfigError(f"{type(exc).__name__} in the values of a {expected}") from None


def _build(kind: Any, value: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        chosen = [one for one in args if one is not type(None)]
        return None if value is None else _build(chosen[0], value)
    if origin is tuple:
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(_build(*pair) for pair in zip(kinds, value, strict=True))
    if origin is Literal:
        if value not in args:
            raise ValueError(value)
        return value
    if kind is ModelShape:
        return model_from_dict(value)
    if kind is Topology:
        return topology_from_dict(value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _build(hints[name], one) for name, one in value.items()})  # type: ignore[operator]
    if kind is bytes:
        return bytes.fromhex(value)
    if kind is float and isinstance(value, int):
        return float(value)
    if kind is Path:
        return Path(value)
    if kind is torch.dtype:
        value = getattr(torch, value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(value)
    return value
