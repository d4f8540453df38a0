"""What only the Redis store promises: exact repeats, exact retries, bounds, what was lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from eplb.errors import StoreError
from telemetry.state.live import LiveState
from telemetry.state.redis_address import RedisAddress
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.redis_servers import RedisProcess
from tests.support.stores import (
    kinds,
    make_placement,
    make_sample,
    own_address,
    redis_store,
    sequences,
)

Ask = Callable[..., object]


@pytest.fixture
def address(redis_server: RedisProcess) -> RedisAddress:
    """The shared server, under a prefix of this test's own."""
    return own_address(redis_server.address)


@pytest.fixture
def store(address: RedisAddress) -> Iterator[StateStore]:
    with closing(redis_store(address, "demo")) as opened:
        yield opened


@pytest.fixture
def ask(redis_server: RedisProcess, address: RedisAddress) -> Ask:
    """Run a command on a key of the deployment, beside the store."""
    return lambda command, name, *words: redis_server.ask(
        command, f"{address.prefix}:{{demo}}:{name}", *words
    )


# -- samples


def test_samples_in_any_order_and_number_are_each_stored_once(
    store: StateStore, rng: np.random.Generator
) -> None:
    known: set[tuple[int, int]] = set()
    for _ in range(30):
        batch = [(int(rank), int(n)) for rank, n in rng.integers(0, (2, 60), size=(7, 2))]
        new = len(set(batch) - known)
        known |= set(batch)

        assert store.append([make_sample(rank, n) for rank, n in batch]) == new

    stored = [(sample.rank, sample.sequence) for _, sample in store.samples("run-1")]
    assert sorted(stored) == sorted(known)
    assert sum(store.sample_counts("run-1").values()) == len(known)


def test_spool_replayed_after_newer_samples_loses_and_repeats_nothing(store: StateStore) -> None:
    store.append([make_sample(0, n) for n in (*range(10), *range(40, 50))])
    store.prune(3.0)

    replayed = [make_sample(0, n) for n in range(45)]

    assert [store.append(replayed[at : at + 9]) for at in range(0, 45, 9)] == [0, 8, 9, 9, 4]
    assert store.sample_counts("run-1") == {0: 50}
    assert sorted(sequences(store)) == list(range(3, 50))


def test_memory_of_repeats_and_of_samples_is_bounded(address: RedisAddress, ask: Ask) -> None:
    small = replace(address, limits=replace(address.limits, max_samples=3))
    with closing(redis_store(small, "demo")) as store:
        store.append([make_sample(0, n) for n in range(0, 2000, 2)])

        known = ask("HGET", "seen:run-1", "0")
        assert isinstance(known, bytes)
        assert len(known.split()) == 1 + 256
        assert store.append([make_sample(0, 1997), make_sample(0, 3)]) == 1
        assert store.sample_counts("run-1") == {0: 1001}
        assert sequences(store) == [1996, 1998, 1997]


def test_damaged_sample_is_passed_over_and_counted(store: StateStore, ask: Ask) -> None:
    store.append([make_sample(0, 0)])
    ask("XADD", "samples:run-1", "9000000000000000-0", "s", "no sample")

    assert sequences(store) == [0]
    assert store.refused() == {"damaged": 1}


def test_sequence_that_lua_cannot_count_is_refused_and_nothing_is_stored(
    store: StateStore,
) -> None:
    with pytest.raises(StoreError, match=r"2\*\*53"):
        store.append([make_sample(0, 0), make_sample(0, 2**53)])

    assert store.append([make_sample(0, 2**53 - 1)]) == 1
    assert store.sample_counts("run-1") == {0: 1}


# -- scripts and retries


def test_scripts_missing_on_the_server_are_sent_again(
    store: StateStore, redis_server: RedisProcess
) -> None:
    store.add_event("note", {})
    redis_server.ask("SCRIPT FLUSH")

    store.add_event("note", {})
    store.append([make_sample(0, 0)])

    assert kinds(store) == ["note", "note"]
    assert store.sample_counts("run-1") == {0: 1}


class Cut:
    """A wire to the server that breaks when told to: after the request, before its answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._num_left: int | None = None  # answers that still pass
        self.num_cut = 0
        threading.Thread(target=self._admit, daemon=True).start()

    def after(self, num_answered: int) -> None:
        self._num_left = num_answered

    def close(self) -> None:
        self._door.close()

    def _admit(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._door.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for ends in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket, is_answer: bool) -> None:
        with one, other, suppress(OSError):
            while data := one.recv(65536):
                if is_answer and self._num_left is not None:
                    self._num_left -= 1
                    if self._num_left < 0:
                        self._num_left = None
                        self.num_cut += 1
                        break
                other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)
            one.shutdown(socket.SHUT_RDWR)


def test_change_whose_answer_is_lost_is_made_once(
    address: RedisAddress, redis_server: RedisProcess
) -> None:
    with (
        closing(Cut(redis_server.port)) as cut,
        closing(redis_store(replace(address, hosts=(("127.0.0.1", cut.port),)), "demo")) as store,
    ):
        # What rests on the state looks at it first, so that the second answer is the change's.
        for change, num_answered in (
            (lambda: store.add_event("note", {}), 0),
            (lambda: store.submit("rebalance", {}), 1),
            (lambda: store.next_plan_id(), 1),
            (lambda: store.append([make_sample(0, 0)]), 0),
        ):
            cut.after(num_answered)
            change()

        assert cut.num_cut == 4
        assert kinds(store) == ["note", "task"]
        assert store.next_plan_id() == 2
        assert store.sample_counts("run-1") == {0: 1}


# -- what was lost, or written by others


def test_emptied_store_gives_out_greater_ids_and_is_restored(
    store: StateStore, redis_server: RedisProcess, address: RedisAddress
) -> None:
    store.commit(make_placement(1), expected=None, reason="first")
    before = store.add_event("note", {}), store.acquire_lease("one", 30.0)
    keys = redis_server.ask("KEYS", f"{address.prefix}:*")
    assert isinstance(keys, list)
    redis_server.ask("DEL", *(key.decode() for key in keys))

    run = RunInfo("run-1", 1.0, {}, {}, 4)
    assert store.committed() is None
    assert store.restore(run, make_placement(7), LiveState(), last_plan_id=4, reason="lost")
    after = store.add_event("note", {}), store.acquire_lease("two", 30.0)

    assert after[0] > before[0]
    assert before[1] is not None
    assert after[1] is not None
    assert after[1].token != before[1].token


def test_event_ids_are_the_server_s_clock_so_that_a_lost_second_repeats_none(
    address: RedisAddress,
) -> None:
    with closing(redis_store(address, "demo", clock=lambda: 1.0)) as store:
        first, again = (store.add_event("note", {}) for _ in range(2))

        assert again > first > 1000 * 1_600_000_000
        assert first < 1000 * (time.time() + 3600)
