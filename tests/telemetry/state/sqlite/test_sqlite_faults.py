"""The SQLite store in front of everything a disk can do to it."""

from __future__ import annotations

import math
import os
import re
import resource
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from eplb.errors import StoreError
from telemetry.state.sqlite import SqliteBackend
from telemetry.state.sqlite_file import SCHEMA_VERSION, translated
from tests.support.stores import make_sample, sequences, sqlite_store

Fork = Callable[..., Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


# -- files that are no store, or not ours


@pytest.mark.parametrize("version", [1, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_store_of_another_version_is_refused_and_left_as_it_is(path: Path, version: int) -> None:
    sqlite_store(path, "demo").close()
    with closing(sqlite3.connect(path)) as raw:
        raw.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()

    with pytest.raises(
        StoreError, match=f"version {version}, expected {SCHEMA_VERSION}.*begin anew"
    ):
        sqlite_store(path, "demo")

    assert path.read_bytes() == before


def test_another_program_s_database_is_refused_and_left_as_it_is(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE recipe (name TEXT)")
    before = path.read_bytes()

    with pytest.raises(StoreError, match="0x0 and 1 tables"):
        sqlite_store(path, "demo")

    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [b"xy", b"not a database, only text\n" * 500])
def test_file_that_is_no_database_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)

    with pytest.raises(StoreError, match=f"{len(content):,} bytes"):
        sqlite_store(path, "demo")

    assert path.read_bytes() == content


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_truncated_store_is_refused(path: Path, kept: float) -> None:
    with closing(sqlite_store(path, "demo")) as store:
        store.append([make_sample(0, n) for n in range(200)])
    os.truncate(path, int(path.stat().st_size * kept))

    with pytest.raises(StoreError, match=r"[\d,]+ bytes"):
        sqlite_store(path, "demo")


def test_missing_folder_and_path_of_a_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no folder .*nowhere"):
        sqlite_store(tmp_path / "nowhere" / "store.sqlite", "demo")
    with pytest.raises(StoreError, match="a folder"):
        sqlite_store(tmp_path, "demo")


def test_store_that_was_removed_while_open_is_not_written_on(path: Path) -> None:
    with closing(sqlite_store(path, "demo")) as store:
        path.unlink()

        with pytest.raises(StoreError, match="removed or replaced"):
            store.append([make_sample(0, 0)])


def test_file_of_a_process_killed_before_the_tables_is_completed(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA journal_mode = WAL")

    with closing(sqlite_store(path, "demo")) as store:
        assert store.events() == []


# -- read-only, full


def open_as_nobody(pipe: Connection, path: Path) -> None:
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)  # permissions do not bind root
    try:
        sqlite_store(path, "demo").add_event("note", {})
    except StoreError as exc:
        pipe.send(str(exc))


def open_to_others(folder: Path) -> None:
    """Let another user walk into a test's folder, which pytest makes private."""
    if os.getuid() != 0:
        return
    for parent in folder.relative_to(tempfile.gettempdir()).parents:
        (Path(tempfile.gettempdir()) / parent).chmod(0o755)
    if not all(parent.stat().st_mode & 0o001 for parent in folder.parents):
        pytest.skip("other users cannot enter the folder of temporary files")


def test_read_only_file_is_refused(path: Path, fork: Fork) -> None:
    sqlite_store(path, "demo").close()
    open_to_others(path.parent)
    path.parent.chmod(0o777)
    path.chmod(0o444)

    words = fork(open_as_nobody, path).receive()
    assert f"{path} is read-only" in words


def test_read_only_folder_is_refused(path: Path, fork: Fork) -> None:
    open_to_others(path.parent)
    path.parent.chmod(0o555)

    assert "no permission" in fork(open_as_nobody, path).receive()
    path.parent.chmod(0o755)
    assert list(path.parent.iterdir()) == []


def limit_files(num_bytes: int) -> None:
    """Let no file of this process grow past a size, which stands in for a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def fill_up(pipe: Connection, path: Path) -> None:
    store = sqlite_store(path, "demo")
    limit_files(400_000)
    acknowledged = 0
    try:
        while True:
            store.append([make_sample(0, acknowledged)])
            acknowledged += 1
    except StoreError as exc:
        assert store.sample_counts("run-1") == {0: acknowledged}
        pipe.send((acknowledged, str(exc)))


def test_disk_that_fills_up_loses_nothing_that_was_acknowledged(path: Path, fork: Fork) -> None:
    acknowledged, words = fork(fill_up, path).receive()

    assert re.search("disk I/O error .* bytes free", words)
    with closing(sqlite_store(path, "demo")) as store:
        assert store.sample_counts("run-1") == {0: acknowledged}
        assert sequences(store) == list(range(acknowledged))
        assert store.append([make_sample(0, acknowledged)]) == 1
        assert store.prune(1e9) == acknowledged + 1


def look_for_room(pipe: Connection, path: Path) -> None:
    backend = SqliteBackend(path, "demo", low_bytes=math.inf)
    before = backend.why_full()
    limit_files(1000)
    pipe.send((before, backend.why_full()))


def test_disk_without_room_for_a_change_is_told(path: Path, fork: Fork) -> None:
    before, full = fork(look_for_room, path).receive()

    assert before == ""
    assert "expected a local disk with room" in full


def open_on_a_full_disk(pipe: Connection, path: Path) -> None:
    limit_files(20_000)
    try:
        sqlite_store(path, "demo")
    except StoreError as exc:
        pipe.send(str(exc))


def test_disk_that_is_full_at_the_start_leaves_nothing_half_made(path: Path, fork: Fork) -> None:
    assert "could not be read or written" in fork(open_on_a_full_disk, path).receive()

    with closing(sqlite_store(path, "demo")) as store:
        assert store.events() == []


def test_full_database_is_told_as_full(path: Path) -> None:
    # SQLite's own limit stands in for a disk: the error that it raises is the same.
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA max_page_count = 1")
        with pytest.raises(StoreError, match=r"is full: .* bytes free"), translated(path, 1.0):
            raw.execute("CREATE TABLE recipe AS SELECT zeroblob(100000)")
