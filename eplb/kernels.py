"""Replicas and packing, compiled. ``eplb/reference.py`` says the same slowly, and tests compare.

A zone is a set of ranks that an expert may live on: one zone for all in global planning, one for
each node when expert groups stay on a node. A rank of zone -1 is dead and holds nothing.

Shapes:  L MoE layers, E experts, S slots, R ranks, Z zones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.jit import jit

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Ranks(NamedTuple):
    """A topology as the kernels read it."""

    zone: IntArray  # [R], -1 for a dead rank
    first_slot: IntArray  # [R + 1]
    slowness: FloatArray  # [R] time per unit of load: 1 / rank_speed


@jit
def replicate(
    work: FloatArray, zone_of_expert: IntArray, slots_of_zone: IntArray, ranks_of_zone: IntArray
) -> IntArray:
    """[L, E] replica counts: each spare slot goes to the expert with the largest load per replica.

    An expert never gets more replicas than its zone has ranks; ties go to the lower number.
    """
    num_layers, num_experts = work.shape
    count = np.ones((num_layers, num_experts), dtype=np.int64)
    each = np.empty(num_experts)
    for layer in range(num_layers):
        for zone in range(len(slots_of_zone)):
            spare = slots_of_zone[zone]
            for expert in range(num_experts):
                each[expert] = -1.0
                if zone_of_expert[layer, expert] == zone:
                    spare -= 1
                    if ranks_of_zone[zone] > 1:
                        each[expert] = work[layer, expert]
            for _ in range(spare):
                most = np.argmax(each)
                if each[most] < 0:
                    break
                count[layer, most] += 1
                each[most] = work[layer, most] / count[layer, most]
                if count[layer, most] == ranks_of_zone[zone]:
                    each[most] = -1.0
    return count


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
    for layer in range(num_layers):
        each = each_of_layer[layer]
        used = np.zeros(num_ranks, dtype=np.int64)
        load = np.zeros(num_ranks)
        # Replicas of one expert are placed in a row, so the last one tells whether a rank has it.
        last = np.full(num_ranks, -1, dtype=np.int64)
        for expert in order[layer]:
            zone = zone_of_expert[layer, expert]
            for _ in range(count[layer, expert]):
                best, best_time = -1, np.inf
                for rank in range(num_ranks):
                    time = (load[rank] + each[expert]) * ranks.slowness[rank]
                    # The cheapest test that fails most often comes first.
                    if time >= best_time or last[rank] == expert or ranks.zone[rank] != zone:
                        continue
                    if ranks.first_slot[rank] + used[rank] < ranks.first_slot[rank + 1]:
                        best, best_time = rank, time
                if best < 0:
                    _trade(held[layer], each, expert, used, load, last, ranks)
                    continue
                held[layer, ranks.first_slot[best] + used[best]] = expert
                used[best] += 1
                load[best] += each[expert]
                last[best] = expert
    return held


@jit
def _has(held: IntArray, first: int, end: int, expert: int) -> bool:
    """Whether one of these slots holds the expert."""
    for slot in range(first, end):  # noqa: SIM110 (numba compiles a loop sooner than any())
        if held[slot] == expert:
            return True
    return False


@jit
def _trade(
    held: IntArray,
    each: FloatArray,
    expert: int,
    used: IntArray,
    load: FloatArray,
    last: IntArray,
    ranks: Ranks,
) -> bool:
    """Move another replica into a free slot of a rank that has ``expert``, and take its place."""
    best_time, best_free, best_slot, best_rank = np.inf, -1, -1, -1
    zone = ranks.zone[np.argmax(last == expert)]
    for free in range(len(used)):
        end = ranks.first_slot[free] + used[free]
        if ranks.zone[free] != zone or end == ranks.first_slot[free + 1]:
            continue
        for rank in range(len(used)):
            if ranks.zone[rank] != zone or last[rank] == expert:
                continue
            for slot in range(ranks.first_slot[rank], ranks.first_slot[rank] + used[rank]):
                other = held[slot]
                if _has(held, ranks.first_slot[free], end, other):
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
    return True


@jit
def keep_in_place(held: IntArray, base: IntArray, first_slot: IntArray) -> IntArray:
    """[L, S] the same experts on the same ranks, those that ``base`` has there in its slots."""
    num_layers, num_slots = held.shape
    kept = np.full((num_layers, num_slots), -1, dtype=np.int64)
    for layer in range(num_layers):
        for rank in range(len(first_slot) - 1):
            first, end = first_slot[rank], first_slot[rank + 1]
            for slot in range(first, end):
                expert = base[layer, slot]
                stays = expert >= 0 and _has(held[layer], first, end, expert)
                if stays and not _has(kept[layer], first, end, expert):
                    kept[layer, slot] = expert
            slot = first
            for wanted in range(first, end):
                expert = held[layer, wanted]
                if expert < 0 or _has(kept[layer], first, end, expert):
                    continue
                while kept[layer, slot] >= 0:
                    slot += 1
                kept[layer, slot] = expert
    return kept
