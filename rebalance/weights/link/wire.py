"""One connection between a rank and its host's cache: messages, deadlines, and the handshake.

Messages are JSON with a length prefix. Bytes of records are read from memory that both map.

    client                                   server
      | <------ protocol, nonce ---------------- |
      | ------- nonce, proof of the secret ----> |
      | <------ proof, hello ------------------- |   or: the secrets differ
      | ------- requests ----------------------> |   see ``cache/server.py``

Both sides prove that they have the key of the host. The protocol's name ends in a version.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from eplb.core.bounded_json import decode_json
from eplb.errors import MigrationError

MAX_MESSAGE_BYTES = 2**20  # after authentication
MAX_PROOF_BYTES = 512  # a nonce and a proof take 150
MAX_HELLO_BYTES = 2**16  # the server describes itself beside its proof
_LENGTH = struct.Struct("!I")

Message = dict[str, Any]


class DisconnectedError(MigrationError):
    """The other side closed the connection, or the connection broke."""


class Wire:
    """One end of a connection. Every failure is a MigrationError with the reason.

    One thread may send while another one receives.

    Args:
        end: connected; closed by its owner, or by ``close``.
        deadline: of the whole exchange, by time.monotonic; may be replaced.
        silence_s: for the next byte.
    """

    def __init__(self, end: socket.socket, deadline: float, silence_s: float) -> None:
        self._end, self.deadline, self._silence_s = end, deadline, silence_s
        end.setblocking(False)  # a timeout of the socket would be shared by both directions

    def fileno(self) -> int:
        """Descriptor, to wait for several connections."""
        return self._end.fileno()

    @property
    def left_s(self) -> float:
        """Time until the deadline; none is 0."""
        return max(0.0, self.deadline - time.monotonic())

    def wait_for_data(self, timeout_s: float) -> bool:
        """Wait for the next message; False if the connection closes first, or on a timeout.

        Nothing is consumed. A connection that ends between two requests is not an error.
        """
        try:
            if not self.is_readable(timeout_s):
                return False
            return bool(self._end.recv(1, socket.MSG_PEEK))
        except OSError:  # broken connection: there is no request
            return False

    def is_readable(self, timeout_s: float = 0.0) -> bool:
        """Wait for the next message or the end of the connection; False on a timeout."""
        return self._is_ready(select.POLLIN, timeout_s)

    def is_writable(self, timeout_s: float) -> bool:
        """Wait for room to send, or the end of the connection; False on a timeout."""
        return self._is_ready(select.POLLOUT, timeout_s)

    def _is_ready(self, event: int, timeout_s: float) -> bool:
        poll = select.poll()
        try:
            poll.register(self._end, event)
        except ValueError:  # closed here: the operation itself reports it
            return True
        return bool(poll.poll(math.ceil(1e3 * timeout_s)))

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            MigrationError: the connection failed, or the other side does not read.
        """
        text = json.dumps(message).encode()
        view = memoryview(_LENGTH.pack(len(text)) + text)
        while len(view):
            view = view[self._in_time(partial(self._end.send, view), select.POLLOUT) :]

    def receive(self, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
        """Receive one message.

        Raises:
            MigrationError: the connection failed or timed out, or the message is malformed.
        """
        head = self._read(_LENGTH.size)
        (length,) = _LENGTH.unpack(head)
        if length > max_bytes:
            raise MigrationError(
                f"message header {head!r}, expected a length of at most {max_bytes} bytes"
            )
        text = self._read(length)
        try:
            message = decode_json(text)
        except ValueError as exc:
            raise MigrationError(f"message {text[:32]!r}, expected JSON: {exc}") from exc
        if not isinstance(message, dict):
            raise MigrationError(f"message {text[:32]!r}, expected a JSON object")
        return message

    def _read(self, num_bytes: int) -> bytes:
        received = bytearray(num_bytes)
        done = 0
        while done < num_bytes:
            step = partial(self._end.recv_into, memoryview(received)[done:])
            count = self._in_time(step, select.POLLIN)
            if count == 0:
                raise DisconnectedError(f"connection closed after {done} of {num_bytes} bytes")
            done += count
        return bytes(received)

    def _in_time(self, step: Callable[[], int], event: int) -> int:
        while (left_s := min(self.left_s, self._silence_s)) > 0:
            try:
                return step()
            except BlockingIOError:
                if not self._is_ready(event, left_s):
                    raise MigrationError(f"no bytes transferred within {left_s:.3g} s") from None
            except OSError as exc:
                raise DisconnectedError(f"connection failed: {exc}") from exc
        raise MigrationError("deadline passed before the transfer was complete")

    def break_off(self) -> None:
        """End the connection; what other threads wait for on it fails at once."""
        break_off(self._end)

    def close(self) -> None:
        """Close the socket."""
        self._end.close()


def break_off(end: socket.socket) -> None:
    """Shut a connection down, which ends the waits of other threads on it."""
    with suppress(OSError):  # closed already
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def malformed_responses_fail() -> Iterator[None]:
    """Raise what a malformed response or a broken socket causes inside as MigrationError."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as exc:
        raise MigrationError(f"malformed response: {exc!r}") from exc
    except OSError as exc:
        raise MigrationError(f"connection failed: {exc}") from exc


def client_handshake(wire: Wire, secret: bytes, *, protocol: str) -> Message:
    """Authenticate to a server and check its proof.

    Returns:
        The server's hello message.

    Raises:
        MigrationError: the secrets differ, or the protocol is another one.
    """
    theirs = wire.receive(max_bytes=MAX_PROOF_BYTES)
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


def server_handshake(wire: Wire, secret: bytes, hello: Message, *, protocol: str) -> None:
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
        why = "authentication failed: the secrets differ, expected the deployment's on both sides"
        wire.send({"error": why})
        raise MigrationError(
            "authentication failed: no proof of the deployment's secret from the client"
        )
    wire.send({"proof": _proof(secret, protocol, "gives", nonces)} | hello)


def _proof(secret: bytes, protocol: str, role: str, nonces: tuple[str, str]) -> str:
    """Bound to the role, so that a proof cannot be replayed to its sender."""
    return hmac.new(secret, "|".join((protocol, role, *nonces)).encode(), "sha256").hexdigest()
