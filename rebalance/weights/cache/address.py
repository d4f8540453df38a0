"""Where a host cache is found by the ranks of its host: an abstract Unix socket, and a key."""

from __future__ import annotations

import logging
import math
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eplb.errors import MigrationError
from rebalance.weights.link.listener import ConnectionListener
from rebalance.weights.link.local import holder_of, listen_under, peer_of
from rebalance.weights.link.secret import Secret
from rebalance.weights.link.wire import Message, Wire, client_handshake

PROTOCOL = "eplb-host-cache-5"  # in the address too
MESSAGE_DEADLINE_S = 10.0  # for the next byte of a started message, and for room to send one
START_POLL_S = 0.05  # between two connects to a process that does not listen yet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostCacheAddress:
    """Address of a host cache. An abstract socket: a killed process leaves no file.

    Args:
        name: alike for the cache and the ranks of its host, and no other cache's.
        key: secret bytes that both sides prove to have; it keeps other users of the machine out.
        takes_offers: its records are those that ranks offer, not a checkpoint's
            (``build_engine_records``).
    """

    name: str
    key: bytes = field(repr=False)
    takes_offers: bool = False

    @property
    def socket(self) -> str:
        """Address in Linux's abstract namespace."""
        return f"\0{PROTOCOL}-{self.name}"


def place_of_records(deployment: str, secret: Secret) -> HostCacheAddress:
    """Where ranks of an engine find the ``eplb host-cache`` of their host."""
    key = secret.derived("records of an engine", 16)
    return HostCacheAddress(f"{deployment}-engine", key, takes_offers=True)


def listen(address: HostCacheAddress) -> socket.socket:
    """Listen under a host cache's address while the socket is open.

    Raises:
        MigrationError: another process has it.
    """
    listening = listen_under(address.socket)
    if listening is None:
        raise MigrationError(
            f"the host cache {address.name} cannot listen: process "
            f"{holder_of(address.socket) or 'unknown'} of this host has its place, "
            "expected none"
        )
    return listening


def listener_of_ranks(
    listening: socket.socket,
    key: bytes,
    *,
    hello: Callable[[], Message],
    serve: Callable[[Wire], None],
) -> ConnectionListener:
    """Accept ranks of this host; see ``ConnectionListener``."""
    return ConnectionListener(
        listening,
        "local rank",
        PROTOCOL,
        key,
        hello=hello,
        serve=serve,
        silence_s=MESSAGE_DEADLINE_S,
    )


def connect(
    address: HostCacheAddress, deadline_s: float, *, start_deadline_s: float = 0.0
) -> tuple[Wire, Message]:
    """Connect to a host cache; both sides prove that they have the key.

    Args:
        address: of the process.
        deadline_s: for the connection and the hello message.
        start_deadline_s: for a process that does not listen yet.

    Returns:
        The connection, and the host cache's hello message.

    Raises:
        MigrationError: the process does not answer, or not in time, or has another key or version.
    """
    end = socket.socket(socket.AF_UNIX)
    try:
        # With a timeout of Python's own, connect fails at once where it has to wait for room.
        timeval = struct.pack("@ll", int(deadline_s), int(deadline_s % 1 * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        _connect(end, address, start_deadline_s)
        if not (peer := peer_of(end)).is_trusted:
            raise MigrationError(f"a process of user {peer.uid} listens at its address")
        wire = Wire(end, time.monotonic() + deadline_s, deadline_s)
        hello = client_handshake(wire, address.key, protocol=PROTOCOL)
    except OSError as exc:
        end.close()
        raise MigrationError(
            f"cannot connect: {exc.strerror or exc}, expected it to run on this host "
            "(eplb host-cache)"
        ) from exc
    except BaseException:
        end.close()
        raise
    wire.deadline = math.inf  # each request has its own
    return wire, hello


def _connect(end: socket.socket, address: HostCacheAddress, start_deadline_s: float) -> None:
    """Connect; retry for as long as nobody listens and the deadline allows it."""
    deadline = time.monotonic() + start_deadline_s
    is_waiting = False
    while True:
        try:
            end.connect(address.socket)
            return
        except ConnectionRefusedError:
            if time.monotonic() >= deadline:
                raise
        if not is_waiting:
            log.warning(
                "the host cache %s does not listen yet: waiting at most %.0f s for it "
                "(eplb host-cache)",
                address.name,
                start_deadline_s,
            )
            is_waiting = True
        time.sleep(START_POLL_S)  # an abstract socket has no file whose creation can be watched
