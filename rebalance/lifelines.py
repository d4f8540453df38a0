"""Who of the other ranks is gone, known within milliseconds and without asking anybody.

Every two ranks hold a connection open that carries nothing. When a process dies, by any way of
dying, its system closes the connection, and the other end reads that. A vote cannot tell as much:
between two votes there is none that could break, and meanwhile a kernel of the dispatch may wait
for the dead rank and take the host with it (DeepEP v1.2.1: about 100 s).

A host that vanishes closes nothing; keep-alive probes find that out after about ``SILENCE_S``.
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

from eplb.errors import RankError

SILENCE_S = 9  # a host that answers no probe for so long is gone
LEAVING = b"\x01"  # sent before a connection is closed on purpose
HELLO = struct.Struct("!I16s")  # the caller's rank, and the key of the rank that it calls

Address = tuple[str, int, bytes]  # host, port, key
Exchange = Callable[[Address], Sequence[Address]]  # every rank's address, by rank

log = logging.getLogger(__name__)


class Lifelines:
    """One connection to every other rank, watched by one thread.

    Args:
        rank: this rank.
        exchange: a collective that gives every rank's address for this rank's own.
        host: name or address under which the other ranks reach this one.
        deadline_s: for all ranks to be connected.

    Raises:
        RankError: a rank cannot be reached, or not in time.
    """

    def __init__(
        self, rank: int, exchange: Exchange, *, host: str = "127.0.0.1", deadline_s: float = 60.0
    ) -> None:
        self._rank = rank
        self._dead: frozenset[int] = frozenset()  # replaced, never changed: two threads look at it
        self._leaving: set[int] = set()
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, -1)
        key = secrets.token_bytes(16)
        with socket.create_server((host, 0), backlog=1024) as listening:
            addresses = exchange((host, listening.getsockname()[1], key))
            self._connect(listening, addresses, time.monotonic() + deadline_s)
        self._thread = threading.Thread(target=self._watch, name="eplb-lifelines", daemon=True)
        self._thread.start()

    def dead(self) -> frozenset[int]:
        """Ranks that are known to be gone. A rank that took its leave is not among them."""
        return self._dead

    def close(self) -> None:
        """Take leave of every rank."""
        if self._is_closed:
            return
        self._is_closed = True
        os.write(self._wake, b"\0")
        self._thread.join()
        for registered in list(self._selector.get_map().values()):
            if registered.data >= 0:
                self._take_leave(registered.fileobj)
        self._selector.close()
        os.close(self._wake)
        os.close(self._wake_reader)

    @staticmethod
    def _take_leave(line: object) -> None:
        assert isinstance(line, socket.socket), "only sockets are registered for ranks"
        try:
            line.send(LEAVING)
        except OSError:
            log.debug("a rank was gone before this one left")
        line.close()

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
            # Half of what is left: whoever says nothing must not take the time of those behind.
            line.settimeout(max(0.001, (deadline - time.monotonic()) / 2))
            try:
                rank, key = HELLO.unpack(line.recv(HELLO.size, socket.MSG_WAITALL))
            except (struct.error, OSError):
                line.close()  # a stranger who says too little, or nothing, or hangs up
                continue
            if rank in missing and hmac.compare_digest(key, own_key):
                self._register(rank, line)
                missing.discard(rank)
            else:
                line.close()

    def _call(self, rank: int, address: Address, deadline: float) -> socket.socket:
        host, port, key = address
        left_s = max(0.001, deadline - time.monotonic())
        try:
            line = socket.create_connection((host, port), timeout=left_s)
            line.sendall(HELLO.pack(self._rank, key))
        except OSError as exc:
            raise RankError(
                f"rank {self._rank} cannot reach rank {rank} at {host}:{port}: {exc}"
            ) from exc
        return line

    def _register(self, rank: int, line: socket.socket) -> None:
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 3)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        self._selector.register(line, selectors.EVENT_READ, rank)

    def _watch(self) -> None:
        while not self._is_closed:
            for ready, _ in self._selector.select():
                if ready.data >= 0:
                    assert isinstance(ready.fileobj, socket.socket), "ranks are sockets"
                    self._hear(ready.data, ready.fileobj)

    def _hear(self, rank: int, line: socket.socket) -> None:
        try:
            said = line.recv(1)
        except OSError:  # reset, or no probe was answered
            said = b""
        if said == LEAVING:
            self._leaving.add(rank)
            return
        self._selector.unregister(line)
        line.close()
        if rank not in self._leaving:
            self._dead |= {rank}
            log.warning("rank %d: rank %d is gone", self._rank, rank)
