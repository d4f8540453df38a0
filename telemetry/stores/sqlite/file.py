"""One SQLite file, open for reading and for writing, shared by the threads of one process."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from eplb.errors import StoreError
from telemetry.stores.sqlite.errors import translated
from telemetry.stores.sqlite.schema import prepare


class SqliteFile:
    """Two connections, each behind a lock.

    Two, because a thread that waits for its turn to write must not make the readers of its
    process wait: in WAL a reader never waits for a writer.
    """

    def __init__(self, path: Path, deployment: str, busy_timeout_s: float) -> None:
        # Absolute: the process may change its folder, and ":memory:" is a file name like any other.
        self.path = path.absolute()
        self._busy_timeout_s = busy_timeout_s
        self._process = os.getpid()
        self._is_closed = False
        self._reading, self._writing = Lock(), Lock()
        with translated(self.path, busy_timeout_s):
            self._writer = self._connect()
            try:
                prepare(self._writer, self.path, deployment, busy_timeout_s)
                self._reader = self._connect()
                # Opens the log here too: it is there for as long as a connection has it open.
                self._reader.execute("SELECT count(*) FROM deployment").fetchone()
                self._identities = self._found_identities()
                self._check_held()
            except BaseException:
                self._writer.close()
                raise

    @property
    def beside(self) -> tuple[Path, Path]:
        """SQLite's write-ahead log, and the memory in which processes share its index and locks."""
        name = self.path.name
        return self.path.with_name(f"{name}-wal"), self.path.with_name(f"{name}-shm")

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Lend the reading connection. Each statement sees one state of the store."""
        self._check_process()
        with self._reading, translated(self.path, self._busy_timeout_s):
            self._check_open()
            self._check_in_place()
            yield self._reader

    def rows(self, query: str, *values: Any) -> list[Any]:
        """Return all rows of a query."""
        with self.read() as connection:
            return connection.execute(query, values).fetchall()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Lend the writing connection in a transaction, which is committed at the end.

        The write lock is taken at the start, so what is read inside cannot change before the
        commit. An exception inside undoes everything.
        """
        self._check_process()
        with self._writing, translated(self.path, self._busy_timeout_s):
            self._check_open()
            self._check_in_place()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # After some errors, a full disk among them, SQLite has rolled back by itself.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close both connections, once the threads at work are through."""
        self._check_process()
        with self._writing, self._reading, translated(self.path, self._busy_timeout_s):
            self._is_closed = True
            self._reader.close()
            self._writer.close()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
        )

    def _found_identities(self) -> dict[Path, tuple[int, int] | None]:
        # stat only: to open and close the file here would drop SQLite's own locks on it, since
        # POSIX locks end with any close by the process (https://www.sqlite.org/howtocorrupt.html).
        return {path: _identity(path) for path in (self.path, *self.beside)}

    def _check_in_place(self) -> None:
        """Reject a file, a log or locks that other processes do not share.

        Two processes with two logs each see their own changes alone, the kill switch among them.
        """
        found = self._found_identities()
        for path, expected in self._identities.items():
            if found[path] != expected:
                raise StoreError(
                    f"store {self.path}: {path.name} was removed or replaced since it was opened, "
                    "expected the same file: what is written now would be lost. End every process "
                    "that uses the store, then start again"
                )

    def _check_held(self) -> None:
        """Check that the file on disk is the one that this process has open."""
        held = {_identity(entry) for entry in Path("/proc/self/fd").glob("*")}
        for path in self.beside if held else ():
            if self._identities[path] not in held:
                raise StoreError(
                    f"store {self.path}: {path.name} was removed while it was opened, expected it "
                    "to stay"
                )

    def _check_process(self) -> None:
        # An SQLite connection carried over a fork corrupts the file; so may a lock held then.
        if os.getpid() != self._process:
            raise StoreError(
                f"store {self.path} was opened in process {self._process} and is used in process "
                f"{os.getpid()}, expected each process to open a store of its own"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"store {self.path} is closed, expected an open one")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:  # it is not there, or a descriptor that was closed meanwhile
        return None
    return found.st_dev, found.st_ino


def one(connection: sqlite3.Connection, query: str, *values: Any) -> tuple[Any, ...] | None:
    """Return the first row of a query, or None."""
    row: tuple[Any, ...] | None = connection.execute(query, values).fetchone()
    return row
