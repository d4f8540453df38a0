"""Local search over all layers: each one goes down on its own, then is shaken if it is stuck.

Effort is counted in steps. It is dealt out in rounds: first the same to every layer, then what is
left by how far layers that could go on are from where they would stop. Within a round no layer
depends on another, so threads may share its layers in any order and the result is the same.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, N nodes, M most steps of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from eplb.bonds import Home, Search, empty_home, priced_search
from eplb.descent import PATIENCE, Record, Rules, descend
from eplb.jit import jit
from eplb.kernels import Bonds, Demand, FloatArray, IntArray, Ranks
from eplb.layer import open_layer
from eplb.score import measure
from eplb.shake import Shaking, shake_layer

ROUNDS = 4  # in which the steps are dealt out
PARTS = 4  # of a round's layers, for each thread: some layers take longer than others
# What a layer may do with more steps.
DESCENDS, STUCK, ENDED = 0, 1, 2


class Steps(NamedTuple):
    """What the search did, in order, layer by layer; of free moves only what it came from."""

    start: FloatArray  # [L] score before the first step
    slots: IntArray  # [L, M, 2] slots changed; -1 where a step changes only one
    experts: IntArray  # [L, M, 2] what they hold after it
    score: FloatArray  # [L, M + 1] before the first step, and after each
    moves: IntArray  # [L, M + 1] away from the base by then
    taken: IntArray  # [L] how many steps


class Progress(NamedTuple):
    """How far each layer is."""

    phase: IntArray  # [L] DESCENDS, STUCK or ENDED
    most: IntArray  # [L] steps of the next round
    spent: IntArray  # [L] steps so far, those that led nowhere included
    reached: FloatArray  # [L] score
    shaken: IntArray  # [L, 3] state of the draws, rounds of shaking, the last that gained


class Task(NamedTuple):
    """What the search is given, see ``improve``."""

    demand: Demand
    held: IntArray
    base: IntArray
    ranks: Ranks
    node: IntArray
    bonds: Bonds
    rules: Rules
    shaking: Shaking


def improve(task: Task, num_threads: int = 1) -> Steps:
    """Change ``task.held`` [L, S] in place until every layer is at its target or stuck.

    Args:
        task: the windows, of which those without any work do not count; experts by slot, legal,
            each with a slot; what serves now [L, S], from which moves are counted, [0, S] when
            they are free; where slots are; the node of each rank; what layers keep to, and do at
            the start; when to stop, and what to try; what to do for layers that are stuck then,
            only for free moves.
        num_threads: that share the layers.
    """
    rules, num_layers = task.rules, len(task.held)
    # Left empty, since most of it is never touched; free moves need no record.
    rows, most = (num_layers if len(task.base) else 0), rules.max_steps
    steps = Steps(
        np.ones(num_layers),
        np.empty((rows, most, 2), dtype=np.int64),
        np.empty((rows, most, 2), dtype=np.int64),
        np.empty((rows, most + 1)),
        np.empty((rows, most + 1), dtype=np.int64),
        np.zeros(num_layers, dtype=np.int64),
    )
    progress = Progress(
        np.full(num_layers, DESCENDS),
        np.zeros(num_layers, dtype=np.int64),
        np.zeros(num_layers, dtype=np.int64),
        np.ones(num_layers),
        np.zeros((num_layers, 3), dtype=np.int64),
    )
    for turn in range(ROUNDS):
        open_to = _deal_out(task, progress, turn)
        if not open_to.size:
            break
        _on_threads(lambda layers: _work(task, steps, progress, layers), open_to, num_threads)
    return steps


def _deal_out(task: Task, progress: Progress, turn: int) -> IntArray:
    """Fill in the steps of the next round; the layers that get any."""
    left = task.rules.all_steps - int(progress.spent.sum())
    if turn == 0:
        progress.most[:] = left // (2 * max(len(progress.most), 1))
        return np.arange(len(progress.most))
    aim = task.rules.target
    if task.shaking.patience > 0:
        aim = np.where(progress.phase == STUCK, task.shaking.target, aim)
    gap = np.where(progress.phase == ENDED, 0.0, np.maximum(progress.reached - aim, 0.0))
    part = left if turn == ROUNDS - 1 else left // 2
    # Sums of whole numbers do not depend on the order of layers.
    weight = np.rint(np.minimum(gap, 1e6) * 1e6).astype(np.int64)
    progress.most[:] = (weight / max(int(weight.sum()), 1) * part).astype(np.int64)
    open_to: IntArray = np.flatnonzero(progress.most > 0)
    return open_to


def _on_threads(
    work: Callable[[IntArray], object], layers: IntArray, num_threads: int
) -> None:
    """Let threads share layers; compiled code does not hold the interpreter's lock."""
    if num_threads == 1 or len(layers) == 1:
        work(layers)
        return
    parts = min(len(layers), PARTS * num_threads)
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, [layers[first::parts].copy() for first in range(parts)]))


@jit
def _work(task: Task, steps: Steps, progress: Progress, layers: IntArray) -> None:
    """One round of some layers."""
    demand, held, ranks, rules = task.demand, task.held, task.ranks, task.rules
    thrifty, num_experts = len(task.base) > 0, demand.tokens.shape[1]
    num_ranks = len(ranks.zone) if thrifty else 0
    home = empty_home(num_ranks, num_experts, task.node.max() + 1 if thrifty else 0, rules.far)
    rows = rules.max_steps if not thrifty else 0
    slots = np.empty((rows, 2), dtype=np.int64)
    experts = np.empty((rows, 2), dtype=np.int64)
    score, moves = np.empty(rows + 1), np.empty(rows + 1, dtype=np.int64)
    for number in layers:
        is_first = progress.spent[number] == 0 and progress.phase[number] == DESCENDS
        moved = 0
        if thrifty:
            moved = _come_home(home, held[number], task.base[number], ranks, task.node)
        if is_first:
            reached = score_at_once(demand, held, ranks, number)
            steps.start[number] = progress.reached[number] = reached
            if thrifty:
                steps.score[number, 0], steps.moves[number, 0] = reached, moved
            if reached <= rules.target[number]:
                progress.phase[number] = ENDED
                if thrifty:
                    _leave_home(home, task.base[number], ranks, task.node)
                continue
        layer = open_layer(demand, held, task.bonds.zone_of_expert, ranks, number)
        search = priced_search(layer, task.bonds, number, home)
        if is_first:
            steps.start[number] = progress.reached[number] = measure(layer)
        if progress.phase[number] == DESCENDS:
            done = steps.taken[number]
            record = (slots, experts, score, moves)
            if thrifty:
                record = (
                    steps.slots[number, done:],
                    steps.experts[number, done:],
                    steps.score[number, done:],
                    steps.moves[number, done:],
                )
                record[3][0] = moved
            _go_down(search, rules, progress, steps.taken, record)
            if progress.phase[number] == ENDED and task.shaking.patience > 0:
                if progress.reached[number] > task.shaking.target[number]:
                    progress.phase[number] = STUCK
        if progress.phase[number] == STUCK:
            limit = progress.most[number]
            spent, is_over = shake_layer(search, task.shaking, limit, rules, progress.shaken[number])
            progress.spent[number] += spent
            progress.most[number] -= spent
            progress.reached[number] = measure(layer)
            if is_over:
                progress.phase[number] = ENDED
        if thrifty:
            _leave_home(home, task.base[number], ranks, task.node)


@jit
def _go_down(
    search: Search, rules: Rules, progress: Progress, taken: IntArray, record: Record
) -> None:
    """Spend a layer's steps of this round on the way down, or until it ends."""
    number = search.number
    most = min(progress.most[number], rules.max_steps - taken[number])
    made, best = descend(search, rules, (most, PATIENCE), record)
    taken[number] += best
    progress.spent[number] += made
    progress.most[number] -= made
    progress.reached[number] = record[2][best]
    if made < most or taken[number] == rules.max_steps or record[2][best] <= rules.target[number]:
        progress.phase[number] = ENDED


@jit
def _come_home(
    home: Home, held: IntArray, base: IntArray, ranks: Ranks, node: IntArray
) -> int:
    """Fill in what ``base`` [S] holds where, and count the moves that are already made."""
    for rank in range(len(ranks.zone)):
        home.number[rank], home.node[rank] = 0, node[rank]
        for expert in base[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            if expert < 0:
                continue
            home.number[rank] += not home.is_there[expert, rank]
            home.is_there[expert, rank] = True
            # A dead rank's weights cannot be read.
            if ranks.zone[rank] >= 0:
                home.is_near[expert, node[rank]] = True
    moves = 0
    for rank in range(len(ranks.zone)):
        for expert in held[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            moves += expert >= 0 and not home.is_there[expert, rank]
    return moves


@jit
def _leave_home(home: Home, base: IntArray, ranks: Ranks, node: IntArray) -> None:
    """Clear what ``_come_home`` filled in."""
    for rank in range(len(ranks.zone)):
        for expert in base[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            if expert >= 0:
                home.is_there[expert, rank] = False
                home.is_near[expert, node[rank]] = False


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
