"""One rank's share of a migration: its moves, what they may read, and what serves afterwards.

Shapes:  L MoE layers, S slots, C slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import MigrationError
from eplb.migration.build import Migration, Move
from runtime.experts import ExpertBank
from runtime.routing import RoutingTable, TableLayers


@dataclass(frozen=True)
class RankSlots:
    """One rank's slots, and what they must hold."""

    rank: int
    topology: Topology
    bank: ExpertBank
    table: RoutingTable
    digests: torch.Tensor  # [L, E, 2] of every expert, agreed by all ranks at the start

    @property
    def first_slot(self) -> int:
        """The first of this rank's slots among those of all ranks."""
        return int(self.topology.first_slot[self.rank])

    def held(self, placement: Placement) -> NDArray[np.int32]:
        """[L, C] experts in this rank's slots by a placement, EMPTY in some."""
        return placement.slot_to_expert[:, self.topology.slots_on(self.rank)]


class Share:
    """One rank's share of a migration, computed once and read by the mover, the swap and reports.

    A transaction is named by its number, from 0 on.
    """

    def __init__(self, migration: Migration, slots: RankSlots) -> None:
        self.migration, self._slots = migration, slots
        # What serves after each transaction, once it is prepared.
        self.serving: list[tuple[Placement, TableLayers]] = []

    @cached_property
    def moves(self) -> list[list[Move]]:
        """The moves of each transaction that end in this rank's slots, in round order."""
        rank_of_slot, rank = self._slots.topology.rank_of_slot.tolist(), self._slots.rank
        return [
            [move for move in transaction.moves if rank_of_slot[move.dst_slot] == rank]
            for transaction in self.migration.transactions
        ]

    def prepare(self, num_staging: int) -> None:
        """Compute what serves after each transaction; off the step path, because it takes long.

        Args:
            num_staging: this rank's staging entries.

        Raises:
            PlacementError: the table has no room for a placement.
            MigrationError: this rank can never stage the migration. It has no transactions; or one
                needs more staging entries than there are; or one flips into a slot that may still
                serve.
        """
        migration = self.migration
        for number, transaction in enumerate(migration.transactions):
            placement = migration.placement_after(number + 1)
            table = self._slots.table.prepare(placement, transaction.layers)
            self.serving.append((placement, table))
        if not migration.transactions:
            raise MigrationError(f"plan {migration.plan_id} has no transactions, expected one")
        for number, moves in enumerate(self.moves):
            where = f"plan {migration.plan_id} transaction {number}"
            if migration.pace.mode == "flip":
                self._check_flip(where, number, moves)
            elif len(moves) > num_staging:
                raise MigrationError(
                    f"{where} brings {len(moves)} experts here, expected at most {num_staging}, "
                    "the staging entries of this rank"
                )

    def _check_flip(self, where: str, number: int, moves: list[Move]) -> None:
        for applied in range(self.migration.transactions[number].reads_after, number + 1):
            held = self._held_after(applied)
            for move in moves:
                found = int(held[move.layer, move.dst_slot])
                if found != EMPTY:
                    raise MigrationError(
                        f"{where} writes layer {move.layer} slot {move.dst_slot} once {applied} "
                        f"transactions are applied, found expert {found} there, expected it EMPTY"
                    )

    def _held_after(self, num_transactions: int) -> NDArray[np.int32]:
        """[L, S] experts in the slots once so many transactions are applied."""
        if not num_transactions:
            return self.migration.base.slot_to_expert
        return self.serving[num_transactions - 1][0].slot_to_expert

    def readable(self, number: int) -> NDArray[np.int32]:
        """[L, S] experts in the slots that a transaction may read, EMPTY in all others.

        A slot may be read if it was filled before the transaction may be staged, and if no earlier
        transaction frees it: another rank may be writing what was freed.
        """
        filled = self._held_after(self.migration.transactions[number].reads_after)
        return np.where(filled == self._held_after(number), filled, EMPTY)
