"""Bookkeeping of the host cache: entries, leases and what is loaded next. No I/O.

The host cache has a fixed number of entries, each with room for one record. A rank's request leases
all of its records at once, or waits until it can, so that no two ranks each hold half of what they
need. A leased entry is never given to another record.

A hinted record is loaded when no rank waits, and never in place of a leased record or of one from
the same hint.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rebalance.types import Digest, Record
from rebalance.weights.cache.entries import CacheEntry, EntryTable, RecordState
from rebalance.weights.disk.record_loader import LoadedFrom

WAIT_S = 1.0  # a lost wake-up costs this long, not for ever
# The holder that keeps records until they are written behind, and offered ones that are on no
# disk; ranks count from 1.
WRITER = 0


@dataclass(eq=False)
class Request:
    """A rank's request for records. ``ended`` is called once and must not block."""

    holder: int
    number: int
    records: Sequence[Record]
    ended: Callable[[Request], None]
    weights_version: int = 0
    num_from_disk: int = 0
    added: list[CacheEntry] = field(default_factory=list)  # leases that this request added
    missing: set[Record] = field(default_factory=set)
    found: dict[Record, tuple[Digest, int]] = field(default_factory=dict)  # digest and place
    error: str | None = None
    is_ended: bool = False


def refusal_of(request: Request, table: EntryTable, weights_version: int) -> str | None:
    """Return why a request can never be granted, or None.

    Records come from the checkpoint, whose weights are version 0.
    """
    if request.weights_version < weights_version:
        return (
            f"weights version {request.weights_version} was invalidated by version "
            f"{weights_version}: ranks replaced the weights while they served; to start from the "
            "checkpoint again, restart the host caches of all hosts first"
        )
    if request.weights_version > 0:
        return (
            f"weights version {request.weights_version} is not in the host cache, "
            "which is filled from the checkpoint, version 0"
        )
    asked, room = set(request.records), table.num_entries
    if len(asked) + table.num_leases[request.holder] <= room:
        return None
    beside = {entry.record for entry in table.held_by(request.holder)} - asked
    if len(asked) + len(beside) <= room:
        return None
    return (
        f"{len(asked)} records asked for beside {len(beside)} that this rank holds, "
        f"expected at most {room}, the capacity of the host cache"
    )


def no_room(request: Request, table: EntryTable) -> str:
    """Return what keeps a request waiting."""
    held = sum(bool(entry.holders) for entry in table.entries.values())
    return (
        f"no room for {len(set(request.records))} records: {held} of {table.num_entries} entries "
        f"are held, by {len(table.holders())} ranks"
    )


class HostCache:
    """State of the host cache. Thread-safe; only ``take`` waits."""

    def __init__(self, num_entries: int) -> None:
        self.counts: Counter[str] = Counter()
        self.weights_version = 0
        self._changed = threading.Condition()
        self.table = EntryTable(num_entries)
        self._waiting: list[Request] = []  # for room, in order of arrival
        self._loading: dict[
            CacheEntry, list[Request]
        ] = {}  # requests that wait for an entry to be READY
        self._queued: OrderedDict[CacheEntry, None] = OrderedDict()
        self._hinted: OrderedDict[Record, int] = OrderedDict()  # number of the hint
        self._num_hints = 0
        self._is_closed = False
        self.holders = itertools.count(WRITER + 1)  # a new number for each client

    # -- ranks

    def ask(self, request: Request) -> None:
        """Lease a request's records, now or when there is room, and have them loaded."""
        with self._changed:
            if refusal := refusal_of(request, self.table, self.weights_version):
                self._end(request, refusal)
                return
            self._waiting.append(request)
            self._admit()
            if request in self._waiting:
                self.counts["waits"] += 1
                # All holders that could release entries are waiting: the latest request is refused.
                if self._is_stuck():
                    self._end(
                        request, f"{no_room(request, self.table)}, and all holders are waiting"
                    )

    def ready(self) -> list[Record]:
        """Name the records that are in memory."""
        with self._changed:
            entries = self.table.entries.items()
            return [record for record, entry in entries if entry.state is RecordState.READY]

    def release(self, holder: int, records: Collection[Record]) -> None:
        """End a rank's leases on records; those that it does not hold are no harm."""
        with self._changed:
            for entry in self.table.held_by(holder, frozenset(records)):
                self._release(entry, holder)
            self._admit()

    def withdraw(self, request: Request) -> None:
        """Cancel a request, answered or not, and end the leases that it added."""
        with self._changed:
            if request.is_ended:
                self._undo(request)
            else:
                self._end(request, "cancelled by its rank")
            self._admit()

    def expire(self, request: Request) -> None:
        """End a request that is late."""
        with self._changed:
            if not request.is_ended:
                late = f"timed out: {len(request.missing)} records are still being read"
                self._end(
                    request, no_room(request, self.table) if request in self._waiting else late
                )
                self._admit()

    def drop(self, holder: int) -> None:
        """End all requests and leases of a disconnected rank."""
        with self._changed:
            for request in self._unanswered():
                if request.holder == holder:
                    self._end(request, "its rank disconnected")
            for entry in self.table.held_by(holder):
                self._release(entry, holder)
            self._admit()

    def hint(self, records: Sequence[Record], weights_version: int) -> None:
        """Queue records to be loaded when idle, if there is room for them."""
        with self._changed:
            if weights_version or self.weights_version:
                self.counts["hints_dropped"] += len(records)
                return
            self._num_hints += 1
            self._hinted |= dict.fromkeys(records, self._num_hints)
            self._changed.notify_all()

    def reload(self, request: Request) -> None:
        """Reload a leased record from disk after a digest mismatch."""
        with self._changed:
            (record,) = request.records
            held = self.table.held_by(request.holder, [record])
            if not held or held[0].is_void:
                self._end(request, f"layer {record[0]} expert {record[1]} is not leased")
                return
            if held[0].state is RecordState.READY:
                held[0].state, self._queued[held[0]] = RecordState.QUEUED, None
            request.num_from_disk = 1
            self._await(request, held[0])
            self._changed.notify_all()

    def held(self, holder: int, record: Record) -> tuple[Digest, int] | None:
        """Return digest and place of a record that a rank holds and that is READY."""
        with self._changed:
            for entry in self.table.held_by(holder, frozenset([record])):
                if (
                    entry.state is RecordState.READY
                    and not entry.is_void
                    and entry.digest is not None
                ):
                    return entry.digest, entry.index
            return None

    def invalidate(self, version: int) -> None:
        """Void every record of weights older than ``version``: none is handed out again."""
        with self._changed:
            if version <= self.weights_version:
                return
            self.weights_version = version
            self._hinted.clear()
            for request in list(self._waiting):
                self._end(request, refusal_of(request, self.table, self.weights_version))
            for entry in list(self.table.entries.values()):
                self._void(entry, f"weights version 0 was invalidated by version {version}")

    # -- offers

    def begin_offer(self, record: Record) -> CacheEntry | None:
        """Return an entry to copy an offered record into; ``loaded`` or ``failed`` must follow.

        None where the record is here or on its way, or where there is no free entry: an offer
        evicts nothing.
        """
        with self._changed:
            if record in self.table.entries or not self.table.free_indices:
                return None
            entry = self.table.assign(record)
            entry.state = RecordState.LOADING
            return entry

    # -- readers of the disk

    def take(self) -> CacheEntry | None:
        """Wait for an entry to load and return it; None once the host cache is closed."""
        with self._changed:
            while not self._is_closed:
                entry = self.try_take()
                if entry is not None:
                    return entry
                self._changed.wait(WAIT_S)
            return None

    def try_take(self) -> CacheEntry | None:
        """Return an entry to load, requested ones before hinted ones; None if there is none now."""
        with self._changed:
            entry = self._next()
            if entry is not None:
                entry.state = RecordState.LOADING
            return entry

    def _next(self) -> CacheEntry | None:
        if self._queued:
            return self._queued.popitem(last=False)[0]
        while self._hinted:
            record, hint = self._hinted.popitem(last=False)
            if record in self.table.entries:
                continue
            entry = self.table.assign_for_hint(record, hint)
            if entry is not None:
                return entry
            self.counts["hints_dropped"] += 1
        return None

    def loaded(
        self, entry: CacheEntry, digest: Digest, source: LoadedFrom, *, for_writer: bool = False
    ) -> None:
        """Mark an entry as loaded and answer its requests; the writer may lease it."""
        with self._changed:
            self.counts[source] += 1
            self.table.allocated.add(entry.index)
            entry.state, entry.digest = RecordState.READY, digest
            if for_writer:
                self.table.lease(entry, WRITER)
            for request in self._loading.pop(entry, []):
                request.missing.discard(entry.record)
                request.found[entry.record] = digest, entry.index
                if not request.missing and not request.is_ended:
                    self._end(request, None)
            self.table.make_evictable(entry)
            self._admit()

    def failed(self, entry: CacheEntry, error: str) -> None:
        """Fail the requests that wait for an entry's record; a later request tries again."""
        with self._changed:
            entry.state = RecordState.READY
            if entry.is_void:
                self.table.make_evictable(entry)
            else:
                self._void(entry, error)
            self._admit()

    def out_of_memory(self, entry: CacheEntry, error: str) -> None:
        """Continue with the entries whose memory was allocated so far."""
        with self._changed:
            self.table.shrink(entry)
            self.failed(entry, f"{error}; host cache reduced to {self.table.num_entries} records")
            for request in list(self._waiting):
                if refusal := refusal_of(request, self.table, self.weights_version):
                    self._end(request, refusal)

    def close(self) -> None:
        """Stop the disk readers, and end all requests."""
        with self._changed:
            self._is_closed = True
            for request in self._unanswered():
                self._end(request, "the host cache is closing")
            self._changed.notify_all()

    def figures(self) -> Counter[str]:
        """Count the records of what was done so far, and of what is held now."""
        with self._changed:
            found, entries = Counter(self.counts), self.table.entries.values()
            found["evictions"], found["room"] = self.table.num_evicted, self.table.num_entries
            found["resident"] = sum(one.state is RecordState.READY for one in entries)
            found["leased"] = sum(bool(one.holders) for one in entries)
            return found

    # -- with the lock held

    def _unanswered(self) -> list[Request]:
        asked = [*self._waiting, *(r for rs in self._loading.values() for r in rs)]
        return [request for request in dict.fromkeys(asked) if not request.is_ended]

    def _is_stuck(self) -> bool:
        holders_that_wait = {request.holder for request in self._waiting}
        return not self.table.has_unheld_load() and self.table.holders() <= holders_that_wait

    def _admit(self) -> None:
        """Grant requests that fit, in order; a rank with leases may overtake others."""
        is_blocked = False
        for request in list(self._waiting):
            if is_blocked and not self.table.num_leases[request.holder]:
                continue
            asked = set(request.records)
            num_new = len(asked - self.table.entries.keys())
            if num_new <= self.table.room_beside(asked):
                self._grant(request)
            else:
                is_blocked = True
        self._changed.notify_all()

    def _grant(self, request: Request) -> None:
        self._waiting.remove(request)
        records = list(dict.fromkeys(request.records))
        # First those that are here, so that none of them makes room for another.
        here = [self.table.entries[r] for r in records if r in self.table.entries]
        for entry in here:
            self._lease(request, entry)
        for record in records:
            if record not in self.table.entries:
                entry = self.table.assign(record)
                self._queued[entry] = None
                self._lease(request, entry)
                request.num_from_disk += 1
        self.counts["hits"] += len(here)
        self.counts["misses"] += request.num_from_disk
        if not request.missing:
            self._end(request, None)

    def _lease(self, request: Request, entry: CacheEntry) -> None:
        entry.hint = 0
        if self.table.lease(entry, request.holder):
            request.added.append(entry)
        if entry.state is RecordState.READY:
            assert entry.digest is not None, "what is ready was digested"
            request.found[entry.record] = entry.digest, entry.index
        else:
            self._await(request, entry)

    def _await(self, request: Request, entry: CacheEntry) -> None:
        request.missing.add(entry.record)
        self._loading.setdefault(entry, []).append(request)

    def _end(self, request: Request, error: str | None) -> None:
        request.is_ended, request.error = True, error
        if request in self._waiting:
            self._waiting.remove(request)
        if error is not None:
            self.counts["refusals"] += 1
            self._undo(request)
        request.ended(request)

    def _undo(self, request: Request) -> None:
        added, request.added = request.added, []
        for entry in added:
            self._release(entry, request.holder)

    def _release(self, entry: CacheEntry, holder: int) -> None:
        self.table.release(entry, holder)
        if entry.state is RecordState.QUEUED and not entry.holders and entry in self._queued:
            self._void(entry, "released by its rank before it was loaded")

    def _void(self, entry: CacheEntry, error: str) -> None:
        if entry in self._queued:
            del self._queued[entry]
            entry.state = RecordState.READY
        self.table.void(entry)
        for request in self._loading.pop(entry, []):
            if not request.is_ended:
                self._end(request, error)
