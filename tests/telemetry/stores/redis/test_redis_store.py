"""What only the Redis store promises: exact repeats, exact retries, bounds, and its own clock."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import StoreError
from eplb.migration.build import build_migration
from telemetry import open_store
from telemetry.live import Control, LiveSettings
from telemetry.stores.redis.connection.address import RedisAddress
from telemetry.stores.redis.connection.local_server import RedisClusterProcesses, RedisProcess
from telemetry.stores.redis.scripts import CHANGE
from telemetry.stores.redis.store import RedisStore
from tests.support.limits import NEVER_S

LONG_S = 30.0

_prefixes = (f"store-{number}" for number in itertools.count())


@pytest.fixture
def address(redis_server: RedisProcess) -> RedisAddress:
    """The shared server, under a prefix of this test's own."""
    return replace(redis_server.address, prefix=next(_prefixes))


@pytest.fixture
def store(address: RedisAddress) -> Iterator[RedisStore]:
    with closing(RedisStore(address, "demo")) as opened:
        yield opened


def make_sample(rank: int, sequence: int, **changes: Any) -> LoadSample:
    fields: dict[str, Any] = {
        "deployment": "demo",
        "run": "run-1",
        "time": float(sequence),
        "first_step": sequence,
        "last_step": sequence,
        "phase": "decode",
        "generation": 1,
        "slot_to_expert": [[0, 1]],
        "tokens": [[rank, 7]],
    }
    return LoadSample(rank=rank, sequence=sequence, **(fields | changes))


def key(store: RedisStore, name: str) -> str:
    return f"{store.link.address.prefix}:{{demo}}:{name}"


# -- samples


def test_samples_in_any_order_and_number_are_each_stored_once(
    store: RedisStore, rng: np.random.Generator
) -> None:
    known: set[tuple[int, int]] = set()
    for _ in range(60):
        batch = [(int(rank), int(n)) for rank, n in rng.integers(0, (2, 90), size=(7, 2))]
        new = len(set(batch) - known)
        known |= set(batch)

        assert store.append([make_sample(rank, n) for rank, n in batch]) == new

    stored = [(sample.rank, sample.sequence) for _, sample in store.samples("run-1")]
    assert sorted(stored) == sorted(known)
    assert sum(store.sample_counts("run-1").values()) == len(known)


def test_spool_replayed_after_newer_samples_loses_and_repeats_nothing(
    store: RedisStore,
) -> None:
    store.append([make_sample(0, n) for n in range(10)])
    store.append([make_sample(0, n) for n in range(40, 50)])

    replayed = [make_sample(0, n) for n in range(5, 45)]

    assert [store.append(replayed[at : at + 8]) for at in range(0, 40, 8)] == [3, 8, 8, 8, 3]
    assert store.sample_counts("run-1") == {0: 50}
    assert store.link.read("HGET", key(store, "seen:run-1"), 0) == b"50 0:49"


def test_repeat_of_a_pruned_sample_is_still_detected(store: RedisStore) -> None:
    store.append([make_sample(0, n) for n in range(4)])
    store.prune(3.0)

    assert store.append([make_sample(0, n) for n in range(5)]) == 1
    assert [sample.sequence for _, sample in store.samples("run-1")] == [3, 4]


def test_memory_of_repeats_is_bounded(store: RedisStore) -> None:
    store.append([make_sample(0, n) for n in range(0, 2000, 2)])

    known = store.link.read("HGET", key(store, "seen:run-1"), 0)
    assert len(known.split()) == 1 + 256
    assert store.append([make_sample(0, 1997), make_sample(0, 3)]) == 1
    assert store.sample_counts("run-1") == {0: 1001}


def test_of_too_many_samples_the_oldest_go(address: RedisAddress) -> None:
    small = replace(address, limits=replace(address.limits, max_samples=3))
    with closing(RedisStore(small, "demo")) as store:
        for n in (5, 1, 2, 3, 4):
            assert store.append([make_sample(0, n)]) == 1

        assert [sample.sequence for _, sample in store.samples("run-1")] == [5, 3, 4]
        assert store.sample_counts("run-1") == {0: 5}


def test_removed_run_leaves_no_samples(store: RedisStore) -> None:
    store.append([make_sample(0, 0), make_sample(0, 1, run="run-2")])

    assert store.prune(1.0) == 1

    assert store.link.read("SMEMBERS", key(store, "sampled")) == {b"run-2"}
    assert store.link.read("EXISTS", key(store, "samples:run-1")) == 0


def test_damaged_sample_is_passed_over_and_counted(store: RedisStore) -> None:
    store.append([make_sample(0, 0)])
    ((entry_id, fields),) = store.link.read("XRANGE", key(store, "samples:run-1"), "-", "+")
    damaged = fields[b"s"][:-1] + b"\xff"
    later = f"{int(entry_id.split(b'-')[0]) + 1}-0"
    store.link.write("XADD", key(store, "samples:run-1"), later, "s", damaged)

    assert [sample.sequence for _, sample in store.samples("run-1")] == [0]
    assert store.refused() == {"damaged": 1}


def test_sequence_that_lua_cannot_count_is_refused_and_nothing_is_stored(
    store: RedisStore,
) -> None:
    with pytest.raises(StoreError, match=r"expected one below 2\*\*53"):
        store.append([make_sample(0, 0), make_sample(0, 2**53)])

    assert store.append([make_sample(0, 2**53 - 1)]) == 1
    assert store.sample_counts("run-1") == {0: 1}


# -- scripts and retries


def test_scripts_missing_on_the_server_are_sent_again(store: RedisStore) -> None:
    store.add_event("note", {})
    store.link.ask("", "SCRIPT FLUSH")

    store.add_event("note", {})
    store.append([make_sample(0, 0)])

    assert len(store.events()) == 2
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
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            for one, other, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._carry, args=(one, other, is_answer), daemon=True
                ).start()

    def _carry(self, one: socket.socket, other: socket.socket, is_answer: bool) -> None:
        with one, other:
            while data := _received(one):
                if is_answer and self._num_left == 0:
                    self._num_left = None
                    self.num_cut += 1
                    _shut(other)
                    return
                if is_answer and self._num_left is not None:
                    self._num_left -= 1
                other.sendall(data)
            for end in (one, other):
                _shut(end)


def _received(one: socket.socket) -> bytes:
    try:
        return one.recv(65536)
    except OSError:
        return b""


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other thread was first


@pytest.fixture
def cut(redis_server: RedisProcess) -> Iterator[Cut]:
    with closing(Cut(redis_server.port)) as wire:
        yield wire


def test_change_whose_answer_is_lost_is_made_once(address: RedisAddress, cut: Cut) -> None:
    with closing(RedisStore(replace(address, hosts=(("127.0.0.1", cut.port),)), "demo")) as store:
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
        assert [event.kind for event in store.events()] == ["note", "task"]
        assert store.next_plan_id() == 2
        assert store.sample_counts("run-1") == {0: 1}


def test_same_change_sent_twice_gives_the_same_answer(store: RedisStore) -> None:
    keys = [key(store, name) for name in ("state", "events", "receipt:x")]
    values = ["", "x", "", 1, key(store, "wake"), 1, "note", "{}", 0, 11]

    answers = [store.link.run("test", CHANGE, keys, values) for _ in range(2)]

    assert answers[0] == answers[1]
    assert len(store.events()) == 1


def test_event_ids_are_the_clock_so_that_a_lost_second_repeats_none(store: RedisStore) -> None:
    first = store.add_event("note", {})
    again = store.add_event("note", {})

    assert abs(first / 1000 - time.time()) < NEVER_S
    assert again > first


# -- live settings and programs of the version before, which know the switches alone


def test_kill_switch_of_an_older_program_stops_movement(store: RedisStore) -> None:
    store.change_live({"movement": True, "max_moves": 3}, reason="resumed")
    paused = '{"movement": false, "observe": false}'
    store.link.write("HSET", key(store, "state"), "control", paused)

    assert store.control() == Control(movement=False)
    state = store.set_static(LiveSettings(movement=True), reason="start")
    assert (state.control, state.live.max_moves) == (Control(movement=False), 3)


def test_older_program_reads_the_switches_that_apply(store: RedisStore) -> None:
    store.set_static(LiveSettings(observe=True), reason="start")
    store.change_live({"movement": False}, reason="incident 7")

    found = store.link.read("HGET", key(store, "state"), "control")

    assert json.loads(found) == {"movement": False, "observe": True}


def test_open_migration_with_another_hash_in_the_state_is_refused(
    address: RedisAddress, store: RedisStore
) -> None:
    base, target = (Placement(np.array([held]), 2, generation=1) for held in ([0, 1], [1, 0]))
    store.commit(base, expected=None, reason="start")
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=1)
    migration = build_migration(base, target, ranks, plan_id=1)
    store.publish(migration)
    store.link.write("HSET", key(store, "state"), "open_plan", "1 0123")

    with closing(RedisStore(address, "demo")) as opened, pytest.raises(StoreError) as caught:
        opened.published()

    assert f"number and hash 1 {migration.hash}, expected 1 0123" in str(caught.value)


# -- the lease


def test_lease_ends_by_the_watcher_s_own_clock(store: RedisStore) -> None:
    lease = store.acquire_lease("one", 0.15)
    assert lease is not None
    assert store.acquire_lease("two", LONG_S) is None

    # Nobody tells when a lease has run out: the only event is time itself.
    deadline = time.monotonic() + NEVER_S
    while store.lease() is not None:
        assert time.monotonic() < deadline, "the lease did not run out"

    taken = store.acquire_lease("two", LONG_S)
    assert taken is not None
    assert taken.token == lease.token + 1


# -- waiting, and where it is


def test_change_in_another_store_object_ends_the_wait(
    store: RedisStore, address: RedisAddress
) -> None:
    before = store.version()
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(store.wait(before, NEVER_S)))
    waiting.start()
    with closing(RedisStore(address, "demo")) as other:
        other.add_event("note", {})
        waiting.join()

        assert found == [other.version()]


def test_all_keys_of_a_deployment_lie_in_one_slot(redis_cluster: RedisClusterProcesses) -> None:
    found = replace(redis_cluster.address, prefix=next(_prefixes))
    with closing(RedisStore(found, "r1-decode")) as store:
        store.add_event("note", {})
        store.append([make_sample(0, 0, deployment="r1-decode")])
    names = [node.ask("KEYS", f"{found.prefix}:*") for node in redis_cluster.nodes]

    assert [len(held) > 0 for held in names if isinstance(held, list)].count(True) == 1


def test_open_store_accepts_redis_and_reports_durability(redis_server: RedisProcess) -> None:
    with closing(open_store(f"{redis_server.url}/1?prefix=opened", "demo")) as store:
        assert isinstance(store, RedisStore)
        assert store.durability == "none"
