"""Zones: the ranks that an expert may be placed on.

Without expert groups one zone holds every live rank. With them each node is a zone, and a layer's
groups are packed to nodes (``eplb/packing/group_packing.py``).

Shapes:  L MoE layers, E experts, G groups, R ranks, N nodes, Z zones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.kernels import FloatArray, IntArray, Ranks, replicate
from eplb.core.topology import Topology
from eplb.packing.group_packing import Nodes, pack_groups


class Zones(NamedTuple):
    """The zone of each expert, and the slots and ranks of each zone."""

    of_expert: IntArray  # [L, E]
    num_slots: IntArray  # [L, Z] that a layer may use
    num_ranks: IntArray  # [L, Z] live ranks with at least one such slot
    ranks: Ranks


def keeps_groups(
    topology: Topology, num_groups: int, num_experts: int, room: IntArray | None = None
) -> bool:
    """Whether each group fits on one node: groups divide by nodes, and nodes have enough slots.

    Args:
        topology: nodes, slots, and which ranks are alive.
        num_groups: G.
        num_experts: E.
        room: [L, R] slots that a layer may use; default: all of serving ranks.
    """
    num_nodes = topology.num_nodes
    if num_groups < 2 or num_nodes < 2 or num_groups % num_nodes:
        return False
    slots = _by_zone(_live_room(topology) if room is None else room, topology.node_of_rank)
    return bool((slots >= num_experts // num_nodes).all())


def zones_for(
    work: FloatArray, topology: Topology, num_groups: int, room: IntArray | None = None
) -> Zones:
    """Zones for work [L, E]: one for each node when ``keeps_groups``, else one for all.

    Args:
        work: load, to pack groups by.
        topology: nodes, slots, and which ranks are alive.
        num_groups: G; 1 for none.
        room: [L, R] slots that a layer may use; default: all of serving ranks.
    """
    num_layers, num_experts = work.shape
    if room is None:
        room = np.repeat(_live_room(topology), num_layers, axis=0)
    zone = np.zeros(topology.num_ranks, dtype=np.int64)
    of_expert = np.zeros((num_layers, num_experts), dtype=np.int64)
    if keeps_groups(topology, num_groups, num_experts, room):
        zone[:] = topology.node_of_rank
        size = num_experts // num_groups
        nodes = Nodes(
            _by_zone(room, zone), _by_zone(room > 0, zone), *_speeds(topology, room.max(axis=0) > 0)
        )
        grouped = np.ascontiguousarray(work.reshape(num_layers, num_groups, size))
        of_expert = np.repeat(pack_groups(grouped, nodes), size, axis=1)
    ranks = Ranks(
        np.where(topology.alive, zone, -1), topology.first_slot, 1.0 / topology.rank_speed, room
    )
    return Zones(of_expert, _by_zone(room, zone), _by_zone(room > 0, zone), ranks)


def zone_bound(scaled: FloatArray, zones: Zones) -> FloatArray:
    """[L] lower bound of the imbalance in these zones, for work [L, E] as ``Problem.scaled``.

    The time of a zone is at least its load, and its largest replica on its fastest rank; see
    ``eplb.measure.balance.lower_bound`` for why greedy counts make the largest replica smallest.
    """
    least = np.ones(zones.of_expert.shape, dtype=np.int64)
    count = replicate(scaled, zones.of_expert, zones.num_slots, zones.num_ranks, least)
    bound = np.ones(len(scaled))
    for zone in range(zones.num_slots.shape[1]):
        inside = np.where(zones.of_expert == zone, scaled, 0.0)
        usable = (zones.ranks.zone == zone) & (zones.ranks.room > 0)  # [L, R]
        speed = np.where(usable, 1.0 / zones.ranks.slowness, 0.0)
        together, fastest = speed.sum(axis=1), np.maximum(speed.max(axis=1), 1e-300)
        np.maximum(bound, inside.sum(axis=1) / np.maximum(together, 1e-300), out=bound)
        np.maximum(bound, (inside / count).max(axis=1) / fastest, out=bound)
    return bound


def nodes_of_groups(
    held: NDArray[np.int32], topology: Topology, num_groups: int, num_experts: int
) -> IntArray | None:
    """[G] the node of each expert group of a layer [S]; None when a group is on several or none.

    Nodes must hold equally many groups; slots of dead ranks do not count.
    """
    live = np.flatnonzero((held >= 0) & topology.alive[topology.rank_of_slot])
    group = held[live] // (num_experts // num_groups)
    node_of_group = np.full(num_groups, -1, dtype=np.int64)
    node_of_group[group] = topology.node_of_slot[live]
    if (node_of_group < 0).any() or (node_of_group[group] != topology.node_of_slot[live]).any():
        return None
    groups_on = np.bincount(node_of_group, minlength=topology.num_nodes)
    return node_of_group if (groups_on == groups_on[0]).all() else None


def _live_room(topology: Topology) -> IntArray:
    """[1, R] slots of serving ranks."""
    return topology.usable_slots[None]


def _by_zone(of_rank: NDArray[np.int64] | NDArray[np.bool_], zone: NDArray[np.integer]) -> IntArray:
    """[L, Z] a figure of ranks [L, R], summed by zone."""
    member = (zone[:, None] == np.arange(int(zone.max()) + 1)).astype(np.int64)
    summed: IntArray = of_rank.astype(np.int64) @ member
    return summed


def _speeds(topology: Topology, usable: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
    """[N] speed of each node's ranks together, and of its fastest."""
    together, fastest = np.zeros(topology.num_nodes), np.zeros(topology.num_nodes)
    np.add.at(together, topology.node_of_rank[usable], topology.rank_speed[usable])
    np.maximum.at(fastest, topology.node_of_rank[usable], topology.rank_speed[usable])
    return together, fastest
