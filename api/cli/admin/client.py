"""The admin API for commands: the routes of a service, or the same routes on a store.

On a store the application runs in this process, so a command does the same in both ways: the same
checks, the same audit. The actor is then the user of this process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import httpx

from api.access.audit import local_actor
from api.access.keys import Actor, Role
from api.app import create_app
from api.cli.options import ApiOptions
from api.cli.store_place import audit_folder, configured_store, open_existing
from api.http.deployments import path_of
from api.operations.commands import Answer, Ask, route_of
from eplb.errors import ConfigError, EplbError

IN_SERVICE_S = 10.0  # a service waits for its controller for that time
MARGIN_S = 30.0  # a request has it beyond the time that the service waits for the controller
KEY = "EPLB_KEY"  # the environment variable with the key of a service: arguments are listed by ps


class AdminRefused(EplbError):
    """The API refused a request; ``status`` is of its answer."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        # An API that understood the request, and may not in the state of the deployment.
        self.exit_status = 1 if status in (404, 409, 412) else 2


@contextmanager
def asking(place: ApiOptions, wait_s: float | None = None) -> Iterator[Ask]:
    """Open an API for any number of requests, one at a time.

    The function that this gives takes that of a route and its arguments by name, of which None is
    not sent. ``if_match`` is the generation that must serve, or the revision that was read.

    Args:
        place: of the API.
        wait_s: for the controller, with a store; None: as long as a service waits.

    Raises:
        AdminRefused: the API refuses a request.
        ConfigError: there is no service at the URL, or the store cannot be used.
        StoreError: the store cannot be used.
    """
    with ExitStack() as stack:
        client = (
            _of_service(place)
            if place.url
            else _of_store(place, IN_SERVICE_S if wait_s is None else wait_s, stack)
        )
        runner = stack.enter_context(asyncio.Runner())
        stack.callback(lambda: runner.run(client.aclose()))

        def ask(
            function: Callable[..., Any], *, if_match: int | None = None, **values: Any
        ) -> Answer:
            route = route_of(function)
            assert route is not None, f"{function.__name__} answers a request"
            method = "".join(route.methods or ())
            given = {name: value for name, value in values.items() if value is not None}
            in_path = {one.name: given.pop(one.name) for one in route.dependant.path_params}
            request = client.build_request(
                method,
                route.path.format(**in_path).lstrip("/"),
                params=given if method == "GET" else None,
                headers={} if if_match is None else {"If-Match": f'"{if_match}"'},
                json=None if method == "GET" else given,
            )
            found = runner.run(_sent(client, request))
            if found.status_code >= 400:
                problem = _json(found)
                detail = problem.get("detail", problem) if isinstance(problem, dict) else problem
                raise AdminRefused(found.status_code, str(detail))
            body = _json(found) if route.response_model is not None else None
            return Answer(found.status_code, body, found.content, found.headers)

        yield ask


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError as exc:
        raise ConfigError(
            f"{answer.url} answered with no JSON, expected a service of eplb"
        ) from exc


async def _sent(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    try:
        return await client.send(request)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        where = client.base_url
        raise ConfigError(f"no answer of a service at {where}: {exc or type(exc)}") from exc


def _of_service(place: ApiOptions) -> httpx.AsyncClient:
    url, key = place.url or "", os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--service is {url!r}, expected http://HOST:PORT or https://HOST:PORT")
    if place.deployment is not None:
        url = f"{url.rstrip('/')}{path_of(place.deployment)}"
    try:
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=IN_SERVICE_S + MARGIN_S)
    except httpx.InvalidURL as exc:
        raise ConfigError(f"--service is {url!r}: {exc}") from exc


def _of_store(place: ApiOptions, wait_s: float, stack: ExitStack) -> httpx.AsyncClient:
    url, deployment = configured_store(place.store, place.deployment)
    store = stack.enter_context(closing(open_existing(url, deployment)))
    actor = Actor(local_actor(), Role.ADMIN)
    app = create_app(store, plan_wait_s=wait_s, state_dir=audit_folder(url), actor=actor)
    transport = httpx.ASGITransport(app, client=("local", 0))
    limit_s = wait_s + MARGIN_S
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=limit_s)
