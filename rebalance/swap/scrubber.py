"""Finds corrupted bytes in a rank's live slots, and the right ones to put there.

It decides nothing about when: ``rebalance/swap/scrub_schedule.py`` calls it while nothing moves.

Shapes:  L MoE layers, E experts, S slots, C slots of this rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.migration.build import Move, Source
from rebalance.stage.lanes import Pull
from rebalance.types import Digest
from runtime.experts import ExpertBank


@dataclass(frozen=True)
class LiveSlot:
    """A slot of this rank, and the expert that it holds by the placement."""

    layer: int
    slot: int  # of this rank, 0..C-1
    expert: int

    def __str__(self) -> str:
        return f"layer {self.layer} slot {self.slot} expert {self.expert}"


@dataclass(frozen=True)
class Damage:
    """A slot whose digest differs from its expert's."""

    where: LiveSlot
    found: Digest
    expected: Digest


@dataclass(frozen=True)
class Loan:
    """Borrowed memory for a repair: a staging entry, or an EMPTY slot of the layer."""

    record: torch.Tensor  # [record_bytes]
    entry: int | None = None  # None: an EMPTY slot


class Scrubber:
    """Goes round one rank's live slots. Used by one thread at a time.

    Args:
        digests: [L, E, 2] of every expert, agreed by all ranks.
    """

    def __init__(
        self, rank: int, topology: Topology, bank: ExpertBank, digests: torch.Tensor
    ) -> None:
        self.rank, self._topology, self._bank, self._digests = rank, topology, bank, digests
        self._next = 0  # layer x C + slot
        self.suspects: dict[LiveSlot, int] = {}  # found corrupted -> repairs so far; seen to first
        self.counts = Counter(clean=0, damaged=0, repaired=0, lost=0)
        self.num_sweeps = self.num_digest_failures = 0

    def next_slot(self, placement: Placement) -> LiveSlot | None:
        """Return the next slot to verify; None when this rank holds nothing."""
        held = placement.slot_to_expert[:, self._topology.slots_on(self.rank)]
        for suspect in list(self.suspects):
            if self.holds(placement, suspect):
                return suspect
            del self.suspects[suspect]  # a migration has replaced it since
        live = np.flatnonzero(held != EMPTY)
        if not live.size:
            return None
        due = live[live >= self._next]
        place = int(due[0] if due.size else live[0])
        self._next = place + 1
        if self._next > live[-1]:
            self._next, self.num_sweeps = 0, self.num_sweeps + 1
        layer, slot = divmod(place, held.shape[1])
        return LiveSlot(layer, slot, int(held[layer, slot]))

    def holds(self, placement: Placement, where: LiveSlot) -> bool:
        """Return whether the slot still holds this expert by the placement."""
        slot = int(self._topology.first_slot[self.rank]) + where.slot
        return bool(placement.slot_to_expert[where.layer, slot] == where.expert)

    def check(self, layer: int, slot: int, expert: int) -> Damage | None:
        """Compare the bytes that a slot holds with the expert's digest."""
        first, second = self._digests[layer, expert].tolist()
        found = self._bank.digest(layer, slot)
        if found == (first, second):
            return None
        self.num_digest_failures += 1
        return Damage(LiveSlot(layer, slot, expert), found, (first, second))

    def right_bytes(self, where: LiveSlot, placement: Placement, loan: Loan) -> Pull:
        """Return the pull that fetches a slot's expert: from peers first, then the host."""
        own_slot = int(self._topology.first_slot[self.rank]) + where.slot
        held = placement.slot_to_expert.copy()
        held[where.layer, own_slot] = EMPTY  # it is what must not be read
        return Pull(Move(where.layer, where.expert, own_slot, Source.PEER), loan.record, held)

    def staging(self, entry: int) -> Loan:
        """Return a staging entry that was borrowed."""
        return Loan(self._bank.staging(entry), entry)

    def spare(self, layer: int, placement: Placement) -> Loan | None:
        """Return an EMPTY slot of this rank in a layer, if it has one."""
        held = placement.slot_to_expert[layer, self._topology.slots_on(self.rank)]
        empty = np.flatnonzero(held == EMPTY)
        return Loan(self._bank.live(layer, int(empty[0]))) if empty.size else None
