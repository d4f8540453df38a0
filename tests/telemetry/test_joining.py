"""Who is refused by the versions that a store holds: those that serve count, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from eplb.errors import ConfigError
from eplb.versions import CONTROLLER, HOST_CACHE, PROTOCOL, RANKS, Announcement
from telemetry import MemoryStore
from telemetry.joining import check_versions, host_caches, ranks_of, serving
from telemetry.store import RankState, RunInfo

NOW = 1000.0
LATER = Announcement("", "", "9.0.0", PROTOCOL + 1, PROTOCOL)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with closing(MemoryStore("west", clock=lambda: NOW)) as opened:
        yield opened


def begin(store: MemoryStore, *, reported_s_ago: float) -> None:
    store.begin_run(RunInfo("a", NOW, {}, {}, 10))
    store.report(RankState("a", 0, NOW - reported_s_ago, 7, 1, "idle", 0, 0, 1, 0))


def test_start_of_ranks_announces_their_version(store: MemoryStore) -> None:
    begin(store, reported_s_ago=1.0)

    assert ranks_of(store, "a") == Announcement(RANKS, "a", time=NOW)
    assert list(serving(store, NOW)) == [Announcement(RANKS, "a", time=NOW)]


@pytest.mark.parametrize(
    ("component", "words"), [(CONTROLLER, "the controller of"), (HOST_CACHE, "the host cache of")]
)
def test_older_process_is_refused_while_ranks_report(
    store: MemoryStore, component: str, words: str
) -> None:
    begin(store, reported_s_ago=1.0)
    store.announce(replace(LATER, component=RANKS, name="a"))

    with pytest.raises(ConfigError, match=words):
        check_versions(store, Announcement(component, "c"), NOW)


def test_ranks_newer_than_the_leading_controller_are_refused_until_its_lease_ran_out(
    store: MemoryStore,
) -> None:
    store.acquire_lease("c", 10.0)  # it announced nothing: protocol 1

    with pytest.raises(ConfigError, match="before ranks"):
        check_versions(store, Announcement(RANKS, "b"), NOW)
    check_versions(store, Announcement(RANKS, "b"), NOW + 11.0)


def test_silent_ranks_and_a_standby_refuse_nobody(store: MemoryStore) -> None:
    begin(store, reported_s_ago=60.0)
    store.announce(replace(LATER, component=RANKS, name="a"))
    store.announce(replace(LATER, component=CONTROLLER, name="standby", protocol=9, oldest=8))
    store.acquire_lease("c", 10.0)

    check_versions(store, Announcement(CONTROLLER, "d"), NOW)


def test_ranks_replace_ranks_of_any_version(store: MemoryStore) -> None:
    begin(store, reported_s_ago=1.0)
    store.announce(replace(LATER, component=RANKS, name="a", protocol=9, oldest=8))

    check_versions(store, Announcement(RANKS, "b"), NOW)


def test_latest_start_of_each_host_cache_is_shown(store: MemoryStore) -> None:
    for host in ("0", "1", "0"):
        store.announce(Announcement(HOST_CACHE, host))

    assert [one.name for one in host_caches(store)] == ["1", "0"]
