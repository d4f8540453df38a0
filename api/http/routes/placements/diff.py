"""What differs between two placements, layer by layer.

Shapes:  L MoE layers, S slots, R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology

LEAST_SHARE = 1e-9  # that counts as changed


@dataclass(frozen=True, eq=False)
class LayerTables:
    """Experts and shares of one layer by rank, before and after."""

    held: tuple[NDArray[np.bool_], NDArray[np.bool_]]  # [R, E] each
    share: tuple[NDArray[np.float64], NDArray[np.float64]]  # [R, E] each, of the expert's tokens

    @property
    def added(self) -> NDArray[np.bool_]:
        """[R, E] experts that a rank did not hold: their bytes came from elsewhere."""
        before, after = self.held
        return after & ~before

    @property
    def removed(self) -> NDArray[np.bool_]:
        """[R, E] experts that a rank holds no more."""
        before, after = self.held
        return before & ~after

    @property
    def reshared(self) -> NDArray[np.bool_]:
        """[R, E] experts that stay on a rank, which gets another part of their tokens."""
        (held, still), (before, after) = self.held, self.share
        changed: NDArray[np.bool_] = held & still & (np.abs(after - before) > LEAST_SHARE)
        return changed


def layer_tables(base: Placement, target: Placement, topology: Topology, layer: int) -> LayerTables:
    """Compare one layer of two placements that the topology can serve."""
    before = _by_rank(base, topology, layer)
    after = _by_rank(target, topology, layer)
    return LayerTables((before > -1, after > -1), (np.maximum(before, 0), np.maximum(after, 0)))


def changed_layers(base: Placement, target: Placement) -> list[int]:
    """Layers with a slot of another expert, or another share, overall or of one node's tokens."""
    is_changed = (base.slot_to_expert != target.slot_to_expert).any(axis=1)
    is_changed |= (np.abs(base.slot_share - target.slot_share) > LEAST_SHARE).any(axis=1)
    by_source = [one.source_share for one in (base, target)]
    if any(one is not None for one in by_source):
        # A side without shares per source has the same share from every node.
        of_base = base.slot_share[None] if by_source[0] is None else by_source[0]
        of_target = target.slot_share[None] if by_source[1] is None else by_source[1]
        is_changed |= (np.abs(of_base - of_target) > LEAST_SHARE).any(axis=(0, 2))
    return [int(layer) for layer in np.flatnonzero(is_changed)]


def _by_rank(placement: Placement, topology: Topology, layer: int) -> NDArray[np.float64]:
    """[R, E] part of an expert's tokens that a rank gets; -1: it does not hold the expert."""
    held, share = placement.slot_to_expert[layer], placement.slot_share[layer]
    used = np.flatnonzero(held != EMPTY)
    place = topology.rank_of_slot[used], held[used]
    table = np.full((topology.num_ranks, placement.num_experts), -1.0)
    table[place] = 0.0
    np.add.at(table, place, share[used])
    return table
