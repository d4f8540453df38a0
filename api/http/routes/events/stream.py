"""``GET /api/v1/events/stream``: events as they happen (server-sent events)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.http.deployments.served import Deployments
from api.http.limits import HttpLimits
from api.http.problems import RETRY, ProblemType, Refused, problem
from api.http.requests import MAX_ID
from api.http.routes.events.feed import Client, EventFeed
from api.http.routes.request_parts import service_of

if TYPE_CHECKING:
    from fastapi import APIRouter

PATH = "/events/stream"
LAST_ID = "Last-Event-ID"
RETRY_MS = 1000  # after which a browser connects again
HEARTBEAT_S = 15.0
EVENT = {"id": 41, "time": 1790000000.0, "kind": "commit", "detail": {"generation": 7}}
EXAMPLE = {"id": "41", "event": "message", "data": json.dumps(EVENT)}
TEXTS = {name: {"type": "string"} for name in EXAMPLE}
OF_EVENT = {"type": "object", "properties": TEXTS, "required": ["data"]}  # of each, as it is parsed
DOCUMENT: dict[str, Any] = {
    "parameters": [
        {
            "name": LAST_ID,
            "in": "header",
            "required": False,
            "schema": {"type": "integer", "minimum": 0, "maximum": MAX_ID},
            "description": "in place of `after`: what a browser sends when it connects again",
        }
    ]
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events; `retry` and comments as heartbeats",
        "content": {"text/event-stream": {"schema": OF_EVENT, "example": EXAMPLE}},
    }
}


class EventStream(EventSourceResponse):
    """The events of one client, for as long as it reads them and the service lets it."""

    def __init__(
        self, feed: EventFeed, after: int | None, limits: HttpLimits, deployments: Deployments
    ) -> None:
        self._feed, self._limits, self._deployments = feed, limits, deployments
        self._client = Client(after, self._drop)
        self._sending: asyncio.Task[None] | None = None
        self._is_dropped = False
        super().__init__(
            self._events(),
            ping=HEARTBEAT_S,
            ping_message_factory=lambda: ServerSentEvent(comment="alive", sep="\n"),
            sep="\n",
            send_timeout=limits.unread_deadline_s,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client has gone, is too slow, or has had its time."""
        most, num_open = self._limits.max_streams, self._deployments.num_streams()
        if self._feed.is_closed or num_open >= most:
            detail = f"{num_open} event streams are open, expected fewer than {most}"
            refusal = problem(ProblemType.TOO_BUSY, detail, {RETRY: "10"})
            await refusal(scope, receive, send)
            return
        self._feed.add(self._client)
        # A task of its own, because the client may be dropped while it waits for the network.
        self._sending = asyncio.create_task(super().__call__(scope, receive, send))
        try:
            await self._sending
        except SendTimeoutError:
            self._feed.dropped += 1
        except asyncio.CancelledError:
            if not self._is_dropped:
                raise
        finally:
            self._feed.discard(self._client)

    def _drop(self) -> None:
        self._is_dropped = True
        if self._sending is not None:
            self._sending.cancel()

    async def _events(self) -> AsyncIterator[bytes]:
        yield f"retry: {RETRY_MS}\n\n".encode()
        # Then it connects again, and proves its key again, which may have been removed.
        until = asyncio.get_running_loop().time() + self._limits.stream_s
        while True:
            try:
                async with asyncio.timeout_at(until):
                    chunk = await self._feed.next(self._client)
            except TimeoutError:
                return
            if not chunk:  # the service stops
                return
            if self._client.has_missed:
                self._client.has_missed = False
                yield b"event: missed\ndata: {}\n\n"
            yield chunk


async def get_event_stream(
    request: Request, after: Annotated[int | None, Field(ge=0, le=MAX_ID)] = None
) -> Response:
    """As they happen, past an id or from now on; the latest 1,000 are kept for clients that return.

    An event `missed` says that others came between: read them from `/api/v1/events`.
    """
    given = request.headers.get(LAST_ID)
    if given is not None:
        if not (given.isascii() and given.isdigit() and int(given[:20]) <= MAX_ID):
            raise Refused(
                ProblemType.INVALID_REQUEST,
                f"{LAST_ID} is {given[:40]!r}, expected a number 0..{MAX_ID}",
            )
        after = int(given)
    state = request.app.state
    return EventStream(service_of(request).feed, after, state.limits, state.deployments)


def add_event_stream(watch: APIRouter) -> None:
    """Add the route."""
    watch.get(
        PATH,
        summary="Events as they happen",
        response_class=EventSourceResponse,
        responses=STREAM,
        openapi_extra=DOCUMENT,
    )(get_event_stream)
