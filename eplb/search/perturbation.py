"""Out of the hollows that the local search ends in, compiled: change at random, search again.

The best state is kept. With few slots a rank, how many replicas each expert has matters as much as
where they are, and the way from one set of counts to a better one leads over worse ones. Draws
come from a seed.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import NONE, FloatArray, IntArray
from eplb.search.constrained import Search, may_leave
from eplb.search.descent import QUICK, Rules, copy_into, descend
from eplb.search.layer import put, restore, trade
from eplb.search.score import measure

CHANGES = 2  # made at random before each search
TRIES = 20  # draws for a change that is allowed


class Shaking(NamedTuple):
    """How long a layer is shaken, and which draws."""

    patience: int  # rounds without anything better; 0: layers are not shaken
    seed: int
    target: FloatArray  # [L] score above which a layer is stuck
    copies: int  # as in Rules


NO_SHAKING = Shaking(0, 0, np.zeros(0), 0)


@jit
def shake_layer(
    search: Search, shaking: Shaking, most: int, rules: Rules, shaken: IntArray
) -> tuple[int, bool]:
    """Shake a layer for about so many steps and leave the best state.

    Args:
        search: the layer.
        shaking: how long, and which draws.
        most: steps.
        rules: of the search before.
        shaken: state of the draws, rounds so far, the last of them that gained; zero at first. A
            later call goes on where this one ended.

    Returns:
        Steps that were made, and whether more would be in vain.
    """
    layer, target = search.layer, shaking.target[search.number]
    if shaken[1] == 0:
        shaken[0] = (shaking.seed + 1) * 7919 + search.number * 104729
    best_held, best = layer.held.copy(), measure(layer)
    slots = np.empty((rules.max_steps, 2), dtype=np.int64)
    moves, score = np.zeros(rules.max_steps + 1, dtype=np.int64), np.empty(rules.max_steps + 1)
    record = (slots, slots.copy(), score, moves)
    inner = Rules(shaking.target, rules.min_gain, shaking.copies, rules.max_steps, most, rules.far)
    spent = 0
    while best > target and spent < most and shaken[1] - shaken[2] < shaking.patience:
        restore(layer, best_held)
        measure(layer)
        window = _draw(shaken, len(layer.rate))
        first, end = 0, len(layer.held)
        if shaken[1] % 2 == 1:
            # Among many ranks a change anywhere rarely concerns the busiest one.
            hot = layer.top[window, 0]
            first, end = layer.first_slot[hot], layer.first_slot[hot + 1]
        _change_at_random(search, shaken, first, end)
        for _ in range(CHANGES - 1):
            _change_at_random(search, shaken, 0, len(layer.held))
        made, taken = descend(search, inner, (rules.max_steps, QUICK), record)
        spent += made + 1  # a round counts, whatever it finds
        shaken[1] += 1
        if score[taken] < best - 1e-12:
            copy_into(best_held, layer.held)
            best, shaken[2] = score[taken], shaken[1]
    restore(layer, best_held)
    return spent, spent < most


@jit
def _draw(state: IntArray, below: int) -> int:
    """A number below another: a linear congruential generator modulo 2**31."""
    state[0] = (state[0] * 1103515245 + 12345) % 2147483648
    return int((state[0] >> 8) % below)


@jit
def _change_at_random(search: Search, state: IntArray, first: int, end: int) -> None:
    """Give one of these slots to another expert, or trade it with any other slot."""
    layer = search.layer
    held, holds, rank_of_slot = layer.held, layer.holds, layer.rank_of_slot
    zone, zone_of_expert = layer.zone, layer.zone_of_expert
    for _ in range(TRIES):
        slot = first + _draw(state, end - first)
        rank, leaves = rank_of_slot[slot], held[slot]
        if slot - layer.first_slot[rank] >= layer.room[rank] or leaves < 0:
            continue
        if layer.replicas[leaves] > 1 and may_leave(search, leaves, rank, NONE):
            expert = _draw(state, len(layer.replicas))
            if zone_of_expert[expert] == zone[rank] and not holds[expert, rank]:
                put(layer, slot, expert)
                return
        other = _draw(state, len(held))
        there, theirs = rank_of_slot[other], held[other]
        if there == rank or theirs < 0 or theirs == leaves:
            continue
        if holds[theirs, rank] or holds[leaves, there]:
            continue
        if zone_of_expert[theirs] != zone[rank] or zone_of_expert[leaves] != zone[there]:
            continue
        if may_leave(search, leaves, rank, there) and may_leave(search, theirs, there, rank):
            trade(layer, slot, other)
            return
