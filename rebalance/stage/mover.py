"""The mover: loads a migration's bytes to a rank. Preload, then stage, one transaction at a time.

It never writes to a slot that serves. It reports progress to the phase machine and decides nothing.

``Mover.work`` is a generator that yields what it waits for and never blocks: in a rank a thread
drives it (``bring``), in tests a scheduler may, with a simulated transport and clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.clock import Clock
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import MigrationError, PlacementError
from eplb.migration.build import Migration, Mode, Move, Transaction
from rebalance.protocol import phases
from rebalance.protocol.phases import Phase
from rebalance.stage.fetcher import Fetcher
from rebalance.stage.figures import StageFigures
from rebalance.stage.intermediate_placements import (
    Serving,
    check_places,
    readable,
    serving_after_each,
)
from rebalance.stage.lanes import Pull
from rebalance.stage.ring import StagingRing
from rebalance.stage.sources import Sources
from rebalance.stage.stage_settings import StageSettings
from rebalance.stage.stager import Stager
from rebalance.threads.cancellation import CalledOff
from rebalance.threads.waiting import WAIT_S, SharedPhase, Wait, drive
from rebalance.threads.watchdog import Heartbeat
from rebalance.types import Record
from rebalance.weights.interface import WeightTransport
from runtime.experts import ExpertBank
from runtime.routing import RoutingTable

log = logging.getLogger(__name__)


def no_ranks() -> frozenset[int]:
    """No rank is known to be dead."""
    return frozenset()


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


class Mover:
    """Loads one rank's share of each migration.

    Args:
        slots: where bytes go to.
        transport: where bytes come from.
        settings: what staging may take.
        dead: returns the ranks that are known to be dead; they are no source.
        clock: of seconds, for budgets and deadlines.
        beat: its heartbeat.
    """

    def __init__(
        self,
        slots: RankSlots,
        transport: WeightTransport,
        settings: StageSettings,
        *,
        dead: Callable[[], frozenset[int]] = no_ranks,
        clock: Clock = time.monotonic,
        beat: Heartbeat | None = None,
    ) -> None:
        self._slots, self._transport = slots, transport
        self._settings, self._clock = settings, clock
        reads = slots.rank, slots.topology, transport.readable
        self._sources = Sources(*reads, dead, clock, reachable=transport.reachable)
        self.beat = beat or Heartbeat("mover", clock)
        self._stager = Stager(
            transport, self._sources, slots.digests, settings, clock, beat=self.beat
        )
        self.fetcher = Fetcher(slots.rank, self._stager, self.beat, clock)
        self.ring = StagingRing(slots.bank.num_staging)
        self.serving: list[Serving] = []  # of the present migration, one per transaction

    # -- from any thread

    def figures(self) -> StageFigures:
        """Return the statistics of staging."""
        return self._stager.meter.snapshot(
            num_quarantined=self._sources.num_quarantined,
            ring_in_use=self.ring.num_in_use,
            ring_entries=self.ring.num_entries,
        )

    def pause(self, of: object = None) -> None:
        """Order no further chunk until ``resume``, or until the hold's deadline."""
        self._stager.hold.pause(self._settings.pause_deadline_s, of)

    def resume(self, of: object = None) -> None:
        """End a pause; the caller must also wake the driver of ``work``."""
        self._stager.hold.resume(of)

    def own_moves(self, transaction: Transaction) -> list[Move]:
        """Return the moves of a transaction that end in this rank's slots, in round order."""
        rank_of_slot = self._slots.topology.rank_of_slot
        return [m for m in transaction.moves if rank_of_slot[m.dst_slot] == self._slots.rank]

    # -- on the mover's thread

    def begin(self) -> None:
        """Make the calling thread this mover's."""
        self._transport.begin()

    def read_ahead(self, records: Sequence[Record]) -> None:
        """Have the host load records that may be needed soon, when it is idle."""
        try:
            self._transport.hint(records)
        except MigrationError as exc:
            log.warning("rank %d: read-ahead failed: %s", self._slots.rank, exc)

    def bring(self, migration: Migration, shared: SharedPhase) -> None:
        """Work one migration off: returns when it is done or dropped, or the rank halts.

        What ``work`` raises is raised here: this thread is not to be trusted any more.
        """
        drive(self.work(migration, shared), shared, self._clock)

    def work(self, migration: Migration, shared: SharedPhase) -> Iterator[Wait]:
        """Process one migration step by step; ends when it is done or dropped, or the rank halts.

        Each Wait has the time of the next step; a change of the shared state resumes it too. After
        the end nothing that it ordered writes any more. An exception other than an EplbError is a
        bug or a broken device: the migration is aborted, and after the cleanup the exception is
        raised.
        """
        plan_id, failure = migration.plan_id, None
        self._stager.meter.restart()
        self._stager.use(migration.pace.link_part)
        try:
            yield from self._bring(migration, shared)
        except (MigrationError, PlacementError) as exc:
            shared.update(phases.want_abort, plan_id, f"rank {self._slots.rank}: {exc}")
        except Exception as exc:
            words = f"the mover failed with {type(exc).__name__}: {exc}"
            shared.update(phases.want_abort, plan_id, f"rank {self._slots.rank}: {words}")
            failure = exc
        self._stager.use(1.0)  # for the scrubber, which fetches single records
        yield from self._end(shared, plan_id)
        if failure is not None:
            raise failure

    def wait_for_end(self, shared: SharedPhase, plan_id: int) -> None:
        """Wait until no verdict on a plan can come, and free what it held if it was dropped."""
        drive(self._end(shared, plan_id), shared, self._clock)

    def _bring(self, migration: Migration, shared: SharedPhase) -> Generator[Wait, None, None]:
        plan_id = migration.plan_id
        self.beat.busy(f"computing the placements of plan {plan_id}")
        self.serving = list(serving_after_each(migration, self._slots.table))
        self._check(migration)
        if not (yield from self._preload(migration, shared)):
            return
        shared.update(phases.preloaded, plan_id)
        for number, transaction in enumerate(migration.transactions):
            moves = self.own_moves(transaction)
            if not (yield from self._wait_for_room(shared, migration, number)):
                return
            held, mode = readable(migration, self.serving, number), migration.pace.mode
            pulls = [Pull(move, self.destination(move, mode), held) for move in moves]
            if not (yield from self._stager.stage(pulls, lambda: shared.is_wanted(plan_id))):
                return
            self._stager.host.release((move.layer, move.expert) for move in moves)
            shared.update(phases.staged, plan_id, number + 1)

    def _check(self, migration: Migration) -> None:
        """Reject a migration that can never be staged, or that would overwrite serving slots.

        Raises:
            MigrationError: with the reason.
        """
        if not migration.transactions:
            raise MigrationError(f"plan {migration.plan_id} has no transactions, expected one")
        for number, transaction in enumerate(migration.transactions):
            moves = self.own_moves(transaction)
            check_places(migration, self.serving, number, moves, self.ring.num_entries)

    def _preload(self, migration: Migration, shared: SharedPhase) -> Generator[Wait, None, bool]:
        """Preload records in batches; return False if the plan is not wanted any more."""
        wanted = {
            (move.layer, move.expert): (move, held)
            for number, transaction in enumerate(migration.transactions)
            for held in [readable(migration, self.serving, number)]
            for move in self.own_moves(transaction)
            if self._stager.starts_on_host(move, held)
        }
        records = list(wanted)
        if len(records) > self._transport.host_room:
            # They do not fit together: the first now, the others when needed.
            wanted_first = {(m.layer, m.expert) for m in self.own_moves(migration.transactions[0])}
            self._transport.hint([record for record in records if record not in wanted_first])
            records = [record for record in records if record in wanted_first]
        at_once, plan_id = self._settings.preload_records, migration.plan_id
        for first in range(0, len(records), at_once):
            if not shared.is_wanted(plan_id):
                return False
            # Hinted before the others are waited for, so that the disk is never idle in between.
            self._transport.hint(records[first + at_once : first + 2 * at_once])
            now = [wanted[record] for record in records[first : first + at_once]]
            try:
                self._stager.preload(now, lambda: shared.is_wanted(plan_id))
            except CalledOff:
                return False
            yield Wait("nothing: others may take their turn", self._clock())
        return True

    def destination(self, move: Move, mode: Mode) -> torch.Tensor:
        """The memory [record_bytes] that a move is staged in before it serves.

        A staging entry, or in flip mode the EMPTY slot itself: no token is routed there yet.
        """
        if mode == "copy":
            return self._slots.bank.staging(self.ring.entry(move))
        first_slot = int(self._slots.topology.first_slot[self._slots.rank])
        return self._slots.bank.live(move.layer, move.dst_slot - first_slot)

    def _wait_for_room(
        self, shared: SharedPhase, migration: Migration, number: int
    ) -> Generator[Wait, None, bool]:
        """Wait until a transaction may be staged; False when the plan is not wanted any more.

        The deadlines of votes cover the wait for a vote. The wait for a swap's copies has its own
        here.
        """
        transaction, copy, deadline = migration.transactions[number], None, 0.0
        moves = self.own_moves(transaction) if migration.pace.mode == "copy" else []
        while True:
            with shared.changed:
                if not shared.is_wanted(migration.plan_id):
                    return False
                may_stage = phases.may_stage(shared.state, transaction.reads_after)
                if may_stage and self.ring.num_free >= len(moves):
                    for move in moves:
                        self.ring.take(move)
                    return True
                found = self.ring.oldest_copy if may_stage else None
            now = self._clock()
            if found is None:
                self.beat.idle(f"waiting for votes on plan {migration.plan_id}")
                yield Wait("a vote, or a swap that frees staging entries", now + WAIT_S)
                continue
            if found is not copy:
                copy, deadline = found, now + self._settings.pull_deadline_s
                self.beat.busy("waiting for copies into live slots")
            elif now >= deadline:
                raise MigrationError(
                    f"copies of a swap did not end within {self._settings.pull_deadline_s:.3g} s"
                )
            yield Wait("the copies of a swap", deadline, (copy,))

    def _end(self, shared: SharedPhase, plan_id: int) -> Generator[Wait, None, None]:
        """Wait until nothing writes and no verdict on the plan can come; free what it held."""
        yield from self.fetcher.settle(shared)
        self.beat.idle(f"waiting for the last vote on plan {plan_id}")
        while True:
            with shared.changed:
                if not shared.is_live(plan_id):
                    break
            yield Wait("the vote that ends the plan", self._clock() + WAIT_S)
        with shared.changed:
            if shared.state.phase is Phase.ABORTED:
                # Only this generator has staging entries written, and all it ordered has ended.
                if self.fetcher.is_drained:
                    self.ring.release_all()
                shared.update(phases.aborted)
