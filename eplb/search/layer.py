"""One layer under search, compiled: experts by slot, and the times and the score that follow.

A rank's time is its load in units of a fair rank's, so the busiest rank's time is the imbalance.
The score is the mean of the busiest times over windows, in which the worst windows have extra
weight, so that a plan neither ignores peaks nor is fitted to one of them.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks, N nodes, P points of a curve.
"""

from __future__ import annotations

import numpy as np

from eplb.core.constraints import ConstraintArrays
from eplb.core.demand import Demand
from eplb.core.jit import NONE, BoolArray, FloatArray, IntArray, by_reference, inner
from eplb.core.zones import Ranks


class Layer:
    """One layer under search."""

    tokens: FloatArray  # [E, T] busy windows only
    rate: FloatArray  # [T]
    extra: FloatArray  # [T]
    weight: FloatArray  # [T]
    counts: FloatArray  # [T] weight in the score, see ``eplb/search/layer.py``
    tail: float
    tail_size: float
    curve_tokens: FloatArray  # [P]
    curve_time: FloatArray  # [P]
    zone_of_expert: IntArray  # [E]
    zone: IntArray  # [R]
    first_slot: IntArray  # [R + 1]
    slowness: FloatArray  # [R]
    room: IntArray  # [R]
    rank_of_slot: IntArray  # [S]
    held: IntArray  # [S]
    replicas: IntArray  # [E] how many slots hold each expert
    head: IntArray  # [E] one of those slots, else -1; the others follow in ``following``
    following: IntArray  # [S] another slot of the same expert, else -1
    holds: BoolArray  # [E, R]: the search looks at all ranks for one expert
    each: FloatArray  # [E, T] time of one replica
    time: FloatArray  # [R, T]
    top: IntArray  # [T, 3] the three busiest ranks; -1 when there are fewer


new_layer = by_reference(Layer)


@inner
def open_layer(
    demand: Demand, held: IntArray, zone_of_expert: IntArray, ranks: Ranks, number: int
) -> Layer:
    """One layer of ``held`` [L, S], to be changed in place.

    Args:
        demand: only its busy windows are copied; there must be at least one.
        held: experts by slot.
        zone_of_expert: [L, E].
        ranks: where slots are.
        number: of the layer.
    """
    num_experts, num_ranks, num_slots = zone_of_expert.shape[1], len(ranks.zone), held.shape[1]
    num_windows, together = 0, 0.0
    for window in range(len(demand.weight)):
        if demand.rate[number, window] > 0 and demand.weight[window] > 0:
            num_windows += 1
            together += demand.weight[window]
    tokens = np.empty((num_experts, num_windows))
    rate, extra, weight = np.empty(num_windows), np.empty(num_windows), np.empty(num_windows)
    place = 0
    for window in range(len(demand.weight)):
        if demand.rate[number, window] > 0 and demand.weight[window] > 0:
            rate[place] = demand.rate[number, window]
            extra[place] = demand.extra[number, window]
            weight[place] = demand.weight[window] / together
            for expert in range(num_experts):
                tokens[expert, place] = demand.tokens[number, expert, window]
            place += 1
    rank_of_slot = np.empty(num_slots, dtype=np.int64)
    for rank in range(num_ranks):
        for slot in range(ranks.first_slot[rank], ranks.first_slot[rank + 1]):
            rank_of_slot[slot] = rank
    layer = new_layer(
        tokens,
        rate,
        extra,
        weight,
        np.zeros(num_windows),
        demand.tail,
        demand.tail_size,
        demand.curve_tokens,
        demand.curve_time,
        zone_of_expert[number],
        ranks.zone,
        ranks.first_slot,
        ranks.slowness,
        ranks.room[number],
        rank_of_slot,
        held[number],
        np.zeros(num_experts, dtype=np.int64),
        np.empty(num_experts, dtype=np.int64),
        np.empty(num_slots, dtype=np.int64),
        np.zeros((num_experts, num_ranks), dtype=np.bool_),
        np.zeros((num_experts, num_windows)),
        np.zeros((num_ranks, num_windows)),
        np.full((num_windows, 3), -1, dtype=np.int64),
    )
    recount(layer)
    return layer


@inner
def curve_at(layer: Layer, tokens: float) -> float:
    """Time of a replica that gets so many tokens a step, interpolated on the curve.

    Fewer than one token a step means that some steps have none and cost nothing: with Poisson
    arrivals a share of exp(-tokens) of the steps. Without a curve the time is the tokens.
    """
    points, times = layer.curve_tokens, layer.curve_time
    if len(points) == 0:
        return tokens
    if tokens <= 0.0:
        return 0.0
    right = 1
    while right < len(points) - 1 and points[right] < tokens:
        right += 1
    at = max(tokens, points[0])
    slope = (times[right] - times[right - 1]) / (points[right] - points[right - 1])
    busy = times[right - 1] + slope * (at - points[right - 1])
    time: float = busy * (1.0 - np.exp(-tokens))
    return time


@inner
def replica_time(layer: Layer, expert: int, window: int, replicas: int) -> float:
    """Time of one of so many replicas of an expert."""
    time: float = layer.rate[window] * curve_at(layer, layer.tokens[expert, window] / replicas)
    return time


@inner
def recount(layer: Layer) -> None:
    """Compute counts, holders and times from ``held`` for the first time."""
    layer.head.fill(-1)
    for slot in range(len(layer.held)):
        if layer.held[slot] >= 0:
            _add_replica(layer, slot, layer.held[slot])
    for expert in range(len(layer.replicas)):
        _update_expert_time(layer, expert)
    for rank in range(len(layer.zone)):
        update_rank_time(layer, rank)


@inner
def _update_expert_time(layer: Layer, expert: int) -> None:
    each, tokens, rate = layer.each, layer.tokens, layer.rate
    # In the middle of a swap an expert may have no slot.
    replicas = max(layer.replicas[expert], 1)
    is_linear = len(layer.curve_tokens) == 0
    for window in range(len(rate)):
        if is_linear:
            each[expert, window] = rate[window] * (tokens[expert, window] / replicas)
        else:
            each[expert, window] = replica_time(layer, expert, window, replicas)


@inner
def update_rank_time(layer: Layer, rank: int) -> None:
    """Sum the time of a rank from its slots, so that rounding errors do not accumulate."""
    if layer.zone[rank] < 0:
        return
    held, each, times, extra = layer.held, layer.each, layer.time, layer.extra
    first, end, slow = layer.first_slot[rank], layer.first_slot[rank + 1], layer.slowness[rank]
    for window in range(len(extra)):
        time = extra[window]
        for slot in range(first, end):
            if held[slot] >= 0:
                time += each[held[slot], window]
        times[rank, window] = time * slow


@inner
def _add_replica(layer: Layer, slot: int, expert: int) -> None:
    """Put an expert into an empty slot and update counts and holders, but not times."""
    layer.following[slot] = layer.head[expert]
    layer.head[expert] = slot
    layer.replicas[expert] += 1
    layer.holds[expert, layer.rank_of_slot[slot]] = True
    layer.held[slot] = expert


@inner
def _remove_replica(layer: Layer, slot: int) -> None:
    """Empty a slot and update counts and holders, but not times."""
    following, expert = layer.following, layer.held[slot]
    layer.held[slot] = -1
    layer.replicas[expert] -= 1
    layer.holds[expert, layer.rank_of_slot[slot]] = False
    if layer.head[expert] == slot:
        layer.head[expert] = following[slot]
        return
    before = layer.head[expert]
    while following[before] != slot:
        before = following[before]
    following[before] = following[slot]


@inner
def _update_times(layer: Layer, expert: int) -> None:
    """Update the times of an expert's replicas and of the ranks that hold them."""
    _update_expert_time(layer, expert)
    slot = layer.head[expert]
    while slot >= 0:
        update_rank_time(layer, layer.rank_of_slot[slot])
        slot = layer.following[slot]


@inner
def set_expert(layer: Layer, slot: int, expert: int) -> None:
    """Put another expert into a slot, or none, and update counts, holders and times."""
    leaves = layer.held[slot]
    if leaves >= 0:
        _remove_replica(layer, slot)
    if expert >= 0:
        _add_replica(layer, slot, expert)
        _update_times(layer, expert)
    if leaves >= 0:
        _update_times(layer, leaves)
    update_rank_time(layer, layer.rank_of_slot[slot])


@inner
def swap_slots(layer: Layer, slot: int, other: int) -> None:
    """Swap the experts of two slots of two ranks: no count changes, so only two rank times do."""
    mine, theirs = layer.held[slot], layer.held[other]
    if mine >= 0:
        _remove_replica(layer, slot)
    if theirs >= 0:
        _remove_replica(layer, other)
        _add_replica(layer, slot, theirs)
    if mine >= 0:
        _add_replica(layer, other, mine)
    update_rank_time(layer, layer.rank_of_slot[slot])
    update_rank_time(layer, layer.rank_of_slot[other])


@inner
def restore(layer: Layer, wanted: IntArray) -> None:
    """Restore the experts of an earlier state [S], with counts, holders and times.

    Only slots that differ are changed: a layer may be large, and few of its slots have changed.
    """
    held, rank_of_slot = layer.held, layer.rank_of_slot
    before = held.copy()
    for slot in range(len(held)):
        if before[slot] >= 0 and before[slot] != wanted[slot]:
            _remove_replica(layer, slot)
    for slot in range(len(held)):
        if wanted[slot] >= 0 and before[slot] != wanted[slot]:
            _add_replica(layer, slot, wanted[slot])
    for slot in range(len(held)):
        if before[slot] != wanted[slot]:
            if before[slot] >= 0:
                _update_times(layer, before[slot])
            if wanted[slot] >= 0:
                _update_times(layer, wanted[slot])
            update_rank_time(layer, rank_of_slot[slot])


@inner
def measure(layer: Layer) -> float:
    """Find the busiest ranks, weigh the windows, and return the score."""
    times, top, counts, weight = layer.time, layer.top, layer.counts, layer.weight
    for window in range(len(weight)):
        first, second, third = -1.0, -1.0, -1.0
        at_first, at_second, at_third = -1, -1, -1
        for rank in range(len(times)):
            time = times[rank, window]
            if time > first:
                third, second, first = second, first, time
                at_third, at_second, at_first = at_second, at_first, rank
            elif time > second:
                third, second = second, time
                at_third, at_second = at_second, rank
            elif time > third:
                third, at_third = time, rank
        top[window, 0], top[window, 1], top[window, 2] = at_first, at_second, at_third
        counts[window] = weight[window] * (1.0 - layer.tail)
    if layer.tail > 0:
        _count_worst(layer)
    score = 0.0
    for window in range(len(weight)):
        score += counts[window] * times[top[window, 0], window]
    return score


@inner
def _count_worst(layer: Layer) -> None:
    """Add the tail's part of the score to the weights of the worst windows."""
    times, top, weight = layer.time, layer.top, layer.weight
    left, share = layer.tail_size, layer.tail / max(layer.tail_size, 1e-12)
    counted = np.zeros(len(weight), dtype=np.bool_)
    while left > 1e-12:
        worst, most = -1, -1.0
        for window in range(len(weight)):
            time = times[top[window, 0], window]
            if not counted[window] and time > most:
                worst, most = window, time
        if worst < 0:
            return
        counted[worst] = True
        taken = min(left, weight[worst])
        layer.counts[worst] += share * taken
        left -= taken


class ResidentExperts:
    """Experts of each rank in the serving placement; arrays of 0 ranks when moves are free."""

    on_rank: BoolArray  # [E, R] experts that a rank holds
    on_node: BoolArray  # [E, N] experts that a live rank of the node holds
    node: IntArray  # [R]
    count: IntArray  # [R] experts that a rank holds
    kept: IntArray  # [R] how many of these the layer under search still has there
    far_move_cost: float  # moves that one move from another node counts as


new_resident_experts = by_reference(ResidentExperts)


class Search:
    """A layer, its constraints and its move costs: what the evaluation of a change reads."""

    layer: Layer
    spread: IntArray  # [L or 0, E]: see ``ConstraintArrays``
    pinned: BoolArray  # [L or 0, R, E]
    domain: IntArray  # [R]
    ready: BoolArray  # [R]
    number: int  # the layer's
    is_constrained: bool  # whether there are constraints beyond a slot for every expert
    counts_moves: bool  # gain is divided by moves
    resident: ResidentExperts


new_search = by_reference(Search)


@inner
def empty_residents(
    num_ranks: int, num_experts: int, num_nodes: int, far_move_cost: float
) -> ResidentExperts:
    """Arrays without any expert, which ``fill_residents`` fills layer by layer."""
    return new_resident_experts(
        np.zeros((num_experts, num_ranks), dtype=np.bool_),
        np.zeros((num_experts, num_nodes), dtype=np.bool_),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        far_move_cost,
    )


@inner
def fill_residents(resident: ResidentExperts, held: IntArray, base: IntArray, ranks: Ranks) -> int:
    """Fill in the experts of ``base`` [S] by rank; return the moves from ``base`` to ``held``."""
    for rank in range(len(ranks.zone)):
        resident.count[rank], resident.node[rank] = 0, ranks.node[rank]
        for expert in base[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            if expert < 0:
                continue
            resident.count[rank] += not resident.on_rank[expert, rank]
            resident.on_rank[expert, rank] = True
            # A dead rank's weights cannot be read.
            if ranks.zone[rank] >= 0:
                resident.on_node[expert, ranks.node[rank]] = True
    moves = 0
    for rank in range(len(ranks.zone)):
        for expert in held[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            moves += expert >= 0 and not resident.on_rank[expert, rank]
    return moves


@inner
def clear_residents(resident: ResidentExperts, base: IntArray, ranks: Ranks) -> None:
    """Clear what ``fill_residents`` filled in."""
    for rank in range(len(ranks.zone)):
        for expert in base[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            if expert >= 0:
                resident.on_rank[expert, rank] = False
                resident.on_node[expert, ranks.node[rank]] = False


@inner
def move_cost(resident: ResidentExperts, rank: int, expert: int) -> float:
    """How many moves it counts as to bring an expert to a rank."""
    if resident.on_rank[expert, rank]:
        return 0.0
    return 1.0 if resident.on_node[expert, resident.node[rank]] else resident.far_move_cost


@inner
def open_search(
    layer: Layer, constraints: ConstraintArrays, number: int, resident: ResidentExperts
) -> Search:
    """A search in which new experts on a rank count as moves; none do with residents of 0 ranks."""
    return new_search(
        layer,
        constraints.spread,
        constraints.pinned,
        constraints.domain,
        constraints.ready,
        number,
        len(constraints.spread) > 0,
        len(resident.node) > 0,
        resident,
    )


@inner
def may_move(search: Search, expert: int, rank: int, to: int) -> bool:
    """Whether an expert may move from a rank to rank ``to`` (NONE: be removed) by its constraints.

    Where a constraint is violated already, the change must not make it worse.
    """
    if not search.is_constrained:
        return True
    if search.pinned[search.number, rank, expert]:
        return False
    domains, is_safe = coverage(search, expert, NONE, NONE)
    domains_then, is_safe_then = coverage(search, expert, rank, to)
    needed = min(search.spread[search.number, expert], domains)
    return domains_then >= needed and (is_safe_then or not is_safe)


@inner
def coverage(search: Search, expert: int, without: int, plus: int) -> tuple[int, bool]:
    """Number of failure domains that hold an expert, and whether a ready rank holds it."""
    layer, domain, ready = search.layer, search.domain, search.ready
    domains, is_safe = 0, False
    if plus >= 0:
        domains, is_safe = 1, ready[plus]
    slot = layer.head[expert]
    while slot >= 0:
        holder, later = layer.rank_of_slot[slot], layer.following[slot]
        slot = later
        if holder == without:
            continue
        is_safe = is_safe or ready[holder]
        is_new = plus < 0 or domain[plus] != domain[holder]
        while later >= 0:  # the last one of a domain counts
            other = layer.rank_of_slot[later]
            if other != without and domain[other] == domain[holder]:
                is_new = False
            later = layer.following[later]
        domains += is_new
    return domains, is_safe
