"""Versions of the processes of a deployment, and the refusal of one that does not fit.

    begin_run, restore      the store announces the ranks of a start with it
    controller              announces itself whenever it acquires the lease
    eplb host-cache         check_versions, then announce; each rank compares when it connects

Controllers, host caches, launchers and services also announce themselves every ``HEARTBEAT_S``
(``Heartbeat``), so that a store that lost its contents has them again, and a process that is gone
is noticed.

``eplb/versions.py`` has the rule. Only what serves now counts: ranks that report, and the
controller that leads. A process that is silent cannot refuse one that joins.

An announcement may be missing for a moment: a controller acquires the lease first, and a store that
lost its contents has lost announcements too. So ``check_versions`` waits for it. A process that
serves is never taken for one of another version because its announcement is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from threading import Event, Thread

from eplb.clock import Clock
from eplb.errors import ConfigError, EplbError, StoreError
from eplb.versions import CONTROLLER, HOST_CACHE, NAMES, RANKS, Announcement, refusal
from telemetry.state.holder import host_of, is_dead, is_here, new_holder, shown
from telemetry.state.store import StateStore

ANNOUNCED_WITHIN_S = 10.0  # for which a joining process waits for an announcement
HEARTBEAT_S = 5.0  # between two announcements of a process
MISSED_BEATS = 3  # after so many intervals a process counts as silent
WATCHED_S, LOOK_S = 1.5 * HEARTBEAT_S, 0.25  # for a beat of another process; between two looks
FORGOTTEN_S = 3600.0  # a silent process of no host of the topology is not expected back after that
END_DEADLINE_S = 15.0  # for an announcement that is under way: longer than a store's own

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
    clock: Clock | None = None,
) -> None:
    """Refuse a process whose version those that serve cannot work with.

    What serves and has not announced its version is waited for. If it does not announce itself in
    time, the process joins without a comparison, and a warning is logged.

    Args:
        wait_s: how long an announcement is waited for.
        clock: seconds since the epoch, to tell what serves; None: the store's.

    Raises:
        ConfigError: with the component, and the versions found and expected.
        StoreError: the store cannot be used.
    """
    deadline = time.monotonic() + wait_s
    while True:
        version = store.version()  # before the look: a later announcement ends the wait
        missing = []
        for present in serving(store, (clock or store.backend.now)()):
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


def check_alone(store: StateStore, mine: Announcement) -> None:
    """Announce a process of a host, and refuse it where another machine has that host's.

    On one machine a socket is taken. A process that was killed does not announce itself again.

    Raises:
        ConfigError: with both processes.
        StoreError: the store cannot be used.
    """
    other = store.announce(mine)
    deadline, polled = time.monotonic() + WATCHED_S, Event()
    while other is not None and _runs_elsewhere(other, store.backend.now()):
        if any(seen.process == other.process for seen in store.announced()):
            raise ConfigError(
                f"{claimed(other)}, and this is {shown(mine.process)}, expected one machine with "
                "the address of a host (topology.hosts)"
            )
        if time.monotonic() > deadline:
            return
        polled.wait(LOOK_S)


def claims_elsewhere(store: StateStore, host: int) -> list[str]:
    """Say which processes of a host run on another machine than this one."""
    now = store.backend.now()
    of_host = (seen for seen in store.announced() if seen.name == str(host))
    return [claimed(seen) for seen in of_host if _runs_elsewhere(seen, now)]


def claimed(other: Announcement) -> str:
    """Say which process has the place of a host."""
    return f"{NAMES[other.component]} of host {other.name} is {shown(other.process)}"


def _runs_elsewhere(seen: Announcement, now: float) -> bool:
    """Whether a process of another machine has announced itself lately."""
    is_silent = now - seen.time > MISSED_BEATS * HEARTBEAT_S
    return bool(seen.process) and not (is_silent or is_here(seen.process))


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


def serving_ranks(store: StateStore, now: float) -> list[Present]:
    """Give the ranks that report, with their version; none where no rank serves."""
    return [present for present in serving(store, now) if present.component == RANKS]


def ranks_of(store: StateStore, run: str) -> Announcement | None:
    """Give the version of the ranks of a start; None where the store does not have it."""
    matching = (seen for seen in store.announced() if (seen.component, seen.name) == (RANKS, run))
    return next(matching, None)


class Heartbeat:
    """Announces a process on a thread of its own between ``start`` and ``stop``.

    Args:
        open_store: opens the store of the deployment; the thread has one of its own.
        component: of the process.
        name: of the process, alike after a restart where it has a host of the topology.
    """

    def __init__(self, open_store: Callable[[], StateStore], component: str, name: str) -> None:
        self._open_store = open_store
        self.mine = Announcement(component, name, every_s=HEARTBEAT_S, process=new_holder())
        self._stopped, self._thread = Event(), Thread()

    def start(self) -> None:
        """Begin to announce."""
        self._stopped = Event()
        self._thread = Thread(
            target=self._run, args=(self._stopped,), name="heartbeat", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, for good or for a fork."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(END_DEADLINE_S)

    def retire(self) -> None:
        """Record that the process ends on purpose."""
        self.stop()
        try:
            with closing(self._open_store()) as store:
                store.retire(self.mine)
        except EplbError as exc:
            log.warning("the end of %s is not stored: %s", NAMES[self.mine.component], exc)

    def __enter__(self) -> Heartbeat:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.retire()
        else:  # what failed is missed
            self.stop()

    def _run(self, stopped: Event) -> None:
        store: StateStore | None = None
        while not stopped.is_set():
            try:
                store = store or self._open_store()
                store.announce(self.mine)
            except EplbError as exc:
                log.debug("heartbeat not stored: %s", exc)
            stopped.wait(HEARTBEAT_S)
        if store is not None:
            store.close()


def heartbeats(store: StateStore, now: float) -> list[Announcement]:
    """Give the latest announcement of each process that sends them, unless it was retired.

    A controller or service that was started again has another name: it takes the place of one of
    its host that was silent from then on. Those that are silent for long are left out, because no
    topology expects them.
    """
    expected: list[Announcement] = []
    for seen in sorted(store.announced(), key=lambda seen: seen.since):
        if not seen.every_s:
            continue
        if (host := host_of(seen.name)) is not None:
            if now - seen.time > FORGOTTEN_S:
                continue
            silent = [
                earlier
                for earlier in expected
                if (earlier.component, host_of(earlier.name)) == (seen.component, host)
                and earlier.time < seen.since
            ]
            if silent:
                expected.remove(max(silent, key=lambda earlier: earlier.time))
        expected.append(seen)
    return expected


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
