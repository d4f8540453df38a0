"""Tokens that cross nodes: their part, shares that prefer local replicas, and moves that reduce it.

A replica on a token's source node can serve it without the network. Preferring local replicas
changes which tokens a replica serves and not how many, so the loads of ranks do not change. The
part that still crosses depends on the placement:

    crossing of an expert = 1 - sum over nodes of min(part that starts there, part served there)

All nodes are assumed to choose experts alike, because a history has no source nodes.

Shapes:  L MoE layers, E experts, S slots, R ranks, N nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.core.jit import ZERO, BoolArray, FloatArray, IntArray, by_reference, inner, kernel
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.core.zones import Ranks
from eplb.search.packing import has
from eplb.search.relabel import in_place

ROUNDS = 4  # at most; nearly all swaps are in the first
ROUNDING = 1e-9  # a gain below it is none


def crossing(problem: Problem, placement: Placement) -> FloatArray:
    """[L] part of a layer's tokens that is served on another node than their source node.

    By the placement's shares for each source node; without those, by its shares for all nodes.
    """
    starts, heat = problem.tokens_of_node, problem.heat
    shares = placement.source_share
    if shares is None:
        shares = np.repeat(placement.slot_share[None], len(starts), axis=0)
    stays = np.zeros(heat.shape)
    for node, part in enumerate(starts):
        local = share_by_node(shares[node], placement, problem.topology)[:, :, node]
        stays += part * local
    crosses: FloatArray = heat.sum(axis=1) - (heat * stays).sum(axis=1)
    return np.clip(crosses, 0.0, 1.0)


def with_local_shares(problem: Problem, placement: Placement) -> Placement:
    """The same placement and loads of ranks, with the fewest tokens that cross nodes.

    Returns:
        A placement with ``source_share``: replicas on the source node take as much of its tokens as
        their share allows, and the rest goes to replicas with share left.
    """
    topology, starts = problem.topology, problem.tokens_of_node
    share, held = placement.slot_share, np.maximum(placement.slot_to_expert, 0)
    on_node = share_by_node(share, placement, topology)  # [L, E, N]
    local = np.minimum(starts, on_node)  # part of an expert's tokens
    node_of_slot = topology.node_of_slot
    layer = np.arange(len(held))[:, None]
    served = on_node[layer, held, node_of_slot]  # [L, S] share of the expert on the node
    kept = local[layer, held, node_of_slot]
    part = np.divide(share, served, out=np.zeros(share.shape), where=served > 0)
    left = share - part * kept  # [L, S] share that other nodes may use
    left_of_expert = np.take_along_axis(1.0 - local.sum(axis=2), held, axis=1)
    far = np.divide(left, left_of_expert, out=np.zeros(share.shape), where=left_of_expert > 1e-12)
    per_source = np.empty((len(starts), *share.shape))
    for node, begins in enumerate(starts):
        if begins <= 0:
            per_source[node] = share
            continue
        surplus = np.take_along_axis(begins - local[:, :, node], held, axis=1)  # [L, S]
        near = np.where(node_of_slot == node, part * kept, 0.0)
        per_source[node] = (near + far * surplus) / begins
    per_source = np.where(placement.slot_to_expert == EMPTY, 0.0, np.clip(per_source, 0.0, 1.0))
    return placement.with_shares(share, per_source)


def with_less_crossing(problem: Problem, placement: Placement) -> Placement:
    """``placement`` with replicas moved while balance and crossing together gain.

    Respects the budget of moves and the constraints: experts that are pinned or must be in several
    failure domains do not move. With expert groups that stay on nodes it changes nothing.
    """
    most = problem.max_moves if problem.current is not None else None
    held = placement.slot_to_expert.astype(np.int64)
    costs = CrossingCosts(
        problem.tokens_of_node,
        problem.heat,
        problem.cost.node_traffic,
        float(problem.price.mean()) if problem.current is not None else 1e-6,
        -1 if most is None else most,
    )
    base = held if problem.current is None else problem.current.slot_to_expert.astype(np.int64)
    slot_map = SlotMap(problem.frame.zones.ranks, *movable(problem))
    reduce_crossing(problem.weighed, held, base, slot_map, costs)
    if problem.current is not None:
        held = in_place(held, problem.current.slot_to_expert, problem.topology, problem.room)
    return Placement(held.astype(np.int32), placement.num_experts, placement.generation)


def movable(problem: Problem) -> tuple[BoolArray, BoolArray]:
    """[R] ranks that experts may move to and from, and [L, E] experts that constraints keep."""
    constraints = problem.frame.constraints
    if problem.constraints.binds_experts:
        return constraints.ready, (constraints.spread > 1) | constraints.pinned.any(axis=1)
    stays = np.zeros(constraints.zone_of_expert.shape, dtype=np.bool_)
    return np.ones(problem.topology.num_ranks, dtype=np.bool_), stays


def share_by_node(share: FloatArray, placement: Placement, topology: Topology) -> FloatArray:
    """[L, E, N] part of each expert's tokens that each node serves, for shares [L, S]."""
    num_layers, num_experts, num_nodes = len(share), placement.num_experts, topology.num_nodes
    layer, slot = np.nonzero(placement.slot_to_expert != EMPTY)
    expert = placement.slot_to_expert[layer, slot]
    place = (layer * num_experts + expert) * num_nodes + topology.node_of_slot[slot]
    size = num_layers * num_experts * num_nodes
    summed = np.asarray(np.bincount(place, share[layer, slot], size), dtype=np.float64)
    return summed.reshape(num_layers, num_experts, num_nodes)


class SlotMap(NamedTuple):
    """Ranks of slots, and experts that must stay."""

    ranks: Ranks
    ready: BoolArray  # [R] ranks that experts may move to and from
    stays: BoolArray  # [L, E] experts that do not move


class CrossingCosts(NamedTuple):
    """The cost of tokens that cross nodes, and limits on moves."""

    starts: FloatArray  # [N] part of the tokens that starts on each node
    heat: FloatArray  # [L, E] part of the tokens of each expert
    price: float  # imbalance that all tokens crossing count as
    min_gain: float  # imbalance that a move must gain
    most_moves: int  # -1: any number


class LayerState:
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
    heat: FloatArray  # [E]
    stays: BoolArray  # [E]
    may_change: BoolArray  # [S] slots of ready ranks that the layer may use
    zone: IntArray  # [R]
    node: IntArray  # [R]
    slowness: FloatArray  # [R]
    starts: FloatArray  # [N]


new_state = by_reference(LayerState)


@kernel
def reduce_crossing(
    work: FloatArray, held: IntArray, base: IntArray, slot_map: SlotMap, costs: CrossingCosts
) -> int:
    """Improve ``held`` [L, S] in place; return its number of moves from ``base`` [L, S].

    Args:
        work: [L, T, E] as ``Problem.weighed``.
        held: experts by slot, -1 for empty.
        base: the serving placement; ``held`` itself when moves are free.
        slot_map: ranks and nodes of slots.
        costs: of crossing, and limits on moves.
    """
    moves, at_start = ZERO, base.copy()  # ``base`` may be ``held``
    ranks = slot_map.ranks
    for layer in range(len(held)):
        for rank in range(len(ranks.node)):
            for slot in range(ranks.first_slot[rank], ranks.first_slot[rank + 1]):
                moves += held[layer, slot] >= 0 and not has(
                    at_start[layer],
                    ranks.first_slot[rank],
                    ranks.first_slot[rank + 1],
                    held[layer, slot],
                )
    for layer in range(len(held)):
        state = _open_layer(work[layer], held[layer], at_start[layer], slot_map, costs, layer)
        for slot in range(held.shape[1]):
            _update_saved(state, slot)
        for _ in range(ROUNDS):
            moves, swapped = _round(state, costs, moves)
            if not swapped:
                break
    return moves


@inner
def _round(state: LayerState, costs: CrossingCosts, moves: int) -> tuple[int, bool]:
    """Swap each pair that pays; return the number of moves, and whether any pair was swapped."""
    swapped = False
    saved, held, node, rank = state.saved, state.held, state.node, state.rank
    for one in range(len(held)):
        for other in range(one + 1, len(held)):
            stays = saved[one, node[rank[other]]] + saved[other, node[rank[one]]]
            if costs.price * stays <= ROUNDING or not _may_swap(state, one, other):
                continue
            more = _moves_added(state, one, other)
            gain, needed = costs.price * stays, costs.min_gain * max(more, 0) + ROUNDING
            is_over_budget = costs.most_moves >= 0 and more > 0 and moves + more > costs.most_moves
            if gain <= needed or is_over_budget or gain - _slower(state, one, other) <= needed:
                continue
            _swap(state, one, other)
            moves += more
            swapped = True
    return moves, swapped


@inner
def _open_layer(
    work: FloatArray,
    held: IntArray,
    base: IntArray,
    slot_map: SlotMap,
    costs: CrossingCosts,
    layer: int,
) -> LayerState:
    num_windows, num_experts = work.shape
    ranks, num_ranks = slot_map.ranks, len(slot_map.ranks.node)
    rank = np.empty(len(held), dtype=np.int64)
    may_change = np.zeros(len(held), dtype=np.bool_)
    count = np.zeros(num_experts)
    on_rank = np.zeros((num_ranks, num_experts), dtype=np.bool_)
    resident = np.zeros((num_ranks, num_experts), dtype=np.bool_)
    on_node = np.zeros((len(costs.starts), num_experts))
    for number in range(num_ranks):
        first = ranks.first_slot[number]
        room = ranks.room[layer if len(ranks.room) > 1 else 0, number]
        for slot in range(first, ranks.first_slot[number + 1]):
            rank[slot] = number
            may_change[slot] = slot_map.ready[number] and slot - first < room
            if held[slot] >= 0:
                count[held[slot]] += 1
                on_rank[number, held[slot]] = True
                on_node[ranks.node[number], held[slot]] += 1
            if base[slot] >= 0:
                resident[number, base[slot]] = True
    time = np.zeros((num_windows, num_ranks))
    for slot in range(len(held)):
        if held[slot] >= 0:
            for window in range(num_windows):
                part = work[window, held[slot]] / count[held[slot]]
                time[window, rank[slot]] += part * ranks.slowness[rank[slot]]
    return new_state(
        work,
        held,
        rank,
        count,
        on_rank,
        on_node,
        time,
        resident,
        np.zeros((len(held), len(costs.starts))),
        costs.heat[layer],
        slot_map.stays[layer],
        may_change,
        ranks.zone,
        ranks.node,
        ranks.slowness,
        costs.starts,
    )


@inner
def _moves_added(state: LayerState, one: int, other: int) -> int:
    """How many moves from the base a swap adds; negative where it undoes some."""
    here, there, more = state.rank[one], state.rank[other], 0
    first, second = state.held[one], state.held[other]
    if first >= 0:
        more += int(state.resident[here, first]) - int(state.resident[there, first])
    if second >= 0:
        more += int(state.resident[there, second]) - int(state.resident[here, second])
    return more


@inner
def _may_swap(state: LayerState, one: int, other: int) -> bool:
    here, there = state.rank[one], state.rank[other]
    first, second = state.held[one], state.held[other]
    if first == second or not (state.may_change[one] and state.may_change[other]):
        return False
    # Zones differ only where groups stay on nodes: their experts are not swapped.
    if state.zone[here] < 0 or state.zone[here] != state.zone[there]:
        return False
    if first >= 0 and (state.stays[first] or state.on_rank[there, first]):
        return False
    return not (second >= 0 and (state.stays[second] or state.on_rank[here, second]))


@inner
def _update_saved(state: LayerState, slot: int) -> None:
    """Fill in what moving the replica of a slot to each node would save."""
    expert, away, starts, on_node = (
        state.held[slot],
        state.node[state.rank[slot]],
        state.starts,
        state.on_node,
    )
    for to in range(len(starts)):
        state.saved[slot, to] = 0.0
    if expert < 0:
        return
    count = state.replicas[expert]
    less = min(starts[away], on_node[away, expert] / count)
    less -= min(starts[away], (on_node[away, expert] - 1) / count)
    for to in range(len(starts)):
        if to != away:
            more = min(starts[to], (on_node[to, expert] + 1) / count)
            more -= min(starts[to], on_node[to, expert] / count)
            state.saved[slot, to] = state.heat[expert] * (more - less)


@inner
def _slower(state: LayerState, one: int, other: int) -> float:
    """Increase of the mean over windows of the busiest rank's time."""
    here, there = state.rank[one], state.rank[other]
    first, second = state.held[one], state.held[other]
    rise = 0.0
    for window in range(len(state.work)):
        load = 0.0  # load that goes from here to there
        if first >= 0:
            load += state.work[window, first] / state.replicas[first]
        if second >= 0:
            load -= state.work[window, second] / state.replicas[second]
        before, after = 0.0, 0.0
        for rank in range(state.time.shape[1]):
            time = state.time[window, rank]
            before = max(before, time)
            if rank == here:
                time -= load * state.slowness[rank]
            elif rank == there:
                time += load * state.slowness[rank]
            after = max(after, time)
        rise += after - before
    return rise / len(state.work)


@inner
def _swap(state: LayerState, one: int, other: int) -> None:
    held, node, slowness = state.held, state.node, state.slowness
    for turn in range(2):
        slot, to = (one, state.rank[other]) if turn == 0 else (other, state.rank[one])
        expert, away = held[slot], state.rank[slot]
        if expert < 0:
            continue
        state.on_rank[away, expert] = False
        state.on_rank[to, expert] = True
        state.on_node[node[away], expert] -= 1
        state.on_node[node[to], expert] += 1
        for window in range(len(state.work)):
            part = state.work[window, expert] / state.replicas[expert]
            state.time[window, away] -= part * slowness[away]
            state.time[window, to] += part * slowness[to]
    held[one], held[other] = held[other], held[one]
    for slot in range(len(held)):
        if held[slot] == held[one] or held[slot] == held[other]:
            _update_saved(state, slot)
