"""One layer under search, compiled: experts by slot, and the time of each rank that follows.

A rank's time is its load in units of a fair rank's, so the busiest rank's time is the imbalance.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks, P points of a curve.
"""

from __future__ import annotations

import numpy as np

from eplb.core.jit import by_reference, jit
from eplb.core.kernels import BoolArray, Demand, FloatArray, IntArray, Ranks


class Layer:
    """One layer under search."""

    tokens: FloatArray  # [E, T] busy windows only
    rate: FloatArray  # [T]
    extra: FloatArray  # [T]
    weight: FloatArray  # [T]
    counts: FloatArray  # [T] weight in the score, see ``eplb/search/score.py``
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


@jit
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


@jit
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


@jit
def replica_time(layer: Layer, expert: int, window: int, replicas: int) -> float:
    """Time of one of so many replicas of an expert."""
    time: float = layer.rate[window] * curve_at(layer, layer.tokens[expert, window] / replicas)
    return time


@jit
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


@jit
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


@jit
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


@jit
def _add_replica(layer: Layer, slot: int, expert: int) -> None:
    """Put an expert into an empty slot and update counts and holders, but not times."""
    layer.following[slot] = layer.head[expert]
    layer.head[expert] = slot
    layer.replicas[expert] += 1
    layer.holds[expert, layer.rank_of_slot[slot]] = True
    layer.held[slot] = expert


@jit
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


@jit
def _update_times(layer: Layer, expert: int) -> None:
    """Update the times of an expert's replicas and of the ranks that hold them."""
    _update_expert_time(layer, expert)
    slot = layer.head[expert]
    while slot >= 0:
        update_rank_time(layer, layer.rank_of_slot[slot])
        slot = layer.following[slot]


@jit
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


@jit
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


@jit
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
