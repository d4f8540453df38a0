"""The tables of the SQLite store, and the check that a file holds just these.

One file may hold several deployments. Blobs are the last columns, so that a person can read the
rest: ``sqlite3 store.sqlite 'select * from event'``.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from threading import Event

from eplb.errors import StoreError
from telemetry.stores.sqlite import compatible
from telemetry.stores.sqlite.errors import is_busy

APPLICATION_ID = 0x45504C42  # "EPLB": distinguishes these files from those of other programs
SCHEMA_VERSION = 8  # counts up with each change of the tables below

_RETRY_S = 0.01

# Cursors and ids come from AUTOINCREMENT: they are never given out again, even after a prune. One
# writer at a time commits, so their order is the order in which changes became visible.
_VERSION_2 = """
CREATE TABLE deployment (
    name TEXT PRIMARY KEY, version INTEGER NOT NULL, last_plan_id INTEGER NOT NULL);
CREATE TABLE run (
    id INTEGER PRIMARY KEY AUTOINCREMENT, deployment TEXT NOT NULL, run TEXT NOT NULL,
    time REAL NOT NULL, window_steps INTEGER NOT NULL, model TEXT NOT NULL, topology TEXT NOT NULL,
    UNIQUE (deployment, run));
CREATE TABLE rank_state (
    deployment TEXT NOT NULL, run TEXT NOT NULL, rank INTEGER NOT NULL, time REAL NOT NULL,
    step INTEGER NOT NULL, generation INTEGER NOT NULL, phase TEXT NOT NULL,
    plan_id INTEGER NOT NULL, applied INTEGER NOT NULL, sequence INTEGER NOT NULL,
    detail TEXT NOT NULL, PRIMARY KEY (deployment, run, rank));
CREATE TABLE sample (
    cursor INTEGER PRIMARY KEY AUTOINCREMENT, deployment TEXT NOT NULL, run TEXT NOT NULL,
    rank INTEGER NOT NULL, sequence INTEGER NOT NULL, time REAL NOT NULL,
    first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, generation INTEGER NOT NULL,
    record BLOB NOT NULL, UNIQUE (deployment, run, rank, sequence));
CREATE INDEX sample_of_run ON sample (deployment, run, cursor);
CREATE TABLE pruned (
    deployment TEXT NOT NULL, run TEXT NOT NULL, rank INTEGER NOT NULL,
    num_samples INTEGER NOT NULL, PRIMARY KEY (deployment, run, rank));
CREATE TABLE placement (
    deployment TEXT NOT NULL, generation INTEGER NOT NULL, time REAL NOT NULL,
    plan_id INTEGER NOT NULL, reason TEXT NOT NULL, hash TEXT NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (deployment, generation));
CREATE TABLE migration (
    deployment TEXT NOT NULL, plan_id INTEGER NOT NULL, time REAL NOT NULL,
    base_generation INTEGER NOT NULL, state TEXT NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (deployment, plan_id));
CREATE UNIQUE INDEX migration_open ON migration (deployment) WHERE state = 'open';
CREATE TABLE event (
    id INTEGER PRIMARY KEY AUTOINCREMENT, deployment TEXT NOT NULL, time REAL NOT NULL,
    kind TEXT NOT NULL, detail TEXT NOT NULL);
CREATE INDEX event_of_deployment ON event (deployment, id);
CREATE TABLE task (
    id INTEGER PRIMARY KEY AUTOINCREMENT, deployment TEXT NOT NULL, time REAL NOT NULL,
    kind TEXT NOT NULL, request TEXT NOT NULL, state TEXT NOT NULL, result TEXT NOT NULL);
CREATE INDEX task_in_state ON task (deployment, state, id);
CREATE TABLE control (deployment TEXT PRIMARY KEY, switches TEXT NOT NULL);
"""
# What each later version adds. Never changed once released: files of every version in between
# take the same steps as a new one.
_ADDED = {
    3: """
CREATE TABLE last_words (
    deployment TEXT NOT NULL, run TEXT NOT NULL, membership INTEGER NOT NULL,
    rank INTEGER NOT NULL, words TEXT NOT NULL, PRIMARY KEY (deployment, run, membership, rank));
CREATE TABLE recovery (
    deployment TEXT NOT NULL, membership INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (deployment, membership));
""",
    4: """
CREATE TABLE lease (
    deployment TEXT PRIMARY KEY, holder TEXT NOT NULL, token INTEGER NOT NULL,
    expires REAL NOT NULL);
CREATE TABLE rollup (
    id INTEGER PRIMARY KEY, deployment TEXT NOT NULL, seconds INTEGER NOT NULL,
    start REAL NOT NULL, run TEXT NOT NULL, phase TEXT NOT NULL, num_samples INTEGER NOT NULL,
    record BLOB NOT NULL, UNIQUE (deployment, seconds, start, run, phase));
CREATE INDEX sample_in_time ON sample (deployment, time);
""",
    5: """
ALTER TABLE run ADD COLUMN window_seconds REAL NOT NULL DEFAULT 0;
""",
    6: """
CREATE TABLE candidates (deployment TEXT PRIMARY KEY, records TEXT NOT NULL);
""",
    7: """
CREATE TABLE held_lease (
    deployment TEXT NOT NULL, kind TEXT NOT NULL, holder TEXT NOT NULL, token INTEGER NOT NULL,
    expires REAL NOT NULL, ttl_s REAL NOT NULL, since REAL NOT NULL, renewals INTEGER NOT NULL,
    PRIMARY KEY (deployment, kind));
INSERT INTO held_lease
    SELECT deployment, 'controller', holder, token, expires, 10.0, 0.0, 0 FROM lease;
DROP TABLE lease;
""",
    8: """
CREATE TABLE rank_report (
    deployment TEXT NOT NULL, run TEXT NOT NULL, rank INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (deployment, run, rank));
INSERT INTO rank_report
    SELECT deployment, run, rank, json_object(
        'run', run, 'rank', rank, 'time', time, 'step', step, 'generation', generation,
        'phase', phase, 'plan_id', plan_id, 'applied', applied, 'sequence', sequence,
        'detail', json(detail)) FROM rank_state;
DROP TABLE rank_state;
CREATE TABLE live_settings (deployment TEXT PRIMARY KEY, record TEXT NOT NULL);
INSERT INTO live_settings SELECT deployment, switches FROM control;
DROP TABLE control;
""",
}
_OLDEST = 2  # the oldest version that can be brought up to date
_NEW = 0  # version of a file without tables


def prepare(
    connection: sqlite3.Connection, path: Path, deployment: str, busy_timeout_s: float
) -> None:
    """Check the file, make the tables it lacks, and register the deployment.

    A file of an older version is brought up to date: it keeps all that it holds, and programs of
    that older version cannot open it any more. Those that have it open go on, if they are of the
    release before (``compatible.py``).

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
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Checked again under the lock: another process may have made the tables in between.
        _bring_up_to_date(connection, check(connection, path))
        for statement in compatible.STATEMENTS:
            connection.execute(statement)
        connection.execute(
            "INSERT INTO deployment VALUES (?, 0, 0) ON CONFLICT DO NOTHING", (deployment,)
        )
        connection.execute("COMMIT")
    except BaseException:
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
    if application_id == APPLICATION_ID and _OLDEST <= version <= SCHEMA_VERSION:
        return version
    if application_id == APPLICATION_ID:
        raise StoreError(
            f"store {path} has schema version {version}, expected {SCHEMA_VERSION}: "
            "it was written by another version of this program"
        )
    num_tables = _number(connection, "SELECT count(*) FROM sqlite_master")
    if (application_id, version, num_tables) == (0, 0, 0):
        return _NEW
    raise StoreError(
        f"store {path} is the SQLite file of another program: found application id "
        f"{application_id:#x} and {num_tables} tables and indexes, "
        f"expected application id {APPLICATION_ID:#x} or a new file"
    )


def _bring_up_to_date(connection: sqlite3.Connection, version: int) -> None:
    """Make the tables that a version lacks, in the open transaction: all of them or none."""
    if version == SCHEMA_VERSION:
        return
    if version == _NEW:
        _execute(connection, _VERSION_2)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    for added in range(max(version, _OLDEST) + 1, SCHEMA_VERSION + 1):
        _execute(connection, _ADDED[added])
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _execute(connection: sqlite3.Connection, tables: str) -> None:
    for statement in tables.strip().removesuffix(";").split(";\n"):
        connection.execute(statement)


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
