"""The deployments of one service: its own, and others of the same store.

Each has a store, a background reader and streams of events of its own. They share the
routes, the access keys, the audit and the limits of the service.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from api.http.latest import LatestAnswer
from api.http.problems import ProblemType, Refused
from api.http.service import AdminService
from eplb.clock import Deadline
from eplb.errors import EplbError
from telemetry.state.store import StateStore

MOST = 64  # each takes a thread and some megabytes
LOOK_S = 5.0  # after which the store is looked at for deployments that are new in it
STOP_DEADLINE_S = 5.0  # of all readers together

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Served:
    """What answers for one deployment."""

    service: AdminService
    readiness: LatestAnswer

    @property
    def name(self) -> str:
        """Name of the deployment."""
        return self.service.store.deployment


@dataclass(frozen=True)
class Others:
    """Deployments that are shown beside the service's own."""

    names: Callable[[], Sequence[str]]  # raises EplbError where the store cannot be read
    open_store: Callable[[str], StateStore]  # of a name; raises EplbError


class Deployments:
    """The deployments of a service, by name. Any thread may call any method.

    Args:
        own: that of the process, whose store the caller closes.
        others: looked up now, and every few seconds while the service runs; None: there are none.
        serve: makes what answers for another one.
        is_watching: whether each store is read in the background between ``start`` and ``stop``.
    """

    def __init__(
        self,
        own: Served,
        others: Others | None,
        serve: Callable[[StateStore], Served],
        *,
        is_watching: bool,
    ) -> None:
        self.own = own
        self._others, self._serve, self._is_watching = others, serve, is_watching
        self._served = {own.name: own}  # replaced, never changed, so that readers need no lock
        self._unusable: dict[str, str] = {}  # why the store of a name cannot be opened
        self._started = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._look()

    def all(self) -> list[Served]:
        """The own one first, then the others by name."""
        others = sorted(self._served.keys() - {self.own.name})
        return [self.own, *(self._served[name] for name in others)]

    def unusable(self) -> dict[str, str]:
        """Names whose store cannot be opened, and why."""
        return self._unusable

    def one(self, name: str) -> Served:
        """The deployment of a name.

        Raises:
            Refused: the service shows none of this name, or its store cannot be opened.
        """
        if (found := self._served.get(name)) is not None:
            return found
        if (why := self._unusable.get(name)) is not None:
            raise Refused(ProblemType.STORE_UNAVAILABLE, why)
        known = ", ".join(sorted(self._served))
        detail = f"the service shows no deployment {name[:100]!r}, expected one of: {known}"
        raise Refused(ProblemType.NO_SUCH_DEPLOYMENT, detail)

    def num_streams(self) -> int:
        """Streams of events that are open, of all deployments."""
        return sum(one.service.feed.num_clients for one in self._served.values())

    def start(self) -> None:
        """Read in the background, and look for new deployments."""
        self._stopped.clear()
        self._started = True
        for one in self._served.values():
            self._watch(one)
        if self._others is not None:
            self._thread = threading.Thread(target=self._run, name="eplb-deployments", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the readers, and close the stores of the others."""
        self._stopped.set()
        deadline = Deadline.after(STOP_DEADLINE_S, time.monotonic)
        if self._thread is not None:
            self._thread.join(deadline.left_s)
            self._thread = None
        self._started = False
        for one in self._served.values():
            one.service.reader.end()
        for one in self._served.values():
            one.service.reader.stop(deadline.left_s)
        for one in self._served.values():
            if one is not self.own:
                with suppress(EplbError):
                    one.service.store.close()
        self._served = {self.own.name: self.own}  # a service that is started again opens them anew

    def open_streams(self) -> None:
        """Accept clients of event streams, before the service starts."""
        self._look()
        for one in self._served.values():
            one.service.feed.open()

    def close_streams(self) -> None:
        """End all event streams, which would outlast every deadline."""
        for one in self._served.values():
            one.service.feed.close()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        """Open what is new in the store."""
        if self._others is None:
            return
        try:
            names = self._others.names()
        except EplbError as exc:
            log.warning("the deployments of the store cannot be listed: %s", exc)
            return
        for name in names:
            if name in self._served or len(self._served) == MOST:
                continue
            try:
                found = self._opened(self._others, name)
            except EplbError as exc:
                if self._unusable.get(name) != str(exc):
                    log.warning("deployment %r is not shown: %s", name, exc)
                self._unusable = self._unusable | {name: str(exc)}
                continue
            self._unusable = {at: why for at, why in self._unusable.items() if at != name}
            self._served = self._served | {name: found}
            self._watch(found)

    def _opened(self, others: Others, name: str) -> Served:
        store = others.open_store(name)
        try:
            return self._serve(store)
        except EplbError:
            store.close()
            raise

    def _watch(self, one: Served) -> None:
        if self._started and self._is_watching:
            one.service.reader.start()
