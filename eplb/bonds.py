"""A layer under search with all that binds it, compiled: who may leave a rank, and at what fee.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.jit import by_reference, jit
from eplb.kernels import NONE, Bonds, BoolArray, IntArray
from eplb.layer import Layer


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
    fee: NDArray[np.float32]  # [R, E] moves that an arrival counts as; empty when moves are free
    homes: IntArray  # [R] how many experts are free to arrive, or there already


new_search = by_reference(Search)


@jit
def free_search(layer: Layer, bonds: Bonds, number: int) -> Search:
    """A search in which moves cost nothing."""
    nothing, nobody = np.zeros((0, 0), dtype=np.float32), np.zeros(0, dtype=np.int64)
    return priced_search(layer, bonds, number, nothing, nobody)


@jit
def priced_search(
    layer: Layer, bonds: Bonds, number: int, fee: NDArray[np.float32], homes: IntArray
) -> Search:
    """A search in which arrivals cost a fee [R, E], unless there is none."""
    return new_search(
        layer,
        bonds.spread,
        bonds.pinned,
        bonds.domain,
        bonds.ready,
        number,
        len(bonds.spread) > 0,
        len(homes) > 0,
        fee,
        homes,
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
    holders, domain, ready = search.layer.holders, search.domain, search.ready
    domains, is_safe = 0, False
    if plus >= 0:
        domains, is_safe = 1, ready[plus]
    for place in range(search.layer.replicas[expert]):
        holder = holders[expert, place]
        if holder == without:
            continue
        is_safe = is_safe or ready[holder]
        is_new = plus < 0 or domain[plus] != domain[holder]
        for before in range(place):
            other = holders[expert, before]
            if other != without and domain[other] == domain[holder]:
                is_new = False
        domains += is_new
    return domains, is_safe
