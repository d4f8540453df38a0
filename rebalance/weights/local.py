"""Transport within one process: the shipped fake of ``rebalance/weights/sources.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from eplb.core.topology import Topology
from eplb.errors import MigrationError
from eplb.migration.build import Source
from rebalance.threads.cancellation import IsWanted, always
from rebalance.types import Record
from rebalance.weights.interface import Place
from rebalance.weights.sources import out_of_reach, ranks_beside
from runtime.experts import ExpertBank
from runtime.streams import Completion


class LocalTransport:
    """The shipped fake: all ranks' banks and the host's records are in this process."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        banks: Sequence[ExpertBank],
        records: Mapping[Record, torch.Tensor],
    ) -> None:
        self._rank, self._banks = rank, banks
        self._on_disk, self._on_host = records, dict[Record, torch.Tensor]()
        self._weights_version = 0
        self.host_room = len(records)
        self.readable = frozenset([rank, *ranks_beside(rank, topology)])
        self.reachable = frozenset[int]()

    def begin(self) -> None:
        """Nothing to do: a CPU thread has no device and no stream."""

    def preload(
        self, records: Sequence[Record], deadline_s: float, is_wanted: IsWanted = always
    ) -> Mapping[str, int]:
        """Load these records; return the bytes that were read from disk."""
        from_disk = 0
        for record in records:
            if self._weights_version:
                raise MigrationError(
                    f"weights version {self._weights_version} is not in the host cache"
                )
            if record not in self._on_disk:
                raise MigrationError(f"layer {record[0]} expert {record[1]} is not on disk")
            if record not in self._on_host:
                self._on_host[record] = self._on_disk[record]
                from_disk += len(self._on_disk[record])
        return {"disk": from_disk}

    def hint(self, records: Sequence[Record]) -> None:
        """Nothing to do: reading takes no time."""

    def reload(self, record: Record, deadline_s: float, is_wanted: IsWanted = always) -> None:
        """Read a record again."""
        self._on_host[record] = self._on_disk[record]

    def release(self, records: Sequence[Record]) -> None:
        """Forget records."""
        for record in records:
            self._on_host.pop(record, None)

    def serve_weights(self, version: int, deadline_s: float) -> None:
        """Drop all records."""
        self._on_host.clear()
        self._weights_version = version

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Copy a part of a record."""
        if place.is_far:
            raise out_of_reach(record, place, "asked", self._rank, self.reachable)
        if place.source is Source.HOST:
            held = self._on_host[record]
        elif place.rank in self.readable:
            held = self._banks[place.rank].live(record[0], place.slot)
        else:
            raise out_of_reach(record, place, "read", self._rank, self.readable)
        into.copy_(held[offset : offset + len(into)])
        return Completion(is_cuda=False)

    def close(self) -> None:
        """Nothing to do: no rank is asked over a network."""
