"""Which slot of a rank, and which of several equal ranks: chosen so that fewest experts move.

A plan decides which experts share a rank. Which of several equal ranks that is changes only the
number of moves: a fresh plan of 640 slots on 320 ranks moves 635 experts as it was packed, and 315
after the exchange.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import IntArray, kernel
from eplb.core.problem import Problem
from eplb.core.topology import Topology


def in_place(
    held: IntArray, base: NDArray[np.int32], topology: Topology, room: IntArray | None = None
) -> IntArray:
    """[L, S] the same plan, with every expert that stays on a rank in its current slot.

    Args:
        held: experts by slot.
        base: the serving placement.
        topology: where slots are.
        room: [L, R] slots that a layer may use; default: all of serving ranks.
    """
    if room is None:
        room = np.repeat(topology.usable_slots[None], len(held), axis=0)
    return keep_in_place(held, base.astype(np.int64), topology.first_slot, room)


@kernel
def keep_in_place(held: IntArray, base: IntArray, first_slot: IntArray, room: IntArray) -> IntArray:
    """[L, S] the same experts on the same ranks; those that ``base`` has there keep its slots."""
    num_layers, num_slots = held.shape
    num_ranks, num_experts = len(first_slot) - 1, 1 + max(held.max(), base.max())
    kept = np.full((num_layers, num_slots), -1, dtype=np.int64)
    # Layer and rank on which an expert was last seen, as one number: no row needs clearing.
    wanted, placed = np.full(num_experts, -1), np.full(num_experts, -1)
    for layer in range(num_layers):
        for rank in range(num_ranks):
            here, first = layer * num_ranks + rank, first_slot[rank]
            end = first + room[layer, rank]
            for slot in range(first, end):
                if held[layer, slot] >= 0:
                    wanted[held[layer, slot]] = here
            for slot in range(first, end):
                expert = base[layer, slot]
                if expert >= 0 and wanted[expert] == here and placed[expert] != here:
                    kept[layer, slot] = expert
                    placed[expert] = here
            free = first
            for slot in range(first, end):
                expert = held[layer, slot]
                if expert < 0 or placed[expert] == here:
                    continue
                while kept[layer, free] >= 0:
                    free += 1
                kept[layer, free] = expert
                placed[expert] = here
    return kept


MOST_RANKS = 512  # ranks that exchange with each other: the time grows with the cube


def with_singles_kept(problem: Problem, held: IntArray, base: NDArray[np.int32]) -> IntArray:
    """[L, S] the same plan, in which ranks with one slot keep their expert where possible."""
    topology = problem.topology
    single = topology.serving & (topology.slots_of_rank == 1)
    if problem.constraints.binds_ranks or single.sum() < 2:
        return held
    kinds = np.where(single & (problem.room == 1), _kind_of_rank(problem), -1)
    kept = held.copy()
    _keep_singles(kept, base.astype(np.int64), topology.first_slot, kinds)
    return kept


def with_most_kept(problem: Problem, held: IntArray, base: NDArray[np.int32]) -> IntArray:
    """[L, S] the same plan, in which equal ranks keep as many experts as possible.

    Takes about 1 ms a layer of 320 ranks.

    Args:
        problem: which ranks are equal. Ranks with pins exchange nothing, and constraints on failure
            domains allow no exchange at all.
        held: experts by slot.
        base: the serving placement.
    """
    topology = problem.topology
    if problem.constraints.binds_ranks:
        return held
    from scipy.optimize import linear_sum_assignment  # late: it takes a tenth of a second

    kind, kept = _kind_of_rank(problem), with_singles_kept(problem, held, base).copy()
    sets: dict[bytes, list[IntArray]] = {}  # mostly one: of all layers
    for layer in range(len(held)):
        room = problem.room[layer]
        if (key := room.tobytes()) not in sets:
            sets[key] = _alike(kind, room)
        for alike in sets[key]:
            slots = topology.first_slot[alike][:, None] + np.arange(room[alike[0]])
            stay = _in_common(base[layer, slots].astype(np.int64), held[layer, slots])
            to, by = linear_sum_assignment(stay, maximize=True)
            kept[layer, slots[to]] = held[layer, slots[by]]
    return kept


def _kind_of_rank(problem: Problem) -> IntArray:
    """[R] equal for ranks of one speed, of one node where experts or tokens stay, without pins."""
    topology = problem.topology
    stays = problem.groups_stay or problem.cost.node_traffic > 0
    node = topology.node_of_rank if stays else np.zeros(topology.num_ranks)
    keys = np.stack([node, topology.rank_speed], axis=1)
    kinds: IntArray = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    pinned = sorted({rank for ranks in problem.constraints.pinned.values() for rank in ranks})
    kinds[pinned] = topology.num_ranks + np.arange(len(pinned))  # each is of a kind of its own
    return kinds


def _alike(kind: IntArray, room: IntArray) -> list[IntArray]:
    """Sets of ranks of one kind and of one number of slots."""
    found = []
    for slots in np.unique(room[room > 1]):
        for one in np.unique(kind):
            ranks = np.flatnonzero((kind == one) & (room == slots))
            found += np.array_split(ranks, -(-len(ranks) // MOST_RANKS)) if len(ranks) else []
    return found


@kernel
def _in_common(base: IntArray, held: IntArray) -> IntArray:
    """[n, n] number of experts that the rank of a row has and that of a column will have."""
    num_ranks, num_slots = base.shape
    num_experts = 1 + max(base.max(), held.max())
    # Ranks that have an expert, as a list for each: a comparison of all pairs would be dense.
    head = np.full(num_experts, -1)
    following = np.empty(num_ranks * num_slots, dtype=np.int64)
    for rank in range(num_ranks):
        for slot in range(num_slots):
            expert = base[rank, slot]
            if expert >= 0:
                place = rank * num_slots + slot
                following[place], head[expert] = head[expert], place
    common = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for rank in range(num_ranks):
        for slot in range(num_slots):
            expert = held[rank, slot]
            place = head[expert] if expert >= 0 else -1
            while place >= 0:
                common[place // num_slots, rank] += 1
                place = following[place]
    return common


@kernel
def _keep_singles(held: IntArray, base: IntArray, first_slot: IntArray, kinds: IntArray) -> None:
    """Exchange in place; ``kinds`` [L, R] numbers sets of equal ranks, -1: not exchanged."""
    num_ranks, num_experts = kinds.shape[1], 1 + max(held.max(), base.max())
    head, following = np.empty(num_experts, dtype=np.int64), np.empty(num_ranks, dtype=np.int64)
    for layer in range(len(held)):
        for kind in range(kinds[layer].max() + 1):
            head.fill(-1)  # each expert's list of ranks to which it would move
            for rank in range(num_ranks):
                slot = first_slot[rank]
                expert = held[layer, slot] if kinds[layer, rank] == kind else -1
                if expert >= 0 and base[layer, slot] != expert:
                    following[rank] = head[expert]
                    head[expert] = rank
            for rank in range(num_ranks):
                slot = first_slot[rank]
                expert = base[layer, slot] if kinds[layer, rank] == kind else -1
                if expert < 0 or held[layer, slot] == expert:
                    continue
                other = head[expert]
                while other >= 0 and held[layer, first_slot[other]] != expert:
                    other = following[other]  # it got its own expert back meanwhile
                if other < 0:
                    continue
                head[expert] = following[other]
                there = first_slot[other]
                comes = held[layer, slot]
                held[layer, slot], held[layer, there] = expert, comes
                if comes >= 0 and base[layer, there] != comes:
                    following[other] = head[comes]
                    head[comes] = other
