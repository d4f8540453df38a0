"""Entries of the host cache: one record each, their holders, and the order of eviction.

QUEUED --> LOADING --> READY --> given to another record, least recently used first
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

from rebalance.types import Digest, Record


class RecordState(Enum):
    """State of an entry's record."""

    QUEUED = "queued"
    LOADING = "loading"
    READY = "ready"


@dataclass(eq=False)
class CacheEntry:
    """An entry of the host cache, and its record."""

    index: int
    record: Record
    state: RecordState = RecordState.QUEUED
    digest: Digest | None = None
    hint: int = 0  # number of the hint that loaded it; 0 once a rank has requested it
    is_void: bool = False  # older weights, or damaged: never handed out again
    holders: set[int] = field(default_factory=set)


class EntryTable:
    """All entries. The owner's lock guards them.

    An entry without holders is evicted only when READY: before that the disk writes it.
    """

    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries
        self.entries: dict[Record, CacheEntry] = {}  # those that may be handed out
        self.num_leases: Counter[int] = Counter()  # leases of each holder
        self.num_evicted = 0
        self.free_indices = list(range(num_entries - 1, -1, -1))
        self.allocated: set[int] = set()  # indices of entries whose memory is allocated
        self.evictable: OrderedDict[Record, CacheEntry] = OrderedDict()  # oldest first
        self.voided: list[CacheEntry] = []  # void entries that holders may still read

    def room_beside(self, records: Collection[Record]) -> int:
        """Entries available without the eviction of any of these records."""
        return (
            len(self.free_indices)
            + len(self.evictable)
            - sum(record in self.evictable for record in records)
        )

    def assign(self, record: Record) -> CacheEntry:
        """Assign an entry to a record that has none; there must be room."""
        if not self.free_indices:
            _, oldest = self.evictable.popitem(last=False)
            self._evict(oldest)
        entry = self.entries[record] = CacheEntry(self.free_indices.pop(), record)
        return entry

    def assign_for_hint(self, record: Record, hint: int) -> CacheEntry | None:
        """Assign an entry to a hinted record, never one of this or a later hint; or None."""
        if not self.free_indices:
            older = (entry for entry in self.evictable.values() if entry.hint < hint)
            oldest = next(older, None)
            if oldest is None:
                return None
            del self.evictable[oldest.record]
            self._evict(oldest)
        entry = self.entries[record] = CacheEntry(self.free_indices.pop(), record, hint=hint)
        return entry

    def _evict(self, entry: CacheEntry) -> None:
        del self.entries[entry.record]
        self.free_indices.append(entry.index)
        self.num_evicted += 1

    def lease(self, entry: CacheEntry, holder: int) -> bool:
        """Lease an entry to a holder; return whether the holder had no lease on it before."""
        self.evictable.pop(entry.record, None)
        if holder in entry.holders:
            return False
        entry.holders.add(holder)
        self.num_leases[holder] += 1
        return True

    def release(self, entry: CacheEntry, holder: int) -> None:
        """End a holder's lease, if it has one."""
        if holder in entry.holders:
            entry.holders.remove(holder)
            self.num_leases[holder] -= 1
            if not self.num_leases[holder]:
                del self.num_leases[holder]  # holders come and go as long as the host cache lives
            self.make_evictable(entry)

    def make_evictable(self, entry: CacheEntry) -> None:
        """Make an entry evictable if no holder reads it and no load writes it."""
        if entry.holders or entry.state is not RecordState.READY:
            return
        if not entry.is_void:
            self.evictable[entry.record] = entry
            return
        if entry in self.voided:
            self.voided.remove(entry)
            if entry.index >= 0:
                self.free_indices.append(entry.index)

    def void(self, entry: CacheEntry) -> None:
        """Invalidate an entry; it becomes free when no one reads or writes it."""
        assert not entry.is_void, "an entry becomes void once"
        entry.is_void = True
        del self.entries[entry.record]
        self.evictable.pop(entry.record, None)
        self.voided.append(entry)
        self.make_evictable(entry)

    def held_by(self, holder: int, records: Collection[Record] | None = None) -> list[CacheEntry]:
        """Entries that a holder has leases on, of all or of some records."""
        return [
            entry
            for entry in self._all(records)
            if holder in entry.holders and (records is None or entry.record in records)
        ]

    def _all(self, records: Collection[Record] | None) -> Iterator[CacheEntry]:
        if records is None:
            return chain(self.entries.values(), self.voided)
        found = (self.entries[record] for record in records if record in self.entries)
        return chain(found, self.voided)

    def holders(self) -> set[int]:
        """All holders that have a lease."""
        return set(self.num_leases)

    def has_unheld_load(self) -> bool:
        """Return whether an entry will become free without a release."""
        return any(
            not entry.holders and entry.state is not RecordState.READY
            for entry in chain(self.entries.values(), self.voided)
        )

    def shrink(self, entry: CacheEntry) -> None:
        """Drop the entries whose memory was not allocated yet, including this one."""
        allocated = [index for index in self.free_indices if index in self.allocated]
        self.num_entries -= len(self.free_indices) - len(allocated) + 1
        self.free_indices = allocated
        entry.index = -1
