"""Local search, compiled: improve one layer at a time by the change that gains most per move.

A change is a swap (two slots of two ranks trade experts; one move when one of them is empty), a
copy (a slot takes another expert and the replica it held, if any, goes) or a drop (a slot is
emptied). Each relieves a rank that is busiest in some window.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, N nodes, M most steps of a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.changes import Change, Search, best_swap, outline
from eplb.copies import best_copy, best_drop
from eplb.jit import jit
from eplb.kernels import Bonds, Demand, FloatArray, IntArray, Ranks
from eplb.layer import measure, open_layer, put, rank_of, trade

NUM_HOT_RANKS = 4  # busiest ranks tried, worst first, before a layer counts as stuck
PATIENCE = 32  # steps without a better score before a layer counts as stuck
COPIES_NEVER, COPIES_LAST, COPIES_ALWAYS = 0, 1, 2


class Rules(NamedTuple):
    """When the search stops, and what it tries."""

    target: FloatArray  # [L] score at which a layer is good enough
    min_gain: float  # score that a move, or a change when moves are free, must gain
    copies: int  # COPIES_NEVER, COPIES_LAST or COPIES_ALWAYS
    max_steps: int  # M, of one layer
    all_steps: int  # of all layers together
    far: float  # moves that one from another node counts as


class Steps(NamedTuple):
    """What the search did, in order, layer by layer."""

    slots: IntArray  # [L, M, 2] slots changed; -1 where a step changes only one
    experts: IntArray  # [L, M, 2] what they hold after it
    score: FloatArray  # [L, M + 1] before the first step, and after each
    moves: IntArray  # [L, M + 1] away from the base by then
    taken: IntArray  # [L] how many steps


@jit
def improve(
    demand: Demand,
    held: IntArray,
    base: IntArray,
    ranks: Ranks,
    node: IntArray,
    bonds: Bonds,
    rules: Rules,
) -> Steps:
    """Change ``held`` [L, S] in place until every layer is at its target or stuck.

    Args:
        demand: the windows; those without any work do not count.
        held: experts by slot, -1 for empty; legal, and each expert has a slot.
        base: [L, S] what serves now, from which moves are counted; [0, S] when they are free.
        ranks: where slots are.
        node: [R].
        bonds: what a layer must keep to, and does at the start.
        rules: when to stop, and what to try.
    """
    num_layers, num_experts, _ = demand.tokens.shape
    left = rules.all_steps
    slots = np.full((num_layers, rules.max_steps, 2), -1, dtype=np.int64)
    experts = np.full((num_layers, rules.max_steps, 2), -1, dtype=np.int64)
    score = np.ones((num_layers, rules.max_steps + 1))
    moves = np.zeros((num_layers, rules.max_steps + 1), dtype=np.int64)
    taken = np.zeros(num_layers, dtype=np.int64)
    thrifty = len(base) > 0
    homes = np.zeros(len(ranks.zone), dtype=np.int64)
    fee = np.zeros((len(ranks.zone), num_experts if thrifty else 0), dtype=np.float32)
    most_replicas = held.shape[1] - num_experts + 1
    for number in range(num_layers):
        if thrifty:
            moves[number, 0] = _set_fees(
                fee, homes, rules.far, held[number], base[number], ranks, node
            )
        if not ((demand.rate[number] > 0) & (demand.weight > 0)).any():
            continue
        layer = open_layer(demand, held, bonds.zone_of_expert, ranks, number, most_replicas)
        is_bound = len(bonds.spread) > 0
        search = Search(layer, demand, ranks, bonds, number, is_bound, thrifty, fee, homes)
        start = layer.held.copy()
        # What a layer leaves of its part, later layers may use.
        most = min(rules.max_steps, left // (num_layers - number))
        made = _descend(
            search, rules, most, slots[number], experts[number], score[number], moves[number]
        )
        left -= made
        # Steps after the best state only shuffled equally busy ranks: they are not worth a move.
        taken[number] = np.argmin(score[number, : made + 1])
        layer.held[:] = start
        for step in range(taken[number]):
            for part in range(2):
                if slots[number, step, part] >= 0:
                    layer.held[slots[number, step, part]] = experts[number, step, part]
    return Steps(slots, experts, score, moves, taken)


@jit
def _set_fees(
    fee: NDArray[np.float32],
    homes: IntArray,
    far: float,
    held: IntArray,
    base: IntArray,
    ranks: Ranks,
    node: IntArray,
) -> int:
    """Fill in what each arrival counts as, and count the moves that are already made."""
    near = np.zeros((node.max() + 1, fee.shape[1]), dtype=np.bool_)
    for rank in range(len(ranks.zone)):
        for slot in range(ranks.first_slot[rank], ranks.first_slot[rank + 1]):
            # A dead rank's weights cannot be read.
            if base[slot] >= 0 and ranks.zone[rank] >= 0:
                near[node[rank], base[slot]] = True
    moves = 0
    for rank in range(len(ranks.zone)):
        for expert in range(fee.shape[1]):
            fee[rank, expert] = 1.0 if near[node[rank], expert] else far
        first, end = ranks.first_slot[rank], ranks.first_slot[rank + 1]
        homes[rank] = 0
        for expert in base[first:end]:
            if expert >= 0 and fee[rank, expert] > 0:
                homes[rank] += 1
                fee[rank, expert] = 0.0  # it is there already
        for expert in held[first:end]:
            moves += expert >= 0 and fee[rank, expert] > 0
    return moves


@jit
def _descend(
    search: Search,
    rules: Rules,
    most: int,
    slots: IntArray,
    experts: IntArray,
    score: FloatArray,
    moves: IntArray,
) -> int:
    """Change a layer step by step, write each down, and return how many there were."""
    layer, demand = search.layer, search.demand
    score[0] = measure(layer, demand)
    best = 0
    for step in range(most):
        if score[step] <= rules.target[search.number] or step - best >= PATIENCE:
            return step
        change = best_change(search, rules)
        if change[0] < 0:
            return step
        slots[step, 0], experts[step, 0] = change[0], change[1]
        slots[step, 1], experts[step, 1] = change[2], change[3]
        moves[step + 1] = moves[step] + _moves_added(search, change)
        make_change(search, change)
        score[step + 1] = measure(layer, demand)
        if score[step + 1] < score[best] - 1e-12:
            best = step + 1
    return most


@jit
def make_change(search: Search, change: Change) -> None:
    """Carry a change out."""
    if change[2] >= 0:
        trade(search.layer, search.ranks, change[0], change[2])
    else:
        put(search.layer, search.demand, search.ranks, change[0], change[1])


@jit
def _moves_added(search: Search, change: Change) -> int:
    """How many more experts a change leaves where the base does not have them."""
    layer, moves = search.layer, 0
    if not search.thrifty:
        return 0
    for part in range(2):
        slot, expert = (change[0], change[1]) if part == 0 else (change[2], change[3])
        if slot < 0:
            continue
        rank = rank_of(search.ranks, slot)
        leaves = layer.held[slot]
        moves += expert >= 0 and search.fee[rank, expert] > 0
        moves -= leaves >= 0 and search.fee[rank, leaves] > 0
    return moves


@jit
def best_change(search: Search, rules: Rules) -> Change:
    """What gains most per move for the busiest rank, else for the next; slot -1 when stuck."""
    layer = search.layer
    busiest = np.full(len(search.ranks.zone), -1.0)  # over the windows in which a rank is busiest
    for window in range(len(layer.rate)):
        hot = layer.top[window, 0]
        busiest[hot] = max(busiest[hot], 0.0) + layer.counts[window] * layer.time[hot, window]
    for _ in range(NUM_HOT_RANKS):
        hot = int(np.argmax(busiest))
        if busiest[hot] < 0:
            break
        busiest[hot] = -1.0
        bound = outline(search, hot)
        score, change = best_swap(search, bound, rules.min_gain)
        if rules.copies == COPIES_ALWAYS or (rules.copies == COPIES_LAST and change[0] < 0):
            score, copy = best_copy(search, bound, score)
            if copy[0] >= 0:
                change = copy
        if len(search.demand.curve_tokens) > 0:
            _, drop = best_drop(search, bound, score)
            if drop[0] >= 0:
                change = drop
        if change[0] >= 0:
            return change
    return (-1, -1, -1, -1)
