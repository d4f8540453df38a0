"""One rank's session in the host cache: receive requests, answer when they are complete.

While records are loaded the session keeps receiving, so that the leases of a rank that dies or
cancels end at once.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from typing import Any

from eplb.core.bounded_json import MAX_JSON_BYTES, decode_json
from eplb.errors import CheckpointError
from rebalance.preload.cache.cache import HostCache
from rebalance.preload.cache.requests import Request
from rebalance.preload.cache.wire import Digest, server_handshake
from rebalance.preload.records.record_origin import RecordOrigin
from rebalance.transport.interface import Record
from runtime.memory.shared import SharedArena, digest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostCacheParts:
    """Parts of a host cache that its sessions share."""

    cache: HostCache
    arena: SharedArena
    origin: RecordOrigin
    figures: Callable[[], dict[str, int]]


class HostCacheSession:
    """A connected rank. ``run`` has its own thread; ``stop`` is called from another one."""

    def __init__(self, parts: HostCacheParts, connection: Connection, holder: int) -> None:
        self._parts, self._connection, self._holder = parts, connection, holder
        self._wake = os.eventfd(0)
        self._ended: deque[Request] = deque()
        self._deadlines: dict[Request, float] = {}  # of those that are not answered yet
        self._last: Request | None = None  # what a rank that gives up has asked for
        self._is_stopping = self._is_over = False
        self._ending = threading.Lock()  # guards a descriptor that may already be reused

    def run(self, key: bytes, on_authenticated: Callable[[], None]) -> None:
        """Serve until the connection closes; call ``on_authenticated`` after the handshake."""
        with self._connection:
            try:
                server_handshake(self._connection, key)
                on_authenticated()
                self._send(self._hello())
                while not self._is_stopping:
                    self._turn()
            except (AuthenticationError, EOFError, OSError):
                pass  # an unauthenticated client, or a disconnected rank
            except (KeyError, TypeError, ValueError) as exc:
                log.error("malformed request of a rank; closing the connection: %r", exc)
            finally:
                self._parts.cache.drop(self._holder)
                with self._ending:
                    self._is_over = True
                    os.close(self._wake)

    def stop(self) -> None:
        """Hang up soon."""
        self._is_stopping = True
        with self._ending:
            if not self._is_over:
                os.eventfd_write(self._wake, 1)

    def _hello(self) -> dict[str, Any]:
        arena, origin = self._parts.arena, self._parts.origin
        return {
            "handle": arena.handle,
            "num_bytes": len(arena.bytes),
            "record_bytes": origin.record_bytes,
            "num_experts": origin.num_experts,
        }

    def _turn(self) -> None:
        """Wait for whatever comes first: a message, a request's end, a deadline."""
        left_s = None
        if self._deadlines:
            left_s = max(0.0, min(self._deadlines.values()) - time.monotonic())
        happened = wait([self._connection, self._wake], left_s)
        if self._wake in happened:
            os.eventfd_read(self._wake)
        if self._connection in happened:
            self._handle(decode_json(self._connection.recv_bytes(MAX_JSON_BYTES)))
        now = time.monotonic()
        for request in [r for r, deadline in self._deadlines.items() if deadline <= now]:
            self._parts.cache.expire(request)
        while self._ended:
            request = self._ended.popleft()
            del self._deadlines[request]
            self._send({"number": request.number} | self._answer(request))

    def _handle(self, message: dict[str, Any]) -> None:
        what, cache = message["ask"], self._parts.cache
        if what in ("load", "reload"):
            self._load(message)
        elif what == "release":
            cache.release(self._holder, _records(message))
        elif what == "hint":
            cache.hint(_records(message), message["weights_version"])
        elif what == "give up":
            if self._last is not None and self._last.number == message["number"]:
                cache.withdraw(self._last)
        elif what == "invalidate":
            cache.invalidate(message["weights_version"])
            self._send({"number": message["number"]})
        elif what == "stats":
            self._send({"number": message["number"], "figures": self._parts.figures()})
        else:
            raise ValueError(f"unknown request {what!r}")

    def _load(self, message: dict[str, Any]) -> None:
        request = Request(
            self._holder,
            message["number"],
            _records(message),
            self._note_end,
            message["weights_version"],
        )
        try:
            for record in request.records:
                self._parts.origin.number_of(record)
        except CheckpointError as exc:
            self._send({"number": request.number, "error": str(exc)})
            return
        self._last = request
        self._deadlines[request] = time.monotonic() + message["deadline_s"]
        if message["ask"] == "load":
            self._parts.cache.ask(request)
        elif found := self._intact(request):
            request.found[request.records[0]] = found
            request.is_ended = True  # without the cache, which would end it again if given up
            self._note_end(request)
        else:
            self._parts.cache.reload(request)

    def _intact(self, request: Request) -> tuple[Digest, int] | None:
        """Return a leased record's digest and place if its bytes still digest to it."""
        (record,) = request.records
        found = self._parts.cache.held(self._holder, record)
        if found is None:
            return None
        size = self._parts.origin.record_bytes
        start = found[1] * size
        is_intact = digest(self._parts.arena.bytes[start : start + size]) == found[0]
        return found if is_intact else None

    def _note_end(self, request: Request) -> None:
        self._ended.append(request)
        os.eventfd_write(self._wake, 1)

    def _answer(self, request: Request) -> dict[str, Any]:
        if request.error is not None:
            return {"error": request.error}
        found = [request.found[record] for record in request.records]
        return {
            "digests": [digest for digest, _ in found],
            "places": [place for _, place in found],
            "from_disk": request.num_from_disk * self._parts.origin.record_bytes,
            "from_other_hosts": request.num_from_hosts * self._parts.origin.record_bytes,
        }

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())


def _records(message: dict[str, Any]) -> Sequence[Record]:
    return [(int(layer), int(expert)) for layer, expert in message["records"]]
