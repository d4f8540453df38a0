"""How many experts can have replicas in several failure domains, and which are left uncovered.

Where memory is short, experts are covered in the order of their refill cost: after the death of a
domain, an expert without another replica costs its tokens until its weights are read again, and
weights of all experts are equally large. So the order is by tokens.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.constraints import Constraints, Which
from eplb.core.topology import Topology
from eplb.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Coverage:
    """Constraints that fit into the slots, and what they leave out."""

    constraints: Constraints
    uncovered: tuple[tuple[int, int], ...] = ()  # (layer, expert), costliest first in each layer


def coverage_of(
    tokens: NDArray[np.int64], room: NDArray[np.int64], topology: Topology, domains: int
) -> Coverage:
    """Ask for ``domains`` failure domains for as many experts of each layer as fit.

    Args:
        tokens: [L, E], by which experts are ordered.
        room: [L, R] slots that may be used.
        topology: with the failure domain of each rank.
        domains: wanted for every expert; 1 asks for nothing.

    Raises:
        ConfigError: fewer than one domain is asked for.
    """
    if domains < 1:
        raise ConfigError(f"min_domains is {domains}, expected 1 or more")
    if domains == 1:
        return Coverage(Constraints())
    covered: dict[Which, int] = {}
    uncovered: list[tuple[int, int]] = []
    order = np.argsort(-tokens, axis=1, kind="stable")
    for layer, experts in enumerate(order.tolist()):
        count = _most_covered(_slots_of_domains(room[layer], topology), len(experts), domains)
        covered |= {(layer, expert): domains for expert in experts[:count]}
        uncovered += [(layer, expert) for expert in experts[count:]]
    return Coverage(Constraints(min_domains=covered), tuple(uncovered))


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
