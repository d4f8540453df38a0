"""Phase one, preload: a process per host that loads experts from disk into shared host memory.

The host cache holds expert records: an expert's tensors in kernel layout, page-aligned, so that the
next phase only copies bytes. Ranks request records over a local socket, receive the index of each
record's entry, and read the entries directly for as long as they hold a lease.

    rank --> HostCacheSession --> HostCache --> reader threads: other hosts, record file, checkpoint
    rank <-- digests, entries ---+                |
    rank reads the arena         WriteBehind <----+  appends repacked records to the record file
    other host --> LinkServer --> RecordsForHosts --> HostCache, and receives the bytes
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError, ConfigError, EplbError, MigrationError
from eplb.versions import HOST_CACHE, Announcement, announcement_to_dict
from rebalance.types import Digest, Record
from rebalance.weights.cache.address import (
    MESSAGE_DEADLINE_S,
    PROTOCOL,
    HostCacheAddress,
    listen,
)
from rebalance.weights.cache.cache import WRITER, HostCache
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheStats
from rebalance.weights.cache.entries import Entry
from rebalance.weights.cache.other_hosts import PROTOCOL as HOSTS_PROTOCOL
from rebalance.weights.cache.other_hosts import OtherHosts
from rebalance.weights.cache.session import HostCacheParts, HostCacheSession, RecordsForHosts
from rebalance.weights.disk.offered_records import OfferedRecords
from rebalance.weights.disk.record_loader import Loaded, RecordLoader, WriteBehind, Written
from rebalance.weights.disk.record_origin import RecordOrigin
from rebalance.weights.link.listener import ConnectionListener
from rebalance.weights.link.server import LinkServer
from rebalance.weights.link.wire import Message, Wire
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory.shared import PAGE_BYTES, SharedArena, digest

CLOSE_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


class HostCacheServer:
    """A host cache: loads records on demand and serves ranks until ``close``.

    ``of_checkpoint`` makes one that reads a checkpoint, ``of_offers`` one that is given the records
    of an engine by its ranks.

    Args:
        address: where ranks find it.
        origin: of the records.
        settings: its size, and other hosts.
        open_disk: opens what it reads, once the address is this host cache's.

    Raises:
        MigrationError: another process listens under this name, or at the address for other hosts;
            or there is no memory.
        CheckpointError: a weight file is missing, or a record file cannot be made.
        ConfigError: the settings leave no room for a record, or no source of records.
    """

    def __init__(
        self,
        address: HostCacheAddress,
        origin: RecordOrigin,
        settings: HostCacheSettings,
        open_disk: Callable[[], RecordLoader | OfferedRecords | None],
    ) -> None:
        self._record_bytes = origin.record_bytes
        self._num_entries = settings.num_entries(origin.num_records)
        self._link_server: LinkServer | None = None
        self._is_closed = threading.Event()
        self._readers: list[threading.Thread] = []
        with ExitStack() as undo:  # a start that fails leaves nothing open, whatever it fails of
            # First: a second host cache of this name must not touch the record file.
            listening = undo.enter_context(listen(address))
            num_bytes = self._num_entries * origin.record_bytes
            self.arena = SharedArena("eplb-host-cache", num_bytes, folder=settings.memory_folder)
            undo.callback(self.arena.close)
            self._cache = cache = HostCache(self._num_entries)
            disk = open_disk()
            self._sources = sources = CacheSources(
                disk, origin, settings, lambda: cache.weights_version
            )
            undo.callback(sources.close)
            links = settings.links
            self._parts = HostCacheParts(
                cache,
                self.arena,
                sources.origin(),
                lambda: asdict(self.stats()),
                itertools.count(WRITER + 1),
                self if isinstance(disk, OfferedRecords) else None,
            )
            self._for_hosts = RecordsForHosts(self._parts)
            self.writer = self._new_writer(settings)
            if self.writer is not None:
                undo.callback(self.writer.close)
            undo.callback(self._end_readers)
            if links is not None and links.listen is not None:
                self._link_server = LinkServer(
                    "host",
                    links.listen,
                    HOSTS_PROTOCOL,
                    links,
                    lambda: {
                        "origin": asdict(sources.origin()),
                        "weights_version": cache.weights_version,
                    },
                    self._for_hosts.lend,
                )
                undo.callback(self._link_server.close)
            self._start_readers(settings.num_readers)
            self._listener = ConnectionListener(
                listening,
                "local rank",
                PROTOCOL,
                address.key,
                hello=self._hello,
                serve=self._serve_rank,
                silence_s=MESSAGE_DEADLINE_S,
                handshake_s=MESSAGE_DEADLINE_S,
            )
            undo.pop_all()  # from here on ``close`` ends it all

    @staticmethod
    def of_checkpoint(
        address: HostCacheAddress,
        checkpoint: Checkpoint | None,
        model: ModelShape,
        schema: ExpertSchema,
        settings: HostCacheSettings | None = None,
    ) -> HostCacheServer:
        """A host cache that reads a checkpoint; without one other hosts must have the records."""
        settings = settings or HostCacheSettings()

        def open_disk() -> RecordLoader | None:
            if checkpoint is None:
                return None
            return RecordLoader(checkpoint, model, schema, settings.record_file)

        origin = RecordOrigin.of(checkpoint, model, schema)
        return HostCacheServer(address, origin, settings, open_disk)

    @staticmethod
    def of_offers(
        address: HostCacheAddress, origin: RecordOrigin, settings: HostCacheSettings
    ) -> HostCacheServer:
        """A host cache that keeps what ranks of an engine offer, in memory and in a folder."""
        return HostCacheServer(
            address, origin, settings, lambda: OfferedRecords(origin, settings.record_folder)
        )

    def _new_writer(self, settings: HostCacheSettings) -> WriteBehind | None:
        disk = self._sources.disk
        if not isinstance(disk, RecordLoader) or disk.file is None or not disk.file.may_write:
            return None
        # What waits to be written keeps its entry: most of a small host cache must stay for ranks.
        is_full = settings.mode == "full"
        return WriteBehind(disk.file, self._num_entries if is_full else -(-self._num_entries // 4))

    def _start_readers(self, num_readers: int) -> None:
        # One thread first, alone: after a fork torch remakes its thread pool at a new thread's
        # first use, and of two that do so at once one finds none.
        first = threading.Thread(target=lambda: torch.zeros(PAGE_BYTES).sum(), name="preload-torch")
        first.start()
        first.join()
        for number in range(num_readers):
            reader = threading.Thread(target=self._read, name=f"preload-{number}", daemon=True)
            reader.start()
            self._readers.append(reader)

    def _end_readers(self) -> None:
        self._cache.close()
        for reader in self._readers:
            reader.join(CLOSE_DEADLINE_S)

    # -- ranks

    def _hello(self) -> Message:
        origin = self._parts.origin
        return {
            "handle": self.arena.handle,
            "num_bytes": len(self.arena.bytes),
            "record_bytes": origin.record_bytes,
            "num_experts": origin.num_experts,
            "version": announcement_to_dict(Announcement(HOST_CACHE, "")),
        }

    def _serve_rank(self, wire: Wire) -> None:
        """Serve one rank, on its own thread."""
        wire.deadline = math.inf
        HostCacheSession(self._parts, wire).run()

    # -- disk

    def _read(self) -> None:
        while (entry := self._cache.take()) is not None:
            try:
                self._load(entry)
            except (EplbError, OSError) as exc:
                self._cache.failed(entry, str(exc))
            except Exception as exc:
                # A bug here must reach the rank that waits, and not only this process's log.
                log.exception("loading a record failed")
                self._cache.failed(entry, f"{type(exc).__name__}: {exc}")

    def _is_allocated(self, entry: Entry) -> bool:
        """Allocate the memory of an entry; False where there is none, which ends its requests."""
        size = self._record_bytes
        if not self._cache.is_allocated(entry):
            try:
                self.arena.reserve(entry.index * size, size)
            except MigrationError as exc:
                log.error("%s", exc)
                self._cache.out_of_memory(entry, str(exc))
                return False
        return True

    def _load(self, entry: Entry) -> None:
        if not self._is_allocated(entry):
            return
        target = self._parts.record_at(entry.index)
        loaded = self._sources.load(entry.record, target, is_for_host=lambda: entry.is_for_host)
        is_to_write = loaded.is_repacked and self.writer is not None
        self._cache.loaded(
            entry,
            loaded.digest,
            is_repacked=loaded.is_repacked,
            is_from_host=loaded.is_from_host,
            for_writer=is_to_write,
        )
        if is_to_write:
            self._write_behind(entry, target, loaded.digest)

    def _write_behind(self, entry: Entry, data: torch.Tensor, digest: Digest) -> None:
        assert self.writer is not None, "only called with a writer"
        done = partial(self._cache.release, WRITER, [entry.record])
        if not self.writer.offer(Written(entry.record, data, digest, done)):
            done()

    # -- offers: the ``Shelf`` of sessions

    def lacks(self, records: Sequence[Record]) -> list[Record]:
        """Return those records that are neither in memory nor on a disk."""
        disk, here = self._sources.disk, frozenset(self._cache.ready())
        assert disk is not None, "offers have a disk, or a place of it"
        return [r for r in records if r not in here and disk.digest_of(r) is None]

    def keep(self, offered: Sequence[tuple[Record, Digest]], data: torch.Tensor) -> list[str]:
        """Keep offered records. See ``Shelf``."""
        disk = self._sources.disk
        assert isinstance(disk, OfferedRecords), "only its sessions pass offers on"
        places = [
            self._keep(record, found, row, disk)
            for (record, found), row in zip(offered, data, strict=True)
        ]
        disk.flush()
        return places

    def _keep(
        self, record: Record, expected: Digest, data: torch.Tensor, disk: OfferedRecords
    ) -> str:
        if (found := digest(data)) != expected:
            raise CheckpointError(
                f"layer {record[0]} expert {record[1]} was offered with digest {expected}, "
                f"found {found}"
            )
        is_on_disk = disk.keep(record, data, expected)
        entry = self._cache.begin_offer(record)
        if entry is not None and self._is_allocated(entry):
            self._parts.record_at(entry.index).copy_(data)
            # What is on no disk keeps its entry: evicted, it would be lost.
            self._cache.loaded(
                entry, expected, is_repacked=False, is_offered=True, for_writer=not is_on_disk
            )
            return "memory"
        return "disk" if is_on_disk else ""

    # -- figures and end

    @property
    def num_clients(self) -> int:
        """Ranks that are connected."""
        return self._listener.num_clients

    def stats(self) -> HostCacheStats:
        """Count what was done so far, and what is held now."""
        found, size = self._cache.figures(), self._record_bytes
        return HostCacheStats(
            hits=found.get("hits", 0),
            misses=found.get("misses", 0),
            waits=found.get("waits", 0),
            refusals=found.get("refusals", 0),
            evictions=found["evictions"],
            hints_dropped=found.get("hints_dropped", 0),
            bytes_from_checkpoint=found.get("repacked", 0) * size,
            bytes_from_record_file=found.get("from_record_file", 0) * size,
            bytes_from_other_hosts=found.get("from_hosts", 0) * size,
            bytes_offered=found.get("offered", 0) * size,
            bytes_to_other_hosts=self._for_hosts.num_sent * size,
            host_failures=self._sources.hosts.num_failures if self._sources.hosts else 0,
            damaged=self._sources.num_damaged,
            not_written=self.writer.num_skipped if self.writer else 0,
            resident_bytes=found["resident"] * size,
            leased_bytes=found["leased"] * size,
            room_bytes=found["room"] * size,
        )

    def invalidate(self, weights_version: int) -> None:
        """Invalidate the records of older weights; those of the checkpoint are version 0."""
        self._cache.invalidate(weights_version)

    def close(self) -> None:
        """Stop answering; twice is no harm."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._listener.stop()
        self._cache.close()
        if self._link_server is not None:
            self._link_server.close()
        if self._sources.hosts is not None:
            self._sources.hosts.close()
        self._listener.close()
        self._end_readers()
        if self.writer is not None:
            self.writer.close()
        if any(reader.is_alive() for reader in self._readers):
            log.error("the disk does not respond: a reader thread is still running")
            return
        self._sources.close()
        self.arena.close()


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
                "a host cache without a checkpoint has no disk to read, expected other hosts, "
                "and no record file"
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
        failures: list[Exception] = []
        for load, is_host in self._in_order():
            if is_host and is_for_host():
                continue
            try:
                return load(record, into)
            except (CheckpointError, MigrationError, OSError) as exc:
                failures.append(exc)
        raise CheckpointError("; ".join(map(str, failures))) from failures[-1]

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
        return Loaded(found, is_from_host=True)

    def close(self) -> None:
        """Close the files. No thread may be loading."""
        if self.disk is not None:
            self.disk.close()
