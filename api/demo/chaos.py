"""``eplb demo --chaos``: faults during the demo, one after another, and whether each was survived.

    rank killed         SIGKILL; the others serve on
    links cut           a rank shuts down its TCP connections to the other ranks (``main``), so that
                        both ends see them broken: it is alone, and the others serve on without it
    controller killed   SIGKILL; eplb serve starts another one
    host cache killed   SIGKILL; the demo starts it again

A fault is survived once the others have served, or the process is back. The order, the ranks and
the host are of the seed. A link that loses its packets in silence needs network namespaces, and is
no part of this.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from api.demo import engine
from api.monitor.anomalies import Anomaly
from api.processes.commands import Command
from api.processes.supervision import ProcessState
from eplb.errors import StoreError
from rebalance.assembly.environment import described_by
from telemetry.state.events import FAULT, MEMBERSHIP
from telemetry.state.holder import is_dead
from telemetry.state.store import StateStore

SURVIVE_S = 120.0
CUT = signal.SIGUSR1  # to a rank: cut your links


@dataclass
class Fault:
    """A fault that was injected."""

    what: str
    at: float  # by the store's clock
    seconds: float | None = None  # time until it was survived; None: not yet
    outcome: str = "not survived"

    @property
    def text(self) -> str:
        """As a line for people."""
        return f"{self.what}: {self.outcome}" + (
            "" if self.seconds is None else f" after {self.seconds:.2f} s"
        )


class Chaos:
    """Injects the faults of a demo; ``look`` is called a few times a second.

    Args:
        store: of the deployment.
        launchers: of each host.
        caches: of each host.
        serve: the parent of the controller.
        every_s: from a fault that was survived to the next.
        seed: of the order, the ranks and the host.
        starts: tells how many runs have served.
    """

    def __init__(
        self,
        store: StateStore,
        launchers: Sequence[Command],
        caches: Sequence[Command],
        serve: Command,
        every_s: float,
        seed: int,
        starts: Callable[[], int],
    ) -> None:
        self._store, self._launchers, self._caches = store, launchers, caches
        self._serve, self._every_s, self._starts = serve, every_s, starts
        self._rng = random.Random(seed)
        self._left = [self._kill_rank, self._cut_links, self._kill_controller, self._kill_cache]
        self._rng.shuffle(self._left)
        self._due = time.monotonic() + every_s
        self._is_survived: Callable[[], tuple[str, float] | None] | None = None
        self.faults: list[Fault] = []

    @property
    def is_over(self) -> bool:
        """Whether all faults were injected, and survived or given up, and some time has passed."""
        return not self._left and self._is_survived is None and time.monotonic() >= self._due

    def latest(self) -> list[Anomaly]:
        """The latest fault, for the view."""
        number, of = len(self.faults), len(self.faults) + len(self._left)
        return [
            Anomaly(
                id=0,
                kind="error",
                severity="notice",
                subject="",
                ranks=(),
                since=one.at,
                until=None if one.seconds is None else one.at + one.seconds,
                text=f"fault {number} of {of}: {one.text}",
                events=(),
            )
            for one in self.faults[-1:]
        ]

    def look(self) -> None:
        """Inject what is due; see whether the latest fault is survived."""
        now = time.monotonic()
        if self._is_survived is not None:
            with suppress(StoreError):
                found = self._is_survived()
                if found is not None:
                    self.faults[-1].outcome, self.faults[-1].seconds = found
                if found is not None or now > self._due + SURVIVE_S:
                    self._note()
                    self._is_survived, self._due = None, now + self._every_s
        elif self._left and now >= self._due:
            self._is_survived = self._left.pop()()
            self._note()

    def _note(self) -> None:
        with suppress(StoreError):
            self._store.add_event(FAULT, {"message": self.faults[-1].text})

    def _begin(self, what: str) -> Fault:
        self.faults.append(Fault(what, self._store.backend.now(), outcome="injected"))
        return self.faults[-1]

    # -- faults

    def _kill_rank(self) -> Callable[[], tuple[str, float] | None]:
        return self._lose_rank("was killed", signal.SIGKILL)

    def _cut_links(self) -> Callable[[], tuple[str, float] | None]:
        return self._lose_rank("lost its links to all others", CUT)

    def _lose_rank(
        self, what: str, number: signal.Signals
    ) -> Callable[[], tuple[str, float] | None]:
        ranks = {t: p for one in self._launchers for t, p in _children(one).items()}
        title = self._rng.choice(sorted(one for one in ranks if one.startswith("rank ")))
        fault, starts = self._begin(f"{title} {what}"), self._starts()
        last = next(iter(self._store.latest_events(limit=1))).id
        os.kill(ranks[title], number)

        def is_survived() -> tuple[str, float] | None:
            for event in self._store.events_onwards(last):
                if event.kind == MEMBERSHIP:
                    taken = event.detail["broke_at"] + sum(event.detail["seconds"].values())
                    return "the others serve on", max(0.0, taken - fault.at)
            if self._starts() > starts:
                return "all ranks started again", self._store.backend.now() - fault.at
            return None

        return is_survived

    def _kill_controller(self) -> Callable[[], tuple[str, float] | None]:
        fault, lease = self._begin("the controller was killed"), self._store.latest_lease()
        if (pid := _children(self._serve).get("controller")) is not None:
            os.kill(pid, signal.SIGKILL)

        def is_survived() -> tuple[str, float] | None:
            found = self._store.latest_lease()
            is_new = found is not None and (lease is None or found.token > lease.token)
            if found is None or not is_new or not found.ttl_s or is_dead(found.holder):
                return None
            return "another one leads", max(0.0, found.since - fault.at)

        return is_survived

    def _kill_cache(self) -> Callable[[], tuple[str, float] | None]:
        host = self._rng.randrange(len(self._caches))
        fault, cache = self._begin(f"the host cache of host {host} was killed"), self._caches[host]
        restarts = cache.supervised.restarts
        if cache.process is not None:
            cache.process.kill()

        def is_survived() -> tuple[str, float] | None:
            one = cache.supervised
            if one.restarts == restarts or one.state is not ProcessState.RUNNING:
                return None
            return "it is back", self._store.backend.now() - fault.at

        return is_survived


def _children(command: Command) -> dict[str, int]:
    """The processes that a command has started, by title."""
    found: dict[str, int] = {}
    if command.process is None:
        return found
    for path in Path(f"/proc/{command.process.pid}/task").glob("*/children"):
        with suppress(OSError):
            for pid in path.read_text().split():
                found[Path(f"/proc/{pid}/comm").read_text().strip()] = int(pid)
    return found


def main() -> None:
    """Be a rank of the demo whose links can be cut by a signal."""
    signal.signal(CUT, lambda *_: cut_links(urlsplit(described_by(os.environ).store).port))
    engine.main()


def cut_links(kept_port: int | None) -> None:
    """Shut down the TCP connections of this process, but for those to a port: the store's."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), closing(socket.socket(fileno=os.dup(int(entry.name)))) as end:
            is_tcp = end.type is socket.SOCK_STREAM and end.family is not socket.AF_UNIX
            if is_tcp and end.getpeername()[1] != kept_port:
                end.shutdown(socket.SHUT_RDWR)


def summary_of(faults: Sequence[Fault]) -> dict[str, Any]:
    """The faults for a summary."""
    return {
        "faults": [vars(one) for one in faults],
        "faults_survived": sum(one.seconds is not None for one in faults),
    }
