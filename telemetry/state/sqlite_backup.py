"""The SQLite store as a whole, while it is in use: its copy, its size, its deployments."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from eplb.errors import StoreError
from telemetry.state.sqlite_file import check, translated

_BUSY_S = 10.0


def backup(source: Path, target: Path) -> int:
    """Copy a store, as it is at one moment, into a new file, and return its size in bytes.

    Writers continue meanwhile: the copy is read in one transaction. It is verified and synced to
    the disk before it gets its name; an interrupted copy never has that name.

    Raises:
        StoreError: ``source`` is no store, ``target`` is there already, or the copy is damaged.
    """
    if not source.is_file():
        raise StoreError(f"there is no store at {source}, expected a file")
    if target.exists():
        raise StoreError(f"{target} is there already, expected a new file for the copy")
    unfinished = target.with_name(f"{target.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        _copy(source, unfinished)
        _sync(unfinished)
        # A link, not a rename, which would replace a file that was made there in the meantime.
        os.link(unfinished, target)
        _sync(target.parent)
    except OSError as exc:
        raise StoreError(f"the copy {target} cannot be written: {exc}") from exc
    finally:
        unfinished.unlink(missing_ok=True)
    return target.stat().st_size


def _copy(source: Path, target: Path) -> None:
    with translated(source, _BUSY_S), closing(_existing(source)) as original:
        check(original, source)
        with translated(target, _BUSY_S), closing(sqlite3.connect(target)) as copy:
            # All pages at once: in steps, the copy would begin again with every change of others.
            original.backup(copy, pages=-1)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
            found = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise StoreError(f"the copy of {source} is damaged: found {found}, expected the same store")


def shrink(path: Path) -> None:
    """Return the room that a purge left to the disk; writers wait meanwhile.

    Raises:
        StoreError: another process kept the store locked, or there is no room to rewrite it.
    """
    with translated(path, _BUSY_S), closing(_existing(path)) as connection:
        check(connection, path)
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def deployments_in(path: Path) -> list[str]:
    """Return the names of the deployments that ran or have a placement in a store, sorted.

    Raises:
        StoreError: it is no store, or cannot be read.
    """
    if not path.is_file():
        raise StoreError(f"there is no store at {path}, expected the file of a deployment")
    query = "SELECT DISTINCT deployment FROM entry WHERE tab IN ('runs', 'placements') ORDER BY 1"
    with translated(path, _BUSY_S), closing(_existing(path)) as connection:
        check(connection, path)
        return [name for (name,) in connection.execute(query)]


def _existing(path: Path) -> sqlite3.Connection:
    # Not mode=ro: the last reader of a store that is not open elsewhere could not remove its log.
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
