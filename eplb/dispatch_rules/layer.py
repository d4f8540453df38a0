"""One layer under search by an engine's rule, compiled: the effective loads of ranks.

Shapes:  T windows, E experts, S slots, R ranks, M most replicas of an expert.
"""

from __future__ import annotations

from eplb.core.jit import by_reference, jit
from eplb.core.kernels import BoolArray, FloatArray, IntArray
from eplb.dispatch_rules.engine_draws import Sources, Words, draw_layer, fill_shares, replica_slots


class Dispatched:
    """A layer's replicas, their effective shares, and the times of ranks that follow."""

    work: FloatArray  # [E, T] in units of the mean rank load
    weight: FloatArray  # [T]
    slowness: FloatArray  # [R]
    zone_of_expert: IntArray  # [E] -1: it may not move
    zone: IntArray  # [R] -1: the rank may not change
    resident: BoolArray  # [R, E] experts of each rank in the base; 0 ranks when moves are free
    rank: IntArray  # [S]
    held: IntArray  # [S]
    slots: IntArray  # [E, M] of each expert, in order
    count: IntArray  # [E]
    drawn: IntArray  # [E, R + 1] see ``draw_layer``
    share: FloatArray  # [E, M]
    time: FloatArray  # [R, T]


new_dispatched = by_reference(Dispatched)


@jit
def recompute(layer: Dispatched, sources: Sources, words: Words, at: int) -> int:
    """Compute counts, draws, shares and times from ``held``; the next layer's first word."""
    slots, count = replica_slots(layer.held, len(layer.count))
    for expert in range(len(count)):
        layer.count[expert] = count[expert]
        for place in range(slots.shape[1]):
            layer.slots[expert, place] = slots[expert, place]
    at = draw_layer(layer.slots, layer.count, sources, words, at, layer.drawn)
    layer.time[:] = 0.0
    for expert in range(len(count)):
        fill_shares(
            layer.slots[expert], count[expert], layer.drawn[expert], sources, layer.share[expert]
        )
        add_load(layer, layer.time, expert, 1.0)
    return at


@jit
def add_load(layer: Dispatched, time: FloatArray, expert: int, sign: float) -> None:
    """Add the time of an expert's replicas to the ranks' times; a sign of -1 subtracts it."""
    for place in range(layer.count[expert]):
        rank = layer.rank[layer.slots[expert, place]]
        part = sign * layer.share[expert, place] * layer.slowness[rank]
        for window in range(len(layer.weight)):
            time[rank, window] += part * layer.work[expert, window]


@jit
def score_of_time(layer: Dispatched, time: FloatArray) -> float:
    """Mean over windows of the busiest rank's time [R, T]."""
    score = 0.0
    for window in range(len(layer.weight)):
        most = 0.0
        for rank in range(len(time)):
            most = max(most, time[rank, window])
        score += layer.weight[window] * most
    return score


@jit
def spread_of_time(layer: Dispatched, time: FloatArray) -> float:
    """Mean over windows of the ranks' squared times [R, T]."""
    spread = 0.0
    for rank in range(len(time)):
        for window in range(len(layer.weight)):
            spread += layer.weight[window] * time[rank, window] * time[rank, window]
    return spread


@jit
def place_of(layer: Dispatched, slot: int) -> int:
    """Index of a slot among the replicas of its expert."""
    expert = layer.held[slot]
    for place in range(layer.count[expert]):
        if layer.slots[expert, place] == slot:
            return place
    return -1


@jit
def on_rank(layer: Dispatched, expert: int, rank: int) -> bool:
    """Whether a rank holds an expert."""
    for place in range(layer.count[expert]):
        if layer.rank[layer.slots[expert, place]] == rank:
            return True
    return False
