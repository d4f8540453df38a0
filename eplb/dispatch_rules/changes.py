"""Changes of a layer under an engine's rule, compiled, and the estimated gain of each.

A change swaps two slots, or copies the expert of the first slot into the second.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, K changes that are tried in turn.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import FloatArray, IntArray
from eplb.dispatch_rules.engine_draws import Sources, fill_shares
from eplb.dispatch_rules.layer import Dispatched, add_load, on_rank, place_of, spread_of_time

HOT_RANKS = 3  # busiest ranks whose experts are tried before a layer counts as stuck
MOST_CANDIDATES = 24  # changes of replicas that are tried before the list is computed again
ROUNDING = 1e-9
SLACK = 0.9  # factor on a rank's time after a change of replicas: shares may become smaller
# PLAIN: swap single experts of the busiest rank; NEAR: its replicas; WIDE: any to the idlest rank.
# As in ``eplb/core/kernels.py``, a plain number would make numba compile once more for it.
PLAIN = cast(int, np.int64(0))
NEAR = cast(int, np.int64(1))
WIDE = cast(int, np.int64(2))

# Slot, slot of another rank, and whether the second only takes a copy.
Change = tuple[int, int, bool]


class Terms(NamedTuple):
    """When the search stops, and what a move must gain."""

    target: FloatArray  # [L]
    min_gain: float  # of a layer's score, for each move, or each change when moves are free
    most_moves: int  # -1: any number


@jit
def promising_changes(
    layer: Dispatched,
    sources: Sources,
    terms: Terms,
    score: float,
    moves: int,
    reach: int,
    trial: FloatArray,
) -> tuple[int, IntArray, FloatArray]:
    """The number of changes with an estimated gain, [K, 3] these changes, and [K] their gains.

    Plain ones by the score; those of replicas by the variance over all ranks: where many ranks are
    busiest, relieving one of them changes the score little until plain swaps follow.
    """
    replicas = reach != PLAIN
    most = MOST_CANDIDATES if replicas else 1
    changes, gains, found = np.zeros((most, 3), dtype=np.int64), np.zeros(most), 0
    rank, held, count = layer.rank, layer.held, layer.count
    heat, top = np.zeros(len(layer.time)), _busiest(layer)
    for window in range(len(layer.weight)):
        heat[top[window, 0]] += layer.weight[window]
    spread, coldest = spread_of_time(layer, layer.time), _coldest(layer)
    for _ in range(HOT_RANKS):
        hot = int(np.argmax(heat))
        if heat[hot] <= 0 or layer.zone[hot] < 0:
            break
        heat[hot] = 0.0
        focus = coldest if reach == WIDE else hot
        for one in range(len(held)):
            mine = held[one]
            if mine < 0 or (count[mine] > 1 and not replicas):
                continue
            if (rank[one] == focus) == (reach == WIDE):
                continue
            for other in range(len(held)):
                theirs = held[other]
                if theirs < 0 or (rank[other] == focus) != (reach == WIDE):
                    continue
                plain = count[mine] == 1 and count[theirs] == 1
                if plain == replicas or not _may_swap(layer, one, other):
                    continue
                for kind in range(2 if count[theirs] > 1 else 1):
                    change = (one, other, kind == 1)
                    if kind == 0 and count[theirs] > 1 and on_rank(layer, theirs, rank[one]):
                        continue
                    after = _score_after(layer, change, top, plain)
                    if reach != WIDE and after * (SLACK if replicas else 1.0) >= score:
                        continue
                    more = moves_added(layer, change)
                    if 0 <= terms.most_moves < moves + more:
                        continue
                    gain = score - after - terms.min_gain * max(more, 0)
                    if replicas:
                        gain = (spread - _spread_after(layer, sources, change, trial)) / max(
                            more, 1
                        )
                    if gain > ROUNDING and (found < most or gain > gains[most - 1]):
                        found = min(found + 1, most)
                        _insert(changes, gains, found, change, gain)
        if found > 0:
            break
    return found, changes, gains


@jit
def _insert(changes: IntArray, gains: FloatArray, found: int, change: Change, gain: float) -> None:
    """Insert a change by its gain; the last one is dropped if the list is full."""
    place = found - 1
    while place > 0 and gains[place - 1] < gain:
        gains[place] = gains[place - 1]
        changes[place] = changes[place - 1]
        place -= 1
    gains[place] = gain
    changes[place, 0], changes[place, 1], changes[place, 2] = change[0], change[1], int(change[2])


@jit
def _busiest(layer: Dispatched) -> IntArray:
    """[T, 3] the busiest ranks of each window; -1 where there are fewer."""
    top = np.zeros((len(layer.weight), 3), dtype=np.int64)
    for window in range(len(layer.weight)):
        first, second, third = 0, -1, -1
        for rank in range(1, len(layer.time)):
            time = layer.time[rank, window]
            if time > layer.time[first, window]:
                first, second, third = rank, first, second
            elif second < 0 or time > layer.time[second, window]:
                second, third = rank, second
            elif third < 0 or time > layer.time[third, window]:
                third = rank
        top[window, 0], top[window, 1], top[window, 2] = first, second, third
    return top


@jit
def _coldest(layer: Dispatched) -> int:
    """The rank with the least time among those that experts may move to."""
    coldest, least = 0, np.inf
    for rank in range(len(layer.time)):
        time = (layer.time[rank] * layer.weight).sum()
        if layer.zone[rank] >= 0 and time < least:
            coldest, least = rank, time
    return coldest


@jit
def _score_after(layer: Dispatched, change: Change, top: IntArray, plain: bool) -> float:
    """The score after a swap of two experts with one replica; for others an estimate of two ranks.

    Shares of replicas may change with the draws, so other ranks are not counted for those.
    """
    one, other, copies = change
    here, there = layer.rank[one], layer.rank[other]
    mine, theirs = layer.held[one], layer.held[other]
    gives, takes, gets = 1.0, 1.0, 1.0
    if not plain:
        gets = gives = layer.share[mine, place_of(layer, one)]
        takes = layer.share[theirs, place_of(layer, other)]
    if copies:
        gets = 1.0 / (layer.count[mine] + 1)
        gives /= layer.count[mine] + 1
    score = 0.0
    for window in range(len(layer.weight)):
        moved, back = layer.work[mine, window], takes * layer.work[theirs, window]
        returned = 0.0 if copies else back
        hot = layer.time[here, window] - (gives * moved - returned) * layer.slowness[here]
        cold = layer.time[there, window] + (gets * moved - back) * layer.slowness[there]
        most = max(hot, cold)
        if plain:
            for place in range(3):
                rank = top[window, place]
                if rank >= 0 and rank != here and rank != there:
                    most = max(most, layer.time[rank, window])
                    break
        score += layer.weight[window] * most
    return score


@jit
def _may_swap(layer: Dispatched, one: int, other: int) -> bool:
    mine, theirs = layer.held[one], layer.held[other]
    if theirs < 0 or mine == theirs:
        return False
    here, there = layer.rank[one], layer.rank[other]
    if layer.zone_of_expert[mine] != layer.zone[there]:
        return False
    if layer.zone_of_expert[theirs] != layer.zone[here] or layer.zone[there] < 0:
        return False
    return not on_rank(layer, mine, there)


@jit
def moves_added(layer: Dispatched, change: Change) -> int:
    """How many moves from the base a change adds; negative where it undoes some."""
    if len(layer.resident) == 0:
        return 1
    one, other, copies = change
    here, there = layer.rank[one], layer.rank[other]
    mine, theirs = layer.held[one], layer.held[other]
    more = int(not layer.resident[there, mine]) - int(not layer.resident[there, theirs])
    if not copies:
        more += int(not layer.resident[here, theirs]) - int(not layer.resident[here, mine])
    return more


@jit
def _spread_after(layer: Dispatched, sources: Sources, change: Change, trial: FloatArray) -> float:
    """Variance of the ranks' times after a change, if the draws stay the same."""
    trial[:] = layer.time
    for number in range(2):
        expert = layer.held[change[0]] if number == 0 else layer.held[change[1]]
        add_load(layer, trial, expert, -1.0)
        _add_changed(layer, sources, expert, change, trial)
    return spread_of_time(layer, trial)


@jit
def _add_changed(
    layer: Dispatched, sources: Sources, expert: int, change: Change, trial: FloatArray
) -> None:
    """Add the time of an expert's replicas after a change to the ranks' times."""
    one, other, copies = change
    count = layer.count[expert]
    slots = np.empty(count + 1, dtype=np.int64)
    slots[:count] = layer.slots[expert, :count]
    if layer.held[one] == expert:
        if copies:
            slots[count] = other
            count += 1
        else:
            slots[place_of(layer, one)] = other
    elif copies:
        slots[place_of(layer, other)] = slots[count - 1]
        count -= 1
    else:
        slots[place_of(layer, other)] = one
    slots = np.sort(slots[:count])
    share = np.empty(count)
    drawn = layer.drawn[expert]
    if count != layer.count[expert]:
        drawn = np.full(1, -1)
    fill_shares(slots, count, drawn, sources, share)
    for place in range(count):
        rank = layer.rank[slots[place]]
        part = share[place] * layer.slowness[rank]
        for window in range(len(layer.weight)):
            trial[rank, window] += part * layer.work[expert, window]
