"""Packs expert groups onto nodes: equally many on each, with the least time of the slowest node.

The time of a node is the larger of its load and its largest replica: a hot expert on a node with
few spare slots costs more than its load. Where there are few packings all of them are tried; else
the heaviest groups are assigned first, and groups are swapped while the slowest node gains.

Shapes:  L MoE layers, G groups, N nodes, Q sets of groups, P packings.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from math import comb, factorial
from typing import NamedTuple

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import FloatArray, IntArray, replicate

MOST_PACKINGS = 5000  # above that they are not all tried


class Nodes(NamedTuple):
    """Slots, ranks and speed of each node."""

    num_slots: IntArray  # [L, N]
    num_ranks: IntArray  # [L, N] with at least one slot
    speed: FloatArray  # [N] of all ranks together
    fastest: FloatArray  # [N] rank


def pack_groups(work: FloatArray, nodes: Nodes) -> IntArray:
    """[L, G] the node of each group, for work [L, G, experts of a group]."""
    _, num_groups, _ = work.shape
    num_nodes = len(nodes.speed)
    each = num_groups // num_nodes
    alike = _nodes_are_alike(nodes)
    packings = factorial(num_groups) // factorial(each) ** num_nodes
    if packings // (factorial(num_nodes) if alike else 1) > MOST_PACKINGS:
        return _pack_and_swap(work, nodes)
    sets, choices = _packings(num_groups, num_nodes, alike)
    return _best_packings(work, nodes, sets, choices, alike)


def _nodes_are_alike(nodes: Nodes) -> bool:
    """Whether all nodes have the same slots, ranks and speed."""
    columns = (*nodes.num_slots, *nodes.num_ranks, nodes.speed, nodes.fastest)
    return all((figures == figures[0]).all() for figures in columns)


def is_exact(num_groups: int, num_nodes: int) -> bool:
    """Whether every packing is tried, even where no two nodes are equal."""
    packings = factorial(num_groups) // factorial(num_groups // num_nodes) ** num_nodes
    return bool(packings <= MOST_PACKINGS)


@jit
def _node_time(work: FloatArray, members: IntArray, nodes: Nodes, layer: int, node: int) -> float:
    """Time of a node that holds these groups of work [L, G, size]: its load or largest replica."""
    size = work.shape[2]
    inside = np.empty((1, len(members) * size))
    for place in range(len(members)):
        inside[0, place * size : (place + 1) * size] = work[layer, members[place]]
    count = replicate(
        inside,
        np.zeros(inside.shape, dtype=np.int64),
        np.full((1, 1), nodes.num_slots[layer, node]),  # a slice would have another layout
        np.full((1, 1), nodes.num_ranks[layer, node]),
        np.ones(inside.shape, dtype=np.int64),
    )
    largest = (inside / count).max() / nodes.fastest[node]
    time: float = max(inside.sum() / nodes.speed[node], largest)
    return time


@jit
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


@jit
def _pack_and_swap(work: FloatArray, nodes: Nodes) -> IntArray:
    """[L, G] where there are too many packings to try them all."""
    num_layers, num_groups, _ = work.shape
    num_nodes = len(nodes.speed)
    each = num_groups // num_nodes
    node_of_group = np.empty((num_layers, num_groups), dtype=np.int64)
    members = np.empty((num_nodes, each), dtype=np.int64)
    time = np.empty(num_nodes)
    for layer in range(num_layers):
        load = np.empty(num_groups)
        for group in range(num_groups):
            load[group] = work[layer, group].sum()
        _assign_heaviest_first(load, nodes.speed, members)
        for node in range(num_nodes):
            time[node] = _node_time(work, members[node], nodes, layer, node)
        while _swap_groups(work, nodes, layer, members, time):
            pass
        for node in range(num_nodes):
            for group in members[node]:
                node_of_group[layer, group] = node
    return node_of_group


@jit
def _assign_heaviest_first(load: FloatArray, speed: FloatArray, members: IntArray) -> None:
    """Fill ``members`` [N, G / N]: the heaviest group to the node that then ends earliest."""
    taken, used = np.zeros(len(speed)), np.zeros(len(speed), dtype=np.int64)
    for group in np.argsort(-load):
        best, best_time = -1, np.inf
        for node in range(len(speed)):
            time = (taken[node] + load[group]) / speed[node]
            if used[node] < members.shape[1] and time < best_time:
                best, best_time = node, time
        members[best, used[best]] = group
        taken[best] += load[group]
        used[best] += 1


@jit
def _swap_groups(
    work: FloatArray, nodes: Nodes, layer: int, members: IntArray, time: FloatArray
) -> bool:
    """Make the best swap of a group of the slowest node; False if none makes it faster."""
    slow = int(np.argmax(time))
    best, best_node, best_mine, best_theirs = time[slow] * (1 - 1e-9), -1, -1, -1
    for node in range(len(time)):
        if node == slow:
            continue
        for mine in range(members.shape[1]):
            for theirs in range(members.shape[1]):
                members[slow, mine], members[node, theirs] = (
                    members[node, theirs],
                    members[slow, mine],
                )
                slower = max(
                    _node_time(work, members[slow], nodes, layer, slow),
                    _node_time(work, members[node], nodes, layer, node),
                )
                members[slow, mine], members[node, theirs] = (
                    members[node, theirs],
                    members[slow, mine],
                )
                if slower < best:
                    best, best_node, best_mine, best_theirs = slower, node, mine, theirs
    if best_node < 0:
        return False
    members[slow, best_mine], members[best_node, best_theirs] = (
        members[best_node, best_theirs],
        members[slow, best_mine],
    )
    for node in (slow, best_node):
        time[node] = _node_time(work, members[node], nodes, layer, node)
    return True
