"""One layer's replicas laid out for the search of shares: who shares what, and what it costs.

Shapes:  T windows, E experts, S slots, R ranks, P live replicas.
"""

from __future__ import annotations

import numpy as np

from eplb.jit import by_reference, jit
from eplb.kernels import FloatArray, IntArray, Ranks


class Split:
    """One layer while its shares are sought. Times are loads by the rank's slowness."""

    work: FloatArray  # [E, T]
    first: IntArray  # [E + 1] into ``slots``
    slots: IntArray  # [P] live replicas, expert by expert
    rank: IntArray  # [S]
    slowness: FloatArray  # [R]
    share: FloatArray  # [S]
    fixed: FloatArray  # [R, T] time of experts with one live replica
    time: FloatArray  # [R, T]
    near: FloatArray  # [R, T] how near each rank is to the top, 1 at it
    total: FloatArray  # [T] sum of ``near`` over ranks
    worst: FloatArray  # [T] busiest time
    weight: FloatArray  # [T] of each window in the objective
    pull: FloatArray  # [T] weight / total


new_split = by_reference(Split)


@jit
def equal_split_of(work: FloatArray, held: IntArray, ranks: Ranks) -> Split:
    """Lay a layer out, with equal shares over live replicas; idle windows are left out."""
    num_experts, num_ranks, num_slots = work.shape[1], len(ranks.zone), len(held)
    rank = np.empty(num_slots, dtype=np.int64)
    first = np.zeros(num_experts + 1, dtype=np.int64)
    for number in range(num_ranks):
        for slot in range(ranks.first_slot[number], ranks.first_slot[number + 1]):
            rank[slot] = number
            if held[slot] >= 0 and ranks.zone[number] >= 0:
                first[held[slot] + 1] += 1
    for expert in range(num_experts):
        first[expert + 1] += first[expert]
    slots = np.empty(first[num_experts], dtype=np.int64)
    filled = first.copy()
    share = np.zeros(num_slots)
    for slot in range(num_slots):
        expert = held[slot]
        if expert >= 0 and ranks.zone[rank[slot]] >= 0:
            slots[filled[expert]] = slot
            filled[expert] += 1
            share[slot] = 1.0 / (first[expert + 1] - first[expert])
    busy = _busy(work)
    num_windows = busy.shape[1]
    fixed, time = np.zeros((num_ranks, num_windows)), np.zeros((num_ranks, num_windows))
    for place in range(len(slots)):
        slot = slots[place]
        at, expert = rank[slot], held[slot]
        for window in range(num_windows):
            extra = busy[expert, window] * share[slot] * ranks.slowness[at]
            time[at, window] += extra
            if share[slot] == 1.0:
                fixed[at, window] += extra
    return new_split(
        busy,
        first,
        slots,
        rank,
        ranks.slowness,
        share,
        fixed,
        time,
        np.zeros((num_ranks, num_windows)),
        np.zeros(num_windows),
        np.zeros(num_windows),
        np.zeros(num_windows),
        np.zeros(num_windows),
    )


@jit
def _busy(work: FloatArray) -> FloatArray:
    """[E, T] the windows of work [T, E] that have any."""
    num_windows, num_experts = work.shape
    chosen = np.empty(num_windows, dtype=np.int64)
    number = 0
    for window in range(num_windows):
        for expert in range(num_experts):
            if work[window, expert] > 0:
                chosen[number] = window
                number += 1
                break
    busy = np.empty((num_experts, number))
    for place in range(number):
        for expert in range(num_experts):
            busy[expert, place] = work[chosen[place], expert]
    return busy
