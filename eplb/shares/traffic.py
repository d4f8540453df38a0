"""Tokens that cross nodes: their part, shares that prefer local replicas, and moves that reduce it.

A replica on a token's source node can serve it without the network. Preferring local replicas
changes which tokens a replica serves and not how many, so the loads of ranks do not change. The
part that still crosses depends on the placement:

    crossing of an expert = 1 - sum over nodes of min(part that starts there, part served there)

All nodes are assumed to choose experts alike, because a history has no source nodes.

Shapes:  L MoE layers, E experts, S slots, R ranks, N nodes.
"""

from __future__ import annotations

import numpy as np

from eplb.core.kernels import BoolArray, FloatArray
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.policies.greedy import frame_of, in_place
from eplb.search.demand import full_constraint_arrays
from eplb.shares.traffic_search import CrossingCosts, SlotMap, reduce_crossing


def tokens_of_node(problem: Problem) -> FloatArray:
    """[N] part of the tokens that starts on each node; 1 together.

    Raises:
        ConfigError: the cost model names another number of nodes, or no tokens at all.
    """
    topology, given = problem.topology, problem.cost.tokens_of_node
    if not given:
        live = np.bincount(topology.node_of_rank, topology.alive, topology.num_nodes)
        return np.asarray(live / live.sum(), dtype=np.float64)
    if len(given) != topology.num_nodes or not sum(given) > 0:
        raise ConfigError(
            f"cost: tokens_of_node is {given}, expected a part for each of "
            f"{topology.num_nodes} nodes, and one above 0"
        )
    parts = np.array(given, dtype=np.float64)
    return np.asarray(parts / parts.sum(), dtype=np.float64)


def crossing(problem: Problem, placement: Placement) -> FloatArray:
    """[L] part of a layer's tokens that is served on another node than their source node.

    By the placement's shares for each source node; without those, by its shares for all nodes.
    """
    starts, heat = tokens_of_node(problem), _heat(problem)
    shares = placement.source_share
    if shares is None:
        shares = np.repeat(placement.slot_share[None], len(starts), axis=0)
    stays = np.zeros(heat.shape)
    for node, part in enumerate(starts):
        local = _by_node(shares[node], placement, problem.topology)[:, :, node]
        stays += part * local
    crosses: FloatArray = heat.sum(axis=1) - (heat * stays).sum(axis=1)
    return np.clip(crosses, 0.0, 1.0)


def with_local_shares(problem: Problem, placement: Placement) -> Placement:
    """The same placement and loads of ranks, with the fewest tokens that cross nodes.

    Returns:
        A placement with ``source_share``: replicas on the source node take as much of its tokens as
        their share allows, and the rest goes to replicas with share left.
    """
    topology, starts = problem.topology, tokens_of_node(problem)
    share, held = placement.slot_share, np.maximum(placement.slot_to_expert, 0)
    on_node = _by_node(share, placement, topology)  # [L, E, N]
    local = np.minimum(starts, on_node)  # of all tokens of an expert
    node_of_slot = topology.node_of_slot
    layer = np.arange(len(held))[:, None]
    served = on_node[layer, held, node_of_slot]  # [L, S] by all of the expert's slots on the node
    kept = local[layer, held, node_of_slot]
    part = np.divide(share, served, out=np.zeros(share.shape), where=served > 0)
    left = share - part * kept  # [L, S] that other nodes may use
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
    return Placement(
        placement.slot_to_expert, placement.num_experts, placement.generation, share, per_source
    )


def with_less_crossing(problem: Problem, placement: Placement) -> Placement:
    """``placement`` with replicas moved while balance and crossing together gain.

    Respects the budget of moves and the constraints: experts that are pinned or must be in several
    failure domains do not move. With expert groups that stay on nodes it changes nothing.
    """
    most = problem.max_moves if problem.current is not None else None
    held = placement.slot_to_expert.astype(np.int64)
    costs = CrossingCosts(
        tokens_of_node(problem),
        _heat(problem),
        problem.cost.node_traffic,
        float(problem.price.mean()) if problem.current is not None else 1e-6,
        -1 if most is None else most,
    )
    base = held if problem.current is None else problem.current.slot_to_expert.astype(np.int64)
    reduce_crossing(np.ascontiguousarray(problem.scaled), held, base, slot_map_of(problem), costs)
    if problem.current is not None:
        held = in_place(held, problem.current.slot_to_expert, problem.topology, problem.room)
    return Placement(held.astype(np.int32), placement.num_experts, placement.generation)


def slot_map_of(problem: Problem) -> SlotMap:
    """Ranks and nodes of slots, ready ranks, and experts that constraints keep in place."""
    topology = problem.topology
    frame = frame_of(problem)
    stays: BoolArray = np.zeros((problem.history.num_layers, problem.num_experts), dtype=np.bool_)
    ready = np.ones(topology.num_ranks, dtype=np.bool_)
    if problem.constraints.binds_experts:
        constraints = full_constraint_arrays(problem, frame.zones)
        stays = (constraints.spread > 1) | constraints.pinned.any(axis=1)
        ready = constraints.ready
    return SlotMap(frame.zones.ranks, topology.node_of_rank.astype(np.int64), ready, stays)


def _heat(problem: Problem) -> FloatArray:
    """[L, E] part of a layer's tokens, mean over windows; zeros in an idle layer."""
    tokens = problem.history.tokens[problem.complete].astype(np.float64)
    total = tokens.sum(axis=2, keepdims=True)
    part = np.divide(tokens, total, out=np.zeros(tokens.shape), where=total > 0)
    busy = (total[:, :, 0] > 0).sum(axis=0)
    heat: FloatArray = part.sum(axis=0) / np.maximum(busy, 1)[:, None]
    return heat


def _by_node(share: FloatArray, placement: Placement, topology: Topology) -> FloatArray:
    """[L, E, N] part of each expert's tokens that each node serves, for shares [L, S]."""
    num_layers, num_experts, num_nodes = len(share), placement.num_experts, topology.num_nodes
    layer, slot = np.nonzero(placement.slot_to_expert != EMPTY)
    expert = placement.slot_to_expert[layer, slot]
    place = (layer * num_experts + expert) * num_nodes + topology.node_of_slot[slot]
    weights = share[layer, slot].astype(np.float64)
    summed: FloatArray = np.zeros(num_layers * num_experts * num_nodes)
    np.add.at(summed, place, weights)
    return summed.reshape(num_layers, num_experts, num_nodes)
