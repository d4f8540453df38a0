"""A door at which others knock: one thread listens, and each caller gets a thread of its own.

Whoever calls proves that it knows the deployment's secret before anything is said to it but a
nonce. What is said after that is the owner's: a slab's for other hosts, a rank's for other ranks.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eplb.errors import MigrationError
from rebalance.network.wire import Message, Wire, welcome

MOST_CALLERS = 64  # connections that a door holds open; a further caller is turned away in words
HANDSHAKE_DEADLINE_S = 5.0
TURN_AWAY_S = 0.1
ACCEPT_RETRY_S = 1.0
CLOSE_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DoorPlate:
    """Where a door is, and for whom."""

    callers: str  # "host" or "rank", for messages and for the names of threads
    address: tuple[str, int]
    protocol: str
    secret: bytes = field(repr=False)
    silence_s: float  # without a byte, after which a caller is hung up on


class Door:
    """Open until ``close``.

    Args:
        plate: where, and for whom.
        hello: what a caller that knows the secret is told of the owner.
        serve: answers one caller, on that caller's thread, with a deadline that it sets itself.
        is_closing: set when it closes, so that what ``serve`` waits for can end too.

    Raises:
        MigrationError: the address cannot be listened on.
    """

    def __init__(
        self,
        plate: DoorPlate,
        hello: Callable[[], Message],
        serve: Callable[[Wire], None],
        is_closing: threading.Event,
    ) -> None:
        self._plate, self._hello, self._serve = plate, hello, serve
        self._is_closing = is_closing
        self._lock = threading.Lock()
        self._callers: dict[socket.socket, threading.Thread] = {}
        self._listening = _listen(plate)
        name = f"{plate.callers}-accept"
        self._accepting = threading.Thread(target=self._accept, name=name, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        name = f"{self._plate.callers}-caller"
        while not self._is_closing.is_set():
            try:
                caller, (host, *_) = self._listening.accept()
            except OSError as exc:
                if not self._is_closing.is_set():
                    log.warning(
                        "cannot accept the connection of a %s: %s", self._plate.callers, exc
                    )
                    self._is_closing.wait(ACCEPT_RETRY_S)  # out of file descriptors, say
                continue
            args = caller, str(host)
            thread = threading.Thread(target=self._meet, args=args, name=name, daemon=True)
            with self._lock:
                has_room = len(self._callers) < MOST_CALLERS
                if has_room:
                    self._callers[caller] = thread
            if has_room:
                thread.start()
            else:
                self._turn_away(caller)

    def _turn_away(self, caller: socket.socket) -> None:
        with caller:
            try:
                # Nothing was sent before, so there is room for this: it never waits.
                wire = Wire(caller, time.monotonic() + self._plate.silence_s, TURN_AWAY_S)
                wire.send(
                    {"refused": f"connection limit reached: {MOST_CALLERS} clients connected"}
                )
            except (MigrationError, OSError) as exc:
                log.warning("connection limit reached, refusal not sent: %s", exc)

    def _meet(self, caller: socket.socket, name: str) -> None:
        """Serve one caller, on a thread of its own."""
        plate = self._plate
        try:
            with caller:
                wire = Wire(caller, time.monotonic() + HANDSHAKE_DEADLINE_S, plate.silence_s)
                welcome(wire, plate.secret, self._hello(), protocol=plate.protocol)
                self._serve(wire)
        except (MigrationError, OSError) as exc:
            if not self._is_closing.is_set():
                log.warning("%s %s: connection failed: %s", plate.callers, name, exc)
        except (KeyError, TypeError, ValueError) as exc:
            log.error(
                "%s %s: malformed request; closing the connection: %r", plate.callers, name, exc
            )
        finally:
            with self._lock:
                self._callers.pop(caller, None)

    def stop(self) -> None:
        """Let nobody in any more."""
        self._is_closing.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # ends the accept, which close alone does not
        self._listening.close()
        self._accepting.join(CLOSE_DEADLINE_S)

    def close(self) -> None:
        """Let nobody in any more, and hang up on whoever is connected."""
        if not self._is_closing.is_set():
            self.stop()
        with self._lock:
            callers = dict(self._callers)
        for caller, thread in callers.items():
            try:
                caller.shutdown(socket.SHUT_RDWR)
            except OSError as exc:
                log.debug("client connection already closed: %s", exc)
            thread.join(CLOSE_DEADLINE_S)


def _listen(plate: DoorPlate) -> socket.socket:
    host, port = plate.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MOST_CALLERS)
    except OSError as exc:
        raise MigrationError(
            f"cannot listen for other {plate.callers}s on {host} port {port}: {exc}"
        ) from exc
