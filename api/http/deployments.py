"""The deployments of one service: its own, and others of the same store; how a path chooses one.

    /api/v1/state                          of the service's own deployment
    /deployments/NAME/api/v1/state         the same route, of deployment NAME

    Prefix -> Authentication -> Guard -> DeploymentLookup -> route

``Prefix`` removes the prefix first, so that roles, limits and routes depend on the route alone.
``DeploymentLookup`` comes after authentication: clients without a key cannot enumerate deployments.
Each deployment has a store and a background reader of its own. They share the routes, the access
keys, the audit and the limits of the service.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, unquote

from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import ProblemType, Refused
from api.http.refusals import problem
from api.http.service import AdminService
from eplb.clock import Deadline
from eplb.errors import EplbError
from telemetry.state.store import StateStore

PREFIX = "/deployments/"
MOST = 64  # each takes a thread and some megabytes
LOOK_S = 5.0  # after which the store is looked at for deployments that are new in it
STOP_DEADLINE_S = 5.0  # deadline for all readers together

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Others:
    """Deployments that are shown beside the service's own."""

    names: Callable[[], Sequence[str]]  # raises EplbError where the store cannot be read
    open_store: Callable[[str], StateStore]  # opens the store of a name; raises EplbError


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
        own: AdminService,
        others: Others | None,
        serve: Callable[[StateStore], AdminService],
        *,
        is_watching: bool,
    ) -> None:
        self.own = own
        self._others, self._serve, self._is_watching = others, serve, is_watching
        self.streams_of: Counter[str] = Counter()  # open streams of events, by client address
        self._served = {own.name: own}  # replaced, never changed, so that readers need no lock
        self._unusable: dict[str, str] = {}  # why the store of a name cannot be opened
        self.is_closing = False  # no stream of events is accepted, and the open ones end
        self._started = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._look()

    def all(self) -> list[AdminService]:
        """The own one first, then the others by name."""
        others = sorted(self._served.keys() - {self.own.name})
        return [self.own, *(self._served[name] for name in others)]

    def unusable(self) -> dict[str, str]:
        """Names whose store cannot be opened, and why."""
        return self._unusable

    def one(self, name: str) -> AdminService:
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
        return sum(one.num_streams for one in self._served.values())

    def start(self) -> None:
        """Read in the background, and look for new deployments."""
        self._stopped.clear()
        self._look()
        self._started, self.is_closing = True, False
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
            one.reader.end()
        for one in self._served.values():
            one.reader.stop(deadline.left_s)
        for one in self._served.values():
            if one is not self.own:
                with suppress(EplbError):
                    one.store.close()
        self._served = {self.own.name: self.own}  # a service that is started again opens them anew

    def close_streams(self) -> None:
        """End all event streams, which would outlast every deadline."""
        self.is_closing = True
        for one in self._served.values():
            one.reader.wake_listeners()

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

    def _opened(self, others: Others, name: str) -> AdminService:
        store = others.open_store(name)
        try:
            return self._serve(store)
        except EplbError:
            store.close()
            raise

    def _watch(self, one: AdminService) -> None:
        if self._started and self._is_watching:
            one.reader.start()


def path_of(name: str) -> str:
    """Return the path of a deployment's page, below which are its routes."""
    return f"{PREFIX}{quote(name, safe='')}/"


class Prefix:
    """ASGI middleware: takes the prefix off a path, and gives it to a ``Location``.

    The name is in ``scope["state"]["asked_for"]``; None: the path has none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.get("state", {}) | {"asked_for": None}
        if not scope["path"].startswith(PREFIX):
            await self._app({**scope, "state": state}, receive, send)
            return
        # Split before it is decoded: a name may have a slash.
        raw = scope["raw_path"].decode("latin-1").removeprefix(PREFIX)
        name, slash, rest = raw.partition("/")
        prefix = f"{PREFIX}{name}"
        if not slash:  # links of the page are relative to the path with it
            await RedirectResponse(f"{prefix}/")(scope, receive, send)
            return

        async def located(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("location", "").startswith("/"):
                    headers["location"] = prefix + headers["location"]
            await send(message)

        state["asked_for"] = unquote(name)
        path = {"path": f"/{unquote(rest)}", "raw_path": f"/{rest}".encode("latin-1")}
        await self._app({**scope, **path, "state": state}, receive, located)


class DeploymentLookup:
    """ASGI middleware: looks the deployment up, or answers that there is none.

    What answers for it is in ``scope["state"]["service"]``, its name in ``["deployment"]``.
    """

    def __init__(self, app: ASGIApp, deployments: Deployments) -> None:
        self._app, self._deployments = app, deployments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] == "http":
            name = scope["state"].get("asked_for")  # paths of /metrics alone have no prefix
            try:
                found = self._deployments.own if name is None else self._deployments.one(name)
            except Refused as exc:
                await problem(exc.kind, str(exc))(scope, receive, send)
                return
            scope["state"] |= {"service": found, "deployment": found.name}
        await self._app(scope, receive, send)
