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

from eplb.core.jit import jit
from eplb.core.kernels import Bonds, Demand, FloatArray, IntArray, Ranks
from eplb.search.constrained import Home, Search, come_home, empty_home, leave_home, priced_search
from eplb.search.descent import PATIENCE, Record, Rules, descend
from eplb.search.layer import open_layer
from eplb.search.perturbation import Shaking, shake_layer
from eplb.search.score import measure

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
    gap = np.zeros(len(aim))
    goes_on = (progress.phase != ENDED) & np.isfinite(aim)  # without an end: not searched at all
    np.subtract(progress.reached, aim, out=gap, where=goes_on)
    gap = np.maximum(gap, 0.0)
    part = left if turn == ROUNDS - 1 else left // 2
    # Sums of whole numbers do not depend on the order of layers.
    weight = np.rint(np.minimum(gap, 1e6) * 1e6).astype(np.int64)
    progress.most[:] = (weight / max(int(weight.sum()), 1) * part).astype(np.int64)
    open_to: IntArray = np.flatnonzero(progress.most > 0)
    return open_to


def _on_threads(work: Callable[[IntArray], object], layers: IntArray, num_threads: int) -> None:
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
    held, base, ranks, rules = task.held, task.base, task.ranks, task.rules
    thrifty, moved = len(base) > 0, 0
    num_ranks = len(ranks.zone) if thrifty else 0
    num_experts, num_nodes = task.demand.tokens.shape[1], task.node.max() + 1 if thrifty else 0
    home = empty_home(num_ranks, num_experts, num_nodes, rules.far)
    rows = rules.max_steps if not thrifty else 0
    slots, experts = np.empty((rows, 2), dtype=np.int64), np.empty((rows, 2), dtype=np.int64)
    score, moves = np.empty(rows + 1), np.empty(rows + 1, dtype=np.int64)
    for number in layers:
        record = (slots, experts, score, moves)
        if thrifty:
            moved = come_home(home, held[number], base[number], ranks, task.node)
            done = steps.taken[number]
            record = (
                steps.slots[number, done:],
                steps.experts[number, done:],
                steps.score[number, done:],
                steps.moves[number, done:],
            )
        record[3][0] = moved
        _work_on(task, steps, progress, number, home, record)
        if thrifty:
            leave_home(home, base[number], ranks, task.node)


@jit
def _work_on(
    task: Task, steps: Steps, progress: Progress, number: int, home: Home, record: Record
) -> None:
    """One round of a layer."""
    demand, held, ranks, rules = task.demand, task.held, task.ranks, task.rules
    is_first = progress.spent[number] == 0 and progress.phase[number] == DESCENDS
    if is_first:
        reached = score_at_once(demand, held, ranks, number)
        steps.start[number] = progress.reached[number] = record[2][0] = reached
        if reached <= rules.target[number]:
            progress.phase[number] = ENDED
            return
    layer = open_layer(demand, held, task.bonds.zone_of_expert, ranks, number)
    search = priced_search(layer, task.bonds, number, home)
    if is_first:
        steps.start[number] = progress.reached[number] = measure(layer)
    if progress.phase[number] == DESCENDS:
        _go_down(search, rules, progress, steps.taken, record)
        is_over = progress.phase[number] == ENDED and task.shaking.patience > 0
        if is_over and progress.reached[number] > task.shaking.target[number]:
            progress.phase[number] = STUCK
    if progress.phase[number] == STUCK:
        limit, shaken = progress.most[number], progress.shaken[number]
        spent, is_over = shake_layer(search, task.shaking, limit, rules, shaken)
        progress.spent[number] += spent
        progress.most[number] -= spent
        progress.reached[number] = measure(layer)
        if is_over:
            progress.phase[number] = ENDED


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
