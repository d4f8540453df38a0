"""One layer while it is evened out under an engine's rule, compiled: loads as they really are.

Shapes:  T windows, E experts, S slots, R ranks, M most replicas of an expert.
"""

from __future__ import annotations

from eplb.core.jit import by_reference, jit
from eplb.core.kernels import BoolArray, FloatArray, IntArray
from eplb.dispatch_rules.draws import Sources, Words, draw_layer, lay_out, share_out


class Dispatched:
    """A layer's replicas, what each gets, and what that makes of the ranks."""

    work: FloatArray  # [E, T] in fair ranks' loads
    weight: FloatArray  # [T]
    slowness: FloatArray  # [R]
    zone_of_expert: IntArray  # [E] -1: it stays where it is
    zone: IntArray  # [R] -1: nothing comes or goes
    home: BoolArray  # [R, E] where the base has each expert; no ranks when moves are free
    rank: IntArray  # [S]
    held: IntArray  # [S]
    slots: IntArray  # [E, M] of each expert, in order
    count: IntArray  # [E]
    drawn: IntArray  # [E, R + 1] see ``draw_layer``
    share: FloatArray  # [E, M]
    time: FloatArray  # [R, T]


new_dispatched = by_reference(Dispatched)


@jit
def retrace(layer: Dispatched, sources: Sources, words: Words, at: int) -> int:
    """Fill in all that follows from ``held``; the word that the next layer starts with."""
    slots, count = lay_out(layer.held, len(layer.count))
    for expert in range(len(count)):
        layer.count[expert] = count[expert]
        for place in range(slots.shape[1]):
            layer.slots[expert, place] = slots[expert, place]
    at = draw_layer(layer.slots, layer.count, sources, words, at, layer.drawn)
    layer.time[:] = 0.0
    for expert in range(len(count)):
        share_out(
            layer.slots[expert], count[expert], layer.drawn[expert], sources, layer.share[expert]
        )
        add_load(layer, layer.time, expert, 1.0)
    return at


@jit
def add_load(layer: Dispatched, time: FloatArray, expert: int, sign: float) -> None:
    """Add what an expert's replicas take of the ranks' time, or take it away."""
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
    """Which of its expert's replicas a slot holds."""
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
