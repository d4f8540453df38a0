"""Compiled search of ``traffic.py``: swaps replicas so that fewer tokens cross nodes.

Pairs of slots on different nodes are tried in order, and swapped where imbalance and crossing
together gain enough for the moves, until a round changes nothing.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, N nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import BoolArray, FloatArray, IntArray, Ranks

ROUNDS = 4  # at most; nearly all swaps are in the first
ROUNDING = 1e-9  # a gain below it is none


class SlotMap(NamedTuple):
    """Ranks and nodes of slots, and experts that must stay."""

    ranks: Ranks
    node: IntArray  # [R]
    ready: BoolArray  # [R] ranks that experts may move to and from
    stays: BoolArray  # [L, E] experts that do not move


class CrossingCosts(NamedTuple):
    """The cost of tokens that cross nodes, and limits on moves."""

    starts: FloatArray  # [N] part of the tokens that starts on each node
    heat: FloatArray  # [L, E] part of the tokens of each expert
    price: float  # imbalance that all tokens crossing count as
    min_gain: float  # of each move
    most_moves: int  # -1: any number


class LayerState(NamedTuple):
    """One layer during the search."""

    work: FloatArray  # [T, E]
    held: IntArray  # [S]
    rank: IntArray  # [S]
    replicas: FloatArray  # [E]
    on_rank: BoolArray  # [R, E]
    on_node: FloatArray  # [N, E] replicas
    time: FloatArray  # [T, R]
    resident: BoolArray  # [R, E] where the base has each expert
    saved: FloatArray  # [S, N] part of the layer's tokens that a slot's replica on a node saves


@jit
def reduce_crossing(
    work: FloatArray, held: IntArray, base: IntArray, slot_map: SlotMap, costs: CrossingCosts
) -> int:
    """Improve ``held`` [L, S] in place; return its number of moves from ``base`` [L, S].

    Args:
        work: [L, T, E] as ``Problem.scaled``.
        held: experts by slot, -1 for empty.
        base: the serving placement; ``held`` itself when moves are free.
        slot_map: ranks and nodes of slots.
        costs: of crossing, and limits on moves.
    """
    states = [
        _open_layer(work[layer], held[layer], base[layer], slot_map) for layer in range(len(held))
    ]
    moves = 0
    for state in states:
        moves += _num_moves(state)
    for layer in range(len(held)):
        for slot in range(held.shape[1]):
            _update_saved(states[layer], slot, slot_map, costs, layer)
        for _ in range(ROUNDS):
            before = moves
            moves, swapped = _round(states[layer], layer, slot_map, costs, before)
            if not swapped:
                break
    return moves


@jit
def _round(
    state: LayerState, layer: int, slot_map: SlotMap, costs: CrossingCosts, moves: int
) -> tuple[int, bool]:
    """Swap each pair that pays; return the number of moves, and whether any pair was swapped."""
    swapped = False
    saved, held, node_of = state.saved, state.held, slot_map.node[state.rank]
    for one in range(len(held)):
        for other in range(one + 1, len(held)):
            stays = saved[one, node_of[other]] + saved[other, node_of[one]]
            if costs.price * stays <= ROUNDING:
                continue
            pays, more = _gain_and_moves(state, layer, (one, other), slot_map, costs, moves, stays)
            if pays:
                _swap(state, (one, other), slot_map, costs, layer)
                moves += more
                swapped = True
    return moves, swapped


@jit
def _open_layer(work: FloatArray, held: IntArray, base: IntArray, slot_map: SlotMap) -> LayerState:
    num_windows, num_experts = work.shape
    num_ranks = len(slot_map.node)
    rank = np.empty(len(held), dtype=np.int64)
    count = np.zeros(num_experts)
    on_rank = np.zeros((num_ranks, num_experts), dtype=np.bool_)
    resident = np.zeros((num_ranks, num_experts), dtype=np.bool_)
    on_node = np.zeros((slot_map.node.max() + 1, num_experts))
    for number in range(num_ranks):
        for slot in range(slot_map.ranks.first_slot[number], slot_map.ranks.first_slot[number + 1]):
            rank[slot] = number
            if held[slot] >= 0:
                count[held[slot]] += 1
                on_rank[number, held[slot]] = True
                on_node[slot_map.node[number], held[slot]] += 1
            if base[slot] >= 0:
                resident[number, base[slot]] = True
    time = np.zeros((num_windows, num_ranks))
    for slot in range(len(held)):
        if held[slot] >= 0:
            part = work[:, held[slot]] / count[held[slot]]
            time[:, rank[slot]] += part * slot_map.ranks.slowness[rank[slot]]
    saved = np.zeros((len(held), len(on_node)))
    return LayerState(work, held, rank, count, on_rank, on_node, time, resident, saved)


@jit
def _num_moves(state: LayerState) -> int:
    moves = 0
    for slot in range(len(state.held)):
        if state.held[slot] >= 0 and not state.resident[state.rank[slot], state.held[slot]]:
            moves += 1
    return moves


@jit
def _gain_and_moves(
    state: LayerState,
    layer: int,
    slots: tuple[int, int],
    slot_map: SlotMap,
    costs: CrossingCosts,
    moves: int,
    stays: float,
) -> tuple[bool, int]:
    """Whether a swap that keeps so many tokens on their node pays, and the moves that it adds."""
    if not _may_swap(state, layer, slots, slot_map):
        return False, 0
    here, there = state.rank[slots[0]], state.rank[slots[1]]
    first, second = state.held[slots[0]], state.held[slots[1]]
    more = 0
    if first >= 0:
        more += int(state.resident[here, first]) - int(state.resident[there, first])
    if second >= 0:
        more += int(state.resident[there, second]) - int(state.resident[here, second])
    gain, needed = costs.price * stays, costs.min_gain * max(more, 0) + ROUNDING
    is_over_budget = costs.most_moves >= 0 and more > 0 and moves + more > costs.most_moves
    if gain <= needed or is_over_budget:
        return False, 0
    return gain - _slower(state, slots, slot_map.ranks) > needed, more


@jit
def _may_swap(state: LayerState, layer: int, slots: tuple[int, int], slot_map: SlotMap) -> bool:
    one, other = slots
    here, there = state.rank[one], state.rank[other]
    first, second = state.held[one], state.held[other]
    if first == second or not (slot_map.ready[here] and slot_map.ready[there]):
        return False
    zone, room = slot_map.ranks.zone, slot_map.ranks.room
    # Zones differ only where groups stay on nodes: their experts are not swapped.
    if zone[here] < 0 or zone[here] != zone[there]:
        return False
    for slot, rank in ((one, here), (other, there)):
        row = room[layer if len(room) > 1 else 0]
        if slot - slot_map.ranks.first_slot[rank] >= row[rank]:
            return False
    if first >= 0 and (slot_map.stays[layer, first] or state.on_rank[there, first]):
        return False
    return not (second >= 0 and (slot_map.stays[layer, second] or state.on_rank[here, second]))


@jit
def _update_saved(
    state: LayerState, slot: int, slot_map: SlotMap, costs: CrossingCosts, layer: int
) -> None:
    """Fill in what moving the replica of a slot to each node would save."""
    expert, away = state.held[slot], slot_map.node[state.rank[slot]]
    state.saved[slot] = 0.0
    if expert < 0:
        return
    count, starts, on_node = state.replicas[expert], costs.starts, state.on_node
    less = min(starts[away], on_node[away, expert] / count)
    less -= min(starts[away], (on_node[away, expert] - 1) / count)
    for to in range(len(starts)):
        if to != away:
            more = min(starts[to], (on_node[to, expert] + 1) / count)
            more -= min(starts[to], on_node[to, expert] / count)
            state.saved[slot, to] = costs.heat[layer, expert] * (more - less)


@jit
def _slower(state: LayerState, slots: tuple[int, int], ranks: Ranks) -> float:
    """Increase of the mean over windows of the busiest rank's time."""
    one, other = slots
    here, there = state.rank[one], state.rank[other]
    first, second = state.held[one], state.held[other]
    rise = 0.0
    for window in range(len(state.work)):
        load = 0.0  # that goes from here to there
        if first >= 0:
            load += state.work[window, first] / state.replicas[first]
        if second >= 0:
            load -= state.work[window, second] / state.replicas[second]
        before, after = 0.0, 0.0
        for rank in range(state.time.shape[1]):
            time = state.time[window, rank]
            before = max(before, time)
            if rank == here:
                time -= load * ranks.slowness[rank]
            elif rank == there:
                time += load * ranks.slowness[rank]
            after = max(after, time)
        rise += after - before
    return rise / len(state.work)


@jit
def _swap(
    state: LayerState, slots: tuple[int, int], slot_map: SlotMap, costs: CrossingCosts, layer: int
) -> None:
    one, other = slots
    for slot, to in ((one, state.rank[other]), (other, state.rank[one])):
        expert, away = state.held[slot], state.rank[slot]
        if expert < 0:
            continue
        state.on_rank[away, expert] = False
        state.on_rank[to, expert] = True
        state.on_node[slot_map.node[away], expert] -= 1
        state.on_node[slot_map.node[to], expert] += 1
        part = state.work[:, expert] / state.replicas[expert]
        state.time[:, away] -= part * slot_map.ranks.slowness[away]
        state.time[:, to] += part * slot_map.ranks.slowness[to]
    state.held[one], state.held[other] = state.held[other], state.held[one]
    for slot in range(len(state.held)):
        if state.held[slot] == state.held[one] or state.held[slot] == state.held[other]:
            _update_saved(state, slot, slot_map, costs, layer)
