"""Several controllers on one store: one leads, the others stand by, and none acts on what is over.

The processes at the end are real: one is killed and the other must lead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import FencedOut, StoreError
from eplb.migration.build import Migration
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from eplb.versions import PROTOCOL, RANKS, Announcement
from rebalance.controller.lease import ControllerLease
from rebalance.controller.loop import Controller, ControllerSettings
from telemetry import open_store
from telemetry.store import Lease, LeaseOf, LoadStore, RunInfo
from telemetry.stores.memory import MemoryStore
from telemetry.stores.redis.connection.local_server import RedisProcess
from telemetry.stores.sqlite.store import SqliteStore
from tests.support.controlled_deployment import Clock
from tests.support.controller_processes import control_until_killed, wait_for
from tests.support.rank_reports import rank_report

# One layer of four experts over two ranks of three slots: one spare slot each.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
MODEL = ModelShape((0,), 4, 2, hidden=16, intermediate=8)
START = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]]), num_experts=4)
SKEWED = [60_000, 20_000, 10_000, 10_000]  # rank 0 gets 80 %: imbalance 1.6
TTL_S = 9.0
SETTINGS = ControllerSettings(lease_ttl_s=TTL_S)


class Asked:
    """A store that counts how often it was asked for the lease, and can fail or be interrupted."""

    num_asked, is_down = 0, False
    meanwhile: Callable[[], object] = int  # happens once, as a plan is about to be offered

    def acquire_lease(self, holder: str, ttl_s: float, of: LeaseOf = "controller") -> Lease | None:
        self.num_asked += 1
        if self.is_down:
            raise StoreError("the store is down, expected it up")
        return super().acquire_lease(holder, ttl_s, of)

    def next_plan_id(self) -> int:
        meanwhile, self.meanwhile = self.meanwhile, int
        meanwhile()
        return super().next_plan_id()


class AskedMemory(Asked, MemoryStore):
    pass


class AskedSqlite(Asked, SqliteStore):
    pass


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Asked]:
    path = tmp_path / "store.sqlite"
    in_memory = request.param == "memory"
    opened = (
        AskedMemory("test", clock=clock) if in_memory else AskedSqlite(path, "test", clock=clock)
    )
    yield opened
    opened.close()


def begin(store: LoadStore) -> None:
    store.commit(START, expected=None, reason="start")
    info = RunInfo("run-1", 1.0, model_to_dict(MODEL), topology_to_dict(TOPOLOGY), window_steps=4)
    store.begin_run(info)
    for rank in range(2):
        store.report(rank_report("run-1", rank))


def serve(store: LoadStore, window: int, load: list[int]) -> None:
    """Both ranks report a window in which each expert got ``load`` tokens."""
    committed = store.committed()
    assert committed is not None
    held, share = committed.placement.slot_to_expert, committed.placement.slot_share
    tokens = (np.array(load)[np.maximum(held, 0)] * share).astype(np.int64)
    steps = (4 * window, 4 * window + 3, "mixed", committed.placement.generation)
    for rank in range(2):
        here = TOPOLOGY.slots_on(rank)
        first = ("test", "run-1", rank, window, 4.0 * window)
        store.append([LoadSample(*first, *steps, held[:, here], tokens[:, here])])


def swap(store: LoadStore) -> Migration:
    """Commit the open migration as the ranks do after their swap."""
    found = store.published()
    assert found is not None
    base = found.base.generation
    store.commit(found.target, expected=base, plan_id=found.plan_id, reason="swapped")
    return found


def details(store: LoadStore, kind: str) -> list[dict[str, Any]]:
    return [dict(event.detail) for event in store.events() if event.kind == kind]


def lease_states(store: LoadStore) -> list[tuple[str, str]]:
    return [(detail["holder"], detail["state"]) for detail in details(store, "lease")]


# -- the hold on the lease


def test_lease_is_renewed_at_a_third_of_its_time_and_not_before(store: Asked, clock: Clock) -> None:
    lease = ControllerLease(store, "one", TTL_S, clock=clock)
    asked = []
    for now in (1000.0, 1002.9, 1003.0, 1005.9, 1006.0):
        clock.now = now
        assert lease.is_held()
        asked.append(store.num_asked)

    assert asked == [1, 1, 2, 2, 3]
    assert lease_states(store) == [("one", "leads")]


def test_standby_leads_when_the_lease_has_expired(store: Asked, clock: Clock) -> None:
    one, two = (ControllerLease(store, name, TTL_S, clock=clock) for name in ("one", "two"))
    assert (one.is_held(), two.is_held()) == (True, False)

    token = one.token
    clock.now += TTL_S
    assert two.is_held()

    assert two.token == token + 1
    assert not one.is_held()
    assert not one.is_held()
    assert lease_states(store) == [("one", "leads"), ("two", "leads"), ("one", "lost")]


def test_lease_that_is_given_up_is_another_s_at_once(store: Asked, clock: Clock) -> None:
    one, two = (ControllerLease(store, name, TTL_S, clock=clock) for name in ("one", "two"))
    assert (one.is_held(), two.is_held()) == (True, False)

    one.give_up()

    assert two.is_held()


def test_lease_not_renewed_in_time_is_lost_and_logged(
    store: Asked, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lease = ControllerLease(store, "one", TTL_S, clock=clock)
    assert lease.is_held()
    token = lease.token
    store.is_down = True
    for seconds in (TTL_S / 2, TTL_S / 2):
        clock.now += seconds
        with pytest.raises(StoreError, match="the store is down"):
            lease.is_held()
    assert f"token={token} lease lost: not renewed within 9 s" in caplog.text
    store.is_down = False

    assert lease.is_held()

    assert lease.token == token  # nobody had it meanwhile
    assert lease_states(store) == [("one", "leads"), ("one", "lost"), ("one", "leads")]
    assert details(store, "lease")[1]["reason"].startswith("not renewed within 9 s: ")


def test_controller_detects_work_longer_than_its_lease(store: Asked, clock: Clock) -> None:
    one, two = (ControllerLease(store, name, TTL_S, clock=clock) for name in ("one", "two"))
    assert one.is_held()
    clock.now += TTL_S
    one.check()  # nobody took it

    clock.now += TTL_S
    assert two.is_held()
    with pytest.raises(
        FencedOut, match="the lease of 'one' was taken: found another holder, expected this one"
    ):
        one.check()


# -- two controllers


def test_standby_writes_nothing_and_claims_no_task(store: Asked) -> None:
    begin(store)
    first, second = Controller(store, SETTINGS), Controller(store, SETTINGS)
    first.turn()
    serve(store, 0, SKEWED)
    task = store.submit("rebalance", {})
    before = len(store.events())

    second.turn()

    assert (store.published(), store.task(task.id)) == (None, task)
    assert len(store.events()) == before


def test_controller_does_not_lead_ranks_that_are_newer_than_it(store: Asked) -> None:
    begin(store)
    controller = Controller(store, SETTINGS, holder="c")
    controller.turn()
    assert store.lease() is not None

    newer = Announcement(RANKS, "run-2", "9.0.0", PROTOCOL + 1, PROTOCOL)
    info = RunInfo("run-2", 2.0, model_to_dict(MODEL), topology_to_dict(TOPOLOGY), window_steps=4)
    store.begin_run(info)
    store.announce(newer)
    controller.turn()
    controller.turn()

    assert store.lease() is None
    (error,) = details(store, "error")
    assert error["where"] == "version"
    assert "found the ranks of eplb 9.0.0" in error["message"]


def test_controller_that_ends_releases_its_lease(store: Asked) -> None:
    begin(store)
    serve(store, 0, SKEWED)
    first, second = Controller(store, SETTINGS), Controller(store, SETTINGS)
    first.run(lambda: store.published() is not None)
    assert store.lease() is None

    swap(store)
    for window in range(1, 5):
        serve(store, window, SKEWED[::-1])
    second.turn()

    assert [detail["generation"] for detail in details(store, "publish")] == [1, 2]


def test_plan_of_one_that_slept_through_its_lease_is_not_published(
    store: Asked, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    begin(store)
    serve(store, 0, SKEWED)
    sleeper, other = Controller(store, SETTINGS), Controller(store, SETTINGS)

    def meanwhile() -> None:
        clock.now += TTL_S  # the sleeper's own clock says nothing of it
        other.turn()
        swap(store)

    store.meanwhile = meanwhile
    sleeper.turn()

    (publish,) = details(store, "publish")
    assert publish["generation"] == 1
    assert store.published() is None
    token = details(store, "lease")[0]["token"]
    assert (
        f"token={token} lease lost: a controller writes with fencing token {token}, found "
        f"{token + 1}" in caplog.text
    )
    sleeper.turn()  # stands by from now on
    assert [state for _, state in lease_states(store)] == ["leads", "leads", "lost"]


def test_task_of_one_that_slept_through_its_lease_is_ended_by_the_other(
    store: Asked, clock: Clock
) -> None:
    begin(store)
    serve(store, 0, SKEWED)
    sleeper, other = (Controller(store, SETTINGS, clock=clock) for _ in range(2))
    task = store.submit("rebalance", {"dry_run": False})

    def meanwhile() -> None:
        clock.now += TTL_S
        other.turn()

    store.meanwhile = meanwhile
    sleeper.turn()

    ended = store.task(task.id)
    assert ended is not None
    assert ended.state == "failed"
    assert ended.result.error.startswith("the controller or its store failed during this task")
    assert len(details(store, "publish")) == 1  # the other's own, for the same load


def test_open_migration_is_watched_by_the_leader(store: Asked, clock: Clock) -> None:
    begin(store)
    serve(store, 0, SKEWED)
    settings = ControllerSettings(lease_ttl_s=TTL_S, migration_deadline_s=30.0)
    Controller(store, settings, clock=clock).turn()
    clock.now += TTL_S
    other = Controller(store, settings, monotonic=clock)
    other.turn()

    clock.now += 30.1
    other.turn()

    assert store.published() is None
    assert details(store, "abort")[0]["reason"] == "not finished in 30 s"


# -- two real processes


def leaders(store: LoadStore) -> list[str]:
    return [holder for holder, state in lease_states(store) if state == "leads"]


def test_when_the_first_controller_is_killed_the_second_leads_in_time(
    url: str, fork: Callable[..., Any]
) -> None:
    ttl_s = 1.0
    crew = {name: fork(control_until_killed, url, name, ttl_s) for name in ("one", "two")}
    with closing(open_store(url, "test")) as store:
        begin(store)
        for controller in crew.values():
            controller.send("begin")
        (first,) = wait_for(store, "leader", lambda: leaders(store))
        serve(store, 0, SKEWED)
        wait_for(store, "plan of the first", store.published)
        swap(store)

        crew[first].kill()
        _, second = wait_for(store, "second leader", lambda: leaders(store)[1:] and leaders(store))
        for window in range(1, 5):
            serve(store, window, SKEWED[::-1])
        wait_for(store, "plan of the second", store.published)

        assert {first, second} == {"one", "two"}
        tokens = [detail["token"] for detail in details(store, "lease")]
        assert tokens == [tokens[0], tokens[0] + 1]
        assert [detail["base_generation"] for detail in details(store, "publish")] == [0, 1]


# Not over SQLite, whose lock a process that is stopped in the middle of a write would keep.
def test_controllers_suspended_in_turn_publish_each_plan_once(
    redis_server: RedisProcess, tmp_path: Path, fork: Callable[..., Any]
) -> None:
    url = f"{redis_server.url}?prefix={tmp_path.name}"
    ttl_s, num_rounds = 0.3, 4
    crew = {name: fork(control_until_killed, url, name, ttl_s) for name in ("one", "two")}
    with closing(open_store(url, "test")) as store:
        begin(store)
        pids = {}
        for name, controller in crew.items():
            controller.send("begin")
            pids[name] = controller.receive()
        wait_for(store, "leader", lambda: leaders(store))
        for number in range(num_rounds):
            sleeper = leaders(store)[-1]
            os.kill(pids[sleeper], signal.SIGSTOP)
            for window in range(5 * number, 5 * number + 5):
                serve(store, window, SKEWED[:: (-1) ** number])
            wait_for(store, f"plan {number}", store.published)
            os.kill(pids[sleeper], signal.SIGCONT)
            swap(store)
            lost = (sleeper, "lost")
            wait_for(
                store, "word of the sleeper", lambda lost=lost: lease_states(store)[-1] == lost
            )

        bases = [detail["base_generation"] for detail in details(store, "publish")]
        assert bases == [*range(num_rounds)]
        assert leaders(store)[1:] == leaders(store)[:-1][::-1]  # in turn
