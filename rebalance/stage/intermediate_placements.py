"""The serving placement after each transaction, computed off the step path.

Shapes:  L MoE layers, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement
from eplb.errors import MigrationError
from eplb.migration.build import Migration, Move
from runtime.routing import RoutingTable, TableLayers


@dataclass(frozen=True)
class Serving:
    """Placement and table once a transaction is applied."""

    placement: Placement
    table: TableLayers


def serving_after_each(migration: Migration, table: RoutingTable) -> Iterator[Serving]:
    """Return the placement and table after each transaction; tables are prepared ahead.

    Raises:
        PlacementError: the table has no room for a placement.
    """
    for number, transaction in enumerate(migration.transactions):
        placement = migration.placement_after(number + 1)
        yield Serving(placement, table.prepare(placement, transaction.layers))


def check_places(
    migration: Migration, serving: Sequence[Serving], number: int, moves: Sequence[Move], room: int
) -> None:
    """Reject a transaction whose bytes have no destination on this rank.

    Args:
        migration: what the transaction is of.
        serving: what serves after each of its transactions.
        number: which one, from 0 on.
        moves: those of it that end on this rank.
        room: this rank's staging entries.

    Raises:
        MigrationError: it needs more staging entries than there are; or it flips into a slot that
            may still serve.
    """
    where = f"plan {migration.plan_id} transaction {number}"
    if migration.pace.mode == "copy":
        if len(moves) > room:
            raise MigrationError(
                f"{where} brings {len(moves)} experts here, expected at most {room}, "
                "the staging entries of this rank"
            )
        return
    for applied in range(migration.transactions[number].reads_after, number + 1):
        held = _held_after(migration, serving, applied)
        for move in moves:
            found = int(held[move.layer, move.dst_slot])
            if found != EMPTY:
                raise MigrationError(
                    f"{where} writes layer {move.layer} slot {move.dst_slot} once {applied} "
                    f"transactions are applied, found expert {found} there, expected it EMPTY"
                )


def _held_after(
    migration: Migration, serving: Sequence[Serving], num_transactions: int
) -> NDArray[np.int32]:
    """[L, S] experts in the slots once so many transactions are applied."""
    last = serving[num_transactions - 1].placement if num_transactions else migration.base
    return last.slot_to_expert


def readable(migration: Migration, serving: Sequence[Serving], number: int) -> NDArray[np.int32]:
    """[L, S] experts in the slots that transaction ``number`` may read, EMPTY in all others.

    A slot may be read if it was filled before the transaction may be staged, and if no earlier
    transaction frees it: another rank may be writing what was freed.
    """
    filled = _held_after(migration, serving, migration.transactions[number].reads_after)
    return np.where(filled == _held_after(migration, serving, number), filled, EMPTY)
