"""From any placement of a layer to one that keeps its bonds, compiled.

Bonds are what a layer must keep to: every expert has a slot, on a rank that is ready, in enough
failure domains, and on the ranks it is pinned to. What is missing is mended one replica at a time:
by a trade with another expert when the expert has a replica to spare, else in an empty slot or in
place of a redundant replica; each time where the ranks involved end least busy.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.changes import Search, may_leave, standing
from eplb.jit import jit
from eplb.kernels import Bonds, BoolArray, Demand, IntArray, Ranks
from eplb.layer import open_layer, put, rank_of, trade

LAST_RESORT = 1e9  # more than any rank's time


@jit
def clean(held: IntArray, zone_of_expert: IntArray, ranks: Ranks) -> None:
    """Empty, in place, all slots of ``held`` [L, S] that are dead, unusable, doubled or strayed."""
    for layer in range(len(held)):
        for rank in range(len(ranks.zone)):
            first, end = ranks.first_slot[rank], ranks.first_slot[rank + 1]
            for slot in range(first, end):
                expert = held[layer, slot]
                if expert < 0:
                    continue
                is_wrong = slot - first >= ranks.room[layer, rank]
                is_wrong = is_wrong or zone_of_expert[layer, expert] != ranks.zone[rank]
                for lower in range(first, slot):
                    is_wrong = is_wrong or held[layer, lower] == expert
                if is_wrong:
                    held[layer, slot] = -1


@jit
def enforce(demand: Demand, held: IntArray, ranks: Ranks, bonds: Bonds) -> IntArray:
    """Mend ``held`` [L, S] in place; [L] an expert whose bonds cannot be kept so, else -1.

    Args:
        demand: loads, to end with busy ranks relieved.
        held: as ``clean`` leaves it.
        ranks: where slots are.
        bonds: what to keep to; ``spread`` and ``pinned`` for every layer.
    """
    failed = np.full(len(held), -1, dtype=np.int64)
    nothing, nobody = np.zeros((0, 0), dtype=np.float32), np.zeros(0, dtype=np.int64)
    for number in range(len(held)):
        layer = open_layer(demand, held, bonds.zone_of_expert, ranks, number, len(ranks.zone))
        search = Search(layer, demand, ranks, bonds, number, True, False, nothing, nobody)
        # Heaviest first, while there is most choice.
        for expert in np.argsort(-layer.tokens.sum(axis=1)):
            while failed[number] < 0:
                is_well, wanted = _wanted(search, expert)
                if is_well:
                    break
                if not _mend(search, expert, wanted):
                    failed[number] = expert
    return failed


@jit
def _wanted(search: Search, expert: int) -> tuple[bool, BoolArray]:
    """Whether an expert's bonds are kept, and [R] ranks of which one should get a replica."""
    layer, bonds, ranks = search.layer, search.bonds, search.ranks
    wanted = ~layer.holds[:, expert] & bonds.pinned[search.number, :, expert]
    if wanted.any():
        return False, wanted
    domains, is_safe = standing(search, expert, -1, -1)
    if is_safe and domains >= bonds.spread[search.number, expert]:
        return True, wanted
    for rank in range(len(wanted)):
        wanted[rank] = ranks.zone[rank] == layer.zone_of_expert[expert]
        wanted[rank] &= not layer.holds[rank, expert]
        if not is_safe:
            wanted[rank] &= bonds.ready[rank]
            continue
        for place in range(layer.replicas[expert]):
            if bonds.domain[layer.holders[expert, place]] == bonds.domain[rank]:
                wanted[rank] = False
    return False, wanted


@jit
def _mend(search: Search, expert: int, wanted: BoolArray) -> bool:
    """Give one of these ranks a replica; False if no way is found."""
    layer, ranks = search.layer, search.ranks
    weight = layer.weight
    best, best_time, best_own = -1, np.inf, -1
    for rank in range(len(wanted)):
        if not wanted[rank]:
            continue
        first = ranks.first_slot[rank]
        for slot in range(first, first + ranks.room[search.number, rank]):
            other = layer.held[slot]
            time = 0.0
            for window in range(len(weight)):
                load = layer.each[expert, window]
                if other >= 0:
                    load -= layer.each[other, window]
                load = layer.time[rank, window] + load * ranks.slowness[rank]
                time += weight[window] * load
            # Replacing a replica changes the counts that balance rests on, so trades come first.
            may_go = other < 0 or may_leave(search, other, rank, -1)
            if may_go and time + LAST_RESORT < best_time:
                best, best_time, best_own = slot, time + LAST_RESORT, -1
            own = _own_to_trade(search, expert, rank, other)
            if own >= 0 and time < best_time:
                best, best_time, best_own = slot, time, own
    if best < 0:
        return _make_way(search, expert, wanted)
    if best_own >= 0:
        trade(layer, ranks, best_own, best)
    else:
        put(layer, search.demand, ranks, best, expert)
    return True


@jit
def _make_way(search: Search, expert: int, wanted: BoolArray) -> bool:
    """Send an expert that may not just leave from a wanted rank to a third one, and take its slot.

    On the third rank it takes an empty slot or a redundant replica's.
    """
    layer, ranks = search.layer, search.ranks
    for slot in range(len(layer.held)):
        rank, other = rank_of(ranks, slot), layer.held[slot]
        is_usable = slot - ranks.first_slot[rank] < ranks.room[search.number, rank]
        if not wanted[rank] or not is_usable or other < 0:
            continue
        for third in range(len(layer.held)):
            there, redundant = rank_of(ranks, third), layer.held[third]
            if there == rank or layer.holds[there, other] or redundant == expert:
                continue
            if third - ranks.first_slot[there] >= ranks.room[search.number, there]:
                continue
            if ranks.zone[there] != layer.zone_of_expert[other]:
                continue
            if redundant >= 0 and not may_leave(search, redundant, there, -1):
                continue
            if may_leave(search, other, rank, there):
                put(layer, search.demand, ranks, third, other)
                put(layer, search.demand, ranks, slot, expert)
                return True
    return False


@jit
def _own_to_trade(search: Search, expert: int, rank: int, other: int) -> int:
    """A slot of ``expert`` that may trade with ``other`` on a rank and so mends, else -1."""
    layer, ranks = search.layer, search.ranks
    is_pin = search.bonds.pinned[search.number, rank, expert]
    domains, is_safe = standing(search, expert, -1, -1)
    for place in range(layer.replicas[expert]):
        holder = layer.holders[expert, place]
        if not may_leave(search, expert, holder, rank):
            continue
        domains_then, is_safe_then = standing(search, expert, holder, rank)
        if not is_pin and domains_then <= domains and (is_safe or not is_safe_then):
            continue
        if other >= 0:
            if layer.holds[holder, other] or layer.zone_of_expert[other] != ranks.zone[holder]:
                continue
            if not may_leave(search, other, rank, holder):
                continue
        for slot in range(ranks.first_slot[holder], ranks.first_slot[holder + 1]):
            if layer.held[slot] == expert:
                return slot
    return -1
