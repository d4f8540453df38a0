"""Which clients a listener serves: so many over TCP; on this host those of one user, in turn.

Any process of the machine may connect to the socket of a host cache, whose abstract name has no
mode bits. A client of another user is closed at once. Those of this user prove that they know the
key before a deadline, and only so many at a time: one process that connects without end neither
uses up the descriptors nor keeps ranks out.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from typing import NamedTuple, Protocol

from eplb.errors import MigrationError
from rebalance.weights.link.wire import Wire, break_off

MAX_CLIENTS = 64  # open connections of one TCP listener; further clients are refused
REFUSAL_TIMEOUT_S = 0.1
MAX_SESSIONS = 1024
MAX_UNAUTHENTICATED = 64  # clients that have not proved yet that they know the key
MAX_UNAUTHENTICATED_OF_PROCESS = 8
HANDSHAKE_DEADLINE_S = 10.0  # for all of it, however slowly bytes come

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

log = logging.getLogger(__name__)


class Admission(Protocol):
    """Which clients are served. ``admit`` belongs to one thread; the rest is thread-safe."""

    def admit(self, client: socket.socket) -> bool:
        """Return whether a client gets a thread; ``leave`` ends it. A refusal is logged or sent."""

    def authenticated(self, client: socket.socket) -> None:
        """Note that a client has proved the secret."""

    def leave(self, client: socket.socket, failure: str) -> None:
        """Note that a client is served no more; ``failure`` says why it was never authenticated."""


class ClientLimit:
    """Admits ``MAX_CLIENTS`` clients; further ones receive the reason."""

    def __init__(self, *, is_tls: bool = False) -> None:
        self._lock, self._num_clients, self._is_tls = threading.Lock(), 0, is_tls

    def admit(self, client: socket.socket) -> bool:
        """Return whether there is room for a client."""
        with self._lock:
            has_room = self._num_clients < MAX_CLIENTS
            self._num_clients += has_room
        if not has_room and self._is_tls:  # a client would have to be waited for to be told
            log.warning("connection limit reached: %d clients connected", MAX_CLIENTS)
        elif not has_room:
            try:
                # Nothing was sent before, so there is room for this: it never waits.
                wire = Wire(client, time.monotonic() + REFUSAL_TIMEOUT_S, REFUSAL_TIMEOUT_S)
                wire.send({"refused": f"connection limit reached: {MAX_CLIENTS} clients connected"})
            except (MigrationError, OSError) as exc:
                log.warning("connection limit reached, refusal not sent: %s", exc)
        return has_room

    def authenticated(self, client: socket.socket) -> None:
        """Ignored: the limit counts all clients."""

    def leave(self, client: socket.socket, failure: str) -> None:
        """Make room."""
        with self._lock:
            self._num_clients -= 1
        if failure:
            log.warning("%s", failure)


class Peer(NamedTuple):
    """The process at the other end, as the kernel saw it when it connected or listened."""

    pid: int
    uid: int

    @property
    def is_trusted(self) -> bool:
        """Whether it is of this user, or root."""
        return self.uid in (0, os.geteuid())


def peer_of(end: socket.socket) -> Peer:
    """Return the process at the other end of a Unix socket."""
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


class LocalAdmission:
    """Admits processes of this user, on this host, before and after they are authenticated."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unauthenticated: dict[socket.socket, Peer] = {}  # oldest first
        self._num_sessions = 0
        self._num_refused = 0

    def admit(self, client: socket.socket) -> bool:
        """Return whether a client gets a session; ``leave`` ends it."""
        peer = peer_of(client)
        with self._lock:
            of_process = Counter(one.pid for one in self._unauthenticated.values())
            refusal = ""
            if not peer.is_trusted:
                refusal = f"process of user {peer.uid}, expected user {os.geteuid()} or root"
            elif self._num_sessions >= MAX_SESSIONS:
                refusal = f"connection limit reached: {MAX_SESSIONS} clients connected"
            elif of_process[peer.pid] >= MAX_UNAUTHENTICATED_OF_PROCESS:
                refusal = (
                    f"{MAX_UNAUTHENTICATED_OF_PROCESS} connections of this process are not "
                    "authenticated"
                )
            if refusal:
                self._refused(peer, refusal)
                return False
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                self._evict(of_process)
            self._unauthenticated[client] = peer
            self._num_sessions += 1
            return True

    def _refused(self, peer: Peer, why: str) -> None:
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # 1, 2, 4, ...: a flood fills no log
            log.warning(
                "host weight cache: refused process %d (%d refusals so far): %s",
                peer.pid,
                self._num_refused,
                why,
            )

    def _evict(self, of_process: Counter[int]) -> None:
        """Close the oldest connection of the process that has most; a rank has one, briefly."""
        ((pid, _),) = of_process.most_common(1)
        oldest = next(one for one, peer in self._unauthenticated.items() if peer.pid == pid)
        peer = self._unauthenticated.pop(oldest)
        self._refused(peer, f"{MAX_UNAUTHENTICATED} connections are not authenticated")
        break_off(oldest)

    def authenticated(self, client: socket.socket) -> None:
        """Note that a client is authenticated: it may stay idle from now on."""
        with self._lock:
            self._unauthenticated.pop(client, None)

    def leave(self, client: socket.socket, failure: str) -> None:
        """Note that a client's session is over."""
        with self._lock:
            self._num_sessions -= 1
            peer = self._unauthenticated.pop(client, None)
            if peer is not None and failure:  # one that was evicted is counted already
                self._refused(peer, failure)
