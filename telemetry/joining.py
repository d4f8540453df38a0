"""Versions of the processes of a deployment, and the refusal of one that does not fit.

    begin_run, restore      the store announces the ranks of a start with it
    build_controller        check_versions, then announce
    eplb host-cache         check_versions, then announce; each rank compares when it connects

``eplb/versions.py`` has the rule. Only what serves now counts: ranks that report, and the
controller that leads. A process that is silent cannot refuse one that joins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from eplb.errors import ConfigError, StoreError
from eplb.versions import CONTROLLER, HOST_CACHE, RANKS, Announcement, refusal, unannounced
from telemetry.store import LoadStore
from telemetry.stores.holder import is_dead


def check_versions(store: LoadStore, joining: Announcement, now: float | None = None) -> None:
    """Refuse a process whose version those that serve cannot work with.

    Raises:
        ConfigError: with the component, and the versions found and expected.
        StoreError: the store cannot be used.
    """
    for present in serving(store, time.time() if now is None else now):
        if not _meet(joining, present):
            continue
        if why := refusal(joining, present):
            raise ConfigError(why)


def serving(store: LoadStore, now: float) -> Iterator[Announcement]:
    """Give the versions of the ranks that report and of the controller that leads."""
    known = {(one.component, one.name): one for one in store.announced()}
    if (run := store.current_run()) is not None and _reports(store, run.run, now):
        yield known.get((RANKS, run.run), unannounced(RANKS, run.run))
    lease = store.lease()
    if lease is not None and lease.ttl_s and lease.expires >= now and not is_dead(lease.holder):
        yield known.get((CONTROLLER, lease.holder), unannounced(CONTROLLER, lease.holder))


def ranks_of(store: LoadStore, run: str) -> Announcement:
    """Give the version of the ranks of a start."""
    found = (one for one in store.announced() if (one.component, one.name) == (RANKS, run))
    return next(found, unannounced(RANKS, run))


def host_caches(store: LoadStore) -> list[Announcement]:
    """Give the version with which the cache of each host was started last."""
    return [one for one in store.announced() if one.component == HOST_CACHE]


def _meet(joining: Announcement, present: Announcement) -> bool:
    """Whether two processes exchange anything: ranks replace ranks, caches plan nothing."""
    if joining.component == HOST_CACHE:
        return present.component == RANKS
    return joining.component != RANKS or present.component != RANKS


def _reports(store: LoadStore, run: str, now: float) -> bool:
    try:
        states = store.rank_states(run)
    except StoreError:  # of a version that this one cannot read: the announcement tells
        return True
    return any(state.time >= now - state.silent_after_s for state in states)
