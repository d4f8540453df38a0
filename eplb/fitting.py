"""The demands of an operator that a plan can meet: cordons, pins and failure domains.

A demand that cannot be met, because a rank died for example, must not end all planning: it is left
out, with a sentence.

    cordon   the rank keeps what it holds, and takes nothing new
    drain    the rank holds nothing: its slots are EMPTY, and no expert is lost with it
    pin      an expert has a replica on each of these ranks
    domains  an expert has replicas in several failure domains

Where memory is short, experts are covered by several domains in the order of their refill cost:
after the death of a domain, an expert without another replica costs its tokens until its weights
are read again, and weights of all experts are equally large. So the order is by tokens. Expert
groups that stay on nodes stay there if each node has as many failure domains as are wanted; equally
many experts of each group are then covered, whichever groups the planner puts together. Otherwise
the domains come first, and the groups are released.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from eplb.core.constraints import Constraints, Which
from eplb.core.model import slot_shortage, spans
from eplb.core.placement import EMPTY, Placement, slots_in_use
from eplb.core.topology import Topology
from eplb.core.zones import keeps_groups, nodes_of_groups
from eplb.errors import ConfigError


class Cordon(StrEnum):
    """The restriction on a rank."""

    CORDON = "cordon"
    DRAIN = "drain"


Cordons = Mapping[int, Cordon]  # by rank


@dataclass(frozen=True, eq=False)
class FittingCordons:
    """Cordons that can be met together, and a sentence for each that cannot."""

    topology: Topology  # with the drained ranks
    cordoned: tuple[int, ...] = ()  # ranks that keep what they hold
    # Ranks that keep an expert, by (layer, expert): pins to what they hold.
    kept: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    releases_groups: bool = False  # whether expert groups would stay on nodes without the drains
    unmet: tuple[str, ...] = ()

    def limited(self, room: NDArray[np.int64], current: Placement) -> NDArray[np.int64]:
        """[L, R] ``room`` in which cordoned ranks have the slots that they use in ``current``.

        A layer whose room is limited further gets all slots of the other ranks where its experts
        would have none.
        """
        if not self.cordoned:
            return room
        limited, used = room.copy(), slots_in_use(current, self.topology)
        limited[:, self.cordoned] = used[:, self.cordoned]
        elsewhere = self.elsewhere(current)
        is_free = np.ones(self.topology.num_ranks, dtype=np.bool_)
        is_free[list(self.cordoned)] = False
        short = limited[:, is_free].sum(axis=1) < elsewhere
        limited[np.ix_(short, is_free)] = self.topology.usable_slots[is_free]
        return limited

    def elsewhere(self, current: Placement) -> NDArray[np.int64]:
        """[L] experts that no cordoned rank keeps, so that other ranks must hold them."""
        count = np.full(current.num_layers, current.num_experts)
        for layer, _ in _experts_on(self.cordoned, current, self.topology):
            count[layer] -= 1
        return count


def fitting_cordons(
    cordons: Cordons, current: Placement, topology: Topology, num_groups: int = 1
) -> FittingCordons:
    """Take cordons one by one, drains last, as far as the other ranks have a slot for each expert.

    Args:
        cordons: by rank.
        current: the serving placement, in the slots of ``topology``.
        topology: which ranks there are.
        num_groups: the model's expert groups.
    """
    stays = keeps_groups(topology, num_groups, current.num_experts)
    taken = FittingCordons(topology)
    unmet: list[str] = []
    for rank in sorted(cordons, key=lambda rank: (cordons[rank] is Cordon.DRAIN, rank)):
        found = _with(taken, rank, cordons[rank])
        why = _why_no_cordon(found, rank, current, num_groups if stays else 1)
        if why:
            unmet.append(f"rank {rank} ({cordons[rank]}): {why}")
        else:
            taken = found
    kept = _experts_on(taken.cordoned, current, topology)
    releases = stays and not keeps_groups(taken.topology, num_groups, current.num_experts)
    return replace(taken, kept=kept, releases_groups=releases, unmet=tuple(unmet))


def arrivals(
    cordoned: Collection[int], base: Placement, target: Placement, topology: Topology
) -> str:
    """Why a target breaks cordons: the first expert that is new on such a rank; "" if none is."""
    before = _experts_on(cordoned, base, topology)
    for (layer, expert), ranks in _experts_on(cordoned, target, topology).items():
        for rank in sorted(set(ranks) - set(before.get((layer, expert), ()))):
            return f"layer {layer}: expert {expert} is new on rank {rank}, which is cordoned"
    return ""


def _with(found: FittingCordons, rank: int, cordon: Cordon) -> FittingCordons:
    if cordon is Cordon.CORDON:
        return replace(found, cordoned=(*found.cordoned, rank))
    drained = found.topology.drained | (np.arange(found.topology.num_ranks) == rank)
    return replace(found, topology=replace(found.topology, drained=drained))


def _why_no_cordon(found: FittingCordons, rank: int, current: Placement, num_groups: int) -> str:
    topology = found.topology
    if rank >= topology.num_ranks:
        return f"expected ranks 0..{topology.num_ranks - 1}"
    if not topology.alive[rank]:
        return "the rank is not alive"
    if num_groups > 1 and found.cordoned:
        layers = enumerate(current.slot_to_expert)
        for layer, held in layers:
            if nodes_of_groups(held, topology, num_groups, current.num_experts) is None:
                return f"layer {layer}: an expert group is on several nodes, expected it on one"
    elsewhere = found.elsewhere(current)
    layer = int(elsewhere.argmax())
    is_free = topology.serving.copy()
    is_free[list(found.cordoned)] = False
    free = int(topology.slots_of_rank[is_free].sum())
    return slot_shortage(np.flatnonzero(is_free).tolist(), free, int(elsewhere[layer]))


def _experts_on(
    ranks: Collection[int], placement: Placement, topology: Topology
) -> dict[tuple[int, int], tuple[int, ...]]:
    """The given ranks that hold each expert, by (layer, expert)."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for rank in sorted(ranks):
        held = placement.slot_to_expert[:, topology.slots_on(rank)]
        for layer, slot in np.argwhere(held != EMPTY).tolist():
            which = layer, int(held[layer, slot])
            found[which] = (*found.get(which, ()), rank)
    return found


Pins = Mapping[Which, Collection[int]]


@dataclass(frozen=True, eq=False)
class FittingPins:
    """Pins that can be met together, and a sentence for each that cannot."""

    pinned: Mapping[Which, tuple[int, ...]]  # ranks, by (layer, expert)
    left: NDArray[np.int64]  # [L, R] slots that may be used, less those of the pins
    unmet: tuple[str, ...] = ()


def fitting_pins(
    pins: Pins,
    room: NDArray[np.int64],
    topology: Topology,
    num_experts: int,
    num_groups: int = 1,
    kept: Mapping[tuple[int, int], tuple[int, ...]] = MappingProxyType({}),
    layer_ids: Sequence[int] = (),
) -> FittingPins:
    """Take pins one by one, by expert, layer and rank, as far as they fit.

    Args:
        pins: ranks that must hold an expert, of a layer or of every layer.
        room: [L, R] slots that may be used.
        topology: which ranks there are.
        num_experts: E.
        num_groups: the model's expert groups.
        kept: ranks that keep an expert, by (layer, expert): these are taken first.
        layer_ids: [L] numbers by which ``pins`` and what is unmet name layers; empty: 0, 1, 2, ...
    """
    pinned, unmet = dict[Which, tuple[int, ...]](), list[str]()
    numbers, left = tuple(layer_ids) or tuple(range(len(room))), room.copy()
    free = room.sum(axis=1) - num_experts  # beyond one for each expert
    for (layer, expert), those in kept.items():
        pinned[layer, expert] = those
        free[layer] -= len(those) - 1
        left[layer, list(those)] -= 1
    if pins and keeps_groups(topology, num_groups, num_experts, room):
        why = (
            f"all pins: {num_groups} expert groups stay each on one of {topology.num_nodes} nodes, "
            "and the planner chooses the node of a group by load alone; expected no such groups"
        )
        return FittingPins(pinned, left, (why,))
    for which, ranks in pins.items():
        named, expert = (numbers, which) if isinstance(which, int) else ((which[0],), which[1])
        for number in named:
            if not (number in numbers and expert < num_experts):
                unmet.append(
                    f"layer {number} expert {expert}: expected layers {spans(numbers)} and "
                    f"experts 0..{num_experts - 1}"
                )
                continue
            layer = numbers.index(number)
            held = pinned.get((layer, expert), ())
            for rank in sorted(set(ranks) - set(held)):
                why = _why_no_pin(layer, rank, left, topology)
                if not why and held and free[layer] < 1:
                    why = "every slot that may be used is needed by an expert without another"
                if why:
                    unmet.append(f"layer {number} expert {expert} on rank {rank}: {why}")
                    continue
                free[layer] -= bool(held)  # the first replica is the one that it needs anyhow
                left[layer, rank] -= 1
                held = pinned[layer, expert] = (*held, rank)
    return FittingPins(pinned, left, tuple(unmet))


def _why_no_pin(layer: int, rank: int, left: NDArray[np.int64], topology: Topology) -> str:
    if rank >= topology.num_ranks:
        return f"expected ranks 0..{topology.num_ranks - 1}"
    if not topology.alive[rank]:
        return "the rank is not alive"
    if topology.drained[rank]:
        return "the rank is drained"
    if left[layer, rank] < 1:
        return "pins or a cordon take every slot there that may be used"
    return ""


@dataclass(frozen=True, eq=False)
class Coverage:
    """Constraints that fit into the slots, and what they leave out."""

    constraints: Constraints
    uncovered: tuple[tuple[int, int], ...] = ()  # (layer, expert), costliest first in each layer
    releases_groups: bool = False  # whether expert groups would stay on nodes without it
    unmet_pins: tuple[str, ...] = ()  # see ``FittingPins``
    unmet_cordons: tuple[str, ...] = ()  # see ``FittingCordons``


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
