"""What Redis acknowledged survives kill -9 of it, at any moment, as far as is promised."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb.errors import FencedOut, StoreError
from telemetry.state.lease import Lease
from telemetry.state.store import StateStore
from telemetry.state.tasks import TaskResult
from tests.support.redis_servers import RedisProcess
from tests.support.stores import PATIENT, make_placement, make_sample, redis_store, sequences

pytestmark = pytest.mark.system

# No second attempt: each failure is seen, and what follows it starts anew.
ONCE = replace(PATIENT, deadline_s=0.001)


class Writer:
    """Changes the store until told to stop, and remembers what was acknowledged."""

    def __init__(self, server: RedisProcess) -> None:
        self.events: list[int] = []
        self.sequences: list[int] = []
        self.generation = 0
        self.plan_ids: list[int] = []
        self.tokens: list[int] = []
        self.tasks: list[int] = []
        self._server = server
        self._changed = threading.Condition()
        self._num_rounds = 0
        self._is_stopping = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for_rounds(self, number: int) -> None:
        """Wait for so many more rounds of writes, acknowledged or failed."""
        with self._changed:
            last = self._num_rounds + number
            self._changed.wait_for(lambda: self._num_rounds >= last or self._broken)

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()
        assert self._broken is None, f"the writer failed: {self._broken!r}"

    def _run(self) -> None:
        number = 0
        try:
            with closing(redis_store(replace(self._server.address, limits=ONCE), "demo")) as store:
                while not self._is_stopping:
                    number += 1
                    try:
                        self._write(store, number)
                    except StoreError:
                        continue
                    finally:
                        with self._changed:
                            self._num_rounds += 1
                            self._changed.notify_all()
        except Exception as exc:
            with self._changed:
                self._broken = exc
                self._changed.notify_all()

    def _write(self, store: StateStore, number: int) -> None:
        self.events.append(store.add_event("note", {"n": number}))
        store.append([make_sample(0, number)])
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


def acquired(store: StateStore, holder: str) -> Lease:
    """Take the lease as soon as the one before, of milliseconds, was seen to stand for its time."""
    while (lease := store.acquire_lease(holder, 30.0)) is None:
        pass
    return lease


@contextmanager
def synced(folder: Path) -> Iterator[RedisProcess]:
    with RedisProcess(folder, {"appendonly": "yes", "appendfsync": "always"}) as server:
        yield server


@contextmanager
def opened(server: RedisProcess) -> Iterator[StateStore]:
    with closing(redis_store(replace(server.address, limits=PATIENT), "demo")) as store:
        yield store


@pytest.mark.parametrize("num_kills", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_acknowledged_writes_survive_sigkill_of_the_server(tmp_path: Path, num_kills: int) -> None:
    moments = np.random.default_rng(num_kills)
    with synced(tmp_path) as server:
        writer = Writer(server)
        try:
            for _ in range(num_kills):
                writer.wait_for_rounds(int(moments.integers(2, 40)))
                server.kill()
                server.start()
        finally:
            writer.stop()

        with opened(server) as store:
            assert store.backend.durability == "always"
            lease = acquired(store, "last")
            kept = {event.id for event in store.events(limit=1_000_000)}
            stored = sequences(store)
            committed = store.committed()
            assert set(writer.events) <= kept
            assert len(set(writer.events)) == len(writer.events)
            assert set(writer.sequences) <= set(stored)
            assert store.sample_counts("run-1") == {0: len(set(stored))}
            assert committed is not None
            assert committed.placement.generation >= writer.generation > 0
            assert store.next_plan_id() > max(writer.plan_ids)
            assert lease.token > max(writer.tokens)
            assert all(store.task(task_id) is not None for task_id in writer.tasks)
            assert len(set(writer.tasks)) == len(writer.tasks)


def test_ids_lost_in_a_crash_are_not_given_out_again(tmp_path: Path) -> None:
    folder, copy = tmp_path / "redis", tmp_path / "earlier"
    with synced(folder) as server, opened(server) as store:

        def numbers() -> tuple[int, int]:
            return store.next_plan_id(), store.submit("rebalance", {}).id

        first, of_first = acquired(store, "zero"), numbers()
        assert store.release_lease(first)
        shutil.copytree(folder, copy)
        lost, of_lost = acquired(store, "one"), numbers()
        assert store.release_lease(lost)
        server.kill()
        shutil.rmtree(folder)
        copy.rename(folder)
        server.start()

        again, of_again = acquired(store, "two"), numbers()

        assert [of_first, of_lost, of_again] == [(1, 1), (2, 2), (1002, 1002)]
        assert (lost.token, again.token) == (first.token + 1, first.token + 1001)
        with pytest.raises(FencedOut):
            store.claim(fence=lost.token)


# -- torn in the middle of a change


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


def check_whole(store: StateStore) -> None:
    """Every part of what is there belongs to the rest of it."""
    stored = sequences(store)
    assert 7 in stored
    assert len(set(stored)) == len(stored)
    assert store.sample_counts("run-1") == {0: len(stored)}
    assert len(store.samples_before(1e9)) == len(stored)
    committed = store.committed()
    assert committed is not None
    assert committed.placement.generation in (1, 2)
    while (task := store.claim()) is not None:
        store.finish(task.id, "done", TaskResult())
    assert store.tasks("running") == []
    assert store.prune(1e9) == len(stored)
    assert store.samples("run-1") == []
    before = store.version()
    event = store.add_event("again", {})
    assert [again.id for again in store.latest_events(limit=1)] == [event]
    assert store.version() > before


CHANGES: dict[str, Callable[[StateStore], object]] = {
    "samples": lambda store: store.append([make_sample(0, n) for n in (7, 8)]),
    "commit": lambda store: store.commit(make_placement(2), expected=1, reason="torn"),
    "task": lambda store: store.submit("rebalance", {}),
}


@pytest.mark.parametrize("torn", CHANGES)
def test_change_torn_at_any_command_leaves_a_consistent_store(tmp_path: Path, torn: str) -> None:
    with synced(tmp_path / "redis") as server:
        with opened(server) as store:
            store.commit(make_placement(1), expected=None, reason="first")
            store.append([make_sample(0, 1)])
            # Redis 7 keeps the file in a folder of its own.
            folder = server.folder
            (journal,) = [*folder.glob("appendonly.aof"), *folder.glob("*/*.incr.aof")]
            num_before = len(commands_of(journal))
            CHANGES[torn](store)
        server.kill()
        whole, ends = journal.read_bytes(), commands_of(journal)
        assert len(ends) > num_before + 5
        for cut in ends[num_before:-1]:
            # In the middle of the next command: what is left is a transaction without its end.
            journal.write_bytes(whole[: cut + 5])
            server.start()
            with opened(server) as store:
                store.append([make_sample(0, 2), make_sample(0, 7)])  # 7 is sent again
            server.kill()
            server.start()
            with opened(server) as store:
                check_whole(store)
            server.kill()
