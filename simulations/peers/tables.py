"""Placements as tables [L, R, C], the form of engines with ranks of equal size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import PlacementError

Table = NDArray[np.int64]  # [R, C] the expert in each slot, or -1


def table_of(placement: Placement, topology: Topology) -> NDArray[np.int64]:
    """[L, R, C] the expert in each slot, or -1.

    Raises:
        PlacementError: ranks that are dead or of different sizes.
    """
    size = topology.slots_of_rank
    if not topology.alive.all() or (size != size[0]).any():
        raise PlacementError(
            f"ranks have {size.tolist()} slots, {int((~topology.alive).sum())} are dead, "
            "expected live ranks of one size: this planner knows no others"
        )
    held: NDArray[np.int64] = placement.slot_to_expert.astype(np.int64)
    return held.reshape(placement.num_layers, topology.num_ranks, int(size[0]))


def placement_of(table: NDArray[np.int64], current: Placement) -> Placement:
    """The placement of a table, with the generation after ``current``."""
    held = table.reshape(len(table), -1).astype(np.int32)
    return Placement(held, current.num_experts, current.generation + 1)


def kept_in_place(serving: NDArray[np.int64], new: NDArray[np.int64]) -> NDArray[np.int64]:
    """[C] the experts ``new`` of a rank, in an order in which those that stay keep their slot."""
    result = np.empty_like(new)
    stays = np.isin(serving, new) & (serving >= 0)
    result[stays] = serving[stays]
    result[~stays] = new[~np.isin(new, serving)]
    return result
