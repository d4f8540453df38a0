"""The host cache of an engine's records: each expert as the engine's kernels read it.

An engine's ranks name the origin of their records, which no other process can know: tensors after
the engine's own processing, of one slot one after the other. ``eplb host-cache`` waits for the
first rank to name it, and serves it then. Where no ``eplb host-cache`` runs, one of the host's
ranks has this in its own process.

    rank --> EngineRecords: "open" an origin --> HostCacheServer of that origin: offers, and later
                                                 loads, as every rank of a host cache
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import asdict
from typing import Any

from eplb.errors import EplbError, MigrationError
from eplb.versions import HOST_CACHE, Announcement
from rebalance.weights.cache.address import HostCacheAddress, connect, listen, listener_of_ranks
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.disk.record_file import RecordOrigin
from rebalance.weights.link.listener import ConnectionListener
from rebalance.weights.link.local import listen_under
from rebalance.weights.link.wire import Message, Wire

log = logging.getLogger(__name__)


class EngineRecords:
    """Opens the host cache of the origin that an engine's ranks name, until ``close``.

    Args:
        place: where ranks ask for it.
        settings: of the host cache.
        server: one that is served until an engine comes, if no rank uses it then.

    Raises:
        MigrationError: another process listens at the place, and there is no server.
    """

    def __init__(
        self,
        place: HostCacheAddress,
        settings: HostCacheSettings,
        server: HostCacheServer | None = None,
    ) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._origin: RecordOrigin | None = None
        self.server = server
        self.num_ranks = 0  # that use records of the origin
        self._listener: ConnectionListener | None = None
        listening = listen(place) if server is None else listen_under(place.socket)
        if listening is None:  # several hosts of a deployment may be one machine: it has one place
            log.info("no records of an engine are kept: another process of this host has the place")
            return
        version = asdict(Announcement(HOST_CACHE, ""))
        self._listener = listener_of_ranks(
            listening, place.key, hello=lambda: {"version": version}, serve=self._serve
        )

    def _serve(self, wire: Wire) -> None:
        """Serve one rank, on its own thread."""
        wire.deadline = math.inf
        message = wire.receive()
        try:
            server = self._open_origin(RecordOrigin(**message["open"]))
        except (EplbError, OSError) as exc:
            log.error("records of an engine are not kept: %s", exc)
            wire.send({"error": str(exc)})
            return
        try:
            wire.send(server.hello())
            server.serve_rank(wire)
        finally:
            with self._lock:
                self.num_ranks -= 1

    def _open_origin(self, origin: RecordOrigin) -> HostCacheServer:
        """The host cache of an origin, in place of an earlier one that no rank uses."""
        with self._lock:
            if self.server is None or origin != self._origin:
                self.server = self._replace(self.server, origin)
                self._origin = origin
            self.num_ranks += 1
            return self.server

    def _replace(self, before: HostCacheServer | None, origin: RecordOrigin) -> HostCacheServer:
        if before is not None:
            if num_ranks := self.num_ranks or before.num_clients:
                raise MigrationError(
                    f"{num_ranks} ranks use records of another origin, expected none"
                )
            before.close()
            self.server = self._origin = None
        log.info("records of an engine: %d of %d bytes", origin.num_records, origin.record_bytes)
        return HostCacheServer.of_offers(origin, self._settings)

    def check(self) -> None:
        """Take the locks of the host cache: where that does not end, it is in a deadlock."""
        with self._lock:
            if self.server is not None:
                self.server.stats()

    def close(self) -> None:
        """Stop answering."""
        if self._listener is not None:
            self._listener.close()
        if self.server is not None:
            self.server.close()


class EngineRecordsClient(HostCacheClient):
    """A rank's connection to the host cache of its engine's records.

    Args:
        place: where ``EngineRecords`` listens.
        origin: of the records.
        options: of ``HostCacheClient``.

    Raises:
        MigrationError: nobody listens there, or it cannot serve this origin.
    """

    def __init__(self, place: HostCacheAddress, origin: RecordOrigin, **options: Any) -> None:
        self._origin = origin
        super().__init__(place, origin.num_experts, origin.record_bytes, **options)

    def _open(self, deadline_s: float, start_deadline_s: float) -> tuple[Wire, Message]:
        """A connection to the host cache of the origin, which a restarted process does not know."""
        wire, _ = connect(self._address, deadline_s, start_deadline_s=start_deadline_s)
        try:
            wire.send({"open": asdict(self._origin)})
            if not wire.is_readable(deadline_s):
                raise MigrationError(f"no answer within {deadline_s:g} s")
            hello = wire.receive()
            if "error" in hello:
                raise MigrationError(hello["error"])
        except BaseException:
            wire.close()
            raise
        return wire, hello
