"""Detects dead ranks within milliseconds, and silent ones within their time.

Every two ranks keep a connection open. When a process dies, its operating system closes the
connection, and the other end reads that. A vote cannot detect it as fast: between two votes nothing
would fail, and meanwhile a dispatch kernel may wait for the dead rank and block the host (DeepEP
v1.2.1: about 100 s).

A stopped process and a vanished host close nothing. Beats detect both, where they are switched on
(``heartbeats``); else keep-alive probes detect the host after about ``SILENCE_S``.

        rank r listens --> all ranks exchange (host, port, key) --> r connects to those below it
                                                                  and accepts those above it
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from eplb.errors import RankError
from eplb.settings.deployment import is_loopback
from rebalance.protocol.heartbeats import Heartbeats

SILENCE_S = 30  # a host that answers no probe for so long is dead: as long as a vote may take
# So many in a row: two were lost once, on all lines of one rank of a machine with ten processes for
# each core, and its group ended although no process had died.
PROBES = 5
CLOSE_DEADLINE_S = 10.0
LOOPBACK = "127.0.0.1"
LEAVING = b"\x01"  # sent before a connection is closed on purpose
BEAT = b"\x02"
SILENT = b"\x03"  # a rank is silent: its number follows
NUMBER = struct.Struct("!H")
READ_BYTES = 4096
HELLO = struct.Struct("!I16s")  # the client's rank, and the key of the rank that it connects to

Address = tuple[str, int, bytes]  # host, port, key
Exchange = Callable[[Address], Sequence[Address]]  # every rank's address, by rank

log = logging.getLogger(__name__)


class LivenessConnections:
    """One connection to every other rank, watched by one thread.

    Args:
        rank: this rank.
        exchange: a collective that gives every rank's address for this rank's own.
        host: address of this machine by which the other ranks reach this one.
        deadline_s: for all ranks to be connected.
        silence_s: of a rank that has beaten, after which it is dead; 0: beats are not sent.
        members: the ranks of the group by their number in the deployment; None: all, in order.

    Raises:
        RankError: ``host`` is none of this machine's, or a rank cannot be reached, or not in time.
    """

    def __init__(
        self,
        rank: int,
        exchange: Exchange,
        *,
        host: str = LOOPBACK,
        deadline_s: float = 60.0,
        silence_s: float = 0.0,
        members: Sequence[int] | None = None,
    ) -> None:
        self._rank, self._host, self._silence_s = rank, host, silence_s
        self._members = members
        self._dead: frozenset[int] = frozenset()  # replaced, never changed: two threads look at it
        self._leaving: set[int] = set()
        self._lines: dict[int, socket.socket] = {}  # open ones; the thread's
        self._unread: dict[int, bytes] = {}  # the begin of a message, by rank
        self._beats_begin = threading.Event()
        self._is_closed, self._is_failure = threading.Event(), False
        key = secrets.token_bytes(16)
        self._open = ExitStack()
        try:
            self._selector = self._open.enter_context(selectors.DefaultSelector())
            self._wake_reader, self._wake = os.pipe()
            self._open.callback(os.close, self._wake_reader)
            self._open.callback(os.close, self._wake)
            self._selector.register(self._wake_reader, selectors.EVENT_READ, -1)
            with self._listen() as listening:
                addresses = exchange((host, listening.getsockname()[1], key))
                self._connect(listening, addresses, time.monotonic() + deadline_s)
            self._beats = Heartbeats(rank, len(addresses), silence_s)
            self._thread = threading.Thread(target=self._watch, name="eplb-liveness", daemon=True)
            self._thread.start()  # last: what is open is the thread's from here on
        except BaseException:
            self._open.close()
            raise

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            return socket.create_server((self._host, 0), family=family, backlog=1024)
        except OSError as exc:
            raise RankError(
                f"rank {self._rank} cannot listen at {self._host}, expected an address of its own "
                f"machine: {exc}"
            ) from exc

    def dead(self) -> frozenset[int]:
        """Ranks that are known to be dead, without those that left regularly."""
        return self._dead

    def begin_beats(self) -> None:
        """Send beats, and watch those of others, from now on; idempotent."""
        if not self._beats_begin.is_set() and not self._is_closed.is_set():
            self._beats_begin.set()
            os.write(self._wake, BEAT)

    def close(self, *, is_failure: bool = False, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Announce the leave to every rank and close; idempotent.

        After a failure nothing is announced: every other rank detects a death.
        """
        if self._is_closed.is_set():
            return
        self._is_failure = is_failure
        self._is_closed.set()
        os.write(self._wake, LEAVING)  # the thread closes this pipe once it has read that
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            log.error(
                "rank %d: the thread of the liveness connections did not stop within %g s; "
                "other ranks may detect this rank as dead",
                self._rank,
                deadline_s,
            )

    def _connect(
        self, listening: socket.socket, addresses: Sequence[Address], deadline: float
    ) -> None:
        """Call the ranks below this one, and be called by those above."""
        for rank, address in enumerate(addresses[: self._rank]):
            self._register(rank, self._call(rank, address, deadline))
        missing = set(range(self._rank + 1, len(addresses)))
        own_key = addresses[self._rank][2]
        while missing:
            listening.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                line, _ = listening.accept()
            except OSError as exc:
                raise RankError(
                    f"rank {self._rank}: ranks {sorted(missing)} did not connect: {exc}"
                ) from exc
            # Half of the remaining time: a silent client must not use up the time of those behind.
            line.settimeout(max(0.001, (deadline - time.monotonic()) / 2))
            try:
                rank, key = HELLO.unpack(line.recv(HELLO.size, socket.MSG_WAITALL))
            except (struct.error, OSError):
                line.close()  # malformed or incomplete hello
                continue
            if rank in missing and hmac.compare_digest(key, own_key):
                self._open.callback(line.close)
                self._register(rank, line)
                missing.discard(rank)
            else:
                line.close()

    def _call(self, rank: int, address: Address, deadline: float) -> socket.socket:
        host, port, key = address
        left_s = max(0.001, deadline - time.monotonic())
        try:
            line = socket.create_connection((host, port), timeout=left_s)
            self._open.callback(line.close)
            line.sendall(HELLO.pack(self._rank, key))
        except OSError as exc:
            raise RankError(
                f"rank {self._rank} cannot reach rank {rank} at {host}:{port}: {exc}"
                f"{self._advice(host)}"
            ) from exc
        return line

    def _advice(self, host: str) -> str:
        """Return advice for a loopback address that other machines cannot reach."""
        if not is_loopback(host) or is_loopback(self._host):
            return ""
        return f"; {host} is a loopback address: configure that rank's host"

    def _register(self, rank: int, line: socket.socket) -> None:
        line.setblocking(False)  # what looks ready may not be: nothing may hold the watching up
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        every_s = SILENCE_S // (1 + PROBES)  # each is waited for
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        self._selector.register(line, selectors.EVENT_READ, rank)
        self._lines[rank] = line

    def _watch(self) -> None:
        with self._open:  # closed by this thread alone: no other may close what it looks at
            woken = b""
            while LEAVING not in woken:
                for ready, _ in self._selector.select(self._beats.wait_s(time.monotonic())):
                    if ready.data in self._lines:
                        self._read(ready.data, self._lines[ready.data])
                    elif ready.data < 0:
                        woken = os.read(self._wake_reader, READ_BYTES)
                self._beat(time.monotonic())
            if not self._is_failure:
                self._send(LEAVING, self._lines)

    def _beat(self, now: float) -> None:
        """Send what is due, and end the lines of ranks that are silent."""
        if self._beats_begin.is_set():
            self._beats.begin(now)
        for rank in self._beats.silent(now):
            self._end(rank, f"silent for {self._silence_s:g} s", now)
            self._send(SILENT + NUMBER.pack(rank), self._lines)
        if self._beats.are_due(now):
            self._send(BEAT, self._beats.neighbours)

    def _send(self, message: bytes, ranks: Iterable[int]) -> None:
        for rank in ranks:
            try:
                self._lines[rank].send(message)
            except OSError as exc:  # closed, or full because the rank reads nothing
                log.debug("rank %d: not sent to rank %d: %s", self._rank, rank, exc)

    def _read(self, rank: int, line: socket.socket) -> None:
        now = time.monotonic()
        try:
            received = line.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # reset, or no probe was answered
            received = b""
        if not received:
            self._end(rank, "liveness connection closed", now)
            return
        unread = self._unread.pop(rank, b"") + received
        while unread:
            kind, unread = unread[:1], unread[1:]
            if kind == LEAVING:
                self._leaving.add(rank)
            elif kind == BEAT:
                self._beats.heard(rank, now)
            elif kind == SILENT and len(unread) >= NUMBER.size:
                number, unread = NUMBER.unpack(unread[: NUMBER.size])[0], unread[NUMBER.size :]
                self._end(number, f"silent, by rank {self._number_at(rank)}", now)
            elif kind == SILENT:
                self._unread[rank], unread = kind + unread, b""
            else:
                self._end(rank, f"sent {kind!r}, expected a message of this version", now)
                return

    def _end(self, rank: int, why: str, now: float) -> None:
        """Close the line of a rank that is dead or has left; it learns so if it is neither."""
        if (line := self._lines.pop(rank, None)) is None:
            return
        self._selector.unregister(line)
        line.close()
        self._beats.gone(rank, now)
        if rank not in self._leaving:
            named, own = self._number_at(rank), self._number_at(self._rank)
            self._dead |= {named}
            log.warning("rank %d: rank %d is dead: %s", own, named, why)

    def _number_at(self, place: int) -> int:
        """The number in the deployment of a rank of this group."""
        return place if self._members is None else self._members[place]


def address_towards(host: str, port: int) -> str:
    """Return the local address from which this machine would connect to another one.

    It is assumed that other ranks, which reach that machine too, reach this address. Nothing is
    sent.

    Raises:
        RankError: there is no route.
    """
    refusals: list[str] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, address in found:
            try:
                with socket.socket(family, kind, protocol) as towards:
                    towards.connect(address)  # only selects the route: UDP sends nothing on connect
                    return str(towards.getsockname()[0])
            except OSError as exc:
                refusals.append(f"{address[0]}: {exc}")
    except OSError as exc:
        refusals.append(str(exc))
    raise RankError(f"no route from this host to {host} port {port}: {'; '.join(refusals)}")
