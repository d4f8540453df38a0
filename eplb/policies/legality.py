"""Checks a placement against the rules and constraints of a problem.

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
from eplb.fitting.cordons import undrained
from eplb.packing.zones import nodes_of_groups
from eplb.policies.greedy import frame_of
from eplb.search.demand import full_constraint_arrays


def illegal_layers(problem: Problem, placement: Placement) -> BoolArray:
    """[L] layers with duplicates on one rank, or with experts in slots that may not be used."""
    held, first_slot = placement.slot_to_expert, problem.topology.first_slot
    return _illegal(held, first_slot, problem.room, problem.num_experts)


@jit
def _illegal(
    held: NDArray[np.int32], first_slot: IntArray, room: IntArray, num_experts: int
) -> BoolArray:
    num_ranks = len(first_slot) - 1
    illegal = np.zeros(len(held), dtype=np.bool_)
    seen = np.full(num_experts, -1)  # layer and rank on which an expert was last seen
    for layer in range(len(held)):
        for rank in range(num_ranks):
            here = layer * num_ranks + rank
            for slot in range(first_slot[rank], first_slot[rank + 1]):
                expert = held[layer, slot]
                if expert >= 0:
                    is_beyond = slot - first_slot[rank] >= room[layer, rank]
                    illegal[layer] |= is_beyond or seen[expert] == here
                    seen[expert] = here
    return illegal


def first_violation(problem: Problem, placement: Placement) -> str | None:
    """Text of the first rule that a placement violates; None if it violates none."""
    violations = violations_of(problem, placement)
    return violations[min(violations)] if violations else None


def violations_of(problem: Problem, placement: Placement) -> dict[int, str]:
    """Text of a violation of each layer that violates a rule or constraint, by layer."""
    found = {int(layer): "" for layer in np.flatnonzero(illegal_layers(problem, placement))}
    if found:
        # The slow check, which gives the text of the violation.
        why = "a layer uses slots that the constraints exclude"
        if drained := undrained(placement, problem.topology):
            why = f"rank {drained[0]} is drained, and holds experts"
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
        found |= _broken_constraints(problem, placement)
    return found


def _broken_constraints(problem: Problem, placement: Placement) -> dict[int, str]:
    topology = problem.topology
    constraints = full_constraint_arrays(problem, frame_of(problem).zones)
    shape = (placement.num_layers, topology.num_ranks, problem.num_experts)
    holds = np.zeros(shape, dtype=np.bool_)
    layers, slots = np.nonzero(placement.slot_to_expert >= 0)
    holds[layers, topology.rank_of_slot[slots], placement.slot_to_expert[layers, slots]] = True
    domains = np.zeros(constraints.spread.shape, dtype=np.int64)
    for domain in np.unique(constraints.domain):
        domains += holds[:, constraints.domain == domain].any(axis=1)
    found = {}
    for layer, expert in np.argwhere(domains < constraints.spread).tolist():
        found[layer] = (
            f"layer {layer}: expert {expert} is in {domains[layer, expert]} failure domains, "
            f"expected {constraints.spread[layer, expert]}"
        )
    for layer, expert in np.argwhere(~holds[:, constraints.ready].any(axis=1)).tolist():
        found[layer] = f"layer {layer}: expert {expert} is only on ranks that are joining"
    for layer, rank, expert in np.argwhere(constraints.pinned & ~holds).tolist():
        found[layer] = (
            f"layer {layer}: expert {expert} is pinned to rank {rank}, which does not hold it"
        )
    return found
