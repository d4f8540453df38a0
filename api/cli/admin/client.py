"""The admin API for commands: the routes of a service, or the same routes on a store.

On a store the application runs in this process, so a command does the same in both ways: the same
checks, the same audit. The actor is then the user of this process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

import httpx

from api.access.keys import Actor, Role
from api.access.local import local_actor
from api.cli.admin.place import IN_SERVICE_S, Place
from api.cli.store_place import audit_folder, configured_store, open_existing
from api.http.deployments.choice import path_of
from api.http.requests import NOTES
from eplb.errors import ConfigError, EplbError

MARGIN_S = 30.0  # beyond the time that the service waits for the controller
KEY = "EPLB_KEY"  # the environment variable with the key of a service: arguments are listed by ps


class AdminRefused(EplbError):
    """The API refused a request; ``status`` is of its answer."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Answer(NamedTuple):
    """An answer of the API."""

    status: int
    body: Any  # of its JSON


class Download(NamedTuple):
    """A file of the API."""

    data: bytes
    notes: str  # of what the file cannot express; "": it has all


def ask(
    place: Place,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    if_match: int | None = None,
    **params: Any,
) -> Answer:
    """Send one request, and return its answer.

    Args:
        place: of the API.
        method: of HTTP.
        path: below ``/api/v1``.
        body: sent as JSON.
        if_match: the generation that must serve, or the revision that was read.
        params: of the query; those that are None are not sent.

    Raises:
        AdminRefused: the API refuses.
        ConfigError: there is no service at the URL, or the store cannot be used.
        StoreError: the store cannot be used.
    """
    headers = {} if if_match is None else {"If-Match": f'"{if_match}"'}
    answer = _answer(place, method, path, json=body, headers=headers, params=params)
    return Answer(answer.status_code, _json(answer))


def download(place: Place, path: str, **params: Any) -> Download:
    """Get a file.

    Args:
        place: of the API.
        path: below ``/api/v1``.
        params: of the query; those that are None are not sent.

    Raises:
        AdminRefused, ConfigError, StoreError: as ``ask``; ConfigError also for an answer that is
            no file.
    """
    answer = _answer(place, "GET", path, params=params)
    if not answer.headers.get("content-disposition", "").startswith("attachment"):
        raise ConfigError(f"{answer.url} answered with no file, expected a service of eplb")
    return Download(answer.content, answer.headers.get(NOTES, ""))


@contextmanager
def opened(place: Place) -> Iterator[Callable[..., httpx.Response]]:
    """Open an API for any number of requests, one at a time: method, path below /api/v1, parts.

    Raises:
        AdminRefused, ConfigError, StoreError: as ``ask``, here and for each request.
    """
    with ExitStack() as stack:
        client = _of_service(place.url, place.deployment) if place.url else _of_store(place, stack)
        runner = stack.enter_context(asyncio.Runner())
        stack.callback(lambda: runner.run(client.aclose()))

        def send(method: str, path: str, **parts: Any) -> httpx.Response:
            answer = runner.run(_sent(client, method, f"api/v1{path}", **parts))
            if answer.status_code >= 400:
                found = _json(answer)
                detail = found.get("detail", found) if isinstance(found, dict) else found
                raise AdminRefused(answer.status_code, str(detail))
            return answer

        yield send


def _answer(
    place: Place, method: str, path: str, *, params: Mapping[str, Any], **parts: Any
) -> httpx.Response:
    """The answer to one request, unless it is a refusal."""
    given = {name: value for name, value in params.items() if value is not None}
    with opened(place) as send:
        return send(method, path, params=given, **parts)


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError as exc:
        raise ConfigError(
            f"{answer.url} answered with no JSON, expected a service of eplb"
        ) from exc


async def _sent(client: httpx.AsyncClient, method: str, path: str, **parts: Any) -> httpx.Response:
    try:
        return await client.request(method, path, **parts)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        where = client.base_url
        raise ConfigError(f"no answer of a service at {where}: {exc or type(exc)}") from exc


def _of_service(url: str, deployment: str | None) -> httpx.AsyncClient:
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--service is {url!r}, expected http://HOST:PORT or https://HOST:PORT")
    if deployment is not None:
        url = f"{url.rstrip('/')}{path_of(deployment)}"
    try:
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=IN_SERVICE_S + MARGIN_S)
    except httpx.InvalidURL as exc:
        raise ConfigError(f"--service is {url!r}: {exc}") from exc


def _of_store(place: Place, stack: ExitStack) -> httpx.AsyncClient:
    # Imported here: it needs the extra "api", and --help does not.
    from api.http.app import create_app

    url, deployment = configured_store(place.store, place.deployment)
    store = stack.enter_context(closing(open_existing(url, deployment)))
    actor = Actor(local_actor(), Role.ADMIN)
    app = create_app(store, plan_wait_s=place.wait_s, state_dir=audit_folder(url), actor=actor)
    transport = httpx.ASGITransport(app, client=("local", 0))
    limit_s = place.wait_s + MARGIN_S
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=limit_s)
