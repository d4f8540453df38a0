"""Zones: the ranks that an expert may be placed on, and how many replicas it may have there.

Without expert groups one zone holds every live rank. With them each node is a zone, and whole
groups are packed onto nodes: equally many on each, with the least time of the slowest node. The
time of a node is the larger of its load and its largest replica: a hot expert on a node with few
spare slots costs more than its load. Where there are few packings all of them are tried; else the
heaviest groups are assigned first, and groups are swapped while the slowest node gains. A rank of
zone -1 is dead and holds nothing.

Shapes:  L MoE layers, E experts, G groups, S slots, R ranks, N nodes, Z zones, Q sets of groups,
         P packings.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from math import comb, factorial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import ZERO, BoolArray, FloatArray, IntArray, inner, kernel
from eplb.core.topology import Topology

MOST_PACKINGS = 5000  # above that they are not all tried


class Ranks(NamedTuple):
    """A topology as the kernels read it."""

    zone: IntArray  # [R], -1 for a dead rank
    node: IntArray  # [R]
    first_slot: IntArray  # [R + 1]
    slowness: FloatArray  # [R] time per unit of load: 1 / rank_speed
    room: IntArray  # [L, R] how many of a rank's slots a layer may use, the first ones


class Zones(NamedTuple):
    """The zone of each expert, and the slots and ranks of each zone."""

    of_expert: IntArray  # [L, E]
    num_slots: IntArray  # [L, Z] slots that a layer may use
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
    slots = _by_zone(topology.usable_slots[None] if room is None else room, topology.node_of_rank)
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
        room = np.repeat(topology.usable_slots[None], num_layers, axis=0)
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
    ranks = ranks_of(topology, room)._replace(zone=np.where(topology.alive, zone, -1))
    return Zones(of_expert, _by_zone(room, zone), _by_zone(room > 0, zone), ranks)


def ranks_of(topology: Topology, room: IntArray | None = None) -> Ranks:
    """A topology as kernels read it, with all live ranks in one zone.

    Args:
        topology: slots, speeds, and which ranks are alive.
        room: [L, R] slots that a layer may use; default: all of serving ranks, for one layer.
    """
    return Ranks(
        np.where(topology.alive, 0, -1),
        topology.node_of_rank.astype(np.int64),
        topology.first_slot,
        1.0 / topology.rank_speed,
        topology.usable_slots[None].copy() if room is None else room,
    )


def with_groups_kept(
    zones: Zones, held: NDArray[np.int32], topology: Topology, num_groups: int
) -> tuple[Zones, BoolArray]:
    """Zones in which each expert group is in that of its node in ``held`` [L, S].

    Returns:
        The zones, and [L] layers whose groups are not on single nodes: those do not change.
    """
    of_expert = zones.of_expert.copy()
    ungrouped = np.zeros(len(held), dtype=np.bool_)
    num_experts = of_expert.shape[1]
    for layer, row in enumerate(held):
        node_of_group = nodes_of_groups(row, topology, num_groups, num_experts)
        ungrouped[layer] = node_of_group is None
        if node_of_group is not None:
            of_expert[layer] = np.repeat(node_of_group, num_experts // num_groups)
    return zones._replace(of_expert=of_expert), ungrouped


def zone_bound(scaled: FloatArray, zones: Zones) -> FloatArray:
    """[L] lower bound of the imbalance in these zones, for work [L, E] as ``Problem.scaled``.

    The time of a zone is at least its load, and its largest replica on its fastest rank; see
    ``eplb.measure.lower_bound`` for why greedy counts make the largest replica smallest.
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


@kernel
def replicate(
    work: FloatArray,
    zone_of_expert: IntArray,
    slots_of_zone: IntArray,
    ranks_of_zone: IntArray,
    least: IntArray,
) -> IntArray:
    """[L, E] replica counts: each spare slot goes to the expert with the largest load per replica.

    Args:
        work: [L, E].
        zone_of_expert: [L, E].
        slots_of_zone: [L, Z].
        ranks_of_zone: [L, Z]; an expert never gets more replicas than its zone has ranks.
        least: [L, E] fewest replicas of an expert, at least 1.

    Ties go to the lower number.
    """
    num_layers, num_experts = work.shape
    count = least.copy()
    heap = np.empty(num_experts, dtype=np.int64)  # experts, the largest load per replica on top
    each = np.empty(num_experts)
    for layer in range(num_layers):
        for zone in range(slots_of_zone.shape[1]):
            size, spare = ZERO, slots_of_zone[layer, zone]
            for expert in range(num_experts):
                if zone_of_expert[layer, expert] == zone:
                    spare -= count[layer, expert]
                    each[expert] = work[layer, expert] / count[layer, expert]
                    if count[layer, expert] < ranks_of_zone[layer, zone]:
                        heap[size] = expert
                        size += 1
            for top in range(size // 2 - 1, -1, -1):
                _sink(heap, size, each, top)
            while spare > 0 and size > 0:
                expert = heap[0]
                spare -= 1
                count[layer, expert] += 1
                each[expert] = work[layer, expert] / count[layer, expert]
                if count[layer, expert] == ranks_of_zone[layer, zone]:
                    size -= 1
                    heap[0] = heap[size]
                _sink(heap, size, each, ZERO)
    return count


@inner
def _sink(heap: IntArray, size: int, each: FloatArray, top: int) -> None:
    """Restore the heap order below ``top``."""
    while True:
        largest = top
        for below in range(2 * top + 1, min(2 * top + 3, size)):
            one, other = heap[below], heap[largest]
            if each[one] > each[other] or (each[one] == each[other] and one < other):
                largest = below
        if largest == top:
            return
        heap[top], heap[largest] = heap[largest], heap[top]
        top = largest


class Nodes(NamedTuple):
    """Slots, ranks and speed of each node."""

    num_slots: IntArray  # [L, N]
    num_ranks: IntArray  # [L, N] with at least one slot
    speed: FloatArray  # [N] speed of all ranks together
    fastest: FloatArray  # [N] rank


def pack_groups(work: FloatArray, nodes: Nodes) -> IntArray:
    """[L, G] the node of each group, for work [L, G, experts of a group]."""
    num_groups, num_nodes = work.shape[1], len(nodes.speed)
    columns = (*nodes.num_slots, *nodes.num_ranks, nodes.speed, nodes.fastest)
    alike = all((figures == figures[0]).all() for figures in columns)
    if (
        _num_packings(num_groups, num_nodes) // (factorial(num_nodes) if alike else 1)
        > MOST_PACKINGS
    ):
        load = work.sum(axis=2)
        return _pack_and_swap(work, load, np.argsort(-load, axis=1, kind="stable"), nodes)
    sets, choices = _packings(num_groups, num_nodes, alike)
    return _best_packings(work, nodes, sets, choices, alike)


def _num_packings(num_groups: int, num_nodes: int) -> int:
    packings: int = factorial(num_groups) // factorial(num_groups // num_nodes) ** num_nodes
    return packings


def is_exact(num_groups: int, num_nodes: int) -> bool:
    """Whether every packing is tried, even where no two nodes are equal."""
    return _num_packings(num_groups, num_nodes) <= MOST_PACKINGS


@inner
def _node_time(work: FloatArray, members: IntArray, nodes: Nodes, layer: int, node: int) -> float:
    """Time of a node that holds these groups of work [L, G, size]: its load or largest replica."""
    size, load, largest = work.shape[2], 0.0, 0.0
    inside = np.empty((1, len(members) * size))
    for place in range(len(members)):
        for expert in range(size):
            inside[0, place * size + expert] = work[layer, members[place], expert]
    count = replicate(
        inside,
        np.zeros(inside.shape, dtype=np.int64),
        np.full((1, 1), nodes.num_slots[layer, node]),  # a slice would have another layout
        np.full((1, 1), nodes.num_ranks[layer, node]),
        np.ones(inside.shape, dtype=np.int64),
    )
    for place in range(inside.shape[1]):  # numba compiles a loop sooner than sum() and max()
        load += inside[0, place]
        largest = max(largest, inside[0, place] / count[0, place])
    time: float = max(load / nodes.speed[node], largest / nodes.fastest[node])
    return time


@kernel
def _best_packings(
    work: FloatArray, nodes: Nodes, sets: IntArray, choices: IntArray, alike: bool
) -> IntArray:
    """[L, G] by trying every packing; each set of groups is timed once for each kind of node."""
    num_layers, num_groups, _ = work.shape
    num_nodes = len(nodes.speed)
    node_of_group = np.empty((num_layers, num_groups), dtype=np.int64)
    time = np.empty((num_nodes, len(sets)))
    for layer in range(num_layers):
        for node in range(num_nodes):
            for number in range(len(sets)):
                if alike and node:
                    time[node, number] = time[0, number]
                else:
                    time[node, number] = _node_time(work, sets[number], nodes, layer, node)
        best, best_time = 0, np.inf
        for packing in range(len(choices)):
            slowest = 0.0
            for node in range(num_nodes):
                slowest = max(slowest, time[node, choices[packing, node]])
            if slowest < best_time:
                best, best_time = packing, slowest
        for node in range(num_nodes):
            for group in sets[choices[best, node]]:
                node_of_group[layer, group] = node
    return node_of_group


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
        # Among equal nodes, the next node takes the lowest free group: no symmetric packings.
        for members in combinations(free, each):
            if alike and members[0] != free[0]:
                break
            rest = tuple(group for group in free if group not in members)
            for others in fill(rest):
                yield (number[members], *others)

    choices = np.array(list(fill(tuple(range(num_groups)))), dtype=np.int64)
    return np.array(sets, dtype=np.int64), choices


@kernel
def _pack_and_swap(work: FloatArray, load: FloatArray, order: IntArray, nodes: Nodes) -> IntArray:
    """[L, G] where there are too many packings to try them all; groups by load, and in order."""
    num_layers, num_groups, _ = work.shape
    num_nodes = len(nodes.speed)
    each = num_groups // num_nodes
    node_of_group = np.empty((num_layers, num_groups), dtype=np.int64)
    members = np.empty((num_nodes, each), dtype=np.int64)
    time = np.empty(num_nodes)
    for layer in range(num_layers):
        _assign_heaviest_first(load[layer], order[layer], nodes.speed, members)
        for node in range(num_nodes):
            time[node] = _node_time(work, members[node], nodes, layer, node)
        while _swap_groups(work, nodes, layer, members, time):
            pass
        for node in range(num_nodes):
            for group in members[node]:
                node_of_group[layer, group] = node
    return node_of_group


@inner
def _assign_heaviest_first(
    load: FloatArray, order: IntArray, speed: FloatArray, members: IntArray
) -> None:
    """Fill ``members`` [N, G / N]: the heaviest group to the node that then ends earliest."""
    taken, used = np.zeros(len(speed)), np.zeros(len(speed), dtype=np.int64)
    for group in order:
        best, best_time = -1, np.inf
        for node in range(len(speed)):
            time = (taken[node] + load[group]) / speed[node]
            if used[node] < members.shape[1] and time < best_time:
                best, best_time = node, time
        members[best, used[best]] = group
        taken[best] += load[group]
        used[best] += 1


@inner
def _swap_groups(
    work: FloatArray, nodes: Nodes, layer: int, members: IntArray, time: FloatArray
) -> bool:
    """Make the best swap of a group of the slowest node; False if none makes it faster."""
    slow = int(np.argmax(time))
    best, best_node, best_member, best_other = time[slow] * (1 - 1e-9), -1, -1, -1
    for node in range(len(time)):
        if node == slow:
            continue
        for member in range(members.shape[1]):
            for other in range(members.shape[1]):
                _exchange(members, slow, member, node, other)
                slower = max(
                    _node_time(work, members[slow], nodes, layer, slow),
                    _node_time(work, members[node], nodes, layer, node),
                )
                _exchange(members, slow, member, node, other)
                if slower < best:
                    best, best_node, best_member, best_other = slower, node, member, other
    if best_node < 0:
        return False
    _exchange(members, slow, best_member, best_node, best_other)
    for node in (slow, best_node):
        time[node] = _node_time(work, members[node], nodes, layer, node)
    return True


@inner
def _exchange(members: IntArray, one: int, member: int, node: int, other: int) -> None:
    """Exchange a group of one node and a group of another."""
    members[one, member], members[node, other] = members[node, other], members[one, member]
