"""Local search over all layers: each descends on its own, then is perturbed if it is stuck.

Descent is steepest: each step makes the change that gains most per move, for a rank that is busiest
in some window. A perturbation makes random changes and descends again, and the best state is kept.
With few slots per rank, replica counts matter as much as positions, and the path from one set of
counts to a better one leads through worse ones. Draws come from a seed.

Effort is counted in steps and allotted in rounds: first equally to all layers, then the rest in
proportion to the distance of each unfinished layer from its target. Within a round no layer
depends on another, so threads may process the layers in any order with the same result.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, N nodes, M most steps of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import NamedTuple, cast

import numpy as np

from eplb.core.constraints import ConstraintArrays
from eplb.core.demand import Demand
from eplb.core.jit import NONE, FloatArray, IntArray, copy_into, inner, kernel
from eplb.core.problem import Frame, Problem
from eplb.core.topology import Topology
from eplb.core.zones import Ranks
from eplb.search.changes import Change, best_copy, best_drop, best_swap, outline
from eplb.search.layer import (
    Layer,
    ResidentExperts,
    Search,
    clear_residents,
    empty_residents,
    fill_residents,
    may_move,
    measure,
    open_layer,
    open_search,
    restore,
    set_expert,
    swap_slots,
)

FINEST_GAIN = 1e-5  # score that a change of the search must gain
WINDOWS_GAIN = 5e-4  # the same over several windows, where less only fits their noise
STEPS_PER_SLOT = 2  # a limit that the search does not reach in practice
PATIENT, NO_END = 8, 1_000_000  # perturbations of a layer in a row without gain
FREE_STEP = 0.4  # time of a step when moves are not counted, relative to one when they are
MOST_MS = 200.0  # time of a search, unless the budget sets a limit
ROUNDS = 4  # in which the steps are allotted
PARTS = 4  # for each thread and round: some layers take longer than others
NUM_HOT_RANKS = 4  # busiest ranks tried, worst first, before a layer counts as stuck
# As in ``eplb/core/jit.py``, plain numbers as arguments would make numba compile once more.
PATIENCE = cast(int, np.int64(32))  # steps without a better score before a layer counts as stuck
PATIENCE_PERTURBED = cast(int, np.int64(8))  # the same after a perturbation
COPIES_NEVER, COPIES_LAST, COPIES_ALWAYS = 0, 1, cast(int, np.int64(2))
PERTURBED_CHANGES = 2  # made at random in a perturbation
TRIES = 20  # draws for a random change that is allowed
# State of a layer: descends, stuck in a local minimum, or finished.
DESCENDS, STUCK, ENDED = 0, 1, 2


class Rules(NamedTuple):
    """When the search stops, and what it tries."""

    target: FloatArray  # [L] score at which a layer is good enough
    min_gain: float  # score that a move, or a change when moves are free, must gain
    copies: int  # COPIES_NEVER, COPIES_LAST or COPIES_ALWAYS
    max_steps: int  # M: most steps of one layer
    all_steps: int  # most steps of all layers together
    far_move_cost: float  # moves that one move from another node counts as
    stuck: FloatArray  # [L] score above which a layer is perturbed at the end of its descent
    patience: int  # perturbations in a row without gain after which a layer ends; 0: none at all
    seed: int  # for the draws of perturbations


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
    """Arguments of the compiled search, see ``improve``."""

    demand: Demand
    held: IntArray
    base: IntArray  # [0, S] when moves are free
    ranks: Ranks
    constraints: ConstraintArrays
    rules: Rules


def rules_for(
    problem: Problem,
    demand: Demand,
    target: FloatArray,
    min_gain: float,
    copies: int,
    stuck: FloatArray | None = None,
) -> Rules:
    """Rules of a search with the problem's budget of time.

    Args:
        problem: its budget, seed and topology.
        demand: a step takes longer with more windows.
        target: [L] score at which a layer is good enough.
        min_gain: score that a change must gain.
        copies: COPIES_NEVER, COPIES_LAST or COPIES_ALWAYS.
        stuck: [L] score above which a layer is perturbed; None: no layer is.
    """
    every = NO_END * len(target)
    time_ms = MOST_MS if problem.budget.time_ms is None else problem.budget.time_ms
    if time_ms < inf:
        each = step_ms(problem.topology, len(demand.weight), problem.current is None)
        every = min(every, int(time_ms * problem.part / each))
    # Without end where the budget limits the time.
    patience = PATIENT if problem.budget.time_ms in (None, inf) else NO_END
    return Rules(
        target,
        min_gain,
        copies,
        max_steps=STEPS_PER_SLOT * problem.topology.num_slots,
        all_steps=every,
        far_move_cost=problem.cost.far_moves,
        stuck=target if stuck is None else stuck,
        patience=0 if stuck is None else patience,
        seed=problem.seed,
    )


def step_ms(topology: Topology, num_windows: int, is_fresh: bool) -> float:
    """Time of a search step on an idle core in ms, fitted to measurements of 96 to 2,048 slots."""
    of_one = 0.003 + 1.2e-5 * topology.num_slots + 3e-5 * topology.num_ranks
    return of_one * (0.8 + 0.2 * num_windows) * (FREE_STEP if is_fresh else 1.0)


def improve(
    problem: Problem,
    frame: Frame,
    demand: Demand,
    held: IntArray,
    rules: Rules,
    base: IntArray | None = None,
) -> Steps:
    """Change ``held`` [L, S] in place until every layer is at its target or stuck.

    Args:
        problem: its budget has the number of threads.
        frame: zones, and the constraints that ``held`` meets.
        demand: windows; those without work do not count.
        held: a legal placement, each expert with a slot.
        rules: limits and kinds of change; layers are perturbed only when moves are free.
        base: the serving placement [L, S], from which moves are counted; None: they are free.
    """
    num_layers, most = len(held), rules.max_steps
    num_threads = problem.budget.num_threads
    if base is None:
        base = np.zeros((0, held.shape[1]), dtype=np.int64)
    task = Task(demand, held, base, frame.zones.ranks, frame.constraints, rules)
    # Uninitialised, since most of it is never written; free moves need no record.
    steps = Steps(
        np.ones(num_layers),
        np.empty((len(base), most, 2), dtype=np.int64),
        np.empty((len(base), most, 2), dtype=np.int64),
        np.empty((len(base), most + 1)),
        np.empty((len(base), most + 1), dtype=np.int64),
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
        open_to = _allot_steps(rules, progress, turn)
        if not open_to.size:
            break
        _on_threads(lambda layers: _work(task, steps, progress, layers), open_to, num_threads)
    return steps


def searched_score(problem: Problem, held: IntArray) -> FloatArray:
    """[L] the score that the search minimises, of any legal placement with equal split."""
    ones = np.ones(len(held))
    no_steps = Rules(ones, 0.0, COPIES_NEVER, 0, 0, problem.cost.far_moves, ones, 0, 0)
    return improve(problem, problem.frame, problem.demand, held.astype(np.int64), no_steps).start


def _allot_steps(rules: Rules, progress: Progress, turn: int) -> IntArray:
    """Fill in the steps of the next round; return the layers that get any."""
    left = rules.all_steps - int(progress.spent.sum())
    if turn == 0:
        progress.most[:] = left // (2 * max(len(progress.most), 1))
        return np.arange(len(progress.most))
    aim = np.where(progress.phase == STUCK, rules.stuck, rules.target)
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


@kernel
def _work(task: Task, steps: Steps, progress: Progress, layers: IntArray) -> None:
    """One round of some layers."""
    held, base, ranks, rules = task.held, task.base, task.ranks, task.rules
    counts_moves, moved = len(base) > 0, 0
    num_experts = task.demand.tokens.shape[1]
    num_ranks = len(ranks.zone) if counts_moves else 0
    num_nodes = ranks.node.max() + 1 if counts_moves else 0
    resident = empty_residents(num_ranks, num_experts, num_nodes, rules.far_move_cost)
    rows = rules.max_steps if not counts_moves else 0
    slots, experts = np.empty((rows, 2), dtype=np.int64), np.empty((rows, 2), dtype=np.int64)
    score, moves = np.empty(rows + 1), np.empty(rows + 1, dtype=np.int64)
    for number in layers:
        record = (slots, experts, score, moves)
        if counts_moves:
            moved = fill_residents(resident, held[number], base[number], ranks)
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
            clear_residents(resident, base[number], ranks)


@inner
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
    search = open_search(layer, task.constraints, number, resident)
    if is_first:
        steps.start[number] = progress.reached[number] = measure(layer)
    if progress.phase[number] == DESCENDS:
        taken, target = steps.taken, rules.target[number]
        most = min(progress.most[number], rules.max_steps - taken[number])
        made, best = descend(search, target, rules.copies, rules.min_gain, (most, PATIENCE), record)
        taken[number] += best
        progress.spent[number] += made
        progress.most[number] -= made
        progress.reached[number] = record[2][best]
        is_last = made < most or taken[number] == rules.max_steps
        if is_last or progress.reached[number] <= target:
            progress.phase[number] = ENDED
        is_over = progress.phase[number] == ENDED and rules.patience > 0
        if is_over and progress.reached[number] > rules.stuck[number]:
            progress.phase[number] = STUCK
    if progress.phase[number] == STUCK:
        limit, perturbed = progress.most[number], progress.perturbed[number]
        spent, is_over = perturb_layer(search, rules, limit, perturbed)
        progress.spent[number] += spent
        progress.most[number] -= spent
        progress.reached[number] = measure(layer)
        if is_over:
            progress.phase[number] = ENDED


@inner
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


@inner
def is_busy(demand: Demand, number: int) -> bool:
    """Whether any window of a layer counts."""
    for window in range(len(demand.weight)):
        if demand.rate[number, window] > 0 and demand.weight[window] > 0:
            return True
    return False


# Of one layer's steps: slots [M, 2], experts [M, 2], score [M + 1] and moves [M + 1] as in Steps.
Record = tuple[IntArray, IntArray, FloatArray, IntArray]
Made = tuple[int, int]


@inner
def descend(
    search: Search,
    target: float,
    copies: int,
    min_gain: float,
    limits: tuple[int, int],
    record: Record,
) -> Made:
    """Change a layer step by step, record each step, and restore the best state.

    Args:
        search: the layer.
        target: score at which it is good enough.
        copies: as in ``Rules``.
        min_gain: as in ``Rules``.
        limits: most steps in all, and most steps without a better score.
        record: arrays as long as the first limit.

    Returns:
        The number of steps, and the number of those that lead to the best state: later steps only
        exchange load between equally busy ranks.
    """
    (most, patience), (slots, experts, score, moves) = limits, record
    held = search.layer.held
    best_held = held.copy()
    score[0] = measure(search.layer)
    best = made = 0
    if search.counts_moves:
        _count_kept(search)
    while made < most and score[best] > target and made - best < patience:
        change = best_change(search, copies, min_gain)
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


@inner
def make_change(layer: Layer, change: Change) -> None:
    """Apply a change to a layer."""
    if change[2] >= 0:
        swap_slots(layer, change[0], change[2])
    else:
        set_expert(layer, change[0], change[1])


@inner
def _count_kept(search: Search) -> None:
    """Count the resident experts that each rank still has."""
    layer, resident = search.layer, search.resident
    resident.kept.fill(0)
    for slot in range(len(layer.held)):
        rank, expert = layer.rank_of_slot[slot], layer.held[slot]
        resident.kept[rank] += expert >= 0 and resident.on_rank[expert, rank]


@inner
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


@inner
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


@inner
def perturb_layer(search: Search, rules: Rules, most: int, perturbed: IntArray) -> tuple[int, bool]:
    """Perturb a layer for about so many steps and restore the best state.

    Args:
        search: the layer.
        rules: how often, and the seed.
        most: steps.
        perturbed: state of the draws, perturbations so far, the last of them that gained; zero at
            first. A later call continues where this one ended.

    Returns:
        Steps that were made, and whether the layer is finished.
    """
    layer, target = search.layer, rules.stuck[search.number]
    if perturbed[1] == 0:
        perturbed[0] = (rules.seed + 1) * 7919 + search.number * 104729
    best_held, best = layer.held.copy(), measure(layer)
    slots = np.empty((rules.max_steps, 2), dtype=np.int64)
    moves, score = np.zeros(rules.max_steps + 1, dtype=np.int64), np.empty(rules.max_steps + 1)
    record = (slots, slots.copy(), score, moves)
    limits, spent = (rules.max_steps, PATIENCE_PERTURBED), 0
    while best > target and spent < most and perturbed[1] - perturbed[2] < rules.patience:
        restore(layer, best_held)
        measure(layer)
        window = _draw(perturbed, len(layer.rate))
        first, end = 0, len(layer.held)
        if perturbed[1] % 2 == 1:
            # With many ranks a change at a random slot rarely concerns the busiest one.
            hot = layer.top[window, 0]
            first, end = layer.first_slot[hot], layer.first_slot[hot + 1]
        _change_at_random(search, perturbed, first, end)
        for _ in range(PERTURBED_CHANGES - 1):
            _change_at_random(search, perturbed, 0, len(layer.held))
        made, taken = descend(search, target, COPIES_ALWAYS, rules.min_gain, limits, record)
        spent += made + 1  # a perturbation counts as a step even without a change
        perturbed[1] += 1
        if score[taken] < best - 1e-12:
            copy_into(best_held, layer.held)
            best, perturbed[2] = score[taken], perturbed[1]
    restore(layer, best_held)
    return spent, spent < most


@inner
def _draw(state: IntArray, below: int) -> int:
    """A number below another: a linear congruential generator modulo 2**31."""
    state[0] = (state[0] * 1103515245 + 12345) % 2147483648
    return int((state[0] >> 8) % below)


@inner
def _change_at_random(search: Search, state: IntArray, first: int, end: int) -> None:
    """Put another expert into one of these slots, or swap it with any other slot."""
    layer = search.layer
    held, holds, rank_of_slot = layer.held, layer.holds, layer.rank_of_slot
    zone, zone_of_expert = layer.zone, layer.zone_of_expert
    for _ in range(TRIES):
        slot = first + _draw(state, end - first)
        rank, leaves = rank_of_slot[slot], held[slot]
        if slot - layer.first_slot[rank] >= layer.room[rank] or leaves < 0:
            continue
        if layer.replicas[leaves] > 1 and may_move(search, leaves, rank, NONE):
            expert = _draw(state, len(layer.replicas))
            if zone_of_expert[expert] == zone[rank] and not holds[expert, rank]:
                set_expert(layer, slot, expert)
                return
        other = _draw(state, len(held))
        there, theirs = rank_of_slot[other], held[other]
        if there == rank or theirs < 0 or theirs == leaves:
            continue
        if holds[theirs, rank] or holds[leaves, there]:
            continue
        if zone_of_expert[theirs] != zone[rank] or zone_of_expert[leaves] != zone[there]:
            continue
        if may_move(search, leaves, rank, there) and may_move(search, theirs, there, rank):
            swap_slots(layer, slot, other)
            return
