"""The SQLite store among several processes and threads: nothing is lost, nothing waits in vain."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb.errors import StoreError
from tests.support.limits import NEVER_S
from tests.support.stores import kinds, make_placement, make_sample, sqlite_store

Fork = Callable[..., Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


def open_new_files(pipe: Connection, folder: Path) -> None:
    while name := pipe.recv():
        sqlite_store(folder / name, "demo", busy_timeout_s=NEVER_S).add_event("note", {})
        pipe.send("done")


def test_processes_that_open_a_new_file_at_once_all_succeed(tmp_path: Path, fork: Fork) -> None:
    openers = [fork(open_new_files, tmp_path) for _ in range(4)]
    for attempt in range(4):
        for process in openers:
            process.send(f"store-{attempt}")

        assert [process.receive() for process in openers] == ["done"] * 4


def write_at_once(pipe: Connection, path: Path, rank: int) -> None:
    store = sqlite_store(path, "demo", busy_timeout_s=NEVER_S)
    pipe.send("ready")
    pipe.recv()
    for sequence in range(20):
        store.append([make_sample(rank, sequence)])
        store.add_event("note", {"rank": rank})
    pipe.send([store.next_plan_id() for _ in range(10)])


def test_new_file_and_what_belongs_to_it_are_for_this_user_alone(path: Path) -> None:
    with closing(sqlite_store(path, "demo")) as store:
        store.add_event("note", {})
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}

    assert modes == dict.fromkeys(modes, 0o600)
    assert path.name in modes


def test_processes_that_write_at_once_lose_nothing(path: Path, fork: Fork) -> None:
    writers = [fork(write_at_once, path, rank) for rank in range(3)]
    assert [process.receive() for process in writers] == ["ready"] * 3
    for process in writers:
        process.send("go")
    plan_ids = [plan_id for process in writers for plan_id in process.receive()]

    with closing(sqlite_store(path, "demo")) as store:
        assert store.sample_counts("run-1") == {0: 20, 1: 20, 2: 20}
        assert len(store.events()) == 60
        assert store.version() == 60
        assert sorted(plan_ids) == list(range(1, 31))


def write_for_ever(pipe: Connection, path: Path, rank: int) -> None:
    store = sqlite_store(path, "demo", busy_timeout_s=NEVER_S)
    for sequence in range(1_000_000):
        store.append([make_sample(rank, sequence)])
        store.add_event("note", {"rank": rank})
        pipe.send(sequence)


@pytest.mark.system
def test_acknowledged_writes_survive_sigkill_of_the_writer(path: Path, fork: Fork) -> None:
    for rank in range(3):
        process = fork(write_for_ever, path, rank)
        for _ in range(10 + 17 * rank):
            acknowledged = process.receive()
        process.kill()
        acknowledged = max([acknowledged, *process.remaining()])

        with closing(sqlite_store(path, "demo")) as store:
            assert store.sample_counts("run-1")[rank] > acknowledged


@pytest.mark.slow
def test_kill_9_at_a_hundred_random_moments_loses_nothing(path: Path, fork: Fork) -> None:
    rng = np.random.default_rng(9)
    acknowledged = {}
    for rank in range(100):
        process = fork(write_for_ever, path, rank)
        received = [process.receive() for _ in range(rng.integers(1, 20))]
        process.kill()
        acknowledged[rank] = max([*received, *process.remaining()])

    with closing(sqlite_store(path, "demo")) as store:
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


def carry_over(pipe: Connection, path: Path) -> None:
    store = sqlite_store(path, "demo", busy_timeout_s=NEVER_S)
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

    assert re.search(r"in process \d+ and is used in process \d+", process.receive())
    assert process.ends() == 0
    with closing(sqlite_store(path, "demo")) as store:
        assert len(store.events()) == 1


def test_locked_store_is_an_error_or_a_wait_for_writers_and_readers_continue(path: Path) -> None:
    with (
        closing(sqlite_store(path, "demo", busy_timeout_s=0.01)) as hasty,
        closing(sqlite_store(path, "demo", busy_timeout_s=NEVER_S)) as store,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        writer = threading.Thread(target=store.add_event, args=("note", {}))
        writer.start()

        with pytest.raises(StoreError, match="is locked"):
            hasty.add_event("lost", {})
        assert store.events() == hasty.events() == []

        other.execute("ROLLBACK")
        writer.join()
        assert kinds(store) == ["note"]


# -- reading for people


def test_events_are_readable_with_sql(path: Path) -> None:
    with closing(sqlite_store(path, "demo", clock=lambda: 12.5)) as store:
        store.commit(make_placement(1), expected=None, reason="first")
    with closing(sqlite3.connect(path)) as raw:
        (row,) = raw.execute("SELECT * FROM event").fetchall()

    detail = '{"generation": 1, "plan_id": 0, "reason": "first"}'
    assert row == (1, "demo", 12.5, "commit", detail)
