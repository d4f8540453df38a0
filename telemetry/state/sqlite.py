"""The embedded back end: one SQLite file that every process of a host shares.

What was acknowledged survives the death of any process, ``kill -9`` included. Power loss may cost
the last changes before it, never the file: it opens in an earlier state. The file must be on a
local disk, because SQLite's write-ahead log does not work over a network file system
(https://www.sqlite.org/wal.html).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Condition
from typing import Any, TypeVar

from eplb.clock import Clock
from eplb.errors import StoreError
from telemetry.state.backend import (
    ALL,
    Backend,
    Change,
    Entry,
    JournalLine,
    Range,
    Reader,
    Table,
    Value,
    in_key_order,
)
from telemetry.state.sqlite_file import SqliteFile, is_full
from telemetry.state.unreadable import Unreadable

_POLL_S = 0.02
_PROBED = 1000  # characters that a change takes in a test for room
_PRUNED_AT_ONCE = 500  # records of the log; a few milliseconds
_MAX_ID = 2**63 - 1  # largest id of a row in SQLite

T = TypeVar("T")

# Each takes the deployment first.
_GET = "SELECT value FROM entry WHERE deployment = ? AND tab = ? AND key = ?"
_ALL = "SELECT key, value FROM entry WHERE deployment = ? AND tab = ?"
_RANGE = (
    "SELECT key, value FROM entry WHERE deployment = ? AND tab = ? AND place IS NOT NULL "
    "AND place > ? AND place < ? ORDER BY place {0}, key {0} LIMIT ?"
)
_PUT = (
    "INSERT INTO entry VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "value = excluded.value, place = excluded.place"
)
_DELETE = "DELETE FROM entry WHERE deployment = ? AND tab = ? AND key = ?"
_PRUNE = "DELETE FROM entry WHERE deployment = ? AND tab = ? AND place < ?"
_JOURNAL = (
    "SELECT id, time, kind, detail FROM event WHERE deployment = ? AND id > ? AND id < ? "
    "ORDER BY id {} LIMIT ?"
)
_PRUNE_JOURNAL = (
    "DELETE FROM event WHERE deployment = :deployment AND id <= ("
    "SELECT id FROM event WHERE deployment = :deployment ORDER BY id DESC LIMIT 1 OFFSET :keep)"
)
_APPEND = (
    "INSERT INTO sample (deployment, stream, source, sequence, time, record) "
    "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (deployment, stream, source, sequence) DO NOTHING"
)
_READ = (
    "SELECT cursor, record FROM sample WHERE deployment = ? AND stream = ? AND cursor > ? "
    "ORDER BY cursor LIMIT ?"
)
_CURSOR_BEFORE = (
    "SELECT cursor FROM sample WHERE deployment = ? AND stream = ? "
    "ORDER BY cursor DESC LIMIT 1 OFFSET ?"
)
# The index is named because SQLite would rather walk through all samples in the order asked for.
_READ_BETWEEN = (
    "SELECT cursor, record FROM sample WHERE cursor IN ("
    "SELECT cursor FROM sample INDEXED BY sample_in_time WHERE deployment = ? "
    "AND time >= ? AND time < ? AND cursor > ? ORDER BY cursor LIMIT ?) ORDER BY cursor"
)
_COUNTS = (
    "SELECT source, sum(num_samples) FROM ("
    "SELECT source, count(*) AS num_samples FROM sample WHERE deployment = ? AND stream = ? "
    "GROUP BY source UNION ALL "
    "SELECT source, num_samples FROM pruned WHERE deployment = ? AND stream = ?"
    ") GROUP BY source ORDER BY source"
)
_OLDEST = (
    "SELECT cursor FROM sample INDEXED BY sample_in_time "
    "WHERE deployment = ? AND time < ? ORDER BY time, cursor LIMIT ?"
)
_COUNT_PRUNED = (
    "INSERT INTO pruned SELECT deployment, stream, source, count(*) FROM sample "
    f"WHERE cursor IN ({_OLDEST}) GROUP BY stream, source "
    "ON CONFLICT DO UPDATE SET num_samples = num_samples + excluded.num_samples"
)
_PRUNE_LOG = f"DELETE FROM sample WHERE cursor IN ({_OLDEST})"


class SqliteBackend(Backend):
    """One deployment in one SQLite file, which may hold other deployments too.

    Threads may share it; each process opens its own, after any fork.

    Args:
        clock: seconds since the epoch.
        low_bytes: room on the disk with more than which no change is refused.

    Raises:
        StoreError: the file cannot be opened and written, is damaged or another program's, or was
            written by another version.
    """

    kind = "sqlite"

    def __init__(
        self,
        path: str | Path,
        deployment: str,
        *,
        busy_timeout_s: float = 10.0,
        clock: Clock | None = None,
        low_bytes: float = 64e6,
    ) -> None:
        self.deployment, self.unreadable = deployment, Unreadable()
        self._clock, self._low_bytes = clock or time.time, low_bytes
        self._file = SqliteFile(Path(path), deployment, busy_timeout_s)
        self._changed = Condition()  # notified by this object's own changes

    def get(self, table: Table, key: object) -> Value | None:
        """Return a record, or None."""
        with self._read() as connection:
            return _Tables(connection, self).get(table, key)

    def scan(self, table: Table, within: Range = ALL) -> list[tuple[str, Value]]:
        """Return (key, record) by order and key."""
        with self._read() as connection:
            return _Tables(connection, self).scan(table, within)

    def decide(self, what: str, decision: Callable[[Change], T]) -> T:
        """Let a decision read and write in a transaction, which takes the write lock first."""
        result, _ = self._written(decision)
        return result

    def make(self, what: str, write: Callable[[Change], None]) -> list[int]:
        """Make writes that rest on nothing that was read."""
        _, ids = self._written(write)
        return ids

    def prune(self, table: Table, before: float) -> int:
        """Remove the records of an ordered table with a smaller order."""
        with self._write() as connection:
            return connection.execute(_PRUNE, (self.deployment, table.name, before)).rowcount

    def now(self) -> float:
        """Return seconds since the epoch."""
        return self._clock()

    def journal(
        self, *, after: int = 0, before: int | None = None, limit: int, newest_first: bool = False
    ) -> list[JournalLine]:
        """Return events past an id and below another."""
        query = _JOURNAL.format("DESC" if newest_first else "ASC")
        below = _MAX_ID if before is None else before
        return [JournalLine(*row) for row in self._rows(query, after, below, limit)]

    def prune_journal(self, keep: int) -> int:
        """Remove all but the latest ``keep`` events."""
        with self._write() as connection:
            old = {"deployment": self.deployment, "keep": keep}
            return connection.execute(_PRUNE_JOURNAL, old).rowcount

    def append(self, entries: Sequence[Entry]) -> int:
        """Add records to the log."""
        rows = [(self.deployment, *entry) for entry in entries]
        with self._write() as connection:
            return max(0, connection.executemany(_APPEND, rows).rowcount)  # -1: no entries

    def read(self, stream: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Return (cursor, record) of a stream past a cursor."""
        return self._rows(_READ, stream, after, limit)

    def cursor_before(self, stream: str, latest: int) -> int:
        """Return the cursor past which a stream has so many records, the latest; 0: or fewer."""
        rows = self._rows(_CURSOR_BEFORE, stream, latest)
        return int(rows[0][0]) if rows else 0

    def read_between(
        self, since: float, before: float, after: int, limit: int
    ) -> list[tuple[int, bytes]]:
        """Return (cursor, record) of every stream, of times in [since, before)."""
        return self._rows(_READ_BETWEEN, since, before, after, limit)

    def counts(self, stream: str) -> dict[int, int]:
        """Return how many records of each source were added."""
        return dict(self._rows(_COUNTS, stream, self.deployment, stream))

    def prune_log(self, before: float) -> int:
        """Remove the records of times below ``before``.

        In small transactions: ranks that write meanwhile wait for one of them at most. The file
        keeps its size; the room is used again.
        """
        old, num_pruned = (self.deployment, before, _PRUNED_AT_ONCE), 0
        while True:
            with self._write() as connection:
                connection.execute(_COUNT_PRUNED, old)
                num_new = connection.execute(_PRUNE_LOG, old).rowcount
            num_pruned += num_new
            if num_new < _PRUNED_AT_ONCE:
                return num_pruned

    def why_full(self) -> str:
        """Return why the disk has no room for changes; "": it has some, or plenty."""
        if self._file.free_bytes() >= self._low_bytes:
            return ""
        try:
            with self._write() as connection:  # what it writes, nobody sees
                probe = (self.deployment, "probe", "")
                connection.execute(_PUT, (*probe, None, "x" * _PROBED))
                connection.execute(_DELETE, probe)
        except StoreError as exc:
            if is_full(exc.__cause__):
                return str(exc)  # another error is told by those who write
        return ""

    def make_room(self) -> bool:
        """Give a full disk the room that is reserved beside the file."""
        return self._file.make_room()

    def version(self) -> int:
        """Return a number that grows with each change that readers wait for."""
        ((version,),) = self._rows("SELECT version FROM deployment WHERE name = ?")
        return int(version)

    def wait(self, version: int, timeout_s: float) -> int:
        """Return the version once it differs, or after ``timeout_s``.

        SQLite sends no notification between processes, so this polls every 20 ms, at about 10 us
        each.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (current := self.version()) == version:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(_POLL_S, left_s))
        return current

    def close(self) -> None:
        """Close the file and end every wait; the store cannot be used after."""
        self._file.close()
        with self._changed:
            self._changed.notify_all()

    def _written(self, decision: Callable[[Change], T]) -> tuple[T, list[int]]:
        with self._write() as connection:
            change = Change(self._clock(), _Tables(connection, self))
            result = decision(change)
            ids = self._apply(connection, change)
        if change.is_awaited:
            with self._changed:
                self._changed.notify_all()
        return result, ids

    def _apply(self, connection: sqlite3.Connection, change: Change) -> list[int]:
        """Make the writes of a change; whoever sees its version sees them too."""
        for (table, key), write in change.writes.items():
            if write.value is None:
                connection.execute(_DELETE, (self.deployment, table.name, key))
            else:
                row = (self.deployment, table.name, key, write.order, write.value)
                connection.execute(_PUT, row)
        ids = []
        for kind, detail in change.events:
            added = connection.execute(
                "INSERT INTO event (deployment, time, kind, detail) VALUES (?, ?, ?, ?)",
                (self.deployment, change.time, kind, detail),
            )
            assert added.lastrowid is not None, "an INSERT has a rowid"
            ids.append(added.lastrowid)
        if change.is_awaited:
            connection.execute(
                "UPDATE deployment SET version = version + 1 WHERE name = ?", (self.deployment,)
            )
        return ids

    def _read(self) -> AbstractContextManager[sqlite3.Connection]:
        return self._file.read()

    def _write(self) -> AbstractContextManager[sqlite3.Connection]:
        return self._file.write()

    def _rows(self, query: str, *values: Any) -> list[Any]:
        """All rows of a query whose first parameter is the deployment."""
        with self._read() as connection:
            return connection.execute(query, (self.deployment, *values)).fetchall()


class _Tables(Reader):
    """The tables of a deployment, over one connection."""

    def __init__(self, connection: sqlite3.Connection, backend: Backend) -> None:
        self._connection, self._deployment = connection, backend.deployment
        self.unreadable = backend.unreadable

    def get(self, table: Table, key: object) -> Value | None:
        row = self._connection.execute(_GET, (self._deployment, table.name, str(key))).fetchone()
        return None if row is None else row[0]

    def scan(self, table: Table, within: Range = ALL) -> list[tuple[str, Value]]:
        own: tuple[Any, ...] = (self._deployment, table.name)
        if not table.is_ordered:
            return in_key_order(self._connection.execute(_ALL, own).fetchall())
        query = _RANGE.format("DESC" if within.newest_first else "ASC")
        most = -1 if within.limit is None else within.limit
        return self._connection.execute(query, (*own, within.after, within.before, most)).fetchall()
