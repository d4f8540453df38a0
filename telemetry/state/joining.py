"""Versions of the processes of a deployment, and the refusal of one that does not fit.

    begin_run, restore      the store announces the ranks of a start with it
    controller              announces itself whenever it acquires the lease
    eplb host-cache         check_versions, then announce; each rank compares when it connects.
                            Its announcement is its heartbeat, every HEARTBEAT_S

``eplb/versions.py`` has the rule. Only what serves now counts: ranks that report, and the
controller that leads. A process that is silent cannot refuse one that joins.

An announcement may be missing for a moment: a controller acquires the lease first, and a store that
lost its contents has lost announcements too. So ``check_versions`` waits for it. A process that
serves is never taken for one of another version because its announcement is missing.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from eplb.clock import Clock
from eplb.errors import ConfigError, StoreError
from eplb.versions import CONTROLLER, HOST_CACHE, NAMES, RANKS, Announcement, refusal
from telemetry.state.holder import is_dead
from telemetry.state.store import StateStore

ANNOUNCED_WITHIN_S = 10.0  # for which a joining process waits for an announcement
HEARTBEAT_S = 5.0  # between two announcements of a host cache
SILENT_AFTER_S = 3 * HEARTBEAT_S  # age of an announcement at which a host cache counts as silent

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Present:
    """What serves: the ranks of a start, or the controller that leads."""

    component: str  # RANKS, CONTROLLER
    name: str
    announced: Announcement | None  # None: the store does not have it, yet or any more

    @property
    def version(self) -> str:
        """For people."""
        return self.announced.version if self.announced is not None else "a version not announced"


def check_versions(
    store: StateStore,
    joining: Announcement,
    *,
    wait_s: float = ANNOUNCED_WITHIN_S,
    clock: Clock = time.time,
) -> None:
    """Refuse a process whose version those that serve cannot work with.

    What serves and has not announced its version is waited for. If it does not announce itself in
    time, the process joins without a comparison, and a warning is logged.

    Args:
        wait_s: how long an announcement is waited for.
        clock: seconds since the epoch, to tell what serves.

    Raises:
        ConfigError: with the component, and the versions found and expected.
        StoreError: the store cannot be used.
    """
    deadline = time.monotonic() + wait_s
    while True:
        version = store.version()  # before the look: a later announcement ends the wait
        missing = []
        for present in serving(store, clock()):
            if not _meet(joining.component, present.component):
                continue
            if present.announced is None:
                missing.append(f"{NAMES[present.component]} {present.name!r}")
            elif why := refusal(joining, present.announced):
                raise ConfigError(why)
        left_s = deadline - time.monotonic()
        if not missing or left_s <= 0:
            break
        store.wait(version, left_s)
    if missing:
        log.warning(
            "%s of %s joins without a comparison of versions: within %g s no version was announced "
            "by %s, expected one",
            NAMES[joining.component],
            joining.version,
            wait_s,
            " and ".join(missing),
        )


def serving(store: StateStore, now: float) -> list[Present]:
    """Give the ranks that report and the controller that leads, with their versions."""
    present = []
    if (run := store.current_run()) is not None and _reports(store, run.run, now):
        present.append((RANKS, run.run))
    lease = store.lease()
    if lease is not None and lease.ttl_s and lease.expires >= now and not is_dead(lease.holder):
        present.append((CONTROLLER, lease.holder))
    known = {(seen.component, seen.name): seen for seen in store.announced()}
    return [Present(*process, known.get(process)) for process in present]


def ranks_of(store: StateStore, run: str) -> Announcement | None:
    """Give the version of the ranks of a start; None where the store does not have it."""
    matching = (seen for seen in store.announced() if (seen.component, seen.name) == (RANKS, run))
    return next(matching, None)


def host_caches(store: StateStore) -> list[Announcement]:
    """Give the latest announcement of the cache of each host, unless it was ended on purpose."""
    return [seen for seen in store.announced() if seen.component == HOST_CACHE]


def _meet(joining: str, present: str) -> bool:
    """Whether two processes exchange anything: ranks replace ranks, caches plan nothing."""
    if joining == HOST_CACHE:
        return present == RANKS
    return joining != RANKS or present != RANKS


def _reports(store: StateStore, run: str, now: float) -> bool:
    try:
        states = store.rank_states(run)
    except StoreError:  # of a version that this one cannot read: the announcement tells
        return True
    return any(state.time >= now - state.silent_after_s for state in states)
