"""Zones: which ranks an expert may live on, and the packing of expert groups to nodes.

Without expert groups one zone holds every live rank. With them each node is a zone, and a layer's
groups are packed to nodes exactly: every packing is scored by the slowest node, and a node is as
slow as its load or its largest replica makes it.

Shapes:  L MoE layers, E experts, G groups, N nodes, Q sets of groups, P packings.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from math import comb, factorial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.kernels import FloatArray, IntArray, Ranks, replicate
from eplb.topology import Topology

MOST_PACKINGS = 5000  # more are not enumerated; the groups are then packed heaviest first


class Zones(NamedTuple):
    """Where experts may live."""

    of_expert: IntArray  # [L, E]
    num_slots: IntArray  # [Z] of live ranks
    num_ranks: IntArray  # [Z] live ranks with at least one slot
    ranks: Ranks


def keeps_groups(topology: Topology, num_groups: int, num_experts: int) -> bool:
    """Whether groups stay on nodes: they divide by nodes, and every node has room for its part."""
    num_nodes = topology.num_nodes
    if num_groups < 2 or num_nodes < 2 or num_groups % num_nodes:
        return False
    slots = _live_slots(topology, topology.node_of_rank.astype(np.int64), num_nodes)
    return bool((slots >= num_experts // num_nodes).all())


def zones_for(work: FloatArray, topology: Topology, num_groups: int) -> Zones:
    """Zones for work [L, E]: one for each node when ``keeps_groups``, else one for all."""
    num_layers, num_experts = work.shape
    if not keeps_groups(topology, num_groups, num_experts):
        return _zones(topology, np.zeros((num_layers, num_experts), dtype=np.int64), 1)
    size = num_experts // num_groups
    bare = _zones(topology, np.zeros((1, size * num_groups), dtype=np.int64), topology.num_nodes)
    node_of_group = _pack_groups(work.reshape(num_layers, num_groups, size), topology, bare)
    return bare._replace(of_expert=np.repeat(node_of_group, size, axis=1))


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


def _zones(topology: Topology, of_expert: IntArray, num_zones: int) -> Zones:
    zone = np.zeros(topology.num_ranks, dtype=np.int64)
    if num_zones > 1:
        zone[:] = topology.node_of_rank
    usable = topology.alive & (topology.slots_of_rank > 0)
    num_ranks = np.bincount(zone[usable], minlength=num_zones)
    slots = _live_slots(topology, zone, num_zones)
    ranks = Ranks(
        np.where(topology.alive, zone, -1), topology.first_slot, 1.0 / topology.rank_speed
    )
    return Zones(of_expert, slots, num_ranks, ranks)


def _live_slots(topology: Topology, zone: IntArray, num_zones: int) -> IntArray:
    slots = np.zeros(num_zones, dtype=np.int64)
    np.add.at(slots, zone[topology.alive], topology.slots_of_rank[topology.alive])
    return slots


def _pack_groups(work: FloatArray, topology: Topology, zones: Zones) -> IntArray:
    """[L, G] the node of each group, for work [L, G, experts of a group]."""
    num_layers, num_groups, _ = work.shape
    num_nodes = topology.num_nodes
    each = num_groups // num_nodes
    packings = factorial(num_groups) // factorial(each) ** num_nodes
    alike = _nodes_are_alike(topology, zones)
    if packings // (factorial(num_nodes) if alike else 1) > MOST_PACKINGS:
        return _pack_heaviest_first(work.sum(axis=2), topology)
    sets, choices = _packings(num_groups, num_nodes, alike)
    score = _node_scores(work, sets, topology, zones)  # [L, Q, N]
    slowest = np.zeros((num_layers, len(choices)))
    for node in range(num_nodes):
        np.maximum(slowest, score[:, choices[:, node], node], out=slowest)
    chosen = choices[slowest.argmin(axis=1)]  # [L, N]
    node_of_group = np.empty((num_layers, num_groups), dtype=np.int64)
    for node in range(num_nodes):
        np.put_along_axis(node_of_group, sets[chosen[:, node]], node, axis=1)
    return node_of_group


def _nodes_are_alike(topology: Topology, zones: Zones) -> bool:
    """Whether swapping two nodes would change nothing."""
    kinds = {
        (
            int(zones.num_slots[node]),
            tuple(sorted(topology.rank_speed[_live(topology, node)].tolist())),
        )
        for node in range(topology.num_nodes)
    }
    return len(kinds) == 1


def _live(topology: Topology, node: int) -> NDArray[np.bool_]:
    live: NDArray[np.bool_] = topology.alive & (topology.node_of_rank == node)
    return live


def _node_scores(work: FloatArray, sets: IntArray, topology: Topology, zones: Zones) -> FloatArray:
    """[L, Q, N] time of a node that holds a set of groups: its load, or its largest replica."""
    num_layers = len(work)
    inside = np.ascontiguousarray(work[:, sets].reshape(num_layers * len(sets), -1))
    one_zone = np.zeros(inside.shape, dtype=np.int64)
    score = np.empty((len(inside), topology.num_nodes))
    for node in range(topology.num_nodes):
        speed = topology.rank_speed[_live(topology, node)]
        if node and _nodes_are_alike(topology, zones):
            score[:, node] = score[:, 0]
            continue
        room, ranks = zones.num_slots[node : node + 1], zones.num_ranks[node : node + 1]
        largest = (inside / replicate(inside, one_zone, room, ranks)).max(axis=1) / speed.max()
        np.maximum(inside.sum(axis=1) / speed.sum(), largest, out=score[:, node])
    return score.reshape(num_layers, len(sets), topology.num_nodes)


@lru_cache(maxsize=16)
def _packings(num_groups: int, num_nodes: int, alike: bool) -> tuple[IntArray, IntArray]:
    """Sets of groups [Q, G / N], and every packing as one set for each node [P, N]."""
    each = num_groups // num_nodes
    sets = list(combinations(range(num_groups), each))
    assert len(sets) == comb(num_groups, each), "sets are all combinations"
    number = {members: index for index, members in enumerate(sets)}

    def fill(free: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not free:
            yield ()
            return
        # Among nodes that are alike, the next node takes the lowest free group: no mirror images.
        for members in combinations(free, each):
            if alike and members[0] != free[0]:
                break
            rest = tuple(group for group in free if group not in members)
            for others in fill(rest):
                yield (number[members], *others)

    choices = np.array(list(fill(tuple(range(num_groups)))), dtype=np.int64)
    return np.array(sets, dtype=np.int64), choices


def _pack_heaviest_first(load: FloatArray, topology: Topology) -> IntArray:
    """[L, G] for loads [L, G], where there are too many packings to try them all."""
    num_layers, num_groups = load.shape
    num_nodes = topology.num_nodes
    speed = [topology.rank_speed[_live(topology, node)].sum() for node in range(num_nodes)]
    node_of_group = np.zeros((num_layers, num_groups), dtype=np.int64)
    for layer in range(num_layers):
        taken, used = np.zeros(num_nodes), np.zeros(num_nodes, dtype=np.int64)
        for group in np.argsort(-load[layer], kind="stable"):
            time = np.where(
                used < num_groups // num_nodes, (taken + load[layer, group]) / speed, np.inf
            )
            node = int(time.argmin())
            node_of_group[layer, group] = node
            taken[node] += load[layer, group]
            used[node] += 1
    return node_of_group
