"""A store in the memory of one process: the shipped fake, for tests, simulations and one process.

It keeps every promise of LoadStore except survival.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Condition

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.errors import StoreError
from eplb.migration.build import Migration
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery, SurvivorReport
from telemetry import rules
from telemetry.retention.rollup import Rollup
from telemetry.store import (
    CommittedPlacement,
    Control,
    Details,
    Event,
    Lease,
    LeaseOf,
    Outcome,
    RankState,
    RunInfo,
    Task,
    TaskState,
)
from telemetry.stores.memory_tables import (
    EventTable,
    LeaseTable,
    PlacementTable,
    RollupTable,
    SampleTable,
    TaskTable,
    as_stored,
)


class MemoryStore:
    """LoadStore over plain lists and dictionaries; one lock guards them all.

    Args:
        clock: seconds since the epoch.
        monotonic: for how long leases stand; if not given, ``clock`` where that is.
    """

    def __init__(
        self,
        deployment: str,
        *,
        clock: Callable[[], float] | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self.deployment = deployment
        self._clock = clock or time.time
        self._changed = Condition()
        self._is_closed = False
        self._version = 0
        self._runs: dict[str, RunInfo] = {}
        self._rank_states: dict[tuple[str, int], RankState] = {}
        self._samples = SampleTable()
        self._rollups = RollupTable()
        self._lease = LeaseTable(monotonic or clock)
        self._placements = PlacementTable()
        self._last_plan_id = 0
        self._events = EventTable()
        self._tasks = TaskTable()
        self._control = Control()
        self._candidates = Candidates()
        self._reports: dict[tuple[str, int, int], SurvivorReport] = {}  # by run, membership, rank
        self._recovery: Recovery | None = None

    def begin_run(self, info: RunInfo) -> None:
        """Record a start; the same again changes nothing."""
        info = replace(info, model=as_stored(info.model), topology=as_stored(info.topology))
        with self._use():
            if info.run in self._runs:
                rules.check_run_is_new(info, self._runs[info.run])
                return
            self._runs[info.run] = info
            self._event("run", rules.run_detail(info))

    def current_run(self) -> RunInfo | None:
        """Return the latest start."""
        with self._use():
            return next(reversed(self._runs.values()), None)

    def runs(self) -> list[RunInfo]:
        """Return every start on record, oldest first."""
        with self._use():
            return list(self._runs.values())

    def report(self, state: RankState) -> None:
        """Replace the latest report of a rank."""
        state = replace(state, detail=as_stored(state.detail))
        with self._use():
            self._rank_states[state.run, state.rank] = state

    def rank_states(self, run: str) -> list[RankState]:
        """Return the last report of every rank."""
        with self._use():
            states = [state for state in self._rank_states.values() if state.run == run]
        return sorted(states, key=lambda state: state.rank)

    def append(self, samples: Sequence[LoadSample]) -> int:
        """Add samples."""
        rules.check_samples(self.deployment, samples)
        with self._use():
            return self._samples.append(samples)

    def samples(
        self, run: str, *, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) past the cursor ``after``."""
        with self._use():
            return self._samples.past(run, after)[:limit]

    def samples_before(
        self, before_time: float, *, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of every run, taken before ``before_time``."""
        with self._use():
            return self._samples.before(before_time, after)[:limit]

    def sample_counts(self, run: str) -> dict[int, int]:
        """Return how many samples of each rank were stored, those included that were pruned."""
        with self._use():
            return self._samples.count(run)

    def prune(self, before_time: float) -> int:
        """Forget samples taken before ``before_time`` and return how many."""
        with self._use():
            return self._samples.prune(before_time)

    def refused(self) -> dict[str, int]:
        """Return no records: this store keeps samples as they are, and reads every one."""
        with self._use():
            return {}

    def add_rollups(self, rollups: Sequence[Rollup]) -> int:
        """Add roll-ups."""
        with self._use():
            return self._rollups.add(rollups)

    def rollups(self, seconds: int, *, after: float = -1.0, limit: int = 10_000) -> list[Rollup]:
        """Return roll-ups of a length that start past ``after``, oldest first."""
        with self._use():
            return self._rollups.past(seconds, after)[:limit]

    def prune_rollups(self, seconds: int, before_time: float) -> int:
        """Forget roll-ups that ended by ``before_time`` and return how many."""
        with self._use():
            return self._rollups.prune(seconds, before_time)

    def acquire_lease(self, holder: str, ttl_s: float, of: LeaseOf = "controller") -> Lease | None:
        """Acquire or renew a lease."""
        with self._use():
            return self._lease.acquire(holder, ttl_s, of, self._clock())

    def release_lease(self, lease: Lease) -> bool:
        """Release the lease."""
        with self._use():
            return self._lease.release(lease, self._clock())

    def lease(self, of: LeaseOf = "controller") -> Lease | None:
        """Return the lease that holds now."""
        with self._use():
            return self._lease.held(of)

    def committed(self) -> CommittedPlacement | None:
        """Return the placement that serves."""
        with self._use():
            return self._placements.latest()

    def placements(self, limit: int = 100) -> list[CommittedPlacement]:
        """Return the latest committed placements, newest first."""
        with self._use():
            return self._placements.newest_first()[:limit]

    def commit(
        self,
        placement: Placement,
        *,
        expected: int | None,
        plan_id: int = 0,
        reason: str,
        outcome: Outcome = "committed",
    ) -> bool:
        """Make ``placement`` the committed one; see LoadStore.commit."""
        with self._use():
            line = CommittedPlacement(placement, self._clock(), plan_id, reason)
            if not self._placements.add(line, expected, self._recovery):
                return False
            generation, closing = placement.generation, self._placements.open
            self._placements.open = None
            if closing is not None and closing.plan_id != plan_id:
                overtaken = rules.overtaken_reason(generation)
                self._event("reject", rules.close_detail(closing.plan_id, generation, overtaken))
            kind = rules.EVENT_OF_OUTCOME[outcome]
            self._event(kind, rules.close_detail(plan_id, generation, reason))
            return True

    def next_plan_id(self) -> int:
        """Reserve a plan id."""
        with self._use():
            self._last_plan_id += 1
            return self._last_plan_id

    def publish(self, migration: Migration, *, fence: int | None = None) -> None:
        """Offer a migration to the ranks."""
        with self._use():
            self._lease.check(fence)
            self._placements.publish(migration)
            self._last_plan_id = max(self._last_plan_id, migration.plan_id)
            self._event("publish", rules.publish_detail(migration))

    def published(self) -> Migration | None:
        """Return the open migration."""
        with self._use():
            return self._placements.open

    def withdraw(
        self, plan_id: int, *, outcome: Outcome, reason: str, fence: int | None = None
    ) -> bool:
        """Close an open migration of which nothing was applied."""
        assert outcome != "committed", "a migration that was applied is closed by commit"
        with self._use():
            self._lease.check(fence)
            closing = self._placements.open
            if closing is None or closing.plan_id != plan_id:
                return False
            self._drop(closing, outcome, reason)
            return True

    def _drop(self, closing: Migration, outcome: Outcome, reason: str) -> None:
        self._placements.open = None
        detail = rules.close_detail(closing.plan_id, closing.base.generation, reason)
        self._event(rules.EVENT_OF_OUTCOME[outcome], detail)

    def restore(
        self,
        run: RunInfo,
        placement: Placement,
        control: Control,
        *,
        last_plan_id: int,
        reason: str,
    ) -> bool:
        """Restore the state that a rank knows in a store that lost its contents."""
        with self._use():
            current = next(reversed(self._runs), None)
            is_committed = self._placements.latest() is not None
            if not rules.is_to_be_restored(run, is_committed=is_committed, current_run=current):
                return False
            self._runs[run.run] = replace(
                run, model=as_stored(run.model), topology=as_stored(run.topology)
            )
            line = CommittedPlacement(placement, self._clock(), 0, reason)
            self._placements.add(line, None, self._recovery)
            self._control = control
            self._last_plan_id = max(self._last_plan_id, last_plan_id + rules.PLAN_ID_GAP)
            detail = rules.restore_detail(
                run, placement, control, last_plan_id=self._last_plan_id, reason=reason
            )
            self._event("restore", detail)
            return True

    def add_survivor_report(self, report: SurvivorReport) -> None:
        """Write a survivor report."""
        with self._use():
            self._reports[report.run, report.membership, report.rank] = report
            self._bump()

    def survivor_reports(self, run: str, membership: int) -> list[SurvivorReport]:
        """Return what survivors of a group wrote, by rank."""
        with self._use():
            found = [
                reports for key, reports in self._reports.items() if key[:2] == (run, membership)
            ]
        return sorted(found, key=lambda reports: reports.rank)

    def recover(self, record: Recovery, *, expected_membership: int) -> Recovery | None:
        """Write a record unless one stands; see LoadStore.recover."""
        with self._use():
            standing = rules.standing_record(
                record, expected_membership=expected_membership, latest=self._recovery
            )
            if standing is not None:
                return standing
            latest, opened = self._placements.latest(), self._placements.open
            if rules.is_overtaken(record, latest.placement.generation if latest else None):
                return None
            self._recovery = record
            self._event("recovery", vars(record))
            if opened is not None and rules.is_dropped_by(record, opened.plan_id):
                self._drop(opened, "aborted", record.reason)
            return record

    def recovery(self) -> Recovery | None:
        """Return the latest record."""
        with self._use():
            return self._recovery

    def add_event(self, kind: str, detail: Details) -> int:
        """Append an event."""
        with self._use():
            return self._event(kind, detail)

    def events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return events past the id ``after``."""
        with self._use():
            return self._events.past(after)[:limit]

    def prune_events(self, keep: int) -> int:
        """Forget all but the latest ``keep`` events."""
        with self._use():
            return self._events.prune(keep)

    def submit(self, kind: str, request: Details) -> Task:
        """Queue a task."""
        with self._use():
            task = self._tasks.add(self._clock(), kind, request)
            self._event("task", rules.task_detail(task.id, kind, "queued"))
            return task

    def claim(self, *, fence: int | None = None) -> Task | None:
        """Claim the oldest queued task."""
        with self._use():
            self._lease.check(fence)
            task = self._tasks.claim()
            if task is not None:
                self._bump()
            return task

    def running(self) -> list[Task]:
        """Return the tasks that were claimed and have not ended."""
        with self._use():
            return self._tasks.running()

    def finish(
        self, task_id: int, state: TaskState, result: Details, *, fence: int | None = None
    ) -> None:
        """End a task."""
        with self._use():
            self._lease.check(fence)
            ended = self._tasks.finish(task_id, state, result)
            self._event("task", rules.task_detail(task_id, ended.kind, state))

    def task(self, task_id: int) -> Task | None:
        """Return a task."""
        with self._use():
            return self._tasks.get(task_id)

    def control(self) -> Control:
        """Return the switches."""
        with self._use():
            return self._control

    def set_control(self, control: Control, *, reason: str) -> None:
        """Set the switches."""
        with self._use():
            self._control = control
            self._event("control", rules.control_detail(control, reason))

    def candidates(self) -> Candidates:
        """Return what hosts may need next."""
        with self._use():
            return self._candidates

    def suggest(self, candidates: Candidates) -> None:
        """Name what hosts may need next."""
        with self._use():
            self._candidates = candidates
            self._bump()

    def version(self) -> int:
        """Return a number that grows with each change that a reader may wait for."""
        with self._use():
            return self._version

    def wait(self, version: int, timeout_s: float) -> int:
        """Return once the version differs from ``version``, or after ``timeout_s``."""
        with self._use():
            self._changed.wait_for(lambda: self._is_closed or self._version != version, timeout_s)
            self._check_open()
            return self._version

    def close(self) -> None:
        """End every wait; the store cannot be used after."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @contextmanager
    def _use(self) -> Iterator[None]:
        with self._changed:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"the memory store of {self.deployment!r} is closed")

    def _event(self, kind: str, detail: Details) -> int:
        event = self._events.add(self._clock(), kind, detail)
        self._bump()
        return event.id

    def _bump(self) -> None:
        self._version += 1
        self._changed.notify_all()
