"""One layer while it is searched, compiled: what the slots hold, and what that makes of each rank.

A rank's time is its load in units of a fair rank's, so the busiest rank's time is the imbalance.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks, P points of a curve.
"""

from __future__ import annotations

import numpy as np

from eplb.core.jit import by_reference, jit
from eplb.core.kernels import BoolArray, Demand, FloatArray, IntArray, Ranks


class Layer:
    """One layer while it is searched."""

    tokens: FloatArray  # [E, T] busy windows only
    rate: FloatArray  # [T]
    extra: FloatArray  # [T]
    weight: FloatArray  # [T]
    counts: (
        FloatArray  # [T] weight with the worst windows counted more: see ``eplb/search/score.py``
    )
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
    """One layer of ``held`` [L, S], ready to be changed in place.

    Args:
        demand: only its busy windows are taken over, which there must be.
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
    take_stock(layer)
    return layer


@jit
def curve_at(layer: Layer, tokens: float) -> float:
    """Time of a replica that gets so many tokens a step: the curve, straight between its points.

    Fewer than one token a step means steps without any: those cost nothing, and tokens that come
    by chance leave a share of exp(-tokens) of the steps without one. Without a curve: the tokens.
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
def take_stock(layer: Layer) -> None:
    """Derive counts, holders and times from ``held``, when nothing is derived yet."""
    layer.head.fill(-1)
    for slot in range(len(layer.held)):
        if layer.held[slot] >= 0:
            _join(layer, slot, layer.held[slot])
    for expert in range(len(layer.replicas)):
        _time_expert(layer, expert)
    for rank in range(len(layer.zone)):
        time_rank(layer, rank)


@jit
def _time_expert(layer: Layer, expert: int) -> None:
    each, tokens, rate = layer.each, layer.tokens, layer.rate
    # While it is put elsewhere an expert may have no slot for a moment.
    replicas = max(layer.replicas[expert], 1)
    is_linear = len(layer.curve_tokens) == 0
    for window in range(len(rate)):
        if is_linear:
            each[expert, window] = rate[window] * (tokens[expert, window] / replicas)
        else:
            each[expert, window] = replica_time(layer, expert, window, replicas)


@jit
def time_rank(layer: Layer, rank: int) -> None:
    """Sum a rank up afresh, so that no rounding errors pile up over many changes."""
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
def _join(layer: Layer, slot: int, expert: int) -> None:
    """Let a slot hold an expert, and keep counts and holders true, but no times."""
    layer.following[slot] = layer.head[expert]
    layer.head[expert] = slot
    layer.replicas[expert] += 1
    layer.holds[expert, layer.rank_of_slot[slot]] = True
    layer.held[slot] = expert


@jit
def _leave(layer: Layer, slot: int) -> None:
    """Empty a slot in the same way."""
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
def _time_again(layer: Layer, expert: int) -> None:
    """Bring the times of an expert's replicas up to date, and of the ranks that hold them."""
    _time_expert(layer, expert)
    slot = layer.head[expert]
    while slot >= 0:
        time_rank(layer, layer.rank_of_slot[slot])
        slot = layer.following[slot]


@jit
def put(layer: Layer, slot: int, expert: int) -> None:
    """Let a slot hold another expert, and keep counts, holders and times true."""
    leaves = layer.held[slot]
    if leaves >= 0:
        _leave(layer, slot)
    if expert >= 0:
        _join(layer, slot, expert)
        _time_again(layer, expert)
    if leaves >= 0:
        _time_again(layer, leaves)
    time_rank(layer, layer.rank_of_slot[slot])


@jit
def trade(layer: Layer, slot: int, other: int) -> None:
    """Let two slots of two ranks trade what they hold: no count changes, so only two times do."""
    mine, theirs = layer.held[slot], layer.held[other]
    if mine >= 0:
        _leave(layer, slot)
    if theirs >= 0:
        _leave(layer, other)
        _join(layer, slot, theirs)
    if mine >= 0:
        _join(layer, other, mine)
    time_rank(layer, layer.rank_of_slot[slot])
    time_rank(layer, layer.rank_of_slot[other])


@jit
def restore(layer: Layer, wanted: IntArray) -> None:
    """Let the slots hold what they held once, [S], and keep counts, holders and times true.

    Only what differs is touched: a layer may be large, and few of its slots have changed.
    """
    held, rank_of_slot = layer.held, layer.rank_of_slot
    before = held.copy()
    for slot in range(len(held)):
        if before[slot] >= 0 and before[slot] != wanted[slot]:
            _leave(layer, slot)
    for slot in range(len(held)):
        if wanted[slot] >= 0 and before[slot] != wanted[slot]:
            _join(layer, slot, wanted[slot])
    for slot in range(len(held)):
        if before[slot] != wanted[slot]:
            if before[slot] >= 0:
                _time_again(layer, before[slot])
            if wanted[slot] >= 0:
                _time_again(layer, wanted[slot])
            time_rank(layer, rank_of_slot[slot])
