"""Connections of the HTTP service: bounded in number, and in the time that a request may take.

uvicorn has a deadline for idle connections only. Here a request must arrive within
``HttpLimits.request_deadline_s``, headers and body. A connection beyond a limit replaces the oldest
one that has no complete request, so that idle connections never keep a probe out. Where all are
being served, the new one is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.http.guard import HttpLimits
from api.http.problems import ProblemType
from api.http.refusals import problem

PART_OF_DESCRIPTORS = 4  # connections take a quarter of them at most
PART_OF_ADDRESS = 2  # one client address takes half of the connections at most


def connection_limit(most: int) -> int:
    """Give the most connections at a time; the processes of a deployment need descriptors too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return max(PART_OF_ADDRESS, min(most, soft // PART_OF_DESCRIPTORS))


class OpenConnections:
    """A server's open connections by client address, oldest first.

    A thousand connections may be accepted in one turn of the event loop, so none of them may cost
    a scan of all others.
    """

    def __init__(self) -> None:
        self._by_address: defaultdict[str, dict[BoundedConnection, None]] = defaultdict(dict)
        self._all: dict[BoundedConnection, None] = {}

    def add(self, new: BoundedConnection) -> BoundedConnection | None:
        """Count a connection; return the one to close in place of it, if any."""
        near = self._by_address[new.address]
        near[new] = self._all[new] = None
        limit = connection_limit(new.limits.max_connections)
        if len(near) > limit // PART_OF_ADDRESS:
            crowd = near
        elif len(self._all) > limit:
            crowd = self._all
        else:
            return None
        return next((one for one in crowd if not one.is_served()), new)

    def discard(self, old: BoundedConnection) -> None:
        """Count a connection no longer."""
        self._all.pop(old, None)
        near = self._by_address[old.address]
        near.pop(old, None)
        if not near:
            del self._by_address[old.address]


_open_connections: WeakKeyDictionary[Any, OpenConnections] = WeakKeyDictionary()  # by server


class BoundedConnection(H11Protocol):
    """A connection of uvicorn with a deadline for its request, counted among the open ones."""

    def __init__(self, *args: Any, limits: HttpLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._others = _open_connections.setdefault(self.server_state, OpenConnections())

    @property
    def address(self) -> str:
        """The client's."""
        return self.client[0] if self.client else ""

    def is_served(self) -> bool:
        """Return whether a whole request has come, so that a handler may be processing it."""
        return self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; where there are too many connections, close one."""
        super().connection_made(transport)
        with contextlib.suppress(OSError):  # the client may have disconnected already
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP,
                socket.TCP_USER_TIMEOUT,
                max(1, int(self.limits.unread_deadline_s * 1000)),
            )
        if closed := self._others.add(self):
            self._others.discard(closed)
            closed.transport.abort()
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        super().connection_lost(exc)
        self._others.discard(self)
        self._stop_deadline()

    def handle_events(self) -> None:
        """Handle what was received; a request that has begun must be complete in time."""
        super().handle_events()
        state = self.conn.their_state
        has_begun = state is h11.IDLE and bool(self.conn.trailing_data[0])
        if state is h11.SEND_BODY or has_begun:
            self._start_deadline()
        else:
            self._stop_deadline()

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.request_deadline_s, self._too_late)

    def _too_late(self) -> None:
        """Close; a client with a part of a request gets 408 with the reason."""
        has_part = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if has_part and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            detail = f"not whole after {self.limits.request_deadline_s:g} s, expected it to be"
            answer = problem(ProblemType.REQUEST_TOO_SLOW, detail)
            headers = [*answer.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=answer.status_code, headers=headers),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
