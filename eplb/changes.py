"""The kinds of change that the local search tries, compiled, and what each would bring.

What a change brings is summed over windows. Where the hot rank is the busiest, only ranks that
get busier by the change are looked at: when several ranks are equally busy, relieving one of them
is progress, although the maximum stays for now. In all other windows the maximum counts.

Shapes:  T windows, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.jit import jit
from eplb.kernels import Bonds, Demand, FloatArray, IntArray, Ranks
from eplb.layer import Layer, replica_time

# slot, the expert it gets, another slot, the expert that one gets; -1 for no slot and for empty
Change = tuple[int, int, int, int]

FREE = 0.25  # moves that an undone move counts as, so that free changes are still ranked


class Search(NamedTuple):
    """Everything that a look at a change needs."""

    layer: Layer
    demand: Demand
    ranks: Ranks
    bonds: Bonds
    number: int  # of the layer
    is_bound: bool  # whether bonds say more than that every expert has a slot
    thrifty: bool  # gain is weighed by moves
    fee: NDArray[np.float32]  # [R, E] moves that an arrival counts as; empty when moves are free
    homes: IntArray  # [R] how many experts are free to arrive, or there already


class Windows(NamedTuple):
    """The part of a layer that differs by window: passed alone, since a call copies arguments."""

    each: FloatArray  # [E, T]
    time: FloatArray  # [R, T]
    top: IntArray  # [T, 3]
    counts: FloatArray  # [T]
    order: IntArray  # [T] those in which the hot rank is the busiest first
    num_hot: int


class Outline(NamedTuple):
    """Sums over the windows in which one rank, the hot one, is the busiest.

    They bound what a change can gain, cheaply; with one window they are the gain itself.
    """

    hot: int
    windows: IntArray  # [T] those windows first
    num_hot: int
    each: FloatArray  # [E] time of a replica
    relief: FloatArray  # [E] what one replica more takes off each of the others
    gap: FloatArray  # [R] how much less busy the others are
    least: FloatArray  # [R] moves that any arrival there counts as at least


@jit
def outline(search: Search, hot: int) -> Outline:
    """Sum up the windows in which ``hot`` is the busiest rank."""
    layer, demand = search.layer, search.demand
    num_windows, num_experts = len(layer.rate), len(layer.replicas)
    windows = np.empty(num_windows, dtype=np.int64)
    num_hot, num_cold = 0, 0
    for window in range(num_windows):
        if layer.top[window, 0] == hot:
            windows[num_hot] = window
            num_hot += 1
        else:
            num_cold += 1
            windows[num_windows - num_cold] = window
    each, relief, gap = np.zeros(num_experts), np.zeros(num_experts), np.zeros(len(layer.holds))
    for window in windows[:num_hot]:
        weight = layer.counts[window]
        for expert in range(num_experts):
            time = weight * layer.each[expert, window]
            each[expert] += time
            if len(demand.curve_tokens) == 0:
                relief[expert] += time / (layer.replicas[expert] + 1)
            elif layer.holds[hot, expert]:
                more = replica_time(layer, demand, expert, window, layer.replicas[expert] + 1)
                relief[expert] += time - weight * more
        for rank in range(len(gap)):
            gap[rank] += weight * (layer.time[hot, window] - layer.time[rank, window])
    return Outline(hot, windows, num_hot, each, relief, gap, _least_moves(search))


@jit
def _least_moves(search: Search) -> FloatArray:
    """[R] FREE where an expert may come back to, else 1."""
    ranks = search.ranks
    least = np.ones(len(ranks.zone))
    if search.thrifty:
        for rank in range(len(ranks.zone)):
            at_home = 0
            for expert in search.layer.held[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
                at_home += expert >= 0 and search.fee[rank, expert] == 0
            if at_home < search.homes[rank]:
                least[rank] = FREE
    return least


@jit
def may_leave(search: Search, expert: int, rank: int, to: int) -> bool:
    """Whether an expert may go from a rank to rank ``to`` (-1: nowhere) with its bonds kept.

    Where they are not kept to begin with, nothing may get worse.
    """
    bonds = search.bonds
    if bonds.pinned[search.number, rank, expert]:
        return False
    domains, is_safe = standing(search, expert, -1, -1)
    domains_then, is_safe_then = standing(search, expert, rank, to)
    needed = min(bonds.spread[search.number, expert], domains)
    return domains_then >= needed and (is_safe_then or not is_safe)


@jit
def standing(search: Search, expert: int, without: int, plus: int) -> tuple[int, bool]:
    """In how many failure domains an expert is, and whether a rank that is ready has it."""
    bonds, layer = search.bonds, search.layer
    domains, is_safe = 0, False
    if plus >= 0:
        domains, is_safe = 1, bonds.ready[plus]
    holders = layer.holders[expert, : layer.replicas[expert]]
    for place in range(len(holders)):
        if holders[place] == without:
            continue
        is_safe = is_safe or bonds.ready[holders[place]]
        domain = bonds.domain[holders[place]]
        is_new = plus < 0 or bonds.domain[plus] != domain
        for before in range(place):
            if holders[before] != without and bonds.domain[holders[before]] == domain:
                is_new = False
        domains += is_new
    return domains, is_safe


@jit
def best_swap(search: Search, bound: Outline, score: float) -> tuple[float, Change]:
    """The best trade between a slot of the hot rank and a slot of any other, above ``score``."""
    layer, ranks, hot, fee = search.layer, search.ranks, bound.hot, search.fee
    best = (-1, -1, -1, -1)
    slow, least = ranks.slowness[hot], FREE if search.thrifty else 1.0
    windows = Windows(layer.each, layer.time, layer.top, layer.counts, bound.windows, bound.num_hot)
    end = ranks.first_slot[hot] + ranks.room[search.number, hot]
    # The least busy rank first: what it gains lets most of the others be passed over.
    for turn in range(-1, len(ranks.zone)):
        rank = int(np.argmax(bound.gap)) if turn < 0 else turn
        slow_there, gap = ranks.slowness[rank], bound.gap[rank]
        # Of a gap between two ranks, a trade can close that much at best.
        if rank == hot or gap * slow <= score * bound.least[rank] * (slow + slow_there):
            continue
        stop = ranks.first_slot[rank] + ranks.room[search.number, rank]
        for slot in range(ranks.first_slot[hot], end):
            mine = layer.held[slot]
            if mine < 0 or ranks.zone[rank] != layer.zone_of_expert[mine]:
                continue
            there = fee[rank, mine] if search.thrifty else 0.0
            needed = score * max(there, least)
            if layer.holds[rank, mine] or bound.each[mine] * slow <= needed:
                continue
            for other in range(ranks.first_slot[rank], stop):
                theirs = layer.held[other]
                shift = bound.each[mine]
                if theirs >= 0:
                    shift -= bound.each[theirs]
                gain = min(shift * slow, gap - shift * slow_there)
                if gain <= needed:
                    continue
                moves = there
                if theirs >= 0:
                    if layer.holds[hot, theirs] or layer.zone_of_expert[theirs] != ranks.zone[hot]:
                        continue
                    moves += fee[hot, theirs] if search.thrifty else 0.0
                weight = max(moves, least)
                if gain <= score * weight:
                    continue
                if len(layer.rate) > 1:
                    shifts = (slow, slow_there)
                    gain = _swap_gain(windows, (hot, rank), (mine, theirs), shifts, score * weight)
                if gain <= score * weight:
                    continue
                if search.is_bound and not _may_swap(search, mine, hot, theirs, rank):
                    continue
                score = gain / weight
                needed = score * max(there, least)
                best = (slot, theirs, other, mine)
    return score, best


@jit
def _may_swap(search: Search, mine: int, hot: int, theirs: int, rank: int) -> bool:
    """Whether two experts, or one and an empty slot, may trade their ranks."""
    if not may_leave(search, mine, hot, rank):
        return False
    return theirs < 0 or may_leave(search, theirs, rank, hot)


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
