"""Local search under an engine's rule, compiled: changes are judged by effective loads.

Swaps of experts with one replica do not change any draw; they are made until the layer is stuck.
Then replicas are swapped or copied, largest estimated gain first. A different number of draws
changes all later draws, so each such change is applied, drawn again and followed by plain swaps,
and it is undone if the layer did not gain.

Layers are processed in order, since the draws of each start where those of the layer before end.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, M most replicas of an expert, K
         changes that are tried in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np

from eplb.core.dispatch import (
    START,
    Sources,
    Words,
    draw_layer,
    fill_shares,
    replica_slots,
    sources_of,
    words_for,
)
from eplb.core.jit import (
    ZERO,
    BoolArray,
    FloatArray,
    IntArray,
    by_reference,
    copy_into,
    inner,
    kernel,
)
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.core.zones import zone_bound
from eplb.search.legality import fill, repaired
from eplb.search.local_search import FINEST_GAIN, WINDOWS_GAIN
from eplb.search.relabel import in_place, with_most_kept
from eplb.shares.traffic import movable

LARGEST_PRICE = 1e9  # imbalance of a layer for a move: no move pays
EVEN_ENOUGH = 1.005  # target of fresh plans: windows differ by more than could still be gained
HOT_RANKS = 3  # busiest ranks whose experts are tried before a layer counts as stuck
MOST_CANDIDATES = 24  # changes of replicas that are tried before the list is computed again
ROUNDING = 1e-9
SLACK = 0.9  # factor on a rank's time after a change of replicas: shares may become smaller
# PLAIN: swap single experts of the busiest rank; NEAR: its replicas; WIDE: any to the idlest rank.
# As in ``eplb/core/jit.py``, a plain number would make numba compile once more for it.
PLAIN = cast(int, np.int64(0))
NEAR = cast(int, np.int64(1))
WIDE = cast(int, np.int64(2))
# Slot, slot of another rank, and whether the second only takes a copy.
Change = tuple[int, int, bool]
TRIES = 96  # changes of replicas tried in a layer


def starts_for_rule(problem: Problem, fresh: Callable[[Problem], IntArray]) -> Iterator[Placement]:
    """Placements that the search starts from: the current one made legal, and one changed further.

    The search fills no slot, and moves no expert group to another node. In the second start no slot
    is empty, and layers are of a fresh plan where a group is on several nodes, and where other
    nodes for the groups allow so much better balance that this pays for moving half of the slots.

    Args:
        problem: within its budget of moves; layers that cannot serve are exempt.
        fresh: [L, S] a fresh plan.
    """
    current = problem.current
    assert current is not None, "there is a placement to start from"
    base, frame = current.slot_to_expert.astype(np.int64), problem.serving_frame
    most, num_slots, generation = problem.max_moves, current.num_slots, current.generation + 1
    plain = repaired(problem, frame, base)
    held = plain.copy()
    yield Placement(plain.astype(np.int32), problem.num_experts, generation)
    work = problem.mean_scaled
    gain = zone_bound(work, frame.zones) - zone_bound(work, problem.frame.zones)
    gain[problem.ungrouped] = np.inf
    layers = np.flatnonzero(gain > problem.price * (num_slots / 2))
    layers = layers[np.argsort(-gain[layers], kind="stable")]
    moves = int(((base != held) & (held >= 0)).sum())
    if most is not None:
        within = np.isinf(gain[layers]) | (moves + num_slots * (1 + np.arange(len(layers))) <= most)
        layers = layers[within]
    if layers.size:
        part = problem.of_layers(layers)
        held[layers] = with_most_kept(part, fresh(part), current.slot_to_expert[layers])
        moves = int(((base != held) & (held >= 0)).sum())
    others = np.setdiff1d(np.arange(len(held)), layers)
    fill(problem, frame, held, others, None if most is None else most - moves)
    if (held != plain).any():
        yield Placement(held.astype(np.int32), problem.num_experts, generation)


def balanced_for_rule(problem: Problem, placement: Placement) -> Placement:
    """``placement`` improved for an engine whose ranks each use one replica of an expert.

    Within the budget of moves; where expert groups stay on nodes, experts move within nodes.
    """
    assert problem.dispatch.by_rank, "shares depend on a token's source rank"
    topology, demand, current = problem.topology, problem.demand, problem.current
    held = placement.slot_to_expert.astype(np.int64)
    is_windowed = len(demand.weight) > 1
    if current is None:
        base = np.zeros((0, held.shape[1]), dtype=np.int64)
        target, min_gain = EVEN_ENOUGH, WINDOWS_GAIN if is_windowed else FINEST_GAIN
        most = None
    else:
        base = current.slot_to_expert.astype(np.int64)
        # Finite: with a pay-back of 0 the price is infinite, and inf * 0 moves is not a number.
        min_gain = min(float(problem.price.min()), LARGEST_PRICE)
        target, most = problem.budget.target_imbalance, problem.max_moves
    noise = problem.noise if is_windowed else np.zeros(len(held))
    ready, stays = movable(problem)
    node = topology.node_of_rank.astype(np.int64)
    zone_of_expert = np.zeros(stays.shape, dtype=np.int64)
    if problem.groups_stay:
        layer, slot = np.nonzero(held >= 0)
        zone_of_expert[layer, held[layer, slot]] = node[topology.rank_of_slot[slot]]
    zone_of_expert[stays] = -1
    improve_layers(
        np.ascontiguousarray(demand.tokens * demand.rate[:, None, :]),
        demand.weight,
        held,
        base,
        1.0 / topology.rank_speed,
        zone_of_expert,
        np.where(ready, node if problem.groups_stay else 0, -1),
        sources_of(topology, problem.dispatch, problem.tokens_of_rank),
        words_for(held, placement, problem.dispatch),
        Terms(np.maximum(target, 1.0 + noise), min_gain, -1 if most is None else most),
    )
    if current is not None:
        held = in_place(held, current.slot_to_expert, topology, problem.room)
    return Placement(held.astype(np.int32), placement.num_experts, placement.generation)


class Dispatched:
    """A layer's replicas, their effective shares, and the times of ranks that follow."""

    work: FloatArray  # [E, T] in units of the mean rank load
    weight: FloatArray  # [T]
    slowness: FloatArray  # [R]
    zone_of_expert: IntArray  # [E] -1: it may not move
    zone: IntArray  # [R] -1: the rank may not change
    resident: BoolArray  # [R, E] experts of each rank in the base; 0 ranks when moves are free
    rank: IntArray  # [S]
    held: IntArray  # [S]
    slots: IntArray  # [E, M] slots of each expert, in order
    count: IntArray  # [E]
    drawn: IntArray  # [E, R + 1] see ``draw_layer``
    share: FloatArray  # [E, M]
    time: FloatArray  # [R, T]


new_dispatched = by_reference(Dispatched)


@inner
def recompute(layer: Dispatched, sources: Sources, words: Words, at: int) -> int:
    """Compute counts, draws, shares and times from ``held``; the next layer's first word."""
    slots, count = replica_slots(layer.held, len(layer.count))
    for expert in range(len(count)):
        layer.count[expert] = count[expert]
        for place in range(slots.shape[1]):
            layer.slots[expert, place] = slots[expert, place]
    at = draw_layer(layer.slots, layer.count, sources, words, at, layer.drawn)
    layer.time.fill(0.0)
    for expert in range(len(count)):
        fill_shares(
            layer.slots[expert], count[expert], layer.drawn[expert], sources, layer.share[expert]
        )
        add_load(layer, layer.time, expert, 1.0)
    return at


@inner
def add_load(layer: Dispatched, time: FloatArray, expert: int, sign: float) -> None:
    """Add the time of an expert's replicas to the ranks' times; a sign of -1 subtracts it."""
    for place in range(layer.count[expert]):
        rank = layer.rank[layer.slots[expert, place]]
        part = sign * layer.share[expert, place] * layer.slowness[rank]
        for window in range(len(layer.weight)):
            time[rank, window] += part * layer.work[expert, window]


@inner
def score_of_time(layer: Dispatched, time: FloatArray) -> float:
    """Mean over windows of the busiest rank's time [R, T]."""
    score = 0.0
    for window in range(len(layer.weight)):
        most = 0.0
        for rank in range(len(time)):
            most = max(most, time[rank, window])
        score += layer.weight[window] * most
    return score


@inner
def spread_of_time(layer: Dispatched, time: FloatArray) -> float:
    """Mean over windows of the ranks' squared times [R, T]."""
    spread = 0.0
    for rank in range(len(time)):
        for window in range(len(layer.weight)):
            spread += layer.weight[window] * time[rank, window] * time[rank, window]
    return spread


@inner
def place_of(layer: Dispatched, slot: int) -> int:
    """Index of a slot among the replicas of its expert."""
    expert = layer.held[slot]
    for place in range(layer.count[expert]):
        if layer.slots[expert, place] == slot:
            return place
    return -1


@inner
def on_rank(layer: Dispatched, expert: int, rank: int) -> bool:
    """Whether a rank holds an expert."""
    for place in range(layer.count[expert]):
        if layer.rank[layer.slots[expert, place]] == rank:
            return True
    return False


class Terms(NamedTuple):
    """When the search stops, and what a move must gain."""

    target: FloatArray  # [L]
    min_gain: float  # a layer's score must gain it by a move, or by a change when moves are free
    most_moves: int  # -1: any number


@inner
def promising_changes(
    layer: Dispatched,
    sources: Sources,
    terms: Terms,
    score: float,
    moves: int,
    reach: int,
    trial: FloatArray,
) -> tuple[int, IntArray]:
    """The number of changes with an estimated gain, and [K, 3] these changes, most gain first.

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
    return found, changes


@inner
def _insert(changes: IntArray, gains: FloatArray, found: int, change: Change, gain: float) -> None:
    """Insert a change by its gain; the last one is dropped if the list is full."""
    place = found - 1
    while place > 0 and gains[place - 1] < gain:
        gains[place] = gains[place - 1]
        copy_into(changes[place], changes[place - 1])
        place -= 1
    gains[place] = gain
    changes[place, 0], changes[place, 1], changes[place, 2] = change[0], change[1], int(change[2])


@inner
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


@inner
def _coldest(layer: Dispatched) -> int:
    """The rank with the least time among those that experts may move to."""
    coldest, least = 0, np.inf
    for rank in range(len(layer.time)):
        time = 0.0
        for window in range(len(layer.weight)):
            time += layer.time[rank, window] * layer.weight[window]
        if layer.zone[rank] >= 0 and time < least:
            coldest, least = rank, time
    return coldest


@inner
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


@inner
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


@inner
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


@inner
def _spread_after(layer: Dispatched, sources: Sources, change: Change, trial: FloatArray) -> float:
    """Variance of the ranks' times after a change, if the draws stay the same."""
    for rank in range(len(trial)):
        copy_into(trial[rank], layer.time[rank])
    for number in range(2):
        expert = layer.held[change[0]] if number == 0 else layer.held[change[1]]
        add_load(layer, trial, expert, -1.0)
        _add_changed(layer, sources, expert, change, trial)
    return spread_of_time(layer, trial)


@inner
def _add_changed(
    layer: Dispatched, sources: Sources, expert: int, change: Change, trial: FloatArray
) -> None:
    """Add the time of an expert's replicas after a change to the ranks' times."""
    one, other, copies = change
    count = layer.count[expert]
    slots = np.empty(count + 1, dtype=np.int64)
    for place in range(count):
        slots[place] = layer.slots[expert, place]
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
    for place in range(1, count):  # in order: numba compiles a sort slowly
        slot = slots[place]
        while place > 0 and slots[place - 1] > slot:
            slots[place] = slots[place - 1]
            place -= 1
        slots[place] = slot
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


@kernel
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


@inner
def _fill_residents(resident: BoolArray, held: IntArray, base: IntArray, rank: IntArray) -> int:
    """Fill in the experts of the base by rank; return the moves from the base to ``held``."""
    resident.fill(False)
    for slot in range(len(base)):
        if base[slot] >= 0:
            resident[rank[slot], base[slot]] = True
    moves = 0
    for slot in range(len(held)):
        moves += held[slot] >= 0 and not resident[rank[slot], held[slot]]
    return moves


@inner
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
    moves = _swap_single_replicas(layer, sources, terms, number, moves, trial)
    best = layer.held.copy()
    score = score_of_time(layer, layer.time)
    left, reach = TRIES, NEAR
    while left > 0 and score > terms.target[number]:
        found, changes = promising_changes(layer, sources, terms, score, moves, reach, trial)
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
                copy_into(best, layer.held)
                break
            copy_into(layer.held, best)
            end = recompute(layer, sources, words, at)
        if not gained and reach == WIDE:
            break
        reach = NEAR if gained else WIDE
    return moves, end


@inner
def _swap_single_replicas(
    layer: Dispatched, sources: Sources, terms: Terms, number: int, moves: int, trial: FloatArray
) -> int:
    """Swap experts with one replica while that gains; return all moves."""
    for _ in range(2 * len(layer.held)):
        score = score_of_time(layer, layer.time)
        if score <= terms.target[number]:
            break
        found, changes = promising_changes(layer, sources, terms, score, moves, PLAIN, trial)
        if found == 0:
            break
        one, other = changes[0, 0], changes[0, 1]
        change = (one, other, False)
        moves += moves_added(layer, change)
        mine, theirs = layer.held[one], layer.held[other]
        for part in range(2):
            add_load(layer, layer.time, mine if part == 0 else theirs, -1.0)
        apply_change(layer, change)
        layer.slots[mine, 0], layer.slots[theirs, 0] = other, one
        for part in range(2):
            add_load(layer, layer.time, mine if part == 0 else theirs, 1.0)
    return moves


@inner
def apply_change(layer: Dispatched, change: Change) -> None:
    """Swap two slots, or copy the expert of the first into the second."""
    one, other, copies = change
    mine, theirs = layer.held[one], layer.held[other]
    layer.held[other] = mine
    if not copies:
        layer.held[one] = theirs
