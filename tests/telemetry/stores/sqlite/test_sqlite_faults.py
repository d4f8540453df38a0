"""The SQLite store in front of everything a disk can do to it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import sqlite3
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from eplb.errors import StoreError
from eplb.migration.recovery import Recovery
from telemetry.live import Control, LiveSettings
from telemetry.retention.rollup import MINUTE
from telemetry.store import RankState
from telemetry.stores.sqlite.errors import translated
from telemetry.stores.sqlite.schema import SCHEMA_VERSION
from telemetry.stores.sqlite.store import SqliteStore
from tests.support.stores import make_sample, sequences

Fork = Callable[..., Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


# -- files that are no store, or not ours


@pytest.mark.parametrize("version", [1, SCHEMA_VERSION + 1])
def test_store_of_another_version_is_refused_and_left_as_it_is(path: Path, version: int) -> None:
    SqliteStore(path, "demo").close()
    with closing(sqlite3.connect(path)) as raw:
        raw.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()

    with pytest.raises(StoreError, match=f"version {version}, expected {SCHEMA_VERSION}"):
        SqliteStore(path, "demo")

    assert path.read_bytes() == before


# Of all tables and indexes of a file of each version, as released; they must never change again.
RELEASED = {
    2: "f3247ddedfd9bbd9",
    3: "daf5a7aa7fe85409",
    4: "fa32d0f398e0d900",
    5: "e0e7a6dd261cfe8e",
    6: "324965774f021bd5",
    7: "c46db0bbb7b6bbc3",
}
# What takes away from a file what a version added.
UNDO = {
    8: (
        "DROP VIEW control",  # of telemetry/stores/sqlite/compatible.py, as what follows
        "DROP VIEW rank_state",
        "DROP TABLE announced",
        "DROP TABLE proposal",
        "DROP TABLE live_settings",
        "CREATE TABLE control (deployment TEXT PRIMARY KEY, switches TEXT NOT NULL)",
        "DROP TABLE rank_report",
        "CREATE TABLE rank_state (\n    deployment TEXT NOT NULL, run TEXT NOT NULL, "
        "rank INTEGER NOT NULL, time REAL NOT NULL,\n    step INTEGER NOT NULL, "
        "generation INTEGER NOT NULL, phase TEXT NOT NULL,\n    plan_id INTEGER NOT NULL, "
        "applied INTEGER NOT NULL, sequence INTEGER NOT NULL,\n    detail TEXT NOT NULL, "
        "PRIMARY KEY (deployment, run, rank))",
    ),
    7: (
        "DROP TABLE held_lease",
        "CREATE TABLE lease (\n    deployment TEXT PRIMARY KEY, holder TEXT NOT NULL, "
        "token INTEGER NOT NULL,\n    expires REAL NOT NULL)",
    ),
    6: ("DROP TABLE candidates",),
    5: ("ALTER TABLE run DROP COLUMN window_seconds",),
    4: ("DROP INDEX sample_in_time", "DROP TABLE lease", "DROP TABLE rollup"),
    3: ("DROP TABLE last_words", "DROP TABLE recovery"),
}


def as_version(wanted: int, path: Path) -> None:
    """Take from a file what versions past ``wanted`` added."""
    with closing(sqlite3.connect(path)) as raw:
        for version in range(SCHEMA_VERSION, wanted, -1):
            for statement in UNDO[version]:
                raw.execute(statement)
        raw.execute(f"PRAGMA user_version = {wanted}")
        found = raw.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
        digest = hashlib.sha256(repr(found.fetchall()).encode()).hexdigest()[:16]
    assert digest == RELEASED[wanted]


@pytest.mark.parametrize("version", [2, 3, 4, 5, 6, 7])
def test_file_of_an_older_version_is_migrated_without_loss(path: Path, version: int) -> None:
    with closing(SqliteStore(path, "demo")) as store:
        store.append([make_sample(0, n) for n in range(3)])
        store.add_event("note", {"n": 1})
    as_version(version, path)

    with closing(SqliteStore(path, "demo")) as store, closing(SqliteStore(path, "demo")) as other:
        record = Recovery(1, "run-1", (0,), 4, 0, 0, "rank 1 died", 2.0)
        assert store.recovery() is None
        store.recover(record, expected_membership=0)
        lease = store.acquire_lease("one", 10.0)

        assert other.recovery() == record
        assert other.lease() == lease
        assert other.rollups(MINUTE) == []
        assert [sample.sequence for _, sample in other.samples("run-1")] == [0, 1, 2]
        assert [event.kind for event in other.events()] == ["note", "recovery"]
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_rank_report_and_kill_switch_of_version_7_are_kept(path: Path) -> None:
    SqliteStore(path, "demo").close()
    as_version(7, path)
    details = {"weights_version": 3, "frozen": "torn", "prepared": 2, "experts_moved": 5}
    row = ("demo", "run-1", 1, 9.5, 6, 4, "swap", 7, 1, 30, json.dumps(details))
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(f"INSERT INTO rank_state VALUES ({', '.join('?' * len(row))})", row)
        switches = '{"movement": false, "observe": false}'
        raw.execute("INSERT INTO control VALUES ('demo', ?)", (switches,))

    with closing(SqliteStore(path, "demo")) as store:
        (state,) = store.rank_states("run-1")
        store.set_static(LiveSettings(movement=True), reason="start")
        assert store.control() == Control(movement=False)

    expected = RankState("run-1", 1, 9.5, 6, 4, "swap", 7, 1, 30, 3, 2, "torn")
    assert state == replace(expected, detail={"experts_moved": 5})


def test_rank_of_version_7_reports_and_reads_switches_after_an_upgrade(path: Path) -> None:
    SqliteStore(path, "demo").close()
    as_version(7, path)
    names = "deployment run rank time step generation phase plan_id applied sequence detail"
    row = ("demo", "run-1", 1, 9.5, 6, 4, "swap", 7, 1, 30, '{"weights_version": 3}')
    marks = ", ".join("?" * len(row))
    report = f"INSERT OR REPLACE INTO rank_state ({', '.join(names.split())}) VALUES ({marks})"
    switches = "SELECT switches FROM control WHERE deployment = ?"
    with closing(sqlite3.connect(path, isolation_level=None)) as older:
        older.execute(report, row)
        assert older.execute(switches, ("demo",)).fetchall() == []

        with closing(SqliteStore(path, "demo")) as store:
            store.set_control(Control(movement=False, observe=True), reason="test")
            store.set_static(LiveSettings(movement=True), reason="start")
            older.execute(report, (*row[:4], 8, *row[5:]))  # twice: the latest stands
            older.execute(report, (*row[:4], 9, *row[5:]))

            (state,) = store.rank_states("run-1")
            ((found,),) = older.execute(switches, ("demo",)).fetchall()
            with pytest.raises(sqlite3.IntegrityError, match="upgraded"):
                older.execute("INSERT OR REPLACE INTO control VALUES ('demo', '{}')")

        (again,) = older.execute("SELECT step, detail FROM rank_state").fetchall()
    assert (state.step, state.weights_version) == (9, 3)
    assert json.loads(found) == {"movement": False, "observe": True}
    assert again == (9, '{"weights_version":3}')


def test_file_of_version_2_is_brought_up_to_date_by_one_of_many_at_once(path: Path) -> None:
    SqliteStore(path, "demo").close()
    as_version(2, path)

    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: SqliteStore(path, "demo"), range(8)))

    assert [store.recovery() for store in stores] == [None] * 8
    for store in stores:
        store.close()


def test_another_program_s_database_is_refused_and_left_as_it_is(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE recipe (name TEXT)")
    before = path.read_bytes()

    with pytest.raises(StoreError, match="0x0 and 1 tables"):
        SqliteStore(path, "demo")

    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [b"xy", b"not a database, only text\n" * 500])
def test_file_that_is_no_database_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)

    with pytest.raises(StoreError, match=f"{len(content):,} bytes"):
        SqliteStore(path, "demo")

    assert path.read_bytes() == content


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_truncated_store_is_refused(path: Path, kept: float) -> None:
    with closing(SqliteStore(path, "demo")) as store:
        store.append([make_sample(0, n) for n in range(200)])
    os.truncate(path, int(path.stat().st_size * kept))

    with pytest.raises(StoreError, match=r"[\d,]+ bytes"):
        SqliteStore(path, "demo")


def test_missing_folder_and_path_of_a_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no folder .*nowhere"):
        SqliteStore(tmp_path / "nowhere" / "store.sqlite", "demo")
    with pytest.raises(StoreError, match="a folder"):
        SqliteStore(tmp_path, "demo")


def test_store_that_was_removed_while_open_is_not_written_on(path: Path) -> None:
    with closing(SqliteStore(path, "demo")) as store:
        path.unlink()

        with pytest.raises(StoreError, match="removed or replaced"):
            store.append([make_sample(0, 0)])


def test_file_of_a_process_killed_before_the_tables_is_completed(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA journal_mode = WAL")

    with closing(SqliteStore(path, "demo")) as store:
        assert store.events() == []


# -- read-only, full


def open_as_nobody(pipe: Connection, path: Path) -> None:
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)  # permissions do not bind root
    try:
        SqliteStore(path, "demo").add_event("note", {})
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
    SqliteStore(path, "demo").close()
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
    store = SqliteStore(path, "demo")
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
    with closing(SqliteStore(path, "demo")) as store:
        assert store.sample_counts("run-1") == {0: acknowledged}
        assert sequences(store) == list(range(acknowledged))
        assert store.append([make_sample(0, acknowledged)]) == 1
        assert store.prune(1e9) == acknowledged + 1


def open_on_a_full_disk(pipe: Connection, path: Path) -> None:
    limit_files(20_000)
    try:
        SqliteStore(path, "demo")
    except StoreError as exc:
        pipe.send(str(exc))


def test_disk_that_is_full_at_the_start_leaves_nothing_half_made(path: Path, fork: Fork) -> None:
    assert "could not be read or written" in fork(open_on_a_full_disk, path).receive()

    with closing(SqliteStore(path, "demo")) as store:
        assert store.events() == []


def test_full_database_is_told_as_full(path: Path) -> None:
    # SQLite's own limit stands in for a disk: the error that it raises is the same.
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA max_page_count = 1")
        with pytest.raises(StoreError, match=r"is full: .* bytes free"), translated(path, 1.0):
            raw.execute("CREATE TABLE recipe AS SELECT zeroblob(100000)")
