"""Unix sockets of this host: one process listens under a name, and the kernel names its peers.

The names are abstract: they have no file, so a killed process leaves none, and no mode bits, so any
process of the machine may connect. A client of another user is closed at once. Those of this user
prove that they know the key before a deadline, and only so many at a time: one process that
connects without end neither uses up the descriptors nor keeps ranks out.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
from collections import Counter
from typing import NamedTuple

from eplb.errors import MigrationError
from rebalance.weights.link.wire import break_off

MAX_UNAUTHENTICATED = 64  # clients that have not proved yet that they know the key
MAX_UNAUTHENTICATED_OF_PROCESS = 8

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


def listen_under(address: str) -> socket.socket | None:
    """Listen at an abstract address while the socket is open; None where another process does.

    Raises:
        MigrationError: the kernel refuses.
    """
    try:
        return socket.create_server(address, family=socket.AF_UNIX, backlog=64)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            return None
        raise MigrationError(f"cannot listen under {address[1:]}: {exc.strerror}") from exc


def holder_of(address: str) -> int | None:
    """Return the id of the process that listens at an abstract address; None: no process."""
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(1.0)
        try:
            end.connect(address)
        except OSError:
            return None
        return peer_of(end).pid


class LocalAdmission:
    """Admits processes of this user, on this host, before and after they are authenticated."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unauthenticated: dict[socket.socket, Peer] = {}  # oldest first
        self._num_refused = 0

    def admit(self, client: socket.socket, refusal: str = "") -> bool:
        """Return whether a client gets a session; ``leave`` ends it.

        Args:
            client: at the other end.
            refusal: why no client is admitted now; "": they are.
        """
        peer = peer_of(client)
        with self._lock:
            of_process = Counter(one.pid for one in self._unauthenticated.values())
            if not peer.is_trusted:
                refusal = f"process of user {peer.uid}, expected user {os.geteuid()} or root"
            elif of_process[peer.pid] >= MAX_UNAUTHENTICATED_OF_PROCESS:
                refusal = (
                    f"{MAX_UNAUTHENTICATED_OF_PROCESS} connections of this process are not "
                    "authenticated"
                )
            if refusal:
                self._refuse(peer, refusal)
                return False
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                self._evict(of_process)
            self._unauthenticated[client] = peer
            return True

    def _refuse(self, peer: Peer, why: str) -> None:
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
        self._refuse(peer, f"{MAX_UNAUTHENTICATED} connections are not authenticated")
        break_off(oldest)

    def authenticated(self, client: socket.socket) -> None:
        """Note that a client is authenticated: it may stay idle from now on."""
        with self._lock:
            self._unauthenticated.pop(client, None)

    def leave(self, client: socket.socket, failure: str) -> None:
        """Note that a client's session is over; ``failure`` says why it never authenticated."""
        with self._lock:
            peer = self._unauthenticated.pop(client, None)
            if peer is not None and failure:  # one that was evicted is counted already
                self._refuse(peer, failure)
