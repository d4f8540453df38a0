"""What a change of placement moves: weights by kind of link, and what each rank receives.

An engine copies an expert from its own rank, else from a rank of the same node, else over the
network. Ranks that could send a weight send equal parts of it here, so that plans that move nearly
everything are cheap to price; ``eplb.migration`` makes the moves themselves.

Shapes:  L MoE layers, E experts, S slots, R ranks, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement, changed_slots
from eplb.core.topology import Topology

LINKS = ("same_rank", "node", "network")


@dataclass(frozen=True, eq=False)
class Moved:
    """Weights that a change of placement copies into slots."""

    by_link: dict[str, int]  # weights, by LINKS
    received: NDArray[np.int64]  # [len(LINKS), R] weights that each rank receives
    sent: NDArray[np.float64]  # [len(LINKS), R] that each rank sends, by equal parts of its holders
    layers: int  # in which anything moves

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_link.values())


def moved_between(base: Placement, target: Placement, topology: Topology) -> Moved:
    """Count the weights of ``target`` that are not in their slots under ``base``."""
    layers, slots = np.nonzero(changed_slots(base, target))
    ranks, nodes = topology.rank_of_slot[slots], topology.node_of_slot[slots]
    experts = target.slot_to_expert[layers, slots]
    on_rank = _held(base, topology.rank_of_slot, topology.num_ranks)
    on_node = _held(base, topology.node_of_slot, topology.num_nodes)
    is_here = on_rank[layers, ranks, experts]
    is_near = ~is_here & on_node[layers, nodes, experts]
    received = np.array(
        [
            np.bincount(ranks[chosen], minlength=topology.num_ranks)
            for chosen in (is_here, is_near, ~is_here & ~is_near)
        ]
    )
    by_link = dict(zip(LINKS, received.sum(axis=1).tolist(), strict=True))
    holders = on_rank[layers, :, experts]  # [moved, R]
    of_node = topology.node_of_rank[None, :] == nodes[:, None]
    sent = np.zeros((len(LINKS), topology.num_ranks))
    for link, senders in (
        (1, holders[is_near] & of_node[is_near]),
        (2, holders[~is_here & ~is_near]),
    ):
        parts = np.maximum(senders.sum(axis=1, keepdims=True), 1)  # without a holder: from a host
        sent[link] = (senders / parts).sum(axis=0)
    return Moved(by_link, received, sent, len(np.unique(layers)))


def _held(
    placement: Placement, place_of_slot: NDArray[np.int32], num_places: int
) -> NDArray[np.bool_]:
    """[L, places, E] whether a rank, or a node, holds an expert."""
    held = np.zeros((placement.num_layers, num_places, placement.num_experts), dtype=np.bool_)
    layers, slots = np.nonzero(placement.slot_to_expert != EMPTY)
    held[layers, place_of_slot[slots], placement.slot_to_expert[layers, slots]] = True
    return held
