"""The incremental policy: improves the serving placement with few moves.

First it repairs: it clears dead ranks and duplicates, gives every expert a slot and meets the
constraints. Then the local search of ``eplb/search/local_search.py`` runs from there, each layer on
its own. Last it selects steps of all layers by gain per move, up to the budget.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.kernels import BoolArray, Demand, FloatArray, IntArray
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.packing.zones import zones_for
from eplb.policies.frontier import Curve, curve_of, frontier_of, select_steps, worth_price
from eplb.policies.greedy import (
    WINDOWS_GAIN,
    Frame,
    enforced,
    frame_of,
    history_noise,
    in_place,
    refined,
    rules_for,
    with_groups_kept,
)
from eplb.policies.relabel import with_most_kept
from eplb.search.demand import demand_of, demand_of_sum, summed
from eplb.search.descent import COPIES_ALWAYS
from eplb.search.enforce import clear_illegal_slots
from eplb.search.local_search import Steps, Task, improve
from eplb.search.perturbation import NO_PERTURBATION

FIRST_FRESH = 8  # layers that are planned freshly first; twice as many follow while some gain
EXPLORED = 0.25  # part of its price that a step must gain for the search to continue from it


class Improved(NamedTuple):
    """Result of the search from a placement, within the budget."""

    held: IntArray  # [L, S]
    curve: Curve


def incremental(problem: Problem, current: Placement) -> Improved:
    """``current`` improved within the budget.

    A layer gets a fresh plan where its expert groups are not on nodes yet, and where a fresh plan
    gains enough for each of its many moves.

    Args:
        problem: windows, topology, limits and prices.
        current: the placement to start from.
    """
    base = current.slot_to_expert.astype(np.int64)
    frame, ungrouped = _frame_from(problem, current)
    demand = demand_of(problem)
    start = repaired(problem, frame, base)
    steps = _searched(problem, frame, demand, start, base)
    kept = np.flatnonzero(~ungrouped)
    spent = int(steps.moves[kept, 0].sum())
    left = None if problem.max_moves is None else max(problem.max_moves - spent, 0)
    frontier = worth_price(frontier_of(steps, kept), steps, problem.price)
    taken, selected = select_steps(frontier, len(base), left)
    held = after_steps(start, steps, taken)
    curve = curve_of(selected, steps.start, spent)
    reached = np.take_along_axis(steps.score, taken[:, None], axis=1)[:, 0]
    may_gain = _may_gain_by_fresh_plan(problem, reached) & ~ungrouped
    if not (ungrouped | may_gain).any():
        return Improved(held, curve)
    return _with_fresh(problem, Improved(held, curve), reached, ungrouped, may_gain)


def _searched(
    problem: Problem,
    frame: Frame,
    demand: Demand,
    start: IntArray,
    base: IntArray,
) -> Steps:
    target = _good_enough(problem)
    # A step that gains too little may enable one that gains more: both are selected together.
    least = max(float(problem.price.min()) * EXPLORED, WINDOWS_GAIN)
    rules = rules_for(problem, demand, target, least, COPIES_ALWAYS)
    ranks, node, constraints = frame.zones.ranks, frame.node, frame.constraints
    task = Task(demand, start.copy(), base, ranks, node, constraints, rules, NO_PERTURBATION)
    return improve(task, problem.budget.num_threads)


def _may_gain_by_fresh_plan(problem: Problem, reached: FloatArray) -> BoolArray:
    """[L] layers above target in which perfect balance would be worth moving half of the slots."""
    is_worth = reached - 1.0 > problem.price * (problem.topology.num_slots / 2)
    may_gain: BoolArray = is_worth & (reached > _good_enough(problem))
    return may_gain


def _good_enough(problem: Problem) -> FloatArray:
    """[L] imbalance up to which a layer is not searched: at least the noise of the windows."""
    enough: FloatArray = np.maximum(problem.budget.target_imbalance, 1.0 + history_noise(problem))
    return enough


def _with_fresh(
    problem: Problem,
    found: Improved,
    reached: FloatArray,
    ungrouped: BoolArray,
    may_gain: BoolArray,
) -> Improved:
    """Fresh plans for layers that need them, or where they pay for their moves within budget.

    Layers that may gain are tried worst first, and no further ones after a batch without gain.
    """
    assert problem.current is not None, "there is a placement that was improved"
    base = problem.current.slot_to_expert
    fresh, score, moves = found.held.copy(), reached.copy(), _moves(base, found.held)
    extra, worth = np.zeros(len(base), dtype=np.int64), np.zeros(len(base), dtype=np.bool_)
    worst_first = np.flatnonzero(may_gain)[np.argsort(-reached[may_gain], kind="stable")]
    num_tried, size = 0, FIRST_FRESH
    layers = np.concatenate([np.flatnonzero(ungrouped), worst_first[:size]])
    while layers.size:
        part = problem.of_layers(layers)
        plan = with_most_kept(part, refined(part), base[layers])
        fresh[layers] = in_place(plan, base[layers], problem.topology, part.room)
        score[layers] = score_of(part, fresh[layers])
        extra[layers] = np.maximum(_moves(base[layers], fresh[layers]) - moves[layers], 0)
        gain = reached - score
        pays = gain > np.where(extra > 0, problem.price, 0.0) * extra
        worth[layers] = (may_gain & (gain > 0) & pays)[layers]
        num_tried, size = num_tried + size, 2 * size
        layers = worst_first[num_tried : num_tried + size] if worth[layers].any() else layers[:0]
    if problem.max_moves is not None:
        left = problem.max_moves - int(moves[~ungrouped].sum())
        best_first = np.argsort(-(reached - score) / np.maximum(extra, 1), kind="stable")
        best_first = best_first[worth[best_first]]
        worth[best_first] = extra[best_first].cumsum() <= left
    chosen = ungrouped | worth
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
        frame.constraints,
        rules._replace(max_steps=0, all_steps=0),
        NO_PERTURBATION,
    )
    return improve(task).start


def _moves(base: NDArray[np.int32], held: IntArray) -> IntArray:
    moves: IntArray = ((base != held) & (held >= 0)).sum(axis=1)
    return moves


def _frame_from(problem: Problem, current: Placement) -> tuple[Frame, BoolArray]:
    """Zones as in ``current``, and [L] the layers whose groups are not on single nodes."""
    zones = zones_for(summed(problem), problem.topology, problem.num_groups, problem.room)
    ungrouped = with_groups_kept(problem, current, zones)
    return frame_of(problem, zones), ungrouped


def repaired(problem: Problem, frame: Frame, base: IntArray) -> IntArray:
    """[L, S] ``base`` made legal: every expert has a slot, and constraints are met."""
    held = base.copy()
    clear_illegal_slots(held, frame.zones.of_expert, frame.zones.ranks)
    present = np.zeros((len(held), problem.num_experts + 1), dtype=np.bool_)
    np.put_along_axis(present, held + 1, True, axis=1)
    if problem.constraints.binds_experts or not present[:, 1:].all():
        enforced(problem, frame, held, demand_of_sum(problem))
    return held


def after_steps(start: IntArray, steps: Steps, taken: IntArray) -> IntArray:
    """[L, S] ``start`` after the first ``taken`` [L] steps of each layer."""
    held, most = start.copy(), int(taken.max(initial=0))
    slots, experts = steps.slots[:, :most], steps.experts[:, :most]
    changed = (np.arange(most) < taken[:, None])[..., None] & (slots >= 0)
    # In the order of layers and steps: the last of several changes of a slot counts.
    held[np.nonzero(changed)[0], slots[changed]] = experts[changed]
    return held
