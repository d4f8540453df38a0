"""The back end in the memory of one process: for tests, simulations and one process.

It keeps every promise of a back end except survival.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import inf
from threading import Condition
from typing import TypeVar

from eplb.clock import Clock
from eplb.errors import StoreError
from telemetry.state.backend import (
    ALL,
    Backend,
    Change,
    Entry,
    JournalLine,
    Range,
    Table,
    Value,
    Write,
    in_key_order,
    order_of,
)

T = TypeVar("T")


class MemoryBackend(Backend):
    """Plain lists and dictionaries; one lock guards them all.

    Args:
        clock: seconds since the epoch.
    """

    kind = "memory"

    def __init__(self, deployment: str, *, clock: Clock | None = None) -> None:
        self.deployment = deployment
        self._clock = clock or time.time
        self._changed = Condition()
        self._is_closed = False
        self._version = 0
        self._events: list[JournalLine] = []
        self._last_event = 0
        self.lose()

    def lose(self) -> None:
        """Lose all contents but the numbers by which readers go on, as an emptied server does."""
        with self._changed:
            self._tables: dict[str, dict[str, Value]] = {}
            self._orders: dict[str, list[tuple[float, str]]] = {}  # (order, key) of ordered tables
            self._events.clear()
            self._log: dict[int, Entry] = {}  # cursor -> entry
            self._seen: set[tuple[str, int, int]] = set()
            self._pruned: Counter[tuple[str, int]] = Counter()  # (stream, source) -> entries
            self._last_cursor = 0

    def get(self, table: Table, key: object) -> Value | None:
        """Return a record, or None."""
        with self._use():
            return self._tables.get(table.name, {}).get(str(key))

    def scan(self, table: Table, part: Range = ALL) -> list[tuple[str, Value]]:
        """Return (key, record) by order and key."""
        with self._use():
            records = self._tables.get(table.name, {})
            if not table.is_ordered:
                return in_key_order(records.items())
            orders = self._orders.get(table.name, [])
            first = bisect_right(orders, part.after, key=_order)
            past = bisect_left(orders, part.before, key=_order)
            keys = [key for _, key in orders[first:past]]
            if part.newest_first:
                keys.reverse()
            return [(key, records[key]) for key in keys[: part.limit]]

    def decide(self, what: str, decision: Callable[[Change], T]) -> T:
        """Let a decision read and write under the lock."""
        with self._use():
            change = Change(self._clock(), self)
            result = decision(change)
            self._apply(change)
            return result

    def make(self, what: str, write: Callable[[Change], None]) -> list[int]:
        """Make writes that rest on nothing that was read."""
        with self._use():
            change = Change(self._clock(), self)
            write(change)
            return self._apply(change)

    def put(self, table: Table, key: object, value: Value) -> None:
        """Set a record by itself."""
        with self._use():
            self._set(table, str(key), Write(value, order_of(table, key)))

    def prune(self, table: Table, before: float) -> int:
        """Remove the records of an ordered table with a smaller order."""
        with self._use():
            orders = self._orders.get(table.name, [])
            old = orders[: bisect_left(orders, before, key=_order)]
            for _, key in old:
                self._set(table, key, Write(None, None))
            return len(old)

    def now(self) -> float:
        """Return seconds since the epoch."""
        return self._clock()

    def journal(
        self, *, after: int = 0, before: int | None = None, limit: int, newest_first: bool = False
    ) -> list[JournalLine]:
        """Return events past an id and below another."""
        with self._use():
            most = inf if before is None else before
            lines = [line for line in self._events if after < line.id < most]
            return (lines[::-1] if newest_first else lines)[:limit]

    def prune_journal(self, keep: int) -> int:
        """Remove all but the latest ``keep`` events."""
        with self._use():
            num_old = max(0, len(self._events) - keep)
            del self._events[:num_old]
            return num_old

    def append(self, entries: Sequence[Entry]) -> int:
        """Add records to the log."""
        with self._use():
            before = self._last_cursor
            for entry in entries:
                if entry[:3] not in self._seen:
                    self._seen.add(entry[:3])
                    self._last_cursor += 1
                    self._log[self._last_cursor] = entry
            return self._last_cursor - before

    def read(self, stream: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Return (cursor, record) of a stream past a cursor."""
        with self._use():
            log = self._log.items()
            records = [(at, e.record) for at, e in log if at > after and e.stream == stream]
            return records[:limit]

    def cursor_before(self, stream: str, latest: int) -> int:
        """Return the cursor past which a stream has so many records, the latest; 0: or fewer."""
        with self._use():
            newest_first = (at for at, e in reversed(self._log.items()) if e.stream == stream)
            return next(islice(newest_first, latest, None), 0)

    def read_between(
        self, since: float, before: float, after: int, limit: int
    ) -> list[tuple[int, bytes]]:
        """Return (cursor, record) of every stream, of times in [since, before)."""
        with self._use():
            log = self._log.items()
            records = [(at, e.record) for at, e in log if at > after and since <= e.time < before]
            return records[:limit]

    def counts(self, stream: str) -> dict[int, int]:
        """Return how many records of each source were added."""
        with self._use():
            counts = Counter(source for name, source, _ in self._seen if name == stream)
            counts.update({s: n for (name, s), n in self._pruned.items() if name == stream})
            return dict(sorted(counts.items()))

    def prune_log(self, before: float) -> int:
        """Remove the records of times below ``before``."""
        with self._use():
            old = [cursor for cursor, entry in self._log.items() if entry.time < before]
            for entry in map(self._log.pop, old):
                self._seen.remove(entry[:3])
                self._pruned[entry[:2]] += 1
            return len(old)

    def version(self) -> int:
        """Return a number that grows with each change that readers wait for."""
        with self._use():
            return self._version

    def wait(self, version: int, timeout_s: float) -> int:
        """Return the version once it differs, or after ``timeout_s``."""
        with self._use():
            self._changed.wait_for(lambda: self._is_closed or self._version != version, timeout_s)
            self._check_open()
            return self._version

    def close(self) -> None:
        """End every wait; the store cannot be used after."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _apply(self, change: Change) -> list[int]:
        for (table, key), write in change.writes.items():
            self._set(table, key, write)
        first = self._last_event + 1
        for kind, detail in change.events:
            self._last_event += 1
            self._events.append(JournalLine(self._last_event, change.time, kind, detail))
        if change.is_awaited:
            self._version += 1
            self._changed.notify_all()
        return list(range(first, self._last_event + 1))

    def _set(self, table: Table, key: str, write: Write) -> None:
        records = self._tables.setdefault(table.name, {})
        if table.is_ordered:
            orders = self._orders.setdefault(table.name, [])
            if key in records:
                orders[:] = [entry for entry in orders if entry[1] != key]
            if write.order is not None:
                insort(orders, (write.order, key))
        if write.value is None:
            records.pop(key, None)
        else:
            records[key] = write.value

    @contextmanager
    def _use(self) -> Iterator[None]:
        with self._changed:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"the memory store of {self.deployment!r} is closed")


def _order(entry: tuple[float, str]) -> float:
    return entry[0]
