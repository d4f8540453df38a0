"""Sources within one process: other ranks' banks, and a host memory that is the shipped fake."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from eplb.core.topology import Topology
from eplb.errors import MigrationError
from rebalance.types import IsWanted, Record, always
from rebalance.weights.sources import MappedSlots, Place, map_peers
from runtime.experts import ExpertBank
from runtime.streams import Completion


class LocalHost:
    """The shipped fake of ``HostMemory``: the records of the disk are in this process."""

    ranks: frozenset[int] = frozenset()

    def __init__(self, records: Mapping[Record, torch.Tensor]) -> None:
        self._on_disk, self._leased = records, dict[Record, torch.Tensor]()
        self._weights_version = 0
        self.room = len(records)

    def begin(self, back: torch.cuda.Stream | None) -> None:
        """Nothing to do: a CPU thread has no stream."""

    def lease(
        self, records: Sequence[Record], *, deadline_s: float, is_wanted: IsWanted = always
    ) -> Mapping[str, int]:
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
        return {"disk": from_disk}

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
