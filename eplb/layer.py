"""One layer while it is searched, compiled: what the slots hold, and what that makes of each rank.

A rank's time is its load in units of a fair rank's, so the busiest rank's time is the imbalance.
The score of a layer is a mix of the mean of that over the windows and of its mean over the worst
of them, so a plan neither averages peaks away nor lives for one of them.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.jit import jit
from eplb.kernels import BoolArray, Demand, FloatArray, IntArray, Ranks, curve_at


class Layer(NamedTuple):
    """One layer while it is searched."""

    tokens: FloatArray  # [E, T] busy windows only
    rate: FloatArray  # [T]
    extra: FloatArray  # [T]
    weight: FloatArray  # [T]
    counts: FloatArray  # [T] weight with the worst windows counted more: see ``measure``
    zone_of_expert: IntArray  # [E]
    held: IntArray  # [S]
    replicas: IntArray  # [E] how many slots hold each expert
    holders: IntArray  # [E, most replicas] the ranks that do, the first ``replicas`` entries
    holds: BoolArray  # [R, E]
    each: FloatArray  # [E, T] time of one replica
    time: FloatArray  # [R, T]
    top: IntArray  # [T, 3] the three busiest ranks; -1 when there are fewer


@jit
def open_layer(
    demand: Demand, held: IntArray, zone_of_expert: IntArray, ranks: Ranks, number: int, most: int
) -> Layer:
    """One layer of ``held`` [L, S], ready to be changed in place.

    Args:
        demand: only its busy windows are taken over, which there must be.
        held: experts by slot.
        zone_of_expert: [L, E].
        ranks: where slots are.
        number: of the layer.
        most: replicas that an expert may come to have.
    """
    busy = (demand.rate[number] > 0) & (demand.weight > 0)
    weight = demand.weight[busy]
    num_windows, num_ranks = len(weight), len(ranks.zone)
    num_experts = zone_of_expert.shape[1]
    layer = Layer(
        demand.tokens[number] if busy.all() else _columns(demand.tokens[number], busy),
        demand.rate[number][busy],
        demand.extra[number][busy],
        weight / weight.sum(),
        np.zeros(num_windows),
        zone_of_expert[number],
        held[number],
        np.zeros(num_experts, dtype=np.int64),
        np.empty((num_experts, min(most, num_ranks)), dtype=np.int64),
        np.zeros((num_ranks, num_experts), dtype=np.bool_),
        np.zeros((num_experts, num_windows)),
        np.zeros((num_ranks, num_windows)),
        np.full((num_windows, 3), -1, dtype=np.int64),
    )
    _take_stock(layer, demand, ranks)
    return layer


@jit
def _columns(figures: FloatArray, chosen: BoolArray) -> FloatArray:
    """[E, number chosen] of figures [E, T]."""
    columns = np.empty((len(figures), chosen.sum()))
    place = 0
    for window in range(len(chosen)):
        if chosen[window]:
            columns[:, place] = figures[:, window]
            place += 1
    return columns


@jit
def replica_time(layer: Layer, demand: Demand, expert: int, window: int, replicas: int) -> float:
    """Time of one of so many replicas of an expert."""
    time: float = layer.rate[window] * curve_at(demand, layer.tokens[expert, window] / replicas)
    return time


@jit
def _take_stock(layer: Layer, demand: Demand, ranks: Ranks) -> None:
    """Derive counts, holders and times from ``held``."""
    for rank in range(len(ranks.zone)):
        for slot in range(ranks.first_slot[rank], ranks.first_slot[rank + 1]):
            expert = layer.held[slot]
            if expert >= 0:
                layer.holders[expert, layer.replicas[expert]] = rank
                layer.replicas[expert] += 1
                layer.holds[rank, expert] = True
    is_linear = len(demand.curve_tokens) == 0
    for expert in range(len(layer.replicas)):
        if not is_linear:
            _time_expert(layer, demand, expert)
            continue
        replicas = max(layer.replicas[expert], 1)
        for window in range(len(layer.rate)):  # a call for each expert would take longer than this
            tokens = layer.tokens[expert, window] / replicas
            layer.each[expert, window] = layer.rate[window] * tokens
    for rank in range(len(ranks.zone)):
        time_rank(layer, ranks, rank)


@jit
def _time_expert(layer: Layer, demand: Demand, expert: int) -> None:
    # While it is put elsewhere an expert may have no slot for a moment.
    replicas = max(layer.replicas[expert], 1)
    for window in range(len(layer.rate)):
        if len(demand.curve_tokens) == 0:
            tokens = layer.tokens[expert, window] / replicas
            layer.each[expert, window] = layer.rate[window] * tokens
        else:
            layer.each[expert, window] = replica_time(layer, demand, expert, window, replicas)


@jit
def time_rank(layer: Layer, ranks: Ranks, rank: int) -> None:
    """Sum a rank up afresh, so that no rounding errors pile up over many changes."""
    if ranks.zone[rank] < 0:
        return
    time = layer.time[rank]
    time[:] = layer.extra
    for slot in range(ranks.first_slot[rank], ranks.first_slot[rank + 1]):
        expert = layer.held[slot]
        if expert >= 0:
            for window in range(len(time)):
                time[window] += layer.each[expert, window]
    for window in range(len(time)):
        time[window] *= ranks.slowness[rank]


@jit
def rank_of(ranks: Ranks, slot: int) -> int:
    """The rank that a slot is on."""
    return int(np.searchsorted(ranks.first_slot, slot, side="right")) - 1


@jit
def put(layer: Layer, demand: Demand, ranks: Ranks, slot: int, expert: int) -> None:
    """Let a slot hold another expert, and keep counts, holders and times true."""
    rank = rank_of(ranks, slot)
    leaves = layer.held[slot]
    layer.held[slot] = expert
    if leaves >= 0:
        layer.replicas[leaves] -= 1
        layer.holds[rank, leaves] = False
        holders, last = layer.holders[leaves], layer.replicas[leaves]
        for place in range(last):
            if holders[place] == rank:
                holders[place] = holders[last]
        _time_expert(layer, demand, leaves)
        for place in range(last):
            time_rank(layer, ranks, int(holders[place]))
    if expert >= 0:
        layer.holders[expert, layer.replicas[expert]] = rank
        layer.replicas[expert] += 1
        layer.holds[rank, expert] = True
        _time_expert(layer, demand, expert)
        for place in range(layer.replicas[expert]):
            time_rank(layer, ranks, int(layer.holders[expert, place]))
    time_rank(layer, ranks, rank)


@jit
def trade(layer: Layer, ranks: Ranks, slot: int, other: int) -> None:
    """Let two slots of two ranks trade what they hold: no count changes, so only two times do."""
    one = rank_of(ranks, slot)
    two = rank_of(ranks, other)
    for expert, leaves, joins in ((layer.held[slot], one, two), (layer.held[other], two, one)):
        if expert >= 0:
            layer.holds[leaves, expert], layer.holds[joins, expert] = False, True
            holders = layer.holders[expert]
            for place in range(layer.replicas[expert]):
                if holders[place] == leaves:
                    holders[place] = joins
    layer.held[slot], layer.held[other] = layer.held[other], layer.held[slot]
    time_rank(layer, ranks, one)
    time_rank(layer, ranks, two)


@jit
def measure(layer: Layer, demand: Demand) -> float:
    """Find the busiest ranks, let the worst windows count more, and return the score."""
    layer.top[:] = -1
    for window in range(len(layer.rate)):
        first, second, third = -1.0, -1.0, -1.0
        top = layer.top[window]
        for rank in range(len(layer.time)):
            time = layer.time[rank, window]
            if time > first:
                third, second, first = second, first, time
                top[2], top[1], top[0] = top[1], top[0], rank
            elif time > second:
                third, second = second, time
                top[2], top[1] = top[1], rank
            elif time > third:
                third = time
                top[2] = rank
    layer.counts[:] = layer.weight * (1.0 - demand.tail)
    left = demand.tail_size if demand.tail > 0 else 0.0
    share = demand.tail / max(demand.tail_size, 1e-12)
    counted = np.zeros(len(layer.rate), dtype=np.bool_)
    while left > 1e-12:
        worst = -1
        for window in range(len(layer.rate)):
            higher = worst < 0 or (
                layer.time[layer.top[window, 0], window] > layer.time[layer.top[worst, 0], worst]
            )
            if not counted[window] and higher:
                worst = window
        if worst < 0:
            break
        counted[worst] = True
        taken = min(left, layer.weight[worst])
        layer.counts[worst] += share * taken
        left -= taken
    score = 0.0
    for window in range(len(layer.rate)):
        score += layer.counts[window] * layer.time[layer.top[window, 0], window]
    return score
