"""What the parts of the state store have in common: a back end, and records of one type in it.

Records   a table of them, by key
Single    one of them, in HEAD
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

from eplb.migration.recovery import Recovery
from telemetry.state.backend import (
    ALL,
    HEAD,
    NEWEST,
    Backend,
    Change,
    Range,
    Reader,
    Table,
    Value,
    number_in,
    text_of,
)
from telemetry.state.codec import decode, to_json

T = TypeVar("T")

COMMITTED = "committed"  # generation and hash of the placement that serves
OPEN_PLAN = "open_plan"  # plan id and digest of the open migration; "": none is open
NEWEST_PLAN = "newest_plan"  # id of the plan that was published last
STARTED = "started"  # number of the group of all ranks that started last


class Part:
    """A part of the state store, over one back end."""

    backend: Backend


# The same text is read again and again, of settings and leases above all.
decode_again = lru_cache(maxsize=64)(decode)


@dataclass(frozen=True)
class Records(Generic[T]):
    """A table of frozen dataclasses of one type.

    What reads one by its key raises StoreError if it cannot; of many, it skips and counts it.
    """

    cls: type[T]
    table: Table
    what: str  # names a record in errors, before its key

    def of(self, *names: object) -> Records[T]:
        """Return one table among many of this name."""
        return replace(self, table=self.table.of(*names))

    def get(self, reader: Reader, key: object) -> T | None:
        """Return a record, or None."""
        text = reader.get(self.table, key)
        return None if text is None else self._decoded(key, text)

    def scan(self, reader: Reader, within: Range = ALL) -> list[T]:
        """Return records by order and key."""
        return self.readable(reader, reader.scan(self.table, within))

    def readable(self, reader: Reader, records: Sequence[tuple[str, Value]]) -> list[T]:
        """Return those of (key, record) that can be read; the others are skipped and counted."""
        named = [(key, (key, text)) for key, text in records]
        readable = reader.unreadable.readable(named, lambda r: self._decoded(*r), self.table.name)
        return [record for _, record in readable]

    def newest(self, reader: Reader) -> T | None:
        """Return the record of the greatest order, or None where there is none."""
        records = reader.scan(self.table, NEWEST)
        return self._decoded(*records[0]) if records else None

    def put(self, change: Change, key: object, record: T, order: float | None = None) -> None:
        """Set a record."""
        change.put(self.table, key, to_json(record), order)

    def _decoded(self, key: object, text: Value) -> T:
        return decode(self.cls, text, f"{self.what} {key}")


@dataclass(frozen=True)
class Single(Generic[T]):
    """A frozen dataclass in HEAD. What reads it raises StoreError if it cannot."""

    cls: type[T]
    key: str
    what: str  # names it in errors

    def get(self, reader: Reader) -> T | None:
        """Return it, or None."""
        text = reader.get(HEAD, self.key)
        return decode_again(self.cls, text, self.what) if text else None  # type: ignore[arg-type]

    def put(self, change: Change, record: T) -> None:
        """Set it."""
        change.put(HEAD, self.key, to_json(record))

    def clear(self, change: Change) -> None:
        """Set that there is none."""
        change.put(HEAD, self.key, "")


RECOVERY = Single(Recovery, "recovery", "the record of a recovery")


def committed_in(reader: Reader) -> tuple[int, str] | None:
    """Return generation and hash of the committed placement."""
    return _number_and_hash(reader, COMMITTED)


def open_plan_in(reader: Reader) -> tuple[int, str] | None:
    """Return plan id and digest of the open migration."""
    return _number_and_hash(reader, OPEN_PLAN)


def epoch_in(reader: Reader) -> int:
    """Return the number of the group that started or was recorded last; 0 before the first."""
    latest = RECOVERY.get(reader)
    started = number_in(reader.get(HEAD, STARTED), "the number of the group that started last")
    return started if latest is None else max(latest.membership, started)


def _number_and_hash(reader: Reader, name: str) -> tuple[int, str] | None:
    value = reader.get(HEAD, name)
    if not value:
        return None
    what = f"the record {name!r} of the store"
    number, _, digest = text_of(value, what).partition(" ")
    return number_in(number, what), digest
