"""What two ends of a connection say to each other, and for how long either waits for the other.

    asker                                    who is asked
      | <------ protocol, nonce ---------------- |   or why it takes no more clients
      | ------- nonce, proof of the secret ----> |
      | <------ proof, origin, version --------- |   or that the secret is another
      | ------- what is asked -----------------> |
      | <------ an answer, then a record's bytes |   or why not

Between the host caches of two hosts a connection carries one question: nothing of an earlier one
can be taken for an answer, and its end frees whatever it held on the other host. Between two ranks
it is kept for further questions. Messages are JSON behind their length.
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

PROTOCOL = "eplb-hosts-1"  # of host caches; each kind of door has a name of its own
CHUNK_BYTES = 8 * 2**20  # between two looks at the budget, and worked into the digest at once
MAX_MESSAGE_BYTES = 2**20  # after authentication
MAX_PROOF_BYTES = 512  # before it: a nonce and a proof take 150
MAX_HELLO_BYTES = 2**16  # the side that is asked names its records beside its proof
_LENGTH = struct.Struct("!I")

Message = dict[str, Any]
T = TypeVar("T")


class RefusedError(MigrationError):
    """The other side is well, and says no."""


class Wire:
    """One end of a connection; whatever goes wrong is told in words.

    Args:
        end: connected; closed by its owner.
        deadline: for all that is said, by time.monotonic; may be set anew.
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
        """Wait until the other side says something; False if it hangs up first, or is silent.

        None of it is taken in. Nothing is wrong with a connection that has ended between two
        questions.
        """
        try:
            self._end.settimeout(timeout_s)
            return bool(self._end.recv(1, socket.MSG_PEEK))
        except OSError:  # too late, or a connection that broke: either way there is no question
            return False

    def send(self, message: Message) -> None:
        """Say something.

        Raises:
            MigrationError: the other side is gone, or takes nothing in.
        """
        text = json.dumps(message).encode()
        self.send_bytes(memoryview(_LENGTH.pack(len(text)) + text))

    def receive(
        self, *, max_bytes: int = MAX_MESSAGE_BYTES, until_deadline: bool = False
    ) -> Message:
        """Hear something; patient: up to the deadline, because the other side may be reading.

        Raises:
            MigrationError: the other side is gone, or silent, or does not speak as we do.
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
            MigrationError: the other side is gone, or takes nothing in.
        """
        # Copied, not sendfile: a place may hold another record before pages that are sent by
        # reference have left the machine.
        while len(view):
            view = view[self._in_time(partial(self._end.send, view), self._silence_s) :]

    def receive_bytes(self, into: memoryview) -> None:
        """Fill ``into``.

        Raises:
            MigrationError: the other side is gone, or silent.
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
    """Connect.

    Raises:
        MigrationError: nobody is there, or not in time.
    """
    try:
        return socket.create_connection(address, timeout=deadline_s)
    except OSError as exc:
        raise MigrationError(f"cannot connect: {exc}") from exc


def client_handshake(wire: Wire, secret: bytes, *, protocol: str = PROTOCOL) -> Message:
    """Prove to the side that is asked that this one knows the secret, and have it prove the same.

    Returns:
        What it says of itself.

    Raises:
        RefusedError: it takes no more clients.
        MigrationError: it knows another secret, or is not of this kind.
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
    """Have a client prove that it knows the secret; only then say who we are.

    Raises:
        MigrationError: it does not know it.
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
    """Bound to the role, so that nobody's proof can be handed back to it."""
    return hmac.new(secret, "|".join((protocol, role, *nonces)).encode(), "sha256").hexdigest()


def field(message: Message, name: str, kind: type[T]) -> T:
    """Take one field of what the other side said.

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
