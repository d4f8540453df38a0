"""The SQLite store among several processes and threads: nothing is lost, nothing waits in vain."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.errors import StoreError
from telemetry.stores.sqlite.store import SqliteStore
from tests.support.limits import NEVER_S

Fork = Callable[..., Any]


def make_sample(sequence: int, rank: int = 0) -> LoadSample:
    return LoadSample(
        "demo",
        "run-1",
        rank,
        sequence,
        0.0,
        sequence,
        sequence,
        "decode",
        1,
        np.array([[0, 1]]),
        np.array([[1, 2]]),
    )


def first_commit(store: SqliteStore) -> None:
    placement = Placement(np.array([[0, 1]]), num_experts=2, generation=1)
    store.commit(placement, expected=None, reason="first")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


def open_new_files(pipe: Connection, folder: Path) -> None:
    while name := pipe.recv():
        SqliteStore(folder / name, "demo").add_event("note", {})
        pipe.send("done")


def test_processes_that_open_a_new_file_at_once_all_succeed(tmp_path: Path, fork: Fork) -> None:
    openers = [fork(open_new_files, tmp_path) for _ in range(4)]
    for attempt in range(20):
        for process in openers:
            process.send(f"store-{attempt}")

        assert [process.receive() for process in openers] == ["done"] * 4


def write_at_once(pipe: Connection, path: Path, rank: int) -> None:
    store = SqliteStore(path, "demo")
    pipe.send("ready")
    pipe.recv()
    for sequence in range(50):
        store.append([make_sample(sequence, rank)])
        store.add_event("note", {"rank": rank})
    pipe.send([store.next_plan_id() for _ in range(10)])


def test_processes_that_write_at_once_lose_nothing(path: Path, fork: Fork) -> None:
    writers = [fork(write_at_once, path, rank) for rank in range(3)]
    assert [process.receive() for process in writers] == ["ready"] * 3
    for process in writers:
        process.send("go")
    plan_ids = [plan_id for process in writers for plan_id in process.receive()]

    with closing(SqliteStore(path, "demo")) as store:
        assert store.sample_counts("run-1") == {0: 50, 1: 50, 2: 50}
        assert len(store.events()) == 150
        assert store.version() == 150
        assert sorted(plan_ids) == list(range(1, 31))


def write_for_ever(pipe: Connection, path: Path, rank: int) -> None:
    store = SqliteStore(path, "demo")
    for sequence in range(1_000_000):
        store.append([make_sample(sequence, rank)])
        store.add_event("note", {"rank": rank})
        pipe.send(sequence)


def test_acknowledged_writes_survive_sigkill_of_the_writer(path: Path, fork: Fork) -> None:
    for rank in range(3):
        process = fork(write_for_ever, path, rank)
        for _ in range(40 + 17 * rank):
            acknowledged = process.receive()
        process.kill()
        acknowledged = max([acknowledged, *process.remaining()])

        with closing(SqliteStore(path, "demo")) as store:
            assert store.sample_counts("run-1")[rank] > acknowledged


@pytest.mark.slow
def test_kill_9_at_a_hundred_random_moments_loses_nothing(path: Path, fork: Fork) -> None:
    rng = np.random.default_rng(9)
    acknowledged = {}
    for rank in range(100):
        process = fork(write_for_ever, path, rank)
        process.receive()
        threading.Event().wait(rng.uniform(0, 0.03))
        process.kill()
        acknowledged[rank] = max([0, *process.remaining()])

    with closing(SqliteStore(path, "demo")) as store:
        stored = store.sample_counts("run-1")
        noted = Counter(event.detail["rank"] for event in store.events(limit=10**9))
        # What is written and not acknowledged is one sample and one event at most.
        for rank, last in acknowledged.items():
            assert last + 1 <= noted[rank] <= last + 2
            assert noted[rank] <= stored[rank] <= last + 2
        samples = store.samples("run-1", limit=10**9)
        assert len({(s.rank, s.sequence) for _, s in samples}) == len(samples)
        assert len(samples) == sum(stored.values())
        assert store.refused() == {}
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def add_an_event(pipe: Connection, path: Path) -> None:
    pipe.recv()
    SqliteStore(path, "demo").add_event("note", {})


def test_wait_ends_with_another_process_s_change(path: Path, fork: Fork) -> None:
    process = fork(add_an_event, path)
    with closing(SqliteStore(path, "demo")) as store:
        before = store.version()
        process.send("go")

        assert store.wait(before, NEVER_S) == before + 1
        assert process.ends() == 0


def test_two_deployments_in_one_file_are_kept_apart(path: Path) -> None:
    with closing(SqliteStore(path, "demo")) as one, closing(SqliteStore(path, "other")) as other:
        one.append([make_sample(0)])
        first_commit(one)
        one.submit("rebalance", {})
        one.next_plan_id()

        assert other.samples("run-1") == []
        assert other.committed() is None
        assert other.events() == []
        assert other.claim() is None
        assert other.task(1) is None
        assert other.version() == 0
        assert other.next_plan_id() == 1


def carry_over(pipe: Connection, path: Path) -> None:
    store = SqliteStore(path, "demo")
    if os.fork() == 0:
        try:
            store.version()
        except StoreError as exc:
            pipe.send(str(exc))
        os._exit(0)
    os.wait()
    store.add_event("note", {})


def test_store_carried_over_a_fork_is_refused(path: Path, fork: Fork) -> None:
    process = fork(carry_over, path)

    expected = r"opened in process \d+ and is used in process \d+, expected each"
    assert re.search(expected, process.receive())
    assert process.ends() == 0
    with closing(SqliteStore(path, "demo")) as store:
        assert len(store.events()) == 1


def test_locked_store_is_an_error_for_writers_and_readers_continue(path: Path) -> None:
    with (
        closing(SqliteStore(path, "demo", busy_timeout_s=0.1)) as store,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")

        with pytest.raises(StoreError, match=r"is locked: found another writer .* all of 0\.1 s"):
            store.add_event("note", {})
        assert store.events() == []

        other.execute("ROLLBACK")
        store.add_event("note", {})


def test_thread_that_waits_to_write_does_not_hold_up_readers(path: Path) -> None:
    with (
        closing(SqliteStore(path, "demo", busy_timeout_s=NEVER_S)) as store,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        writer = threading.Thread(target=store.add_event, args=("note", {}))
        writer.start()

        assert store.events() == []
        other.execute("ROLLBACK")
        writer.join()
        assert len(store.events()) == 1


# -- reading for people


def test_events_are_readable_with_sql(path: Path) -> None:
    with closing(SqliteStore(path, "demo", clock=lambda: 12.5)) as store:
        first_commit(store)
    with closing(sqlite3.connect(path)) as raw:
        (row,) = raw.execute("SELECT * FROM event").fetchall()

    detail = '{"generation": 1, "plan_id": 0, "reason": "first"}'
    assert row == (1, "demo", 12.5, "commit", detail)
