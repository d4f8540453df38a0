"""Uneven shares as whole weights of slots, in the two forms that the engine can serve.

``dynamic`` takes an entry of an expert's list of slots for each row: a slot with weight w stands w
times in it. ``static`` takes one slot for each source rank from a table: a slot with weight w is
the choice of w ranks, its own rank and ranks of its node first.

Shapes:  L rows of the engine's map, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.topology import Topology
from eplb.errors import PlacementError
from rebalance.engines.common import replica_weights as common
from rebalance.engines.common.tap import IntArray

MOST_STEPS = 1000  # of evening a row
SWAP_GAIN = 0.002  # of the busiest rank, in mean rank loads, that two moves must bring
ROUNDING = 1e-9


def list_weights(held: IntArray, share: NDArray[np.float64], length: int) -> IntArray:
    """[L, S] how often each slot stands in the list of its expert, which has ``length`` entries.

    An expert with one replica, or with an even split, has the shortest list: each slot once.
    """

    def is_uneven(
        count: IntArray, most: NDArray[np.float64], least: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        return (count > 1) & ((most - least) * length >= 0.5)

    return common.list_weights(held, share, length, is_uneven, plain=1)


def source_weights(held: IntArray, share: NDArray[np.float64], num_ranks: int) -> IntArray:
    """[L, S] how many source ranks use each slot; those of an expert sum to all ranks."""
    return common.list_weights(held, share, num_ranks, lambda count, *_: count > 0, plain=1)


def evened(
    held: IntArray,
    weights: IntArray,
    load: NDArray[np.float64],
    zone: IntArray,
    *,
    each: int,
    goal: float,
    most_swaps: int,
) -> tuple[IntArray, IntArray]:
    """Map and weights [L, S] after relieving the busiest rank of each row, while that helps.

    Rounding shares leaves a rank up to half a weight of every replica too much. Single weights are
    shifted between replicas first; where a row is still above ``goal``, experts with one replica
    are swapped.

    Args:
        held: [L, S].
        weights: [L, S].
        load: [L, E] of each expert, in units of the mean rank load.
        zone: [S] slots between which experts may be swapped.
        each: slots of a rank.
        goal: imbalance of a row that is good enough to swap nothing.
        most_swaps: over all rows.
    """
    held, weights = held.copy(), weights.copy()
    for row_held, row_weights, row_load in zip(held, weights, load, strict=True):
        for _ in range(MOST_STEPS):
            one = row_load[row_held] / np.bincount(row_held, row_weights)[row_held]
            loads = (one * row_weights).reshape(-1, each).sum(axis=1)
            if _shift(row_held, row_weights, one, loads):
                continue
            if most_swaps < 1 or loads.max() <= goal or not _swap(row_held, row_load, loads, zone):
                break
            most_swaps -= 1
    return held, weights


def _shift(
    held: IntArray, weights: IntArray, one: NDArray[np.float64], loads: NDArray[np.float64]
) -> bool:
    """Shift a weight from the busiest rank to another replica; ``one`` is what it brings [S]."""
    each, busiest = len(held) // len(loads), int(loads.argmax())
    best, change = loads[busiest] * (1 - ROUNDING), None
    for slot in range(busiest * each, (busiest + 1) * each):
        others = np.flatnonzero(held == held[slot])
        others = others[others // each != busiest]
        if weights[slot] < 2 or not others.size:
            continue
        other = int(others[loads[others // each].argmin()])
        after = max(loads[busiest] - one[slot], loads[other // each] + one[slot])
        if after < best:
            best, change = after, (slot, other)
    if change is not None:
        weights[change[0]] -= 1
        weights[change[1]] += 1
    return change is not None


def _swap(
    held: IntArray, load: NDArray[np.float64], loads: NDArray[np.float64], zone: IntArray
) -> bool:
    """Swap an expert of the busiest rank with one of another rank; both have one replica."""
    each, busiest = len(held) // len(loads), int(loads.argmax())
    is_single = np.bincount(held)[held] == 1
    mine = np.flatnonzero(is_single[busiest * each : (busiest + 1) * each]) + busiest * each
    theirs = np.flatnonzero(is_single & (np.arange(len(held)) // each != busiest))
    if not mine.size or not theirs.size:
        return False
    less = load[held[mine]][:, None] - load[held[theirs]]
    after = np.maximum(loads[busiest] - less, loads[theirs // each] + less)
    after[zone[mine][:, None] != zone[theirs]] = np.inf
    place, other = np.unravel_index(after.argmin(), after.shape)
    if after[place, other] > loads[busiest] - SWAP_GAIN:
        return False
    here, there = mine[place], theirs[other]
    held[here], held[there] = held[there], held[here]
    return True


def source_table(
    held: IntArray, weights: IntArray, num_experts: int, topology: Topology
) -> IntArray:
    """[L, E, R] slot that each source rank uses; a slot is used by as many ranks as it weighs.

    Raises:
        PlacementError: the weights of an expert do not sum to the number of ranks.
    """
    num_ranks, node = topology.num_ranks, topology.node_of_rank
    rows = np.arange(len(held))[:, None]
    total = np.zeros((len(held), num_experts), dtype=np.int64)
    np.add.at(total, (rows, held), weights)
    if (total != num_ranks).any():
        row, expert = np.argwhere(total != num_ranks)[0]
        raise PlacementError(
            f"row {row}: expert {expert} has weights of {total[row, expert]} in sum, "
            f"expected {num_ranks}, one for each source rank"
        )
    table = np.zeros((len(held), num_experts, num_ranks), dtype=np.int64)
    rank_of_slot = topology.rank_of_slot
    for row, row_held in enumerate(held):
        table[row, row_held] = np.arange(len(row_held))[:, None]
        count = np.bincount(row_held, minlength=num_experts)
        for expert in np.flatnonzero(count > 1):
            slots = np.flatnonzero(row_held == expert)
            left, ranks = weights[row, slots].copy(), rank_of_slot[slots]
            chosen = np.full(num_ranks, -1)
            own, near = ranks == np.arange(num_ranks)[:, None], node[ranks] == node[:, None]
            for closer in (own, near, np.ones_like(near)):
                for source in np.flatnonzero(chosen < 0):
                    free = np.where(closer[source], left, 0)
                    if free.max() > 0:
                        place = int(free.argmax())
                        chosen[source] = slots[place]
                        left[place] -= 1
            table[row, expert] = chosen
    return table


def replica_lists(held: IntArray, weights: IntArray, num_experts: int) -> IntArray:
    """[L, E, S] slots of each expert in the order in which rows of a batch use them, then -1.

    A slot with weight w stands w times.

    Raises:
        PlacementError: an expert without a slot, or a list longer than the engine's map.
    """
    num_rows, num_slots = held.shape
    lists = np.full((num_rows, num_experts, num_slots), -1, dtype=np.int64)
    for rows, experts, entries in common.spread_lists(held, weights):
        if entries.shape[1] > num_slots:
            raise PlacementError(
                f"row {rows[0]}: the list of expert {experts[0]} has {entries.shape[1]} entries, "
                f"expected {num_slots} at most: the engine's map is as wide as there are slots"
            )
        lists[rows, experts, : entries.shape[1]] = entries
    for row, expert in np.argwhere(lists[:, :, 0] < 0)[:1]:
        raise PlacementError(f"row {row}: expert {expert} has no slot, expected one or more")
    return lists
