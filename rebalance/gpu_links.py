"""The transport of ranks that are GPUs of one node: peers' memory by copy engine, else the slab."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eplb.migration import Move, Source
from eplb.topology import Topology
from rebalance.links import holder_of
from rebalance.slab import SlabReader
from rebalance.transport import Record
from runtime.experts import ExpertBank
from runtime.streams import new_stream
from runtime.symmetric import SymmetricArena, SymmetricPeer


class SymmetricTransport:
    """Pulls on a stream of its own: no kernel of serving ever waits for it."""

    def __init__(
        self,
        rank: int,
        topology: Topology,
        bank: ExpertBank,
        slab: SlabReader,
        arena: SymmetricArena,
    ) -> None:
        self._rank, self._topology, self._bank, self._slab = rank, topology, bank, slab
        self._peers = {
            peer: SymmetricPeer(arena, peer, bank, int(topology.slots_of_rank[peer]))
            for peer in range(topology.num_ranks)
            if peer != rank and topology.host_of_rank[peer] == topology.host_of_rank[rank]
        }

    def begin(self) -> None:
        """Bind the mover's thread to this rank's device and to a stream of its own.

        A new thread starts on device 0 and on the default stream, which serving may be using.
        """
        torch.cuda.set_device(self._bank.device)
        torch.cuda.set_stream(new_stream(self._bank.device))

    def preload(self, records: Sequence[Record], deadline_s: float) -> int:
        """Have the host's slab hold these records; return the bytes that came from disk."""
        _, from_disk = self._slab.load(records, deadline_s=deadline_s)
        return from_disk

    def pull(self, move: Move, into: torch.Tensor) -> None:
        """Copy the bytes of a move from its source into ``into`` [record_bytes], completely."""
        if move.source in (Source.HOST, Source.DISK):
            self._slab.read((move.layer, move.expert), into)
            return
        owner, slot = holder_of(move, self._rank, self._topology)
        if owner == self._rank:
            into.copy_(self._bank.live(move.layer, slot), non_blocking=True)
            torch.cuda.current_stream().synchronize()
        else:
            self._peers[owner].read(move.layer, slot, into)
