"""``GET /api/v1/events/stream``: events as they happen (server-sent events)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from api.http.deployments.served import Deployments
from api.http.event_feed import Client, EventFeed
from api.http.guard import HttpLimits
from api.http.problems import RETRY, ProblemType
from api.http.refusals import problem

RETRY_MS = 1000  # after which a browser connects again
HEARTBEAT_S = 15.0


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
