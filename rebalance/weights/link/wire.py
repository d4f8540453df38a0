"""One connection between two processes: frames, deadlines, and the handshake that opens it.

Hosts and ranks are reached over TCP, the host cache of a rank's own host over a Unix socket.
Messages are JSON with a length prefix; bytes of records follow a message that announces them.

    client                                   server
      | <------ protocol, nonce ---------------- |   or: connection limit reached
      | ------- nonce, proof of the secret ----> |
      | <------ proof, hello ------------------- |   or: the secrets differ
      | ------- requests ----------------------> |   see ``server.py`` and ``cache/server.py``

Both sides prove that they have the deployment's secret. Each kind of listener has its own protocol
name, which ends in a version.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

from eplb.core.bounded_json import decode_json
from eplb.errors import MigrationError
from rebalance.weights.link.tls import refusal

MAX_MESSAGE_BYTES = 2**20  # after authentication
MAX_PROOF_BYTES = 512  # a nonce and a proof take 150
MAX_HELLO_BYTES = 2**16  # the server describes itself beside its proof
_LENGTH = struct.Struct("!I")

Message = dict[str, Any]
T = TypeVar("T")


class RefusedError(MigrationError):
    """The other side works, and refuses the request."""


class DisconnectedError(MigrationError):
    """The other side closed the connection, or the connection broke."""


class Wire:
    """One end of a connection. Every failure is a MigrationError with the reason.

    One thread may send while another one receives.

    Args:
        end: connected, plain or with TLS whose handshake is complete; closed by its owner, or by
            ``close``.
        deadline: of the whole exchange, by time.monotonic; may be replaced.
        silence_s: for the next byte.
    """

    def __init__(self, end: socket.socket, deadline: float, silence_s: float) -> None:
        self._end, self.deadline, self._silence_s = end, deadline, silence_s
        end.setblocking(False)  # a timeout of the socket would be shared by both directions
        self._tls = end if isinstance(end, ssl.SSLSocket) else None
        # Two threads must not use one TLS connection at a time; each use takes a moment.
        self._turn = threading.Lock() if self._tls else nullcontext()
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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
            # With TLS these are encrypted bytes, which only show that something has come.
            return self._has_decrypted() or bool(socket.socket.recv(self._end, 1, socket.MSG_PEEK))
        except OSError:  # broken connection: there is no request
            return False

    def is_readable(self, timeout_s: float = 0.0) -> bool:
        """Wait for the next message or the end of the connection; False on a timeout."""
        return self._has_decrypted() or self._is_ready(select.POLLIN, timeout_s)

    def _has_decrypted(self) -> bool:
        """Return whether bytes wait that the socket itself does not show any more."""
        with self._turn:
            return self._tls is not None and self._tls.pending() > 0

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

    def receive_answer(
        self, *, max_bytes: int = MAX_MESSAGE_BYTES, until_deadline: bool = False
    ) -> Message:
        """Receive the response to a request.

        Raises:
            RefusedError: the other side refuses the request.
            MigrationError: as ``receive``.
        """
        answer = self.receive(max_bytes=max_bytes, until_deadline=until_deadline)
        if "refused" in answer:
            raise RefusedError(str(answer["refused"]))
        return answer

    def send_bytes(self, view: memoryview) -> None:
        """Send all of it.

        Raises:
            MigrationError: the connection failed, or the other side does not read.
        """
        # Copied, not sendfile: a place may hold another record before pages that are sent by
        # reference have left the machine.
        while len(view):
            step = partial(self._end.send, view)
            view = view[self._in_time(step, select.POLLOUT, self._silence_s) :]

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
            step = partial(self._end.recv_into, into[done:])
            count = self._in_time(step, select.POLLIN, silence_s)
            if count == 0:
                raise DisconnectedError(f"connection closed after {done} of {len(into)} bytes")
            done += count

    def _in_time(self, step: Callable[[], int], event: int, silence_s: float) -> int:
        while (left_s := min(self.left_s, silence_s)) > 0:
            try:
                with self._turn:
                    return step()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as exc:
                if isinstance(exc, ssl.SSLError):  # a TLS record may need the other direction
                    wants_read = isinstance(exc, ssl.SSLWantReadError)
                    event = select.POLLIN if wants_read else select.POLLOUT
                if not self._is_ready(event, left_s):
                    raise MigrationError(f"no bytes transferred within {left_s:.3g} s") from None
            except OSError as exc:
                raise DisconnectedError(f"connection failed: {refusal(exc)}") from exc
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
        # Not SSLSocket's: it lets another thread read encrypted bytes as if they were plain.
        socket.socket.shutdown(end, socket.SHUT_RDWR)


def connect(
    address: tuple[str, int], deadline_s: float, tls: ssl.SSLContext | None = None
) -> socket.socket:
    """Open a TCP connection, with TLS where a context is given.

    Raises:
        MigrationError: the connection was refused or timed out, or a certificate was refused.
    """
    try:
        end = socket.create_connection(address, timeout=deadline_s)
    except OSError as exc:
        raise MigrationError(f"cannot connect: {exc}") from exc
    if tls is None:
        return end
    try:  # within the same deadline again; wrap_socket closes what it cannot use
        return tls.wrap_socket(end, server_hostname=address[0])
    except OSError as exc:
        end.close()
        raise MigrationError(
            f"TLS handshake with {address[0]} port {address[1]} failed: {refusal(exc)}, expected "
            "TLS with certificates of the deployment's authority on both sides"
        ) from exc


@contextmanager
def malformed_responses_fail() -> Iterator[None]:
    """Raise what a malformed response or a broken socket causes inside as MigrationError."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as exc:
        raise MigrationError(f"malformed response: {exc!r}") from exc
    except OSError as exc:
        raise MigrationError(f"connection failed: {exc}") from exc


def field(message: Message, name: str, kind: type[T]) -> T:
    """Return one field of a received message.

    Raises:
        TypeError: it is missing, or of another kind.
    """
    found = message.get(name)
    if not isinstance(found, kind):
        raise TypeError(f"{name} is {found!r}, expected a {kind.__name__}")
    return found


def client_handshake(wire: Wire, secret: bytes, *, protocol: str) -> Message:
    """Authenticate to a server and check its proof.

    Returns:
        The server's hello message.

    Raises:
        RefusedError: the server's connection limit is reached.
        MigrationError: the secrets differ, or the protocol is another one.
    """
    theirs = wire.receive_answer(max_bytes=MAX_PROOF_BYTES)
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
