"""From the placement that serves to a better one, with few moves.

First what must be: experts leave dead ranks, doubles go, every expert gets a slot, constraints are
kept. Then the local search of ``eplb/search/local_search.py`` from there, each layer on its own; at
last the steps of all layers are bought in order of gain per move, so that any budget buys the most.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.kernels import BoolArray, Demand, FloatArray, IntArray
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.packing.zones import nodes_of_groups, zones_for
from eplb.policies.frontier import Curve, buy, curve_of, frontier_of, worth_their_price
from eplb.policies.greedy import (
    WINDOWS_GAIN,
    Frame,
    enforced,
    frame_of,
    history_noise,
    in_place,
    refined,
    rules_for,
)
from eplb.search.demand import demand_of, demand_of_sum, summed
from eplb.search.descent import COPIES_ALWAYS
from eplb.search.enforce import clean
from eplb.search.local_search import Steps, Task, improve
from eplb.search.perturbation import NO_SHAKING

EXPLORED = 0.25  # of its price, what a step must gain for the search to go on from it


class Improved(NamedTuple):
    """What the search from a placement found within the budget."""

    held: IntArray  # [L, S]
    curve: Curve


def incremental(problem: Problem, current: Placement, only: BoolArray | None = None) -> Improved:
    """``current`` improved within the budget.

    A layer is planned afresh where its expert groups are not on nodes yet, and without a budget of
    moves also where a fresh plan gains enough for each of the many moves that it takes.
    """
    base = current.slot_to_expert.astype(np.int64)
    frame, lost = _frame_from(problem, current)
    demand = demand_of(problem)
    start = repaired(problem, frame, base)
    steps = _searched(problem, frame, demand, start, base, only)
    kept = np.flatnonzero(~lost)
    spent = int(steps.moves[kept, 0].sum())
    left = None if problem.max_moves is None else max(problem.max_moves - spent, 0)
    frontier = worth_their_price(frontier_of(steps, kept), steps, problem.price)
    taken, bought = buy(frontier, len(base), left)
    held = followed(start, steps, taken)
    curve = curve_of(bought, steps.start, spent)
    reached = np.take_along_axis(steps.score, taken[:, None], axis=1)[:, 0]
    hopeful = _may_gain_afresh(problem, reached) & ~lost
    if only is not None:
        hopeful &= only
        lost &= only
    if not (lost | hopeful).any():
        return Improved(held, curve)
    return _with_fresh(problem, Improved(held, curve), reached, lost, hopeful)


def _searched(
    problem: Problem,
    frame: Frame,
    demand: Demand,
    start: IntArray,
    base: IntArray,
    only: BoolArray | None = None,
) -> Steps:
    target = _good_enough(problem)
    if only is not None:
        target = np.where(only, target, np.inf)
    # A step that gains too little may open one that gains more: steps are bought together.
    least = max(float(problem.price.min()) * EXPLORED, WINDOWS_GAIN)
    rules = rules_for(problem, demand, target, least, COPIES_ALWAYS)
    ranks, node, bonds = frame.zones.ranks, frame.node, frame.bonds
    task = Task(demand, start.copy(), base, ranks, node, bonds, rules, NO_SHAKING)
    return improve(task, problem.budget.num_threads)


def _may_gain_afresh(problem: Problem, reached: FloatArray) -> BoolArray:
    """[L] whether perfect balance would be worth moving half of the slots, where more is wanted."""
    is_worth = reached - 1.0 > problem.price * (problem.topology.num_slots / 2)
    hopeful: BoolArray = is_worth & (reached > _good_enough(problem))
    return hopeful


def _good_enough(problem: Problem) -> FloatArray:
    """[L] imbalance at which a layer is not searched: below the noise it would fit noise."""
    enough: FloatArray = np.maximum(problem.budget.target_imbalance, 1.0 + history_noise(problem))
    return enough


def _with_fresh(
    problem: Problem, found: Improved, reached: FloatArray, lost: BoolArray, hopeful: BoolArray
) -> Improved:
    """Layers planned afresh where that is needed, or pays for its moves and is within budget."""
    assert problem.current is not None, "there is a placement that was improved"
    base = problem.current.slot_to_expert
    fresh = in_place(refined(problem), base, problem.topology, problem.room)
    score = score_of(problem, fresh)
    moves = _moves(base, found.held)
    extra = np.maximum(_moves(base, fresh) - moves, 0)
    gain = reached - score
    worth = hopeful & (gain > 0) & (gain > np.where(extra > 0, problem.price, 0.0) * extra)
    if problem.max_moves is not None:
        left = problem.max_moves - int(moves[~lost].sum())
        best_first = np.argsort(-gain / np.maximum(extra, 1), kind="stable")
        best_first = best_first[worth[best_first]]
        worth[best_first] = extra[best_first].cumsum() <= left
    chosen = lost | worth
    held = np.where(chosen[:, None], fresh, found.held)
    last = int(_moves(base, in_place(held, base, problem.topology, problem.room)).sum())
    balance = float(np.where(chosen, score, reached).mean())
    return Improved(held, (*found.curve, (last, balance)) if chosen.any() else found.curve)


def score_of(problem: Problem, held: IntArray) -> FloatArray:
    """[L] the score that the search minimises, of any legal placement with equal split."""
    demand = demand_of(problem)
    frame = frame_of(problem)
    rules = rules_for(problem, demand, np.ones(len(held)), 0.0, COPIES_ALWAYS)
    free = np.zeros((0, held.shape[1]), dtype=np.int64)
    task = Task(
        demand,
        held.astype(np.int64),
        free,
        frame.zones.ranks,
        frame.node,
        frame.bonds,
        rules._replace(max_steps=0, all_steps=0),
        NO_SHAKING,
    )
    return improve(task).start


def _moves(base: NDArray[np.int32], held: IntArray) -> IntArray:
    moves: IntArray = ((base != held) & (held >= 0)).sum(axis=1)
    return moves


def _frame_from(problem: Problem, current: Placement) -> tuple[Frame, BoolArray]:
    """Zones as ``current`` has them, and [L] which layers do not keep groups on nodes at all."""
    topology, num_groups = problem.topology, problem.num_groups
    zones = zones_for(summed(problem), topology, num_groups, problem.room)
    lost = np.zeros(current.num_layers, dtype=np.bool_)
    if problem.groups_stay:
        for layer, held in enumerate(current.slot_to_expert):
            node_of_group = nodes_of_groups(held, topology, num_groups, problem.num_experts)
            lost[layer] = node_of_group is None
            if node_of_group is not None:
                size = problem.num_experts // num_groups
                zones.of_expert[layer] = np.repeat(node_of_group, size)
    return frame_of(problem, zones), lost


def repaired(problem: Problem, frame: Frame, base: IntArray) -> IntArray:
    """[L, S] ``base`` made legal: cleaned, every expert somewhere, and constraints kept."""
    held = base.copy()
    clean(held, frame.zones.of_expert, frame.zones.ranks)
    present = np.zeros((len(held), problem.num_experts + 1), dtype=np.bool_)
    np.put_along_axis(present, held + 1, True, axis=1)
    if problem.constraints.binds_experts or not present[:, 1:].all():
        enforced(problem, frame, held, demand_of_sum(problem))
    return held


def followed(start: IntArray, steps: Steps, taken: IntArray) -> IntArray:
    """[L, S] ``start`` after the first ``taken`` [L] steps of each layer."""
    held = start.copy()
    for layer, count in enumerate(taken.tolist()):
        for step in range(count):
            changed = steps.slots[layer, step] >= 0
            held[layer, steps.slots[layer, step, changed]] = steps.experts[layer, step, changed]
    return held
