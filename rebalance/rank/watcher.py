"""Background threads of a rank: store watcher, mover, and commit writer.

No thread ends unnoticed. A failed mover is restarted once; a second failure freezes migrations on
this rank. Serving continues.

A failing store is retried for as long as the rank serves. Meanwhile no plan is received, and
commits wait in a queue until the store accepts them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import StaleGeneration, StoreError
from eplb.migration.build import Migration
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN
from rebalance.stage.mover import Mover
from rebalance.stage.share import Share
from rebalance.threads.waiting import SharedPhase
from rebalance.threads.watchdog import Watchdog
from rebalance.types import Record
from telemetry.state.events import PlanOutcome
from telemetry.state.live import Control, LiveState
from telemetry.state.runs import Details, RankState
from telemetry.state.store import StateStore

POLL_S = 0.25  # how often a rank reports itself when nothing else happens
SOON_S = 0.005  # how soon to look again at a plan that could not be adopted yet
DEFERS_S = 1.0  # extra time for the rank that knows the reason of an abort; it may be dead
CLOSE_DEADLINE_S = 10.0
MOVER = "eplb-mover"

log = logging.getLogger(__name__)


class SampleSink(Protocol):
    """Takes samples off the step path (telemetry.load.reporter.Reporter)."""

    def offer(self, sample: LoadSample) -> bool:
        """Accept a sample; never blocks, never raises. False if one was dropped for it."""

    def state(self, state: RankState) -> None:
        """Accept the rank's report; only the newest is kept."""

    def close(self, flush_deadline_s: float) -> None:
        """Pass on what was accepted, within a deadline."""


class WatchedRank(Protocol):
    """The rank, as the watcher sees it."""

    membership: int  # of the group in which it serves, or that of survivors once it joined them

    def on_store_update(self, control: Control, published: Migration | None) -> bool:
        """Process an update of the store; return False to be called again soon."""

    def describe(self) -> RankState:
        """Return how this rank stands."""

    def settled(self) -> tuple[Placement, int]:
        """Return the committed placement and the newest plan id, as known to this rank."""


@dataclass(frozen=True)
class Writing:
    """Something that the store is to have."""

    what: str
    write: Callable[[], object]
    plan_id: int = NO_PLAN  # other ranks may write its end too, with a better reason
    defers_until: float = 0.0


class ReadAhead:
    """Has this rank's host load candidate experts ahead of the plan that may need them.

    The controller publishes candidates with each window; the lowest live rank of each host forwards
    its host's. The host cache loads them when idle, and never evicts a leased record for them. Used
    by the watcher's thread alone.

    Args:
        rank: which.
        topology: says which rank of a host passes its candidates on.
        store: names the candidates.
        order: has the mover's thread pass records on to the host.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        store: StateStore,
        order: Callable[[Sequence[Record]], None],
    ) -> None:
        self._store, self._order = store, order
        self._host = int(topology.host_of_rank[rank])
        on_host = np.flatnonzero((topology.host_of_rank == self._host) & topology.alive)
        self._passes_on = rank == int(on_host[0])
        self._last: tuple[tuple[int, int], ...] = ()

    def look(self) -> None:
        """Pass the host's candidates on, if they are others than before.

        Raises:
            StoreError: the store failed.
        """
        if not self._passes_on:
            return
        wanted = self._store.candidates().of(self._host)
        if wanted != self._last:
            self._last = wanted
            self._order(wanted)


class StoreLoss:
    """Restores a store that lost its contents (FLUSHALL, a server restarted without its files).

    A store may also go back: a server that crashed, or a replica that took over, lacks the commits
    that were acknowledged last. Ranks then commit what they serve once more.

    Every rank knows the state that balancing needs: the run, the serving placement, the switches,
    the operation on the ranks, and the highest plan id. Each rank checks after every poll. The
    first that misses placement or run restores all of it in one change; the others find it there.
    Samples, tasks, events and the history of placements are lost. Used by one thread at a time.

    It is made before a rank loads its experts: the store may be lost in the minutes that this
    takes, and nobody else could then restore the run.

    Args:
        store: of the deployment.
        run: the start of this rank, on record.

    Raises:
        StoreError: the store failed, or has no record of the start.
    """

    def __init__(self, store: StateStore, run: str) -> None:
        self._store, self._live = store, store.live()
        self._change = store.membership_change()
        # The run last: if it is still there, what was read before is of the same contents.
        found = next((info for info in store.runs() if info.run == run), None)
        if found is None:
            raise StoreError(
                f"the store holds no record of run {run!r} of deployment {store.deployment!r}, "
                "expected one: the start was not recorded, or the store lost its contents since"
            )
        self._run = found
        self._newest = -1  # newest generation that the store has ever named

    def restore_if_lost(self, live: LiveState, rank: WatchedRank) -> bool:
        """Restore the store if it was lost; return whether the data just read from it is invalid.

        Args:
            live: the live settings as they were read last.
            rank: that serves.

        Raises:
            StoreError: the store failed.
        """
        # `eplb serve` may have written a first placement into the emptied store before this look.
        committed = self._store.committed()
        if committed is not None and self._store.current_run() is not None:
            self._live, self._change = live, self._store.membership_change()
            named, known = committed.placement.generation, self._newest
            self._newest = max(named, known)
            return named < known and self._has_gone_back(named, known, rank)
        state, (placement, plan_id) = rank.describe(), rank.settled()
        reason = f"rank {state.rank} misses the run in the store: the store lost its contents"
        if self._store.restore(
            self._run,
            placement,
            self._live,
            last_plan_id=plan_id,
            reason=reason,
            membership=self._change,
        ):
            log.error("generation=%d %s; state restored", placement.generation, reason)
        return True

    def _has_gone_back(self, named: int, known: int, rank: WatchedRank) -> bool:
        """Commit what this rank serves, if the store named it and now names an older placement.

        A commit that the store does not have yet is no reason: it is on its way.
        """
        placement, _ = rank.settled()
        if placement.generation <= named:
            return False  # the ranks that have swapped already do it
        reason = (
            f"the store went back from generation {known} to {named}: its last changes are lost"
        )
        try:
            if self._store.commit(
                placement, expected=named, reason=reason, membership=rank.membership
            ):
                log.error("generation=%d %s; committed again", placement.generation, reason)
        except StaleGeneration as exc:
            log.warning("another rank or survivors were first: %s", exc)
        return True


class Watcher:
    """Three daemon threads: store to rank, the mover's work, and what the store is to have.

    They belong to one group. A thread that a close could not end, because the store does not
    answer, tells the rank nothing any more: it may be in another group by then.

    Without ``loss``, a store that lost its contents is not restored.
    """

    def __init__(
        self,
        store: StateStore,
        rank: WatchedRank,
        mover: Mover,
        shared: SharedPhase,
        sink: SampleSink,
        watchdog: Watchdog,
        loss: StoreLoss | None = None,
    ) -> None:
        self._store, self._rank, self._mover, self._shared = store, rank, mover, shared
        self._sink, self._watchdog, self._loss = sink, watchdog, loss
        self.num_mover_failures = 0
        self.membership = rank.membership  # that commits are written for
        self._closing, self._is_watching, self._has_left = threading.Event(), True, False
        self._to_write: queue.SimpleQueue[Writing | None] = queue.SimpleQueue()
        self._to_do: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._watch, name="eplb-watcher", daemon=True),
            threading.Thread(target=self._move, name=MOVER, daemon=True),
            threading.Thread(target=self._write_down, name="eplb-commit-writer", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop_watching(self) -> None:
        """Read the store no more, after a death; what is to be written still is."""
        self._is_watching = False

    def close(self) -> None:
        """Write what is still to be written, and stop."""
        self._closing.set()
        self._shared.close()
        self._to_do.put(None)
        self._to_write.put(None)
        for thread in self._threads:
            if thread.ident is not None:  # a rank may be closed before it was started
                thread.join(CLOSE_DEADLINE_S)
        self._has_left = True

    def ended(self) -> list[str]:
        """Return the names of threads that have exited before ``close``."""
        started = {thread.name for thread in self._threads if thread.ident is not None}
        alive = {thread.name for thread in self._threads if thread.is_alive()}
        is_stopping = self._closing.is_set() or not self._is_watching
        return [] if is_stopping else sorted(started - alive)

    def has_mover(self) -> bool:
        """Return whether the mover's thread is alive."""
        return any(thread.name == MOVER and thread.is_alive() for thread in self._threads)

    def bring(self, share: Share) -> None:
        """Queue a share of a migration for the mover."""
        self.do(partial(self._mover.bring, share, self._shared))

    def do(self, job: Callable[[], None]) -> None:
        """Queue a job for the mover's thread."""
        self._to_do.put(job)

    def report_event(self, kind: str, detail: Details) -> None:
        """Queue an event for the store."""
        write = partial(self._store.add_event, kind, detail)
        self._to_write.put(Writing(f"writing an event of kind {kind!r}", write))

    def commit(
        self, migration: Migration, serving: Placement, outcome: PlanOutcome, reason: str
    ) -> None:
        """Queue the commit of ``serving`` as the outcome of ``migration``.

        Every rank writes the same commit, except for the reason of an abort, which only the
        requesting rank knows. The first write counts, so the other ranks wait for that rank for a
        moment.
        """
        write = partial(self._write, migration, serving, outcome, reason)
        what, now = f"writing the end of plan {migration.plan_id}", self._watchdog.clock()
        until = now + (DEFERS_S if reason == phases.ELSEWHERE else 0.0)
        self._to_write.put(Writing(what, write, migration.plan_id, until))

    def _write(
        self, migration: Migration, serving: Placement, outcome: PlanOutcome, reason: str
    ) -> None:
        base = migration.base.generation
        if serving.generation == base:  # nothing was swapped
            self._store.withdraw(migration.plan_id, outcome=outcome, reason=reason)
            return
        try:
            self._store.commit(
                serving,
                expected=base,
                plan_id=migration.plan_id,
                reason=reason,
                outcome=outcome,
                membership=self.membership,
            )
        except StaleGeneration:
            # Every rank writes the same; a late one may find that the group is further already.
            committed = self._store.committed()
            if committed is None or committed.placement.generation <= base:
                # A commit is refused although nothing after its base serves where the store went
                # back, where another rank has restored it since, and where survivors have agreed:
                # this rank then rolls forward, and the next try is by the number of the survivors.
                raise StoreError(
                    "the commit was refused and a placement before it serves, expected that to be "
                    "restored which it follows, or the survivors' number"
                ) from None
            is_restored = committed.placement.hash == serving.hash  # by a rank that serves it
            if committed.placement.generation <= serving.generation and not is_restored:
                raise

    def _watch(self) -> None:
        version, patience_s = -1, POLL_S
        while True:
            is_last = self._closing.is_set() or not self._is_watching
            polled = self.poll_store(version, 0.0 if is_last else patience_s)
            if polled is None:
                self._closing.wait(POLL_S)
            else:
                version, patience_s = polled
            if not self._has_left:
                self._sink.state(self._rank.describe())
            if is_last:
                self._watchdog.watcher.idle("closed")
                return

    def poll_store(self, version: int, patience_s: float) -> tuple[int, float] | None:
        """Poll the store once.

        Returns:
            The store's version, and the timeout of the next poll; None if the store failed.
        """
        self._watchdog.watcher.busy("polling the load store")
        try:
            version = self._store.wait(version, patience_s)
            live, published = self._store.live(), self._store.published()
            if self._has_left:
                return None
            if self._loss is not None and self._loss.restore_if_lost(live, self._rank):
                return version, SOON_S  # what was read is of a store without its contents
            is_settled = self._rank.on_store_update(live.control, published)
            return version, POLL_S if is_settled else SOON_S
        except StoreError as exc:
            log.warning("load store failed, retrying: %s", exc)
        except Exception:
            # A bug here must not end the thread unnoticed (vLLM issue 57883): no plan is adopted
            # any more, the rank's report has the reason, and serving continues.
            log.exception("the watcher failed")
            self._shared.update(phases.freeze, "the watcher thread failed, see the log")
        return None

    def _write_down(self) -> None:
        """Write commits and events in order, each until the store has it, or at the end once."""
        beat = self._watchdog.commit_writer
        while (writing := self._to_write.get()) is not None:
            beat.busy(writing.what)  # once: a store that refuses again and again is no progress
            while not (is_written := self.try_write(writing)) and not self._closing.is_set():
                self._closing.wait(POLL_S)
            if not is_written:
                log.error("%s cancelled: the rank is stopping", writing.what)
            beat.idle()

    def try_write(self, writing: Writing) -> bool:
        """Try to write something down; False when it is to be tried again."""
        try:
            if self._defers(writing):
                return False
            writing.write()
        except StaleGeneration as exc:
            # The slots differ from the store's placement: an operator has to find out why.
            log.exception("the store rejected a commit")
            self._shared.update(phases.freeze, f"the store rejected a commit: {exc}")
        except StoreError as exc:
            log.warning("%s failed, retrying: %s", writing.what, exc)
            return False
        except Exception:
            # As above: the commits that follow must still be written.
            log.exception("the commit writer failed")
            self._shared.update(phases.freeze, f"{writing.what} failed, see the log")
        return True

    def _defers(self, writing: Writing) -> bool:
        if self._closing.is_set() or self._watchdog.clock() >= writing.defers_until:
            return False
        published = self._store.published()
        return published is not None and published.plan_id == writing.plan_id

    def _move(self) -> None:
        try:
            self._mover.begin()
            while (job := self._to_do.get()) is not None:
                job()
                self._mover.beat.idle()
        except Exception as exc:
            log.exception("the mover failed")
            self._after_failure(exc)

    def _after_failure(self, exc: Exception) -> None:
        """Restart the mover's thread, once."""
        self.num_mover_failures += 1
        self._mover.beat.idle("failed")
        if self.num_mover_failures > 1:
            words = f"the mover failed twice, the second time with {type(exc).__name__}: {exc}"
            plan = self._shared.update(phases.freeze, words).plan
            if plan is not None:  # adopted since, or before the mover could begin: never staged
                self._mover.wait_for_end(self._shared, plan.plan_id)
        elif not self._closing.is_set():
            log.warning("restarting the mover after its first failure")
            again = threading.Thread(target=self._move, name=MOVER, daemon=True)
            again.start()
            self._threads.append(again)
