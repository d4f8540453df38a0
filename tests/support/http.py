"""The HTTP service under test: in process, or on a port where sockets are the point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI

from api.http import server
from api.http.problems import ProblemType
from api.http.server import HttpService
from tests.support.limits import NEVER_S

IN_PROCESS = "http://127.0.0.1"

# 412: a request of the right form, at a revision that is not the latest.
_ACCEPTED = '"2xx", "401", "403", "404", "409", "412", "5xx"'
# What schemathesis takes for answers as documented, as its file of settings.
SCHEMATHESIS = "\n".join(
    [
        f"[checks.positive_data_acceptance]\nexpected-statuses = [{_ACCEPTED}]",
        # 413: a list of too many items is a body of too many bytes first.
        '[checks.negative_data_rejection]\nexpected-statuses = ["4xx", "5xx"]',
        '[checks.missing_required_header]\nexpected-statuses = ["428"]',
        # 422: no pattern can state that a list of ranks, layers or pins names each once.
        *(
            f'[[operations]]\ninclude-name = "{operation}"\n'
            f'checks.positive_data_acceptance.expected-statuses = [{_ACCEPTED}, "422"]'
            for operation in ("PATCH /api/v1/settings", "PUT /api/v1/pins")
        ),
    ]
)


class _ToApplication(httpx.BaseTransport):
    """Gives requests to an application, whose event loop runs in a thread."""

    def __init__(self, app: FastAPI, portal: BlockingPortal) -> None:
        self._transport, self._portal = httpx.ASGITransport(app), portal

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()  # then its body can be read by an event loop too
        return self._portal.call(self._answer, request)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        content = await answer.aread()
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)


@contextmanager
def client_of(app: FastAPI, path: str = "") -> Iterator[httpx.Client]:
    """Open a client of an application that is bound to no port; its background work runs.

    Args:
        path: that those of requests are relative to.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(app.router.lifespan_context(app)),
        httpx.Client(base_url=IN_PROCESS + path, transport=_ToApplication(app, portal)) as client,
    ):
        yield client


@contextmanager
def serving(app: FastAPI, *args: Any, **others: Any) -> Iterator[HttpService]:
    """Serve an application on a port, with arguments of ``HttpService``."""
    with pytest.MonkeyPatch.context() as patch:
        # However busy the machine is, it starts and ends.
        patch.setattr(server, "START_TIMEOUT_S", NEVER_S)
        patch.setattr(server, "STOP_TIMEOUT_S", NEVER_S)
        service = HttpService(app, *args, **others)
        service.start()
        try:
            yield service
        finally:
            service.stop()


@contextmanager
def client_on(service: HttpService, **others: Any) -> Iterator[httpx.Client]:
    """Open a client of a service on a port, which waits for as long as it takes."""
    with httpx.Client(base_url=service.url, timeout=None, **others) as client:
        yield client


def problem_of(answer: httpx.Response) -> tuple[ProblemType, str]:
    """The type that a refusal names, and what it says; all else is what the table has."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    found = answer.json()
    (kind,) = (one for one in ProblemType if one.uri == found["type"])
    assert (found["status"], found["title"]) == (kind.status, kind.title)
    assert answer.status_code == kind.status
    assert found["detail"]
    return kind, found["detail"]
