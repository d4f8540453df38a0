"""Detects dead ranks within milliseconds, without polling.

Every two ranks keep a connection open that carries no data. When a process dies, its operating
system closes the connection, and the other end reads that. A vote cannot detect it as fast: between
two votes nothing would fail, and meanwhile a dispatch kernel may wait for the dead rank and block
the host (DeepEP v1.2.1: about 100 s).

A vanished host closes nothing; keep-alive probes detect it after about ``SILENCE_S``.

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from eplb.errors import RankError
from eplb.settings.deployment import is_loopback

SILENCE_S = 30  # a host that answers no probe for so long is dead: as long as a vote may take
# So many in a row: two were lost once, on all lines of one rank of a machine with ten processes for
# each core, and its group ended although no process had died.
PROBES = 5
CLOSE_DEADLINE_S = 10.0
LOOPBACK = "127.0.0.1"
LEAVING = b"\x01"  # sent before a connection is closed on purpose
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

    Raises:
        RankError: ``host`` is none of this machine's, or a rank cannot be reached, or not in time.
    """

    def __init__(
        self, rank: int, exchange: Exchange, *, host: str = LOOPBACK, deadline_s: float = 60.0
    ) -> None:
        self._rank, self._host = rank, host
        self._dead: frozenset[int] = frozenset()  # replaced, never changed: two threads look at it
        self._leaving: set[int] = set()
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

    def close(self, *, is_failure: bool = False, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Announce the leave to every rank and close; idempotent.

        After a failure nothing is announced: every other rank detects a death.
        """
        if self._is_closed.is_set():
            return
        self._is_failure = is_failure
        os.write(self._wake, b"\0")  # first: once the flag is set, the thread may close this pipe
        self._is_closed.set()
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

    def _watch(self) -> None:
        with self._open:  # closed by this thread alone: no other may close what it looks at
            while not self._is_closed.is_set():
                for ready, _ in self._selector.select():
                    if ready.data >= 0:
                        assert isinstance(ready.fileobj, socket.socket), "ranks are sockets"
                        self._read(ready.data, ready.fileobj)
            for registered in self._selector.get_map().values():
                line = registered.fileobj
                if isinstance(line, socket.socket) and not self._is_failure:
                    try:
                        line.send(LEAVING)
                    except OSError:
                        log.debug("a rank closed its liveness connection before this one left")

    def _read(self, rank: int, line: socket.socket) -> None:
        try:
            received = line.recv(1)
        except BlockingIOError:
            return
        except OSError:  # reset, or no probe was answered
            received = b""
        if received == LEAVING:
            self._leaving.add(rank)
            return
        self._selector.unregister(line)
        line.close()
        if rank not in self._leaving:
            self._dead |= {rank}
            log.warning("rank %d: rank %d is dead: liveness connection closed", self._rank, rank)


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
