"""Heaviest first: replicas onto ranks, compiled.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.jit import jit
from eplb.kernels import FloatArray, IntArray, Ranks, has


def pack(work: FloatArray, count: IntArray, zone_of_expert: IntArray, ranks: Ranks) -> IntArray:
    """[L, S] experts by slot: heaviest replica first, each to the rank that then ends earliest.

    No rank gets an expert twice. A replica that finds only ranks that hold its expert trades
    places with another; when that is impossible too, its slot stays empty.
    """
    each = work / count
    order = np.argsort(-each, axis=1, kind="stable")  # here, since numba compiles a sort slowly
    return _pack(each, order, count, zone_of_expert, ranks)


@jit
def _pack(
    each_of_layer: FloatArray,
    order: IntArray,
    count: IntArray,
    zone_of_expert: IntArray,
    ranks: Ranks,
) -> IntArray:
    num_layers, num_ranks = len(order), len(ranks.zone)
    held = np.full((num_layers, ranks.first_slot[-1]), -1, dtype=np.int64)
    used = np.empty(num_ranks, dtype=np.int64)
    load = np.empty(num_ranks)
    last = np.empty(num_ranks, dtype=np.int64)
    ends = np.empty(num_ranks)  # the load of a rank that has room, else infinite
    one_zone = (ranks.zone == 0).all()
    for layer in range(num_layers):
        each, room = each_of_layer[layer], ranks.room[layer]
        # Replicas of one expert are placed in a row, so the last one tells whether a rank has it.
        used[:], load[:], last[:] = 0, 0.0, -1
        for rank in range(num_ranks):
            ends[rank] = 0.0 if room[rank] > 0 and ranks.zone[rank] >= 0 else np.inf
        for expert in order[layer]:
            zone, more = zone_of_expert[layer, expert], each[expert]
            for _ in range(count[layer, expert]):
                best, best_time = -1, np.inf
                for rank in range(num_ranks):
                    time = (ends[rank] + more) * ranks.slowness[rank]
                    # The test that fails most often comes first.
                    if time >= best_time or last[rank] == expert:
                        continue
                    if one_zone or ranks.zone[rank] == zone:
                        best, best_time = rank, time
                if best < 0:
                    _trade(held[layer], each, expert, zone, used, load, last, ends, ranks, room)
                    continue
                held[layer, ranks.first_slot[best] + used[best]] = expert
                used[best] += 1
                load[best] += more
                ends[best] = load[best] if used[best] < room[best] else np.inf
                last[best] = expert
    return held


@jit
def _trade(
    held: IntArray,
    each: FloatArray,
    expert: int,
    zone: int,
    used: IntArray,
    load: FloatArray,
    last: IntArray,
    ends: FloatArray,
    ranks: Ranks,
    room: IntArray,
) -> bool:
    """Move another replica into a free slot of a rank that has ``expert``, and take its place."""
    best_time, best_free, best_slot, best_rank = np.inf, -1, -1, -1
    for free in range(len(used)):
        end = ranks.first_slot[free] + used[free]
        if ranks.zone[free] != zone or used[free] >= room[free]:
            continue
        for rank in range(len(used)):
            if ranks.zone[rank] != zone or last[rank] == expert:
                continue
            for slot in range(ranks.first_slot[rank], ranks.first_slot[rank] + used[rank]):
                other = held[slot]
                if has(held, ranks.first_slot[free], end, other):
                    continue
                time = max(
                    (load[free] + each[other]) * ranks.slowness[free],
                    (load[rank] - each[other] + each[expert]) * ranks.slowness[rank],
                )
                if time < best_time:
                    best_time, best_free, best_slot, best_rank = time, free, slot, rank
    if best_slot < 0:
        return False
    other = held[best_slot]
    held[ranks.first_slot[best_free] + used[best_free]] = other
    held[best_slot] = expert
    used[best_free] += 1
    load[best_free] += each[other]
    load[best_rank] += each[expert] - each[other]
    last[best_rank] = expert
    for rank in (best_free, best_rank):
        ends[rank] = load[rank] if used[rank] < room[rank] else np.inf
    return True
