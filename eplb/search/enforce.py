"""Repairs a placement that violates constraints, compiled.

The constraints of a layer: every expert has a slot, on a rank that is ready, in enough failure
domains, and on the ranks it is pinned to. Each missing replica is added separately: by a swap with
another expert when the expert has a redundant replica, else in an empty slot or in place of another
redundant replica; each time where the ranks involved end least busy.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import NONE, BoolArray, ConstraintArrays, Demand, IntArray, Ranks
from eplb.search.constrained import Search, coverage, may_move, search_without_move_costs
from eplb.search.layer import Layer, open_layer, set_expert, swap_slots

LAST_RESORT = 1e9  # more than any rank's time


@jit
def clear_illegal_slots(held: IntArray, zone_of_expert: IntArray, ranks: Ranks) -> None:
    """Empty the slots of ``held`` [L, S] that violate a rule, in place.

    Those are slots of dead ranks, unusable slots, duplicates on one rank, and experts outside their
    zone.
    """
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


def enforce(
    demand: Demand, held: IntArray, ranks: Ranks, constraints: ConstraintArrays
) -> IntArray:
    """Repair ``held`` [L, S] in place; [L] an expert whose constraints could not be met, else -1.

    Args:
        demand: loads, by which the least busy ranks are chosen.
        held: as ``clear_illegal_slots`` leaves it.
        ranks: where slots are.
        constraints: with ``spread`` and ``pinned`` for every layer.
    """
    # Heaviest first, while most slots are open. Outside the kernel: numba compiles a sort slowly.
    order = np.argsort(-demand.tokens.sum(axis=2), axis=1, kind="stable")
    return _enforce(demand, held, ranks, constraints, order)


@jit
def _enforce(
    demand: Demand, held: IntArray, ranks: Ranks, constraints: ConstraintArrays, order: IntArray
) -> IntArray:
    failed = np.full(len(held), -1, dtype=np.int64)
    wanted = np.empty(len(ranks.zone), dtype=np.bool_)
    for number in range(len(held)):
        layer = open_layer(demand, held, constraints.zone_of_expert, ranks, number)
        search = search_without_move_costs(layer, constraints, number)
        for place in range(order.shape[1]):
            expert = order[number, place]
            while failed[number] < 0 and _violates(search, expert, wanted):
                if not _repair(search, expert, wanted):
                    failed[number] = expert
    return failed


@jit
def _violates(search: Search, expert: int, wanted: BoolArray) -> bool:
    """Whether an expert violates constraints; fills in [R] ranks of which one should get it."""
    layer, domain = search.layer, search.domain
    holds, is_missed = layer.holds, False
    for rank in range(len(wanted)):
        wanted[rank] = search.pinned[search.number, rank, expert] and not holds[expert, rank]
        is_missed = is_missed or wanted[rank]
    if is_missed:
        return True
    domains, is_safe = coverage(search, expert, NONE, NONE)
    if is_safe and domains >= search.spread[search.number, expert]:
        return False
    for rank in range(len(wanted)):
        fits = layer.zone[rank] == layer.zone_of_expert[expert] and not holds[expert, rank]
        if not is_safe:
            wanted[rank] = fits and search.ready[rank]
            continue
        slot = layer.head[expert]
        while slot >= 0:
            if domain[layer.rank_of_slot[slot]] == domain[rank]:
                fits = False
            slot = layer.following[slot]
        wanted[rank] = fits
    return True


@jit
def _repair(search: Search, expert: int, wanted: BoolArray) -> bool:
    """Add a replica on one of these ranks; False if no slot is found."""
    layer = search.layer
    best, best_time, best_own = NONE, np.inf, NONE
    for rank in range(len(wanted)):
        if not wanted[rank]:
            continue
        first = layer.first_slot[rank]
        for slot in range(first, first + layer.room[rank]):
            other = layer.held[slot]
            time = _time_with(layer, rank, expert, other)
            # Replacing a replica changes replica counts, and with them the balance: swaps first.
            may_go = other < 0 or may_move(search, other, rank, NONE)
            if may_go and time + LAST_RESORT < best_time:
                best, best_time, best_own = slot, time + LAST_RESORT, NONE
            own = _own_to_swap(search, expert, rank, other)
            if own >= 0 and time < best_time:
                best, best_time, best_own = slot, time, own
    if best < 0:
        return _displace(search, expert, wanted)
    if best_own >= 0:
        swap_slots(layer, best_own, best)
    else:
        set_expert(layer, best, expert)
    return True


@jit
def _time_with(layer: Layer, rank: int, expert: int, other: int) -> float:
    """Time of a rank if ``expert`` were there in place of ``other``."""
    mean = 0.0
    for window in range(len(layer.weight)):
        load = layer.each[expert, window]
        if other >= 0:
            load -= layer.each[other, window]
        mean += layer.weight[window] * (layer.time[rank, window] + load * layer.slowness[rank])
    return mean


@jit
def _displace(search: Search, expert: int, wanted: BoolArray) -> bool:
    """Move an expert that may not be removed from a wanted rank to a third one, and use its slot.

    On the third rank it goes into an empty slot or replaces a redundant replica.
    """
    layer = search.layer
    rank_of_slot, first_slot, room = layer.rank_of_slot, layer.first_slot, layer.room
    for slot in range(len(layer.held)):
        rank, other = rank_of_slot[slot], layer.held[slot]
        if not wanted[rank] or slot - first_slot[rank] >= room[rank] or other < 0:
            continue
        for third in range(len(layer.held)):
            there, redundant = rank_of_slot[third], layer.held[third]
            if there == rank or layer.holds[other, there] or redundant == expert:
                continue
            if third - first_slot[there] >= room[there]:
                continue
            if layer.zone[there] != layer.zone_of_expert[other]:
                continue
            if redundant >= 0 and not may_move(search, redundant, there, NONE):
                continue
            if may_move(search, other, rank, there):
                set_expert(layer, third, other)
                set_expert(layer, slot, expert)
                return True
    return False


@jit
def _own_to_swap(search: Search, expert: int, rank: int, other: int) -> int:
    """A slot of ``expert`` whose swap with ``other`` on a rank repairs the constraint, else -1."""
    layer = search.layer
    is_pin = search.pinned[search.number, rank, expert]
    domains, is_safe = coverage(search, expert, NONE, NONE)
    following = layer.head[expert]
    while following >= 0:
        slot, following = following, layer.following[following]
        holder = layer.rank_of_slot[slot]
        if not may_move(search, expert, holder, rank):
            continue
        domains_then, is_safe_then = coverage(search, expert, holder, rank)
        if not is_pin and domains_then <= domains and (is_safe or not is_safe_then):
            continue
        if other >= 0:
            if layer.holds[other, holder] or layer.zone_of_expert[other] != layer.zone[holder]:
                continue
            if not may_move(search, other, rank, holder):
                continue
        return int(slot)
    return -1
