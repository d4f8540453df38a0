"""Which clients of the host weight cache's socket get a session: an abstract name has no mode bits.

Any process of the machine may connect to it. A client of another user is closed at once. Those of
this user prove that they know the key before a deadline, and only so many at a time: one process
that connects without end neither uses up the descriptors nor keeps ranks out.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections import Counter
from typing import NamedTuple

from rebalance.weights.link.wire import break_off

MAX_SESSIONS = 1024
MAX_UNAUTHENTICATED = 64  # clients that have not proved yet that they know the key
MAX_UNAUTHENTICATED_OF_PROCESS = 8
HANDSHAKE_DEADLINE_S = 10.0  # for all of it, however slowly bytes come

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

log = logging.getLogger(__name__)


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
    """``rebalance.weights.link.server.Admission`` of clients of this host."""

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
