"""What Redis acknowledged survives kill -9 of it, at any moment, as far as is promised."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.errors import FencedOut, StoreError
from telemetry.store import Lease, TaskResult
from telemetry.stores.redis.connection.address import Limits
from telemetry.stores.redis.connection.local_server import RedisProcess
from telemetry.stores.redis.store import RedisStore
from tests.support.limits import NEVER_S

pytestmark = pytest.mark.system

# No second attempt and no breaker: each failure is seen, and what follows it starts anew.
ONCE = Limits(deadline_s=0.001, breaker_failures=1_000_000)


def make_sample(sequence: int) -> LoadSample:
    return LoadSample(
        "demo", "run-1", 0, sequence, 1.0, 0, 0, "decode", 1, np.array([[0]]), np.array([[1]])
    )


def make_placement(generation: int) -> Placement:
    return Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=generation)


class Writer:
    """Changes the store until told to stop, and remembers what was acknowledged."""

    def __init__(self, server: RedisProcess) -> None:
        self.events: dict[int, float] = {}  # when each was acknowledged
        self.sequences: list[int] = []
        self.generation = 0
        self.plan_ids: list[int] = []
        self.tokens: list[int] = []
        self.tasks: list[int] = []
        self.kills: list[float] = []
        self.num_failed = 0
        self._server = server
        self._is_stopping = threading.Event()
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()
        assert not self._thread.is_alive(), "the writer did not stop"
        assert self._broken is None, f"the writer failed: {self._broken!r}"

    def _run(self) -> None:
        address = replace(self._server.address, limits=ONCE)
        try:
            with closing(RedisStore(address, "demo")) as store:
                number = 0
                while not self._is_stopping.is_set():
                    number += 1
                    try:
                        self._write(store, number)
                    except StoreError:
                        self.num_failed += 1
                        self._is_stopping.wait(0.002)
        except Exception as exc:
            self._broken = exc

    def _write(self, store: RedisStore, number: int) -> None:
        event_id = store.add_event("note", {"n": number})
        assert event_id not in self.events, f"event id {event_id} was given out twice"
        self.events[event_id] = time.monotonic()
        store.append([make_sample(number)])
        self.sequences.append(number)
        known = store.committed()
        expected = known.placement.generation if known else None
        store.commit(make_placement(number), expected=expected, reason="test")
        self.generation = number
        self.plan_ids.append(store.next_plan_id())
        lease = store.acquire_lease(f"holder-{number}", 0.0001)
        if lease is not None:
            self.tokens.append(lease.token)
        self.tasks.append(store.submit("rebalance", {"n": number}).id)


def acquired(store: RedisStore, holder: str) -> Lease:
    """Take the lease as soon as the one before, of milliseconds, was seen to stand for its time."""
    deadline = time.monotonic() + NEVER_S
    while (lease := store.acquire_lease(holder, 30.0)) is None:
        assert time.monotonic() < deadline, "the lease did not run out"
    return lease


def check_that_nothing_is_lost(server: RedisProcess, writer: Writer) -> None:
    with closing(RedisStore(server.address, "demo")) as store:
        kept = {event.id for event in store.events(limit=1_000_000)}
        stored = {sample.sequence for _, sample in store.samples("run-1", limit=1_000_000)}
        committed = store.committed()
        lease = acquired(store, "last")

        assert not writer.events.keys() - kept
        assert not set(writer.sequences) - stored
        assert store.sample_counts("run-1")[0] == len(stored)
        assert committed is not None
        assert committed.placement.generation >= writer.generation
        assert store.next_plan_id() > max(writer.plan_ids)
        assert lease.token > max(writer.tokens)
        assert all(store.task(task_id) is not None for task_id in writer.tasks)
        assert len(set(writer.tasks)) == len(writer.tasks)


def kill_again_and_again(server: RedisProcess, times: int, lives_s: tuple[float, float]) -> Writer:
    """Kill a server that is written to, each time after a random life; give what was written."""
    moments = np.random.default_rng(times)
    writer = Writer(server)
    try:
        for _ in range(times):
            threading.Event().wait(float(moments.uniform(*lives_s)))
            writer.kills.append(time.monotonic())
            server.kill()
            server.start()
    finally:
        writer.stop()
    return writer


@contextmanager
def synced(folder: Path, fsync: str) -> Iterator[RedisProcess]:
    with RedisProcess(folder, {"appendonly": "yes", "appendfsync": fsync}) as server:
        with closing(RedisStore(server.address, "demo")) as store:
            assert store.durability == fsync
        yield server


def test_acknowledged_writes_survive_sigkill_of_the_server(tmp_path: Path) -> None:
    with synced(tmp_path, "always") as server:
        writer = kill_again_and_again(server, times=4, lives_s=(0.02, 0.2))

        check_that_nothing_is_lost(server, writer)
        assert len(writer.sequences) > 4


@pytest.mark.slow
def test_acknowledged_writes_survive_a_hundred_kills(tmp_path: Path) -> None:
    with synced(tmp_path, "always") as server:
        writer = kill_again_and_again(server, times=100, lives_s=(0.02, 0.2))

        check_that_nothing_is_lost(server, writer)
        assert len(writer.sequences) > 100


@pytest.mark.slow
def test_with_everysec_what_was_acknowledged_two_seconds_before_survives(tmp_path: Path) -> None:
    with synced(tmp_path, "everysec") as server:
        writer = kill_again_and_again(server, times=20, lives_s=(2.0, 4.0))

        with closing(RedisStore(server.address, "demo")) as store:
            kept = {event.id for event in store.events(limit=1_000_000)}
        ages_s = [
            min(kill - writer.events[lost] for kill in writer.kills if kill > writer.events[lost])
            for lost in writer.events.keys() - kept
        ]
        assert max(ages_s, default=0.0) < 2.1
        assert len(writer.plan_ids) == len(set(writer.plan_ids))
        assert len(writer.tasks) == len(set(writer.tasks))
        assert len(writer.tokens) == len(set(writer.tokens))


def test_ids_lost_in_a_crash_are_not_given_out_again(
    tmp_path: Path,
) -> None:
    folder, copy = tmp_path / "redis", tmp_path / "earlier"
    with synced(folder, "always") as server, closing(RedisStore(server.address, "demo")) as store:
        first = store.acquire_lease("zero", 0.001)
        numbers = [(store.next_plan_id(), store.submit("rebalance", {}).id)]
        shutil.copytree(folder, copy)
        lost = acquired(store, "one")
        numbers.append((store.next_plan_id(), store.submit("rebalance", {}).id))
        assert first is not None
        server.kill()
        shutil.rmtree(folder)
        copy.rename(folder)
        server.start()

        again = acquired(store, "two")
        numbers.append((store.next_plan_id(), store.submit("rebalance", {}).id))

        assert numbers == [(1, 1), (2, 2), (1002, 1002)]
        assert again.token == first.token + 1001
        assert lost.token == first.token + 1
        with pytest.raises(FencedOut, match=r"fencing token \d+, found \d+, of 'two'"):
            store.claim(fence=lost.token)


def commands_of(journal: Path) -> list[int]:
    """Where each command of an append-only file ends."""
    ends, at, data = [], 0, journal.read_bytes()
    while at < len(data):
        end = data.index(b"\r\n", at)
        num_words, at = int(data[at + 1 : end]), end + 2
        for _ in range(num_words):
            end = data.index(b"\r\n", at)
            at = end + 2 + int(data[at + 1 : end]) + 2
        ends.append(at)
    return ends


def journal_of(folder: Path) -> Path:
    # Redis 7 keeps the file in a folder of its own.
    (journal,) = [*folder.glob("appendonly.aof"), *folder.glob("*/*.incr.aof")]
    return journal


def writes_torn(store: RedisStore) -> None:
    store.append([make_sample(sequence) for sequence in (7, 8)])


def commits_torn(store: RedisStore) -> None:
    store.commit(make_placement(2), expected=1, reason="torn")


def queues_torn(store: RedisStore) -> None:
    store.submit("rebalance", {})


def check_whole(store: RedisStore) -> None:
    """Every part of what is there belongs to the rest of it."""
    sequences = [sample.sequence for _, sample in store.samples("run-1")]
    assert len(set(sequences)) == len(sequences)
    assert store.sample_counts("run-1") == {0: len(sequences)}
    assert len(store.samples_before(1e9)) == len(sequences)
    committed = store.committed()
    assert committed is not None
    assert committed.placement.generation in (1, 2)
    while (task := store.claim()) is not None:
        store.finish(task.id, "done", TaskResult())
    assert store.tasks("running") == []
    assert store.prune(1e9) == len(sequences)
    assert store.samples("run-1") == []


@pytest.mark.parametrize("torn", [writes_torn, commits_torn, queues_torn])
def test_change_torn_at_any_command_leaves_a_consistent_store(
    tmp_path: Path, torn: Callable[[RedisStore], None]
) -> None:
    with synced(tmp_path / "redis", "always") as server:
        with closing(RedisStore(server.address, "demo")) as store:
            store.commit(make_placement(1), expected=None, reason="first")
            store.append([make_sample(1)])
            journal = journal_of(server.folder)
            num_before = len(commands_of(journal))
            torn(store)
        server.kill()
        whole, ends = journal.read_bytes(), commands_of(journal)
        for cut in ends[num_before:-1]:
            # In the middle of the next command: what is left is a transaction without its end.
            journal.write_bytes(whole[: cut + 5])
            server.start()
            with closing(RedisStore(server.address, "demo")) as store:
                store.append([make_sample(2), make_sample(7)])  # 7 is sent again
            server.kill()
            server.start()
            with closing(RedisStore(server.address, "demo")) as store:
                assert 7 in [sample.sequence for _, sample in store.samples("run-1")]
                check_whole(store)
            server.kill()
        assert len(ends[num_before:-1]) > 4


def test_writes_before_a_torn_write_are_kept(tmp_path: Path) -> None:
    with RedisProcess(tmp_path, {"appendonly": "yes", "appendfsync": "always"}) as server:
        with closing(RedisStore(server.address, "demo")) as store:
            first = store.add_event("kept", {})
            store.add_event("torn", {})
        server.kill()
        # Redis 7 keeps the file in a folder of its own.
        (journal,) = [*tmp_path.glob("appendonly.aof"), *tmp_path.glob("*/*.incr.aof")]
        with journal.open("r+b") as file:
            file.truncate(journal.stat().st_size - 30)
        server.start()

        with closing(RedisStore(server.address, "demo")) as store:
            # The change was one transaction, so all of it is gone: event, version and receipt.
            assert [event.id for event in store.events()] == [first]
            assert store.version() == first
            assert store.add_event("again", {}) > first
