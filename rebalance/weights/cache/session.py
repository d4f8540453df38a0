"""What clients are served from a host cache: ranks of this host, and the caches of other hosts.

A rank's session receives requests, and answers when they are complete. While records are loaded it
keeps receiving, so that the leases of a rank that dies or cancels end at once.

Another host asks for one record at a time, which is leased like a rank's while its bytes are sent.
Its request is never forwarded to a third host, only to the local disk, so hosts that lack the same
record never wait for each other in a cycle.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Protocol

import torch

from eplb.core.bounded_json import MAX_JSON_BYTES
from eplb.errors import CheckpointError, MigrationError
from rebalance.types import Digest, Record
from rebalance.weights.cache.cache import HostCache, Request
from rebalance.weights.disk.record_origin import RecordOrigin
from rebalance.weights.link.server import Lent
from rebalance.weights.link.wire import DisconnectedError, Message, RefusedError, Wire, field
from runtime.memory.shared import SharedArena, attach, digest

log = logging.getLogger(__name__)


class Shelf(Protocol):
    """Keeps what ranks offer."""

    def lacks(self, records: Sequence[Record]) -> list[Record]:
        """Return those records that are neither in memory nor on a disk."""

    def keep(self, offered: Sequence[tuple[Record, Digest]], data: torch.Tensor) -> list[str]:
        """Keep records, each a row of ``data`` [n, record_bytes].

        Returns:
            [n] where each is now: "memory" (and on the disk, where there is one), "disk" where
            memory is full, "" where it is nowhere.

        Raises:
            CheckpointError: a row has not the digest that it was offered with.
        """


@dataclass(frozen=True)
class HostCacheParts:
    """Parts of a host cache that its sessions share."""

    cache: HostCache
    arena: SharedArena
    origin: RecordOrigin
    figures: Callable[[], dict[str, int]]
    holders: Iterator[int]  # a new number for each client
    shelf: Shelf | None = None  # None: no records are offered, a checkpoint has them

    def record_at(self, place: int) -> torch.Tensor:
        """Bytes [record_bytes] of an entry, by its index."""
        size = self.origin.record_bytes
        return self.arena.bytes[place * size : (place + 1) * size]


class HostCacheSession:
    """A connected rank, on the thread that serves it."""

    def __init__(self, parts: HostCacheParts, wire: Wire) -> None:
        self._parts, self._wire, self._holder = parts, wire, next(parts.holders)
        self._wake = os.eventfd(0)
        self._ended: deque[Request] = deque()
        self._deadlines: dict[Request, float] = {}  # deadlines of unanswered requests
        self._last: Request | None = None  # the newest request, which the rank may give up

    def run(self) -> None:
        """Serve until the connection closes."""
        try:
            with suppress(DisconnectedError):
                while self._turn():
                    pass
        finally:
            self._parts.cache.drop(self._holder)
            os.close(self._wake)

    def _turn(self) -> bool:
        """Wait for a message, a request's end or a deadline; False at the connection's end."""
        left_s = None
        if self._deadlines:
            left_s = max(0.0, min(self._deadlines.values()) - time.monotonic())
        happened = wait([self._wire.fileno(), self._wake], left_s)
        if self._wake in happened:
            os.eventfd_read(self._wake)
        if self._wire.fileno() in happened:
            if not self._wire.wait_for_data(0.0):
                return False
            self._handle(self._wire.receive(max_bytes=MAX_JSON_BYTES))
        now = time.monotonic()
        for request in [r for r, deadline in self._deadlines.items() if deadline <= now]:
            self._parts.cache.expire(request)
        while self._ended:
            request = self._ended.popleft()
            del self._deadlines[request]
            self._wire.send({"number": request.number} | self._answer(request))
        return True

    def _handle(self, message: Message) -> None:
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
            self._wire.send({"number": message["number"]})
        elif what in ("lacks", "offer"):
            self._wire.send({"number": message["number"]} | self._offered(message))
        elif what == "stats":
            self._wire.send({"number": message["number"], "figures": self._parts.figures()})
        else:
            raise ValueError(f"unknown request {what!r}")

    def _load(self, message: Message) -> None:
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
            self._wire.send({"number": request.number, "error": str(exc)})
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

    def _offered(self, message: Message) -> Message:
        """Answer an offer, or which records are worth one."""
        shelf, records = self._parts.shelf, _records(message)
        try:
            if shelf is None:
                raise CheckpointError("this host cache has a checkpoint, expected no offers")
            for record in records:
                self._parts.origin.number_of(record)
            if message["ask"] == "lacks":
                return {"records": shelf.lacks(records)}
            # Writable, although nothing writes: torch maps no other memory.
            data = torch.from_numpy(attach(message["handle"], message["num_bytes"], for_gpu=True))
            digests = [(int(plain), int(weighted)) for plain, weighted in message["digests"]]
            rows = data.view(-1, self._parts.origin.record_bytes)
            return {"places": shelf.keep(list(zip(records, digests, strict=True)), rows)}
        except (CheckpointError, MigrationError) as exc:
            return {"error": str(exc)}

    def _intact(self, request: Request) -> tuple[Digest, int] | None:
        """Return a leased record's digest and place if its bytes still digest to it."""
        (record,) = request.records
        found = self._parts.cache.held(self._holder, record)
        if found is None:
            return None
        return found if digest(self._parts.record_at(found[1])) == found[0] else None

    def _note_end(self, request: Request) -> None:
        self._ended.append(request)
        os.eventfd_write(self._wake, 1)

    def _answer(self, request: Request) -> Message:
        if request.error is not None:
            return {"error": request.error}
        found = [request.found[record] for record in request.records]
        return {
            "digests": [digest for digest, _ in found],
            "places": [place for _, place in found],
            "from_disk": request.num_from_disk * self._parts.origin.record_bytes,
            "from_other_hosts": request.num_from_hosts * self._parts.origin.record_bytes,
        }


def _records(message: Message) -> Sequence[Record]:
    return [(int(layer), int(expert)) for layer, expert in message["records"]]


class RecordsForHosts:
    """Lends the records of a host cache to the caches of other hosts (``link/server.py``)."""

    def __init__(self, parts: HostCacheParts) -> None:
        self._parts, self._lock = parts, threading.Lock()
        self.num_sent = 0  # records

    @contextmanager
    def lend(self, ask: Message, answer_at: float) -> Iterator[Lent]:
        """Have in memory what another host asks for, until the context ends.

        Raises:
            RefusedError: it cannot be had, or not in time.
        """
        if ask["ask"] == "inventory":
            yield Lent(self._inventory())
            return
        if ask["ask"] != "record":
            raise ValueError(f"unknown request {ask['ask']!r}")
        ((layer, expert),) = _records({"records": [ask["record"]]})
        holder = next(self._parts.holders)
        try:
            self._parts.origin.number_of((layer, expert))
            found, data = self._lease(holder, (layer, expert), ask, answer_at)
            yield Lent(data, {"digest": found})
        except CheckpointError as exc:
            raise RefusedError(str(exc)) from exc
        finally:
            self._parts.cache.drop(holder)
        with self._lock:
            self.num_sent += 1

    def _inventory(self) -> torch.Tensor:
        """Which records are in memory: a bit each, in their order."""
        origin = self._parts.origin
        bits = bytearray(-(-origin.num_records // 8))
        for record in self._parts.cache.ready():
            number = origin.number_of(record)
            bits[number // 8] |= 1 << number % 8
        return torch.frombuffer(bits, dtype=torch.uint8)

    def _lease(
        self, holder: int, record: Record, ask: Message, answer_at: float
    ) -> tuple[Digest, torch.Tensor]:
        """Lease a record; look at its bytes first if the other host has received wrong ones."""
        cache, version = self._parts.cache, field(ask, "weights_version", int)
        ask_cache = cache.ask if field(ask, "from_disk", bool) else cache.lease_ready

        def ended(ask_cache: Callable[[Request], None]) -> tuple[Digest, torch.Tensor]:
            has_ended = threading.Event()
            request = Request(
                holder, 1, [record], lambda _: has_ended.set(), version, is_for_host=True
            )
            ask_cache(request)
            if not has_ended.wait(max(0.0, answer_at - time.monotonic())):
                cache.expire(request)
            if request.error is not None:
                raise RefusedError(request.error)
            found, place = request.found[record]
            return found, self._parts.record_at(place)

        found, data = ended(ask_cache)
        if field(ask, "is_suspect", bool) and digest(data) != found:
            log.error(
                "layer %d expert %d: checksum mismatch in the host cache; reloading from disk",
                *record,
            )
            return ended(cache.reload)
        return found, data
