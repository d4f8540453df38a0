"""Whether a placement keeps to everything that a problem asks of it.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import jit
from eplb.core.kernels import BoolArray, IntArray
from eplb.core.placement import Placement, check_fits
from eplb.core.problem import Problem
from eplb.errors import PlacementError
from eplb.packing.zones import nodes_of_groups
from eplb.policies.greedy import frame_of
from eplb.search.demand import full_bonds


def unfit_layers(problem: Problem, placement: Placement) -> BoolArray:
    """[L] layers with doubles on one rank, or with experts in slots that may not be used."""
    held, first_slot = placement.slot_to_expert, problem.topology.first_slot
    return _unfit(held, first_slot, problem.room, problem.num_experts)


@jit
def _unfit(
    held: NDArray[np.int32], first_slot: IntArray, room: IntArray, num_experts: int
) -> BoolArray:
    num_ranks = len(first_slot) - 1
    unfit = np.zeros(len(held), dtype=np.bool_)
    seen = np.full(num_experts, -1)  # which rank of which layer an expert was last seen on
    for layer in range(len(held)):
        for rank in range(num_ranks):
            here = layer * num_ranks + rank
            for slot in range(first_slot[rank], first_slot[rank + 1]):
                expert = held[layer, slot]
                if expert >= 0:
                    is_beyond = slot - first_slot[rank] >= room[layer, rank]
                    unfit[layer] |= is_beyond or seen[expert] == here
                    seen[expert] = here
    return unfit


def why_it_cannot_serve(problem: Problem, placement: Placement) -> str | None:
    """Text of the first rule that a placement violates; None if it violates none."""
    complaints = complaints_of(problem, placement)
    return complaints[min(complaints)] if complaints else None


def complaints_of(problem: Problem, placement: Placement) -> dict[int, str]:
    """What each layer of a placement does not keep to, by layer; the others are absent."""
    found = {int(layer): "" for layer in np.flatnonzero(unfit_layers(problem, placement))}
    if found:
        # The slow check, which knows all the words.
        why = "a layer uses slots that the constraints take away"
        try:
            check_fits(placement, problem.topology)
        except PlacementError as exc:
            why = str(exc)
        return dict.fromkeys(found, why)
    if problem.constraints.keep_groups:
        for layer, held in enumerate(placement.slot_to_expert):
            num_groups, num_experts = problem.num_groups, problem.num_experts
            if nodes_of_groups(held, problem.topology, num_groups, num_experts) is None:
                found[layer] = f"layer {layer}: an expert group is on several nodes"
    if problem.constraints.binds_experts:
        found |= _broken_bonds(problem, placement)
    return found


def _broken_bonds(problem: Problem, placement: Placement) -> dict[int, str]:
    topology = problem.topology
    bonds = full_bonds(problem, frame_of(problem).zones)
    shape = (placement.num_layers, topology.num_ranks, problem.num_experts)
    holds = np.zeros(shape, dtype=np.bool_)
    layers, slots = np.nonzero(placement.slot_to_expert >= 0)
    holds[layers, topology.rank_of_slot[slots], placement.slot_to_expert[layers, slots]] = True
    domains = np.zeros(bonds.spread.shape, dtype=np.int64)
    for domain in np.unique(bonds.domain):
        domains += holds[:, bonds.domain == domain].any(axis=1)
    found = {}
    for layer, expert in np.argwhere(domains < bonds.spread).tolist():
        found[layer] = (
            f"layer {layer}: expert {expert} is in {domains[layer, expert]} failure domains, "
            f"expected {bonds.spread[layer, expert]}"
        )
    for layer, expert in np.argwhere(~holds[:, bonds.ready].any(axis=1)).tolist():
        found[layer] = f"layer {layer}: expert {expert} is only on ranks that are joining"
    for layer, rank, expert in np.argwhere(bonds.pinned & ~holds).tolist():
        found[layer] = (
            f"layer {layer}: expert {expert} is pinned to rank {rank}, which does not hold it"
        )
    return found
