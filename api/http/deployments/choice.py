"""How a path chooses a deployment: ``/deployments/NAME`` before any path of the service.

    /api/v1/state                          of the service's own deployment
    /deployments/NAME/api/v1/state         the same route, of deployment NAME

    Prefix -> Authentication -> Guard -> Choice -> Changes -> route

``Prefix`` removes the prefix first, so that roles, limits and routes depend on the route alone.
``Choice`` comes after authentication: clients without a key cannot enumerate deployments.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.deployments.served import Deployments
from api.http.problems import Refused
from api.http.refusals import problem

PREFIX = "/deployments/"


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


class Choice:
    """ASGI middleware: looks the deployment up, or answers that there is none.

    What answers for it is in ``scope["state"]["served"]``, its name in ``["deployment"]``.
    """

    def __init__(self, app: ASGIApp, deployments: Deployments) -> None:
        self._app, self._deployments = app, deployments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] == "http":
            name = scope["state"]["asked_for"]
            try:
                found = self._deployments.own if name is None else self._deployments.one(name)
            except Refused as exc:
                await problem(exc.kind, str(exc), exc.headers)(scope, receive, send)
                return
            scope["state"] |= {"served": found, "deployment": found.name}
        await self._app(scope, receive, send)
