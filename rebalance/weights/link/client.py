"""The client of a link: fetches bytes from one server, which is a host cache or a rank.

The receiver drives, without a collective: a request is a pairwise stream with its own deadline, so
a dead or stopped server breaks only its own stream. It is then in back-off for a while, and the
caller takes the next source. One idle connection may be kept for further requests.

``server.py`` has the other end and the messages. Who takes bytes over a link also checks their
digest: the link authenticates processes, not records.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable

from eplb.errors import MigrationError
from rebalance.weights.link.limits import BackOff
from rebalance.weights.link.link_settings import HostAddress, LinkSettings
from rebalance.weights.link.wire import (
    Message,
    RefusedError,
    Wire,
    client_handshake,
    connect,
    malformed_responses_fail,
)

KEPT_S = 10.0  # a connection that was idle for longer is not used again


class StoppedError(MigrationError):
    """The receiver itself stopped a transfer; the server did not fail."""


class LinkClient:
    """Fetches bytes from one server. Thread-safe.

    Args:
        name: of the server, for messages.
        address: where it listens.
        protocol: of this kind of server.
        settings: secret, deadlines and back-off.
        tls: None: plain.
        check: called with each connection's hello; raises RefusedError if the server cannot give
            anything now, MigrationError if it is not the expected one.
        kept_s: for which an idle connection is kept; 0: each request has a connection of its own.
    """

    def __init__(
        self,
        name: str,
        address: HostAddress,
        protocol: str,
        settings: LinkSettings,
        tls: ssl.SSLContext | None,
        check: Callable[[Message], None],
        *,
        kept_s: float = KEPT_S,
    ) -> None:
        self.name, self._address, self._protocol = name, address, protocol
        self._settings, self._tls, self._check, self._kept_s = settings, tls, check, kept_s
        self.back_off = BackOff(name, settings.back_off_s)
        self._lock, self._is_closed = threading.Lock(), False
        self._open: set[Wire] = set()
        self._idle: tuple[Wire, float] | None = None  # idle connection, and its start

    def fetch(
        self,
        ask: Message,
        into: memoryview,
        *,
        is_slow: bool = False,
        receive: Callable[[Wire, Message], None] | None = None,
    ) -> None:
        """Fill ``into`` with the bytes that a request names.

        Args:
            ask: the request.
            into: what it held is lost in any case; nothing writes to it afterwards.
            is_slow: whether the server may have to read a disk before it answers.
            receive: receives the bytes, given the answer that announces them; None: at once.

        Raises:
            RefusedError: the server works and refuses, or is in back-off.
            StoppedError: raised by ``receive``.
            MigrationError: the server is dead, late or not the expected one; it is in back-off now.
        """
        settings, wire = self._settings, None
        deadline = time.monotonic() + settings.deadline_s
        try:
            if why := self.back_off.reason():
                raise RefusedError(why)
            with malformed_responses_fail():
                wire = self._connection(deadline)
                # The server is to give up first, so that its reason arrives in time.
                answer_s = 0.8 * wire.left_s if is_slow else 0.5 * settings.silence_s
                wire.send(ask | {"answer_s": answer_s, "deadline_s": wire.left_s})
                answer = wire.receive_answer(until_deadline=is_slow)
                if answer["num_bytes"] != len(into):
                    raise MigrationError(
                        f"it announced {answer['num_bytes']} bytes, expected {len(into)}"
                    )
                if receive is None:
                    wire.receive_bytes(into)
                else:
                    receive(wire, answer)
                _receive_confirmation(wire)
        except MigrationError as exc:
            if wire is not None and isinstance(exc, RefusedError):
                self._keep(wire)  # a refusal is a whole answer
            elif wire is not None:
                self._disconnect(wire)
            if not isinstance(exc, RefusedError | StoppedError):
                self.back_off.record_failure(str(exc))
            raise type(exc)(f"{self.name}: {exc}") from exc
        self._keep(wire)
        self.back_off.record_success()

    def _connection(self, deadline: float) -> Wire:
        """The kept connection, or a new one to a server that proves to be the right one."""
        with self._lock:
            kept, self._idle = self._idle, None
        if kept is not None:
            wire, since = kept
            # Readable: the server has closed it, or has sent bytes without a request.
            if time.monotonic() - since < self._kept_s and not wire.is_readable():
                wire.deadline = deadline
                return wire
            self._disconnect(wire)
        if self._is_closed:
            raise RefusedError("this process is closing its connections")
        end = connect(self._address, self._settings.silence_s, self._tls)
        wire = Wire(end, deadline, self._settings.silence_s)
        with self._lock:
            self._open.add(wire)
            if self._is_closed:  # closed meanwhile, without this connection
                wire.break_off()
        try:
            self._check(client_handshake(wire, self._settings.secret, protocol=self._protocol))
        except BaseException:
            self._disconnect(wire)
            raise
        return wire

    def _keep(self, wire: Wire) -> None:
        with self._lock:
            if self._kept_s and self._idle is None and not self._is_closed:
                self._idle = wire, time.monotonic()
                return
        self._disconnect(wire)

    def _disconnect(self, wire: Wire) -> None:
        with self._lock:
            self._open.discard(wire)
        wire.close()

    def close(self) -> None:
        """Cancel running requests and close all connections; idempotent."""
        with self._lock:
            self._is_closed = True
            kept, self._idle = self._idle, None
            for wire in self._open:
                wire.break_off()
        if kept is not None:
            self._disconnect(kept[0])


def _receive_confirmation(wire: Wire) -> None:
    try:
        verdict = wire.receive_answer()
    except RefusedError as exc:
        raise RefusedError(f"received bytes are invalid: {exc}") from exc
    if verdict.get("is_whole") is not True:
        raise MigrationError(f"end of transfer {verdict}, expected is_whole true")
