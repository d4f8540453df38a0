"""The host caches of other hosts: a source of records, between local memory and local disk.

Each host is asked at most once a second which records it has in memory, and only such a host is
asked for one. Received bytes are verified: their digest must be the one that the other host
announced, and the one that this host cache knows, if any.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

import torch

from eplb.errors import CheckpointError, ConfigError, MigrationError
from rebalance.types import Digest, Record
from rebalance.weights.cache.cache import HostCache, Request
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.disk.offered_records import OfferedRecords
from rebalance.weights.disk.record_file import RecordOrigin
from rebalance.weights.disk.record_loader import Loaded, RecordLoader
from rebalance.weights.link.client import LinkClient, StoppedError
from rebalance.weights.link.limits import CHUNK_BYTES, ByteBudget
from rebalance.weights.link.link_settings import HostAddress, HostLinkSettings
from rebalance.weights.link.server import Lent
from rebalance.weights.link.wire import Message, RefusedError, Wire, field
from runtime.memory import RunningDigest, digest

PROTOCOL = "eplb-hosts-3"
INVENTORY_AGE_S = 1.0  # maximum age of a host's list of records in memory

log = logging.getLogger(__name__)


class WrongBytesError(StoppedError):
    """The digest of received bytes is not the announced one."""


class _OtherHost:
    """One other host: the link to it, and which records it has in memory."""

    def __init__(self, link: LinkClient) -> None:
        self.link = link
        self.wrong: set[Record] = set()  # records that came with wrong bytes once
        self.requesting = threading.Lock()  # held by the thread that requests the inventory
        self.inventory, self.inventory_until = 0, -math.inf  # a bit for each record, by number

    @property
    def is_inventory_old(self) -> bool:
        """Whether the inventory has to be requested again."""
        return time.monotonic() >= self.inventory_until

    def note_inventory(self, inventory: int) -> None:
        """Set the inventory; it is valid for ``INVENTORY_AGE_S``."""
        self.inventory, self.inventory_until = inventory, time.monotonic() + INVENTORY_AGE_S


class OtherHosts:
    """Requests records from other hosts. Thread-safe.

    Args:
        settings: addresses, secret and limits.
        origin: origin of this host cache's records. Without a checkpoint, the origin of the first
            host that sends a record is adopted.
        weights_version: returns the current version of this host cache.
    """

    def __init__(
        self,
        settings: HostLinkSettings,
        origin: RecordOrigin,
        weights_version: Callable[[], int],
    ) -> None:
        self._silence_s, self._weights_version = settings.silence_s, weights_version
        self.origin = origin
        tls = settings.tls.client_context() if settings.tls else None

        def link(address: HostAddress) -> LinkClient:
            # Each request has a connection of its own: its hello has the weights version of then,
            # and idle connections of many hosts do not use up a host's limit of connections.
            name, check = "host {} port {}".format(*address), self._check
            return LinkClient(name, address, PROTOCOL, settings, tls, check, kept_s=0.0)

        self._hosts = [_OtherHost(link(address)) for address in settings.others]
        self._is_closing, self._lock = threading.Event(), threading.Lock()
        self._inward = ByteBudget(settings.bytes_per_second, self._is_closing)
        self.num_failures = 0  # hosts that were late, dead or wrong
        self.num_wrong = 0  # failures by wrong bytes

    def bring(
        self, record: Record, into: torch.Tensor, expected: Digest | None, *, from_disk: bool
    ) -> Digest:
        """Fill ``into`` [record_bytes] with a record that another host has.

        Args:
            record: which.
            into: what it held is lost in any case.
            expected: its digest, if that is known.
            from_disk: have other hosts read it from their disks, if none has it in memory.

        Raises:
            MigrationError: no other host gives it; with the reason of each.
        """
        reasons = []
        number = self.origin.number_of(record)
        first = number % max(1, len(self._hosts))  # so that no host is asked for all records
        for host in self._hosts[first:] + self._hosts[:first]:
            try:
                if not from_disk:
                    self._check_inventory(host, record, number)
                brought = self._fetch(host, record, into, expected, from_disk=from_disk)
            except MigrationError as exc:
                self._note_failure(host, record, exc)
                reasons.append(str(exc))
            else:
                host.wrong.discard(record)
                return brought
        name = "layer {} expert {}".format(*record)
        raise MigrationError(f"no other host provides {name}: {'; '.join(reasons)}")

    def _note_failure(self, host: _OtherHost, record: Record, failure: MigrationError) -> None:
        is_wrong = isinstance(failure, WrongBytesError)
        if isinstance(failure, RefusedError | StoppedError) and not is_wrong:
            return  # the host does not have it, or the budget of this one is exhausted
        with self._lock:
            self.num_failures += 1
            self.num_wrong += is_wrong
        if is_wrong and record not in host.wrong:
            # The wire or its memory erred once: asked again, it looks at its own bytes first.
            host.wrong.add(record)
            log.warning("%s", failure)
        elif is_wrong:
            host.link.back_off.record_failure(str(failure))

    def _check_inventory(self, host: _OtherHost, record: Record, number: int) -> None:
        """Refuse a host that does not have a record in memory; ask it, if that is not known.

        Raises:
            RefusedError: with the reason.
            MigrationError: the host failed.
        """
        if why := host.link.back_off.reason():
            raise RefusedError(f"{host.link.name}: {why}")
        if record in host.wrong:
            raise RefusedError(f"{host.link.name}: digest mismatch in an earlier transfer")
        # One thread asks. Another one waits for its answer only where there is no older one.
        patience_s = self._silence_s if host.inventory_until == -math.inf else 0.0
        if host.is_inventory_old and host.requesting.acquire(timeout=patience_s):
            try:
                if host.is_inventory_old:
                    bits = bytearray(-(-self.origin.num_records // 8))
                    host.link.fetch({"ask": "inventory"}, memoryview(bits))
                    host.note_inventory(int.from_bytes(bits, "little"))
            except MigrationError:
                host.note_inventory(0)  # not again for a while
                raise
            finally:
                host.requesting.release()
        if not host.inventory >> number & 1:
            raise RefusedError(f"{host.link.name}: record not in its memory")

    def _fetch(
        self,
        host: _OtherHost,
        record: Record,
        into: torch.Tensor,
        expected: Digest | None,
        *,
        from_disk: bool,
    ) -> Digest:
        data, found = into.numpy(), RunningDigest()

        def receive(wire: Wire, answer: Message) -> None:
            plain, weighted = field(answer, "digest", list)
            declared = int(plain), int(weighted)
            if expected not in (None, declared):
                raise WrongBytesError(f"it announced digest {declared}, expected {expected}")
            for first in range(0, len(data), CHUNK_BYTES):
                chunk = data[first : first + CHUNK_BYTES]
                try:
                    self._inward.spend(len(chunk), wire.deadline)
                except MigrationError as exc:
                    raise StoppedError(str(exc)) from exc
                wire.receive_bytes(chunk.data)
                found.add(chunk)
            if found.value != declared:
                raise WrongBytesError(f"digest mismatch: found {found.value}, expected {declared}")

        ask = {
            "ask": "record",
            "record": record,
            "from_disk": from_disk,
            "is_suspect": record in host.wrong,
            "weights_version": self._weights_version(),
        }
        host.link.fetch(ask, data.data, is_slow=from_disk, receive=receive)
        return found.value

    def _check(self, hello: Message) -> None:
        """Reject a host whose records have another origin or version.

        Raises:
            RefusedError: it has none yet, or of other weights.
            MigrationError: it has another checkpoint, model or layout.
        """
        found = field(hello, "origin", dict)
        if not found.get("checkpoint"):
            raise RefusedError("it has no checkpoint yet")
        version, own = hello["weights_version"], self._weights_version()
        if version != own:
            raise RefusedError(f"weights version {version}, expected {own}")
        with self._lock:
            whole = self.origin
            if not whole.checkpoint:
                whole = replace(whole, checkpoint=str(found["checkpoint"]))
            if asdict(whole) != found:
                raise MigrationError(f"record origin differs: {whole.difference(found)}")
            self.origin = whole

    def close(self) -> None:
        """Break off whatever is under way."""
        self._is_closing.set()
        for host in self._hosts:
            host.link.close()


class RecordsForHosts:
    """Lends the records of a host cache to the caches of other hosts (``link/server.py``).

    Another host asks for one record at a time, which is leased like a rank's while its bytes are
    sent. Its request is never forwarded to a third host, only to the local disk, so hosts that lack
    the same record never wait for each other in a cycle.

    Args:
        cache: the book of the host cache.
        origin: of the records.
        record_at: returns the bytes [record_bytes] of an entry, by its index.
    """

    def __init__(
        self, cache: HostCache, origin: RecordOrigin, record_at: Callable[[int], torch.Tensor]
    ) -> None:
        self._cache, self._origin, self._record_at = cache, origin, record_at
        self._lock = threading.Lock()
        self.num_sent = 0  # records

    @contextmanager
    def lend(self, ask: Message, answer_at: float) -> Iterator[Lent]:
        """Have in memory what another host asks for, until the context ends.

        Raises:
            RefusedError: it cannot be had, or not in time.
        """
        if ask["ask"] == "inventory":
            yield Lent(self._inventory())
            return
        if ask["ask"] != "record":
            raise ValueError(f"unknown request {ask['ask']!r}")
        layer, expert = map(int, ask["record"])
        holder = next(self._cache.holders)
        try:
            self._origin.number_of((layer, expert))
            found, data = self._lease(holder, (layer, expert), ask, answer_at)
            yield Lent(data, {"digest": found})
        except CheckpointError as exc:
            raise RefusedError(str(exc)) from exc
        finally:
            self._cache.drop(holder)
        with self._lock:
            self.num_sent += 1

    def _inventory(self) -> torch.Tensor:
        """Which records are in memory: a bit each, in their order."""
        origin = self._origin
        bits = bytearray(-(-origin.num_records // 8))
        for record in self._cache.ready():
            number = origin.number_of(record)
            bits[number // 8] |= 1 << number % 8
        return torch.frombuffer(bits, dtype=torch.uint8)

    def _lease(
        self, holder: int, record: Record, ask: Message, answer_at: float
    ) -> tuple[Digest, torch.Tensor]:
        """Lease a record; look at its bytes first if the other host has received wrong ones."""
        cache, version = self._cache, field(ask, "weights_version", int)
        ask_cache = cache.ask if field(ask, "from_disk", bool) else cache.lease_ready

        def ended(ask_cache: Callable[[Request], None]) -> tuple[Digest, torch.Tensor]:
            has_ended = threading.Event()
            request = Request(
                holder, 1, [record], lambda _: has_ended.set(), version, is_for_host=True
            )
            ask_cache(request)
            if not has_ended.wait(max(0.0, answer_at - time.monotonic())):
                cache.expire(request)
            if request.error is not None:
                raise RefusedError(request.error)
            found, place = request.found[record]
            return found, self._record_at(place)

        found, data = ended(ask_cache)
        if field(ask, "is_suspect", bool) and digest(data) != found:
            log.error(
                "layer %d expert %d: checksum mismatch in the host cache; reloading from disk",
                *record,
            )
            return ended(cache.reload)
        return found, data


class CacheSources:
    """What fills a host cache: other hosts' memory, its own disk, other hosts' disks. Thread-safe.

    Without a disk other hosts must have the records.

    Args:
        disk: a checkpoint with its record file, or the records that an engine has offered.
        origin: of the records.
        settings: of the host cache.
        weights_version: returns the current version of the host cache.

    Raises:
        ConfigError: there is neither a disk nor another host.
    """

    def __init__(
        self,
        disk: RecordLoader | OfferedRecords | None,
        origin: RecordOrigin,
        settings: HostCacheSettings,
        weights_version: Callable[[], int],
    ) -> None:
        links = settings.links
        if disk is None and (links is None or not links.others or settings.record_file):
            raise ConfigError(
                "a host cache has no checkpoint to read, expected one, or other hosts that have "
                "one and no record file; records that ranks offer are kept by build_engine_records"
            )
        self.disk, self._own_origin = disk, origin
        self.hosts: OtherHosts | None = None
        if links is not None and links.others:
            self.hosts = OtherHosts(links, self._own_origin, weights_version)
        # A host cache without a disk asks memories first too: no host is to read what another has.
        self._asks_hosts_first = links is not None and (
            links.order == "before_disk" or self.disk is None
        )
        self._brought: dict[Record, Digest] = {}  # digests of records from other hosts

    def origin(self) -> RecordOrigin:
        """Return the origin of the records, as far as it is known."""
        return self.hosts.origin if self.hosts is not None else self._own_origin

    @property
    def num_damaged(self) -> int:
        """Records that had another digest than they must, wherever they came from."""
        on_disk = self.disk.num_damaged if self.disk is not None else 0
        return on_disk + (self.hosts.num_wrong if self.hosts is not None else 0)

    def load(
        self, record: Record, into: torch.Tensor, *, is_for_host: Callable[[], bool]
    ) -> Loaded:
        """Fill ``into`` [record_bytes], page-aligned, from the first source that has the record.

        Args:
            record: which.
            into: where to.
            is_for_host: returns whether only another host requests it: then no third host is asked.

        Raises:
            CheckpointError: no source has it; with the reason of each.
        """
        failures: list[str] = []  # texts: an error would keep this frame, and the frame the error
        for load, is_host in self._in_order():
            if is_host and is_for_host():
                continue
            try:
                return load(record, into)
            except (CheckpointError, MigrationError, OSError) as exc:
                failures.append(str(exc))
        raise CheckpointError("; ".join(failures))

    def _in_order(self) -> list[tuple[Callable[[Record, torch.Tensor], Loaded], bool]]:
        """Loaders to try one after the other, and whether each asks other hosts."""
        in_memory, on_disk = (partial(self._from_hosts, from_disk=disk) for disk in (False, True))
        if self.hosts is None:
            return [(self._from_own_disk, False)]
        if self._asks_hosts_first:
            return [(in_memory, True), (self._from_own_disk, False), (on_disk, True)]
        return [(self._from_own_disk, False), (on_disk, True)]

    def _from_own_disk(self, record: Record, into: torch.Tensor) -> Loaded:
        if self.disk is None:
            raise CheckpointError("layer {} expert {}: no checkpoint on this host".format(*record))
        return self.disk.load(record, into)

    def _from_hosts(self, record: Record, into: torch.Tensor, *, from_disk: bool) -> Loaded:
        assert self.hosts is not None, "only called with other hosts"
        expected = self.disk.digest_of(record) if self.disk else self._brought.get(record)
        found = self.hosts.bring(record, into, expected, from_disk=from_disk)
        if self.disk is not None:
            self.disk.learn(record, found)  # a later read of the disk must have this digest
        else:
            self._brought[record] = found
        return Loaded(found, "other_hosts")

    def close(self) -> None:
        """Close the files. No thread may be loading."""
        if self.disk is not None:
            self.disk.close()
