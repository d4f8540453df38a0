"""The transport of ranks that are processes: peers on a host read each other, all read the slab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from eplb.errors import MigrationError
from eplb.migration import Move, Source
from eplb.topology import Topology
from rebalance.slab import Digest, SlabReader
from rebalance.transport import Record
from runtime.experts import ExpertBank, PeerBank


def holder_of(move: Move, rank: int, topology: Topology) -> tuple[int, int]:
    """(rank, slot of that rank) that a move of ``rank`` takes its bytes from.

    Raises:
        MigrationError: that rank is on another host, whose memory cannot be read from here.
    """
    owner = int(topology.rank_of_slot[move.src_slot])
    if topology.host_of_rank[owner] != topology.host_of_rank[rank]:
        raise MigrationError(
            f"layer {move.layer} expert {move.expert}: rank {owner} is on another host, "
            "expected a source on this one"
        )
    return owner, move.src_slot - int(topology.first_slot[owner])


class SharedMemoryTransport:
    """Same rank, a peer of the same host, or the host's slab; nobody else is asked to help.

    This is the CPU's counterpart of a copy-engine pull from a peer GPU's memory.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        bank: ExpertBank,
        slab: SlabReader,
        handles: Mapping[int, str],
    ) -> None:
        self._rank, self._topology, self._bank, self._slab = rank, topology, bank, slab
        self._peers = {
            peer: PeerBank(handle, bank, int(topology.slots_of_rank[peer]))
            for peer, handle in handles.items()
            if peer != rank and topology.host_of_rank[peer] == topology.host_of_rank[rank]
        }

    def begin(self) -> None:
        """Nothing to do: a CPU thread has no device and no stream."""

    def preload(self, records: Sequence[Record], deadline_s: float) -> int:
        """Have the host's slab hold these records; return the bytes that came from disk."""
        _, from_disk = self._slab.load(records, deadline_s=deadline_s)
        return from_disk

    def pull(self, move: Move, into: torch.Tensor) -> None:
        """Copy the bytes of a move from its source into ``into`` [record_bytes]."""
        if move.source in (Source.HOST, Source.DISK):
            self._slab.read((move.layer, move.expert), into)
            return
        owner, slot = holder_of(move, self._rank, self._topology)
        if owner == self._rank:
            into.copy_(self._bank.live(move.layer, slot))
        else:
            self._peers[owner].read(move.layer, slot, into)


class LocalTransport:
    """The shipped fake: all ranks' banks and the host's records are in this process."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        banks: Sequence[ExpertBank],
        records: Mapping[Record, torch.Tensor],
    ) -> None:
        self._topology, self._rank, self._banks = topology, rank, banks
        self._on_disk, self._on_host = records, dict[Record, torch.Tensor]()

    def begin(self) -> None:
        """Nothing to do: a CPU thread has no device and no stream."""

    def preload(self, records: Sequence[Record], deadline_s: float) -> int:
        """Have the host hold these records; return the bytes that came from disk."""
        from_disk = 0
        for record in records:
            if record not in self._on_disk:
                raise MigrationError(f"layer {record[0]} expert {record[1]} is not on disk")
            if record not in self._on_host:
                self._on_host[record] = self._on_disk[record]
                from_disk += len(self._on_disk[record])
        return from_disk

    def pull(self, move: Move, into: torch.Tensor) -> None:
        """Copy the bytes of a move from its source into ``into`` [record_bytes]."""
        if move.source in (Source.HOST, Source.DISK):
            into.copy_(self._on_host[(move.layer, move.expert)])
            return
        owner, slot = holder_of(move, self._rank, self._topology)
        into.copy_(self._banks[owner].live(move.layer, slot))


def fill_bank(
    bank: ExpertBank, held: Sequence[Sequence[int]], slab: SlabReader, *, deadline_s: float
) -> dict[Record, Digest]:
    """Load the first experts of a rank: slots ``held`` [L][C], negative for an empty one.

    Returns:
        The digest of every expert that this rank now holds, taken from the slots themselves.

    Raises:
        MigrationError: a record cannot be read, or a slot does not hold what was read.
    """
    places = {
        (layer, expert): slot
        for layer, slots in enumerate(held)
        for slot, expert in enumerate(slots)
        if expert >= 0
    }
    digests, _ = slab.load(list(places), deadline_s=deadline_s)
    for (record, slot), expected in zip(places.items(), digests, strict=True):
        layer, expert = record
        slab.read(record, bank.live(layer, slot))
        if bank.digest(layer, slot) != expected:
            raise MigrationError(f"layer {layer} slot {slot} does not hold expert {expert} as read")
    return dict(zip(places, digests, strict=True))
