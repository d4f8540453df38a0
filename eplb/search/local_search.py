"""Local search over all layers: each descends on its own, then is perturbed if it is stuck.

Effort is counted in steps and allotted in rounds: first equally to all layers, then the rest in
proportion to the distance of each unfinished layer from its target. Within a round no layer
depends on another, so threads may process the layers in any order with the same result.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, N nodes, M most steps of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import ConstraintArrays, Demand, FloatArray, IntArray, Ranks
from eplb.search.constrained import (
    ResidentExperts,
    Search,
    clear_residents,
    empty_residents,
    fill_residents,
    search_with_move_costs,
)
from eplb.search.descent import PATIENCE, Record, Rules, descend
from eplb.search.layer import open_layer
from eplb.search.perturbation import Perturbation, perturb_layer
from eplb.search.score import measure

ROUNDS = 4  # in which the steps are allotted
PARTS = 4  # of a round's layers, for each thread: some layers take longer than others
# State of a layer: descends, stuck in a local minimum, or finished.
DESCENDS, STUCK, ENDED = 0, 1, 2


class Steps(NamedTuple):
    """Steps of the search in order, layer by layer; only ``start`` when moves are free."""

    start: FloatArray  # [L] score before the first step
    slots: IntArray  # [L, M, 2] slots changed; -1 where a step changes only one
    experts: IntArray  # [L, M, 2] what they hold after it
    score: FloatArray  # [L, M + 1] before the first step, and after each
    moves: IntArray  # [L, M + 1] from the base up to then
    taken: IntArray  # [L] how many steps


class Progress(NamedTuple):
    """State of the search of each layer."""

    phase: IntArray  # [L] DESCENDS, STUCK or ENDED
    most: IntArray  # [L] steps of the next round
    spent: IntArray  # [L] steps so far, those without gain included
    reached: FloatArray  # [L] score
    perturbed: IntArray  # [L, 3] state of the draws, perturbations so far, the last that gained


class Task(NamedTuple):
    """Arguments of the search, see ``improve``."""

    demand: Demand
    held: IntArray
    base: IntArray
    ranks: Ranks
    node: IntArray
    constraints: ConstraintArrays
    rules: Rules
    perturbation: Perturbation


def improve(task: Task, num_threads: int = 1) -> Steps:
    """Change ``task.held`` [L, S] in place until every layer is at its target or stuck.

    Args:
        task: ``demand``: windows; those without work do not count. ``held``: a legal placement,
            each expert with a slot. ``base``: the serving placement [L, S], from which moves are
            counted; [0, S] when they are free. ``ranks``: slots of each rank. ``node``: node of
            each rank. ``constraints``: met by ``held``. ``rules``: limits and kinds of change.
            ``perturbation``: of layers that are stuck; only when moves are free.
        num_threads: threads that process the layers.
    """
    rules, num_layers = task.rules, len(task.held)
    # Uninitialised, since most of it is never written; free moves need no record.
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
        open_to = _allot_steps(task, progress, turn)
        if not open_to.size:
            break
        _on_threads(lambda layers: _work(task, steps, progress, layers), open_to, num_threads)
    return steps


def _allot_steps(task: Task, progress: Progress, turn: int) -> IntArray:
    """Fill in the steps of the next round; return the layers that get any."""
    left = task.rules.all_steps - int(progress.spent.sum())
    if turn == 0:
        progress.most[:] = left // (2 * max(len(progress.most), 1))
        return np.arange(len(progress.most))
    aim = task.rules.target
    if task.perturbation.patience > 0:
        aim = np.where(progress.phase == STUCK, task.perturbation.target, aim)
    gap = np.zeros(len(aim))
    goes_on = (progress.phase != ENDED) & np.isfinite(aim)  # infinite: the layer is not searched
    np.subtract(progress.reached, aim, out=gap, where=goes_on)
    gap = np.maximum(gap, 0.0)
    part = left if turn == ROUNDS - 1 else left // 2
    # Sums of whole numbers do not depend on the order of layers.
    weight = np.rint(np.minimum(gap, 1e6) * 1e6).astype(np.int64)
    progress.most[:] = (weight / max(int(weight.sum()), 1) * part).astype(np.int64)
    open_to: IntArray = np.flatnonzero(progress.most > 0)
    return open_to


def _on_threads(work: Callable[[IntArray], object], layers: IntArray, num_threads: int) -> None:
    """Process layers on several threads; compiled code does not hold the interpreter's lock."""
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
    counts_moves, moved = len(base) > 0, 0
    num_ranks = len(ranks.zone) if counts_moves else 0
    num_experts, num_nodes = task.demand.tokens.shape[1], task.node.max() + 1 if counts_moves else 0
    resident = empty_residents(num_ranks, num_experts, num_nodes, rules.far_move_cost)
    rows = rules.max_steps if not counts_moves else 0
    slots, experts = np.empty((rows, 2), dtype=np.int64), np.empty((rows, 2), dtype=np.int64)
    score, moves = np.empty(rows + 1), np.empty(rows + 1, dtype=np.int64)
    for number in layers:
        record = (slots, experts, score, moves)
        if counts_moves:
            moved = fill_residents(resident, held[number], base[number], ranks, task.node)
            done = steps.taken[number]
            record = (
                steps.slots[number, done:],
                steps.experts[number, done:],
                steps.score[number, done:],
                steps.moves[number, done:],
            )
        record[3][0] = moved
        _work_on(task, steps, progress, number, resident, record)
        if counts_moves:
            clear_residents(resident, base[number], ranks, task.node)


@jit
def _work_on(
    task: Task,
    steps: Steps,
    progress: Progress,
    number: int,
    resident: ResidentExperts,
    record: Record,
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
    layer = open_layer(demand, held, task.constraints.zone_of_expert, ranks, number)
    search = search_with_move_costs(layer, task.constraints, number, resident)
    if is_first:
        steps.start[number] = progress.reached[number] = measure(layer)
    if progress.phase[number] == DESCENDS:
        _descend(search, rules, progress, steps.taken, record)
        is_over = progress.phase[number] == ENDED and task.perturbation.patience > 0
        if is_over and progress.reached[number] > task.perturbation.target[number]:
            progress.phase[number] = STUCK
    if progress.phase[number] == STUCK:
        limit, perturbed = progress.most[number], progress.perturbed[number]
        spent, is_over = perturb_layer(search, task.perturbation, limit, rules, perturbed)
        progress.spent[number] += spent
        progress.most[number] -= spent
        progress.reached[number] = measure(layer)
        if is_over:
            progress.phase[number] = ENDED


@jit
def _descend(
    search: Search, rules: Rules, progress: Progress, taken: IntArray, record: Record
) -> None:
    """Spend a layer's steps of this round on descent, or until it ends."""
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
    """A layer's score without ``open_layer``, for one window and no curve; else infinity.

    The score of a layer without work is 1.
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
