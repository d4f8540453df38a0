"""An HTTP service in a thread of the process that owns it.

The socket is bound here, before the thread starts, so that a port in use is one clear refusal and
never a thread that exits on its own.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import h11
import uvicorn

from api.config.certificate import Certificate
from api.http.deployments import Deployments
from api.http.guard import DEFAULT_LIMITS, HttpLimits
from eplb.errors import ConfigError
from eplb.settings.deployment import loopback_address, numeric_address

if TYPE_CHECKING:
    from fastapi import FastAPI

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.01
WHOLE = (h11.DONE, h11.MUST_CLOSE)  # states of a connection whose request has come, to be answered
# asyncio accepts as many connections at once as its backlog is long, before any of them is counted.
ACCEPTED_AT_ONCE = 64
KERNEL_BACKLOG = 1024  # connections that wait in the kernel until they are accepted


class HttpService:
    """Serve an app on an address of this host.

    Args:
        is_authenticated: whether the app's requests prove a token. Without, only a loopback
            address is allowed.
        certificate: of https; None: http.
        bound: what ``bound_socket`` gave for the address; None: it is taken by ``start``.

    Raises:
        ConfigError: on construction, a host that is not a loopback address, or no address, or a
            certificate that cannot be used; on ``start``, a port that is in use.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: HttpLimits = DEFAULT_LIMITS,
        is_authenticated: bool = False,
        certificate: Certificate | None = None,
        bound: socket.socket | None = None,
    ) -> None:
        self._host = numeric_address(host) if is_authenticated else loopback_address(host)
        self._port, self._scheme = port, "http" if certificate is None else "https"
        if certificate is not None:
            check_certificate(certificate)  # in uvicorn's thread a failure would be a traceback
        config = uvicorn.Config(
            app,
            http="h11",  # whose state ``_Server`` reads
            ws="none",
            proxy_headers=False,  # a client must not name its own address
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,  # its loggers are the process's: escaped, and limited in number
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=int(STOP_TIMEOUT_S / 2),
            ssl_certfile=certificate.chain if certificate else None,
            ssl_keyfile=certificate.key if certificate else None,
        )
        self._server, self._limits = _Server(config, limits), limits
        self._streams: Deployments | None = app.state.streams
        self._bound = bound
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it is served, without a slash at the end."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{self._port}"

    @property
    def is_alive(self) -> bool:
        """Return whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Bind, and return once requests are answered."""
        bound = self._bound or bound_socket(self._host, self._port)
        # The kernel closes a connection whose client does not read; accepted ones inherit it.
        unread_ms = max(1, int(self._limits.unread_deadline_s * 1000))
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        self._port = bound.getsockname()[1]
        self._thread = threading.Thread(
            target=self._server.run, args=([bound],), name="eplb-http", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            # uvicorn reports its start in this attribute only: it has no event to wait on.
            self._thread.join(POLL_S)
            if not self._thread.is_alive():
                raise ConfigError(f"the HTTP service on {self.url} ended while it started")
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the HTTP service on {self.url} did not start within {START_TIMEOUT_S:g} s"
                )
        bound.listen(KERNEL_BACKLOG)

    def stop(self) -> None:
        """End the service; requests in progress get a few seconds to finish."""
        if self._thread is None:
            return
        self._server.should_exit = True
        if self._streams is not None:
            self._streams.close_streams()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise ConfigError(
                f"the HTTP service on {self.url} did not end within {STOP_TIMEOUT_S:g} s"
            )
        self._thread = None


class _Server(uvicorn.Server):
    """uvicorn's, which alone lets silent clients take all descriptors of the process.

    uvicorn has a deadline for connections between two requests, and none for the first; beyond
    ``limit_concurrency`` it refuses everyone. Here a connection without a whole request is closed
    after the deadlines of headers and body, and at once, the oldest first (by tenths of a second),
    where there are too many. A proxy has finer limits (docs/security.md).
    """

    def __init__(self, config: uvicorn.Config, limits: HttpLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self._since: dict[Any, float] = {}  # connection without a whole request -> first seen

    async def on_tick(self, counter: int) -> bool:
        """Close connections that keep others out; uvicorn calls this ten times a second."""
        now, connections = time.monotonic(), self.server_state.connections
        unserved = filter(_waits_for_request, connections)
        self._since = {one: self._since.get(one, now) for one in unserved}
        num_excess = len(connections) - self._limits.max_connections
        until = now - 2 * self._limits.request_deadline_s
        oldest = sorted(self._since, key=self._since.__getitem__)
        for number, one in enumerate(oldest):
            if number < num_excess or self._since[one] < until:
                one.transport.abort()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; a connection counts among the open ones once its handshake is complete."""
        if self.config.is_ssl:
            loop = asyncio.get_running_loop()
            deadline_s = self._limits.request_deadline_s  # asyncio's own is 60 s
            listen = partial(loop.create_server, ssl_handshake_timeout=deadline_s)
            loop.create_server = listen  # type: ignore[method-assign]
        await super().startup(sockets)


def _waits_for_request(connection: Any) -> bool:
    """Whether a connection has sent no whole request; between two of them uvicorn's deadline holds.

    Args:
        connection: uvicorn's ``H11Protocol``; its ``cycle`` is that of the last whole request.
    """
    if connection.conn.their_state in WHOLE:
        return False
    is_between = connection.conn.their_state is h11.IDLE and connection.cycle is not None
    return not is_between or bool(connection.conn.trailing_data[0])


def check_certificate(certificate: Certificate) -> None:
    """Refuse a certificate that clients would refuse.

    Raises:
        ConfigError: it cannot be used.
    """
    try:
        certificate.check()
    except ConfigError as exc:
        raise ConfigError(f"TLS of HTTP: {exc}") from exc


def bound_socket(host: str, port: int, settings: str = "http.port, http.host") -> socket.socket:
    """Take an address of this host.

    Args:
        settings: that name the address, for an error.

    Raises:
        ConfigError: it is none of this host, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's delay (40 ms an answer) off only then.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # A port that the last run left in TIME_WAIT is free; one that is listened on is not.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"port {port} of {host} ({settings}) cannot be used: {exc.strerror}, "
            "expected a free port of this host; 0 takes any"
        ) from exc
    return listener
