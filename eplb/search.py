"""Local search, compiled: improve one layer at a time by the change that gains most per move.

A change is a swap (two slots of two ranks trade experts; one move when one of them is empty), a
copy (a slot takes another expert and the replica it held, if any, goes) or a drop (a slot is
emptied). Each relieves a rank that is busiest in some window.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, N nodes, M most steps of a layer.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from eplb.changes import Change, Search, best_swap, outline, priced_search
from eplb.copies import best_copy, best_drop
from eplb.jit import jit
from eplb.kernels import Bonds, Demand, FloatArray, IntArray, Ranks
from eplb.layer import Layer, measure, open_layer, put, trade

NUM_HOT_RANKS = 4  # busiest ranks tried, worst first, before a layer counts as stuck
PATIENCE = cast(int, np.int64(32))  # steps without a better score before a layer counts as stuck
QUICK = cast(int, np.int64(8))  # the same while a layer is shaken
COPIES_NEVER, COPIES_LAST, COPIES_ALWAYS = 0, 1, 2


class Rules(NamedTuple):
    """When the search stops, and what it tries."""

    target: FloatArray  # [L] score at which a layer is good enough
    min_gain: float  # score that a move, or a change when moves are free, must gain
    copies: int  # COPIES_NEVER, COPIES_LAST or COPIES_ALWAYS
    max_steps: int  # M, of one layer
    all_steps: int  # of all layers together
    far: float  # moves that one from another node counts as


# Of one layer's steps: slots [M, 2], experts [M, 2], score [M + 1] and moves [M + 1] as in Steps.
Record = tuple[IntArray, IntArray, FloatArray, IntArray]
Made = tuple[int, int]


class Steps(NamedTuple):
    """What the search did, in order, layer by layer; of free moves only what it came from."""

    start: FloatArray  # [L] score before the first step
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
    thrifty = len(base) > 0
    # Left empty, since most of it is never touched; free moves need no record of all layers.
    rows = num_layers if thrifty else 1
    slots = np.empty((rows, rules.max_steps, 2), dtype=np.int64)
    experts = np.empty((rows, rules.max_steps, 2), dtype=np.int64)
    score = np.empty((rows, rules.max_steps + 1))
    moves = np.empty((rows, rules.max_steps + 1), dtype=np.int64)
    start, taken = np.ones(num_layers), np.zeros(num_layers, dtype=np.int64)
    homes = np.zeros(len(ranks.zone), dtype=np.int64)
    fee = np.zeros((len(ranks.zone), num_experts if thrifty else 0), dtype=np.float32)
    most_replicas = held.shape[1] - num_experts + 1
    for number in range(num_layers):
        row = number if thrifty else 0
        score[row, 0], moves[row, 0] = 1.0, 0
        if thrifty:
            moves[row, 0] = _set_fees(
                fee, homes, rules.far, held[number], base[number], ranks, node
            )
        if not is_busy(demand, number):
            continue
        start[number] = score[row, 0] = score_at_once(demand, held, ranks, number)
        if start[number] <= rules.target[number]:
            continue
        layer = open_layer(demand, held, bonds.zone_of_expert, ranks, number, most_replicas)
        search = priced_search(layer, bonds, number, fee, homes if thrifty else homes[:0])
        # What a layer leaves of its part, later layers may use.
        most = min(rules.max_steps, left // (num_layers - number))
        record = (slots[row], experts[row], score[row], moves[row])
        made, taken[number] = descend(search, rules, (most, PATIENCE), record)
        start[number] = score[row, 0]
        left -= made
    return Steps(start, slots, experts, score, moves, taken)


@jit
def score_at_once(demand: Demand, held: IntArray, ranks: Ranks, number: int) -> float:
    """A layer's score without opening it, where that is simple: one window, no curve. Else inf."""
    if len(demand.weight) > 1 or len(demand.curve_tokens) > 0:
        return np.inf
    replicas = np.zeros(demand.tokens.shape[1], dtype=np.int64)
    for slot in range(held.shape[1]):
        if held[number, slot] >= 0:
            replicas[held[number, slot]] += 1
    rate, busiest = demand.rate[number, 0], 0.0
    for rank in range(len(ranks.zone)):
        time = demand.extra[number, 0]
        for slot in range(ranks.first_slot[rank], ranks.first_slot[rank + 1]):
            expert = held[number, slot]
            if expert >= 0:
                time += rate * (demand.tokens[number, expert, 0] / replicas[expert])
        if ranks.zone[rank] >= 0:
            busiest = max(busiest, time * ranks.slowness[rank])
    return busiest


@jit
def is_busy(demand: Demand, number: int) -> bool:
    """Whether any window of a layer counts."""
    for window in range(len(demand.weight)):
        if demand.rate[number, window] > 0 and demand.weight[window] > 0:
            return True
    return False


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
def descend(search: Search, rules: Rules, limits: tuple[int, int], record: Record) -> Made:
    """Change a layer step by step, write each down, and leave it in the best state.

    Args:
        search: the layer.
        rules: its target, and what is tried.
        limits: steps in all, and steps without a better score.
        record: as long as the first limit.

    Returns:
        How many steps there were, and how many lead to the best state: those after it only
        shuffled equally busy ranks, and are not worth a move.
    """
    (most, patience), (slots, experts, score, moves) = limits, record
    target, held = rules.target[search.number], search.layer.held
    best_held = held.copy()
    score[0] = measure(search.layer)
    best = made = 0
    while made < most and score[best] > target and made - best < patience:
        change = best_change(search, rules.copies, rules.min_gain)
        if change[0] < 0:
            break
        slots[made, 0], experts[made, 0], slots[made, 1], experts[made, 1] = change
        moves[made + 1] = moves[made] + _moves_added(search, change)
        make_change(search.layer, change)
        made += 1
        score[made] = measure(search.layer)
        if score[made] < score[best] - 1e-12:
            best = made
            copy_into(best_held, held)
    copy_into(held, best_held)
    return made, best


@jit
def copy_into(target: IntArray, source: IntArray) -> None:
    """As ``target[:] = source``, which takes long to compile."""
    for place in range(len(target)):
        target[place] = source[place]


@jit
def make_change(layer: Layer, change: Change) -> None:
    """Carry a change out."""
    if change[2] >= 0:
        trade(layer, change[0], change[2])
    else:
        put(layer, change[0], change[1])


@jit
def _moves_added(search: Search, change: Change) -> int:
    """How many more experts a change leaves where the base does not have them."""
    layer, fee, moves = search.layer, search.fee, 0
    if not search.thrifty:
        return 0
    for part in range(2):
        slot, expert = (change[0], change[1]) if part == 0 else (change[2], change[3])
        if slot < 0:
            continue
        rank, leaves = layer.rank_of_slot[slot], layer.held[slot]
        moves += expert >= 0 and fee[rank, expert] > 0
        moves -= leaves >= 0 and fee[rank, leaves] > 0
    return moves


@jit
def best_change(search: Search, copies: int, min_gain: float) -> Change:
    """What gains most per move for the busiest rank, else for the next; slot -1 when stuck."""
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
