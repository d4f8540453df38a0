"""What brings a migration's bytes to a rank: preload, then stage, one transaction at a time.

It never touches a slot that serves, and it tells the phase machine what it has; it decides nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from eplb.errors import MigrationError, PlacementError
from eplb.migration import Migration, Mode, Move, Source, Transaction
from eplb.placement import Placement
from eplb.topology import Topology
from rebalance import phases
from rebalance.phases import Phase, RankPhase
from rebalance.transport import WeightTransport
from runtime.experts import ExpertBank
from runtime.memory import digest
from runtime.routing import RoutingTable, TableLayers
from runtime.streams import Completion

log = logging.getLogger(__name__)

WAIT_S = 1.0  # a lost wake-up would cost this long, not for ever


class PhaseBox:
    """The phase machine's state, shared by the threads of one rank."""

    def __init__(self, state: RankPhase) -> None:
        self.state = state
        self.changed = threading.Condition()
        self.is_closing = False  # the rank halts: what was not swapped yet never will be

    def close(self) -> None:
        """End every wait for news: no step follows that could bring any."""
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()

    def update(self, transition: Callable[..., RankPhase], *news: object) -> RankPhase:
        """Apply a transition of ``rebalance.phases`` and wake whoever waits."""
        with self.changed:
            self.state = transition(self.state, *news)
            self.changed.notify_all()
            return self.state


class StagingRing:
    """Which staging entries are free, and which hold which move's bytes. Guarded by the box.

    An entry that was swapped from is free only once that copy is complete, not when it is ordered:
    on a GPU the host runs ahead (vLLM pull 32881 is a buffer overwritten while it was copied).
    """

    def __init__(self, num_entries: int) -> None:
        self._free = list(range(num_entries))
        self._held: dict[Move, int] = {}
        self._copying: deque[tuple[Completion, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        """Entries that may be written now."""
        while self._copying and self._copying[0][0].is_complete():
            self._free.extend(self._copying.popleft()[1])
        return len(self._free)

    @property
    def oldest_copy(self) -> Completion | None:
        """The copy that will free entries next, if one is under way."""
        return self._copying[0][0] if self._copying else None

    def take(self, move: Move) -> int:
        """Reserve an entry for a move."""
        entry = self._free.pop()
        self._held[move] = entry
        return entry

    def release(self, moves: Sequence[Move], completion: Completion) -> None:
        """Give the entries of moves back once their copy into the live slots is complete."""
        self._copying.append((completion, [self._held.pop(move) for move in moves]))

    def release_all(self) -> None:
        """Give every entry back: the plan was dropped."""
        self._free.extend(self._held.values())
        self._held.clear()

    def entry(self, move: Move) -> int:
        """Return the entry that holds a move's bytes."""
        return self._held[move]


@dataclass(frozen=True)
class Serving:
    """What serves once a transaction is applied."""

    placement: Placement
    table: TableLayers


class Mover:
    """Brings one rank's share of each migration."""

    def __init__(
        self,
        rank: int,
        topology: Topology,
        bank: ExpertBank,
        table: RoutingTable,
        transport: WeightTransport,
        digests: torch.Tensor,
    ) -> None:
        self._rank, self._topology = rank, topology
        self._bank, self._table, self._transport = bank, table, transport
        self._digests = digests  # [L, E, 2] of every expert, agreed by all ranks at the start
        self.ring = StagingRing(bank.num_staging)
        self.bytes_by_source: Counter[str] = Counter()
        self.preload_deadline_s = 120.0
        self.serving: list[Serving] = []  # of the migration being brought, one per transaction
        self.num_staged = 0  # of the migration being brought

    def begin(self) -> None:
        """Make the calling thread this mover's."""
        self._transport.begin()

    def prepare_serving(self, migration: Migration) -> None:
        """Work out, off the step path, what serves after each transaction."""
        self.serving = []
        for number, transaction in enumerate(migration.transactions):
            serving = migration.placement_after(number + 1)
            entries = self._table.prepare(serving, transaction.layers)
            self.serving.append(Serving(serving, entries))

    def own_moves(self, transaction: Transaction) -> list[Move]:
        """Return the moves of a transaction that end in this rank's slots, in round order."""
        rank_of_slot = self._topology.rank_of_slot
        return [move for move in transaction.moves if rank_of_slot[move.dst_slot] == self._rank]

    def bring(self, migration: Migration, box: PhaseBox) -> None:
        """Work one migration off: returns when it is done or dropped, or the rank halts."""
        plan_id, self.num_staged = migration.plan_id, 0
        try:
            self.prepare_serving(migration)
            self._preload(migration)
            box.update(phases.preloaded, plan_id)
            for number, transaction in enumerate(migration.transactions):
                moves = self.own_moves(transaction)
                through_ring = moves if migration.pace.mode == "copy" else []
                if not self._wait_for_room(box, plan_id, transaction.reads_after, through_ring):
                    break
                for move in moves:
                    if not _is_wanted(box, plan_id):
                        break
                    self._stage(move, self._destination(move, migration.pace.mode))
                else:
                    box.update(phases.staged, plan_id, number + 1)
                    continue
                break
        except (MigrationError, PlacementError) as exc:
            box.update(phases.want_abort, plan_id, f"rank {self._rank}: {exc}")
        except Exception:
            log.exception("rank %d: the mover failed", self._rank)
            box.update(phases.freeze, f"rank {self._rank}: the mover failed, see the log")
        self._wait_for_end(box, plan_id)

    def _preload(self, migration: Migration) -> None:
        from_host = (Source.HOST, Source.DISK)
        records = [
            (move.layer, move.expert)
            for transaction in migration.transactions
            for move in self.own_moves(transaction)
            if move.source in from_host
        ]
        from_disk = self._transport.preload(records, self.preload_deadline_s)
        self.bytes_by_source["disk"] += from_disk

    def _wait_for_room(
        self, box: PhaseBox, plan_id: int, reads_after: int, moves: list[Move]
    ) -> bool:
        """Wait until bytes may be staged, and the ring has room for ``moves``.

        False when the plan is not wanted any more.
        """
        while True:
            with box.changed:
                if not _is_wanted(box, plan_id):
                    return False
                may_stage = phases.may_stage(box.state, reads_after)
                if may_stage and self.ring.num_free >= len(moves):
                    for move in moves:
                        self.ring.take(move)
                    return True
                copy = self.ring.oldest_copy if may_stage else None
                if copy is None:
                    box.changed.wait(WAIT_S)
            if copy is not None:
                copy.wait()

    def _destination(self, move: Move, mode: Mode) -> torch.Tensor:
        """Where a move's bytes are written: its staging entry, or in flip mode its EMPTY slot."""
        if mode == "copy":
            return self._bank.staging(self.ring.entry(move))
        first_slot = int(self._topology.first_slot[self._rank])
        return self._bank.live(move.layer, move.dst_slot - first_slot)

    def _stage(self, move: Move, record: torch.Tensor) -> None:
        """Copy one expert into ``record`` and prove it; the host's copy is a second try."""
        expected = tuple(self._digests[move.layer, move.expert].tolist())
        self._transport.pull(move, record)
        if digest(record) != expected:
            move = self._retry_from_host(move, record, expected)
        source = Source.HOST if move.source is Source.DISK else move.source
        self.bytes_by_source[source.name.lower()] += len(record)
        self.num_staged += 1

    def _retry_from_host(self, move: Move, record: torch.Tensor, expected: tuple[int, ...]) -> Move:
        again = replace(move, source=Source.HOST)
        self.bytes_by_source["rejected"] += len(record)
        self._transport.preload([(move.layer, move.expert)], self.preload_deadline_s)
        self._transport.pull(again, record)
        if digest(record) != expected:
            raise MigrationError(
                f"layer {move.layer} expert {move.expert}: the bytes from "
                f"{move.source.name.lower()} and from the host have another digest than the expert "
                "had at the start"
            )
        return again

    def _wait_for_end(self, box: PhaseBox, plan_id: int) -> None:
        with box.changed:
            while _is_live(box, plan_id):
                box.changed.wait(WAIT_S)
            if box.state.phase is Phase.ABORTED:
                # Only this thread writes what is staged, and it is here: nothing is in flight.
                self.ring.release_all()
                box.update(phases.aborted)


def _is_live(box: PhaseBox, plan_id: int) -> bool:
    """Say whether a verdict on a plan may still come."""
    state = box.state
    is_current = state.plan is not None and state.plan.plan_id == plan_id
    return is_current and state.phase is not Phase.ABORTED and not box.is_closing


def _is_wanted(box: PhaseBox, plan_id: int) -> bool:
    return _is_live(box, plan_id) and not box.state.abort_reason
