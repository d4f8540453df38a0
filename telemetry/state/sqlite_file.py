"""One SQLite file: its tables, its two connections, and what its errors mean.

One file may hold several deployments. Blobs are the last columns, so that a person can read the
rest: ``sqlite3 store.sqlite 'select * from event'``.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock

from eplb.errors import StoreError
from telemetry.written_files import private

APPLICATION_ID = 0x45504C42  # "EPLB": distinguishes these files from those of other programs
SCHEMA_VERSION = 9  # counts up with each change of the tables below
KEPT = "what was acknowledged before is kept"
RESERVE_BYTES = 2**20  # disk space kept so that a pause can be written on a full disk
_NEW = 0  # version of a file without tables
_RETRY_S = 0.01

# Cursors and ids come from AUTOINCREMENT: they are never given out again, even after a prune. One
# writer at a time commits, so their order is the order in which changes became visible.
_TABLES = """
CREATE TABLE deployment (name TEXT PRIMARY KEY, version INTEGER NOT NULL);
CREATE TABLE entry (
    deployment TEXT NOT NULL, tab TEXT NOT NULL, key TEXT NOT NULL, place REAL, value NOT NULL,
    PRIMARY KEY (deployment, tab, key));
CREATE INDEX entry_in_order ON entry (deployment, tab, place, key) WHERE place IS NOT NULL;
CREATE TABLE event (
    id INTEGER PRIMARY KEY AUTOINCREMENT, deployment TEXT NOT NULL, time REAL NOT NULL,
    kind TEXT NOT NULL, detail TEXT NOT NULL);
CREATE INDEX event_of_deployment ON event (deployment, id);
CREATE TABLE sample (
    cursor INTEGER PRIMARY KEY AUTOINCREMENT, deployment TEXT NOT NULL, stream TEXT NOT NULL,
    source INTEGER NOT NULL, sequence INTEGER NOT NULL, time REAL NOT NULL, record BLOB NOT NULL,
    UNIQUE (deployment, stream, source, sequence));
CREATE INDEX sample_of_stream ON sample (deployment, stream, cursor);
CREATE INDEX sample_in_time ON sample (deployment, time);
CREATE TABLE pruned (
    deployment TEXT NOT NULL, stream TEXT NOT NULL, source INTEGER NOT NULL,
    num_samples INTEGER NOT NULL, PRIMARY KEY (deployment, stream, source));
"""


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
        # A new file is for this user alone. One that is there is left to SQLite: to close it here
        # would drop the locks of this process on it. SQLite tells why it cannot be made.
        with suppress(OSError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
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
        self.keep_room()

    def free_bytes(self) -> int:
        """Return the room on the disk of the file.

        Raises:
            StoreError: its folder is gone.
        """
        try:
            return shutil.disk_usage(self.path.parent).free
        except OSError as exc:
            raise StoreError(f"store {self.path}: its disk cannot be asked: {exc}") from exc

    def make_room(self) -> bool:
        """Give the disk the room that is reserved; False: it was given already."""
        try:
            self._reserve.unlink()
        except OSError:
            return False
        return True

    def keep_room(self) -> None:
        """Reserve room on the disk, if it has more than that."""
        if self._reserve.exists() or shutil.disk_usage(self.path.parent).free < 4 * RESERVE_BYTES:
            return
        with suppress(OSError), open(self._reserve, "wb", opener=private) as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    @property
    def _reserve(self) -> Path:
        return self.path.with_name(f"{self.path.name}-reserve")

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
            with transaction(self._writer):
                yield self._writer

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


def prepare(
    connection: sqlite3.Connection, path: Path, deployment: str, busy_timeout_s: float
) -> None:
    """Check the file, make the tables of a new one, and register the deployment.

    Raises:
        StoreError: the file is another program's, or a store of an unknown version.
    """
    # Looked at before anything is written: a foreign file must stay as it is. In one transaction,
    # so that tables made by another process meanwhile are seen with their version or not at all.
    connection.execute("BEGIN")
    try:
        check(connection, path)
    finally:
        if connection.in_transaction:  # an error of the file's may have ended it
            connection.execute("ROLLBACK")
    _use_write_ahead_log(connection, busy_timeout_s)
    # Commits are in the operating system's hands before they are acknowledged, so no death of a
    # process loses one. FULL would also survive power loss, at one fsync for each commit.
    connection.execute("PRAGMA synchronous = NORMAL")
    # Asks for the write lock even if there is nothing to add: a store that cannot be written is
    # refused at the start, not at the first sample.
    with transaction(connection):
        # Checked again under the lock: another process may have made the tables in between.
        make_tables(connection, deployment, is_new=check(connection, path) == _NEW)


def make_tables(connection: sqlite3.Connection, deployment: str, *, is_new: bool) -> None:
    """Make the tables of a new database, and register the deployment."""
    if is_new:
        for statement in _TABLES.strip().removesuffix(";").split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("INSERT INTO deployment VALUES (?, 0) ON CONFLICT DO NOTHING", (deployment,))


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Take the write lock, and commit at the end; an exception undoes everything."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # After some errors, a full disk among them, SQLite has rolled back by itself.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def check(connection: sqlite3.Connection, path: Path) -> int:
    """Return the version of a file, 0 for one without tables.

    Raises:
        StoreError: it is another program's, or of an unknown version.
    """
    application_id, version = (
        _number(connection, f"PRAGMA {name}") for name in ("application_id", "user_version")
    )
    if (application_id, version) == (APPLICATION_ID, SCHEMA_VERSION):
        return version
    if application_id == APPLICATION_ID:
        raise StoreError(
            f"store {path} has schema version {version}, expected {SCHEMA_VERSION}: another "
            "version of this program has written it; to begin anew, name another file"
        )
    num_tables = _number(connection, "SELECT count(*) FROM sqlite_master")
    if (application_id, version, num_tables) == (0, 0, 0):
        return _NEW
    raise StoreError(
        f"store {path} is the SQLite file of another program: found application id "
        f"{application_id:#x} and {num_tables} tables and indexes, "
        f"expected application id {APPLICATION_ID:#x} or a new file"
    )


def _use_write_ahead_log(connection: sqlite3.Connection, busy_timeout_s: float) -> None:
    """Switch the file to WAL, in which readers never wait for the writer."""
    deadline = time.monotonic() + busy_timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as exc:
            # SQLite gives up at once, without its busy timeout, when two processes that open a
            # new file both upgrade their lock.
            if not is_busy(exc) or time.monotonic() > deadline:
                raise
        Event().wait(_RETRY_S)


def _number(connection: sqlite3.Connection, query: str) -> int:
    (number,) = connection.execute(query).fetchone()
    return int(number)


@contextmanager
def translated(path: Path, busy_timeout_s: float) -> Iterator[None]:
    """Turn every error of the sqlite3 module into a StoreError."""
    try:
        yield
    except sqlite3.Error as exc:
        raise StoreError(f"store {path} {_in_words(exc, path, busy_timeout_s)}") from exc


def is_full(exc: BaseException | None) -> bool:
    """Whether an error of SQLite is a disk without room."""
    full = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
    return isinstance(exc, sqlite3.Error) and _primary_code(exc) in full


def is_busy(exc: sqlite3.Error) -> bool:
    """Whether another connection holds the lock that was asked for."""
    return _primary_code(exc) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _in_words(exc: sqlite3.Error, path: Path, busy_timeout_s: float) -> str:
    if is_busy(exc):
        return (
            f"is locked: found another writer at work for all of {busy_timeout_s:g} s, "
            "expected its turn within that time"
        )
    code = _primary_code(exc)
    if code == sqlite3.SQLITE_FULL:
        return f"is full: found {_free(path)} bytes free, expected room for the change; {KEPT}"
    if code == sqlite3.SQLITE_IOERR:
        name = getattr(exc, "sqlite_errorname", "")
        return (
            f"could not be read or written: found {exc} ({name}, {_free(path)} bytes free), "
            f"expected a local disk with room, and no limit on the size of its files; {KEPT}"
        )
    if code == sqlite3.SQLITE_READONLY:
        return f"is read-only: expected the file and its folder {path.parent} to be writable"
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return f"cannot be opened: {_why_not_opened(path)}"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return (
            f"is corrupted or not a SQLite file: found {_size(path)} bytes ({exc}), "
            "expected a whole SQLite file"
        )
    return f"failed: found {exc}, expected SQLite to take the statement"


def _primary_code(exc: sqlite3.Error) -> int:
    # The lowest byte is the primary code; the rest says more (https://www.sqlite.org/rescode.html).
    return int(getattr(exc, "sqlite_errorcode", 0)) & 0xFF


def _why_not_opened(path: Path) -> str:
    if not path.parent.is_dir():
        return f"found no folder {path.parent}, expected it to exist"
    if path.is_dir():
        return "found a folder, expected a file or nothing"
    return f"found no permission, expected the file and its folder {path.parent} to be writable"


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free:,}"
    except OSError as exc:
        return f"unknown ({exc}) many"


def _size(path: Path) -> str:
    try:
        return f"{path.stat().st_size:,}"
    except OSError as exc:
        return f"unknown ({exc}) many"
