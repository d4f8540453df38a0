"""Who is refused by the versions that a store holds: those that serve count, and no others."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.errors import ConfigError, StoreError
from eplb.versions import (
    CONTROLLER,
    HOST_CACHE,
    LAUNCHER,
    PROTOCOL,
    RANKS,
    SERVICE,
    Announcement,
)
from rebalance.controller.lease import ControllerLease
from telemetry.state import joining
from telemetry.state.holder import new_holder
from telemetry.state.joining import (
    FORGOTTEN_S,
    HEARTBEAT_S,
    MISSED_BEATS,
    Heartbeat,
    Present,
    check_alone,
    check_versions,
    claims_elsewhere,
    heartbeats,
    ranks_of,
    serving,
)
from telemetry.state.live import LiveState
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.stores import MemoryStore

NOW = 1000.0
RUN = RunInfo("a", NOW, {}, {}, 10)
LATER = Announcement("", "", "9.0.0", PROTOCOL + 1, PROTOCOL)
EARLIER = Announcement(CONTROLLER, "c", "0.0.9", PROTOCOL - 1, PROTOCOL - 2)


class AnnouncingStore(MemoryStore):
    """A store in which processes announce themselves once somebody waits for it."""

    late: tuple[Announcement, ...] = ()

    def wait(self, version: int, timeout_s: float) -> int:
        late, self.late = self.late, ()
        if not late:
            return super().wait(version, timeout_s)
        for announced in late:
            self.announce(announced)
        return self.version()


@pytest.fixture
def store() -> Iterator[AnnouncingStore]:
    with closing(AnnouncingStore("west", clock=lambda: NOW)) as opened:
        yield opened


def check(store: MemoryStore, component: str, *, now: float = NOW, wait_s: float = NEVER_S) -> None:
    """Have a process of this version join."""
    check_versions(store, Announcement(component, "joins"), wait_s=wait_s, clock=lambda: now)


def begin(store: MemoryStore, *, reported_s_ago: float) -> None:
    store.begin_run(RUN)
    report(store, reported_s_ago=reported_s_ago)


def report(store: MemoryStore, *, reported_s_ago: float) -> None:
    store.report(RankState("a", 0, NOW - reported_s_ago, 7, 1, "idle", 0, 0, 1, 0))


def test_start_of_ranks_announces_their_version(store: StateStore) -> None:
    begin(store, reported_s_ago=1.0)

    announced = Announcement(RANKS, "a", time=NOW, since=NOW)
    assert ranks_of(store, "a") == announced
    assert serving(store, NOW) == [Present(RANKS, "a", announced)]


@pytest.mark.parametrize(
    ("component", "words"), [(CONTROLLER, "the controller of"), (HOST_CACHE, "the host cache of")]
)
def test_older_process_is_refused_while_ranks_report(
    store: StateStore, component: str, words: str
) -> None:
    begin(store, reported_s_ago=1.0)
    store.announce(replace(LATER, component=RANKS, name="a"))

    with pytest.raises(ConfigError, match=words):
        check(store, component)


def test_ranks_newer_than_the_leading_controller_are_refused_until_its_lease_ran_out(
    store: StateStore,
) -> None:
    store.acquire_lease("c", 10.0)
    store.announce(EARLIER)

    with pytest.raises(ConfigError, match="before ranks"):
        check(store, RANKS)
    check(store, RANKS, now=NOW + 11.0)


def test_late_announcement_is_waited_for_and_compared(store: AnnouncingStore) -> None:
    store.acquire_lease("c", 10.0)
    store.late = (EARLIER,)

    with pytest.raises(ConfigError, match="before ranks"):
        check(store, RANKS)


def test_process_joins_as_soon_as_a_fitting_version_is_announced(
    store: AnnouncingStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.acquire_lease("c", 10.0)
    store.late = (Announcement(CONTROLLER, "c"),)

    check(store, RANKS)

    assert "without a comparison" not in caplog.text


def test_process_that_never_announces_its_version_is_named_and_refuses_nobody(
    store: AnnouncingStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.acquire_lease("c", 10.0)

    check(store, RANKS, wait_s=0.0)

    assert "the controller 'c', expected one" in caplog.text
    (present,) = serving(store, NOW)
    assert (present.announced, present.version) == (None, "a version not announced")


@pytest.mark.parametrize("component", [RANKS, CONTROLLER, HOST_CACHE])
def test_store_that_lost_its_contents_refuses_nobody(
    store: AnnouncingStore, component: str, caplog: pytest.LogCaptureFixture
) -> None:
    begin(store, reported_s_ago=1.0)
    leader = ControllerLease(store, "c", 9.0, clock=iter([0.0, 4.0]).__next__)
    assert leader.is_held()

    store.backend.lose()
    placement = Placement(np.array([[0, 1]]), num_experts=2)
    assert store.restore(RUN, placement, LiveState(), last_plan_id=0, reason="a rank of the run")
    report(store, reported_s_ago=1.0)
    assert leader.is_held()  # the next renewal

    check(store, component)
    versions = [present.version for present in serving(store, NOW)]
    assert versions == [Announcement(component, "").version] * 2
    assert "without a comparison" not in caplog.text


def test_silent_ranks_and_a_standby_refuse_nobody(store: StateStore) -> None:
    begin(store, reported_s_ago=60.0)
    store.announce(replace(LATER, component=RANKS, name="a"))
    store.announce(replace(LATER, component=CONTROLLER, name="standby", protocol=9, oldest=8))
    store.acquire_lease("c", 10.0)

    store.announce(Announcement(CONTROLLER, "c"))

    check(store, CONTROLLER)


def test_ranks_replace_ranks_of_any_version(store: StateStore) -> None:
    begin(store, reported_s_ago=1.0)
    store.announce(replace(LATER, component=RANKS, name="a", protocol=9, oldest=8))

    check(store, RANKS)


def beating(component: str, name: str) -> Announcement:
    return Announcement(component, name, every_s=HEARTBEAT_S)


def named_here(*numbers: int) -> list[str]:
    """Names of processes of this host."""
    return [new_holder().replace(":", f":{number}", 1) for number in numbers]


def test_heartbeats_are_those_of_processes_that_the_topology_or_an_hour_expects() -> None:
    now = NOW
    hosts = [(HOST_CACHE, "0"), (HOST_CACHE, "1"), (LAUNCHER, "0")]
    (controller,) = named_here(1)
    with closing(MemoryStore("west", clock=lambda: now)) as store:
        for component, name in (*hosts, hosts[0], (CONTROLLER, controller)):
            store.announce(beating(component, name))
        store.announce(Announcement(CONTROLLER, "embedded"))

        found = [(one.component, one.name) for one in heartbeats(store, now)]
        later = [(one.component, one.name) for one in heartbeats(store, now + FORGOTTEN_S + 1)]

    assert sorted(found) == [(CONTROLLER, controller), *hosts]
    assert sorted(later) == hosts


def test_each_of_two_services_of_a_host_is_missed_until_one_takes_its_place() -> None:
    now = NOW
    first, second, third = (beating(SERVICE, name) for name in named_here(1, 2, 3))
    with closing(MemoryStore("west", clock=lambda: now)) as store:

        def beat(at: float, *services: Announcement) -> list[str]:
            nonlocal now
            now = at
            for one in services:
                store.announce(one)
            return [one.name for one in heartbeats(store, now)]

        beat(NOW, first, second)
        both = beat(NOW + 100, second)
        after = beat(NOW + 200, second, third)

    assert both == [first.name, second.name]
    assert after == [second.name, third.name]


def announced_in(store: StateStore) -> list[str]:
    return [one.component for one in store.announced()]


def wait_until(store: StateStore, expected: list[str]) -> None:
    while announced_in(store) != expected:
        store.wait(store.version(), 0.01)


class Shared(MemoryStore):
    """A store of several openers, each of which closes it; it may fail at their call."""

    is_broken = False
    beats = 0

    def close(self) -> None:
        """Leave it to the others."""

    def announce(self, mine: Announcement) -> None:
        self.beats += 1
        if self.is_broken:
            raise StoreError("does not answer")
        super().announce(mine)


@pytest.mark.parametrize("component", [CONTROLLER, HOST_CACHE, LAUNCHER, SERVICE])
def test_process_announces_again_after_a_store_lost_its_contents_and_retires(
    component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "HEARTBEAT_S", 0.01)
    store = Shared("west")
    with Heartbeat(lambda: store, component, "0"):
        wait_until(store, [component])
        assert check_versions(store, Announcement(RANKS, "joins"), wait_s=0.0) is None
        store.backend.lose()
        wait_until(store, [component])
        store.is_broken = True
        seen = store.beats
        while store.beats < seen + 3:
            store.wait(store.version(), 0.01)
        store.is_broken = False
        store.backend.lose()
        wait_until(store, [component])

    assert announced_in(store) == []


def test_heartbeat_that_was_stopped_for_a_fork_leaves_no_thread_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "HEARTBEAT_S", 0.01)
    store, threads = Shared("west"), threading.active_count()
    heart = Heartbeat(lambda: store, LAUNCHER, "0")
    for _ in range(2):
        heart.start()
        store.backend.lose()
        wait_until(store, [LAUNCHER])
        heart.stop()
        assert threading.active_count() == threads
    assert announced_in(store) == [LAUNCHER]  # it has not ended on purpose


@pytest.fixture
def first(store: AnnouncingStore) -> Iterator[Announcement]:
    """A launcher of host 0 that announces itself again and again."""
    mine = Heartbeat(lambda: store, LAUNCHER, "0").mine
    store.announce(mine)
    has_ended = threading.Event()

    def announce() -> None:
        while not has_ended.wait(0.01):
            store.announce(mine)

    thread = threading.Thread(target=announce)
    thread.start()
    yield mine
    has_ended.set()
    thread.join()


def test_second_machine_of_a_host_is_refused_and_names_both_processes(
    store: AnnouncingStore, first: Announcement
) -> None:
    second = Heartbeat(lambda: store, LAUNCHER, "0").mine
    me = f"process {os.getpid()} on host {socket.gethostname()}"

    with pytest.raises(ConfigError, match=f"the launcher of host 0 is {me}, and this is {me}"):
        check_alone(store, second)


def test_other_hosts_and_components_are_no_second_machine(
    store: AnnouncingStore, first: Announcement
) -> None:
    check_alone(store, Heartbeat(lambda: store, LAUNCHER, "1").mine)
    check_alone(store, Heartbeat(lambda: store, HOST_CACHE, "0").mine)

    assert claims_elsewhere(store, 0) == []  # both are of this machine


@pytest.mark.parametrize("late_s", [0.0, MISSED_BEATS * HEARTBEAT_S + 1.0])
def test_process_that_was_killed_or_is_silent_leaves_the_place_of_its_host(late_s: float) -> None:
    now = NOW
    with closing(MemoryStore("west", clock=lambda: now)) as store:
        before = Heartbeat(lambda: store, LAUNCHER, "0").mine
        ended = re.sub(r"-\d+-", "-1-", before.process)  # a process that began with the machine
        store.announce(replace(before, process=before.process if late_s else ended))
        now += late_s

        check_alone(store, mine := Heartbeat(lambda: store, LAUNCHER, "0").mine)

        assert [one.process for one in store.announced()] == [mine.process]


def test_process_of_another_machine_claims_its_host(store: AnnouncingStore) -> None:
    store.announce(Announcement(HOST_CACHE, "0", process="gpu7:42:0f0f0f0f-1-abcdef"))

    assert claims_elsewhere(store, 0) == ["the host cache of host 0 is process 42 on host gpu7"]
    assert claims_elsewhere(store, 1) == []
