"""The kinds of change that the local search tries, compiled, and the gain of each.

A swap exchanges two slots. A copy puts another expert into a slot: the replica there is removed, so
the other replicas of its expert get busier, and those of the new expert less busy. A drop empties a
slot, which helps where a replica costs time of its own, as in small batches.

The gain of a change is summed over windows. Where the hot rank is the busiest, only ranks whose
load the change increases are compared: when several ranks are equally busy, relieving one of them
is progress although the maximum stays. In all other windows the maximum counts.

Shapes:  T windows, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.core.jit import NONE, FloatArray, IntArray, by_reference, inner
from eplb.search.layer import Layer, Search, may_move, move_cost, replica_time

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


@inner
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


@inner
def _least_moves(search: Search) -> FloatArray:
    """[R] FREE on a rank that can get back an expert which it held before, else 1."""
    resident = search.resident
    least = np.ones(len(search.layer.zone))
    if search.counts_moves:
        for rank in range(len(least)):
            if resident.kept[rank] < resident.count[rank]:
                least[rank] = FREE
    return least


@inner
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


@inner
def _may_swap(search: Search, mine: int, hot: int, theirs: int, rank: int) -> bool:
    """Whether two experts, or one and an empty slot, may swap their ranks."""
    if not may_move(search, mine, hot, rank):
        return False
    return theirs < 0 or may_move(search, theirs, rank, hot)


@inner
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


@inner
def best_copy(search: Search, bound: Outline, score: float) -> tuple[float, Change]:
    """The best new replica above ``score``: of an expert of the hot rank, or in place of one."""
    layer, hot, each = search.layer, bound.hot, bound.each
    held, holds, slowness = layer.held, layer.holds, layer.slowness
    replicas, zone_of_expert, rank_of_slot = (
        layer.replicas,
        layer.zone_of_expert,
        layer.rank_of_slot,
    )
    head, following = layer.head, layer.following
    first_slot, room, relief, gaps = layer.first_slot, layer.room, bound.relief, bound.gap
    best = (-1, -1, -1, -1)
    slow = slowness[hot]
    is_linear = len(layer.curve_tokens) == 0
    num_experts = len(replicas)
    is_single = len(bound.windows) == 1 and is_linear
    on_hot = _worth_copying(layer, bound, score * FREE)
    most_relief, least_kept = 0.0, np.inf  # among these experts
    for expert in on_hot:
        most_relief = max(most_relief, relief[expert] * slow)
        least_kept = min(least_kept, each[expert] - relief[expert])
    coolest = int(np.argmax(gaps))  # first: with its gain as the limit most others are skipped
    for turn in range(-1, len(first_slot) - 1):
        rank = coolest if turn < 0 else turn
        if rank != hot and len(on_hot) == 0:
            continue
        least, slow_there = bound.least[rank], slowness[rank]
        if rank != hot:
            cheapest = 1.0
            if search.counts_moves:
                cheapest = np.inf
                for expert in on_hot:
                    cheapest = min(cheapest, move_cost(search.resident, rank, expert))
            if most_relief <= score * max(cheapest, least):
                continue
        for slot in range(first_slot[rank], first_slot[rank] + room[rank]):
            leaves = held[slot]
            if (leaves < 0 and rank == hot) or (leaves >= 0 and replicas[leaves] < 2):
                continue
            # The hot rank's load must fall; this rank's, where it rises, must stay below it.
            goes = each[leaves] if leaves >= 0 else 0.0
            slack = gaps[rank] + goes * slow_there
            most_gain = most_relief
            if goes < least_kept:
                most_gain = min(slack - least_kept * slow_there, most_relief)
            if rank != hot and most_gain <= score * least:
                continue
            if leaves >= 0 and not may_move(search, leaves, rank, NONE):
                continue
            # Written out here: a call would take longer than what it does.
            heavier, nearest, most = 0.0, -1, np.inf
            if leaves >= 0:
                if is_linear:
                    heavier = each[leaves] / (replicas[leaves] - 1)
                else:
                    heavier = _added_load(layer, bound, leaves)
                at = head[leaves]
                while at >= 0:
                    other = rank_of_slot[at]
                    left = gaps[other] - heavier * slowness[other]
                    if other != rank and other != hot and left < most:
                        nearest, most = other, left
                    at = following[at]
            on_both = leaves >= 0 and rank != hot and holds[leaves, hot]
            added = heavier * slow if on_both else 0.0
            # True where only an expert that also relieves that rank can gain.
            must_relieve = nearest >= 0 and most <= score * least
            number = num_experts if rank == hot else len(on_hot)
            if must_relieve:
                number = first_slot[nearest + 1] - first_slot[nearest]
            for place in range(number):
                if must_relieve:
                    expert = held[first_slot[nearest] + place]
                else:
                    expert = place if rank == hot else on_hot[place]
                if expert < 0 or (must_relieve and rank != hot and not holds[expert, hot]):
                    continue
                comes = each[expert] - relief[expert]
                gain = slack - comes * slow_there
                if rank != hot:
                    relieved = relief[expert] * slow - added
                    gain = min(gain, relieved) if goes < comes else relieved
                # Where the new replica relieves that rank too, its load rises by less.
                if gain > score * least and nearest >= 0 and not holds[expert, nearest]:
                    gain = min(gain, most)
                if gain <= score * least or holds[expert, rank]:
                    continue
                weight = least
                if search.counts_moves:
                    weight = max(move_cost(search.resident, rank, expert), least)
                if gain <= score * weight or zone_of_expert[expert] != layer.zone[rank]:
                    continue
                # With one window the bound is the gain, unless the nearest holder is relieved too.
                if not is_single or (nearest >= 0 and holds[expert, nearest]):
                    gain = _copy_gain(layer, bound, rank, leaves, expert, score * weight)
                if gain > score * weight:
                    score = gain / weight
                    best = (slot, expert, -1, -1)
    return score, best


@inner
def _worth_copying(layer: Layer, bound: Outline, needed: float) -> IntArray:
    """Experts of the hot rank of which one more replica reduces its load by more than needed."""
    first, end = layer.first_slot[bound.hot], layer.first_slot[bound.hot + 1]
    chosen = np.empty(end - first, dtype=np.int64)
    number = 0
    for expert in layer.held[first:end]:
        if expert >= 0 and bound.relief[expert] * layer.slowness[bound.hot] > needed:
            chosen[number] = expert
            number += 1
    return chosen[:number]


@inner
def _added_load(layer: Layer, bound: Outline, leaves: int) -> float:
    """Load that each other replica of ``leaves`` takes over when one is removed."""
    heavier = 0.0
    for place in range(bound.num_hot):
        window = bound.windows[place]
        then = replica_time(layer, leaves, window, layer.replicas[leaves] - 1)
        heavier += layer.counts[window] * (then - layer.each[leaves, window])
    return heavier


@inner
def best_drop(search: Search, bound: Outline, score: float) -> tuple[float, Change]:
    """The best slot of the hot rank to empty, above ``score``: this needs no move."""
    layer, hot = search.layer, bound.hot
    best = (-1, -1, -1, -1)
    for slot in range(layer.first_slot[hot], layer.first_slot[hot + 1]):
        leaves = layer.held[slot]
        if leaves < 0 or layer.replicas[leaves] < 2 or not may_move(search, leaves, hot, NONE):
            continue
        gain = _copy_gain(layer, bound, hot, leaves, NONE, score)
        if gain > score:
            score = gain
            best = (slot, -1, -1, -1)
    return score, best


@inner
def _copy_gain(
    layer: Layer, bound: Outline, rank: int, leaves: int, expert: int, needed: float
) -> float:
    """Sum over windows of how much the busiest time falls when ``expert`` replaces ``leaves``."""
    hot, gain, windows, num_hot = bound.hot, 0.0, bound.windows, bound.num_hot
    each, time, replicas, holds = layer.each, layer.time, layer.replicas, layer.holds
    slowness, top = layer.slowness, layer.top
    for step in range(len(windows)):
        window = windows[step]
        if step >= num_hot and gain <= needed:
            return gain
        share = lighter = gone = heavier = 0.0
        if expert >= 0:
            share = replica_time(layer, expert, window, replicas[expert] + 1)
            lighter = each[expert, window] - share
        if leaves >= 0:
            gone = each[leaves, window]
            heavier = replica_time(layer, leaves, window, replicas[leaves] - 1) - gone
        worst = -np.inf
        if rank == hot or share > gone or step >= num_hot:
            worst = time[rank, window] + (share - gone) * slowness[rank]
        if rank != hot:
            at = time[hot, window]
            if expert >= 0 and holds[expert, hot]:
                at -= lighter * slowness[hot]
            if leaves >= 0 and holds[leaves, hot]:
                at += heavier * slowness[hot]
            worst = max(worst, at)
        if leaves >= 0:
            slot = layer.head[leaves]
            while slot >= 0:
                other = layer.rank_of_slot[slot]
                slot = layer.following[slot]
                if other != rank and other != hot:
                    less = lighter if expert >= 0 and holds[expert, other] else 0.0
                    if heavier > less or step >= num_hot:
                        worst = max(worst, time[other, window] + (heavier - less) * slowness[other])
        if step >= num_hot:
            # In these windows another rank is the busiest, and stays so unless its load falls too.
            for place in range(3):
                other = top[window, place]
                if other < 0 or other in (hot, rank):
                    continue
                less = lighter if expert >= 0 and holds[expert, other] else 0.0
                worst = max(worst, time[other, window] - less * slowness[other])
                if less == 0.0:
                    break
        gain += layer.counts[window] * (time[top[window, 0], window] - worst)
    return gain
