"""Listener: one thread accepts processes of this host, and each is served by its own thread.

A client must prove that it has the key; before that it receives only a nonce. The host cache serves
the connection after the handshake.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from eplb.errors import MigrationError
from rebalance.weights.link.local import LocalAdmission
from rebalance.weights.link.wire import Message, Wire, break_off, server_handshake

MAX_CLIENTS = 1024  # open connections; further clients are refused
ACCEPT_RETRY_S = 1.0
CLOSE_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


class ConnectionListener:
    """Accepts on ``listening``, which it closes, until ``close``.

    Args:
        listening: a socket of ``listen_under``.
        kind: of the clients, for messages and for the names of threads.
        protocol: of this kind of listener.
        key: that clients prove to have.
        hello: what an authenticated client receives about the owner.
        serve: serves one client, on that client's thread; it sets its own deadline.
        silence_s: time without a byte after which a connection is closed, and for the handshake.
    """

    def __init__(
        self,
        listening: socket.socket,
        kind: str,
        protocol: str,
        key: bytes,
        *,
        hello: Callable[[], Message],
        serve: Callable[[Wire], None],
        silence_s: float,
    ) -> None:
        self._kind, self._protocol, self._key = kind, protocol, key
        self._hello, self._serve, self._silence_s = hello, serve, silence_s
        self._is_closing = threading.Event()
        self._admission = LocalAdmission()
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
                client, _ = self._listening.accept()
                is_admitted = self._is_admitted(client)
            except OSError as exc:
                if not self._is_closing.is_set():
                    log.warning("cannot accept the connection of a %s: %s", self._kind, exc)
                    self._is_closing.wait(ACCEPT_RETRY_S)  # for example: out of file descriptors
                continue
            if is_admitted:
                self._start(client)
            else:
                client.close()

    def _is_admitted(self, client: socket.socket) -> bool:
        """Return whether a client gets a thread."""
        is_full = self.num_clients >= MAX_CLIENTS
        full = f"connection limit reached: {MAX_CLIENTS} clients connected" if is_full else ""
        return self._admission.admit(client, full)

    def _start(self, client: socket.socket) -> None:
        def run() -> None:
            try:
                with client:
                    self._serve_client(client)
            finally:
                with self._lock:
                    self._clients.pop(client, None)

        thread = threading.Thread(target=run, name=f"{self._kind}-client", daemon=True)
        with self._lock:
            self._clients[client] = thread
        thread.start()

    def _serve_client(self, client: socket.socket) -> None:
        """Serve one client, on its own thread."""
        failure, is_authenticated = "", False
        try:
            wire = Wire(client, time.monotonic() + self._silence_s, self._silence_s)
            server_handshake(wire, self._key, self._hello(), protocol=self._protocol)
            is_authenticated = True
            self._admission.authenticated(client)
            self._serve(wire)
        except (MigrationError, OSError) as exc:
            failure = f"{self._kind}: connection failed: {exc}"
        except (KeyError, TypeError, ValueError) as exc:
            log.error("%s: malformed request; closing the connection: %r", self._kind, exc)
        finally:
            if self._is_closing.is_set():
                failure = ""
            if not is_authenticated:
                self._admission.leave(client, failure)
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
