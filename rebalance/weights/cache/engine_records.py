"""The host cache of an engine's records: each expert as the engine's kernels read it.

An engine's ranks name the origin of their records, which no other process can know: tensors after
the engine's own processing, of one slot one after the other. ``eplb host-cache`` waits for the
first rank to name it, and serves it then. Where no ``eplb host-cache`` runs, one of the host's
ranks has the host cache in its own process.

    rank --> EngineRecords at place_of_records: "open" an origin --> HostCacheServer of that origin
    rank --> HostCacheServer: offers, and later loads, as every rank of a host cache
"""

from __future__ import annotations

import logging
import math
import threading
from contextlib import closing
from dataclasses import asdict
from typing import Any

from eplb.errors import EplbError, MigrationError
from eplb.versions import HOST_CACHE, Announcement, announcement_to_dict
from rebalance.weights.cache.address import (
    MESSAGE_DEADLINE_S,
    PROTOCOL,
    HostCacheAddress,
    connect,
    listen,
)
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.disk.offered_records import short_name
from rebalance.weights.disk.record_file import RecordOrigin
from rebalance.weights.link.listener import ConnectionListener
from rebalance.weights.link.local import listen_under
from rebalance.weights.link.wire import Wire

log = logging.getLogger(__name__)


def address_of(place: HostCacheAddress, origin: RecordOrigin) -> HostCacheAddress:
    """Where the host cache of one origin is found."""
    return HostCacheAddress(f"{place.name}-{short_name(origin)}", place.key)


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
        self._place, self._settings = place, settings
        self._lock = threading.Lock()
        self._origin: RecordOrigin | None = None
        self.server = server
        self._listener: ConnectionListener | None = None
        listening = listen(place) if server is None else listen_under(place.socket)
        if listening is None:  # several hosts of a deployment may be one machine: it has one place
            log.info("no records of an engine are kept: another process of this host has the place")
            return
        self._listener = ConnectionListener(
            listening,
            "local rank",
            PROTOCOL,
            place.key,
            hello=lambda: {"version": announcement_to_dict(Announcement(HOST_CACHE, ""))},
            serve=self._serve,
            silence_s=MESSAGE_DEADLINE_S,
            handshake_s=MESSAGE_DEADLINE_S,
        )

    def _serve(self, wire: Wire) -> None:
        """Answer one rank, on its own thread."""
        wire.deadline = math.inf
        message = wire.receive()
        origin, error = RecordOrigin(**message["open"]), ""
        try:
            self._open(origin)
        except (EplbError, OSError) as exc:
            error = str(exc)
            log.error("records of an engine are not kept: %s", error)
        wire.send({"error": error})

    def _open(self, origin: RecordOrigin) -> None:
        """Serve an origin in place of an earlier one, if no rank uses that."""
        with self._lock:
            if origin == self._origin:
                return
            if self.server is not None:
                if self.server.num_clients:
                    raise MigrationError(
                        f"{self.server.num_clients} ranks use records of another origin, "
                        "expected none"
                    )
                self.server.close()
                self.server = self._origin = None
            self.server = HostCacheServer.of_offers(
                address_of(self._place, origin), origin, self._settings
            )
            self._origin = origin
            log.info(
                "records of an engine: %d of %d bytes, mode %s",
                origin.num_records,
                origin.record_bytes,
                self._settings.mode,
            )

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
        place: ``place_of_records``, or the place of the host cache of another rank.
        origin: of the records.
        is_embedded: whether the host cache is in another rank, which has opened it.
        options: of ``HostCacheClient``.

    Raises:
        MigrationError: nobody listens there, or it cannot serve this origin.
    """

    def __init__(
        self,
        place: HostCacheAddress,
        origin: RecordOrigin,
        *,
        is_embedded: bool = False,
        **options: Any,
    ) -> None:
        self._place, self._origin, self._is_embedded = place, origin, is_embedded
        super().__init__(
            address_of(place, origin), origin.num_experts, origin.record_bytes, **options
        )

    def _connect(self, deadline_s: float, start_deadline_s: float = 0.0) -> None:
        if not self._is_embedded:  # a restarted process does not know the origin
            wire, _ = connect(self._place, deadline_s, start_deadline_s=start_deadline_s)
            with closing(wire):
                wire.send({"open": asdict(self._origin)})
                if not wire.is_readable(deadline_s):
                    raise MigrationError(f"no answer within {deadline_s:g} s")
                if error := wire.receive()["error"]:
                    raise MigrationError(error)
        super()._connect(deadline_s, start_deadline_s)
