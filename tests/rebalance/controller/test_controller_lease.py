"""Several controllers on one store: one leads, the others stand by, and none acts on what is over.

The processes at the end are real: one is killed and the other must lead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from eplb.errors import FencedOut, StoreError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from eplb.versions import PROTOCOL, RANKS, Announcement
from rebalance.controller.lease import ControllerLease
from telemetry import open_store
from telemetry.state.lease import Lease, LeaseOf
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.controlled_deployment import (
    MODEL,
    SETTINGS,
    SKEWED,
    START,
    TOPOLOGY,
    Clock,
    Deployment,
    events,
)
from tests.support.controller_processes import begin, control_until_killed, wait_for
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess
from tests.support.stores import MemoryStore

TTL_S = SETTINGS.lease_ttl_s


class Asked(MemoryStore):
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


@pytest.fixture
def store(clock: Clock) -> Asked:
    return Asked("test", clock=clock)


@pytest.fixture
def deployment(store: Asked, clock: Clock) -> Deployment:
    """Ranks that have served skewed load."""
    return begun(store, clock)


def begun(store: StateStore, clock: Clock | None = None) -> Deployment:
    store.commit(START, expected=None, reason="start")
    deployment = Deployment(store, clock=clock)
    deployment.serve(SKEWED)
    return deployment


def details(store: StateStore, kind: str) -> list[dict[str, Any]]:
    return [dict(event.detail) for event in events(store, kind)]


def lease_states(store: StateStore) -> list[tuple[str, str]]:
    return [(detail["holder"], detail["state"]) for detail in details(store, "lease")]


# -- the hold on the lease


def two_leases(store: StateStore, clock: Clock) -> tuple[ControllerLease, ControllerLease]:
    """The first is held."""
    one, two = (ControllerLease(store, name, TTL_S, clock=clock) for name in ("one", "two"))
    assert (one.is_held(), two.is_held()) == (True, False)
    return one, two


def test_standby_leads_when_the_lease_has_expired(store: Asked, clock: Clock) -> None:
    one, two = two_leases(store, clock)

    token = one.token
    clock.now += TTL_S
    assert two.is_held()

    assert two.token == token + 1
    assert [one.is_held(), one.is_held()] == [False, False]
    assert lease_states(store) == [("one", "leads"), ("two", "leads"), ("one", "lost")]


def test_lease_that_is_given_up_is_another_s_at_once(store: Asked, clock: Clock) -> None:
    one, two = two_leases(store, clock)

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
        with pytest.raises(StoreError):
            lease.is_held()
    assert f"token={token} lease lost: not renewed within 10 s" in caplog.text
    store.is_down = False

    assert lease.is_held()

    assert lease.token == token  # nobody had it meanwhile
    assert lease_states(store) == [("one", "leads"), ("one", "lost"), ("one", "leads")]


def test_controller_detects_work_longer_than_its_lease(store: Asked, clock: Clock) -> None:
    one, two = two_leases(store, clock)
    clock.now += TTL_S
    one.check()  # nobody took it

    clock.now += TTL_S
    assert two.is_held()
    with pytest.raises(FencedOut, match="'one'"):
        one.check()


# -- two controllers


def test_of_two_controllers_on_a_store_one_leads_until_its_lease_is_over(
    any_store: StateStore, pass_time: Callable[[float], None]
) -> None:
    deployment = begun(any_store)
    first, second = deployment.controller(holder="one"), deployment.controller(holder="two")
    first.turn()
    task = any_store.submit("rebalance", {})
    before = any_store.version()

    second.turn()
    assert any_store.version() == before, "a standby writes nothing and claims no task"
    deployment.swap()
    deployment.serve(SKEWED[::-1], windows=4)
    pass_time(TTL_S)
    second.turn()

    assert deployment.task(task.id).state == "done"
    assert lease_states(any_store) == [("one", "leads"), ("two", "leads")]
    assert [detail["generation"] for detail in details(any_store, "publish")] == [1, 2]


def test_controller_does_not_lead_ranks_that_are_newer_than_it(
    store: Asked, deployment: Deployment
) -> None:
    controller = deployment.controller()
    controller.turn()
    assert store.lease() is not None

    described = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
    store.begin_run(RunInfo("run-2", 2.0, *described, window_steps=4))
    store.announce(Announcement(RANKS, "run-2", "9.0.0", PROTOCOL + 1, PROTOCOL))
    controller.turn()
    controller.turn()

    assert store.lease() is None
    (error,) = details(store, "error")
    assert error["where"] == "version"
    assert "9.0.0" in error["message"]


def test_controller_that_ends_releases_its_lease(store: Asked, deployment: Deployment) -> None:
    first, second = deployment.controller(holder="one"), deployment.controller(holder="two")
    first.run(lambda: store.published() is not None)
    assert store.lease() is None

    deployment.swap()
    deployment.decide_on(second, SKEWED[::-1], windows=4)

    assert [detail["generation"] for detail in details(store, "publish")] == [1, 2]


def test_plan_of_one_that_slept_through_its_lease_is_not_published(
    store: Asked, deployment: Deployment, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    # The sleeper's own clock says nothing of it.
    sleeper = deployment.controller(holder="sleeper", monotonic=Clock())

    def meanwhile() -> None:
        clock.now += TTL_S
        deployment.controller(holder="other").turn()
        deployment.swap()

    store.meanwhile = meanwhile
    sleeper.turn()

    (publish,) = details(store, "publish")
    assert publish["generation"] == 1
    assert store.published() is None
    token = details(store, "lease")[0]["token"]
    assert f"token={token} lease lost: " in caplog.text
    sleeper.turn()  # stands by from now on
    assert [state for _, state in lease_states(store)] == ["leads", "leads", "lost"]


def test_task_of_one_that_slept_through_its_lease_is_ended_by_the_other(
    store: Asked, deployment: Deployment, clock: Clock
) -> None:
    sleeper, other = (deployment.controller(holder=name) for name in ("sleeper", "other"))
    task = store.submit("rebalance", {"dry_run": False})

    def meanwhile() -> None:
        clock.now += TTL_S
        other.turn()

    store.meanwhile = meanwhile
    sleeper.turn()

    ended = deployment.task(task.id)
    assert (ended.state, ended.result.plan_id) == ("failed", 0)
    assert len(details(store, "publish")) == 1  # the other's own, for the same load


def test_open_migration_is_watched_by_the_next_leader(
    store: Asked, deployment: Deployment, clock: Clock
) -> None:
    deployment.controller(holder="one").turn()
    clock.now += TTL_S
    other = deployment.controller(holder="two")
    other.turn()

    clock.now += SETTINGS.migration_deadline_s + 0.1
    other.turn()

    assert store.published() is None
    assert len(details(store, "abort")) == 1


# -- two real processes


def leaders(store: StateStore) -> list[str]:
    return [holder for holder, state in lease_states(store) if state == "leads"]


@pytest.mark.system
def test_when_the_first_controller_is_killed_the_second_leads(
    url: str, fork: Callable[..., ForkedProcess]
) -> None:
    # A lease that no slow turn outlives; a death on this host ends it at once.
    crew = [fork(control_until_killed, url, NEVER_S) for _ in range(2)]
    with closing(open_store(url, "test")) as store:
        deployment = begun(store)
        controllers = begin(crew)
        wait_for(store, store.published)
        (first,) = leaders(store)
        deployment.swap()

        controllers[first].kill()
        wait_for(store, lambda: leaders(store)[1:])
        deployment.serve(SKEWED[::-1], windows=4)
        wait_for(store, store.published)

        assert set(leaders(store)) == set(controllers)
        tokens = [detail["token"] for detail in details(store, "lease")]
        assert tokens == [tokens[0], tokens[0] + 1]
        assert [detail["base_generation"] for detail in details(store, "publish")] == [0, 1]


# Not over SQLite, whose lock a process that is stopped in the middle of a write would keep.
@pytest.mark.system
@pytest.mark.parametrize("url", ["redis"], indirect=True)
def test_controllers_suspended_in_turn_publish_each_plan_once(
    url: str, fork: Callable[..., ForkedProcess]
) -> None:
    num_rounds = 3
    crew = [fork(control_until_killed, url, 1.0) for _ in range(2)]
    with closing(open_store(url, "test")) as store:
        deployment = begun(store)
        begin(crew)
        wait_for(store, lambda: leaders(store))
        for number in range(num_rounds):
            sleeper = int(leaders(store)[-1].split(":")[-2])
            os.kill(sleeper, signal.SIGSTOP)
            deployment.serve(SKEWED[:: (-1) ** number], windows=5)
            wait_for(store, store.published)
            os.kill(sleeper, signal.SIGCONT)
            deployment.swap()

        bases = [detail["base_generation"] for detail in details(store, "publish")]
        assert bases == [*range(num_rounds)]
