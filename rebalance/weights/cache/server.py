"""Phase one, preload: a process per host that loads experts from disk into shared host memory.

The host cache holds expert records: an expert's tensors in kernel layout, page-aligned, so that the
next phase only copies bytes. Ranks request records over a local socket, receive the index of each
record's entry, and read the entries directly for as long as they hold a lease.

    rank --> HostCacheSession --> HostCache --> reader threads: record file, checkpoint
    rank <-- digests, entries ---+                |
    rank reads the arena         WriteBehind <----+  appends repacked records to the record file
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import wait

import numpy as np
import torch

from eplb.core.bounded_json import MAX_JSON_BYTES
from eplb.core.model import ModelShape
from eplb.errors import CheckpointError, EplbError, MigrationError, reason_of
from eplb.versions import HOST_CACHE, Announcement
from rebalance.types import Digest, Record
from rebalance.weights.cache.address import HostCacheAddress, listen, listener_of_ranks
from rebalance.weights.cache.cache import WRITER, HostCache, Request
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.entries import CacheEntry
from rebalance.weights.disk.offered_records import OfferedRecords
from rebalance.weights.disk.record_file import RecordOrigin
from rebalance.weights.disk.record_loader import RecordLoader, WriteBehind
from rebalance.weights.link.listener import ConnectionListener
from rebalance.weights.link.wire import DisconnectedError, Message, Wire
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory import PAGE_BYTES, SharedArena, attach, digest

CLOSE_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


class HostCacheServer:
    """A host cache: loads records on demand and serves ranks until ``close``.

    ``of_checkpoint`` makes one that reads a checkpoint, ``of_offers`` one that is given the records
    of an engine by its ranks.

    Args:
        address: where ranks find it; None: they come by ``serve_rank``.
        origin: of the records.
        settings: its size.
        open_disk: opens what it reads, once the address is this host cache's.

    Raises:
        MigrationError: another process listens under this name, or there is no memory.
        CheckpointError: a weight file is missing, or a record file cannot be made.
    """

    def __init__(
        self,
        address: HostCacheAddress | None,
        origin: RecordOrigin,
        settings: HostCacheSettings,
        open_disk: Callable[[], RecordLoader | OfferedRecords],
    ) -> None:
        self._num_entries = settings.num_entries(origin.num_records)
        self._is_closed = threading.Event()
        self._readers: list[threading.Thread] = []
        self._listener: ConnectionListener | None = None
        with ExitStack() as undo:  # a start that fails leaves nothing open, whatever it fails of
            # First: a second host cache of this name must not touch the record file.
            listening = undo.enter_context(listen(address)) if address is not None else None
            num_bytes = self._num_entries * origin.record_bytes
            self.arena = SharedArena("eplb-host-cache", num_bytes, folder=settings.memory_folder)
            undo.callback(self.arena.close)
            self.cache = HostCache(self._num_entries)
            self._disk = open_disk()
            undo.callback(self._disk.close)
            self.origin = origin
            self.writer = self._new_writer(settings)
            if self.writer is not None:
                undo.callback(self.writer.close)
            undo.callback(self._end_readers)
            self._start_readers(settings.num_readers)
            if listening is not None and address is not None:
                self._listener = listener_of_ranks(
                    listening, address.key, hello=self.hello, serve=self.serve_rank
                )
            undo.pop_all()  # from here on ``close`` ends it all

    @staticmethod
    def of_checkpoint(
        address: HostCacheAddress,
        checkpoint: Checkpoint,
        model: ModelShape,
        schema: ExpertSchema,
        settings: HostCacheSettings | None = None,
    ) -> HostCacheServer:
        """A host cache that reads a checkpoint."""
        settings = settings or HostCacheSettings()
        origin = RecordOrigin.of(checkpoint, model, schema)
        return HostCacheServer(
            address,
            origin,
            settings,
            lambda: RecordLoader(checkpoint, model, schema, settings.record_file),
        )

    @staticmethod
    def of_offers(origin: RecordOrigin, settings: HostCacheSettings) -> HostCacheServer:
        """A host cache that keeps what ranks of an engine offer, in memory and in a folder."""
        return HostCacheServer(
            None, origin, settings, lambda: OfferedRecords(origin, settings.record_folder)
        )

    def _new_writer(self, settings: HostCacheSettings) -> WriteBehind | None:
        disk, num_entries = self._disk, self._num_entries
        if not isinstance(disk, RecordLoader) or disk.file is None or not disk.file.may_write:
            return None
        # What waits to be written keeps its entry: most of a small host cache must stay for ranks.
        return WriteBehind(disk.file, -(-num_entries // 4) if settings.records else num_entries)

    def _start_readers(self, num_readers: int) -> None:
        if isinstance(self._disk, RecordLoader):
            # Repacking uses torch. One thread first, alone: after a fork torch remakes its thread
            # pool at a new thread's first use, and of two that do so at once one finds none.
            first = threading.Thread(
                target=lambda: torch.zeros(PAGE_BYTES).sum(), name="preload-torch"
            )
            first.start()
            first.join()
        for number in range(num_readers):
            reader = threading.Thread(target=self._read, name=f"preload-{number}", daemon=True)
            reader.start()
            self._readers.append(reader)

    def _end_readers(self) -> None:
        self.cache.close()
        for reader in self._readers:
            reader.join(CLOSE_DEADLINE_S)

    # -- ranks

    def hello(self) -> Message:
        """What a rank gets to know before its first request."""
        return {
            "handle": self.arena.handle,
            "num_bytes": len(self.arena.bytes),
            "record_bytes": self.origin.record_bytes,
            "num_experts": self.origin.num_experts,
            "version": asdict(Announcement(HOST_CACHE, "")),
        }

    def serve_rank(self, wire: Wire) -> None:
        """Serve one rank, on its own thread."""
        wire.deadline = math.inf
        HostCacheSession(self, wire).run()

    # -- disk

    def _read(self) -> None:
        while (entry := self.cache.take()) is not None:
            try:
                self._load(entry)
            except Exception as exc:
                # A bug here must reach the rank that waits, and not only this process's log.
                if not isinstance(exc, EplbError | OSError):
                    log.exception("loading a record failed")
                self.cache.failed(entry, reason_of(exc))

    def _is_allocated(self, entry: CacheEntry) -> bool:
        """Allocate the memory of an entry; False where there is none, which ends its requests."""
        size = self.origin.record_bytes
        if entry.index not in self.cache.table.allocated:  # an entry has one thread that fills it
            try:
                self.arena.reserve(entry.index * size, size)
            except MigrationError as exc:
                log.error("%s", exc)
                self.cache.out_of_memory(entry, str(exc))
                return False
        return True

    def _load(self, entry: CacheEntry) -> None:
        if not self._is_allocated(entry):
            return
        target, writer = self.record_at(entry.index), self.writer
        loaded = self._disk.load(entry.record, target)
        is_to_write = loaded.source == "checkpoint" and writer is not None
        self.cache.loaded(entry, loaded.digest, loaded.source, for_writer=is_to_write)
        if is_to_write and writer is not None:
            done = partial(self.cache.release, WRITER, [entry.record])
            writer.offer(entry.record, target, loaded.digest, done)

    def record_at(self, place: int) -> torch.Tensor:
        """Bytes [record_bytes] of an entry, by its index."""
        size = self.origin.record_bytes
        return self.arena.bytes[place * size : (place + 1) * size]

    # -- offers of ranks

    def _offers(self) -> OfferedRecords:
        if not isinstance(self._disk, OfferedRecords):
            raise CheckpointError("this host cache has a checkpoint, expected no offers")
        return self._disk

    def lacks(self, records: Sequence[Record]) -> list[Record]:
        """Return those records that are neither in memory nor on a disk."""
        disk, here = self._offers(), frozenset(self.cache.ready())
        return [r for r in records if r not in here and disk.digest_of(r) is None]

    def keep(self, offered: Sequence[tuple[Record, Digest]], data: torch.Tensor) -> list[str]:
        """Keep records, each a row of ``data`` [n, record_bytes].

        Threads of an engine's process run this: bytes are copied by numpy, because torch's own
        copies need its thread pool, which a process has lost with its fork.

        Returns:
            [n] where each is now: "memory" (and on the disk, where there is one), "disk" where
            memory is full, "" where it is nowhere.

        Raises:
            CheckpointError: a row has not the digest that it was offered with.
        """
        disk = self._offers()
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
        entry = self.cache.begin_offer(record)
        if entry is not None and self._is_allocated(entry):
            np.copyto(self.record_at(entry.index).numpy(), data.numpy())
            # What is on no disk keeps its entry: evicted, it would be lost.
            self.cache.loaded(entry, expected, "offered", for_writer=not is_on_disk)
            return "memory"
        return "disk" if is_on_disk else ""

    # -- figures and end

    @property
    def num_clients(self) -> int:
        """Ranks that are connected at its own address."""
        return 0 if self._listener is None else self._listener.num_clients

    def stats(self) -> Counter[str]:
        """Count the records of what was done so far, and of what is held now, and failures."""
        counts = self.cache.figures()
        counts["damaged"] = self._disk.num_damaged
        counts["not_written"] = self.writer.num_skipped if self.writer else 0
        return counts

    def close(self) -> None:
        """Stop answering; twice is no harm."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if self._listener is not None:
            self._listener.stop()
        self.cache.close()
        if self._listener is not None:
            self._listener.close()
        self._end_readers()
        if self.writer is not None:
            self.writer.close()
        if any(reader.is_alive() for reader in self._readers):
            log.error("the disk does not respond: a reader thread is still running")
            return
        self._disk.close()
        self.arena.close()


class HostCacheSession:
    """A connected rank, on the thread that serves it.

    It receives requests, and answers when they are complete. While records are loaded it keeps
    receiving, so that the leases of a rank that dies or cancels end at once.
    """

    def __init__(self, server: HostCacheServer, wire: Wire) -> None:
        self._server, self._cache, self._origin = server, server.cache, server.origin
        self._wire, self._holder = wire, next(server.cache.holders)
        self._wake = os.eventfd(0)
        self._ended: deque[Request] = deque()
        self._deadlines: dict[Request, float] = {}  # deadlines of unanswered requests
        self._last: Request | None = None  # the newest request, which the rank may give up

    def run(self) -> None:
        """Serve until the connection closes."""
        try:
            with suppress(DisconnectedError):
                while self._turn():
                    pass
        finally:
            self._cache.drop(self._holder)
            os.close(self._wake)

    def _turn(self) -> bool:
        """Wait for a message, a request's end or a deadline; False at the connection's end."""
        left_s = None
        if self._deadlines:
            left_s = max(0.0, min(self._deadlines.values()) - time.monotonic())
        happened = wait([self._wire.fileno(), self._wake], left_s)
        if self._wake in happened:
            os.eventfd_read(self._wake)
        if self._wire.fileno() in happened:
            if not self._wire.wait_for_data(0.0):
                return False
            self._handle(self._wire.receive(max_bytes=MAX_JSON_BYTES))
        now = time.monotonic()
        for request in [r for r, deadline in self._deadlines.items() if deadline <= now]:
            self._cache.expire(request)
        while self._ended:
            request = self._ended.popleft()
            del self._deadlines[request]
            self._wire.send({"number": request.number} | self._answer(request))
        return True

    def _handle(self, message: Message) -> None:
        what, cache = message["ask"], self._cache
        if what in ("load", "reload"):
            self._load(message)
        elif what == "release":
            cache.release(self._holder, _records(message))
        elif what == "hint":
            cache.hint(_records(message), message["weights_version"])
        elif what == "give up":
            if self._last is not None and self._last.number == message["number"]:
                cache.withdraw(self._last)
        elif what == "invalidate":
            cache.invalidate(message["weights_version"])
            self._wire.send({"number": message["number"]})
        elif what in ("lacks", "offer"):
            self._wire.send({"number": message["number"]} | self._answer_offer(message))
        else:
            raise ValueError(f"unknown request {what!r}")

    def _load(self, message: Message) -> None:
        request = Request(
            self._holder,
            message["number"],
            _records(message),
            self._note_end,
            message["weights_version"],
        )
        try:
            for record in request.records:
                self._origin.number_of(record)
        except CheckpointError as exc:
            self._wire.send({"number": request.number, "error": str(exc)})
            return
        self._last = request
        self._deadlines[request] = time.monotonic() + message["deadline_s"]
        if message["ask"] == "load":
            self._cache.ask(request)
        elif found := self._intact(request):
            request.found[request.records[0]] = found
            request.is_ended = True  # without the cache, which would end it again if given up
            self._note_end(request)
        else:
            self._cache.reload(request)

    def _answer_offer(self, message: Message) -> Message:
        """Answer an offer, or which records are worth one."""
        server, records = self._server, _records(message)
        try:
            for record in records:
                self._origin.number_of(record)
            if message["ask"] == "lacks":
                return {"records": server.lacks(records)}
            # Writable, although nothing writes: torch maps no other memory.
            data = torch.from_numpy(attach(message["handle"], message["num_bytes"], for_gpu=True))
            digests = [(int(plain), int(weighted)) for plain, weighted in message["digests"]]
            # The last batch leaves a part of the rank's arena unused.
            rows = data.view(-1, self._origin.record_bytes)[: len(records)]
            return {"places": server.keep(list(zip(records, digests, strict=True)), rows)}
        except Exception as exc:
            # A bug here must reach the rank that waits, and not only this process's log.
            if not isinstance(exc, EplbError | OSError):
                log.exception("keeping records failed")
            return {"error": reason_of(exc)}

    def _intact(self, request: Request) -> tuple[Digest, int] | None:
        """Return a leased record's digest and place if its bytes still digest to it."""
        (record,) = request.records
        found = self._cache.held(self._holder, record)
        if found is None:
            return None
        return found if digest(self._server.record_at(found[1])) == found[0] else None

    def _note_end(self, request: Request) -> None:
        self._ended.append(request)
        os.eventfd_write(self._wake, 1)

    def _answer(self, request: Request) -> Message:
        if request.error is not None:
            return {"error": request.error}
        found = [request.found[record] for record in request.records]
        return {
            "digests": [digest for digest, _ in found],
            "places": [place for _, place in found],
            "from_disk": request.num_from_disk * self._origin.record_bytes,
        }


def _records(message: Message) -> Sequence[Record]:
    return [(int(layer), int(expert)) for layer, expert in message["records"]]
