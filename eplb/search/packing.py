"""Packs replicas onto ranks, heaviest first, compiled.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.jit import FloatArray, IntArray, by_reference, inner, kernel
from eplb.core.zones import Ranks


@inner
def has(held: IntArray, first: int, end: int, expert: int) -> bool:
    """Whether one of these slots holds the expert."""
    for slot in range(first, end):  # noqa: SIM110 (numba compiles a loop sooner than any())
        if held[slot] == expert:
            return True
    return False


class Filling:
    """One layer while its ranks are filled."""

    held: IntArray  # [S]
    each: FloatArray  # [E] load of a replica
    zone: IntArray  # [R]
    first_slot: IntArray  # [R + 1]
    slowness: FloatArray  # [R]
    room: IntArray  # [R]
    used: IntArray  # [R] slots
    load: FloatArray  # [R]
    last: IntArray  # [R] the expert placed last: replicas of one expert are placed consecutively
    ends: FloatArray  # [R + 1] load of ranks that may take the next replica, else infinite
    winner: IntArray  # a tree of matches between two ranks, its root at 1; see ``_decide``
    taken: IntArray  # [R] ranks that have replicas of the expert being placed


new_filling = by_reference(Filling)


def pack(work: FloatArray, count: IntArray, zone_of_expert: IntArray, ranks: Ranks) -> IntArray:
    """[L, S] experts by slot: heaviest replica first, each to the rank that then ends earliest.

    Among ranks of one speed that is the least busy one; at a tie the lower number. No rank gets an
    expert twice. When only ranks that hold the expert already have free slots, the replica is
    swapped with another one; when that is impossible too, its slot stays empty.
    """
    each = work / count
    order = _heaviest_first(each)
    return _pack(each, order, count, zone_of_expert, ranks)


def _heaviest_first(each: FloatArray) -> IntArray:
    """[L, E] experts by load, the lower number first at a tie; numba compiles a sort slowly."""
    lightest = -each
    order = np.argsort(lightest, axis=1)  # four times as fast as a stable sort
    lightest.sort(axis=1)
    tied = (lightest[:, 1:] == lightest[:, :-1]).any(axis=1)
    if tied.any():
        order[tied] = np.argsort(-each[tied], axis=1, kind="stable")
    return order


@kernel
def _pack(
    each: FloatArray, order: IntArray, count: IntArray, zone_of_expert: IntArray, ranks: Ranks
) -> IntArray:
    num_layers, num_ranks, num_zones, width = len(order), len(ranks.zone), 0, 1
    held = np.full((num_layers, ranks.first_slot[num_ranks]), -1, dtype=np.int64)
    is_even = True
    for rank in range(num_ranks):
        num_zones = max(num_zones, ranks.zone[rank] + 1)
        is_even = is_even and ranks.slowness[rank] == ranks.slowness[0]
    while width < num_ranks:
        width *= 2
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
            np.full(num_ranks + 1, np.inf),
            np.full(2 * width, num_ranks, dtype=np.int64),  # none: infinitely busy
            np.empty(num_ranks, dtype=np.int64),
        )
        for zone in range(num_zones):
            _enter(filling, zone)
            for place in range(order.shape[1]):
                expert = order[layer, place]
                if zone_of_expert[layer, expert] != zone:
                    continue
                left = count[layer, expert]
                left -= _fill(filling, expert, left) if is_even else _scan(filling, expert, left)
                if left > 0:
                    for _ in range(left):
                        _swap_in(filling, expert, zone)
                    _enter(filling, zone)
    return held


@inner
def _enter(filling: Filling, zone: int) -> None:
    """Start the tournament of a zone's ranks with free slots."""
    ends, winner = filling.ends, filling.winner
    width = len(winner) // 2
    for rank in range(len(filling.zone)):
        may = filling.zone[rank] == zone and filling.used[rank] < filling.room[rank]
        ends[rank] = filling.load[rank] if may else np.inf
        winner[width + rank] = rank
    for match in range(width - 1, 0, -1):
        _decide(winner, ends, match)


@inner
def _decide(winner: IntArray, ends: FloatArray, match: int) -> None:
    """Winner of a match: the less busy of two ranks; at a tie the first, which is the lower."""
    left, right = winner[2 * match], winner[2 * match + 1]
    winner[match] = left if ends[left] <= ends[right] else right


@inner
def _rematch(filling: Filling, rank: int, end: float) -> None:
    """Change the load of a rank in the tournament, and replay its matches."""
    ends, winner = filling.ends, filling.winner
    ends[rank] = end
    match = (len(winner) // 2 + rank) // 2
    while match > 0:
        _decide(winner, ends, match)
        match //= 2


@inner
def _place(filling: Filling, rank: int, expert: int) -> None:
    filling.held[filling.first_slot[rank] + filling.used[rank]] = expert
    filling.used[rank] += 1
    filling.load[rank] += filling.each[expert]
    filling.last[rank] = expert


@inner
def _end(filling: Filling, rank: int) -> float:
    is_full = filling.used[rank] == filling.room[rank]
    end: float = np.inf if is_full else filling.load[rank]
    return end


@inner
def _fill(filling: Filling, expert: int, count: int) -> int:
    """Place replicas on the least busy ranks, all of one speed; return how many were placed."""
    if count == 1:  # nearly all of them
        rank = filling.winner[1]
        if filling.ends[rank] == np.inf:
            return 0
        _place(filling, rank, expert)
        _rematch(filling, rank, _end(filling, rank))
        return 1
    placed = 0
    while placed < count and filling.ends[filling.winner[1]] < np.inf:
        rank = filling.winner[1]
        _place(filling, rank, expert)
        _rematch(filling, rank, np.inf)  # no second one here
        filling.taken[placed] = rank
        placed += 1
    for place in range(placed):
        rank = filling.taken[place]
        _rematch(filling, rank, _end(filling, rank))
    return placed


@inner
def _scan(filling: Filling, expert: int, count: int) -> int:
    """Place replicas on ranks of any speeds; return how many were placed."""
    for placed in range(count):
        best, best_time = -1, np.inf
        for rank in range(len(filling.zone)):
            time = (filling.ends[rank] + filling.each[expert]) * filling.slowness[rank]
            if time < best_time and filling.last[rank] != expert:
                best, best_time = rank, time
        if best < 0:
            return placed
        _place(filling, best, expert)
        filling.ends[best] = _end(filling, best)
    return count


@inner
def _swap_in(filling: Filling, expert: int, zone: int) -> None:
    """Move another replica into a free slot of a rank that has ``expert``, and use its slot."""
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
