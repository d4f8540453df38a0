"""Ranks that an operator has take no further experts, or hold none, and whether the others can.

    cordon   the rank keeps what it holds, and takes nothing new
    drain    the rank holds nothing: its slots are EMPTY, and no expert is lost with it

A cordon that cannot be met, because another rank died for example, must not end all planning: it is
left out, with a sentence.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.packing.zones import keeps_groups, nodes_of_groups


class Cordon(StrEnum):
    """What a rank is kept from."""

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
        why = _why_not(found, rank, current, num_groups if stays else 1)
        if why:
            unmet.append(f"rank {rank} ({cordons[rank]}): {why}")
        else:
            taken = found
    kept = _experts_on(taken.cordoned, current, topology)
    releases = stays and not keeps_groups(taken.topology, num_groups, current.num_experts)
    return replace(taken, kept=kept, releases_groups=releases, unmet=tuple(unmet))


def slots_in_use(placement: Placement, topology: Topology) -> NDArray[np.int64]:
    """[L, R] slots of each rank that hold an expert."""
    used = np.zeros((placement.num_layers, topology.num_ranks), dtype=np.int64)
    layers, slots = np.nonzero(placement.slot_to_expert != EMPTY)
    np.add.at(used, (layers, topology.rank_of_slot[slots]), 1)
    return used


def sole_experts(placement: Placement, topology: Topology) -> NDArray[np.int64]:
    """[R] experts of all layers that no other rank holds: what the loss of a rank costs."""
    count = placement.replica_count  # [L, E]; a rank holds an expert once
    layers, slots = np.nonzero(placement.slot_to_expert != EMPTY)
    is_sole = count[layers, placement.slot_to_expert[layers, slots]] == 1
    of_rank: NDArray[np.int64] = np.bincount(
        topology.rank_of_slot[slots[is_sole]], minlength=topology.num_ranks
    ).astype(np.int64)
    return of_rank


def uncovered_experts(
    placement: Placement, topology: Topology, is_left: NDArray[np.bool_]
) -> list[tuple[int, int]]:
    """(layer, expert) of those that none of the ranks ``is_left`` [R] holds, in order."""
    held = placement.expert_to_slots  # [L, E, at most so many replicas]
    has_one = ((held != EMPTY) & is_left[topology.rank_of_slot[held]]).any(axis=2)
    return [(int(layer), int(expert)) for layer, expert in np.argwhere(~has_one)]


def undrained(placement: Placement, topology: Topology) -> tuple[int, ...]:
    """Ranks that are to hold nothing, and do."""
    held = slots_in_use(placement, topology).any(axis=0)
    return tuple(np.flatnonzero(held & topology.drained).tolist())


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


def _why_not(found: FittingCordons, rank: int, current: Placement, num_groups: int) -> str:
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
    if free >= elsewhere[layer]:
        return ""
    return (
        f"the {is_free.sum()} ranks that may take experts have {free} slots in a layer for the "
        f"{elsewhere[layer]} experts that must be on one of them, expected at least one for each"
    )


def _experts_on(
    ranks: Collection[int], placement: Placement, topology: Topology
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Those of the ranks that hold an expert, by (layer, expert)."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for rank in sorted(ranks):
        held = placement.slot_to_expert[:, topology.slots_on(rank)]
        for layer, slot in np.argwhere(held != EMPTY).tolist():
            which = layer, int(held[layer, slot])
            found[which] = (*found.get(which, ()), rank)
    return found
