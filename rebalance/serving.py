"""What serves after each transaction of a migration, worked out off the step path.

Shapes:  L MoE layers, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.migration import Migration
from eplb.placement import EMPTY, Placement
from runtime.routing import RoutingTable, TableLayers


@dataclass(frozen=True)
class Serving:
    """What serves once a transaction is applied."""

    placement: Placement
    table: TableLayers


def serving_after_each(migration: Migration, table: RoutingTable) -> Iterator[Serving]:
    """Give what serves after each transaction; the table's new entries lie ready beside it.

    Raises:
        PlacementError: the table has no room for a placement.
    """
    for number, transaction in enumerate(migration.transactions):
        placement = migration.placement_after(number + 1)
        yield Serving(placement, table.prepare(placement, transaction.layers))


def readable(migration: Migration, serving: Sequence[Serving], number: int) -> NDArray[np.int32]:
    """[L, S] experts in the slots that transaction ``number`` may read, EMPTY in all others.

    A slot may be read if it was filled before the transaction may be staged, and if no earlier
    transaction frees it: another rank may be writing what was freed.
    """

    def held_after(num_transactions: int) -> NDArray[np.int32]:
        last = serving[num_transactions - 1].placement if num_transactions else migration.base
        return last.slot_to_expert

    filled = held_after(migration.transactions[number].reads_after)
    return np.where(filled == held_after(number), filled, EMPTY)
