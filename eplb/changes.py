"""The two kinds of change that the local search tries, compiled, and what each would bring.

What a change brings is summed over windows. Where the hot rank is the busiest, only ranks that
change are looked at: when several ranks are equally busy, relieving one of them is progress,
although the maximum stays for now. In all other windows the maximum over all ranks counts.

Shapes:  T windows, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.jit import jit
from eplb.kernels import FloatArray, IntArray, Ranks

# slot, the expert it gets, another slot, the expert that one gets; -1 for no slot and for empty
Change = tuple[int, int, int, int]


class Layer(NamedTuple):
    """One layer while it is searched. Times are loads divided by the rank's speed."""

    work: FloatArray  # [T, E]
    zone_of_expert: IntArray  # [E]
    held: IntArray  # [S]
    replicas: IntArray  # [E] how many slots hold each expert
    each: FloatArray  # [T, E] work per replica
    holds: NDArray[np.bool_]  # [R, E]
    time: FloatArray  # [T, R]
    top: IntArray  # [T, 3] the three busiest ranks; -1 when there are fewer


class Outline(NamedTuple):
    """Sums over the windows in which one rank, the hot one, is the busiest.

    They bound what a change can gain, cheaply. Where the hot rank is the busiest in every window
    the bound is sharp: a change that cannot beat the best so far by it cannot beat it at all.
    """

    sharp: float  # 1.0 when it is, else 0.0: other windows may add to the gain
    each: FloatArray  # [E] work per replica
    time: FloatArray  # [R]


@jit
def outline(layer: Layer, hot: int) -> Outline:
    """Sum up the windows in which ``hot`` is the busiest rank."""
    each, time = np.zeros(len(layer.replicas)), np.zeros(len(layer.holds))
    num_hot = 0
    for window in range(len(layer.work)):
        if layer.top[window, 0] == hot:
            each += layer.each[window]
            time += layer.time[window]
            num_hot += 1
    return Outline(1.0 if num_hot == len(layer.work) else 0.0, each, time)


@jit
def best_swap(
    layer: Layer, ranks: Ranks, bound: Outline, hot: int, score: float
) -> tuple[float, Change]:
    """The best trade between a slot of the hot rank and a slot of any other, above ``score``."""
    best = (-1, -1, -1, -1)
    for slot in range(ranks.first_slot[hot], ranks.first_slot[hot + 1]):
        mine = layer.held[slot]
        if mine < 0:
            continue
        for rank in range(len(ranks.zone)):
            if ranks.zone[rank] != layer.zone_of_expert[mine] or layer.holds[rank, mine]:
                continue
            gap = bound.time[hot] - bound.time[rank]
            if gap <= bound.sharp * score:
                continue
            for other in range(ranks.first_slot[rank], ranks.first_slot[rank + 1]):
                theirs = layer.held[other]
                shift, moves = bound.each[mine], 1
                if theirs >= 0:
                    shift, moves = shift - bound.each[theirs], 2
                needed = bound.sharp * score * moves
                if shift * ranks.slowness[hot] <= needed:
                    continue
                if gap - shift * ranks.slowness[rank] <= needed:
                    continue
                if theirs >= 0 and layer.holds[hot, theirs]:
                    continue
                if theirs >= 0 and layer.zone_of_expert[theirs] != ranks.zone[hot]:
                    continue
                gain = _swap_gain(layer, ranks, hot, rank, mine, theirs)
                if gain > score * moves:
                    score = gain / moves
                    best = (slot, theirs, other, mine)
    return score, best


@jit
def _swap_gain(layer: Layer, ranks: Ranks, hot: int, rank: int, mine: int, theirs: int) -> float:
    """Sum over windows of how much the busiest time falls."""
    gain = 0.0
    for window in range(len(layer.work)):
        shift = layer.each[window, mine]
        if theirs >= 0:
            shift -= layer.each[window, theirs]
        worst = max(
            layer.time[window, hot] - shift * ranks.slowness[hot],
            layer.time[window, rank] + shift * ranks.slowness[rank],
        )
        top = layer.top[window]
        if top[0] != hot:
            for third in top:
                if third >= 0 and third != hot and third != rank:
                    worst = max(worst, layer.time[window, third])
                    break
        gain += layer.time[window, top[0]] - worst
    return gain


@jit
def best_copy(
    layer: Layer, ranks: Ranks, bound: Outline, hot: int, score: float
) -> tuple[float, Change]:
    """The best new replica above ``score``: of an expert of the hot rank, or in place of one."""
    best = (-1, -1, -1, -1)
    now = 0.0
    for window in range(len(layer.top)):
        now += layer.time[window, layer.top[window, 0]]
    share = bound.each * layer.replicas / (layer.replicas + 1)  # [E] with one replica more
    relief = (bound.each - share) * ranks.slowness[hot]
    everyone = np.arange(len(share))
    on_hot = everyone[layer.holds[hot] & (relief > bound.sharp * score)]
    for rank in range(len(ranks.zone)):
        candidates = everyone if rank == hot else on_hot
        gap = bound.time[hot] - bound.time[rank]
        for slot in range(ranks.first_slot[rank], ranks.first_slot[rank + 1]):
            leaves = layer.held[slot]
            if (leaves < 0 and rank == hot) or (leaves >= 0 and layer.replicas[leaves] < 2):
                continue
            gone = bound.each[leaves] if leaves >= 0 else 0.0
            for candidate in candidates:
                expert = int(candidate)
                # The hot rank must get lighter, and the other stay lighter than that one was.
                lighter = gap + (gone - share[expert]) * ranks.slowness[rank]
                if lighter <= bound.sharp * score or layer.holds[rank, expert]:
                    continue
                if layer.zone_of_expert[expert] != ranks.zone[rank]:
                    continue
                total = _busiest_after_copy(layer, ranks, hot, rank, leaves, expert, now - score)
                if now - total > score:
                    score = now - total
                    best = (slot, expert, -1, -1)
    return score, best


@jit
def _busiest_after_copy(
    layer: Layer, ranks: Ranks, hot: int, rank: int, leaves: int, expert: int, limit: float
) -> float:
    """Sum over windows of the busiest time; stops early once it reaches ``limit``."""
    total = 0.0
    for window in range(len(layer.work)):
        share = layer.work[window, expert] / (layer.replicas[expert] + 1)
        lighter = layer.each[window, expert] - share
        gone, heavier = 0.0, 0.0
        if leaves >= 0:
            gone = layer.each[window, leaves]
            heavier = layer.work[window, leaves] / (layer.replicas[leaves] - 1) - gone
        all_count = layer.top[window, 0] != hot
        worst = 0.0
        # The hot rank first: most candidates fail there, and then the others need no look.
        for turn in range(-1, len(ranks.zone)):
            at = hot if turn < 0 else turn
            load = 0.0
            if layer.holds[at, expert]:
                load -= lighter
            if at == rank:
                load += share - gone
            elif leaves >= 0 and layer.holds[at, leaves]:
                load += heavier
            if load != 0.0 or all_count or at == hot:
                worst = max(worst, layer.time[window, at] + load * ranks.slowness[at])
            if total + worst >= limit:
                return total + worst
        total += worst
    return total
