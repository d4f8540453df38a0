"""``GET /api/v1/events/stream``: events as they happen (server-sent events).

    store -> background reader -> the latest events -> a position in them for each client

A client holds nothing but its position, so a slow one costs no memory and delays nobody. One whose
position is no longer among the latest events gets an event that some are missed. Whoever decides in
the deployment writes to the store alone, and knows of no client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from bisect import bisect_right
from collections.abc import AsyncIterator
from dataclasses import asdict

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from api.http.deployments import Deployments
from api.http.guard import HttpLimits
from api.http.problems import RETRY, ProblemType
from api.http.refusals import problem
from api.http.service import AdminService
from telemetry.state.events import Event

RETRY_MS = 1000  # after which a browser connects again
HEARTBEAT_S = 15.0


class EventStream(EventSourceResponse):
    """The events of one client, for as long as it reads them and the service lets it.

    Args:
        after: id of the last event that the client has; None: it begins with the next one.
    """

    def __init__(
        self,
        service: AdminService,
        after: int | None,
        limits: HttpLimits,
        deployments: Deployments,
    ) -> None:
        self._service, self._limits, self._deployments = service, limits, deployments
        self._news = asyncio.Event()
        super().__init__(
            self._events(after),
            ping=HEARTBEAT_S,
            ping_message_factory=lambda: ServerSentEvent(comment="alive", sep="\n"),
            sep="\n",
            # Before the kernel closes the connection, so that the end is counted here.
            send_timeout=limits.unread_deadline_s / 2,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client has gone, is too slow, or has had its time."""
        service, reader = self._service, self._service.reader
        most, num_open = self._limits.max_streams, self._deployments.num_streams()
        address = (scope.get("client") or [""])[0]
        near, most_near = self._deployments.streams_of, self._limits.max_streams_of_address
        whose = ""
        if near[address] >= most_near:
            num_open, most, whose = near[address], most_near, " of one address"
        if self._deployments.is_closing or num_open >= most:
            detail = f"{num_open} event streams{whose} are open, expected fewer than {most}"
            refusal = problem(ProblemType.TOO_BUSY, detail, {RETRY: "10"})
            await refusal(scope, receive, send)
            return
        if not reader.is_running:
            reader.start()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._news.set)

        service.num_streams += 1
        near[address] += 1
        try:
            with reader.listening(wake):
                await super().__call__(scope, receive, send)
        except SendTimeoutError:
            service.num_slow_streams += 1
        finally:
            service.num_streams -= 1
            near[address] -= 1
            if not near[address]:
                del near[address]

    async def _events(self, after: int | None) -> AsyncIterator[bytes]:
        yield f"retry: {RETRY_MS}\n\n".encode()
        loop = asyncio.get_running_loop()
        # Then it connects again, and proves its key again, which may have been removed.
        until = loop.time() + self._limits.stream_s
        while not self._deployments.is_closing and loop.time() < until:
            self._news.clear()
            seen = self._service.reader.latest
            events = () if seen is None else seen.events
            if seen is not None and after is None:
                after = events[-1].id if events else 0
            elif after is not None and events and after < events[0].id - 1:
                # The store may have forgotten those before the oldest, or never had them.
                after = events[0].id - 1
                yield b"event: missed\ndata: {}\n\n"
            next_one = len(events) if after is None else bisect_right(events, after, key=_id_of)
            if next_one < len(events):
                after = events[next_one].id
                yield event_text(events[next_one])
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._news.wait()


def _id_of(event: Event) -> int:
    return event.id


def event_text(event: Event) -> bytes:
    """Give an event as a message of an event stream: its id, and the JSON of ``GET /events``."""
    data = json.dumps(asdict(event) | {"detail": dict(event.detail)}, separators=(",", ":"))
    return f"id: {event.id}\ndata: {data}\n\n".encode()
