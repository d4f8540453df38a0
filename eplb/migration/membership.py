"""Which ranks should serve: the choice for a number of them, and what a change waits for.

    members    serve now: the live ranks of the topology
    wanted     should serve
    leavers    members that are not wanted: their experts are drained, then they leave together
    joiners    wanted ranks that are no members: each starts, proves itself, and is admitted

The topology names the most ranks that there may be, so a change of members changes no shape.

Shapes:  L layers, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import named_ranks, spans
from eplb.core.placement import Placement, holders, slots_in_use
from eplb.core.topology import Topology
from eplb.core.zones import keeps_groups
from eplb.errors import PlacementError, TopologyError

# What a change of members waits for; settled: the members are the wanted ranks.
Phase = Literal["settled", "draining", "waiting", "joining", "leaving"]


def wanted_for(
    count: int,
    wanted: Collection[int],
    placement: Placement,
    topology: Topology,
    num_groups: int = 1,
    spare_slots: int = 0,
) -> tuple[int, ...]:
    """Choose the ranks that should serve, so many.

    Ranks are added and retired one by one. A rank is added where failure domain, then host, then
    node have the fewest. Retired are: ranks that do not serve; then those of the fullest failure
    domain, host and node; then the one with the fewest experts that no other rank would hold. No
    rank is retired without which expert groups have to leave their nodes, if another one can be.
    Ranks without slots, which have tokens alone, stay as they are.

    Args:
        count: how many ranks with slots.
        wanted: ranks that should serve until now.
        placement: serves, in the slots of ``topology``.
        topology: all ranks; the live ones are members.
        num_groups: the model's expert groups.
        spare_slots: slots of each rank and layer that stay EMPTY.

    Raises:
        TopologyError: there are not so many ranks.
        PlacementError: so few ranks have too few slots.
    """
    able = np.flatnonzero(topology.slots_of_rank).tolist()
    if not 1 <= count <= len(able):
        raise TopologyError(
            f"{count} ranks are to serve, expected 1..{len(able)}: so many have slots"
        )
    chosen = set(wanted) & set(able)
    while len(chosen) < count:
        others = [rank for rank in able if rank not in chosen]
        chosen.add(min(others, key=lambda rank: (*_crowd(rank, chosen, topology), rank)))
    room = np.maximum(topology.slots_of_rank.astype(np.int64) - spare_slots, 0)
    holds = holders(placement, topology) & topology.alive[:, None]
    while len(chosen) > count:
        fit = _dispensable(chosen, len(chosen) - count, room, placement.num_experts)
        if not fit:
            raise PlacementError(
                f"no {count} of the ranks {spans(sorted(chosen))} have a slot for each of "
                f"{placement.num_experts} experts, with {spare_slots} spare slots on each"
            )
        costs = _costs_of_retiring(fit, chosen, holds, topology, num_groups)
        chosen.remove(min(costs, key=costs.__getitem__))
    return tuple(sorted(chosen | (set(wanted) - set(able))))


def _crowd(rank: int, chosen: Collection[int], topology: Topology) -> tuple[int, int, int]:
    """Chosen ranks in the failure domain of a rank, on its host, and on its node."""
    places = topology.failure_domain, topology.host_of_rank, topology.node_of_rank
    those = list(chosen)
    domain, host, node = (int((place[those] == place[rank]).sum()) for place in places)
    return domain, host, node


def _dispensable(
    chosen: set[int], num_retired: int, room: NDArray[np.int64], num_experts: int
) -> list[int]:
    """Ranks without which the largest of the others, once all are retired, have slots enough."""
    fit = []
    for rank in sorted(chosen):
        others = np.sort(room[sorted(chosen - {rank})])
        if int(others[num_retired - 1 :].sum()) >= num_experts:
            fit.append(rank)
    return fit


def _costs_of_retiring(
    ranks: Collection[int],
    chosen: set[int],
    holds: NDArray[np.bool_],
    topology: Topology,
    num_groups: int,
) -> dict[int, tuple[int, ...]]:
    """What speaks against retiring each rank, the weightiest first."""
    replicas = holds[:, sorted(chosen)].sum(axis=1)
    num_experts = holds.shape[2]

    def keeps(those: Collection[int]) -> bool:
        alive = np.isin(np.arange(topology.num_ranks), sorted(those))
        return keeps_groups(replace(topology, alive=alive), num_groups, num_experts)

    stays = len(chosen) > 1 and keeps(chosen)
    costs = {}
    for rank in ranks:
        sole = int((holds[:, rank] & (replicas == 1)).sum())
        even = (-crowd for crowd in _crowd(rank, chosen, topology))
        breaks = stays and not keeps(chosen - {rank})
        costs[rank] = (int(breaks), int(topology.alive[rank]), *even, sole, -rank)
    return costs


def shortage(
    wanted: Collection[int], num_experts: int, topology: Topology, spare_slots: int = 0
) -> str:
    """Why so few ranks cannot hold every expert; "": they can."""
    room = int(np.maximum(topology.slots_of_rank[sorted(wanted)] - spare_slots, 0).sum())
    if room >= num_experts:
        return ""
    return (
        f"{len(wanted)} ranks have {room} slots in a layer, without {spare_slots} spares on each, "
        f"for {num_experts} experts, expected at least one for each"
    )


def leavers(wanted: Collection[int] | None, topology: Topology) -> tuple[int, ...]:
    """Members that should not serve any more.

    Args:
        wanted: ranks that should serve; None: all.
        topology: all ranks; the live ones are members.
    """
    if wanted is None:
        return ()
    return tuple(sorted(set(np.flatnonzero(topology.alive).tolist()) - set(wanted)))


def unwanted(
    wanted: Collection[int], members: Collection[int], following: Collection[int]
) -> tuple[int, ...]:
    """Ranks that join, or leave, between two groups although they should not."""
    joins, leaves = {*following} - {*members}, {*members} - {*following}
    return tuple(sorted((joins - {*wanted}) | (leaves & {*wanted})))


def phase_of(
    wanted: Collection[int],
    placement: Placement | None,
    topology: Topology,
    ready: Collection[int] = (),
) -> tuple[Phase, str]:
    """What the change from members to wanted ranks waits for, and a sentence about it.

    Args:
        wanted: ranks that should serve.
        placement: serves; None: none was committed yet.
        topology: all ranks; the live ones are members.
        ready: ranks that have proved themselves and wait to be admitted.
    """
    leaving = leavers(wanted, topology)
    joiners = sorted(set(wanted) - set(np.flatnonzero(topology.alive).tolist()))
    held = np.zeros(topology.num_ranks, dtype=np.int64)
    if placement is not None and leaving:
        held = slots_in_use(placement, topology).sum(axis=0)
    full = [rank for rank in leaving if held[rank]]
    absent = [rank for rank in joiners if rank not in ready]
    if full:
        left = int(held[full].sum())
        return "draining", f"{left} slots of all layers hold experts on {named_ranks(full)}"
    if absent:
        return "waiting", f"not ready to be admitted: {named_ranks(absent)}"
    if joiners:
        return "joining", f"ready to be admitted: {named_ranks(joiners)}"
    if leaving:
        return "leaving", f"without experts, they leave the group next: {named_ranks(leaving)}"
    return "settled", ""
