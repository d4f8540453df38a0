"""Selects the steps of all layers within a budget of moves: the frontier of moves against balance.

Each layer was improved on its own, step by step. Only the steps on the lower hull of moves against
score are useful stopping points. Taken over all layers in order of gain per move, they are the
best use of any number of moves (exactly so at every point of the frontier).

Shapes:  L MoE layers, S slots, P points of the frontier.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import FloatArray, IntArray
from eplb.search.local_search import Steps

MOST_POINTS = 100  # of a curve that is displayed

Curve = tuple[tuple[int, float], ...]  # (moves, mean score over layers), fewest moves first


class Frontier(NamedTuple):
    """Segments in the order in which they are bought."""

    layer: IntArray  # [P]
    steps: IntArray  # [P] steps of the layer that are taken once this is bought
    moves: IntArray  # [P] that this adds
    score: FloatArray  # [P] of the layer once this is bought


def frontier_of(steps: Steps, layers: IntArray) -> Frontier:
    """The frontier over some layers, without the moves that are in ``held`` at the start."""
    layer, taken, moves, gain, score = _segments(
        steps.score, steps.moves, steps.taken, np.ascontiguousarray(layers)
    )
    # Free gains first. A layer's own segments fall in gain per move, so they stay in order.
    order = np.argsort(-gain / np.maximum(moves, 1e-3), kind="stable")
    return Frontier(layer[order], taken[order], moves[order], score[order])


@jit
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


def worth_price(frontier: Frontier, steps: Steps, price: FloatArray) -> Frontier:
    """Segments whose gain per move is at least the price [L]; later ones of a layer gain less.

    Sorted by gain over price, which is gain per second of moving.
    """
    layer, at = frontier.layer, frontier.steps
    from_step = np.zeros(len(layer), dtype=np.int64)
    last = np.zeros(len(price), dtype=np.int64)
    for place, (number, step) in enumerate(zip(layer.tolist(), at.tolist(), strict=True)):
        from_step[place], last[number] = last[number], step
    gain = steps.score[layer, from_step] - frontier.score
    cost = np.where(frontier.moves > 0, price[layer], 0.0) * frontier.moves
    value = np.divide(gain, cost, out=np.full(len(layer), np.inf), where=cost > 0)
    order = np.argsort(-value, kind="stable")
    order = order[value[order] >= 1.0]
    return Frontier(*(part[order] for part in frontier))


def select_steps(
    frontier: Frontier, num_layers: int, most: int | None
) -> tuple[IntArray, Frontier]:
    """[L] steps of each layer within ``most`` moves, and the selected part of the frontier."""
    taken = np.zeros(num_layers, dtype=np.int64)
    selected = _within_budget(frontier, num_layers, most)
    for layer, steps in zip(frontier.layer[selected], frontier.steps[selected], strict=True):
        taken[layer] = steps
    return taken, Frontier(
        frontier.layer[selected],
        frontier.steps[selected],
        frontier.moves[selected],
        frontier.score[selected],
    )


def _within_budget(frontier: Frontier, num_layers: int, most: int | None) -> IntArray:
    """Selected positions: a layer ends at its first segment over budget, others continue."""
    if most is None or frontier.moves.sum() <= most:
        return np.arange(len(frontier.layer))
    spent, stopped, selected = 0, np.zeros(num_layers, dtype=np.bool_), []
    for place, (layer, moves) in enumerate(zip(frontier.layer, frontier.moves, strict=True)):
        if stopped[layer] or spent + moves > most:
            stopped[layer] = True
            continue
        spent += int(moves)
        selected.append(place)
    return np.array(selected, dtype=np.int64)


def curve_of(selected: Frontier, first: FloatArray, moves: int) -> Curve:
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


def thinned(points: list[tuple[int, float]]) -> Curve:
    """At most MOST_POINTS of the points, with both ends; of several with equal moves the last."""
    by_moves = dict(points)
    kept = sorted(by_moves.items())
    if len(kept) <= MOST_POINTS:
        return tuple(kept)
    places = np.linspace(0, len(kept) - 1, MOST_POINTS).round().astype(int)
    return tuple(kept[place] for place in places)
