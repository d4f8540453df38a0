"""Heaviest first: replicas onto ranks, compiled.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.jit import by_reference, jit
from eplb.kernels import FloatArray, IntArray, Ranks, has


class Filling:
    """One layer while its ranks fill up."""

    held: IntArray  # [S]
    each: FloatArray  # [E] load of a replica
    zone: IntArray  # [R]
    first_slot: IntArray  # [R + 1]
    slowness: FloatArray  # [R]
    room: IntArray  # [R]
    used: IntArray  # [R] slots
    load: FloatArray  # [R]
    last: IntArray  # [R] a replica's expert: those of one expert are placed in a row
    heap: IntArray  # [R] ranks of a zone that have room, the least busy on top
    size: int  # of the heap
    taken: IntArray  # [R] ranks off the heap


new_filling = by_reference(Filling)


def pack(work: FloatArray, count: IntArray, zone_of_expert: IntArray, ranks: Ranks) -> IntArray:
    """[L, S] experts by slot: heaviest replica first, each to the rank that then ends earliest.

    Among ranks of one speed that is the least busy one; ties go to the lower number. No rank gets
    an expert twice. A replica that finds only ranks that hold its expert trades places with
    another; when that is impossible too, its slot stays empty.
    """
    each = work / count
    order = np.argsort(-each, axis=1, kind="stable")  # here, since numba compiles a sort slowly
    return _pack(each, order, count, zone_of_expert, ranks)


@jit
def _pack(
    each: FloatArray, order: IntArray, count: IntArray, zone_of_expert: IntArray, ranks: Ranks
) -> IntArray:
    num_layers, num_ranks, num_zones = len(order), len(ranks.zone), 0
    held = np.full((num_layers, ranks.first_slot[num_ranks]), -1, dtype=np.int64)
    is_even = True
    for rank in range(num_ranks):
        num_zones = max(num_zones, ranks.zone[rank] + 1)
        is_even = is_even and ranks.slowness[rank] == ranks.slowness[0]
    for layer in range(num_layers):
        filling = new_filling(
            held[layer],
            each[layer],
            ranks.zone,
            ranks.first_slot,
            ranks.slowness,
            ranks.room[layer],
            np.zeros(num_ranks, dtype=np.int64),
            np.zeros(num_ranks),
            np.full(num_ranks, -1, dtype=np.int64),
            np.empty(num_ranks, dtype=np.int64),
            0,
            np.empty(num_ranks, dtype=np.int64),
        )
        for zone in range(num_zones):
            _gather(filling, zone)
            for place in range(order.shape[1]):
                expert = order[layer, place]
                if zone_of_expert[layer, expert] != zone:
                    continue
                left = count[layer, expert]
                left -= _fill(filling, expert, left) if is_even else _scan(filling, expert, left)
                if left > 0:
                    for _ in range(left):
                        _trade(filling, expert, zone)
                    _gather(filling, zone)
    return held


@jit
def _gather(filling: Filling, zone: int) -> None:
    """Put the ranks of a zone that have room on the heap."""
    filling.size = 0
    for rank in range(len(filling.zone)):
        if filling.zone[rank] == zone and filling.used[rank] < filling.room[rank]:
            _push(filling, rank)


@jit
def _fill(filling: Filling, expert: int, count: int) -> int:
    """Place replicas on ranks of one speed: the least busy ones. How many found a place."""
    number = min(count, filling.size)
    for place in range(number):
        rank = _pop(filling)
        _place(filling, rank, expert)
        filling.taken[place] = rank
    # Only now: no rank may get a second one.
    for place in range(number):
        rank = filling.taken[place]
        if filling.used[rank] < filling.room[rank]:
            _push(filling, rank)
    return number


@jit
def _scan(filling: Filling, expert: int, count: int) -> int:
    """Place replicas on ranks of any speeds. How many found a place."""
    for number in range(count):
        best, best_time = -1, np.inf
        for place in range(filling.size):
            rank = filling.heap[place]
            if filling.used[rank] == filling.room[rank] or filling.last[rank] == expert:
                continue
            time = (filling.load[rank] + filling.each[expert]) * filling.slowness[rank]
            if time < best_time or (time == best_time and rank < best):
                best, best_time = rank, time
        if best < 0:
            return number
        _place(filling, best, expert)
    return count


@jit
def _place(filling: Filling, rank: int, expert: int) -> None:
    filling.held[filling.first_slot[rank] + filling.used[rank]] = expert
    filling.used[rank] += 1
    filling.load[rank] += filling.each[expert]
    filling.last[rank] = expert


@jit
def _push(filling: Filling, rank: int) -> None:
    heap, load, place = filling.heap, filling.load, filling.size
    filling.size = place + 1
    while place > 0:
        above = (place - 1) // 2
        other = heap[above]
        if load[other] < load[rank] or (load[other] == load[rank] and other < rank):
            break
        heap[place] = other
        place = above
    heap[place] = rank


@jit
def _pop(filling: Filling) -> int:
    """The least busy rank."""
    heap, load, size = filling.heap, filling.load, filling.size - 1
    filling.size = size
    least, rank, place = heap[0], heap[size], 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        one = heap[below]
        if below + 1 < size:
            two = heap[below + 1]
            if load[two] < load[one] or (load[two] == load[one] and two < one):
                below, one = below + 1, two
        if load[rank] < load[one] or (load[rank] == load[one] and rank < one):
            break
        heap[place] = one
        place = below
    heap[place] = rank
    return int(least)


@jit
def _trade(filling: Filling, expert: int, zone: int) -> None:
    """Move another replica into a free slot of a rank that has ``expert``, and take its place."""
    held, each, load, slowness = filling.held, filling.each, filling.load, filling.slowness
    used, first_slot, zones, last = filling.used, filling.first_slot, filling.zone, filling.last
    best_time, best_free, best_slot, best_rank = np.inf, -1, -1, -1
    for free in range(len(used)):
        end = first_slot[free] + used[free]
        if zones[free] != zone or used[free] >= filling.room[free]:
            continue
        for rank in range(len(used)):
            if zones[rank] != zone or last[rank] == expert:
                continue
            for slot in range(first_slot[rank], first_slot[rank] + used[rank]):
                other = held[slot]
                if has(held, first_slot[free], end, other):
                    continue
                time = max(
                    (load[free] + each[other]) * slowness[free],
                    (load[rank] - each[other] + each[expert]) * slowness[rank],
                )
                if time < best_time:
                    best_time, best_free, best_slot, best_rank = time, free, slot, rank
    if best_slot < 0:
        return
    other = held[best_slot]
    held[first_slot[best_free] + used[best_free]] = other
    held[best_slot] = expert
    used[best_free] += 1
    load[best_free] += each[other]
    load[best_rank] += each[expert] - each[other]
    last[best_rank] = expert
