"""Steepest descent of one layer, compiled: each step makes the change that gains most per move.

A change is a swap (two slots of two ranks exchange experts; one move when one of them is empty), a
copy (a slot takes another expert, which replaces the one that it held) or a drop (a slot is
emptied). Each reduces the load of a rank that is busiest in some window.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, M most steps of a layer.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import FloatArray, IntArray
from eplb.search.changes import Change, best_swap, outline
from eplb.search.constrained import Search
from eplb.search.copies import best_copy, best_drop
from eplb.search.layer import Layer, restore, set_expert, swap_slots
from eplb.search.score import measure

NUM_HOT_RANKS = 4  # busiest ranks tried, worst first, before a layer counts as stuck
PATIENCE = cast(int, np.int64(32))  # steps without a better score before a layer counts as stuck
PATIENCE_PERTURBED = cast(int, np.int64(8))  # the same after a perturbation
COPIES_NEVER, COPIES_LAST, COPIES_ALWAYS = 0, 1, 2


class Rules(NamedTuple):
    """When the search stops, and what it tries."""

    target: FloatArray  # [L] score at which a layer is good enough
    min_gain: float  # score that a move, or a change when moves are free, must gain
    copies: int  # COPIES_NEVER, COPIES_LAST or COPIES_ALWAYS
    max_steps: int  # M, of one layer
    all_steps: int  # of all layers together
    far_move_cost: float  # moves that one move from another node counts as


# Of one layer's steps: slots [M, 2], experts [M, 2], score [M + 1] and moves [M + 1] as in Steps.
Record = tuple[IntArray, IntArray, FloatArray, IntArray]
Made = tuple[int, int]


@jit
def descend(search: Search, rules: Rules, limits: tuple[int, int], record: Record) -> Made:
    """Change a layer step by step, record each step, and restore the best state.

    Args:
        search: the layer.
        rules: its target, and the kinds of change to try.
        limits: most steps in all, and most steps without a better score.
        record: arrays as long as the first limit.

    Returns:
        The number of steps, and the number of those that lead to the best state: later steps only
        exchange load between equally busy ranks.
    """
    (most, patience), (slots, experts, score, moves) = limits, record
    target, held = rules.target[search.number], search.layer.held
    best_held = held.copy()
    score[0] = measure(search.layer)
    best = made = 0
    if search.counts_moves:
        _count_kept(search)
    while made < most and score[best] > target and made - best < patience:
        change = best_change(search, rules.copies, rules.min_gain)
        if change[0] < 0:
            break
        slots[made, 0], experts[made, 0], slots[made, 1], experts[made, 1] = change
        moves[made + 1] = moves[made]
        if search.counts_moves:
            moves[made + 1] += _count_moves(search, change)
        make_change(search.layer, change)
        made += 1
        score[made] = measure(search.layer)
        if score[made] < score[best] - 1e-12:
            best = made
            copy_into(best_held, held)
    if best < made:
        restore(search.layer, best_held)
    return made, best


@jit
def copy_into(target: IntArray, source: IntArray) -> None:
    """As ``target[:] = source``, which takes long to compile."""
    for place in range(len(target)):
        target[place] = source[place]


@jit
def make_change(layer: Layer, change: Change) -> None:
    """Apply a change to a layer."""
    if change[2] >= 0:
        swap_slots(layer, change[0], change[2])
    else:
        set_expert(layer, change[0], change[1])


@jit
def _count_kept(search: Search) -> None:
    """Count the resident experts that each rank still has."""
    layer, resident = search.layer, search.resident
    resident.kept.fill(0)
    for slot in range(len(layer.held)):
        rank, expert = layer.rank_of_slot[slot], layer.held[slot]
        resident.kept[rank] += expert >= 0 and resident.on_rank[expert, rank]


@jit
def _count_moves(search: Search, change: Change) -> int:
    """How many moves from the base a change adds; negative where it undoes some."""
    layer, resident, moves = search.layer, search.resident, 0
    for part in range(2):
        slot, expert = (change[0], change[1]) if part == 0 else (change[2], change[3])
        if slot < 0:
            continue
        rank, leaves = layer.rank_of_slot[slot], layer.held[slot]
        if expert >= 0:
            was_there = resident.on_rank[expert, rank]
            moves += not was_there
            resident.kept[rank] += was_there
        if leaves >= 0:
            was_there = resident.on_rank[leaves, rank]
            moves -= not was_there
            resident.kept[rank] -= was_there
    return moves


@jit
def best_change(search: Search, copies: int, min_gain: float) -> Change:
    """The change with the most gain per move for the busiest rank, else the next; slot -1: none."""
    layer = search.layer
    busiest = np.full(len(layer.zone), -1.0)  # over the windows in which a rank is busiest
    for window in range(len(layer.rate)):
        hot = layer.top[window, 0]
        busiest[hot] = max(busiest[hot], 0.0) + layer.counts[window] * layer.time[hot, window]
    for _ in range(NUM_HOT_RANKS):
        hot = int(np.argmax(busiest))
        if busiest[hot] < 0:
            break
        busiest[hot] = -1.0
        bound = outline(search, hot)
        score, change = best_swap(search, bound, min_gain)
        if copies == COPIES_ALWAYS or (copies == COPIES_LAST and change[0] < 0):
            score, copy = best_copy(search, bound, score)
            if copy[0] >= 0:
                change = copy
        if len(layer.curve_tokens) > 0:
            _, drop = best_drop(search, bound, score)
            if drop[0] >= 0:
                change = drop
        if change[0] >= 0:
            return change
    return (-1, -1, -1, -1)
