"""What the caches of other hosts are given of this one: leases, as a rank's, for one call each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from rebalance.types import Digest, Record
from rebalance.weights.cache.host_link_server import LeaseTerms
from rebalance.weights.cache.requests import Request
from rebalance.weights.cache.session import HostCacheParts
from rebalance.weights.disk.record_origin import RecordOrigin
from rebalance.weights.link.wire import RefusedError
from runtime.memory.shared import digest

log = logging.getLogger(__name__)


class RecordsForHosts:
    """``rebalance.weights.cache.host_link_server.SharedRecords`` over a host's cache."""

    def __init__(self, parts: HostCacheParts) -> None:
        self._parts = parts

    @property
    def origin(self) -> RecordOrigin:
        """What the records are of."""
        return self._parts.origin

    @property
    def weights_version(self) -> int:
        """Of the weights that serve; older records are void."""
        return self._parts.cache.weights_version

    def ready(self) -> Iterable[Record]:
        """Records that are in memory."""
        return self._parts.cache.ready()

    def lease(self, holder: int, record: Record, terms: LeaseTerms) -> tuple[Digest, memoryview]:
        """Have a record in memory until ``drop``; return its digest and its bytes.

        Raises:
            RefusedError: it cannot be had, or not in time.
        """
        cache = self._parts.cache
        ask_cache = cache.ask if terms.from_disk else cache.lease_ready
        found, place = self._wait(ask_cache, holder, record, terms)
        held = self._parts.record_at(place)
        if terms.is_suspect and digest(held) != found:
            log.error(
                "layer %d expert %d: checksum mismatch in the host cache; reloading from disk",
                *record,
            )
            found, place = self._wait(cache.reload, holder, record, terms)
            held = self._parts.record_at(place)
        return found, held.numpy().data

    def drop(self, holder: int) -> None:
        """End a holder's leases, and its wait for a record that is being read."""
        self._parts.cache.drop(holder)

    def _wait(
        self,
        ask_cache: Callable[[Request], None],
        holder: int,
        record: Record,
        terms: LeaseTerms,
    ) -> tuple[Digest, int]:
        ended = threading.Event()
        request = Request(
            holder,
            1,
            [record],
            lambda _: ended.set(),
            weights_version=terms.weights_version,
            is_for_host=True,
        )
        ask_cache(request)
        if not ended.wait(terms.answer_s):
            self._parts.cache.expire(request)
        if request.error is not None:
            raise RefusedError(request.error)
        return request.found[record]
