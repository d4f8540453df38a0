"""The kinds of change that the local search tries, compiled, and the gain of each.

The gain of a change is summed over windows. Where the hot rank is the busiest, only ranks whose
load the change increases are compared: when several ranks are equally busy, relieving one of them
is progress although the maximum stays. In all other windows the maximum counts.

Shapes:  T windows, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.core.jit import by_reference, jit
from eplb.core.kernels import FloatArray, IntArray
from eplb.search.constrained import Search, may_move, move_cost
from eplb.search.layer import replica_time

# slot, the expert it gets, another slot, the expert that one gets; -1 for no slot and for empty
Change = tuple[int, int, int, int]

FREE = 0.25  # moves that undoing a move counts as, so that changes without moves are still ranked


class Windows(NamedTuple):
    """The arrays of a layer that differ by window: passed alone, since a call copies arguments."""

    each: FloatArray  # [E, T]
    time: FloatArray  # [R, T]
    top: IntArray  # [T, 3]
    counts: FloatArray  # [T]
    order: IntArray  # [T] those in which the hot rank is the busiest first
    num_hot: int


class Outline:
    """Sums over the windows in which one rank, the hot one, is the busiest.

    They are a cheap upper bound of a change's gain; with one window they are the gain itself.
    """

    hot: int
    windows: IntArray  # [T] those windows first
    num_hot: int
    each: FloatArray  # [E] time of a replica
    relief: FloatArray  # [E] load that one more replica removes from each of the others
    gap: FloatArray  # [R] time of the hot rank minus that of each rank
    least: FloatArray  # [R] moves that any new expert on a rank counts as at least


new_outline = by_reference(Outline)


@jit
def outline(search: Search, hot: int) -> Outline:
    """Sum up the windows in which ``hot`` is the busiest rank."""
    layer = search.layer
    each, time, replicas = layer.each, layer.time, layer.replicas
    num_experts, num_windows = each.shape
    num_ranks = len(time)
    is_linear = len(layer.curve_tokens) == 0
    windows = np.empty(num_windows, dtype=np.int64)
    num_hot, num_cold = 0, 0
    for window in range(num_windows):
        if layer.top[window, 0] == hot:
            windows[num_hot] = window
            num_hot += 1
        else:
            num_cold += 1
            windows[num_windows - num_cold] = window
    summed, relief, gap = np.zeros(num_experts), np.zeros(num_experts), np.zeros(num_ranks)
    for place in range(num_hot):
        window = windows[place]
        weight = layer.counts[window]
        for expert in range(num_experts):
            spent = weight * each[expert, window]
            summed[expert] += spent
            if is_linear:
                relief[expert] += spent / (replicas[expert] + 1)
            elif layer.holds[expert, hot]:
                more = replica_time(layer, expert, window, replicas[expert] + 1)
                relief[expert] += spent - weight * more
        for rank in range(num_ranks):
            gap[rank] += weight * (time[hot, window] - time[rank, window])
    return new_outline(hot, windows, num_hot, summed, relief, gap, _least_moves(search))


@jit
def _least_moves(search: Search) -> FloatArray:
    """[R] FREE on a rank that can get back an expert which it held before, else 1."""
    resident = search.resident
    least = np.ones(len(search.layer.zone))
    if search.counts_moves:
        for rank in range(len(least)):
            if resident.kept[rank] < resident.count[rank]:
                least[rank] = FREE
    return least


@jit
def best_swap(search: Search, bound: Outline, score: float) -> tuple[float, Change]:
    """The best swap between a slot of the hot rank and a slot of any other, above ``score``."""
    layer, hot, resident, counts_moves = (
        search.layer,
        bound.hot,
        search.resident,
        search.counts_moves,
    )
    held, holds, zone_of_expert, zone = layer.held, layer.holds, layer.zone_of_expert, layer.zone
    each, gaps, leasts = bound.each, bound.gap, bound.least
    first_slot, slowness, room = layer.first_slot, layer.slowness, layer.room
    best = (-1, -1, -1, -1)
    slow, least = slowness[hot], FREE if counts_moves else 1.0
    windows = Windows(layer.each, layer.time, layer.top, layer.counts, bound.windows, bound.num_hot)
    nearest = 0  # the least busy rank first: with its gain as the limit most others are skipped
    for rank in range(1, len(zone)):
        if gaps[rank] > gaps[nearest]:
            nearest = rank
    for turn in range(-1, len(zone)):
        rank = nearest if turn < 0 else turn
        slow_there, gap = slowness[rank], gaps[rank]
        # Upper bound of what a swap can gain from the gap between two ranks.
        if rank == hot or gap * slow <= score * leasts[rank] * (slow + slow_there):
            continue
        for slot in range(first_slot[hot], first_slot[hot] + room[hot]):
            mine = held[slot]
            if mine < 0 or zone[rank] != zone_of_expert[mine]:
                continue
            there = move_cost(resident, rank, mine) if counts_moves else 0.0
            needed = score * max(there, least)
            if holds[mine, rank] or each[mine] * slow <= needed:
                continue
            for other in range(first_slot[rank], first_slot[rank] + room[rank]):
                theirs = held[other]
                shift = each[mine]
                if theirs >= 0:
                    shift -= each[theirs]
                gain = min(shift * slow, gap - shift * slow_there)
                if gain <= needed:
                    continue
                moves = there
                if theirs >= 0:
                    if holds[theirs, hot] or zone_of_expert[theirs] != zone[hot]:
                        continue
                    moves += move_cost(resident, hot, theirs) if counts_moves else 0.0
                weight = max(moves, least)
                if gain <= score * weight:
                    continue
                if len(windows.order) > 1:
                    shifts = (slow, slow_there)
                    gain = _swap_gain(windows, (hot, rank), (mine, theirs), shifts, score * weight)
                if gain <= score * weight or not _may_swap(search, mine, hot, theirs, rank):
                    continue
                score = gain / weight
                needed = score * max(there, least)
                best = (slot, theirs, other, mine)
    return score, best


@jit
def _may_swap(search: Search, mine: int, hot: int, theirs: int, rank: int) -> bool:
    """Whether two experts, or one and an empty slot, may swap their ranks."""
    if not may_move(search, mine, hot, rank):
        return False
    return theirs < 0 or may_move(search, theirs, rank, hot)


@jit
def _swap_gain(
    windows: Windows,
    ranks: tuple[int, int],
    experts: tuple[int, int],
    slowness: tuple[float, float],
    needed: float,
) -> float:
    """Sum over windows of how much the busiest time falls; stops early below ``needed``."""
    (hot, rank), (mine, theirs), (slow, slow_there) = ranks, experts, slowness
    gain = 0.0
    for place in range(len(windows.order)):
        window = windows.order[place]
        if place >= windows.num_hot and gain <= needed:
            return gain
        shift = windows.each[mine, window]
        if theirs >= 0:
            shift -= windows.each[theirs, window]
        worst = max(
            windows.time[hot, window] - shift * slow,
            windows.time[rank, window] + shift * slow_there,
        )
        top = windows.top[window]
        now = windows.time[top[0], window]
        if place >= windows.num_hot:
            for third in top:
                if third >= 0 and third != hot and third != rank:
                    worst = max(worst, windows.time[third, window])
                    break
        gain += windows.counts[window] * (now - worst)
    return gain
