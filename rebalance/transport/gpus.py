"""Peers that are GPUs of one node: their mapped memory, read by copy engine."""

from __future__ import annotations

import torch

from eplb.core.topology import Topology
from rebalance.transport.interface import Place
from rebalance.transport.processes import ranks_beside
from runtime.experts import ExpertBank
from runtime.memory.symmetric import SymmetricArena, SymmetricPeer


class SymmetricPeers:
    """Peers' banks in one symmetric allocation.

    Args:
        rank: the reading rank.
        topology: names the ranks on its host.
        bank: the reading rank's own.
        arena: the reading rank's part of the allocation, which holds its bank.
    """

    def __init__(
        self, rank: int, topology: Topology, bank: ExpertBank, arena: SymmetricArena
    ) -> None:
        self._banks = {
            peer: SymmetricPeer(arena, peer, bank, int(topology.slots_of_rank[peer]))
            for peer in ranks_beside(rank, topology)
        }
        self.ranks = frozenset(self._banks)

    def read(self, place: Place, layer: int, offset: int, into: torch.Tensor) -> None:
        """Order the copy of a part of a peer's slot, on this thread's stream."""
        self._banks[place.rank].read(layer, place.slot, into, offset)
