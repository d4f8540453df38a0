"""A layer under search with all that binds it, compiled: who may leave a rank, and at what fee.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.jit import by_reference, jit
from eplb.core.kernels import NONE, ZERO, Bonds, BoolArray, IntArray, Ranks
from eplb.search.layer import Layer


class Home:
    """What the ranks hold that serve now; without ranks when moves are free."""

    is_there: BoolArray  # [E, R] experts that a rank has already
    is_near: BoolArray  # [E, N] experts that a rank of the node has
    node: IntArray  # [R]
    number: IntArray  # [R] how many experts a rank has already
    kept: IntArray  # [R] how many of these the layer under search has there
    far: float  # moves that one from another node counts as


new_home = by_reference(Home)


class Search:
    """Everything that a look at a change needs."""

    layer: Layer
    spread: IntArray  # [L or 0, E]: what bonds say, see ``Bonds``
    pinned: BoolArray  # [L or 0, R, E]
    domain: IntArray  # [R]
    ready: BoolArray  # [R]
    number: int  # of the layer
    is_bound: bool  # whether bonds say more than that every expert has a slot
    thrifty: bool  # gain is weighed by moves
    home: Home


new_search = by_reference(Search)


@jit
def free_search(layer: Layer, bonds: Bonds, number: int) -> Search:
    """A search in which moves cost nothing."""
    return priced_search(layer, bonds, number, empty_home(ZERO, ZERO, ZERO, 0.0))


@jit
def empty_home(num_ranks: int, num_experts: int, num_nodes: int, far: float) -> Home:
    """Room for what serves now, to be filled in layer by layer."""
    return new_home(
        np.zeros((num_experts, num_ranks), dtype=np.bool_),
        np.zeros((num_experts, num_nodes), dtype=np.bool_),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        far,
    )


@jit
def come_home(home: Home, held: IntArray, base: IntArray, ranks: Ranks, node: IntArray) -> int:
    """Fill in what ``base`` [S] holds where, and count the moves that are already made."""
    for rank in range(len(ranks.zone)):
        home.number[rank], home.node[rank] = 0, node[rank]
        for expert in base[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            if expert < 0:
                continue
            home.number[rank] += not home.is_there[expert, rank]
            home.is_there[expert, rank] = True
            # A dead rank's weights cannot be read.
            if ranks.zone[rank] >= 0:
                home.is_near[expert, node[rank]] = True
    moves = 0
    for rank in range(len(ranks.zone)):
        for expert in held[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            moves += expert >= 0 and not home.is_there[expert, rank]
    return moves


@jit
def leave_home(home: Home, base: IntArray, ranks: Ranks, node: IntArray) -> None:
    """Clear what ``come_home`` filled in."""
    for rank in range(len(ranks.zone)):
        for expert in base[ranks.first_slot[rank] : ranks.first_slot[rank + 1]]:
            if expert >= 0:
                home.is_there[expert, rank] = False
                home.is_near[expert, node[rank]] = False


@jit
def moves_for(home: Home, rank: int, expert: int) -> float:
    """How many moves the arrival of an expert at a rank counts as."""
    if home.is_there[expert, rank]:
        return 0.0
    return 1.0 if home.is_near[expert, home.node[rank]] else home.far


@jit
def priced_search(layer: Layer, bonds: Bonds, number: int, home: Home) -> Search:
    """A search in which arrivals count as moves, unless nothing serves yet."""
    return new_search(
        layer,
        bonds.spread,
        bonds.pinned,
        bonds.domain,
        bonds.ready,
        number,
        len(bonds.spread) > 0,
        len(home.node) > 0,
        home,
    )


@jit
def may_leave(search: Search, expert: int, rank: int, to: int) -> bool:
    """Whether an expert may go from a rank to rank ``to`` (NONE: nowhere) with its bonds kept.

    Where they are not kept to begin with, nothing may get worse.
    """
    if not search.is_bound:
        return True
    if search.pinned[search.number, rank, expert]:
        return False
    domains, is_safe = standing(search, expert, NONE, NONE)
    domains_then, is_safe_then = standing(search, expert, rank, to)
    needed = min(search.spread[search.number, expert], domains)
    return domains_then >= needed and (is_safe_then or not is_safe)


@jit
def standing(search: Search, expert: int, without: int, plus: int) -> tuple[int, bool]:
    """In how many failure domains an expert is, and whether a rank that is ready has it."""
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
