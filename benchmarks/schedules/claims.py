"""What must hold, checked where it could be broken.

One step, one placement: every rank begins step n with the same table and the same weights. The
generation may differ for a step: a dropped plan changes it, and a rank that prepared nothing may
read the vote a step late.
Right bytes: when the devices make step n, each slot that its table routes to holds its expert.
Nothing is written that is read: not by a chunk under way of a plan that is still worked on, not by
a copy out of staging, not by steps that the device has yet to make, and no two write at once.
No plan is dropped without an abort request (``played.AbortRequests``, by the ranks' journals).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.schedules.ballots import Violation
from benchmarks.schedules.device import Copy, Step, record_words
from benchmarks.schedules.simulated_links import InFlightChunk, Row
from eplb.core.placement import EMPTY

if TYPE_CHECKING:
    from benchmarks.schedules.rank import Rank

Expected = tuple[NDArray[np.intp], NDArray[np.int32]]  # rows of a bank, and what they must hold


class Claims:
    """Checks the claims on every rank."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._ranks = ranks
        self._begun: dict[int, tuple[int, Step]] = {}  # by step: the first rank, and its table
        self._expected: dict[tuple[bytes, int], list[Expected]] = {}

    # -- who runs which step

    def begun(self, rank: int, step: Step) -> None:
        """A rank begins a step."""
        first, other = self._begun.setdefault(step.number, (rank, step))
        if other.identity != step.identity and self._ranks[first].is_alive:
            raise Violation(
                f"ranks {first} and {rank} run step {step.number} with different placements: "
                f"{_text_of(other)} and {_text_of(step)}"
            )

    def made(self, step: Step) -> None:
        """All devices make a step: tokens go where its table says."""
        for rank in self._ranks:
            self.check_bytes(rank, step.rows, step.identity[1], f"step {step.number}")

    def check_bytes(self, rank: Rank, rows: NDArray[np.int32], version: int, when: str) -> None:
        """Every slot of a rank that a table routes to holds its expert."""
        places, words = self._wanted(rows, version)[rank.number]
        found = rank.bank.words[places]
        if not np.array_equal(found, words):
            wrong = int(np.argwhere(found != words)[0, 0])
            layer, slot = divmod(int(places[wrong]), rank.bank.num_slots)
            raise Violation(
                f"rank {rank.number} layer {layer} slot {slot} holds {found[wrong].tolist()} in "
                f"{when}, expected {words[wrong].tolist()}"
            )

    def _wanted(self, rows: NDArray[np.int32], version: int) -> list[Expected]:
        key = (rows.tobytes(), version)
        if key not in self._expected:
            self._expected[key] = [_expected(rank, rows, version) for rank in self._ranks]
        return self._expected[key]

    # -- who writes and reads what

    def chunk_ordered(self, landing: InFlightChunk) -> None:
        """A chunk begins to be written."""
        target, source = landing.target, landing.source
        for reader in self._ranks:
            for other in reader.transport.in_flight:
                if reader.is_live(other.plan_id) and other.source == target:
                    raise Violation(f"{target} is written while rank {reader.number} reads it")
                other_move = (other.plan_id, other.record)
                if other.target == target and other_move != (landing.plan_id, landing.record):
                    raise Violation(f"{target} is written by two pulls at once")
                if other.target == source:
                    raise Violation(f"{source} is read while a chunk is written to it")
            self._check_stream(reader, target, source)

    def _check_stream(self, rank: Rank, target: Row, source: Row | None) -> None:
        layer, column = self._slot_of(target)
        if column != EMPTY and rank.is_alive and rank.table.rows[layer, column] != EMPTY:
            raise Violation(f"{target} is written while rank {rank.number} routes to it")
        for order in rank.stream.queue:
            if isinstance(order, Step) and column != EMPTY and order.rows[layer, column] != EMPTY:
                raise Violation(f"{target} is written before step {order.number} has read it")
            if not isinstance(order, Copy):
                continue
            if (rank.number, order.entry) == target:
                raise Violation(f"{target} is written before it was copied from")
            if (rank.number, order.row) in (target, source):
                raise Violation(f"{order.row} of rank {rank.number} is used while copied into")

    def _slot_of(self, row: Row) -> tuple[int, int]:
        """(layer, slot among those of all ranks); EMPTY for a staging entry."""
        bank = self._ranks[row[0]].bank
        layer, slot = divmod(row[1], bank.num_slots)
        return layer, (row[0] * bank.num_slots + slot if row[1] < bank.num_live else EMPTY)

    def copied(self, rank: int, copy: Copy) -> None:
        """A copy into a live slot is ordered, or made."""
        self._check_unread((rank, copy.row))
        for landing in self._ranks[rank].transport.in_flight:
            if landing.target == (rank, copy.entry):
                raise Violation(f"entry {copy.entry} of rank {rank} is swapped while written")

    def loaded(self, rank: int, row: int) -> None:
        """An engine writes new weights into a live slot."""
        self._check_unread((rank, row))
        if self._ranks[rank].stream.queue:
            raise Violation(f"rank {rank} loads weights while its device is at work")

    def _check_unread(self, row: Row) -> None:
        for reader in self._ranks:
            for landing in reader.transport.in_flight:
                if landing.source == row and reader.is_live(landing.plan_id):
                    raise Violation(f"{row} is overwritten while rank {reader.number} reads it")


def _expected(rank: Rank, rows: NDArray[np.int32], version: int) -> Expected:
    held = rows[:, rank.columns]
    layers, slots = np.nonzero(held != EMPTY)
    words = record_words(version)[layers, held[layers, slots]]
    return layers * rank.bank.num_slots + slots, words


def _text_of(step: Step) -> str:
    return f"{step.rows.tolist()} of weights {step.identity[1]}"
