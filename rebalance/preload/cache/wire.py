"""Connections between ranks and the preload process of their host."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from eplb.errors import MigrationError
from rebalance.preload.cache.admission import peer_of

MESSAGE_DEADLINE_S = 10.0  # for the rest of a started message, and for room to send one
Digest = tuple[int, int]


@dataclass(frozen=True)
class HostCacheAddress:
    """Address of a host cache. An abstract socket: a killed process leaves no file."""

    name: str
    key: bytes = field(repr=False)  # keeps other users of the machine out

    @property
    def socket(self) -> str:
        """Address in Linux's abstract namespace."""
        return f"\0eplb-host-cache-{self.name}"


def listen(address: HostCacheAddress) -> socket.socket:
    """Listen under a host cache's address while the socket is open.

    Raises:
        MigrationError: another process has it.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(address.socket)
        listening.listen(64)
    except OSError as exc:
        listening.close()
        raise MigrationError(
            f"the preload process of host {address.name} cannot listen: {exc}"
        ) from exc
    return listening


def connect(address: HostCacheAddress, deadline_s: float) -> Connection:
    """Connect to the preload process; both sides prove that they have the key."""
    with socket.socket(socket.AF_UNIX) as end:
        _limit_waits(end, deadline_s)
        end.connect(address.socket)
        if not (peer := peer_of(end)).is_trusted:
            raise AuthenticationError(f"a process of user {peer.uid} listens at its address")
        connection = Connection(end.detach())
    answer_challenge(connection, address.key)
    deliver_challenge(connection, address.key)
    return connection


def server_handshake(connection: Connection, key: bytes) -> None:
    """Authenticate a client, and prove the key to it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        _limit_waits(end, MESSAGE_DEADLINE_S)
        deliver_challenge(connection, key)
        answer_challenge(connection, key)


def _limit_waits(end: socket.socket, seconds: float) -> None:
    """Set the timeout of each read and write."""
    timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
