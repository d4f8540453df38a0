"""Framing, handshake and deadlines of a connection between two hosts or two ranks.

    client                                   server
      | <------ protocol, nonce ---------------- |   or: connection limit reached
      | ------- nonce, proof of the secret ----> |
      | <------ proof, origin, version --------- |   or: the secrets differ
      | ------- request -----------------------> |
      | <------ response, then the record ------ |   or the reason of a refusal

Between two host caches a connection carries one request: no earlier response can be mistaken for a
later one, and closing it frees what it held on the server. Between two ranks it is kept for further
requests. Messages are JSON with a length prefix.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from eplb.core.bounded_json import decode_json
from eplb.errors import MigrationError
from rebalance.network.throttle import TokenBucket

PROTOCOL = "eplb-hosts-1"  # of host caches; each kind of listener has its own
CHUNK_BYTES = 8 * 2**20  # between two looks at the budget, and worked into the digest at once
MAX_MESSAGE_BYTES = 2**20  # after authentication
MAX_PROOF_BYTES = 512  # before it: a nonce and a proof take 150
MAX_HELLO_BYTES = 2**16  # the side that is asked names its records beside its proof
_LENGTH = struct.Struct("!I")

Message = dict[str, Any]
T = TypeVar("T")


class RefusedError(MigrationError):
    """The other side works, and refuses the request."""


class Wire:
    """One end of a connection. Every failure is a MigrationError with the reason.

    Args:
        end: connected; closed by its owner.
        deadline: of the whole exchange, by time.monotonic; may be replaced.
        silence_s: for the next byte.
    """

    def __init__(self, end: socket.socket, deadline: float, silence_s: float) -> None:
        self._end, self.deadline, self._silence_s = end, deadline, silence_s
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def left_s(self) -> float:
        """Time until the deadline; none is 0."""
        return max(0.0, self.deadline - time.monotonic())

    def wait_for_data(self, timeout_s: float) -> bool:
        """Wait for the next message; False if the connection closes first, or on a timeout.

        Nothing is consumed. A connection that ends between two requests is not an error.
        """
        try:
            self._end.settimeout(timeout_s)
            return bool(self._end.recv(1, socket.MSG_PEEK))
        except OSError:  # timeout or broken connection: either way there is no request
            return False

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            MigrationError: the connection failed, or the other side does not read.
        """
        text = json.dumps(message).encode()
        self.send_bytes(memoryview(_LENGTH.pack(len(text)) + text))

    def receive(
        self, *, max_bytes: int = MAX_MESSAGE_BYTES, until_deadline: bool = False
    ) -> Message:
        """Receive one message; with ``until_deadline`` wait for it up to the deadline.

        Raises:
            MigrationError: the connection failed or timed out, or the message is malformed.
        """
        silence_s = self.left_s if until_deadline else self._silence_s
        head = self._read(_LENGTH.size, silence_s)
        (length,) = _LENGTH.unpack(head)
        if length > max_bytes:
            raise MigrationError(
                f"message header {head!r}, expected a length of at most {max_bytes} bytes"
            )
        text = self._read(length, self._silence_s)
        try:
            message = decode_json(text)
        except ValueError as exc:
            raise MigrationError(f"message {text[:32]!r}, expected JSON: {exc}") from exc
        if not isinstance(message, dict):
            raise MigrationError(f"message {text[:32]!r}, expected a JSON object")
        return message

    def send_bytes(self, view: memoryview) -> None:
        """Send all of it.

        Raises:
            MigrationError: the connection failed, or the other side does not read.
        """
        # Copied, not sendfile: a place may hold another record before pages that are sent by
        # reference have left the machine.
        while len(view):
            view = view[self._in_time(partial(self._end.send, view), self._silence_s) :]

    def receive_bytes(self, into: memoryview) -> None:
        """Fill ``into``.

        Raises:
            MigrationError: the connection failed or timed out.
        """
        self._fill(into, self._silence_s)

    def _read(self, num_bytes: int, silence_s: float) -> bytes:
        found = bytearray(num_bytes)
        self._fill(memoryview(found), silence_s)
        return bytes(found)

    def _fill(self, into: memoryview, silence_s: float) -> None:
        done = 0
        while done < len(into):
            count = self._in_time(partial(self._end.recv_into, into[done:]), silence_s)
            if count == 0:
                raise MigrationError(f"connection closed after {done} of {len(into)} bytes")
            done += count

    def _in_time(self, step: Callable[[], int], silence_s: float) -> int:
        left_s = min(self.left_s, silence_s)
        if left_s <= 0:
            raise MigrationError("deadline passed before the transfer was complete")
        try:
            self._end.settimeout(left_s)
            return step()
        except TimeoutError as exc:
            raise MigrationError(f"no bytes transferred within {left_s:.3g} s") from exc
        except OSError as exc:
            raise MigrationError(f"connection failed: {exc}") from exc


def connect(address: tuple[str, int], deadline_s: float) -> socket.socket:
    """Open a TCP connection.

    Raises:
        MigrationError: the connection was refused or timed out.
    """
    try:
        return socket.create_connection(address, timeout=deadline_s)
    except OSError as exc:
        raise MigrationError(f"cannot connect: {exc}") from exc


def client_handshake(wire: Wire, secret: bytes, *, protocol: str = PROTOCOL) -> Message:
    """Authenticate to a server and check its proof.

    Returns:
        The server's hello message.

    Raises:
        RefusedError: the server's connection limit is reached.
        MigrationError: the secrets differ, or the protocol is another one.
    """
    theirs = wire.receive(max_bytes=MAX_PROOF_BYTES)
    if "refused" in theirs:
        raise RefusedError(str(theirs["refused"]))
    if theirs.get("protocol") != protocol:
        raise MigrationError(f"protocol {theirs.get('protocol')!r}, expected {protocol!r}")
    nonces = secrets.token_hex(16), str(theirs.get("nonce"))
    wire.send({"nonce": nonces[0], "proof": _proof(secret, protocol, "asks", nonces)})
    found = wire.receive(max_bytes=MAX_HELLO_BYTES)
    if "error" in found:
        raise MigrationError(str(found["error"]))
    proof = _proof(secret, protocol, "gives", nonces)
    if not hmac.compare_digest(str(found.get("proof")), proof):
        raise MigrationError(
            "authentication failed: no proof of the deployment's secret from the server"
        )
    return found


def server_handshake(
    wire: Wire, secret: bytes, hello: Message, *, protocol: str = PROTOCOL
) -> None:
    """Authenticate a client, then send the hello message.

    Raises:
        MigrationError: the client has no proof of the secret.
    """
    own = secrets.token_hex(16)
    wire.send({"protocol": protocol, "nonce": own})
    found = wire.receive(max_bytes=MAX_PROOF_BYTES)
    nonces = str(found.get("nonce")), own
    proof = _proof(secret, protocol, "asks", nonces)
    if not hmac.compare_digest(str(found.get("proof")), proof):
        refusal = (
            "authentication failed: the secrets differ, expected the deployment's on both sides"
        )
        wire.send({"error": refusal})
        raise MigrationError(
            "authentication failed: no proof of the deployment's secret from the client"
        )
    wire.send({"proof": _proof(secret, protocol, "gives", nonces)} | hello)


def _proof(secret: bytes, protocol: str, role: str, nonces: tuple[str, str]) -> str:
    """Bound to the role, so that a proof cannot be replayed to its sender."""
    return hmac.new(secret, "|".join((protocol, role, *nonces)).encode(), "sha256").hexdigest()


def field(message: Message, name: str, kind: type[T]) -> T:
    """Return one field of a received message.

    Raises:
        TypeError: it is missing, or of another kind.
    """
    found = message.get(name)
    if not isinstance(found, kind):
        raise TypeError(f"{name} is {found!r}, expected a {kind.__name__}")
    return found


class Budget:
    """A budget of bytes a second for one direction, shared by threads. Each pays, then moves."""

    def __init__(self, bytes_per_second: float, is_closing: threading.Event) -> None:
        self._bucket = TokenBucket(bytes_per_second, CHUNK_BYTES, time.monotonic)
        self._lock, self._is_closing = threading.Lock(), is_closing

    def spend(self, num_bytes: int, deadline: float) -> None:
        """Wait until ``num_bytes`` may go.

        Raises:
            MigrationError: not before the deadline, or this side is closing.
        """
        while True:
            now = time.monotonic()
            with self._lock:
                ready_at = self._bucket.ready_at(num_bytes)
                if ready_at <= now:
                    self._bucket.take(num_bytes)
                    return
            if ready_at >= deadline:
                raise MigrationError("bandwidth budget exhausted until after the deadline")
            if self._is_closing.wait(ready_at - now):
                raise MigrationError("this process is closing its connections")
