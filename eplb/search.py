"""Local search over all layers, compiled: each one goes down on its own, then is shaken if stuck.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, N nodes, M most steps of a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.bonds import Search, priced_search
from eplb.descent import PATIENCE, Rules, descend
from eplb.jit import jit
from eplb.kernels import Bonds, Demand, FloatArray, IntArray, Ranks
from eplb.layer import open_layer
from eplb.shake import Shaking, shake_layer


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
    shaking: Shaking,
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
        shaking: what to do for layers that are stuck then; only for free moves.
    """
    num_layers, num_experts, _ = demand.tokens.shape
    thrifty, left = len(base) > 0, rules.all_steps
    # Left empty, since most of it is never touched; free moves need no record of all layers.
    rows = num_layers if thrifty else 1
    slots = np.empty((rows, rules.max_steps, 2), dtype=np.int64)
    experts = np.empty((rows, rules.max_steps, 2), dtype=np.int64)
    score = np.empty((rows, rules.max_steps + 1))
    moves = np.empty((rows, rules.max_steps + 1), dtype=np.int64)
    start, reached, taken = np.ones(num_layers), np.ones(num_layers), np.zeros(num_layers, np.int64)
    homes = np.zeros(len(ranks.zone) if thrifty else 0, dtype=np.int64)
    fee = np.zeros((len(homes), num_experts), dtype=np.float32)
    for number in range(num_layers):
        row = number if thrifty else 0
        moves[row, 0] = 0
        if thrifty:
            moves[row, 0] = _set_fees(
                fee, homes, rules.far, held[number], base[number], ranks, node
            )
        start[number] = score[row, 0] = score_at_once(demand, held, ranks, number)
        reached[number] = start[number]
        if start[number] <= rules.target[number]:
            continue
        search = _open(demand, held, ranks, bonds, number, fee, homes)
        # What a layer leaves of its part, later layers may use.
        most = min(rules.max_steps, left // (num_layers - number))
        record = (slots[row], experts[row], score[row], moves[row])
        made, taken[number] = descend(search, rules, (most, PATIENCE), record)
        start[number], reached[number] = score[row, 0], score[row, taken[number]]
        left -= made
    num_stuck = _count_stuck(reached, shaking)
    left = rules.all_steps - taken.sum()  # steps that led nowhere are not held against it
    for number in range(num_layers):
        if num_stuck > 0 and reached[number] > shaking.target[number]:
            search = _open(demand, held, ranks, bonds, number, fee, homes)
            left -= shake_layer(search, shaking, left // num_stuck, rules)
            num_stuck -= 1
    return Steps(start, slots, experts, score, moves, taken)


@jit
def _open(
    demand: Demand,
    held: IntArray,
    ranks: Ranks,
    bonds: Bonds,
    number: int,
    fee: NDArray[np.float32],
    homes: IntArray,
) -> Search:
    most_replicas = held.shape[1] - demand.tokens.shape[1] + 1
    layer = open_layer(demand, held, bonds.zone_of_expert, ranks, number, most_replicas)
    return priced_search(layer, bonds, number, fee, homes)


@jit
def _count_stuck(reached: FloatArray, shaking: Shaking) -> int:
    stuck = 0
    for number in range(len(shaking.target)):
        stuck += shaking.patience > 0 and reached[number] > shaking.target[number]
    return stuck


@jit
def score_at_once(demand: Demand, held: IntArray, ranks: Ranks, number: int) -> float:
    """A layer's score without opening it, where that is simple: one window, no curve. Else inf.

    A layer without work is even.
    """
    if not is_busy(demand, number):
        return 1.0
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
