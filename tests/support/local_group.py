"""A group of ranks in one process: its votes, its slots, and a host memory.

Each stands in for a part that needs processes, and passes the same contract test.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence

import torch

from eplb.core.topology import Topology
from eplb.errors import MigrationError
from rebalance.types import Digest, IsWanted, Outcome, PendingVote, Record, VoteGroup, always
from rebalance.weights.sources import MappedSlots, Place, map_peers
from runtime.experts import ExpertBank
from runtime.memory import digest
from runtime.streams import Completion


class LocalHost:
    """In place of ``HostCacheClient``: the records of the disk are in this process."""

    ranks: frozenset[int] = frozenset()

    def __init__(self, records: Mapping[Record, torch.Tensor]) -> None:
        self._on_disk, self._leased = records, dict[Record, torch.Tensor]()
        self._weights_version = 0
        self.room = len(records)

    def begin(self, back: torch.cuda.Stream | None) -> None:
        """Nothing to do: a CPU thread has no stream."""

    def lease(
        self, records: Sequence[Record], *, deadline_s: float, is_wanted: IsWanted = always
    ) -> int:
        """Lease these records; return the bytes that were read from disk."""
        from_disk = 0
        for record in records:
            if self._weights_version:
                raise MigrationError(
                    f"weights version {self._weights_version} is not in the host cache"
                )
            if record not in self._on_disk:
                raise MigrationError(f"layer {record[0]} expert {record[1]} is not on disk")
            if record not in self._leased:
                self._leased[record] = self._on_disk[record]
                from_disk += len(self._on_disk[record])
        return from_disk

    def load(self, records: Sequence[Record], *, deadline_s: float) -> tuple[list[Digest], int]:
        """Lease these records; return their digests too."""
        from_disk = self.lease(records, deadline_s=deadline_s)
        return [digest(self._leased[record]) for record in records], from_disk

    def hint(self, records: Sequence[Record]) -> None:
        """Nothing to do: reading takes no time."""

    def reload(self, record: Record, *, deadline_s: float, is_wanted: IsWanted = always) -> None:
        """Read a record again."""
        self._leased[record] = self._on_disk[record]

    def release(self, records: Collection[Record] | None = None) -> None:
        """End leases."""
        for record in list(self._leased) if records is None else records:
            self._leased.pop(record, None)

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Copy a part of a record."""
        into.copy_(self._leased[record][offset : offset + len(into)])
        return Completion(is_cuda=False)

    def read(self, record: Record, into: torch.Tensor) -> None:
        """Copy a whole record."""
        into.copy_(self._leased[record])

    def invalidate(self, version: int, *, deadline_s: float) -> None:
        """Drop all records."""
        self._leased.clear()
        self._weights_version = version

    def close(self) -> None:
        """Nothing to do: there is no connection."""


def local_slots(topology: Topology, rank: int, banks: Sequence[ExpertBank]) -> MappedSlots:
    """The slots of a rank whose peers are in this process, each with its bank."""
    peers = map_peers(rank, topology, banks[rank], lambda peer: banks[peer].arena.bytes)
    return MappedSlots(rank, banks[rank], peers)


class LocalVotes:
    """Votes of ranks that are threads of one process, or turns of a scheduler.

    ``kill`` makes a rank dead: votes that it has not cast can only end BROKEN.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._ballots: list[dict[int, list[int]]] = []  # per vote, by rank
        self._dead: set[int] = set()

    def member(self, rank: int) -> VoteGroup:
        """Return the group as one rank sees it."""
        return _LocalMember(self, rank)

    def kill(self, rank: int) -> None:
        """Mark a rank as dead."""
        with self._changed:
            self._dead.add(rank)
            self._changed.notify_all()

    def revive(self, rank: int) -> None:
        """Mark a rank as alive again."""
        with self._changed:
            self._dead.discard(rank)

    def dead(self) -> frozenset[int]:
        """Ranks that were killed."""
        with self._changed:
            return frozenset(self._dead)

    @property
    def num_votes(self) -> int:
        """Votes that at least one rank has cast."""
        with self._changed:
            return len(self._ballots)

    def add(self, rank: int, number: int, ballot: list[int]) -> None:
        """Add one rank's ballot to a vote."""
        with self._changed:
            while len(self._ballots) <= number:
                self._ballots.append({})
            self._ballots[number][rank] = ballot
            self._changed.notify_all()

    def result(self, number: int, timeout_s: float) -> tuple[Outcome, list[int]]:
        """Wait for one vote."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._ballots[number]) < self._num_ranks:
                if self._dead - self._ballots[number].keys():
                    return Outcome.BROKEN, []
                left = deadline - time.monotonic()
                if left <= 0:
                    return Outcome.LATE, []
                self._changed.wait(left)
            columns = zip(*self._ballots[number].values(), strict=True)
            return Outcome.VALUE, [min(column) for column in columns]


class _LocalMember:
    def __init__(self, votes: LocalVotes, rank: int) -> None:
        self._votes, self._rank, self._number = votes, rank, -1

    def cast(self, ballot: Sequence[int]) -> PendingVote:
        self._number += 1
        self._votes.add(self._rank, self._number, list(ballot))
        return _LocalVote(self._votes, self._number)

    def begin_beats(self) -> None:
        """Nothing to send: no rank is silent here."""

    def dead(self) -> frozenset[int]:
        return self._votes.dead()

    def close(self, *, is_failure: bool = False) -> None:
        """Leave; after a failure as a dead rank."""
        if is_failure:
            self._votes.kill(self._rank)


class _LocalVote:
    def __init__(self, votes: LocalVotes, number: int) -> None:
        self._votes, self._number = votes, number

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        return self._votes.result(self._number, timeout_s)
