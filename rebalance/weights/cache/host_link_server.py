"""Server of a host cache for other hosts: sends records that it holds, or reads them first.

A requested record is leased like a rank's, so its entry is not evicted while its bytes are sent. A
request of another host is never forwarded to a third host, only to the local disk, so hosts that
lack the same record never wait for each other in a cycle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

from eplb.errors import CheckpointError
from rebalance.types import Digest, Record
from rebalance.weights.disk.record_origin import RecordOrigin
from rebalance.weights.link.handshake import PROTOCOL
from rebalance.weights.link.host_link_settings import HostLinkSettings
from rebalance.weights.link.limits import CHUNK_BYTES, Budget
from rebalance.weights.link.server import ConnectionListener, ListenerSettings, listen
from rebalance.weights.link.wire import Message, RefusedError, Wire


@dataclass(frozen=True)
class LeaseTerms:
    """How another host asks for a record."""

    from_disk: bool  # else only of memory
    is_suspect: bool  # it came with other bytes than its digest says: look at them first
    weights_version: int
    answer_s: float  # it is refused after this time


class SharedRecords(Protocol):
    """The records of this host (``rebalance.weights.cache.for_hosts``)."""

    @property
    def origin(self) -> RecordOrigin:
        """What the records are of."""

    @property
    def weights_version(self) -> int:
        """Of the weights that serve; older records are void."""

    def ready(self) -> Iterable[Record]:
        """Records that are in memory."""

    def lease(self, holder: int, record: Record, terms: LeaseTerms) -> tuple[Digest, memoryview]:
        """Have a record in memory until ``drop``; return its digest and its bytes.

        Raises:
            RefusedError: it cannot be had, or not in time.
        """

    def drop(self, holder: int) -> None:
        """End a holder's leases, and its wait for a record that is being read."""


class HostLinkServer:
    """Serves other hosts until ``close``. ``origin`` returns the origin of the records.

    Raises:
        MigrationError: the address cannot be listened on.
    """

    def __init__(
        self,
        settings: HostLinkSettings,
        records: SharedRecords,
        origin: Callable[[], RecordOrigin],
        holders: Iterator[int],
    ) -> None:
        assert settings.listen is not None, (
            "only a host cache with a listen address serves other hosts"
        )
        self._settings, self._records = settings, records
        self._origin, self._holders = origin, holders
        self._turns = threading.BoundedSemaphore(settings.max_transfers)
        self._lock = threading.Lock()
        self._serving: set[int] = set()  # holders, one for each client
        self.num_sent = 0  # records
        is_closing = threading.Event()
        self._outward = Budget(settings.bytes_per_second, is_closing)
        tls = settings.tls.server_context() if settings.tls else None
        self._listener = ConnectionListener(
            listen(settings.listen, "host"),
            ListenerSettings("host", PROTOCOL, settings.secret, settings.silence_s, tls=tls),
            self._hello,
            self._serve_client,
            is_closing,
        )

    def _hello(self) -> Message:
        return {
            "origin": asdict(self._origin()),
            "weights_version": self._records.weights_version,
        }

    def _serve_client(self, wire: Wire) -> None:
        """Serve one client, on its own thread."""
        holder = next(self._holders)
        with self._lock:
            self._serving.add(holder)
        try:
            self._answer(wire, wire.receive(), holder)
        finally:
            self._records.drop(holder)
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
        origin = self._records.origin
        bits = bytearray(-(-origin.num_records // 8))
        for record in self._records.ready():
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
        found, held = self._lease(holder, (int(layer), int(expert)), ask, answer_s)
        if not self._turns.acquire(timeout=answer_s):
            num = self._settings.max_transfers
            raise RefusedError(f"transfer limit reached: {num} records are being sent")
        try:
            wire.send({"digest": found, "num_bytes": len(held)})
            self._send_record(wire, held)
            with self._lock:
                self.num_sent += 1
        finally:
            self._turns.release()

    def _send_record(self, wire: Wire, held: memoryview) -> None:
        for first in range(0, len(held), CHUNK_BYTES):
            chunk = held[first : first + CHUNK_BYTES]
            self._outward.spend(len(chunk), wire.deadline)
            wire.send_bytes(chunk)

    def _lease(
        self, holder: int, record: Record, ask: Message, answer_s: float
    ) -> tuple[Digest, memoryview]:
        """Lease a record for this call; return its digest and its bytes."""
        try:
            self._records.origin.number_of(record)
        except CheckpointError as exc:
            raise RefusedError(str(exc)) from exc
        terms = LeaseTerms(
            from_disk=bool(ask["from_disk"]),
            is_suspect=bool(ask["is_suspect"]),
            weights_version=int(ask["weights_version"]),
            answer_s=answer_s,
        )
        return self._records.lease(holder, record, terms)

    def close(self) -> None:
        """Stop accepting requests and close all connections."""
        self._listener.stop()
        with self._lock:
            serving = set(self._serving)
        for holder in serving:
            self._records.drop(holder)  # ends its wait for a record that is being read
        self._listener.close()
