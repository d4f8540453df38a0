"""The ranks of an expert-parallel group: node, host, failure domain, slots and speed.

Node, host and failure domain are three different things. A node is a set of ranks joined by the
fast fabric; a host is a set of ranks that share memory (one host cache); a failure domain is a
set of ranks that die together. On one 8-GPU server all three agree; on a rack-scale NVLink domain
a node spans many hosts.

Shapes:  R ranks, S slots (all ranks together).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import UNSET, freeze, owned, owned_whole, unset
from eplb.errors import TopologyError

MOST_RANKS, MOST_SLOTS = 2**16, 2**16  # slots of a rank and layer


@dataclass(frozen=True, eq=False)
class Topology:
    """Ranks and their slots. Slots are numbered rank by rank: rank 0's first, then rank 1's.

    Any number of ranks and any slot counts are legal, also for a separate MoE cluster whose tokens
    come from other machines.

    Raises:
        TopologyError: lengths differ, a count is negative, or no rank is alive.
    """

    node_of_rank: NDArray[np.int32]  # [R]
    slots_of_rank: NDArray[np.int32]  # [R]
    host_of_rank: NDArray[np.int32] = field(default_factory=unset)  # [R]; default: as node_of_rank
    failure_domain: NDArray[np.int32] = field(default_factory=unset)  # [R]; default: host_of_rank
    # [R]; 1.0, the default, is nominal
    rank_speed: NDArray[np.float64] = field(default_factory=unset)
    alive: NDArray[np.bool_] = field(default_factory=unset)  # [R]; default: all
    drained: NDArray[np.bool_] = field(default_factory=unset)  # [R] hold nothing; default: none

    def __post_init__(self) -> None:
        nodes = owned_whole("node_of_rank", self.node_of_rank, TopologyError)
        ones = np.ones(nodes.shape)
        hosts = nodes if self.host_of_rank is UNSET else owned(self.host_of_rank, np.int32)
        domains = hosts if self.failure_domain is UNSET else owned(self.failure_domain, np.int32)
        speed = owned(ones if self.rank_speed is UNSET else self.rank_speed, np.float64)
        alive = owned(ones if self.alive is UNSET else self.alive, np.bool_)
        drained = owned(0 * ones if self.drained is UNSET else self.drained, np.bool_)
        slots = owned_whole("slots_of_rank", self.slots_of_rank, TopologyError)
        freeze(self, node_of_rank=nodes, slots_of_rank=slots, host_of_rank=hosts)
        freeze(self, failure_domain=domains, rank_speed=speed, alive=alive, drained=drained)
        for name in vars(self):
            shape = getattr(self, name).shape
            if shape != nodes.shape or nodes.ndim != 1:
                raise TopologyError(
                    f"{name} has shape {shape}, expected ({nodes.size},) like node_of_rank"
                )
        if not alive.any():
            raise TopologyError(f"no rank is alive of {nodes.size}, expected at least one")
        if (slots < 0).any():
            rank = int(np.argmax(slots < 0))
            raise TopologyError(f"rank {rank} has {slots[rank]} slots, expected 0 or more")
        if not (np.isfinite(speed) & (speed > 0)).all():
            rank = int(np.argmin(np.isfinite(speed) & (speed > 0)))
            raise TopologyError(
                f"rank {rank} has speed {speed[rank]}, expected a finite number above 0"
            )

    @staticmethod
    def uniform(num_nodes: int, ranks_per_node: int, slots_per_rank: int) -> Topology:
        """Equal nodes of equal ranks, each node one host."""
        counts = (num_nodes, ranks_per_node, slots_per_rank)
        if not all(isinstance(count, int | np.integer) and count >= 1 for count in counts):
            raise TopologyError(
                f"found {num_nodes} nodes x {ranks_per_node} ranks x {slots_per_rank} slots, "
                "expected whole numbers, at least one of each"
            )
        num_ranks = num_nodes * ranks_per_node
        if num_ranks > MOST_RANKS or slots_per_rank > MOST_SLOTS:
            raise TopologyError(
                f"found {num_ranks:,} ranks of {slots_per_rank:,} slots, expected at most "
                f"{MOST_RANKS:,} ranks of {MOST_SLOTS:,} slots"
            )
        return Topology(
            node_of_rank=np.repeat(np.arange(num_nodes, dtype=np.int32), ranks_per_node),
            slots_of_rank=np.full(num_ranks, slots_per_rank, dtype=np.int32),
        )

    @property
    def num_ranks(self) -> int:
        """R: all ranks, dead ones included."""
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        """N: one more than the highest node number."""
        return int(self.node_of_rank.max()) + 1

    @cached_property
    def num_slots(self) -> int:
        """S: slots of all ranks together."""
        return int(self.slots_of_rank.sum())

    @cached_property
    def serving(self) -> NDArray[np.bool_]:
        """[R] live ranks with slots, not drained: only these get load and count in means."""
        return owned(self.alive & (self.slots_of_rank > 0) & ~self.drained, np.bool_)

    @cached_property
    def has_tokens(self) -> NDArray[np.bool_]:
        """[R] ranks on which tokens start: those without slots where there are such, else all."""
        without = self.slots_of_rank == 0
        return owned(without if without.any() else ~without, np.bool_)

    @cached_property
    def usable_slots(self) -> NDArray[np.int64]:
        """[R] slots of serving ranks, none of the others."""
        return owned(np.where(self.serving, self.slots_of_rank, 0), np.int64)

    @cached_property
    def first_slot(self) -> NDArray[np.int64]:
        """[R + 1] number of each rank's first slot; the last entry is S."""
        first = np.zeros(self.num_ranks + 1, dtype=np.int64)
        np.cumsum(self.slots_of_rank, out=first[1:])
        return owned(first, np.int64)

    @cached_property
    def rank_of_slot(self) -> NDArray[np.int32]:
        """[S] the rank that each slot lives on."""
        return owned(np.repeat(np.arange(self.num_ranks), self.slots_of_rank), np.int32)

    @cached_property
    def node_of_slot(self) -> NDArray[np.int32]:
        """[S] the node that each slot lives on."""
        return owned(self.node_of_rank[self.rank_of_slot], np.int32)

    def slots_on(self, rank: int) -> slice:
        """The slots of one rank, as a slice of a placement's slot axis."""
        return slice(int(self.first_slot[rank]), int(self.first_slot[rank + 1]))
