"""The rules and constraints of a problem: checks a placement, and repairs one that violates them.

The constraints of a layer: every expert has a slot, on a rank that is ready, in enough failure
domains, and on the ranks it is pinned to. Each missing replica is added separately: by a swap with
another expert when the expert has a redundant replica, else in an empty slot or in place of another
redundant replica; each time where the ranks involved end least busy.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.constraints import ConstraintArrays, constraint_arrays
from eplb.core.demand import Demand
from eplb.core.jit import NONE, ZERO, BoolArray, IntArray, inner, kernel
from eplb.core.placement import Placement, check_fits, holders, undrained
from eplb.core.problem import Frame, Problem
from eplb.core.zones import Ranks, nodes_of_groups
from eplb.errors import PlacementError
from eplb.search.layer import (
    Layer,
    Search,
    coverage,
    empty_residents,
    may_move,
    open_layer,
    open_search,
    set_expert,
    swap_slots,
)

LAST_RESORT = 1e9  # more than any rank's time


def illegal_layers(problem: Problem, placement: Placement) -> BoolArray:
    """[L] layers with duplicates on one rank, or with experts in slots that may not be used."""
    held, first_slot = placement.slot_to_expert, problem.topology.first_slot
    return _illegal(held, first_slot, problem.room, problem.num_experts)


@kernel
def _illegal(
    held: NDArray[np.int32], first_slot: IntArray, room: IntArray, num_experts: int
) -> BoolArray:
    num_ranks = len(first_slot) - 1
    illegal = np.zeros(len(held), dtype=np.bool_)
    seen = np.full(num_experts, -1)  # layer and rank on which an expert was last seen
    for layer in range(len(held)):
        for rank in range(num_ranks):
            here = layer * num_ranks + rank
            for slot in range(first_slot[rank], first_slot[rank + 1]):
                expert = held[layer, slot]
                if expert >= 0:
                    is_beyond = slot - first_slot[rank] >= room[layer, rank]
                    illegal[layer] |= is_beyond or seen[expert] == here
                    seen[expert] = here
    return illegal


def first_violation(problem: Problem, placement: Placement) -> str | None:
    """Text of the first rule that a placement violates; None if it violates none."""
    violations = violations_of(problem, placement)
    return violations[min(violations)] if violations else None


def violations_of(problem: Problem, placement: Placement) -> dict[int, str]:
    """Text of a violation of each layer that violates a rule or constraint, by layer."""
    found = {int(layer): "" for layer in np.flatnonzero(illegal_layers(problem, placement))}
    if found:
        # The slow check, which gives the text of the violation.
        why = "a layer uses slots that the constraints exclude"
        if drained := undrained(placement, problem.topology):
            why = f"rank {drained[0]} is drained, and holds experts"
        try:
            check_fits(placement, problem.topology)
        except PlacementError as exc:
            why = str(exc)
        return dict.fromkeys(found, why)
    numbers = problem.layer_ids
    if problem.constraints.keep_groups:
        for layer, held in enumerate(placement.slot_to_expert):
            num_groups, num_experts = problem.num_groups, problem.num_experts
            if nodes_of_groups(held, problem.topology, num_groups, num_experts) is None:
                found[layer] = f"layer {numbers[layer]}: an expert group is on several nodes"
    if problem.constraints.binds_experts:
        found |= _broken_constraints(problem, placement)
    return found


def _broken_constraints(problem: Problem, placement: Placement) -> dict[int, str]:
    numbers, constraints = problem.layer_ids, problem.frame.constraints
    holds = holders(placement, problem.topology)
    domains = np.zeros(constraints.spread.shape, dtype=np.int64)
    for domain in np.unique(constraints.domain):
        domains += holds[:, constraints.domain == domain].any(axis=1)
    found = {}
    for layer, expert in np.argwhere(domains < constraints.spread).tolist():
        found[layer] = (
            f"layer {numbers[layer]}: expert {expert} is in {domains[layer, expert]} failure "
            f"domains, expected {constraints.spread[layer, expert]}"
        )
    for layer, expert in np.argwhere(~holds[:, constraints.ready].any(axis=1)).tolist():
        found[layer] = f"layer {numbers[layer]}: expert {expert} is only on ranks that are joining"
    for layer, rank, expert in np.argwhere(constraints.pinned & ~holds).tolist():
        found[layer] = (
            f"layer {numbers[layer]}: expert {expert} is pinned to rank {rank}, "
            "which does not hold it"
        )
    return found


def repaired(problem: Problem, frame: Frame, base: IntArray) -> IntArray:
    """[L, S] ``base`` made legal: every expert has a slot, and constraints are met."""
    held = base.copy()
    clear_illegal_slots(held, frame.zones.of_expert, frame.zones.ranks)
    present = np.zeros((len(held), problem.num_experts + 1), dtype=np.bool_)
    np.put_along_axis(present, held + 1, True, axis=1)
    if problem.constraints.binds_experts or not present[:, 1:].all():
        enforce(problem, frame, held, problem.total_demand)
    return held


def fill(
    problem: Problem, frame: Frame, held: IntArray, layers: NDArray[np.intp], most: int | None
) -> None:
    """Put replicas into the empty slots of some layers of ``held`` [L, S], in place.

    At most so many; None: all. The largest load per replica first, on the least busy rank of its
    zone that does not have it. Slots that no expert of their zone may use stay empty.
    """
    topology, zones, left = problem.topology, frame.zones, held.size if most is None else most
    rank, speed = topology.rank_of_slot, topology.rank_speed
    is_usable = np.arange(held.shape[1]) - topology.first_slot[rank] < zones.ranks.room[:, rank]
    load = problem.total / np.maximum(problem.total.mean(axis=1, keepdims=True), 1e-300)
    for layer in layers[((held < 0) & is_usable)[layers].any(axis=1)]:
        row = held[layer]
        used = row >= 0
        holds = np.zeros((topology.num_ranks, problem.num_experts), dtype=np.bool_)
        holds[rank[used], row[used]] = True
        count = np.maximum(holds.sum(axis=0), 1)
        each = load[layer] / count
        time = holds @ each / speed
        free = np.bincount(rank[~used & is_usable[layer]], minlength=topology.num_ranks)
        while left > 0 and (free > 0).any():
            may_hold = (zones.ranks.zone[:, None] == zones.of_expert[layer]) & ~holds
            may_hold &= (free > 0)[:, None]
            open_to = may_hold.any(axis=0)
            if not open_to.any():
                break
            expert = int(np.argmax(np.where(open_to, each, -1.0)))
            to = int(np.argmin(np.where(may_hold[:, expert], time, np.inf)))
            row[np.flatnonzero((row < 0) & is_usable[layer] & (rank == to))[0]] = expert
            free[to] -= 1
            left -= 1
            holds[to, expert] = True
            count[expert] += 1
            each[expert] = load[layer, expert] / count[expert]
            time = holds @ each / speed


def enforce(problem: Problem, frame: Frame, held: IntArray, demand: Demand) -> None:
    """Repair ``held`` [L, S] in place where it violates constraints.

    Args:
        problem: its constraints.
        frame: zones, and slots that may be used.
        held: as ``clear_illegal_slots`` leaves it.
        demand: loads, by which the least busy ranks are chosen.

    Raises:
        PlacementError: no placement was found that meets all constraints.
    """
    constraints = frame.constraints
    if not len(constraints.spread):
        constraints = constraint_arrays(
            problem.constraints, problem.topology, problem.total, frame.zones, every=True
        )
    # Heaviest first, while most slots are open. Outside the kernel: numba compiles a sort slowly.
    order = np.argsort(-demand.tokens.sum(axis=2), axis=1, kind="stable")
    failed = _enforce(demand, held, frame.zones.ranks, constraints, order)
    for layer in np.flatnonzero(failed >= 0)[:1]:
        raise PlacementError(
            f"layer {problem.layer_ids[layer]}: no slot for expert {failed[layer]} "
            "meets all constraints, expected fewer constraints or more slots"
        )


@kernel
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


@kernel
def _enforce(
    demand: Demand, held: IntArray, ranks: Ranks, constraints: ConstraintArrays, order: IntArray
) -> IntArray:
    """[L] an expert whose constraints could not be met, else -1; tried in ``order`` [L, E]."""
    failed = np.full(len(held), -1, dtype=np.int64)
    wanted = np.empty(len(ranks.zone), dtype=np.bool_)
    no_residents = empty_residents(ZERO, ZERO, ZERO, 0.0)
    for number in range(len(held)):
        layer = open_layer(demand, held, constraints.zone_of_expert, ranks, number)
        search = open_search(layer, constraints, number, no_residents)
        for place in range(order.shape[1]):
            expert = order[number, place]
            while failed[number] < 0 and _violates(search, expert, wanted):
                if not _repair(search, expert, wanted):
                    failed[number] = expert
    return failed


@inner
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


@inner
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
            if time + LAST_RESORT < best_time and (
                other < 0 or may_move(search, other, rank, NONE)
            ):
                best, best_time, best_own = slot, time + LAST_RESORT, NONE
            if time < best_time:  # what follows takes long, and is for few of the slots
                own = _own_to_swap(search, expert, rank, other)
                if own >= 0:
                    best, best_time, best_own = slot, time, own
    if best < 0:
        return _displace(search, expert, wanted)
    if best_own >= 0:
        swap_slots(layer, best_own, best)
    else:
        set_expert(layer, best, expert)
    return True


@inner
def _time_with(layer: Layer, rank: int, expert: int, other: int) -> float:
    """Time of a rank if ``expert`` were there in place of ``other``."""
    mean = 0.0
    for window in range(len(layer.weight)):
        load = layer.each[expert, window]
        if other >= 0:
            load -= layer.each[other, window]
        mean += layer.weight[window] * (layer.time[rank, window] + load * layer.slowness[rank])
    return mean


@inner
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


@inner
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
