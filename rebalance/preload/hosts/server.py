"""Server of a host cache for other hosts: sends records that it holds, or reads them first.

A requested record is leased like a rank's, so its entry is not evicted while its bytes are sent. A
request of another host is never forwarded to a third host, only to the local disk, so hosts that
lack the same record never wait for each other in a cycle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from eplb.errors import CheckpointError
from rebalance.network.listener import ConnectionListener, ListenerSettings
from rebalance.network.wire import CHUNK_BYTES, PROTOCOL, Budget, Message, RefusedError, Wire
from rebalance.preload.cache.requests import Request
from rebalance.preload.cache.session import HostCacheParts
from rebalance.preload.cache.wire import Digest
from rebalance.preload.hosts.settings import HostLinkSettings
from rebalance.preload.records.record_origin import RecordOrigin
from rebalance.transport.interface import Record
from runtime.memory.shared import digest

log = logging.getLogger(__name__)


class HostLinkServer:
    """Serves other hosts until ``close``. ``origin`` returns the origin of the records.

    Raises:
        MigrationError: the address cannot be listened on.
    """

    def __init__(
        self,
        settings: HostLinkSettings,
        parts: HostCacheParts,
        origin: Callable[[], RecordOrigin],
        holders: Iterator[int],
    ) -> None:
        assert settings.listen is not None, (
            "only a host cache with a listen address serves other hosts"
        )
        self._settings, self._parts = settings, parts
        self._origin, self._holders = origin, holders
        listener_settings = ListenerSettings(
            "host", settings.listen, PROTOCOL, settings.secret, settings.silence_s
        )
        self._turns = threading.BoundedSemaphore(settings.max_transfers)
        self._lock = threading.Lock()
        self._serving: set[int] = set()  # holders, one for each client
        self.num_sent = 0  # records
        is_closing = threading.Event()
        self._outward = Budget(settings.bytes_per_second, is_closing)
        self._listener = ConnectionListener(
            listener_settings, self._hello, self._serve_client, is_closing
        )

    def _hello(self) -> Message:
        return {
            "origin": asdict(self._origin()),
            "weights_version": self._parts.cache.weights_version,
        }

    def _serve_client(self, wire: Wire) -> None:
        """Serve one client, on its own thread."""
        holder = next(self._holders)
        with self._lock:
            self._serving.add(holder)
        try:
            self._answer(wire, wire.receive(), holder)
        finally:
            self._parts.cache.drop(holder)
            with self._lock:
                self._serving.discard(holder)

    def _answer(self, wire: Wire, ask: Message, holder: int) -> None:
        deadline_s = min(float(ask["deadline_s"]), self._settings.deadline_s)
        wire.deadline = time.monotonic() + deadline_s
        if ask["ask"] == "book":
            wire.send({"held": self._inventory()})
        elif ask["ask"] == "record":
            try:
                self._give(wire, ask, holder)
            except RefusedError as exc:
                wire.send({"refused": str(exc)})
        else:
            raise ValueError(f"unknown request {ask['ask']!r}")

    def _inventory(self) -> str:
        """Which records are in memory: a bit each, in their order."""
        origin = self._parts.origin
        bits = bytearray(-(-origin.num_records // 8))
        for record in self._parts.cache.ready():
            number = origin.number_of(record)
            bits[number // 8] |= 1 << number % 8
        return bits.hex()

    # -- records

    def _give(self, wire: Wire, ask: Message, holder: int) -> None:
        """Send a record.

        Raises:
            RefusedError: it is not in memory, cannot be read in time, or the transfer limit is
                reached.
            MigrationError: the connection failed, or the other host does not read.
        """
        layer, expert = ask["record"]
        answer_s = min(wire.left_s, float(ask["answer_s"]))
        found, place = self._lease(holder, (int(layer), int(expert)), ask, answer_s)
        if not self._turns.acquire(timeout=answer_s):
            num = self._settings.max_transfers
            raise RefusedError(f"transfer limit reached: {num} records are being sent")
        try:
            size = self._parts.origin.record_bytes
            wire.send({"digest": found, "num_bytes": size})
            self._send_record(wire, place * size, size)
            with self._lock:
                self.num_sent += 1
        finally:
            self._turns.release()

    def _send_record(self, wire: Wire, start: int, size: int) -> None:
        view = self._parts.arena.bytes.numpy().data[start : start + size]
        for first in range(0, size, CHUNK_BYTES):
            chunk = view[first : first + CHUNK_BYTES]
            self._outward.spend(len(chunk), wire.deadline)
            wire.send_bytes(chunk)

    def _lease(
        self, holder: int, record: Record, ask: Message, answer_s: float
    ) -> tuple[Digest, int]:
        """Lease a record for this call; return its digest and entry."""
        try:
            self._parts.origin.number_of(record)
        except CheckpointError as exc:
            raise RefusedError(str(exc)) from exc
        cache, version = self._parts.cache, int(ask["weights_version"])
        ask_cache = cache.ask if ask["from_disk"] else cache.lease_ready
        found, place = self._wait(ask_cache, holder, record, version, answer_s)
        if not ask["is_suspect"]:
            return found, place
        size = self._parts.origin.record_bytes
        if digest(self._parts.arena.bytes[place * size : (place + 1) * size]) == found:
            return found, place
        log.error(
            "layer %d expert %d: checksum mismatch in the host cache; reloading from disk", *record
        )
        return self._wait(cache.reload, holder, record, version, answer_s)

    def _wait(
        self,
        ask_cache: Callable[[Request], None],
        holder: int,
        record: Record,
        version: int,
        answer_s: float,
    ) -> tuple[Digest, int]:
        ended = threading.Event()
        request = Request(
            holder, 1, [record], lambda _: ended.set(), weights_version=version, is_for_host=True
        )
        ask_cache(request)
        if not ended.wait(answer_s):
            self._parts.cache.expire(request)
        if request.error is not None:
            raise RefusedError(request.error)
        return request.found[record]

    def close(self) -> None:
        """Stop accepting requests and close all connections."""
        self._listener.stop()
        with self._lock:
            serving = set(self._serving)
        for holder in serving:
            self._parts.cache.drop(holder)  # ends its wait for a record that is being read
        self._listener.close()
