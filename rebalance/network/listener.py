"""TCP listener: one thread accepts, and each client is served by its own thread.

A client must prove that it has the deployment's secret; before that it receives only a nonce. The
owner (host cache or rank) serves the connection after the handshake.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eplb.errors import MigrationError
from rebalance.network.wire import Message, Wire, server_handshake

MAX_CLIENTS = 64  # open connections of one listener; further clients are refused
HANDSHAKE_DEADLINE_S = 5.0
REFUSAL_TIMEOUT_S = 0.1
ACCEPT_RETRY_S = 1.0
CLOSE_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListenerSettings:
    """Address, protocol and limits of a listener."""

    peer_kind: str  # "host" or "rank", for messages and for the names of threads
    address: tuple[str, int]
    protocol: str
    secret: bytes = field(repr=False)
    silence_s: float  # without a byte, after which the connection is closed


class ConnectionListener:
    """Listens until ``close``.

    Args:
        settings: address, protocol and limits.
        hello: what an authenticated client receives about the owner.
        serve: serves one client, on that client's thread; it sets its own deadline.
        is_closing: set on close, so that waits in ``serve`` can end.

    Raises:
        MigrationError: the address cannot be listened on.
    """

    def __init__(
        self,
        settings: ListenerSettings,
        hello: Callable[[], Message],
        serve: Callable[[Wire], None],
        is_closing: threading.Event,
    ) -> None:
        self._settings, self._hello, self._serve = settings, hello, serve
        self._is_closing = is_closing
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._listening = _listen(settings)
        name = f"{settings.peer_kind}-accept"
        self._accepting = threading.Thread(target=self._accept, name=name, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        name = f"{self._settings.peer_kind}-client"
        while not self._is_closing.is_set():
            try:
                client, (host, *_) = self._listening.accept()
            except OSError as exc:
                if not self._is_closing.is_set():
                    log.warning(
                        "cannot accept the connection of a %s: %s", self._settings.peer_kind, exc
                    )
                    self._is_closing.wait(ACCEPT_RETRY_S)  # for example: out of file descriptors
                continue
            args = client, str(host)
            thread = threading.Thread(target=self._serve_client, args=args, name=name, daemon=True)
            with self._lock:
                has_room = len(self._clients) < MAX_CLIENTS
                if has_room:
                    self._clients[client] = thread
            if has_room:
                thread.start()
            else:
                self._refuse_client(client)

    def _refuse_client(self, client: socket.socket) -> None:
        with client:
            try:
                # Nothing was sent before, so there is room for this: it never waits.
                wire = Wire(client, time.monotonic() + self._settings.silence_s, REFUSAL_TIMEOUT_S)
                wire.send({"refused": f"connection limit reached: {MAX_CLIENTS} clients connected"})
            except (MigrationError, OSError) as exc:
                log.warning("connection limit reached, refusal not sent: %s", exc)

    def _serve_client(self, client: socket.socket, name: str) -> None:
        """Serve one client, on its own thread."""
        settings = self._settings
        try:
            with client:
                wire = Wire(client, time.monotonic() + HANDSHAKE_DEADLINE_S, settings.silence_s)
                server_handshake(wire, settings.secret, self._hello(), protocol=settings.protocol)
                self._serve(wire)
        except (MigrationError, OSError) as exc:
            if not self._is_closing.is_set():
                log.warning("%s %s: connection failed: %s", settings.peer_kind, name, exc)
        except (KeyError, TypeError, ValueError) as exc:
            log.error(
                "%s %s: malformed request; closing the connection: %r",
                settings.peer_kind,
                name,
                exc,
            )
        finally:
            with self._lock:
                self._clients.pop(client, None)

    def stop(self) -> None:
        """Stop accepting connections."""
        self._is_closing.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # ends the accept, which close alone does not
        self._listening.close()
        self._accepting.join(CLOSE_DEADLINE_S)

    def close(self) -> None:
        """Stop accepting connections and close those that are open."""
        if not self._is_closing.is_set():
            self.stop()
        with self._lock:
            clients = dict(self._clients)
        for client, thread in clients.items():
            try:
                client.shutdown(socket.SHUT_RDWR)
            except OSError as exc:
                log.debug("client connection already closed: %s", exc)
            thread.join(CLOSE_DEADLINE_S)


def _listen(settings: ListenerSettings) -> socket.socket:
    host, port = settings.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MAX_CLIENTS)
    except OSError as exc:
        raise MigrationError(
            f"cannot listen for other {settings.peer_kind}s on {host} port {port}: {exc}"
        ) from exc
