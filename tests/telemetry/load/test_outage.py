"""A store that goes away and comes back, ranks that are killed meanwhile: nothing is lost."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from eplb.errors import RankError
from telemetry.load.reporter import Reporter
from telemetry.load.spool import Spool
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess
from tests.support.redis_servers import RedisProcess
from tests.support.stores import PATIENT, make_sample, redis_store, sequences, sqlite_store

BUSY_S = 0.02  # how long these stores wait for a writer that has gone to sleep


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
def store(tmp_path: Path) -> Iterator[StateStore]:
    with closing(sqlite_store(tmp_path / "store.sqlite", "demo", busy_timeout_s=BUSY_S)) as store:
        yield store


@pytest.fixture
def outages(tmp_path: Path, store: StateStore) -> Iterator[Outages]:
    with closing(Outages(tmp_path / "store.sqlite")) as outages:
        yield outages


def test_outage_is_spooled_and_replayed_after_the_store_s_return(
    tmp_path: Path, store: StateStore, outages: Outages
) -> None:
    reporter = Reporter(store, spool=Spool(tmp_path / "spool", capacity=8))
    outages.begin()
    for sequence in range(60):
        reporter.offer(make_sample(0, sequence))
        if sequence % 20 == 0:
            reporter.secure(NEVER_S)
    with pytest.raises(RankError, match="60 samples"):
        reporter.flush(5 * BUSY_S)

    while not reporter.stats().errors:
        reporter.secure(NEVER_S)
    during = reporter.stats()
    outages.end()
    reporter.flush(NEVER_S)

    after = reporter.stats()
    assert (during.waiting, during.waiting_in_memory, during.stored) == (60, 0, 0)
    assert during.bytes_on_disk > 60 * 100
    assert sorted(sequences(store)) == list(range(60))
    assert (after.stored, after.repeated, after.dropped, after.waiting) == (60, 0, 0, 0)
    assert after.spooled == after.replayed >= 60 - 8
    assert after.errors_by_kind["StoreError"] == after.errors >= 1
    reporter.close(NEVER_S)


def test_reporter_that_ends_in_an_outage_leaves_its_samples_to_the_next(
    tmp_path: Path, store: StateStore, outages: Outages
) -> None:
    outages.begin()
    first = Reporter(store, spool=Spool(tmp_path / "spool"))
    for sequence in range(3):
        first.offer(make_sample(0, sequence))
    with pytest.raises(RankError, match=r"3 samples .*3 of them on disk"):
        first.close(0.05)
    outages.end()

    second = Reporter(store, spool=Spool(tmp_path / "spool"))
    second.offer(make_sample(0, 0, run="run-2"))
    second.flush(NEVER_S)

    assert (sequences(store), sequences(store, "run-2")) == ([0, 1, 2], [0])
    assert (second.stats().recovered, second.stats().replayed) == (3, 3)
    second.close(NEVER_S)


def test_state_of_now_does_not_wait_for_the_backlog(
    tmp_path: Path, store: StateStore, outages: Outages
) -> None:
    outages.begin()
    reporter = Reporter(store, spool=Spool(tmp_path / "spool"))
    for step in range(3):
        reporter.offer(make_sample(0, step))
        reporter.state(RankState("run-1", 0, float(step), step, 1, "idle", 0, 0, step, 0))
    outages.end()
    reporter.flush(NEVER_S)

    assert [state.step for state in store.rank_states("run-1")] == [2]
    reporter.close(NEVER_S)


def test_without_a_disk_to_take_them_samples_are_not_called_secure(
    store: StateStore, outages: Outages
) -> None:
    outages.begin()
    reporter = Reporter(store)
    reporter.offer(make_sample(0, 0))

    with pytest.raises(RankError, match="1 samples are only in memory"):
        reporter.secure(0.01)
    outages.end()
    reporter.close(NEVER_S)


def test_impossible_sample_is_refused_and_holds_up_no_other(
    tmp_path: Path, store: StateStore
) -> None:
    reporter = Reporter(store, spool=Spool(tmp_path / "spool"))
    reporter.offer(make_sample(0, 0))
    reporter.offer(make_sample(0, 1, deployment="other"))
    reporter.offer(replace(make_sample(0, 2), sequence=2**70))
    reporter.offer(make_sample(0, 3))

    with pytest.raises(RankError, match=r"2 dropped or refused.*4"):
        reporter.flush(NEVER_S)
    assert sequences(store) == [0, 3]
    assert (reporter.stats().refused, reporter.stats().waiting) == (2, 0)
    reporter.close(NEVER_S)


def test_sample_rejected_by_the_store_does_not_block_others(
    tmp_path: Path, store: StateStore
) -> None:
    with closing(sqlite3.connect(tmp_path / "store.sqlite")) as other:
        other.execute(
            "CREATE TRIGGER never BEFORE INSERT ON sample WHEN NEW.sequence = 0 "
            "BEGIN SELECT RAISE(ABORT, 'a constraint'); END"
        )
    reporter = Reporter(store, spool=Spool(tmp_path / "spool"))
    for sequence in range(10):
        reporter.offer(make_sample(0, sequence))

    with pytest.raises(RankError, match=r"1 dropped or refused.*constraint"):
        reporter.flush(NEVER_S)
    assert sorted(sequences(store)) == list(range(1, 10))
    reporter.close(NEVER_S)


@pytest.mark.system
def test_redis_has_every_sample_after_kill_and_restart(tmp_path: Path) -> None:
    settings = {"appendonly": "yes", "appendfsync": "always"}  # what it took survives its death
    with RedisProcess(tmp_path / "redis", settings) as server:
        once = replace(server.address, limits=replace(PATIENT, deadline_s=0.001))
        with closing(redis_store(once, "demo")) as store:
            reporter = Reporter(store, spool=Spool(tmp_path / "spool"))
            for sequence in range(10):
                reporter.offer(make_sample(0, sequence))
            server.kill()
            for sequence in range(10, 40):
                reporter.offer(make_sample(0, sequence))
            reporter.secure(NEVER_S)
            server.start()
            reporter.flush(NEVER_S)

            assert sorted(sequences(store)) == list(range(40))
            reporter.close(NEVER_S)


# -- ranks killed at random moments


def report_until_killed(pipe: Connection, folder: Path, run: str, seed: int) -> None:
    """A rank: offers samples, tells how many are secured, while the store comes and goes."""
    draw = random.Random(seed)
    store = sqlite_store(folder / "store.sqlite", "demo", busy_timeout_s=BUSY_S)
    reporter = Reporter(store, spool=Spool(folder / "spool", capacity=4), seed=seed)
    outages = Outages(folder / "store.sqlite")
    num_offered = 0
    while True:
        for _ in range(draw.randrange(1, 6)):
            reporter.offer(make_sample(0, num_offered, run=run))
            num_offered += 1
        reporter.secure(NEVER_S)
        pipe.send(num_offered)
        outages.end()
        if draw.random() < 0.5:
            outages.begin()


def killed_rank(folder: Path, run: str, seed: int) -> int:
    """Run a rank and kill it in the middle of its work; return how many samples it had secured."""
    rank = ForkedProcess(report_until_killed, folder, run, seed)
    told: list[int] = [rank.receive() for _ in range(random.Random(seed).randrange(1, 30))]
    rank.kill()
    return max(told + rank.remaining())


@pytest.mark.parametrize(
    "num_kills",
    [pytest.param(5, marks=pytest.mark.system), pytest.param(100, marks=pytest.mark.slow)],
)
def test_ranks_killed_one_after_the_other_lose_no_secured_sample(
    tmp_path: Path, store: StateStore, num_kills: int
) -> None:
    secured = {f"run-{n}": killed_rank(tmp_path, f"run-{n}", seed=n) for n in range(num_kills)}
    last = Reporter(store, spool=Spool(tmp_path / "spool"))
    last.flush(NEVER_S)

    for run, num_secured in secured.items():
        stored = sequences(store, run)
        assert len(set(stored)) == len(stored), f"{run}: stored twice"
        assert set(range(num_secured)) <= set(stored), f"{run}: a secured sample is lost"
    last.close(NEVER_S)
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["lock"]
