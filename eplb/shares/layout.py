"""One layer's replicas as arrays for the search of shares.

Shapes:  T windows, E experts, S slots, R ranks, P live replicas.
"""

from __future__ import annotations

import numpy as np

from eplb.core.jit import by_reference, jit
from eplb.core.kernels import FloatArray, IntArray, Ranks


class Split:
    """One layer during the search of its shares. Times are loads times the rank's slowness."""

    work: FloatArray  # [E, T]
    first: IntArray  # [E + 1] into ``slots``
    slots: IntArray  # [P] live replicas, expert by expert
    rank: IntArray  # [S]
    slowness: FloatArray  # [R]
    share: FloatArray  # [S]
    fixed: FloatArray  # [R, T] time of experts with one live replica
    time: FloatArray  # [R, T]
    near: FloatArray  # [R, T] closeness of each rank's time to the busiest, 1 at it
    total: FloatArray  # [T] sum of ``near`` over ranks
    worst: FloatArray  # [T] busiest time
    prior: FloatArray  # [T] probability of each window, sums to 1
    weight: FloatArray  # [T] of each window in the objective
    pull: FloatArray  # [T] weight / total


new_split = by_reference(Split)


@jit
def equal_split_of(work: FloatArray, prior: FloatArray, held: IntArray, ranks: Ranks) -> Split:
    """A layer's arrays, with equal shares over live replicas and without idle windows."""
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
    windows = _busy_windows(work)
    num_windows = len(windows)
    busy, likely = np.empty((num_experts, num_windows)), np.empty(num_windows)
    for place in range(num_windows):
        likely[place] = prior[windows[place]]
        for expert in range(num_experts):
            busy[expert, place] = work[windows[place], expert]
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
        likely / max(likely.sum(), 1e-300),
        np.zeros(num_windows),
        np.zeros(num_windows),
    )


@jit
def _busy_windows(work: FloatArray) -> IntArray:
    """The windows of work [T, E] that are not idle."""
    num_windows, num_experts = work.shape
    chosen = np.empty(num_windows, dtype=np.int64)
    number = 0
    for window in range(num_windows):
        for expert in range(num_experts):
            if work[window, expert] > 0:
                chosen[number] = window
                number += 1
                break
    return chosen[:number]


@jit
def floors(work: FloatArray, held: IntArray, ranks: Ranks, node: IntArray) -> FloatArray:
    """[L] lower bound of the mean imbalance over windows, for any shares.

    The load of an expert with one live replica is fixed to a rank, and that of an expert with all
    replicas on one node to a node: the busiest rank or node by fixed loads is a bound, and so is 1.

    Args:
        work: [L, T, E] as ``Problem.scaled``.
        held: [L, S] experts by slot.
        ranks: where slots are, and which ranks are dead.
        node: [R].
    """
    floor = np.ones(len(held))
    prior = np.ones(work.shape[1])
    speed = np.zeros(node.max() + 1)
    for rank in range(len(node)):
        if ranks.zone[rank] >= 0:
            speed[node[rank]] += 1.0 / ranks.slowness[rank]
    for layer in range(len(held)):
        split = equal_split_of(work[layer], prior, held[layer], ranks)
        on_node = _fixed_on_nodes(split, node, len(speed))
        num_busy = split.fixed.shape[1]
        total = float(work.shape[1] - num_busy)  # an idle window counts as 1
        for window in range(num_busy):
            most = max(1.0, split.fixed[:, window].max())
            for number in range(len(speed)):
                if speed[number] > 0:
                    most = max(most, on_node[number, window] / speed[number])
            total += most
        floor[layer] = total / work.shape[1]
    return floor


@jit
def _fixed_on_nodes(split: Split, node: IntArray, num_nodes: int) -> FloatArray:
    """[N, T] load of experts whose live replicas are all on that node."""
    fixed = np.zeros((num_nodes, split.work.shape[1]))
    for expert in range(len(split.first) - 1):
        first, end = split.first[expert], split.first[expert + 1]
        node_of_first = node[split.rank[split.slots[first]]]
        stays = True
        for place in range(first + 1, end):
            stays &= node[split.rank[split.slots[place]]] == node_of_first
        if stays:
            fixed[node_of_first] += split.work[expert]
    return fixed
