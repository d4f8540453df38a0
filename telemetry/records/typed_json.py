"""JSON records of frozen dataclasses: a version, every field, each of its declared type.

Nothing is filled in: a record that lacks a field is refused, because a default would pass for what
its writer meant. A codec that still reads an older version converts the record first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from eplb.errors import StoreError

VERSION = "version"

T = TypeVar("T")


def to_json(value: object) -> str:
    """Return JSON text.

    Raises:
        StoreError: a value that JSON cannot hold.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise StoreError(f"details cannot be stored: {exc}, expected JSON-ready values") from exc


def from_json(text: str | bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        StoreError: there is none.
    """
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise StoreError(f"{what} is not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise StoreError(f"{what} is {type(found).__name__}, expected a JSON object")
    return found


def version_of(record: dict[str, Any], what: str, known: Sequence[int]) -> int:
    """Remove a record's version and return it; a record without one is of version 1.

    Raises:
        StoreError: it is not one of those ``known``.
    """
    version = record.pop(VERSION, 1)
    if version not in known or isinstance(version, bool):
        expected = ", ".join(map(str, known))
        raise StoreError(
            f"{what} is of version {version!r}, expected one of: {expected}; it was written by "
            "another version of this program"
        )
    return int(version)


def from_record(cls: type[T], record: Mapping[str, Any], what: str) -> T:
    """Make a dataclass of a record that has each of its fields and no other.

    Raises:
        StoreError: a field is missing, unknown, or not of its type.
    """
    hints = _hints_of(cls)  # type: ignore[arg-type]  # a class is hashable
    names = list(hints)
    if missing := [name for name in names if name not in record]:
        raise StoreError(f"{what} lacks {', '.join(missing)}, expected {', '.join(names)}")
    if unknown := sorted(record.keys() - set(names)):
        raise StoreError(f"{what} has the unknown fields {', '.join(unknown)}")
    for name in names:
        if not is_of(record[name], hints[name]):
            raise StoreError(f"{what}: {name} is {record[name]!r}, expected {_shown(hints[name])}")
    return cls(**record)


@cache  # a store reads hundreds of records of one type in a turn
def _hints_of(cls: type) -> dict[str, Any]:
    """The declared type of each field, in the order of the fields."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def is_of(value: object, hint: Any) -> bool:
    """Return whether a value from JSON is of a declared type; a whole number may be a float."""
    origin = get_origin(hint)
    if origin is Union or type(hint).__name__ == "UnionType":
        return any(is_of(value, one) for one in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    expected = origin or hint
    return isinstance(value, (int, float) if expected is float else expected)


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
