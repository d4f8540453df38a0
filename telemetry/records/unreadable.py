"""Unreadable records: skipped and counted, by every store alike.

A reader skips a corrupted record, and one that a newer program wrote. Both are counted once,
however often they are read; past 100,000 of them, one that is read again may count again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from threading import Lock
from typing import TypeVar

from eplb.errors import StoreError
from telemetry.records.envelope import UnknownVersion

Value = TypeVar("Value")
Fetch = Callable[[int, int], list[tuple[int, bytes]]]  # (past this cursor, limit) -> records

_MOST_NAMES = 100_000  # that are remembered


class Unreadable:
    """Unpacks records and counts those that it could not."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._counted: set[Hashable] = set()  # what names the records
        self._passed: dict[Hashable, tuple[int, int]] = {}

    def counts(self) -> dict[str, int]:
        """Return how many records could not be read, by reason."""
        with self._lock:
            return dict(self._counts)

    def readable(
        self, records: Iterable[tuple[int, bytes]], unpack: Callable[[bytes], Value], kind: str
    ) -> list[tuple[int, Value]]:
        """Return (cursor, value) of each record that can be read."""
        found = []
        for cursor, record in records:
            try:
                found.append((cursor, unpack(record)))
            except StoreError as exc:
                reason = "version" if isinstance(exc, UnknownVersion) else "damaged"
                self._count((kind, cursor), reason)
        return found

    def _count(self, name: Hashable, reason: str) -> None:
        with self._lock:
            if name in self._counted:
                return
            if len(self._counted) >= _MOST_NAMES:
                self._counted.clear()
            self._counted.add(name)
            self._counts[reason] += 1

    def page(
        self,
        fetch: Fetch,
        unpack: Callable[[bytes], Value],
        *,
        after: int,
        limit: int,
        of: Hashable | None,
    ) -> list[tuple[int, Value]]:
        """Return up to ``limit`` readable samples past a cursor; none only where no more follow.

        A reader's cursor stays where it found nothing. How far it has read from there is kept, one
        position for each ``of``, so that an unreadable tail is not read every time; None: of a read
        that is not repeated nothing is kept.
        """
        with self._lock:
            asked, passed = self._passed.get(of, (after, after))
        start = passed if asked == after else after
        while records := fetch(start, limit):
            start = records[-1][0]
            if found := self.readable(records, unpack, "sample"):
                return found
        if of is not None:
            with self._lock:
                self._passed[of] = (after, start)
        return []
