"""The placement that survivors of a death serve: what they hold, and what they have to load first.

    slots of dead ranks              EMPTY
    an expert with live replicas     keeps them; the dead ones' share goes to them in proportion
    an expert without any            takes the slot of a replica that is one of several, and is
                                     loaded before a token is routed to it
    then                             the load, where it is known, sets all shares

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
from eplb.core.placement import EMPTY, Placement, by_expert
from eplb.core.topology import Topology
from eplb.errors import PlacementError
from eplb.measure import whole_shares
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
    count = by_expert(held, placement.num_experts, None)  # [L, E]
    refills: list[Refill] = []
    taken = np.zeros(topology.num_ranks, dtype=np.int64)  # refills of each rank
    for layer in np.flatnonzero((count == 0).any(axis=1)):
        refills += _refill(int(layer), held[layer], count[layer], left, is_live, taken)
    kept = np.where(held == placement.slot_to_expert, placement.slot_share, 0.0)
    share, _ = whole_shares(held, kept, placement.num_experts)
    alive[list(joined)] = True
    left = replace(topology, alive=alive)
    target = Placement(held, placement.num_experts, placement.generation + 1, share.clip(0.0, 1.0))
    if load is not None:
        target = resplit(load, target, left)
    return Survival(left, target, tuple(refills))


def _refill(
    layer: int,
    held: NDArray[np.int32],
    count: NDArray[np.intp],
    topology: Topology,
    is_live: NDArray[np.bool_],
    taken: NDArray[np.int64],
) -> list[Refill]:
    """Give each expert of a layer that has no slot one; changes what it is given.

    The slot is that of the expert with the most replicas, on the rank with the fewest refills, so
    that ranks load alike. An EMPTY slot is taken last: it may be a spare, and moves need those.
    """
    refills = []
    for expert in np.flatnonzero(count == 0):
        replicas = np.where(held == EMPTY, 1, count[held])  # [S] of the expert in each slot
        usable = is_live & ((held == EMPTY) | (replicas > 1))
        if not usable.any():
            raise PlacementError(
                f"layer {layer}: expert {expert} has no slot on a live rank, and no other expert "
                f"has a second one; {int(is_live.sum())} slots are left for {len(count)} experts"
            )
        order = np.lexsort((taken[topology.rank_of_slot], -replicas, ~usable))
        slot = int(order[0])
        if held[slot] != EMPTY:
            count[held[slot]] -= 1
        held[slot], count[expert] = expert, 1
        taken[topology.rank_of_slot[slot]] += 1
        refills.append(Refill(layer, slot, int(expert)))
    return refills
