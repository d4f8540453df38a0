"""Who is refused by the versions that a store holds: those that serve count, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.errors import ConfigError
from eplb.versions import CONTROLLER, HOST_CACHE, PROTOCOL, RANKS, Announcement
from rebalance.controller.lease import ControllerLease
from telemetry.state.joining import Present, check_versions, host_caches, ranks_of, serving
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

    assert ranks_of(store, "a") == Announcement(RANKS, "a", time=NOW)
    assert serving(store, NOW) == [Present(RANKS, "a", Announcement(RANKS, "a", time=NOW))]


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


def test_latest_start_of_each_host_cache_is_shown(store: StateStore) -> None:
    for host in ("0", "1", "0"):
        store.announce(Announcement(HOST_CACHE, host))

    assert sorted(one.name for one in host_caches(store)) == ["0", "1"]
