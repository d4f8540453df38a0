"""What Redis acknowledged survives kill -9 of it, on the append-only file, at any moment."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb.errors import StoreError
from eplb.load import LoadSample
from eplb.placement import Placement
from telemetry.redis_address import Limits
from telemetry.redis_process import RedisProcess
from telemetry.redis_store import RedisStore

TIMEOUT_S = 60.0
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
        self.events: list[int] = []
        self.sequences: list[int] = []
        self.generation = 0
        self.plan_id = 0
        self.token = 0
        self.tasks: list[int] = []
        self.num_failed = 0
        self._server = server
        self._is_stopping = threading.Event()
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join(TIMEOUT_S)
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
        self.events.append(store.add_event("note", {"n": number}))
        store.append([make_sample(number)])
        self.sequences.append(number)
        known = store.committed()
        expected = known.placement.generation if known else None
        store.commit(make_placement(number), expected=expected, reason="test")
        self.generation = number
        self.plan_id = store.next_plan_id()
        lease = store.acquire_lease(f"holder-{number}", 0.0001)
        self.token = lease.token if lease is not None else self.token
        self.tasks.append(store.submit("rebalance", {"n": number}).id)


def check_that_nothing_is_lost(server: RedisProcess, writer: Writer) -> None:
    with closing(RedisStore(server.address, "demo")) as store:
        kept = {event.id for event in store.events(limit=1_000_000)}
        stored = {sample.sequence for _, sample in store.samples("run-1", limit=1_000_000)}
        committed = store.committed()
        lease = store.acquire_lease("last", 1.0)

        assert not set(writer.events) - kept
        assert not set(writer.sequences) - stored
        assert store.sample_counts("run-1")[0] == len(stored)
        assert committed is not None
        assert committed.placement.generation >= writer.generation
        assert store.next_plan_id() > writer.plan_id
        assert lease is not None
        assert lease.token >= writer.token
        assert all(store.task(task_id) is not None for task_id in writer.tasks)
        assert len(set(writer.tasks)) == len(writer.tasks)


def kill_again_and_again(folder: Path, fsync: str, times: int, seed: int) -> Writer:
    """Kill a server that is written to, at random moments, and look after each start."""
    moments = np.random.default_rng(seed)
    with RedisProcess(folder, {"appendonly": "yes", "appendfsync": fsync}) as server:
        with closing(RedisStore(server.address, "demo")) as store:
            assert store.durability == fsync
        writer = Writer(server)
        try:
            for _ in range(times):
                threading.Event().wait(float(moments.uniform(0.02, 0.2)))
                server.kill()
                server.start()
        finally:
            writer.stop()
        check_that_nothing_is_lost(server, writer)
    return writer


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_what_was_acknowledged_survives_kill_9_of_the_server(tmp_path: Path, fsync: str) -> None:
    writer = kill_again_and_again(tmp_path, fsync, times=3, seed=1)

    assert len(writer.sequences) > 10


@pytest.mark.slow
@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_what_was_acknowledged_survives_a_hundred_kills(tmp_path: Path, fsync: str) -> None:
    writer = kill_again_and_again(tmp_path, fsync, times=100, seed=2)

    assert writer.num_failed >= 50
    assert len(writer.sequences) > 1000


def test_what_was_written_before_a_torn_write_is_kept(tmp_path: Path) -> None:
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
