"""A placement taken over by other ranks: more of them, fewer, or with other numbers of slots.

    a rank that stays         keeps its experts in their slots, as far as it has slots
    an expert without a slot  goes to the rank with the most room
    free slots                get the replicas that are missing, then experts with the fewest

The load is not known here: the next plan balances it.

Shapes:  L layers, E experts, S slots, R ranks, C slots of a rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import slot_shortage
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import PlacementError
from eplb.migration.spares import without_spares

Row = NDArray[np.int32]  # [C] experts in the slots of a rank, in one layer; a view


def taken_over(
    placement: Placement, before: Topology, after: Topology, spare_slots: int
) -> tuple[Placement, int]:
    """Take a placement over to other ranks; its generation is the next one.

    Args:
        placement: in the slots of ``before``.
        before: its ranks.
        after: the ranks that take it over; a rank stays if both have its number.
        spare_slots: slots of each rank and layer that stay EMPTY.

    Returns:
        The placement in the slots of ``after``, and how many replicas stay on their rank.

    Raises:
        PlacementError: there are fewer slots than experts.
        TopologyError: a rank has fewer slots than spares.
    """
    room = without_spares(after, spare_slots).slots_of_rank  # [R]
    ranks = range(after.num_ranks)
    if why := slot_shortage(ranks, int(room.sum()), placement.num_experts, spare_slots):
        raise PlacementError(why)
    held = np.full((placement.num_layers, after.num_slots), EMPTY, dtype=np.int32)
    num_kept = 0
    for old, new in zip(placement.slot_to_expert, held, strict=True):
        rows = [new[after.slots_on(rank)] for rank in range(after.num_ranks)]
        stay = [old[before.slots_on(rank)] for rank in range(before.num_ranks)][: len(rows)]
        wanted = np.bincount(old[old != EMPTY], minlength=placement.num_experts)  # [E]
        _keep(stay, rows, room, len(wanted))
        _fill(rows, room, wanted)
        pairs = zip(stay, rows, strict=False)
        num_kept += sum(len(set(then[then != EMPTY]) & set(now)) for then, now in pairs)
    return Placement(held, placement.num_experts, placement.generation + 1), num_kept


def _keep(stay: list[Row], rows: list[Row], room: NDArray[np.int32], num_experts: int) -> None:
    """Keep what ranks hold, in the same slots where there are such.

    A rank with too few slots gives up the experts that most other ranks hold.
    """
    kept = [{int(one): slot for slot, one in enumerate(row) if one != EMPTY} for row in stay]
    count = np.bincount([one for slots in kept for one in slots], minlength=num_experts)
    for rank, slots in enumerate(kept):
        for expert in sorted(slots, key=lambda one: -count[one])[: max(0, len(slots) - room[rank])]:
            count[expert] -= 1
            del slots[expert]
        moved = [one for one, slot in slots.items() if slot >= len(rows[rank])]
        for expert in slots.keys() - moved:
            rows[rank][slots[expert]] = expert
        for expert in moved:
            _put(rows[rank], expert)


def _fill(rows: list[Row], room: NDArray[np.int32], wanted: NDArray[np.int64]) -> None:
    """Give each expert a slot, and further replicas of those that had more the slots that are free.

    An expert that is not kept anywhere takes the slot of a second replica if no slot is free.
    """
    count = np.zeros_like(wanted)
    for row in rows:
        count[row[row != EMPTY]] += 1
    free = room - [int((row != EMPTY).sum()) for row in rows]
    for expert in np.flatnonzero(count == 0):
        if free.max() > 0:
            rank = int(free.argmax())
            free[rank] -= 1
            _put(rows[rank], int(expert))
        else:
            most = int(count.argmax())
            count[most] -= 1
            row = next(row for row in rows if most in row)
            row[row == most] = expert
        count[expert] = 1
    while free.max() > 0:
        rank = int(free.argmax())
        order = np.lexsort((count, count - wanted))
        other = order[~np.isin(order, rows[rank])]
        if not other.size:  # it holds every expert
            free[rank] = 0
            continue
        free[rank] -= 1
        count[other[0]] += 1
        _put(rows[rank], int(other[0]))


def _put(row: Row, expert: int) -> None:
    row[np.flatnonzero(row == EMPTY)[0]] = expert
