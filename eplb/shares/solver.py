"""The best shares for the replicas of one layer, compiled.

The time of the busiest rank is a maximum, which has no gradient where ranks tie. So each window's
maximum is softened: ranks count by their closeness to the busiest one, more sharply from stage to
stage. Sweeps over the replicated experts then shift tokens from the replica with the largest slope
to the one with the smallest, by a Newton step. The same weights give a lower bound, and a layer is
finished when its shares reach it.

Shapes:  L MoE layers, T windows, E experts, S slots.
"""

from __future__ import annotations

import numpy as np

from eplb.core.jit import FloatArray, IntArray, by_reference, copy_into, inner, kernel
from eplb.core.zones import Ranks

# The objective: weight of the mean over the worst windows (the rest: over all), and their part.
TAIL_WEIGHT = 0.25
TAIL_PART = 0.25


# Sharpness of the softened maximum: times count by their 2**n-th power. The first stage is fast but
# approximate; the last has an error below 0.1 %, but alone would need many small steps.
DOUBLINGS = (4, 6, 9)
MOST_SWEEPS = 96  # in a stage
MOST_TURNS = 3
STALLED = 1e-3  # a sweep with a smaller relative gain counts as without gain
SHIFTS = 600  # without gain, after which a stage has stalled
CLOSE_ENOUGH = 5e-3  # to the lower bound
SETTLED = 0.1  # change of the exponents in a sweep below which the next stage starts
FARTHEST = 2.0  # largest change of an exponent in a step: beyond it the slope is not valid
FLAT = 1e-9  # slopes that differ by less are equal


@kernel
def split_layers(
    work: FloatArray, prior: FloatArray, held: IntArray, ranks: Ranks
) -> tuple[FloatArray, FloatArray]:
    """[L, S] best shares, and [L, 2] the objective with shares by speed and with best ones.

    Args:
        work: [L, T, E] as ``Problem.scaled``; idle windows (all zero) do not count.
        prior: [T] probability of each window.
        held: [L, S] experts by slot, -1 for empty; each with a replica on a live rank.
        ranks: a rank of zone -1 is dead, and its slots get 0.
    """
    share = np.zeros(held.shape)
    objective = np.ones((len(held), 2))
    for layer in range(len(held)):
        share[layer], objective[layer, 0], objective[layer, 1] = split_layer(
            work[layer], prior, held[layer], ranks
        )
    return share, objective


@inner
def split_layer(
    work: FloatArray, prior: FloatArray, held: IntArray, ranks: Ranks
) -> tuple[FloatArray, float, float]:
    """One layer of ``split_layers``: [S] shares, objective by speed and with these."""
    split = split_by_speed(work, prior, held, ranks)
    stages = np.array(DOUBLINGS)
    best = split.share.copy()
    start = _soften(split, stages[0])
    least = start
    patience = _patience(split)
    for stage in range(len(stages)):
        doublings = stages[stage]
        if stage == len(stages) - 1 and len(split.weight) == 1:
            patience *= 8  # along a long chain of ranks load moves in many small sweeps
        stalled, last = 0, np.inf
        for _ in range(MOST_SWEEPS):
            now = _soften(split, doublings)
            if now < least:
                least = now
                copy_into(best, split.share)
            stalled = stalled + 1 if now > last * (1.0 - STALLED) else 0
            last = min(last, now)
            if least <= _bound(split) * (1.0 + CLOSE_ENOUGH):
                return best, start, least
            if stalled == patience:
                break
            if _sweep(split, doublings) * 2.0**doublings < SETTLED:
                break
    now = _soften(split, stages[-1])
    if now < least:
        least = now
        copy_into(best, split.share)
    return best, start, least


@inner
def _patience(split: Split) -> int:
    """Sweeps without gain after which a stage ends: more where sweeps are cheap."""
    num_shared = 0
    for expert in range(len(split.first) - 1):
        num_replicas = split.first[expert + 1] - split.first[expert]
        num_shared += num_replicas if num_replicas > 1 else 0
    return max(2, SHIFTS // max(1, num_shared * len(split.weight)))


@inner
def _soften(split: Split, doublings: int) -> float:
    """Compute the softened maximum from the times, and return the objective."""
    num_ranks, num_windows = split.time.shape
    for window in range(num_windows):
        split.worst[window] = 0.0
        for rank in range(num_ranks):
            split.worst[window] = max(split.worst[window], split.time[rank, window])
        split.total[window] = 0.0
    for rank in range(num_ranks):
        for window in range(num_windows):
            near = _sharpened(split.time[rank, window] / split.worst[window], doublings)
            split.near[rank, window] = near
            split.total[window] += near
    return _weigh(split)


@inner
def _sharpened(part: float, doublings: int) -> float:
    """Raise a part of the busiest time to the power of 2**doublings."""
    for _ in range(doublings):
        part *= part
    return part


@inner
def _weigh(split: Split) -> float:
    """Weigh the windows, the worst ones more; return the objective."""
    worst, weights, prior = split.worst, split.weight, split.prior
    num_windows = len(worst)
    if num_windows == 0:
        return 1.0
    tail = max(TAIL_PART, prior.max())  # never less than a whole window
    left = tail
    counted = np.zeros(num_windows, dtype=np.bool_)
    objective = 0.0
    for _ in range(num_windows):
        window = -1
        for number in range(num_windows):
            if not counted[number] and (window < 0 or worst[number] > worst[window]):
                window = number
        counted[window] = True
        taken = min(prior[window], left)
        left -= taken
        weight = (1.0 - TAIL_WEIGHT) * prior[window] + TAIL_WEIGHT * taken / tail
        objective += weight * worst[window]
        # Half the old weight: windows that alternate as the worst converge to shared tail weight.
        is_first = weights[window] == 0.0
        weights[window] = weight if is_first else (weights[window] + weight) / 2.0
        split.pull[window] = weights[window] / split.total[window]
    return objective


@inner
def _bound(split: Split) -> float:
    """Lower bound for any shares: with these weights, each expert on its cheapest replica."""
    bound = 0.0
    for rank in range(len(split.time)):
        for window in range(len(split.pull)):
            bound += split.pull[window] * split.near[rank, window] * split.fixed[rank, window]
    for expert in range(len(split.first) - 1):
        if split.first[expert + 1] - split.first[expert] > 1:
            bound += _steepest(split, expert)[3]
    return bound


@inner
def _sweep(split: Split, doublings: int) -> float:
    """Shift tokens of every replicated expert by its slopes; return the load that moved."""
    moved = 0.0
    for expert in range(len(split.first) - 1):
        for _ in range(min(MOST_TURNS, split.first[expert + 1] - split.first[expert] - 1)):
            high, low, highest, lowest = _steepest(split, expert)
            if high == low or highest - lowest <= FLAT:
                break
            moved += _shift(split, expert, (high, low), highest - lowest, doublings)
    return moved


@inner
def _steepest(split: Split, expert: int) -> tuple[int, int, float, float]:
    """Slots with the largest and the smallest slope of an expert's share, and these slopes.

    The first one is a slot with a share above 0.
    """
    pull, near, work = split.pull, split.near, split.work
    high, low = -1, -1
    highest, lowest = -1.0, np.inf
    for place in range(split.first[expert], split.first[expert + 1]):
        slot = split.slots[place]
        rank = split.rank[slot]
        slope = 0.0
        for window in range(len(pull)):
            slope += pull[window] * near[rank, window] * work[expert, window]
        slope *= split.slowness[rank]
        if slope < lowest:
            low, lowest = slot, slope
        if slope > highest and split.share[slot] > 0:
            high, highest = slot, slope
    return high, low, highest, lowest


@inner
def _shift(
    split: Split, expert: int, slots: tuple[int, int], slope: float, doublings: int
) -> float:
    """Shift tokens from one slot to another by a Newton step; return the load that moved."""
    high, low = slots
    one, other = split.rank[high], split.rank[low]
    slow, fast = split.slowness[one], split.slowness[other]
    sharpness, curvature, most = 2.0**doublings, 0.0, 0.0
    near, total, worst, time = split.near, split.total, split.worst, split.time
    for window in range(len(total)):
        work = split.work[expert, window]
        most = max(most, work)
        mine = near[one, window] / total[window] * slow
        theirs = near[other, window] / total[window] * fast
        bend = mine * slow + theirs * fast - (mine - theirs) ** 2
        curvature += split.weight[window] / worst[window] * work * work * bend
    step: float = min(split.share[high], FARTHEST / (sharpness * most * max(slow, fast)))
    if curvature > 0:
        step = min(step, slope / (sharpness * curvature))
    split.share[high] -= step
    split.share[low] += step
    for window in range(len(total)):
        load = step * split.work[expert, window]
        time[one, window] -= load * slow
        time[other, window] += load * fast
        less = _sharpened(time[one, window] / worst[window], doublings)
        more = _sharpened(time[other, window] / worst[window], doublings)
        total[window] += less - near[one, window] + more - near[other, window]
        near[one, window] = less
        near[other, window] = more
        split.pull[window] = split.weight[window] / total[window]
    return step * most


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
    weight: FloatArray  # [T] weight of each window in the objective
    pull: FloatArray  # [T] weight / total


new_split = by_reference(Split)


@inner
def split_by_speed(work: FloatArray, prior: FloatArray, held: IntArray, ranks: Ranks) -> Split:
    """A layer's arrays, with shares by the speed of live ranks and without idle windows."""
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
    share, speed = np.zeros(num_slots), np.zeros(num_experts)
    for slot in range(num_slots):
        expert = held[slot]
        if expert >= 0 and ranks.zone[rank[slot]] >= 0:
            slots[filled[expert]] = slot
            filled[expert] += 1
            share[slot] = 1.0 / ranks.slowness[rank[slot]]
            speed[expert] += share[slot]
    for place in range(len(slots)):
        share[slots[place]] /= speed[held[slots[place]]]
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


@inner
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


@kernel
def floors(work: FloatArray, prior: FloatArray, held: IntArray, ranks: Ranks) -> FloatArray:
    """[L] lower bound of the mean imbalance over windows, for any shares.

    The load of an expert with one live replica is fixed to a rank, and that of an expert with all
    replicas on one node to a node: the busiest rank or node by fixed loads is a bound, and so is 1.

    Args:
        work: [L, T, E] as ``Problem.scaled``.
        prior: [T] probability of each window.
        held: [L, S] experts by slot.
        ranks: where slots are, and which ranks are dead.
    """
    node = ranks.node
    floor = np.ones(len(held))
    speed = np.zeros(node.max() + 1)
    for rank in range(len(node)):
        if ranks.zone[rank] >= 0:
            speed[node[rank]] += 1.0 / ranks.slowness[rank]
    for layer in range(len(held)):
        split = split_by_speed(work[layer], prior, held[layer], ranks)
        on_node = _fixed_on_nodes(split, node, len(speed))
        busy, mean = 0.0, 0.0
        for window in _busy_windows(work[layer]):
            busy += prior[window]
        for window in range(len(split.prior)):
            most = 1.0
            for rank in range(len(node)):
                most = max(most, split.fixed[rank, window])
            for number in range(len(speed)):
                if speed[number] > 0:
                    most = max(most, on_node[number, window] / speed[number])
            mean += split.prior[window] * most
        floor[layer] += busy * (mean - 1.0)  # an idle window counts as 1
    return floor


@inner
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
            for window in range(fixed.shape[1]):
                fixed[node_of_first, window] += split.work[expert, window]
    return fixed
