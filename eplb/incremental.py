"""From the placement that serves to a better one, with few moves.

First what must be: experts leave dead ranks, doubles go, every expert gets a slot. Then the local
search of ``eplb/search.py`` from there, each layer on its own; at last the steps of all layers are
taken in order of gain per move, so that any move budget buys the most.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from eplb.balance import imbalance
from eplb.greedy import STEPS_PER_SLOT, in_place, refined
from eplb.hierarchical import Zones, keeps_groups, nodes_of_groups, zones_for
from eplb.kernels import IntArray
from eplb.noise import noise_under
from eplb.placement import EMPTY, Placement
from eplb.problem import Problem
from eplb.search import COPIES_ALWAYS, Rules, Steps, improve
from eplb.topology import Topology

FRESH_ADVANTAGE = 0.05  # imbalance of one layer


def incremental(problem: Problem, current: Placement) -> IntArray:
    """[L, S] ``current`` improved within the budget; a layer where that fails is planned afresh.

    Afresh means far more moves: only for a layer that is stuck FRESH_ADVANTAGE above its target,
    if a fresh plan is better by as much, and only without a move budget.
    """
    base = current.slot_to_expert.astype(np.int64)
    zones, lost = _zones_from(problem, current)
    start = repaired(base, problem.work.sum(axis=0), problem.topology, zones)
    found = start.copy()
    # Below the noise a search would only fit the windows that it sees.
    target = np.maximum(problem.budget.target_imbalance, 1.0 + noise_under(problem, current))
    rules = Rules(
        target,
        problem.budget.min_gain_per_move,
        COPIES_ALWAYS,
        STEPS_PER_SLOT * problem.topology.num_slots,
    )
    steps = improve(problem.scaled, found, zones.of_expert, zones.ranks, rules)
    if problem.max_moves is not None:
        return follow(base, start, steps, problem.max_moves)
    reached = imbalance_of_slots(problem, found)
    stuck = reached > target + FRESH_ADVANTAGE
    if not (lost | stuck).any():
        return found
    fresh = in_place(refined(problem), current.slot_to_expert, problem.topology)
    better = imbalance_of_slots(problem, fresh) < reached - FRESH_ADVANTAGE
    return np.where((lost | (stuck & better))[:, None], fresh, found)


def imbalance_of_slots(problem: Problem, held: IntArray) -> NDArray[np.float64]:
    """[L] mean imbalance over the windows with equal split."""
    placement = Placement(held.astype(np.int32), problem.num_experts)
    mean: NDArray[np.float64] = imbalance(problem.work, placement, problem.topology).mean(axis=0)
    return mean


def _zones_from(problem: Problem, current: Placement) -> tuple[Zones, NDArray[np.bool_]]:
    """Zones as ``current`` has them, and [L] which layers do not keep groups on nodes at all."""
    topology, num_groups = problem.topology, problem.num_groups
    zones = zones_for(problem.work.sum(axis=0), topology, num_groups)
    lost = np.zeros(current.num_layers, dtype=np.bool_)
    if not keeps_groups(topology, num_groups, problem.num_experts):
        return zones, lost
    for layer, held in enumerate(current.slot_to_expert):
        node_of_group = nodes_of_groups(held, topology, num_groups, problem.num_experts)
        lost[layer] = node_of_group is None
        if node_of_group is not None:
            zones.of_expert[layer] = np.repeat(node_of_group, problem.num_experts // num_groups)
    return zones, lost


def repaired(
    base: IntArray, work: NDArray[np.float64], topology: Topology, zones: Zones
) -> IntArray:
    """[L, S] ``base`` made legal: nothing on dead ranks, no doubles, every expert somewhere."""
    held = base.copy()
    held[:, ~topology.alive[topology.rank_of_slot]] = EMPTY
    for layer in range(len(held)):
        _drop_doubles(held[layer], topology)
        present = np.bincount(held[layer] + 1, minlength=work.shape[1] + 1)[1:]
        missing = np.flatnonzero(present == 0).tolist()
        for expert in sorted(missing, key=lambda e: -work[layer, e]):
            _give_slot(held[layer], expert, work[layer], topology, zones.of_expert[layer])
    return held


def _drop_doubles(held: IntArray, topology: Topology) -> None:
    """Empty the slots that hold an expert which a lower slot of the same rank holds too."""
    pair = topology.rank_of_slot * (int(held.max()) + 1) + held
    slots = np.flatnonzero(held >= 0)
    first = slots[np.unique(pair[slots], return_index=True)[1]]
    if len(first) < len(slots):
        held[np.setdiff1d(slots, first)] = EMPTY


def _give_slot(
    held: IntArray, expert: int, work: NDArray[np.float64], topology: Topology, zone: IntArray
) -> None:
    """Put an expert that has no slot into the empty or redundant slot where it adds least."""
    count = np.bincount(held[held >= 0], minlength=len(work))
    each = work / np.maximum(count, 1)
    load = np.bincount(
        topology.rank_of_slot, np.where(held >= 0, each[held], 0.0), topology.num_ranks
    )
    free = topology.alive[topology.rank_of_slot] & ((held < 0) | (count[held] > 1))
    if len(set(zone.tolist())) > 1:
        free &= topology.node_of_slot == zone[expert]
    assert free.any(), "live slots are at least as many as experts, in every zone"
    # An empty slot before a redundant replica; among those the least busy rank.
    key = np.where(free, load[topology.rank_of_slot], np.inf) + np.where(held < 0, 0.0, work.sum())
    held[int(key.argmin())] = expert


def follow(base: IntArray, start: IntArray, steps: Steps, max_moves: int) -> IntArray:
    """Take steps of all layers from ``start``, best gain per move first, while the budget lasts.

    Moves are counted against ``base``: what ``start`` already differs in is spent first.
    """
    held = start.copy()
    per_layer = [_moved(base[layer], held[layer]) for layer in range(len(held))]
    taken = [0] * len(held)
    total = sum(per_layer)
    queue = [entry for layer in range(len(held)) if (entry := _next(base, held, steps, layer, 0))]
    heapq.heapify(queue)
    while queue:
        _, layer, moved = heapq.heappop(queue)
        if total + moved - per_layer[layer] > max_moves:
            continue
        total += moved - per_layer[layer]
        _apply(held[layer], steps, layer, taken[layer])
        taken[layer] += 1
        per_layer[layer] = moved
        if entry := _next(base, held, steps, layer, taken[layer]):
            heapq.heappush(queue, entry)
    return held


def _next(
    base: IntArray, held: IntArray, steps: Steps, layer: int, step: int
) -> tuple[float, int, int] | None:
    """(minus gain per move, layer, moves of the layer after it), or None past the last step."""
    if step == steps.taken[layer]:
        return None
    after = held[layer].copy()
    _apply(after, steps, layer, step)
    moved = _moved(base[layer], after)
    extra = max(moved - _moved(base[layer], held[layer]), 0)
    gain = float(steps.imbalance[layer, step] - steps.imbalance[layer, step + 1])
    return -gain / extra if extra else -np.inf, layer, moved


def _apply(held: IntArray, steps: Steps, layer: int, step: int) -> None:
    changed = steps.slots[layer, step] >= 0
    held[steps.slots[layer, step, changed]] = steps.experts[layer, step, changed]


def _moved(base: IntArray, held: IntArray) -> int:
    return int(((base != held) & (held >= 0)).sum())
