"""Perturbation: leaves local minima of the search by random changes and new descents, compiled.

The best state is kept. With few slots per rank, replica counts matter as much as positions, and
the path from one set of counts to a better one leads through worse ones. Draws come from a seed.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import NONE, FloatArray, IntArray
from eplb.search.constrained import Search, may_move
from eplb.search.descent import PATIENCE_PERTURBED, Rules, copy_into, descend
from eplb.search.layer import restore, set_expert, swap_slots
from eplb.search.score import measure

CHANGES = 2  # made at random before each search
TRIES = 20  # draws for a change that is allowed


class Perturbation(NamedTuple):
    """How often a layer is perturbed, and the seed of the draws."""

    patience: int  # perturbations in a row without gain after which a layer ends; 0: none at all
    seed: int
    target: FloatArray  # [L] score above which a layer is stuck
    copies: int  # as in Rules


NO_PERTURBATION = Perturbation(0, 0, np.zeros(0), 0)


@jit
def perturb_layer(
    search: Search, perturbation: Perturbation, most: int, rules: Rules, perturbed: IntArray
) -> tuple[int, bool]:
    """Perturb a layer for about so many steps and restore the best state.

    Args:
        search: the layer.
        perturbation: how often, and the seed.
        most: steps.
        rules: of the descent before.
        perturbed: state of the draws, perturbations so far, the last of them that gained; zero at
            first. A later call continues where this one ended.

    Returns:
        Steps that were made, and whether the layer is finished.
    """
    layer, target = search.layer, perturbation.target[search.number]
    if perturbed[1] == 0:
        perturbed[0] = (perturbation.seed + 1) * 7919 + search.number * 104729
    best_held, best = layer.held.copy(), measure(layer)
    slots = np.empty((rules.max_steps, 2), dtype=np.int64)
    moves, score = np.zeros(rules.max_steps + 1, dtype=np.int64), np.empty(rules.max_steps + 1)
    record = (slots, slots.copy(), score, moves)
    inner = Rules(
        perturbation.target,
        rules.min_gain,
        perturbation.copies,
        rules.max_steps,
        most,
        rules.far_move_cost,
    )
    spent = 0
    while best > target and spent < most and perturbed[1] - perturbed[2] < perturbation.patience:
        restore(layer, best_held)
        measure(layer)
        window = _draw(perturbed, len(layer.rate))
        first, end = 0, len(layer.held)
        if perturbed[1] % 2 == 1:
            # With many ranks a change at a random slot rarely concerns the busiest one.
            hot = layer.top[window, 0]
            first, end = layer.first_slot[hot], layer.first_slot[hot + 1]
        _change_at_random(search, perturbed, first, end)
        for _ in range(CHANGES - 1):
            _change_at_random(search, perturbed, 0, len(layer.held))
        made, taken = descend(search, inner, (rules.max_steps, PATIENCE_PERTURBED), record)
        spent += made + 1  # a perturbation counts as a step even without a change
        perturbed[1] += 1
        if score[taken] < best - 1e-12:
            copy_into(best_held, layer.held)
            best, perturbed[2] = score[taken], perturbed[1]
    restore(layer, best_held)
    return spent, spent < most


@jit
def _draw(state: IntArray, below: int) -> int:
    """A number below another: a linear congruential generator modulo 2**31."""
    state[0] = (state[0] * 1103515245 + 12345) % 2147483648
    return int((state[0] >> 8) % below)


@jit
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
