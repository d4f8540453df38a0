"""Stored records that cannot be read: skipped, counted once each, and named once in the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from threading import Lock
from typing import TypeVar

from eplb.errors import StoreError
from telemetry.load.sample_codec import UnknownVersion

_MOST_NAMES = 100_000  # unreadable records that are remembered by name

Name = TypeVar("Name", bound=Hashable)
Raw = TypeVar("Raw")
Read = TypeVar("Read")
log = logging.getLogger(__name__)


class Unreadable:
    """Reads records, and counts those of one deployment that it could not."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # by kind and reason
        self._counted: set[Hashable] = set()  # what names the records
        self._passed: dict[Hashable, tuple[int, int]] = {}  # (asked, read up to) of a position

    def counts(self) -> dict[tuple[str, str], int]:
        """Return how many records could not be read, by kind and reason."""
        with self._lock:
            return dict(self._counts)

    def readable(
        self, records: Iterable[tuple[Name, Raw]], read: Callable[[Raw], Read], kind: str
    ) -> list[tuple[Name, Read]]:
        """Return the name and the value of each record that can be read."""
        values = []
        for name, record in records:
            try:
                values.append((name, read(record)))
            except StoreError as exc:
                self.count(kind, name, exc)
        return values

    def count(self, kind: str, name: Hashable, exc: StoreError) -> None:
        """Count a record that cannot be read, unless it was counted before."""
        with self._lock:
            if (kind, name) in self._counted:
                return
            if len(self._counted) >= _MOST_NAMES:
                self._counted.clear()
            self._counted.add((kind, name))
            self._counts[kind, "version" if isinstance(exc, UnknownVersion) else "damaged"] += 1
        log.warning("%s %r of the store is skipped: %s", kind, name, exc)

    def passed(self, position: Hashable | None, after: int) -> int:
        """Return from where to read for a cursor."""
        with self._lock:
            asked, passed = self._passed.get(position, (after, after))
        return passed if asked == after else after

    def pass_by(self, position: Hashable, after: int, start: int) -> None:
        """Note that nothing can be read between two cursors."""
        with self._lock:
            self._passed[position] = (after, start)
