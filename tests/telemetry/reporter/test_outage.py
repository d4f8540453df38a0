"""A store that goes away and comes back, ranks that are killed meanwhile: nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.errors import RankError
from telemetry import open_store
from telemetry.reporter.reporter import Reporter
from telemetry.reporter.spool import Spool
from telemetry.store import RankState
from telemetry.stores.sqlite.store import SqliteStore
from tests.support.limits import NEVER_S

BUSY_S = 0.02  # how long these stores wait for a writer that has gone to sleep


def make_sample(sequence: int, run: str = "run-1") -> LoadSample:
    slot, one = np.array([[0]]), np.array([[1]])
    return LoadSample("demo", run, 0, sequence, 0.0, sequence, sequence, "decode", 1, slot, one)


class Outages:
    """Takes a store away from all who write to it: another writer sleeps in its transaction."""

    def __init__(self, path: Path) -> None:
        self._sleeper = sqlite3.connect(path, isolation_level=None, timeout=NEVER_S)

    def begin(self) -> None:
        self._sleeper.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        if self._sleeper.in_transaction:
            self._sleeper.execute("ROLLBACK")

    def close(self) -> None:
        self.end()
        self._sleeper.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(tmp_path / "store.sqlite", "demo", busy_timeout_s=BUSY_S)) as store:
        yield store


@pytest.fixture
def outages(tmp_path: Path, store: SqliteStore) -> Iterator[Outages]:
    with closing(Outages(tmp_path / "store.sqlite")) as outages:
        yield outages


def sequences(store: SqliteStore, run: str = "run-1") -> list[int]:
    return [sample.sequence for _, sample in store.samples(run, limit=1_000_000)]


def test_outage_is_spooled_and_replayed_soon_after_the_store_s_return(
    tmp_path: Path, store: SqliteStore, outages: Outages
) -> None:
    reporter = Reporter(store, spool=Spool(tmp_path / "spool", capacity=8))
    outages.begin()
    for sequence in range(300):
        reporter.offer(make_sample(sequence))
        if sequence % 50 == 0:
            reporter.secure(NEVER_S)
    with pytest.raises(RankError, match="300 samples not stored"):
        reporter.flush(5 * BUSY_S)

    during = reporter.stats()
    outages.end()
    reporter.flush(NEVER_S)

    after = reporter.stats()
    assert (during.waiting, during.waiting_in_memory, during.stored) == (300, 0, 0)
    assert during.bytes_on_disk > 300 * 100
    assert sorted(sequences(store)) == list(range(300))
    assert (after.stored, after.repeated, after.dropped, after.waiting) == (300, 0, 0, 0)
    assert after.spooled == after.replayed >= 300 - 8
    assert after.errors_by_kind["StoreError"] == after.errors >= 1
    reporter.close(NEVER_S)


def test_reporter_that_ends_in_an_outage_leaves_its_samples_to_the_next(
    tmp_path: Path, store: SqliteStore, outages: Outages
) -> None:
    outages.begin()
    first = Reporter(store, spool=Spool(tmp_path / "spool"))
    for sequence in range(3):
        first.offer(make_sample(sequence))
    with pytest.raises(RankError, match=r"3 samples not stored within 0\.2 s, 3 of them on disk"):
        first.close(0.2)
    outages.end()

    second = Reporter(store, spool=Spool(tmp_path / "spool"))
    second.offer(make_sample(0, run="run-2"))
    second.flush(NEVER_S)

    assert (sequences(store), sequences(store, "run-2")) == ([0, 1, 2], [0])
    assert (second.stats().recovered, second.stats().replayed) == (3, 3)
    second.close(NEVER_S)


def test_state_of_now_does_not_wait_for_the_backlog(
    tmp_path: Path, store: SqliteStore, outages: Outages
) -> None:
    outages.begin()
    reporter = Reporter(store, spool=Spool(tmp_path / "spool"))
    for step in range(3):
        reporter.offer(make_sample(step))
        reporter.state(RankState("run-1", 0, float(step), step, 1, "idle", 0, 0, step, 0))
    outages.end()
    reporter.flush(NEVER_S)

    assert [state.step for state in store.rank_states("run-1")] == [2]
    reporter.close(NEVER_S)


def test_without_a_disk_to_take_them_samples_are_not_called_secure(
    store: SqliteStore, outages: Outages
) -> None:
    outages.begin()
    reporter = Reporter(store)
    reporter.offer(make_sample(0))

    with pytest.raises(RankError, match=r"1 samples are only in memory after 0\.1 s"):
        reporter.secure(0.1)
    outages.end()
    reporter.close(NEVER_S)


def test_impossible_sample_is_refused_and_holds_up_no_other(
    tmp_path: Path, store: SqliteStore
) -> None:
    reporter = Reporter(store, spool=Spool(tmp_path / "spool"))
    reporter.offer(make_sample(0))
    reporter.offer(replace(make_sample(1), deployment="other"))
    reporter.offer(replace(make_sample(2), sequence=2**70))
    reporter.offer(make_sample(3))

    with pytest.raises(RankError, match="2 dropped or refused, expected all 4 stored"):
        reporter.flush(NEVER_S)
    assert sequences(store) == [0, 3]
    assert (reporter.stats().refused, reporter.stats().waiting) == (2, 0)
    reporter.close(NEVER_S)


def test_sample_rejected_by_the_store_does_not_block_others(
    tmp_path: Path, store: SqliteStore
) -> None:
    with closing(sqlite3.connect(tmp_path / "store.sqlite")) as other:
        other.execute(
            "CREATE TRIGGER never BEFORE INSERT ON sample WHEN NEW.sequence = 0 "
            "BEGIN SELECT RAISE(ABORT, 'a constraint'); END"
        )
    reporter = Reporter(store, spool=Spool(tmp_path / "spool"))
    for sequence in range(10):
        reporter.offer(make_sample(sequence))

    with pytest.raises(RankError, match=r"1 dropped or refused.* last error: .*constraint"):
        reporter.flush(NEVER_S)
    assert sorted(sequences(store)) == list(range(1, 10))
    reporter.close(NEVER_S)


def test_redis_has_every_sample_after_kill_and_restart(tmp_path: Path) -> None:
    servers = pytest.importorskip(
        "telemetry.stores.redis.connection.local_server", reason="needs the Redis store"
    )
    settings = {"appendonly": "yes", "appendfsync": "always"}  # what it took survives its death
    with servers.RedisProcess(tmp_path / "redis", settings) as server:
        limits = "deadline_s=0.2&cool_down_s=0.2&connect_timeout_s=0.2"
        with closing(open_store(f"{server.url}?{limits}", "demo")) as store:
            reporter = Reporter(store, spool=Spool(tmp_path / "spool"))
            for sequence in range(10):
                reporter.offer(make_sample(sequence))
            server.kill()
            for sequence in range(10, 40):
                reporter.offer(make_sample(sequence))
            reporter.secure(NEVER_S)
            server.start()
            reporter.flush(NEVER_S)

            stored = [sample.sequence for _, sample in store.samples("run-1")]
            assert sorted(stored) == list(range(40))
            reporter.close(NEVER_S)


# -- ranks killed at random moments


def report_until_killed(folder: Path, run: str, seed: int, pipe: Connection) -> None:
    """A rank: offers samples, tells how many are secured, while the store comes and goes."""
    draw = random.Random(seed)
    store = SqliteStore(folder / "store.sqlite", "demo", busy_timeout_s=BUSY_S)
    reporter = Reporter(store, spool=Spool(folder / "spool", capacity=4), seed=seed)
    outages = Outages(folder / "store.sqlite")
    num_offered = 0
    while True:
        for _ in range(draw.randrange(1, 6)):
            reporter.offer(make_sample(num_offered, run))
            num_offered += 1
        reporter.secure(NEVER_S)
        pipe.send(num_offered)
        outages.end()
        if draw.random() < 0.5:
            outages.begin()


def killed_rank(folder: Path, run: str, seed: int) -> int:
    """Run a rank and kill it at a random moment; return how many samples it had secured."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    rank = context.Process(target=report_until_killed, args=(folder, run, seed, theirs))
    rank.start()
    theirs.close()
    draw = random.Random(seed)
    secured = 0
    for _ in range(draw.randrange(1, 30)):
        assert ours.poll(NEVER_S), f"rank of {run} secured nothing in {NEVER_S:g} s"
        secured = ours.recv()
    ours.poll(draw.uniform(0.0, 0.003))  # in the middle of whatever it does then
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGKILL)
    rank.join()
    with suppress(EOFError):
        while True:
            secured = ours.recv()
    assert rank.exitcode == -signal.SIGKILL
    return secured


def kill_ranks(folder: Path, store: SqliteStore, num_kills: int) -> None:
    """Kill ranks one after the other on one spool, and ask the store for all they had secured."""
    secured = {f"run-{n}": killed_rank(folder, f"run-{n}", seed=n) for n in range(num_kills)}
    last = Reporter(store, spool=Spool(folder / "spool"))
    last.flush(NEVER_S)

    for run, num_secured in secured.items():
        stored = sequences(store, run)
        assert len(set(stored)) == len(stored), f"{run}: stored twice"
        assert set(range(num_secured)) <= set(stored), f"{run}: a secured sample is lost"
    last.close(NEVER_S)
    assert [path.name for path in (folder / "spool").iterdir()] == ["lock"]


def test_five_ranks_killed_at_random_moments_lose_nothing_they_had_secured(
    tmp_path: Path, store: SqliteStore
) -> None:
    kill_ranks(tmp_path, store, 5)


@pytest.mark.slow
def test_hundred_ranks_killed_at_random_lose_no_secured_sample(
    tmp_path: Path, store: SqliteStore
) -> None:
    kill_ranks(tmp_path, store, 100)
