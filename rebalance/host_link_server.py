"""A slab's door for the slabs of other hosts: gives them records that it holds, or reads for them.

A record that is asked for is leased like a rank's, so its place is not given away while its bytes
are sent. Nothing that another host asks for is asked of a third: a question is passed on to disk
at most, so hosts that lack the same record never wait for one another in a circle.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from eplb.errors import CheckpointError, MigrationError
from rebalance.host_link_settings import MOST_CALLERS, HostLinkSettings
from rebalance.host_link_wire import CHUNK_BYTES, Budget, Message, RefusedError, Wire, welcome
from rebalance.record_origin import RecordOrigin
from rebalance.slab_requests import Request
from rebalance.slab_session import SlabParts
from rebalance.slab_wire import Digest
from rebalance.transport import Record
from runtime.memory import digest

HANDSHAKE_DEADLINE_S = 5.0
TURN_AWAY_S = 0.1
ACCEPT_RETRY_S = 1.0
CLOSE_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


class HostLinkServer:
    """Answers other hosts until ``close``. ``origin`` says what the records are of, by now.

    Raises:
        MigrationError: the address cannot be listened on.
    """

    def __init__(
        self,
        settings: HostLinkSettings,
        parts: SlabParts,
        origin: Callable[[], RecordOrigin],
        holders: Iterator[int],
    ) -> None:
        assert settings.listen is not None, "a slab that gives nothing has no door"
        self._settings, self._parts = settings, parts
        self._origin, self._holders = origin, holders
        self._is_closing = threading.Event()
        self._outward = Budget(settings.bytes_per_second, self._is_closing)
        self._turns = threading.BoundedSemaphore(settings.max_transfers)
        self._lock = threading.Lock()
        self._callers: dict[socket.socket, tuple[threading.Thread, int]] = {}  # and holder
        self.num_sent = 0  # records
        self._listening = _listen(*settings.listen)
        self._accepting = threading.Thread(target=self._accept, name="host-accept", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                caller, (host, *_) = self._listening.accept()
            except OSError as exc:
                if not self._is_closing.is_set():
                    log.warning("another host could not be answered: %s", exc)
                    self._is_closing.wait(ACCEPT_RETRY_S)  # out of file descriptors, say
                continue
            holder = next(self._holders)
            thread = threading.Thread(
                target=self._meet, args=(caller, str(host), holder), name="host-caller", daemon=True
            )
            with self._lock:
                has_room = len(self._callers) < MOST_CALLERS
                if has_room:
                    self._callers[caller] = thread, holder
            if has_room:
                thread.start()
            else:
                self._turn_away(caller)

    def _turn_away(self, caller: socket.socket) -> None:
        with caller:
            try:
                # Nothing was sent before, so there is room for this: it never waits.
                wire = Wire(caller, time.monotonic() + self._settings.silence_s, TURN_AWAY_S)
                wire.send({"refused": f"{MOST_CALLERS} other callers are connected"})
            except (MigrationError, OSError) as exc:
                log.warning("a caller too many could not be told: %s", exc)

    def _meet(self, caller: socket.socket, name: str, holder: int) -> None:
        """Serve one caller, on a thread of its own."""
        try:
            with caller:
                deadline = time.monotonic() + HANDSHAKE_DEADLINE_S
                wire = Wire(caller, deadline, self._settings.silence_s)
                hello = {
                    "origin": asdict(self._origin()),
                    "weights_version": self._parts.cache.weights_version,
                }
                welcome(wire, self._settings.secret, hello)
                self._answer(wire, wire.receive(), holder)
        except (MigrationError, OSError) as exc:
            if not self._is_closing.is_set():
                log.warning("host %s was not served: %s", name, exc)
        except (KeyError, TypeError, ValueError) as exc:
            log.error("host %s sent what is no request, and is hung up on: %r", name, exc)
        finally:
            self._parts.cache.drop(holder)
            with self._lock:
                self._callers.pop(caller, None)

    def _answer(self, wire: Wire, ask: Message, holder: int) -> None:
        deadline_s = min(float(ask["deadline_s"]), self._settings.deadline_s)
        wire.deadline = time.monotonic() + deadline_s
        if ask["ask"] == "book":
            wire.send({"held": self._book()})
        elif ask["ask"] == "record":
            try:
                self._give(wire, ask, holder)
            except RefusedError as exc:
                wire.send({"refused": str(exc)})
        else:
            raise ValueError(f"unknown request {ask['ask']!r}")

    def _book(self) -> str:
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
            RefusedError: it is not here, or cannot be read in time, or others are being sent.
            MigrationError: the other host is gone, or takes nothing in.
        """
        layer, expert = ask["record"]
        answer_s = min(wire.left_s, float(ask["answer_s"]))
        found, place = self._lease(holder, (int(layer), int(expert)), ask, answer_s)
        if not self._turns.acquire(timeout=answer_s):
            num = self._settings.max_transfers
            raise RefusedError(f"{num} records are being sent, expected a turn in time")
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
        """Have a record in memory for the time of this call; return its digest and place."""
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
        log.error("layer %d expert %d has rotted in memory and is read again", *record)
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
        """Stop answering, and hang up on whoever is connected."""
        self._is_closing.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # ends the accept, which close alone does not
        self._listening.close()
        self._accepting.join(CLOSE_DEADLINE_S)
        with self._lock:
            callers = dict(self._callers)
        for caller, (thread, holder) in callers.items():
            self._parts.cache.drop(holder)  # ends its wait for a record that is being read
            try:
                caller.shutdown(socket.SHUT_RDWR)
            except OSError as exc:
                log.debug("a caller had hung up already: %s", exc)
            thread.join(CLOSE_DEADLINE_S)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MOST_CALLERS)
    except OSError as exc:
        raise MigrationError(
            f"other hosts' door {host} port {port} cannot be listened on: {exc}"
        ) from exc
