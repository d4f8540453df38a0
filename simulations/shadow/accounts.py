"""What a placement planner gives and costs, window by window.

The moves that lead to a placement are booked in the first window that it serves, so that gains and
costs stand in the same windows.

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

Series = NDArray[np.float64]


@dataclass
class Account:
    """Imbalance and moves of each judged window."""

    terms: Terms
    serving: Placement  # in the latest judged window; at first, the one at the start
    worst: float = 1.0  # one layer in one window
    rebalances: int = 0
    _imbalance: list[float] = field(default_factory=list)  # [T] mean over layers
    _received: list[int] = field(default_factory=list)  # [T] experts, from another rank
    _seconds: list[float] = field(default_factory=list)  # [T] of serving that moves take
    _shown: Placement | None = None  # ``serving`` as the engine's rule serves it

    def judge(self, tokens: NDArray[np.int64], placement: Placement) -> None:
        """Note a window [L, E] under what serves, and the price of having come to serve."""
        received, seconds = 0, 0.0
        if placement is not self.serving:
            received, seconds = self._price(placement)
        if self._shown is None or placement is not self.serving:
            self.serving, self._shown = placement, as_served(placement, self.terms)
        found = imbalance(tokens, self._shown, self.terms.topology)
        self.worst = max(self.worst, float(found.max()))
        self._imbalance.append(float(found.mean()))
        self._received.append(received)
        self._seconds.append(seconds)

    def _price(self, new: Placement) -> tuple[int, float]:
        """Experts received, and seconds on the rank that receives most; new shares are free."""
        if not changed_slots(self.serving, new).any():
            return 0, 0.0
        self.rebalances += 1
        received = received_by_rank(self.serving, new, self.terms.topology)
        cost = self.terms.cost
        most = int(received.max()) * cost.move_seconds(self.expert_bytes)
        return int(received.sum()), cost.seconds_per_rebalance + most

    @property
    def expert_bytes(self) -> int:
        """Of one expert; 0: not known."""
        return 0 if self.terms.model is None else self.terms.model.expert_bytes

    @property
    def imbalance(self) -> Series:
        """[T] of the judged windows, mean over layers."""
        return np.array(self._imbalance)

    @property
    def received(self) -> Series:
        """[T] experts that came from another rank before each window."""
        return np.array(self._received, dtype=np.float64)

    @property
    def seconds(self) -> Series:
        """[T] of serving that the moves before each window take."""
        return np.array(self._seconds)


def received_by_rank(old: Placement, new: Placement, topology: Topology) -> NDArray[np.int64]:
    """[R] experts that each rank receives from another one; a copy within a rank is not counted."""
    layer, slot = np.nonzero(changed_slots(old, new))
    rank = topology.rank_of_slot[slot]
    held = np.zeros((old.num_layers, topology.num_ranks, old.num_experts), dtype=np.bool_)
    rows, slots = np.nonzero(old.slot_to_expert >= 0)
    held[rows, topology.rank_of_slot[slots], old.slot_to_expert[rows, slots]] = True
    expert = new.slot_to_expert[layer, slot]
    arrives = ~held[layer, rank, expert]
    # An expert that fills two slots of one rank is received once.
    key = np.stack([layer[arrives], rank[arrives], expert[arrives]])
    found: NDArray[np.int64] = np.bincount(
        np.unique(key, axis=1)[1], minlength=topology.num_ranks
    ).astype(np.int64)
    return found
