"""SQLite's errors as StoreErrors that name the file, what was found and what was expected."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eplb.errors import StoreError


@contextmanager
def translated(path: Path, busy_timeout_s: float) -> Iterator[None]:
    """Turn every error of the sqlite3 module into a StoreError."""
    try:
        yield
    except sqlite3.Error as exc:
        raise StoreError(f"store {path} {_in_words(exc, path, busy_timeout_s)}") from exc


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


KEPT = "what was acknowledged before is kept"


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
