"""A layer under search with its constraints and move costs, compiled.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.jit import by_reference, jit
from eplb.core.kernels import NONE, ZERO, BoolArray, ConstraintArrays, IntArray, Ranks
from eplb.search.layer import Layer


class ResidentExperts:
    """Experts of each rank in the serving placement; arrays of 0 ranks when moves are free."""

    on_rank: BoolArray  # [E, R] experts that a rank holds
    on_node: BoolArray  # [E, N] experts that a live rank of the node holds
    node: IntArray  # [R]
    count: IntArray  # [R] experts that a rank holds
    kept: IntArray  # [R] how many of these the layer under search still has there
    far_move_cost: float  # moves that one move from another node counts as


new_resident_experts = by_reference(ResidentExperts)


class Search:
    """A layer, its constraints and its move costs: what the evaluation of a change reads."""

    layer: Layer
    spread: IntArray  # [L or 0, E]: see ``ConstraintArrays``
    pinned: BoolArray  # [L or 0, R, E]
    domain: IntArray  # [R]
    ready: BoolArray  # [R]
    number: int  # of the layer
    is_constrained: bool  # whether there are constraints beyond a slot for every expert
    counts_moves: bool  # gain is divided by moves
    resident: ResidentExperts


new_search = by_reference(Search)


@jit
def search_without_move_costs(layer: Layer, constraints: ConstraintArrays, number: int) -> Search:
    """A search in which moves cost nothing."""
    return search_with_move_costs(
        layer, constraints, number, empty_residents(ZERO, ZERO, ZERO, 0.0)
    )


@jit
def empty_residents(
    num_ranks: int, num_experts: int, num_nodes: int, far_move_cost: float
) -> ResidentExperts:
    """Arrays without any expert, which ``fill_residents`` fills layer by layer."""
    return new_resident_experts(
        np.zeros((num_experts, num_ranks), dtype=np.bool_),
        np.zeros((num_experts, num_nodes), dtype=np.bool_),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        far_move_cost,
    )


@jit
def fill_residents(
    resident: ResidentExperts, held: IntArray, base: IntArray, ranks: Ranks, node: IntArray
) -> int:
    """Fill in the experts of ``base`` [S] by rank; return the moves from ``base`` to ``held``."""
    for rank in range(len(ranks.zone)):
        resident.count[rank], resident.node[rank] = 0, node[rank]
        for expert in base[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            if expert < 0:
                continue
            resident.count[rank] += not resident.on_rank[expert, rank]
            resident.on_rank[expert, rank] = True
            # A dead rank's weights cannot be read.
            if ranks.zone[rank] >= 0:
                resident.on_node[expert, node[rank]] = True
    moves = 0
    for rank in range(len(ranks.zone)):
        for expert in held[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            moves += expert >= 0 and not resident.on_rank[expert, rank]
    return moves


@jit
def clear_residents(
    resident: ResidentExperts, base: IntArray, ranks: Ranks, node: IntArray
) -> None:
    """Clear what ``fill_residents`` filled in."""
    for rank in range(len(ranks.zone)):
        for expert in base[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            if expert >= 0:
                resident.on_rank[expert, rank] = False
                resident.on_node[expert, node[rank]] = False


@jit
def move_cost(resident: ResidentExperts, rank: int, expert: int) -> float:
    """How many moves it counts as to bring an expert to a rank."""
    if resident.on_rank[expert, rank]:
        return 0.0
    return 1.0 if resident.on_node[expert, resident.node[rank]] else resident.far_move_cost


@jit
def search_with_move_costs(
    layer: Layer, constraints: ConstraintArrays, number: int, resident: ResidentExperts
) -> Search:
    """A search in which new experts on a rank count as moves; none do when nothing serves yet."""
    return new_search(
        layer,
        constraints.spread,
        constraints.pinned,
        constraints.domain,
        constraints.ready,
        number,
        len(constraints.spread) > 0,
        len(resident.node) > 0,
        resident,
    )


@jit
def may_move(search: Search, expert: int, rank: int, to: int) -> bool:
    """Whether an expert may move from a rank to rank ``to`` (NONE: be removed) by its constraints.

    Where a constraint is violated already, the change must not make it worse.
    """
    if not search.is_constrained:
        return True
    if search.pinned[search.number, rank, expert]:
        return False
    domains, is_safe = coverage(search, expert, NONE, NONE)
    domains_then, is_safe_then = coverage(search, expert, rank, to)
    needed = min(search.spread[search.number, expert], domains)
    return domains_then >= needed and (is_safe_then or not is_safe)


@jit
def coverage(search: Search, expert: int, without: int, plus: int) -> tuple[int, bool]:
    """Number of failure domains that hold an expert, and whether a ready rank holds it."""
    layer, domain, ready = search.layer, search.domain, search.ready
    domains, is_safe = 0, False
    if plus >= 0:
        domains, is_safe = 1, ready[plus]
    slot = layer.head[expert]
    while slot >= 0:
        holder, later = layer.rank_of_slot[slot], layer.following[slot]
        slot = later
        if holder == without:
            continue
        is_safe = is_safe or ready[holder]
        is_new = plus < 0 or domain[plus] != domain[holder]
        while later >= 0:  # the last one of a domain counts
            other = layer.rank_of_slot[later]
            if other != without and domain[other] == domain[holder]:
                is_new = False
            later = layer.following[later]
        domains += is_new
    return domains, is_safe
