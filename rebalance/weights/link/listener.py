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

from eplb.errors import MigrationError
from rebalance.weights.link.local import LocalAdmission
from rebalance.weights.link.tls import refusal
from rebalance.weights.link.wire import Message, Wire, break_off, server_handshake

MAX_CLIENTS = 64  # open connections of one TCP listener; further clients are refused
MAX_SESSIONS = 1024  # of one Unix socket
REFUSAL_TIMEOUT_S = 0.1
HANDSHAKE_DEADLINE_S = 5.0  # for all of it, however slowly bytes come
ACCEPT_RETRY_S = 1.0
CLOSE_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


class ConnectionListener:
    """Accepts on ``listening``, which it closes, until ``close``.

    Args:
        listening: a socket of ``listen`` or ``listen_under``.
        kind: "host", "rank" or "local rank", for messages and for the names of threads.
        protocol: of this kind of listener.
        secret: that clients prove to have.
        hello: what an authenticated client receives about the owner.
        serve: serves one client, on that client's thread; it sets its own deadline.
        silence_s: time without a byte after which a connection is closed.
        handshake_s: for the whole handshake.
        tls: None: plain.
        is_closing: set on close, so that waits in ``serve`` can end.
    """

    def __init__(
        self,
        listening: socket.socket,
        kind: str,
        protocol: str,
        secret: bytes,
        *,
        hello: Callable[[], Message],
        serve: Callable[[Wire], None],
        silence_s: float,
        handshake_s: float = HANDSHAKE_DEADLINE_S,
        tls: ssl.SSLContext | None = None,
        is_closing: threading.Event | None = None,
    ) -> None:
        self._kind, self._protocol, self._secret = kind, protocol, secret
        self._hello, self._serve, self._tls = hello, serve, tls
        self._silence_s, self._handshake_s = silence_s, handshake_s
        self._is_closing = is_closing or threading.Event()
        is_local = listening.family == socket.AF_UNIX
        self._local = LocalAdmission() if is_local else None
        self._max_clients = MAX_SESSIONS if is_local else MAX_CLIENTS
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._listening = listening
        self._accepting = threading.Thread(target=self._accept, name=f"{kind}-accept", daemon=True)
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
                is_admitted = self._is_admitted(client)
            except OSError as exc:
                if not self._is_closing.is_set():
                    log.warning("cannot accept the connection of a %s: %s", self._kind, exc)
                    self._is_closing.wait(ACCEPT_RETRY_S)  # for example: out of file descriptors
                continue
            if is_admitted:  # Unix addresses are empty
                self._start(client, f"{self._kind} {address[0]}" if address else self._kind)
            else:
                client.close()

    def _is_admitted(self, client: socket.socket) -> bool:
        """Return whether a client gets a thread; a refusal is sent where that takes no time."""
        is_full = self.num_clients >= self._max_clients
        full = f"connection limit reached: {self._max_clients} clients connected" if is_full else ""
        if self._local is not None:
            return self._local.admit(client, full)
        if full and self._tls is not None:  # its handshake would have to be waited for
            log.warning("%s", full)
        elif full:
            try:
                # Nothing was sent before, so there is room for this: it never waits.
                wire = Wire(client, time.monotonic() + REFUSAL_TIMEOUT_S, REFUSAL_TIMEOUT_S)
                wire.send({"refused": full})
            except (MigrationError, OSError) as exc:
                log.warning("%s, refusal not sent: %s", full, exc)
        return not full

    def _start(self, client: socket.socket, name: str) -> None:
        if self._tls is not None:
            try:  # nothing is sent or received before the client's thread
                client = self._tls.wrap_socket(
                    client, server_side=True, do_handshake_on_connect=False
                )
            except OSError as exc:  # disconnected already
                client.close()
                log.warning("%s: connection failed: %s", name, refusal(exc))
                return

        def run() -> None:
            try:
                with client:
                    self._serve_client(client, name)
            finally:
                with self._lock:
                    self._clients.pop(client, None)

        thread = threading.Thread(target=run, name=f"{self._kind}-client", daemon=True)
        with self._lock:
            self._clients[client] = thread
        thread.start()

    def _serve_client(self, client: socket.socket, name: str) -> None:
        """Serve one client, on its own thread."""
        failure, is_authenticated = "", False
        deadline = time.monotonic() + self._handshake_s
        try:
            if isinstance(client, ssl.SSLSocket):
                client.settimeout(self._handshake_s)
                client.do_handshake()
            wire = Wire(client, deadline, self._silence_s)
            server_handshake(wire, self._secret, self._hello(), protocol=self._protocol)
            is_authenticated = True
            if self._local is not None:
                self._local.authenticated(client)
            self._serve(wire)
        except (MigrationError, OSError) as exc:
            why = refusal(exc) if isinstance(exc, OSError) else exc
            failure = f"{name}: connection failed: {why}"
        except (KeyError, TypeError, ValueError) as exc:
            log.error("%s: malformed request; closing the connection: %r", name, exc)
        finally:
            if self._is_closing.is_set():
                failure = ""
            if self._local is not None and not is_authenticated:
                self._local.leave(client, failure)
            elif failure:
                log.warning("%s", failure)

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
