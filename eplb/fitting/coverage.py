"""How many experts can have replicas in several failure domains, and which are left uncovered.

Where memory is short, experts are covered in the order of their refill cost: after the death of a
domain, an expert without another replica costs its tokens until its weights are read again, and
weights of all experts are equally large. So the order is by tokens.

Expert groups that stay on nodes stay there if each node has as many failure domains as are wanted;
equally many experts of each group are then covered, whichever groups the planner puts together.
Otherwise the domains come first, and the groups are released.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.constraints import Constraints, Which
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.packing.zones import keeps_groups


@dataclass(frozen=True, eq=False)
class Coverage:
    """Constraints that fit into the slots, and what they leave out."""

    constraints: Constraints
    uncovered: tuple[tuple[int, int], ...] = ()  # (layer, expert), costliest first in each layer
    releases_groups: bool = False  # whether expert groups would stay on nodes without it
    unmet_pins: tuple[str, ...] = ()  # sentences: see eplb/fitting/pins.py
    unmet_cordons: tuple[str, ...] = ()  # and eplb/fitting/cordons.py


def coverage_of(
    tokens: NDArray[np.int64],
    room: NDArray[np.int64],
    topology: Topology,
    domains: int,
    num_groups: int = 1,
) -> Coverage:
    """Ask for ``domains`` failure domains for as many experts of each layer as fit.

    Args:
        tokens: [L, E], by which experts are ordered.
        room: [L, R] slots that may be used.
        topology: with the failure domain of each rank.
        domains: wanted for every expert; 1 asks for nothing.
        num_groups: the model's expert groups.

    Raises:
        ConfigError: fewer than one domain is asked for.
    """
    if domains < 1:
        raise ConfigError(f"min_domains is {domains}, expected 1 or more")
    if domains == 1:
        return Coverage(Constraints())
    is_grouped = keeps_groups(topology, num_groups, tokens.shape[1], room)
    stays = is_grouped and _nodes_have(domains, room, topology)
    covered: dict[Which, int] = {}
    uncovered: list[tuple[int, int]] = []
    order = np.argsort(-tokens, axis=1, kind="stable")
    group = order // (tokens.shape[1] // num_groups) if stays else np.zeros_like(order)
    for layer, experts in enumerate(order.tolist()):
        most = _most_of_a_group(room[layer], topology, len(experts), domains, num_groups, stays)
        taken = [0] * num_groups
        for expert, of_group in zip(experts, group[layer].tolist(), strict=True):
            if taken[of_group] < most:
                taken[of_group] += 1
                covered[layer, expert] = domains
            else:
                uncovered.append((layer, expert))
    releases = is_grouped and not stays
    constraints = Constraints(min_domains=covered, keep_groups=False if releases else None)
    return Coverage(constraints, tuple(uncovered), releases)


def _nodes_have(domains: int, room: NDArray[np.int64], topology: Topology) -> bool:
    """Whether each node has so many failure domains with slots, in each layer."""
    usable = room.min(axis=0) > 0
    of_node = (
        topology.failure_domain[usable & (topology.node_of_rank == node)]
        for node in range(topology.num_nodes)
    )
    return all(len(set(found.tolist())) >= domains for found in of_node)


def _most_of_a_group(
    room: NDArray[np.int64],
    topology: Topology,
    num_experts: int,
    domains: int,
    num_groups: int,
    stays: bool,
) -> int:
    """Most experts of each group with so many domains; of all, where groups do not stay."""
    if not stays:
        return _most_covered(_slots_of_domains(room, topology), num_experts, domains)
    num_nodes = topology.num_nodes
    of_node = (
        _slots_of_domains(np.where(topology.node_of_rank == node, room, 0), topology)
        for node in range(num_nodes)
    )
    fewest = min(_most_covered(slots, num_experts // num_nodes, domains) for slots in of_node)
    return fewest // (num_groups // num_nodes)


def _slots_of_domains(room: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
    _, domain = np.unique(topology.failure_domain, return_inverse=True)
    slots: NDArray[np.int64] = np.bincount(domain, weights=room).astype(np.int64)
    return slots


def _most_covered(slots: NDArray[np.int64], num_experts: int, domains: int) -> int:
    """Most experts with replicas in so many domains, while each other one keeps a slot.

    A domain serves one replica of an expert towards this, so of ``count`` experts it takes
    ``count`` at most.
    """

    def fits(count: int) -> bool:
        has_slots = domains * count + num_experts - count <= int(slots.sum())
        return has_slots and domains * count <= int(np.minimum(slots, count).sum())

    low, high = 0, num_experts
    while low < high:  # both conditions hold up to a count, and for none above it
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
