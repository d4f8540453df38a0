"""The placement that survivors of a death serve: what they hold, and what they have to load first.

    slots of dead ranks              EMPTY
    an expert with live replicas     keeps them; the dead ones' share goes to them in proportion
    an expert without any            takes the slot of a replica that is one of several, else an
                                     EMPTY one, and is loaded before a token is routed to it
    then                             the load, where it is known, sets all shares

Survivors with too few slots for spares refill into spares too. Once other ranks have joined, plans
start from what ``relieved`` gives, so that the full ranks get their spares back.

A pure function of its arguments, so that survivors who agree on these need not agree on the result.
The next plan, which may move more, follows by the usual path.

Shapes:  L layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.load import LoadHistory
from eplb.core.placement import EMPTY, Placement, by_expert, whole_shares
from eplb.core.topology import Topology
from eplb.errors import PlacementError
from eplb.shares.resplitting import resplit


class Refill(NamedTuple):
    """An expert that no survivor holds, and the slot of a survivor that it is loaded into."""

    layer: int
    slot: int
    expert: int


@dataclass(frozen=True)
class Survival:
    """What survivors serve, once the refills are loaded."""

    topology: Topology  # with the dead ranks as such
    target: Placement  # of the next generation
    refills: tuple[Refill, ...]

    def refills_of(self, rank: int) -> list[Refill]:
        """The refills of one rank's slots."""
        on_rank = self.topology.slots_on(rank)
        return [one for one in self.refills if on_rank.start <= one.slot < on_rank.stop]


def survive(
    placement: Placement,
    topology: Topology,
    dead: ArrayLike,
    load: LoadHistory | ArrayLike | None = None,
    *,
    joined: Sequence[int] = (),
) -> Survival:
    """Find what the ranks that are left serve.

    Args:
        placement: serves, and every survivor holds its slots of it.
        topology: of the ranks before, some of which may be dead already.
        dead: ranks that died since, or left as planned.
        load: as ``resplit`` takes it; None: shares follow from the placement's own.
        joined: ranks that serve from now on, and hold nothing yet.

    Raises:
        PlacementError: the survivors have fewer slots than experts, or none is left.
    """
    alive = topology.alive.copy()
    alive[np.asarray(dead, dtype=np.intp)] = False
    if not alive.any():
        raise PlacementError(f"no rank of {topology.num_ranks} is left, expected at least one")
    left = replace(topology, alive=alive)
    is_live = alive[topology.rank_of_slot]
    held = np.where(is_live, placement.slot_to_expert, EMPTY)
    target, refills = _completed(held, placement, left)
    alive[list(joined)] = True
    left = replace(topology, alive=alive)
    target = target.with_generation(placement.generation + 1)
    if load is not None:
        target = resplit(load, target, left)
    return Survival(left, target, tuple(refills))


def relieved(placement: Placement, topology: Topology, spare_slots: int) -> Placement:
    """The placement with its spares, where ranks have room: the base of a plan, not what serves.

    The last experts of a rank without its spares leave it. One that no other rank holds takes the
    slot of a replica that is one of several, else an EMPTY one of the rank with the most of them.

    Args:
        placement: serves, in the slots of ``topology``.
        topology: of the ranks that serve.
        spare_slots: slots of each rank and layer that should be EMPTY.

    Raises:
        PlacementError: the live ranks have fewer slots than experts.
    """
    held = placement.slot_to_expert.copy()
    for rank in np.flatnonzero(topology.slots_of_rank).tolist():
        slots = topology.slots_on(rank)
        of_rank = held[:, slots]
        in_use = of_rank != EMPTY
        room = in_use.shape[1] - spare_slots
        of_rank[in_use & (np.cumsum(in_use, axis=1) > room)] = EMPTY
        held[:, slots] = of_rank
    if (held == placement.slot_to_expert).all():
        return placement
    return _completed(held, placement, topology)[0]


def _completed(
    held: NDArray[np.int32], before: Placement, topology: Topology
) -> tuple[Placement, list[Refill]]:
    """The placement in which experts without a slot have one, and these; changes ``held``."""
    count = by_expert(held, before.num_experts, None)  # [L, E]
    refills: list[Refill] = []
    taken = np.zeros(topology.num_ranks, dtype=np.int64)  # refills of each rank
    for layer in np.flatnonzero((count == 0).any(axis=1)):
        refills += _refill(int(layer), held[layer], count[layer], topology, taken)
    kept = np.where(held == before.slot_to_expert, before.slot_share, 0.0)
    share, _ = whole_shares(held, kept, before.num_experts)
    return Placement(held, before.num_experts, before.generation, share.clip(0.0, 1.0)), refills


def _refill(
    layer: int,
    held: NDArray[np.int32],
    count: NDArray[np.intp],
    topology: Topology,
    taken: NDArray[np.int64],
) -> list[Refill]:
    """Give each expert of a layer that has no slot one; changes what it is given.

    The slot is that of the expert with the most replicas, on the rank with the fewest refills, so
    that ranks load alike. An EMPTY slot is taken last, of the rank with the most of them: it may be
    a spare, and moves need those.
    """
    refills = []
    rank_of_slot = topology.rank_of_slot
    is_live = topology.alive[rank_of_slot]
    for expert in np.flatnonzero(count == 0):
        replicas = np.where(held == EMPTY, 1, count[held])  # [S] of the expert in each slot
        usable = is_live & ((held == EMPTY) | (replicas > 1))
        if not usable.any():
            raise PlacementError(
                f"layer {layer}: expert {expert} has no slot on a live rank, and no other expert "
                f"has a second one; {int(is_live.sum())} slots are left for {len(count)} experts"
            )
        is_empty = held == EMPTY
        room = np.bincount(rank_of_slot, is_empty, topology.num_ranks)[rank_of_slot]
        order = np.lexsort((taken[rank_of_slot], -room * is_empty, -replicas, ~usable))
        slot = int(order[0])
        if held[slot] != EMPTY:
            count[held[slot]] -= 1
        held[slot], count[expert] = expert, 1
        taken[rank_of_slot[slot]] += 1
        refills.append(Refill(layer, slot, int(expert)))
    return refills
