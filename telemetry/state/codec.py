"""Frozen dataclasses as JSON text, in one form for every store.

Each field stands under its name, with a value of its declared type. A field whose default is None
is left out while it is None: it is not set. Nothing else is filled in: a record that lacks a field
is refused, because a default would pass for what its writer meant. So is a record with a field that
is unknown here: only another version of this program can have written it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from eplb.errors import EplbError, StoreError

T = TypeVar("T")
Text = str | bytes
_GREATEST_FLOAT, _GREATEST_INT = sys.float_info.max, 2**64 - 1


class _NotOfType(Exception):
    """A value that is not of its declared type; its text continues a sentence."""


def to_json(value: object) -> str:
    """Return JSON text, also of a frozen dataclass.

    Raises:
        StoreError: a value that JSON cannot hold.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_fields_of)
    except (TypeError, ValueError) as exc:
        raise StoreError(f"details cannot be stored: {exc}, expected JSON-ready values") from exc


def from_json(text: Text, what: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        StoreError: there is none.
    """
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise StoreError(f"{what} is not JSON: {exc}") from exc
    if not isinstance(record, dict):
        raise StoreError(f"{what} is {type(record).__name__}, expected a JSON object")
    return record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"found {name}, expected a number")


def as_stored(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return details as a store gives them back: what JSON makes of them, changed by nobody."""
    return from_json(to_json(dict(details)), "details")


def decode(cls: type[T], text: Text, what: str) -> T:
    """Make a dataclass of what ``to_json`` gave; ``what`` names the record in errors.

    Raises:
        StoreError: the text is not JSON, or a field is missing, unknown or not of its type.
    """
    return from_record(cls, from_json(text, what), what)


def known_fields(cls: Any, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that a dataclass has; a newer version may write others."""
    names = _names_of(cls)
    return {name: value for name, value in record.items() if name in names}


def from_record(cls: type[T], record: object, what: str) -> T:
    """Make a dataclass of the JSON-ready values of its fields.

    Raises:
        StoreError: as ``decode``.
    """
    try:
        made: T = _reader(cls)(record)  # type: ignore[arg-type]  # a class is hashable
    except _NotOfType as exc:
        raise StoreError(f"{what}{exc}") from exc
    except (EplbError, TypeError, ValueError, KeyError) as exc:  # the type refuses its own values
        raise StoreError(f"{what}: {exc}") from exc
    return made


def pack(meta: Mapping[str, Any], blob: bytes) -> bytes:
    """Return metadata as one line of JSON, and bytes after it."""
    return to_json(dict(meta)).encode() + b"\n" + blob


def unpack(record: bytes, what: str) -> tuple[dict[str, Any], bytes]:
    """Return metadata and bytes of what ``pack`` gave.

    Raises:
        StoreError: the first line is no JSON object.
    """
    line, _, blob = record.partition(b"\n")
    return from_json(line, what), blob


def _fields_of(value: Any) -> dict[str, Any]:
    """What json writes for a value that it does not know: a dataclass, or another mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is not JSON serializable")
    cls: Any = type(value)
    unset, items = _unset_by_default(cls), ((one, getattr(value, one)) for one in _names_of(cls))
    return {name: item for name, item in items if item is not None or name not in unset}


@cache
def _names_of(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


@cache
def _unset_by_default(cls: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(cls) if field.default is None)


@cache  # a store reads hundreds of records of one type in a turn
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return what checks a JSON-ready value of a declared type, and gives the value of the type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return lambda value: value
    if is_dataclass(hint):
        return _Record(hint)
    if origin is Literal:
        return _Scalar(hint, lambda value: value in args)
    if origin in (Union, UnionType):
        return _Choice(hint, tuple(_reader(arg) for arg in args))
    if origin in (tuple, list):
        item = _reader(args[0])
        return _Scalar(
            hint, lambda value: isinstance(value, (list, tuple)), lambda v: origin(map(item, v))
        )
    if origin is not None and issubclass(origin, Mapping):
        item = _reader(args[1])
        return _Scalar(
            hint,
            lambda value: isinstance(value, Mapping),
            lambda found: {key: item(value) for key, value in found.items()},
        )
    if hint is float:
        return _Scalar(hint, lambda v: type(v) in (int, float) and abs(v) <= _GREATEST_FLOAT)
    if hint is int:
        return _Scalar(hint, lambda v: type(v) is int and abs(v) <= _GREATEST_INT)
    return _Scalar(hint, lambda value: isinstance(value, NoneType if hint is None else hint))


@dataclass(frozen=True)
class _Scalar:
    hint: Any
    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any] | None = None

    def __call__(self, value: Any) -> Any:
        if not self.fits(value):
            raise _NotOfType(f" is {value!r}, expected {_shown(self.hint)}")
        return value if self.convert is None else self.convert(value)


@dataclass(frozen=True)
class _Choice:
    hint: Any
    readers: tuple[Callable[[Any], Any], ...]

    def __call__(self, value: Any) -> Any:
        for reader in self.readers:
            try:
                return reader(value)
            except _NotOfType:
                continue
        raise _NotOfType(f" is {value!r}, expected {_shown(self.hint)}")


class _Record:
    def __init__(self, cls: Any) -> None:
        hints = get_type_hints(cls)
        self._cls, self._unset = cls, _unset_by_default(cls)
        self._readers = {field.name: _reader(hints[field.name]) for field in fields(cls)}

    def __call__(self, record: Any) -> Any:
        if isinstance(record, self._cls):  # packed beside the rest, and unpacked before
            return record
        readers = self._readers
        if not isinstance(record, Mapping):
            raise _NotOfType(f" is {record!r}, expected an object of {', '.join(readers)}")
        if missing := [n for n in readers if n not in record and n not in self._unset]:
            raise _NotOfType(f" lacks {', '.join(missing)}, expected {', '.join(readers)}")
        if unknown := sorted(record.keys() - readers.keys()):
            raise _NotOfType(
                f" has the unknown fields {', '.join(unknown)}: another version of this program "
                "has written it"
            )
        values = {}
        for name, value in record.items():
            try:
                values[name] = readers[name](value)
            except _NotOfType as exc:
                raise _NotOfType(f": {name}{exc}") from None
        return self._cls(**values)


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
