"""Listener: one thread accepts, and each client is served by its own thread.

A client must prove that it has the deployment's secret; before that it receives only a nonce. The
owner (host cache or rank) serves the connection after the handshake.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eplb.errors import MigrationError
from rebalance.weights.link.admission import MAX_CLIENTS, Admission, ClientLimit
from rebalance.weights.link.tls import refusal
from rebalance.weights.link.wire import Message, Wire, break_off, server_handshake

HANDSHAKE_DEADLINE_S = 5.0
ACCEPT_RETRY_S = 1.0
CLOSE_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListenerSettings:
    """Protocol and limits of a listener."""

    peer_kind: str  # "host", "rank" or "local rank", for messages and for the names of threads
    protocol: str
    secret: bytes = field(repr=False)
    silence_s: float  # without a byte, after which the connection is closed
    handshake_s: float = HANDSHAKE_DEADLINE_S  # for all of it, however slowly bytes come
    tls: ssl.SSLContext | None = None  # None: plain


class ConnectionListener:
    """Accepts on ``listening``, which it closes, until ``close``.

    Args:
        listening: a socket of ``listen``, or a Unix socket.
        settings: protocol and limits.
        hello: what an authenticated client receives about the owner.
        serve: serves one client, on that client's thread; it sets its own deadline.
        is_closing: set on close, so that waits in ``serve`` can end.
        admission: which clients are served; by default ``ClientLimit``.
    """

    def __init__(
        self,
        listening: socket.socket,
        settings: ListenerSettings,
        hello: Callable[[], Message],
        serve: Callable[[Wire], None],
        is_closing: threading.Event,
        admission: Admission | None = None,
    ) -> None:
        self._settings, self._hello, self._serve = settings, hello, serve
        self._is_closing = is_closing
        self._admission = admission or ClientLimit(is_tls=settings.tls is not None)
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._listening = listening
        name = f"{settings.peer_kind}-accept"
        self._accepting = threading.Thread(target=self._accept, name=name, daemon=True)
        self._accepting.start()

    @property
    def num_clients(self) -> int:
        """Connections that are open."""
        with self._lock:
            return len(self._clients)

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                client, address = self._listening.accept()
                is_admitted = self._admission.admit(client)
            except OSError as exc:
                if not self._is_closing.is_set():
                    log.warning(
                        "cannot accept the connection of a %s: %s", self._settings.peer_kind, exc
                    )
                    self._is_closing.wait(ACCEPT_RETRY_S)  # for example: out of file descriptors
                continue
            if is_admitted:
                kind = self._settings.peer_kind
                self._start(client, f"{kind} {address[0]}" if address else kind)  # Unix has none
            else:
                client.close()

    def _start(self, accepted: socket.socket, name: str) -> None:
        try:
            client = self._wrapped(accepted)
        except OSError as exc:  # disconnected already
            accepted.close()
            self._admission.leave(accepted, f"{name}: connection failed: {refusal(exc)}")
            return

        def run() -> None:
            try:
                with client:
                    self._serve_client(client, name)
            finally:
                with self._lock:
                    self._clients.pop(client, None)

        thread_name = f"{self._settings.peer_kind}-client"
        thread = threading.Thread(target=run, name=thread_name, daemon=True)
        with self._lock:
            self._clients[client] = thread
        thread.start()

    def _wrapped(self, client: socket.socket) -> socket.socket:
        """Prepare TLS, if there is any; nothing is sent or received before the client's thread."""
        if self._settings.tls is None:
            return client
        return self._settings.tls.wrap_socket(
            client, server_side=True, do_handshake_on_connect=False
        )

    def _serve_client(self, client: socket.socket, name: str) -> None:
        """Serve one client, on its own thread."""
        settings, failure, is_authenticated = self._settings, "", False
        deadline = time.monotonic() + settings.handshake_s
        try:
            if isinstance(client, ssl.SSLSocket):
                client.settimeout(settings.handshake_s)  # for the whole handshake
                client.do_handshake()
            wire = Wire(client, deadline, settings.silence_s)
            server_handshake(wire, settings.secret, self._hello(), protocol=settings.protocol)
            is_authenticated = True
            self._admission.authenticated(client)
            self._serve(wire)
        except (MigrationError, OSError) as exc:
            why = refusal(exc) if isinstance(exc, OSError) else exc
            failure = f"{name}: connection failed: {why}"
        except (KeyError, TypeError, ValueError) as exc:
            log.error("%s: malformed request; closing the connection: %r", name, exc)
        finally:
            if self._is_closing.is_set():
                failure = ""
            elif failure and is_authenticated:
                log.warning("%s", failure)
            self._admission.leave(client, "" if is_authenticated else failure)

    def stop(self) -> None:
        """Stop accepting connections; the address is free then."""
        self._is_closing.set()
        break_off(self._listening)  # ends the accept, which close alone does not
        self._accepting.join(CLOSE_DEADLINE_S)
        self._listening.close()

    def close(self) -> None:
        """Stop accepting connections and close those that are open."""
        if not self._is_closing.is_set():
            self.stop()
        with self._lock:
            clients = dict(self._clients)
        for client, thread in clients.items():
            break_off(client)
            thread.join(CLOSE_DEADLINE_S)


def listen(address: tuple[str, int], peer_kind: str) -> socket.socket:
    """Listen at a TCP address.

    Raises:
        MigrationError: the address is taken, or none of this machine.
    """
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=MAX_CLIENTS)
    except OSError as exc:
        raise MigrationError(
            f"cannot listen for other {peer_kind}s on {host} port {port}: {exc}"
        ) from exc
