"""The back end in the memory of one process: for tests, simulations and one process.

It keeps every promise of a back end except survival.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, RLock

from eplb.clock import Clock
from eplb.errors import StoreError
from telemetry.state.sqlite import SqliteBackend
from telemetry.state.sqlite_file import make_tables, transaction
from telemetry.state.unreadable import Unreadable


class MemoryBackend(SqliteBackend):
    """The tables of SQLite in memory, over one connection behind one lock.

    Args:
        clock: seconds since the epoch.
    """

    kind = "memory"

    def __init__(self, deployment: str, *, clock: Clock | None = None) -> None:
        self.deployment, self.unreadable = deployment, Unreadable()
        self._clock = clock or time.time
        self._changed, self._lock, self._is_closed = Condition(), RLock(), False
        self._database = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=256
        )
        make_tables(self._database, deployment, is_new=True)

    @property
    def num_writes(self) -> int:
        """Number of rows that were written so far."""
        return self._database.total_changes

    def lose(self) -> None:
        """Lose all contents but the numbers by which readers go on, as an emptied server does."""
        with self._write() as connection:
            for table in ("entry", "event", "sample", "pruned"):
                connection.execute(f"DELETE FROM {table}")

    def why_full(self) -> str:
        """There is no disk that could be full."""
        return ""

    def make_room(self) -> bool:
        """There is no disk that could be full."""
        return False

    def close(self) -> None:
        """End every wait; the store cannot be used after."""
        with self._lock:
            self._is_closed = True
            self._database.close()
        with self._changed:
            self._changed.notify_all()

    def check_open(self) -> None:
        """Refuse a use after ``close``.

        Raises:
            StoreError: it is closed.
        """
        if self._is_closed:
            raise StoreError(f"the memory store of {self.deployment!r} is closed")

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self.check_open()
            try:
                yield self._database
            except sqlite3.Error as exc:
                text = f"the memory store of {self.deployment!r} refused a change: {exc}"
                raise StoreError(text) from exc

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._read() as connection, transaction(connection):
            yield connection
