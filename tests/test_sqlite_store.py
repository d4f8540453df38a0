"""The SQLite store among several processes and threads: nothing is lost, nothing waits in vain."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from eplb.errors import StoreError
from eplb.load import LoadSample
from eplb.placement import Placement
from telemetry.sqlite import SqliteStore

TIMEOUT_S = 30.0
ROOT = Path(__file__).resolve().parent.parent

PRELUDE = """
import os, sys
from eplb.errors import EplbError
from eplb.load import LoadSample
from telemetry.sqlite import SqliteStore

def sample(rank, sequence):
    return LoadSample("demo", "run-1", rank, sequence, 0.0, sequence, sequence, "decode", 1,
                      [[0, 1]], [[rank, sequence]])

path, rank = sys.argv[1], int(sys.argv[2])
"""


@contextmanager
def child(script: str, path: Path, rank: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PRELUDE + script, str(path), str(rank)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def output_of(script: str, path: Path) -> str:
    with child(script, path) as process:
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
    return out.strip()


def make_sample(sequence: int) -> LoadSample:
    return LoadSample(
        "demo",
        "run-1",
        0,
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


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def test_processes_that_open_a_new_file_at_once_all_succeed(path: Path) -> None:
    script = """
print("ready", flush=True)
for line in sys.stdin:
    store = SqliteStore(path + line.strip(), "demo")
    store.add_event("note", {})
    print("done", flush=True)
"""
    with ExitStack() as stack:
        openers = [stack.enter_context(child(script, path)) for _ in range(4)]
        assert [line_of(process) for process in openers] == ["ready"] * 4
        for attempt in range(20):
            for process in openers:
                tell(process, str(attempt))

            assert [line_of(process) for process in openers] == ["done"] * 4


def test_processes_that_write_at_once_lose_nothing(path: Path) -> None:
    script = """
store = SqliteStore(path, "demo")
print("ready", flush=True)
sys.stdin.readline()
for sequence in range(50):
    store.append([sample(rank, sequence)])
    store.add_event("note", {"rank": rank})
print(*(store.next_plan_id() for _ in range(10)), flush=True)
"""
    with ExitStack() as stack:
        writers = [stack.enter_context(child(script, path, rank)) for rank in range(3)]
        assert [line_of(process) for process in writers] == ["ready"] * 3
        for process in writers:
            tell(process, "go")
        plan_ids = [int(word) for process in writers for word in line_of(process).split()]

    with closing(SqliteStore(path, "demo")) as store:
        assert store.sample_counts("run-1") == {0: 50, 1: 50, 2: 50}
        assert len(store.events()) == 150
        assert store.version() == 150
        assert sorted(plan_ids) == list(range(1, 31))


def test_what_was_acknowledged_survives_kill_9_of_the_writer(path: Path) -> None:
    script = """
store = SqliteStore(path, "demo")
for sequence in range(1_000_000):
    store.append([sample(rank, sequence)])
    store.add_event("note", {"sequence": sequence})
    print(sequence, flush=True)
"""
    for rank in range(3):
        with child(script, path, rank) as process:
            for _ in range(40 + 17 * rank):
                acknowledged = int(line_of(process))
            process.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)
            assert process.stdout is not None
            acknowledged = max([acknowledged, *map(int, process.stdout.read().split("\n")[:-1])])

        with closing(SqliteStore(path, "demo")) as store:
            assert store.sample_counts("run-1")[rank] > acknowledged


def test_a_wait_ends_with_another_process_s_change(path: Path) -> None:
    with closing(SqliteStore(path, "demo")) as store:
        before = store.version()
        script = 'SqliteStore(path, "demo").add_event("note", {})'
        with child(script, path) as process:
            assert store.wait(before, TIMEOUT_S) == before + 1
            process.wait(TIMEOUT_S)


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


def test_a_store_carried_over_a_fork_is_refused(path: Path) -> None:
    script = """
store = SqliteStore(path, "demo")
if os.fork() == 0:
    try:
        store.version()
    except EplbError as exc:
        print(exc, flush=True)
    os._exit(0)
os.wait()
store.add_event("note", {})
"""
    words = output_of(script, path)

    assert re.search(r"opened in process \d+ and is used in process \d+, expected each", words)
    with closing(SqliteStore(path, "demo")) as store:
        assert len(store.events()) == 1


def test_a_locked_store_is_told_and_readers_go_on(path: Path) -> None:
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


def test_a_thread_that_waits_to_write_does_not_hold_up_readers(path: Path) -> None:
    with (
        closing(SqliteStore(path, "demo", busy_timeout_s=TIMEOUT_S)) as store,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        writer = threading.Thread(target=store.add_event, args=("note", {}))
        writer.start()

        assert store.events() == []
        other.execute("ROLLBACK")
        writer.join(TIMEOUT_S)
        assert len(store.events()) == 1


# -- reading for people


def test_a_person_can_read_events_with_plain_sql(path: Path) -> None:
    with closing(SqliteStore(path, "demo", clock=lambda: 12.5)) as store:
        first_commit(store)
    with closing(sqlite3.connect(path)) as raw:
        (row,) = raw.execute("SELECT * FROM event").fetchall()

    detail = '{"generation": 1, "plan_id": 0, "reason": "first"}'
    assert row == (1, "demo", 12.5, "commit", detail)
