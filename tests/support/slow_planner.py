"""Plain Python versions of the compiled kernels, one layer at a time; tests compare the two.

Shapes:  E experts, S slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.search.changes import Change


def replicate(work: Sequence[float], num_slots: int, most: int) -> list[int]:
    """Replica counts: each spare slot to the largest load per replica, lower number at a tie."""
    count = [1] * len(work)
    for _ in range(num_slots - len(work)):
        open_to = [expert for expert in range(len(work)) if count[expert] < most]
        if not open_to:
            break
        hottest = max(open_to, key=lambda expert: (work[expert] / count[expert], -expert))
        count[hottest] += 1
    return count


def pack(
    work: Sequence[float],
    count: Sequence[int],
    slots_of_rank: Sequence[int],
    slowness: Sequence[float],
) -> list[list[int]]:
    """Experts of each rank: heaviest replica first, to the rank that then ends earliest."""
    each = [load / replicas for load, replicas in zip(work, count, strict=True)]
    held: list[list[int]] = [[] for _ in slots_of_rank]
    load = [0.0] * len(held)
    for expert in sorted(range(len(work)), key=lambda e: (-each[e], e)):
        for _ in range(count[expert]):
            open_ranks = [
                rank
                for rank, room in enumerate(slots_of_rank)
                if len(held[rank]) < room and expert not in held[rank]
            ]
            if not open_ranks:
                _swap_in(expert, each, held, load, slots_of_rank, slowness)
                continue
            rank = min(open_ranks, key=lambda r: ((load[r] + each[expert]) * slowness[r], r))
            held[rank].append(expert)
            load[rank] += each[expert]
    return held


def _swap_in(
    expert: int,
    each: Sequence[float],
    held: list[list[int]],
    load: list[float],
    slots_of_rank: Sequence[int],
    slowness: Sequence[float],
) -> None:
    """Another expert moves into a free slot, and ``expert`` takes its slot."""
    swaps = []
    for free, rank in product(range(len(held)), repeat=2):
        if len(held[free]) == slots_of_rank[free] or expert in held[rank]:
            continue
        for slot, other in enumerate(held[rank]):
            if other in held[free]:
                continue
            time = max(
                (load[free] + each[other]) * slowness[free],
                (load[rank] - each[other] + each[expert]) * slowness[rank],
            )
            swaps.append((time, free, rank, slot))
    if not swaps:
        return
    _, free, rank, slot = min(swaps)
    other = held[rank][slot]
    held[free].append(other)
    held[rank][slot] = expert
    load[free] += each[other]
    load[rank] += each[expert] - each[other]


def imbalance(held: Sequence[Sequence[int]], work: Sequence[float]) -> float:
    """Busiest over mean load of ranks of equal speed; -1 is an empty slot."""
    count = [sum(mine.count(expert) for mine in map(list, held)) for expert in range(len(work))]
    load = [sum(work[e] / count[e] for e in mine if e >= 0) for mine in held]
    return max(load) * len(load) / sum(load)


def changes(held: Sequence[Sequence[int]], num_experts: int) -> Iterator[tuple[Change, int]]:
    """Every legal swap between two ranks and every legal copy, with the moves that it takes.

    Slots are numbered rank by rank.
    """
    place = [(rank, index) for rank, mine in enumerate(held) for index in range(len(mine))]
    at = [held[rank][index] for rank, index in place]
    for first, second in product(range(len(at)), repeat=2):
        one, other = place[first][0], place[second][0]
        if one == other or at[first] < 0:
            continue
        if at[first] in held[other] or (at[second] >= 0 and at[second] in held[one]):
            continue
        yield (first, at[second], second, at[first]), 2 if at[second] >= 0 else 1
    for slot, expert in product(range(len(at)), range(num_experts)):
        goes = at[slot] < 0 or at.count(at[slot]) > 1
        if goes and expert not in held[place[slot][0]]:
            yield (slot, expert, -1, -1), 1


def changed(held: Sequence[Sequence[int]], change: Change) -> list[list[int]]:
    """The placement after a change."""
    after, first = [], 0
    for mine in held:
        row = list(mine)
        for slot, expert in (change[:2], change[2:]):
            if first <= slot < first + len(row):
                row[slot - first] = expert
        after.append(row)
        first += len(row)
    return after


def crossing(tokens: NDArray[np.int64], placement: Placement, topology: Topology) -> list[float]:
    """Part of each layer's tokens [T, L, E] that is served on another node than its source node.

    Mean over windows that are not idle, each by the tokens of all layers.
    Every node sends tokens in proportion to its live ranks, to each replica by the shares for that
    source node, or by the shares of all where there are none of its own.
    """
    live = [
        int(node)
        for node, lives in zip(topology.node_of_rank, topology.alive, strict=True)
        if lives
    ]
    parts = []
    for layer in range(placement.num_layers):
        crossed, busy = 0.0, 0.0
        for window, weight in zip(tokens[:, layer].tolist(), tokens.sum(axis=(1, 2)), strict=True):
            busy += float(weight) * (sum(window) > 0)
            for slot, expert in enumerate(placement.slot_to_expert[layer].tolist()):
                if expert == EMPTY or not sum(window):
                    continue
                for source in live:
                    share = placement.slot_share[layer, slot]
                    if placement.source_share is not None:
                        share = placement.source_share[source, layer, slot]
                    if topology.node_of_slot[slot] != source:
                        part = window[expert] / sum(window) / len(live)
                        crossed += float(weight) * float(share) * part
        parts.append(crossed / max(busy, 1))
    return parts
