"""Argument types of the compiled functions, and small functions that many of them use.

``eplb/search/reference.py`` has plain Python versions, and tests compare the two.

A zone is a set of ranks that an expert may be placed on: one zone for all in global planning, one
for each node when expert groups stay on a node. A rank of zone -1 is dead and holds nothing.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks, Z zones, P points of a curve.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import jit

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


# A plain -1 or 0 as an argument makes numba compile the function once more for that literal.
NONE = cast(int, np.int64(-1))
ZERO = cast(int, np.int64(0))


class Ranks(NamedTuple):
    """A topology as the kernels read it."""

    zone: IntArray  # [R], -1 for a dead rank
    first_slot: IntArray  # [R + 1]
    slowness: FloatArray  # [R] time per unit of load: 1 / rank_speed
    room: IntArray  # [L, R] how many of a rank's slots a layer may use, the first ones


class Demand(NamedTuple):
    """The load to balance, over windows that may differ in weight."""

    tokens: FloatArray  # [L, E, T]
    rate: FloatArray  # [L, T] time per token, or per microsecond of the curve; 0: an idle window
    extra: FloatArray  # [L, T] time of the shared experts, which every live rank computes
    weight: FloatArray  # [T], sums to 1
    tail: float  # how much of the score is the mean over the worst windows
    tail_size: float  # part of the windows, by weight, that counts as the worst
    curve_tokens: FloatArray  # [P] a replica's time by its tokens; empty: time equals tokens
    curve_time: FloatArray  # [P]


class ConstraintArrays(NamedTuple):
    """Constraints as arrays; of 0 layers where single experts are not constrained."""

    zone_of_expert: IntArray  # [L, E] ranks that an expert may be placed on
    spread: IntArray  # [L or 0, E] fewest failure domains of an expert
    pinned: BoolArray  # [L or 0, R, E] replicas that are required
    domain: IntArray  # [R]
    ready: BoolArray  # [R] only these may hold a sole copy


@jit
def replicate(
    work: FloatArray,
    zone_of_expert: IntArray,
    slots_of_zone: IntArray,
    ranks_of_zone: IntArray,
    least: IntArray,
) -> IntArray:
    """[L, E] replica counts: each spare slot goes to the expert with the largest load per replica.

    Args:
        work: [L, E].
        zone_of_expert: [L, E].
        slots_of_zone: [L, Z].
        ranks_of_zone: [L, Z]; an expert never gets more replicas than its zone has ranks.
        least: [L, E] fewest replicas of an expert, at least 1.

    Ties go to the lower number.
    """
    num_layers, num_experts = work.shape
    count = least.copy()
    heap = np.empty(num_experts, dtype=np.int64)  # experts, the largest load per replica on top
    each = np.empty(num_experts)
    for layer in range(num_layers):
        for zone in range(slots_of_zone.shape[1]):
            size, spare = ZERO, slots_of_zone[layer, zone]
            for expert in range(num_experts):
                if zone_of_expert[layer, expert] == zone:
                    spare -= count[layer, expert]
                    each[expert] = work[layer, expert] / count[layer, expert]
                    if count[layer, expert] < ranks_of_zone[layer, zone]:
                        heap[size] = expert
                        size += 1
            for top in range(size // 2 - 1, -1, -1):
                _sink(heap, size, each, top)
            while spare > 0 and size > 0:
                expert = heap[0]
                spare -= 1
                count[layer, expert] += 1
                each[expert] = work[layer, expert] / count[layer, expert]
                if count[layer, expert] == ranks_of_zone[layer, zone]:
                    size -= 1
                    heap[0] = heap[size]
                _sink(heap, size, each, ZERO)
    return count


@jit
def _sink(heap: IntArray, size: int, each: FloatArray, top: int) -> None:
    """Restore the heap order below ``top``."""
    while True:
        largest = top
        for below in range(2 * top + 1, min(2 * top + 3, size)):
            one, other = heap[below], heap[largest]
            if each[one] > each[other] or (each[one] == each[other] and one < other):
                largest = below
        if largest == top:
            return
        heap[top], heap[largest] = heap[largest], heap[top]
        top = largest


@jit
def has(held: IntArray, first: int, end: int, expert: int) -> bool:
    """Whether one of these slots holds the expert."""
    for slot in range(first, end):  # noqa: SIM110 (numba compiles a loop sooner than any())
        if held[slot] == expert:
            return True
    return False


@jit
def keep_in_place(held: IntArray, base: IntArray, ranks: Ranks) -> IntArray:
    """[L, S] the same experts on the same ranks; those that ``base`` has there keep its slots."""
    num_layers, num_slots = held.shape
    num_ranks, num_experts = len(ranks.zone), 1 + max(held.max(), base.max())
    kept = np.full((num_layers, num_slots), -1, dtype=np.int64)
    # Layer and rank on which an expert was last seen, as one number: no row needs clearing.
    wanted, placed = np.full(num_experts, -1), np.full(num_experts, -1)
    for layer in range(num_layers):
        for rank in range(num_ranks):
            here, first = layer * num_ranks + rank, ranks.first_slot[rank]
            end = first + ranks.room[layer, rank]
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
