"""Local search, compiled: improve one layer at a time by the change that gains most per move.

A change is a swap (two slots of two ranks trade experts; one move when one of them is empty) or a
copy (a slot takes another expert and the replica it held, if any, goes). Each relieves a rank that
is busiest in some window. The objective is the mean over windows of the busiest rank's load, so
peaks that fall into different windows are not averaged away.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, M most steps of a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.changes import Change, Layer, best_copy, best_swap, outline
from eplb.jit import jit
from eplb.kernels import FloatArray, IntArray, Ranks

NUM_HOT_RANKS = 4  # busiest ranks tried, worst first, before a layer counts as stuck
PATIENCE = 32  # steps without a better maximum before a layer counts as stuck


class Rules(NamedTuple):
    """When the search stops, and what it tries."""

    target: FloatArray  # [L] imbalance at which a layer is good enough
    min_gain: float  # mean imbalance that a move must gain
    copies: int  # COPIES_NEVER, COPIES_LAST or COPIES_ALWAYS
    max_steps: int  # M


COPIES_NEVER, COPIES_LAST, COPIES_ALWAYS = 0, 1, 2


class Steps(NamedTuple):
    """What the search did, in order, layer by layer."""

    slots: IntArray  # [L, M, 2] slots changed; -1 where a step changes only one
    experts: IntArray  # [L, M, 2] what they hold after it
    imbalance: FloatArray  # [L, M + 1] before the first step, and after each
    taken: IntArray  # [L] how many steps


@jit
def improve(
    work: FloatArray, held: IntArray, zone_of_expert: IntArray, ranks: Ranks, rules: Rules
) -> Steps:
    """Change ``held`` [L, S] in place until every layer is at the target or stuck.

    Args:
        work: [L, T, E] as ``Problem.scaled``; idle windows (all zero) do not count.
        held: experts by slot, -1 for empty; legal, and each expert has a slot.
        zone_of_expert: [L, E] where each expert may live.
    """
    num_layers, num_windows, num_experts = work.shape
    num_ranks = len(ranks.zone)
    slots = np.full((num_layers, rules.max_steps, 2), -1, dtype=np.int64)
    experts = np.full((num_layers, rules.max_steps, 2), -1, dtype=np.int64)
    imbalance = np.ones((num_layers, rules.max_steps + 1))
    taken = np.zeros(num_layers, dtype=np.int64)
    for number in range(num_layers):
        busy = np.zeros(num_windows, dtype=np.bool_)
        for window in range(num_windows):
            busy[window] = work[number, window].sum() > 0
        if not busy.any():
            continue
        own = work[number][busy]
        layer = Layer(
            own,
            zone_of_expert[number],
            held[number],
            np.zeros(num_experts, dtype=np.int64),
            np.zeros(own.shape),
            np.zeros((num_ranks, num_experts), dtype=np.bool_),
            np.zeros((len(own), num_ranks)),
            np.full((len(own), 3), -1, dtype=np.int64),
        )
        _take_stock(layer, ranks)
        start = layer.held.copy()
        made = _descend(
            layer,
            ranks,
            rules,
            rules.target[number],
            slots[number],
            experts[number],
            imbalance[number],
        )
        # Steps after the best state only shuffled equally busy ranks: they are not worth a move.
        taken[number] = np.argmin(imbalance[number, : made + 1])
        layer.held[:] = start
        for step in range(taken[number]):
            for part in range(2):
                if slots[number, step, part] >= 0:
                    layer.held[slots[number, step, part]] = experts[number, step, part]
    return Steps(slots, experts, imbalance, taken)


@jit
def _descend(
    layer: Layer,
    ranks: Ranks,
    rules: Rules,
    target: float,
    slots: IntArray,
    experts: IntArray,
    imbalance: FloatArray,
) -> int:
    """Change a layer step by step, write each down, and return how many there were."""
    imbalance[0] = _measure(layer, ranks)
    best = 0
    for step in range(rules.max_steps):
        if imbalance[step] <= target or step - best >= PATIENCE:
            return step
        change = _best_change(layer, ranks, rules)
        if change[0] < 0:
            return step
        slots[step, 0], experts[step, 0] = change[0], change[1]
        slots[step, 1], experts[step, 1] = change[2], change[3]
        _put(layer, ranks, change[0], change[1])
        if change[2] >= 0:
            _put(layer, ranks, change[2], change[3])
        imbalance[step + 1] = _measure(layer, ranks)
        if imbalance[step + 1] < imbalance[best]:
            best = step + 1
    return rules.max_steps


@jit
def _put(layer: Layer, ranks: Ranks, slot: int, expert: int) -> None:
    """Let a slot hold another expert, and keep counts and holders true."""
    rank = np.searchsorted(ranks.first_slot, slot, side="right") - 1
    leaves = layer.held[slot]
    layer.held[slot] = expert
    for changed, by in ((leaves, -1), (expert, 1)):
        if changed >= 0:
            layer.replicas[changed] += by
            layer.holds[rank, changed] = by > 0
            for window in range(len(layer.work)):
                # In a trade an expert has no slot for a moment.
                at_least_one = max(layer.replicas[changed], 1)
                layer.each[window, changed] = layer.work[window, changed] / at_least_one


@jit
def _take_stock(layer: Layer, ranks: Ranks) -> None:
    """Derive counts and holders from ``held``."""
    layer.replicas[:] = 0
    layer.holds[:] = False
    for rank in range(len(ranks.zone)):
        for slot in range(ranks.first_slot[rank], ranks.first_slot[rank + 1]):
            expert = layer.held[slot]
            if expert >= 0:
                layer.replicas[expert] += 1
                layer.holds[rank, expert] = True
    for window in range(len(layer.work)):
        for expert in range(len(layer.replicas)):  # not as arrays: those compile slowly
            layer.each[window, expert] = layer.work[window, expert] / layer.replicas[expert]


@jit
def _measure(layer: Layer, ranks: Ranks) -> float:
    """Fill in rank times and the busiest ranks; return the mean imbalance over windows."""
    total = 0.0
    layer.top[:] = -1
    for window in range(len(layer.work)):
        first, second, third = -1.0, -1.0, -1.0
        for rank in range(len(ranks.zone)):
            load = 0.0
            for slot in range(ranks.first_slot[rank], ranks.first_slot[rank + 1]):
                if layer.held[slot] >= 0:
                    load += layer.each[window, layer.held[slot]]
            time = load * ranks.slowness[rank]
            layer.time[window, rank] = time
            if time > first:
                third, second, first = second, first, time
                layer.top[window, 2] = layer.top[window, 1]
                layer.top[window, 1] = layer.top[window, 0]
                layer.top[window, 0] = rank
            elif time > second:
                third, second = second, time
                layer.top[window, 2] = layer.top[window, 1]
                layer.top[window, 1] = rank
            elif time > third:
                third = time
                layer.top[window, 2] = rank
        total += first
    return total / len(layer.work)


@jit
def _best_change(layer: Layer, ranks: Ranks, rules: Rules) -> Change:
    """What gains most per move for the busiest rank, else for the next; slot -1 when stuck."""
    num_windows = len(layer.work)
    busiest = np.full(len(ranks.zone), -1.0)  # summed over the windows in which a rank is busiest
    for window in range(num_windows):
        hot = layer.top[window, 0]
        busiest[hot] = max(busiest[hot], 0.0) + layer.time[window, hot]
    for _ in range(NUM_HOT_RANKS):
        hot = int(np.argmax(busiest))
        if busiest[hot] < 0:
            break
        busiest[hot] = -1.0
        bound = outline(layer, hot)
        score, swap = best_swap(layer, ranks, bound, hot, rules.min_gain * num_windows)
        if rules.copies == COPIES_ALWAYS or (rules.copies == COPIES_LAST and swap[0] < 0):
            _, copy = best_copy(layer, ranks, bound, hot, score)
            if copy[0] >= 0:
                return copy
        if swap[0] >= 0:
            return swap
    return (-1, -1, -1, -1)
