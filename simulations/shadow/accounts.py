"""What a placement planner gives and costs, window by window.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import Placement, changed_slots
from eplb.core.topology import Topology
from eplb.measure.balance import imbalance
from simulations.course import Terms, as_served


@dataclass
class Account:
    """Imbalance of each judged window, and the price of all changes."""

    terms: Terms
    imbalance: list[float] = field(default_factory=list)  # [T] mean over layers
    worst: float = 1.0  # one layer in one window
    rebalances: int = 0
    experts_moved: int = 0  # to another rank
    bytes_moved: int = 0
    seconds: float = 0.0  # of serving that moves take, on the rank that receives most
    _as_served: tuple[Placement, Placement] | None = None

    def judge(self, tokens: NDArray[np.int64], placement: Placement) -> None:
        """Note the imbalance of a window [L, E] under what serves."""
        if self._as_served is None or self._as_served[0] is not placement:
            self._as_served = placement, as_served(placement, self.terms)
        found = imbalance(tokens, self._as_served[1], self.terms.topology)
        self.imbalance.append(float(found.mean()))
        self.worst = max(self.worst, float(found.max()))

    def change(self, old: Placement, new: Placement) -> None:
        """Note the price of a change; new shares alone move nothing."""
        received = received_by_rank(old, new, self.terms.topology)
        if not changed_slots(old, new).any():
            return
        cost, each = self.terms.cost, self.expert_bytes
        self.rebalances += 1
        self.experts_moved += int(received.sum())
        self.bytes_moved += int(received.sum()) * each
        self.seconds += cost.seconds_per_rebalance + int(received.max()) * cost.move_seconds(each)

    @property
    def expert_bytes(self) -> int:
        """Of one expert; 0: not known."""
        return 0 if self.terms.model is None else self.terms.model.expert_bytes

    @property
    def series(self) -> NDArray[np.float64]:
        """[T] imbalance of the judged windows."""
        return np.array(self.imbalance)


def received_by_rank(old: Placement, new: Placement, topology: Topology) -> NDArray[np.int64]:
    """[R] experts that each rank receives from another one; a copy within a rank is not counted."""
    layer, slot = np.nonzero(changed_slots(old, new))
    rank = topology.rank_of_slot[slot]
    held = np.zeros((old.num_layers, topology.num_ranks, old.num_experts), dtype=np.bool_)
    rows, slots = np.nonzero(old.slot_to_expert >= 0)
    held[rows, topology.rank_of_slot[slots], old.slot_to_expert[rows, slots]] = True
    expert = new.slot_to_expert[layer, slot]
    arrives = (expert >= 0) & ~held[layer, rank, expert]
    # An expert that fills two slots of one rank is received once.
    key = np.stack([layer[arrives], rank[arrives], expert[arrives]])
    found: NDArray[np.int64] = np.bincount(
        np.unique(key, axis=1)[1], minlength=topology.num_ranks
    ).astype(np.int64)
    return found
