"""Local search under an engine's rule, compiled: changes are judged by effective loads.

Swaps of experts with one replica do not change any draw; they are made until the layer is stuck.
Then replicas are swapped or copied, largest estimated gain first. A different number of draws
changes all later draws, so each such change is applied, drawn again and followed by plain swaps,
and it is undone if the layer did not gain.

Layers are processed in order, since the draws of each start where those of the layer before end.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import ZERO, BoolArray, FloatArray, IntArray
from eplb.dispatch_rules.changes import (
    NEAR,
    PLAIN,
    ROUNDING,
    WIDE,
    Change,
    Terms,
    moves_added,
    promising_changes,
)
from eplb.dispatch_rules.engine_draws import START, Sources, Words
from eplb.dispatch_rules.layer import Dispatched, add_load, new_dispatched, recompute, score_of_time

TRIES = 96  # changes of replicas tried in a layer


@jit
def improve_layers(
    work: FloatArray,
    weight: FloatArray,
    held: IntArray,
    base: IntArray,
    slowness: FloatArray,
    zone_of_expert: IntArray,
    zone: IntArray,
    sources: Sources,
    words: Words,
    terms: Terms,
) -> None:
    """Improve ``held`` [L, S] in place.

    Args:
        work: [L, E, T] in units of the mean rank load.
        weight: [T].
        held: experts by slot, -1 for empty.
        base: [L, S] the serving placement; no layers when moves are free.
        slowness: [R].
        zone_of_expert: [L, E] -1 for experts that stay.
        zone: [R] -1 for ranks that are not changed.
        sources: where tokens start, and the engine's rule.
        words: of the draws.
        terms: when to stop.
    """
    num_layers, num_experts, num_windows = work.shape
    num_slots, num_ranks = held.shape[1], len(slowness)
    counts_moves = len(base) > 0
    resident = np.zeros((num_ranks if counts_moves else 0, num_experts), dtype=np.bool_)
    most = num_slots - num_experts + 1
    at, moves = START, ZERO
    for number in range(num_layers if counts_moves else 0):
        moves += _fill_residents(resident, held[number], base[number], sources.rank)
    for number in range(num_layers):
        if counts_moves:
            _fill_residents(resident, held[number], base[number], sources.rank)
        layer = new_dispatched(
            work[number],
            weight,
            slowness,
            zone_of_expert[number],
            zone,
            resident,
            sources.rank,
            held[number],
            np.zeros((num_experts, most), dtype=np.int64),
            np.zeros(num_experts, dtype=np.int64),
            np.zeros((num_experts, num_ranks + 1), dtype=np.int64),
            np.zeros((num_experts, most)),
            np.zeros((num_ranks, num_windows)),
        )
        end = recompute(layer, sources, words, at)
        moves, end = _descend(layer, sources, words, (at, end), terms, number, moves)
        at = end


@jit
def _fill_residents(resident: BoolArray, held: IntArray, base: IntArray, rank: IntArray) -> int:
    """Fill in the experts of the base by rank; return the moves from the base to ``held``."""
    resident[:] = False
    for slot in range(len(base)):
        if base[slot] >= 0:
            resident[rank[slot], base[slot]] = True
    moves = 0
    for slot in range(len(held)):
        moves += held[slot] >= 0 and not resident[rank[slot], held[slot]]
    return moves


@jit
def _descend(
    layer: Dispatched,
    sources: Sources,
    words: Words,
    span: tuple[int, int],
    terms: Terms,
    number: int,
    moves: int,
) -> tuple[int, int]:
    """Change a layer while it gains; return all moves, and the word after its draws."""
    at, end = span
    trial = np.zeros(layer.time.shape)
    best = layer.held.copy()
    moves = _swap_single_replicas(layer, sources, terms, number, moves, trial)
    best[:] = layer.held
    score = score_of_time(layer, layer.time)
    left, reach = TRIES, NEAR
    while left > 0 and score > terms.target[number]:
        found, changes, _ = promising_changes(layer, sources, terms, score, moves, reach, trial)
        gained = False
        for place in range(min(found, left)):
            left -= 1
            change = (changes[place, 0], changes[place, 1], changes[place, 2] == 1)
            then = moves + moves_added(layer, change)
            apply_change(layer, change)
            end = recompute(layer, sources, words, at)
            then = _swap_single_replicas(layer, sources, terms, number, then, trial)
            now = score_of_time(layer, layer.time)
            if now < score - ROUNDING - terms.min_gain * max(then - moves, 0):
                score, moves, gained = now, then, True
                best[:] = layer.held
                break
            layer.held[:] = best
            end = recompute(layer, sources, words, at)
        if not gained and reach == WIDE:
            break
        reach = NEAR if gained else WIDE
    return moves, end


@jit
def _swap_single_replicas(
    layer: Dispatched, sources: Sources, terms: Terms, number: int, moves: int, trial: FloatArray
) -> int:
    """Swap experts with one replica while that gains; return all moves."""
    for _ in range(2 * len(layer.held)):
        score = score_of_time(layer, layer.time)
        if score <= terms.target[number]:
            break
        found, changes, _ = promising_changes(layer, sources, terms, score, moves, PLAIN, trial)
        if found == 0:
            break
        change = (changes[0, 0], changes[0, 1], False)
        moves += moves_added(layer, change)
        one, other = changes[0, 0], changes[0, 1]
        mine, theirs = layer.held[one], layer.held[other]
        for part in range(2):
            add_load(layer, layer.time, mine if part == 0 else theirs, -1.0)
        apply_change(layer, change)
        layer.slots[mine, 0], layer.slots[theirs, 0] = other, one
        for part in range(2):
            add_load(layer, layer.time, mine if part == 0 else theirs, 1.0)
    return moves


@jit
def apply_change(layer: Dispatched, change: Change) -> None:
    """Swap two slots, or copy the expert of the first into the second."""
    one, other, copies = change
    mine, theirs = layer.held[one], layer.held[other]
    layer.held[other] = mine
    if not copies:
        layer.held[one] = theirs
