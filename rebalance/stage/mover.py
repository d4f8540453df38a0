"""The mover: loads a migration's bytes to a rank. Preload, then stage, one transaction at a time.

It never writes to a slot that serves. It reports progress to the phase machine and decides nothing.

``Mover.work`` is a generator that yields what it waits for and never blocks: in a rank a thread
drives it (``bring``), in tests a scheduler may, with simulated sources and clock.

Staging memory is reused only after nothing that was ordered writes to it any more. Where that
cannot be established, it is never used again, and migrations stay disabled on this rank.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from eplb.clock import Clock
from eplb.errors import MigrationError, PlacementError
from eplb.migration.build import Mode, Move
from rebalance.protocol import phases
from rebalance.protocol.phases import Phase
from rebalance.stage.lanes import Pull
from rebalance.stage.share import RankSlots, Share
from rebalance.stage.source_choice import SourceChoice
from rebalance.stage.stage_settings import StageSettings
from rebalance.stage.stager import StageFigures, Stager
from rebalance.threads.waiting import WAIT_S, SharedPhase, Wait, drive
from rebalance.threads.watchdog import ThreadActivity
from rebalance.types import CalledOff, IsWanted, Record
from rebalance.weights.sources import WeightSources
from runtime.streams import Completion

log = logging.getLogger(__name__)


def no_ranks() -> frozenset[int]:
    """No rank is known to be dead."""
    return frozenset()


class StagingRing:
    """Tracks free staging entries and the move that each other one holds. Guarded by SharedPhase.

    An entry that was swapped from is free only once that copy is complete, not when it is ordered:
    on a GPU the host runs ahead (vLLM pull 32881 is a buffer overwritten while it was copied).
    """

    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries
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
    def num_in_use(self) -> int:
        """Entries that hold bytes or are being copied from, as of the latest poll."""
        return self.num_entries - len(self._free)

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
        """Free the entries of moves once their copy into the live slots is complete."""
        self._copying.append((completion, [self._held.pop(move) for move in moves]))

    def release_all(self) -> None:
        """Free every entry: the plan was dropped."""
        self._free.extend(self._held.values())
        self._held.clear()

    def entry(self, move: Move) -> int:
        """Return the entry that holds a move's bytes."""
        return self._held[move]

    def borrow(self) -> int | None:
        """Reserve an entry outside of migrations; None while none is free.

        ``release_all`` does not free it: the borrower gives it back.
        """
        return self._free.pop() if self.num_free else None

    def give_back(self, entry: int, completion: Completion | None = None) -> None:
        """End a loan: at once, or when the copy out of the entry is complete."""
        if completion is None:
            self._free.append(entry)
        else:
            self._copying.append((completion, [entry]))


class Mover:
    """Loads one rank's share of each migration.

    Args:
        slots: where bytes go to.
        sources: where bytes come from.
        settings: what staging may take.
        dead: returns the ranks that are known to be dead; they are no source.
        clock: of seconds, for budgets and deadlines.
        beat: its heartbeat.
    """

    def __init__(
        self,
        slots: RankSlots,
        sources: WeightSources,
        settings: StageSettings,
        *,
        dead: Callable[[], frozenset[int]] = no_ranks,
        clock: Clock = time.monotonic,
        beat: ThreadActivity | None = None,
    ) -> None:
        self._slots, self._sources = slots, sources
        self._settings, self._clock = settings, clock
        self._choice = SourceChoice(slots.rank, slots.topology, sources.readable, dead, clock)
        self.beat = beat or ThreadActivity("mover", clock)
        self._stager = Stager(sources, self._choice, slots.digests, settings, clock, beat=self.beat)
        self.ring = StagingRing(slots.bank.num_staging)
        self.is_drained = True  # False once copies could not be ended: they may still be writing

    # -- from any thread

    @property
    def figures(self) -> StageFigures:
        """The statistics of staging."""
        return self._stager.figures

    def pause(self, of: object = None) -> None:
        """Order no further chunk until ``resume``, or until the hold's deadline."""
        self._stager.hold.pause(self._settings.pause_deadline_s, of)

    def resume(self, of: object = None) -> None:
        """End a pause; the caller must also wake the driver of ``work``."""
        self._stager.hold.resume(of)

    # -- a migration, on the mover's thread

    def begin(self) -> None:
        """Make the calling thread this mover's."""
        self._sources.begin(self._slots.bank.device)

    def bring(self, share: Share, shared: SharedPhase) -> None:
        """Work one migration off: returns when it is done or dropped, or the rank halts.

        What ``work`` raises is raised here: this thread is not to be trusted any more.
        """
        drive(self.work(share, shared), shared, self._clock)

    def work(self, share: Share, shared: SharedPhase) -> Iterator[Wait]:
        """Process one migration step by step; ends when it is done or dropped, or the rank halts.

        Each Wait has the time of the next step; a change of the shared state resumes it too. After
        the end nothing that it ordered writes any more. An exception other than an EplbError is a
        bug or a broken device: the migration is aborted, and after the cleanup the exception is
        raised.
        """
        plan_id, failure = share.migration.plan_id, None
        self._stager.figures.num_staged = 0
        self._stager.use(share.migration.pace.link_part)
        try:
            yield from self._load(share, shared)
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

    def _load(self, share: Share, shared: SharedPhase) -> Generator[Wait, None, None]:
        """Preload a share, then stage it; return early if the plan is not wanted any more."""
        plan_id, mode = share.migration.plan_id, share.migration.pace.mode
        self.beat.busy(f"computing the placements of plan {plan_id}")
        share.prepare(self.ring.num_entries)

        def is_wanted() -> bool:
            return shared.is_wanted(plan_id)

        if not (yield from self._preload(share, is_wanted)):
            return
        shared.update(phases.preloaded, plan_id)
        for number, moves in enumerate(share.moves):
            if not (yield from self._wait_for_room(share, number, shared)):
                return
            held = share.readable(number)
            pulls = [Pull(move, self.destination(move, mode), held) for move in moves]
            if not (yield from self._stager.stage(pulls, is_wanted)):
                return
            self._sources.host.release([pull.record for pull in pulls])
            shared.update(phases.staged, plan_id, number + 1)

    def _preload(self, share: Share, is_wanted: IsWanted) -> Generator[Wait, None, bool]:
        """Preload records in batches; return False if the plan is not wanted any more."""
        wanted = {
            (move.layer, move.expert): (move, held)
            for number, moves in enumerate(share.moves)
            for held in [share.readable(number)]
            for move in moves
            if self._stager.starts_on_host(move, held)
        }
        records = list(wanted)
        if len(records) > self._sources.host.room:
            # They do not fit together: the first now, the others when needed.
            first_moves = {(move.layer, move.expert) for move in share.moves[0]}
            self._sources.host.hint([record for record in records if record not in first_moves])
            records = [record for record in records if record in first_moves]
        at_once = self._settings.preload_records
        for first in range(0, len(records), at_once):
            if not is_wanted():
                return False
            # Hinted before the others are waited for, so that the disk is never idle in between.
            self._sources.host.hint(records[first + at_once : first + 2 * at_once])
            now = [wanted[record] for record in records[first : first + at_once]]
            try:
                self._stager.preload(now, is_wanted)
            except CalledOff:
                return False
            yield Wait("nothing: others may take their turn", self._clock())
        return True

    def _wait_for_room(
        self, share: Share, number: int, shared: SharedPhase
    ) -> Generator[Wait, None, bool]:
        """Wait until a transaction may be staged; False when the plan is not wanted any more.

        The deadlines of votes cover the wait for a vote. The wait for a swap's copies has its own
        here.
        """
        migration, copy, deadline = share.migration, None, 0.0
        moves = share.moves[number] if migration.pace.mode == "copy" else []
        reads_after = migration.transactions[number].reads_after
        while True:
            with shared.changed:
                if not shared.is_wanted(migration.plan_id):
                    return False
                may_stage = phases.may_stage(shared.state, reads_after)
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

    def destination(self, move: Move, mode: Mode) -> torch.Tensor:
        """The memory [record_bytes] that a move is staged in before it serves.

        A staging entry, or in flip mode the EMPTY slot itself: no token is routed there yet.
        """
        if mode == "copy":
            return self._slots.bank.staging(self.ring.entry(move))
        return self._slots.bank.live(move.layer, move.dst_slot - self._slots.first_slot)

    def _end(self, shared: SharedPhase, plan_id: int) -> Generator[Wait, None, None]:
        """Wait until nothing writes and no verdict on the plan can come; free what it held."""
        yield from self._settle(shared)
        self.beat.idle(f"waiting for the last vote on plan {plan_id}")
        while True:
            with shared.changed:
                if not shared.is_live(plan_id):
                    break
            yield Wait("the vote that ends the plan", self._clock() + WAIT_S)
        with shared.changed:
            if shared.state.phase is Phase.ABORTED:
                # Only this generator has staging entries written, and all it ordered has ended.
                if self.is_drained:
                    self.ring.release_all()
                shared.update(phases.aborted)

    def _settle(self, shared: SharedPhase) -> Generator[Wait, None, None]:
        """Wait until nothing writes. Where that cannot be had, no plan is adopted any more."""
        self.beat.busy("waiting for ordered copies to end")
        try:
            yield from self._stager.drain()
            self._release()
        except Exception as exc:
            # Too late or a broken device: what may still be written must not be used again.
            log.exception("rank %d: staging copies did not end", self._slots.rank)
            self.is_drained = False
            shared.update(
                phases.freeze, f"rank {self._slots.rank}: staging copies did not end: {exc}"
            )

    def _release(self) -> None:
        """End the leases. A dead host holds none."""
        try:
            self._sources.host.release()
        except MigrationError as exc:
            log.warning("rank %d: %s", self._slots.rank, exc)

    def wait_for_end(self, shared: SharedPhase, plan_id: int) -> None:
        """Wait until no verdict on a plan can come, and free what it held if it was dropped."""
        drive(self._end(shared, plan_id), shared, self._clock)

    # -- outside of migrations, on the mover's thread

    def read_ahead(self, records: Sequence[Record]) -> None:
        """Have the host load records that may be needed soon, when it is idle."""
        try:
            self._sources.host.hint(records)
        except MigrationError as exc:
            log.warning("rank %d: read-ahead failed: %s", self._slots.rank, exc)

    def fetch(self, pull: Pull, shared: SharedPhase, is_wanted: IsWanted) -> bool:
        """Fetch and verify one record, while no migration is staged.

        Returns:
            Whether it is there; False if it is not wanted any more. Afterwards nothing writes to
            its destination, unless ``is_drained`` is False.

        Raises:
            MigrationError: no source has it.
        """
        if not self.is_drained:
            raise MigrationError("cancelled copies may still be writing to staging")
        is_there, failure = False, None

        def work() -> Generator[Wait, None, None]:
            nonlocal is_there, failure
            try:
                is_there = yield from self._stager.stage([pull], is_wanted)
            except Exception as exc:
                failure = exc  # raised below, once nothing writes any more
            yield from self._settle(shared)

        drive(work(), shared, self._clock)
        self._stager.figures.num_staged = 0  # it counts what a migration has staged: this was none
        if failure is not None:
            raise failure
        return is_there and self.is_drained
