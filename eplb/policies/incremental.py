"""The incremental policy: improves the serving placement with few moves.

First it repairs: it clears dead ranks and duplicates, gives every expert a slot and meets the
constraints. Then the local search of ``eplb/search/local_search.py`` runs from there, each layer on
its own. Last it selects steps of all layers within the budget of moves: only those on the lower
hull of a layer's moves against its score are useful stopping points. Taken over all layers in order
of gain per move, these frontiers are the best use of any number of moves (exactly so at every
point of the frontier).

Shapes:  L MoE layers, E experts, S slots, R ranks, P points of the frontier.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import BoolArray, FloatArray, IntArray, kernel
from eplb.core.problem import Problem
from eplb.policies.greedy import refined
from eplb.search.legality import repaired
from eplb.search.local_search import (
    COPIES_ALWAYS,
    WINDOWS_GAIN,
    Steps,
    improve,
    rules_for,
    searched_score,
)
from eplb.search.relabel import in_place, with_most_kept

FIRST_FRESH = 8  # layers that are planned freshly first; twice as many follow while some gain
EXPLORED = 0.25  # part of its price that a step must gain for the search to continue from it
MOST_POINTS = 100  # points of a plan's curve

BalanceCurve = tuple[tuple[int, float], ...]  # (moves, mean score over layers), fewest moves first


class Frontier(NamedTuple):
    """Segments in the order in which they are bought."""

    layer: IntArray  # [P]
    steps: IntArray  # [P] steps of the layer that are taken once this is bought
    moves: IntArray  # [P] moves that this segment adds
    score: FloatArray  # [P] score of the layer once this is bought

    def at(self, places: IntArray) -> Frontier:
        """The segments in these places, in this order."""
        return Frontier(
            self.layer[places], self.steps[places], self.moves[places], self.score[places]
        )


def best_improved(problem: Problem) -> tuple[IntArray, BalanceCurve]:
    """[L, S] the current placement improved within the budget, by the problem's objective."""
    improved = incremental(problem)
    if problem.objective == "tokens":
        return improved
    by_tokens = incremental(replace(problem, objective="tokens"))
    score, score_by_tokens = (
        searched_score(problem, held).mean() for held, _ in (improved, by_tokens)
    )
    return by_tokens if score_by_tokens < score else improved


def incremental(problem: Problem) -> tuple[IntArray, BalanceCurve]:
    """[L, S] the current placement improved within the budget.

    A layer gets a fresh plan where its expert groups are not on nodes yet, and where a fresh plan
    gains enough for each of its many moves.
    """
    assert problem.current is not None, "there is a placement to improve"
    base = problem.current.slot_to_expert.astype(np.int64)
    frame, ungrouped = problem.serving_frame, problem.ungrouped
    start = repaired(problem, frame, base)
    # Up to the noise of the windows a layer is not searched.
    target = np.maximum(problem.budget.target_imbalance, 1.0 + problem.noise)
    # A step that gains too little may enable one that gains more: both are selected together.
    least = max(float(problem.price.min()) * EXPLORED, WINDOWS_GAIN)
    rules = rules_for(problem, problem.demand, target, least, COPIES_ALWAYS)
    steps = improve(problem, frame, problem.demand, start.copy(), rules, base)
    kept = np.flatnonzero(~ungrouped)
    spent = int(steps.moves[kept, 0].sum())
    left = None if problem.max_moves is None else max(problem.max_moves - spent, 0)
    bought = _within_budget(_frontier(steps, kept, problem.price), len(base), left)
    taken = np.zeros(len(base), dtype=np.int64)
    taken[bought.layer] = bought.steps  # of several segments of a layer the last counts
    held = _after_steps(start, steps, taken)
    curve = _curve_of(bought, steps.start, spent)
    reached = np.take_along_axis(steps.score, taken[:, None], axis=1)[:, 0]
    # Perfect balance would be worth moving half of the slots.
    may_gain = reached - 1.0 > problem.price * (problem.topology.num_slots / 2)
    may_gain &= (reached > target) & ~ungrouped
    if not (ungrouped | may_gain).any():
        return held, curve
    return _with_fresh(problem, held, curve, reached, may_gain)


def _with_fresh(
    problem: Problem,
    improved: IntArray,
    curve: BalanceCurve,
    reached: FloatArray,
    may_gain: BoolArray,
) -> tuple[IntArray, BalanceCurve]:
    """Fresh plans for layers that need them, or where they pay for their moves within budget.

    Layers that may gain are tried worst first, and no further ones after a batch without gain.
    """
    assert problem.current is not None, "there is a placement that was improved"
    base, ungrouped = problem.current.slot_to_expert, problem.ungrouped
    fresh, score, moves = improved.copy(), reached.copy(), _moves(base, improved)
    extra, worth = np.zeros(len(base), dtype=np.int64), np.zeros(len(base), dtype=np.bool_)
    worst_first = np.flatnonzero(may_gain)[np.argsort(-reached[may_gain], kind="stable")]
    num_tried, size = 0, FIRST_FRESH
    layers = np.concatenate([np.flatnonzero(ungrouped), worst_first[:size]])
    while layers.size:
        part = problem.of_layers(layers)
        plan = with_most_kept(part, refined(part), base[layers])
        fresh[layers] = in_place(plan, base[layers], problem.topology, part.room)
        score[layers] = searched_score(part, fresh[layers])
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
    if not chosen.any():
        return improved, curve
    held = np.where(chosen[:, None], fresh, improved)
    last = int(_moves(base, in_place(held, base, problem.topology, problem.room)).sum())
    return held, (*curve, (last, float(np.where(chosen, score, reached).mean())))


def _moves(base: NDArray[np.int32], held: IntArray) -> IntArray:
    moves: IntArray = ((base != held) & (held >= 0)).sum(axis=1)
    return moves


def _after_steps(start: IntArray, steps: Steps, taken: IntArray) -> IntArray:
    """[L, S] ``start`` after the first ``taken`` [L] steps of each layer."""
    held, most = start.copy(), int(taken.max(initial=0))
    slots, experts = steps.slots[:, :most], steps.experts[:, :most]
    changed = (np.arange(most) < taken[:, None])[..., None] & (slots >= 0)
    # In the order of layers and steps: the last of several changes of a slot counts.
    held[np.nonzero(changed)[0], slots[changed]] = experts[changed]
    return held


def _frontier(steps: Steps, layers: IntArray, price: FloatArray) -> Frontier:
    """Segments of some layers whose gain per move is at least the price [L].

    Sorted by gain over price, which is gain per second of moving. Moves that are in ``held`` at the
    start do not count.
    """
    layer, taken, moves, gain, score = _segments(
        steps.score, steps.moves, steps.taken, np.ascontiguousarray(layers)
    )
    cost = np.where(moves > 0, price[layer], 0.0) * moves
    value = np.divide(gain, cost, out=np.full(len(layer), np.inf), where=cost > 0)
    # Of equal ones free gains first. A layer's own segments fall in both, so they stay in order.
    order = np.lexsort((-gain / np.maximum(moves, 1e-3), -value))
    return Frontier(layer, taken, moves, score).at(order[value[order] >= 1.0])


@kernel
def _segments(
    score: FloatArray, moves: IntArray, taken: IntArray, layers: IntArray
) -> tuple[IntArray, IntArray, IntArray, FloatArray, FloatArray]:
    """Segments of each layer's lower hull: layer, steps, moves and gain, and the score after."""
    most = (taken + 1).sum()
    of_layer, at_step = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    added, after = np.empty(most, dtype=np.int64), np.empty(most)
    gained = np.empty(most)
    size = 0
    for layer in layers:
        step = 0
        while step < taken[layer]:
            best, best_slope = -1, 0.0
            for later in range(step + 1, taken[layer] + 1):
                gain = score[layer, step] - score[layer, later]
                more = max(moves[layer, later] - moves[layer, step], 0)
                slope = gain / max(more, 1e-3)
                if slope > best_slope:
                    best, best_slope = later, slope
            if best < 0:
                break
            of_layer[size], at_step[size] = layer, best
            added[size] = max(moves[layer, best] - moves[layer, step], 0)
            gained[size], after[size] = score[layer, step] - score[layer, best], score[layer, best]
            size += 1
            step = best
    return of_layer[:size], at_step[:size], added[:size], gained[:size], after[:size]


def _within_budget(frontier: Frontier, num_layers: int, most: int | None) -> Frontier:
    """Within ``most`` moves: a layer ends at its first segment over budget, others continue."""
    if most is None or frontier.moves.sum() <= most:
        return frontier
    spent, stopped, selected = 0, np.zeros(num_layers, dtype=np.bool_), []
    for place, (layer, moves) in enumerate(zip(frontier.layer, frontier.moves, strict=True)):
        if stopped[layer] or spent + moves > most:
            stopped[layer] = True
            continue
        spent += int(moves)
        selected.append(place)
    return frontier.at(np.array(selected, dtype=np.int64))


def _curve_of(selected: Frontier, first: FloatArray, moves: int) -> BalanceCurve:
    """Points (moves, mean score), from the scores ``first`` [L] and the moves of the start."""
    now = first.copy()
    total = now.sum()
    points = [(moves, float(total / len(now)))]
    for layer, added, score in zip(selected.layer, selected.moves, selected.score, strict=True):
        total += score - now[layer]
        now[layer] = score
        moves += int(added)
        points.append((moves, float(total / len(now))))
    return thinned(points)


def thinned(points: list[tuple[int, float]]) -> BalanceCurve:
    """At most MOST_POINTS of the points, with both ends; of several with equal moves the last."""
    by_moves = dict(points)
    kept = sorted(by_moves.items())
    if len(kept) <= MOST_POINTS:
        return tuple(kept)
    places = np.linspace(0, len(kept) - 1, MOST_POINTS).round().astype(int)
    return tuple(kept[place] for place in places)
