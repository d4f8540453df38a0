"""Migrations from one placement to the next: moves, their order, and the layers that swap together.

Everything that ranks must agree on is frozen in a Migration: the layers of each transaction, their
order, the rounds, and the pace. If ranks could change any of it during the migration, they would
swap different layers at the same step and mix two placements.

    Migration -> transactions (layers that swap together) -> rounds (no rank sends twice)

Shapes:  L MoE layers, S slots, R ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement, check_fits
from eplb.core.topology import Topology
from eplb.errors import MigrationError
from eplb.migration.spares import compact, expand, intermediate_placement, steps_towards
from eplb.migration.transactions import (
    Mode,
    Move,
    Pace,
    Source,
    Transaction,
    copy_transactions,
    flip_transactions,
    moves_between,
)

__all__ = [
    "Migration",
    "Mode",
    "Move",
    "Pace",
    "Source",
    "Transaction",
    "build_migration",
    "moves_between",
]


@dataclass(frozen=True, eq=False)
class Migration:
    """A published sequence of transactions from ``base`` to ``target``.

    In copy mode no layer is in two transactions: a slot that one transaction reads is never written
    by an earlier one of the same migration. In flip mode a layer may be in several, and
    ``Transaction.reads_after`` is the number of transactions that each waits for.
    """

    plan_id: int  # only grows; two migrations with one id are distinguished by their hash
    base: Placement
    target: Placement
    transactions: tuple[Transaction, ...]
    pace: Pace
    weights_version: int = 0  # ranks with weights of another version reject it

    def __post_init__(self) -> None:
        held = self._held_after(self.transactions)
        target = self.target.slot_to_expert
        if self.pace.mode == "copy":
            held[target == EMPTY] = EMPTY  # a swap applies a whole layer of the target
        wrong = np.argwhere(held != target)
        if wrong.size:
            layer, slot = wrong[0]
            raise MigrationError(
                f"plan {self.plan_id}: its moves bring expert {held[layer, slot]} to layer {layer} "
                f"slot {slot}, expected expert {target[layer, slot]} as in its target"
            )

    def _held_after(self, transactions: tuple[Transaction, ...]) -> NDArray[np.int32]:
        """[L, S] experts by slot after these transactions, from the base on."""
        held = self.base.slot_to_expert.copy()
        for transaction in transactions:
            for layer, slot in transaction.frees:
                held[layer, slot] = EMPTY
            for move in transaction.moves:
                held[move.layer, move.dst_slot] = move.expert
        return held

    @cached_property
    def hash(self) -> str:
        """Hex digest of all that ranks must agree on."""
        digest = hashlib.blake2b(digest_size=16)
        scalars = (self.plan_id, self.base.generation, self.pace, self.weights_version)
        digest.update(repr(scalars).encode())
        digest.update(self.base.hash.encode())
        digest.update(self.target.hash.encode())
        digest.update(repr(self.transactions).encode())
        return digest.hexdigest()

    @property
    def vote_hash(self) -> int:
        """The hash as a positive 62-bit integer, the form in which ranks vote on it."""
        return int(self.hash[:16], 16) >> 2

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves in the order in which they are made."""
        return tuple(move for txn in self.transactions for move in txn.moves)

    def placement_after(self, num_transactions: int) -> Placement:
        """The placement after the first ``num_transactions`` have been applied."""
        applied = self.transactions[:num_transactions]
        touched = {layer for txn in applied for layer in txn.layers}
        if self.pace.mode == "copy":
            return self.base.with_layers(self.target, touched)
        held = self._held_after(applied)
        is_done = (held == self.target.slot_to_expert).all(axis=1)
        done = {layer for layer in touched if is_done[layer]}
        placement = self.base.with_layers(self.target, done)
        if done == touched:
            return placement
        return placement.with_layers(intermediate_placement(held, self.target), touched - done)


def build_migration(
    base: Placement,
    target: Placement,
    topology: Topology,
    *,
    plan_id: int,
    pace: Pace | None = None,
    weights_version: int = 0,
) -> Migration:
    """Group the moves into transactions, and each into rounds.

    Layers that change only their shares need no bytes; they are in transactions too. In flip mode
    experts keep the ranks that they have in ``target`` but not the slots: arriving experts go into
    slots that are EMPTY in ``base``.

    Raises:
        MigrationError: one layer alone needs more staging than a rank has.
        PlacementError: the target does not fit the topology, or a rank lacks its spares.
    """
    pace = pace or Pace()
    check_fits(target, topology)
    if pace.mode == "flip":
        smaller, _ = compact(target, topology, pace.spare_slots)
        steps = steps_towards(smaller, base, topology, pace.spare_slots)
        target = expand(smaller, base, topology, pace.spare_slots)
        transactions = flip_transactions(base, target, steps, topology, pace)
    else:
        transactions = copy_transactions(base, target, topology, pace)
    next_target = target.with_generation(base.generation + 1)
    return Migration(plan_id, base, next_target, transactions, pace, weights_version)
