"""The embedded store: one SQLite file that every process of a host shares.

What was acknowledged survives the death of any process, ``kill -9`` included. Power loss may cost
the last changes before it, never the file: it opens in an earlier state. The file must be on a
local disk, because SQLite's write-ahead log does not work over a network file system
(https://www.sqlite.org/wal.html).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import Any

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.migration.build import Migration
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery, SurvivorReport
from telemetry import rules
from telemetry.records.sample_codec import SAMPLE_VERSION
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
from telemetry.stores.lease_watch import LeaseWatch
from telemetry.stores.sqlite import rows
from telemetry.stores.sqlite.change import Change
from telemetry.stores.sqlite.file import SqliteFile, one
from telemetry.stores.sqlite.placements import PlacementReader
from telemetry.stores.sqlite.samples import SampleTables

_POLL_S = 0.02


class SqliteStore:
    """LoadStore over one SQLite file, which may hold other deployments too.

    Threads may share a store object; each process opens its own, after any fork.

    Args:
        clock: seconds since the epoch.
        monotonic: for how long leases stand; if not given, ``clock`` where that is.
        sample_version: of the records that ``append`` writes; see
            ``telemetry/records/sample_codec.py``.

    Raises:
        StoreError: the file cannot be opened and written, is damaged or another program's, or was
            written by another version.
    """

    def __init__(
        self,
        path: str | Path,
        deployment: str,
        *,
        busy_timeout_s: float = 10.0,
        clock: Callable[[], float] | None = None,
        monotonic: Callable[[], float] | None = None,
        sample_version: int = SAMPLE_VERSION,
    ) -> None:
        self.deployment = deployment
        self._clock = clock or time.time
        self._watch = LeaseWatch(monotonic or clock)
        self._file = SqliteFile(Path(path), deployment, busy_timeout_s)
        self._changed = Condition()  # notified by this object's own changes
        self._placements = PlacementReader(self._file, deployment)
        self._samples = SampleTables(self._file, deployment, sample_version)

    def begin_run(self, info: RunInfo) -> None:
        """Record a start; the same again changes nothing."""
        with self._change() as change:
            if change.begin_run(info):
                change.add_event("run", rules.run_detail(info))

    def current_run(self) -> RunInfo | None:
        """Return the latest start."""
        found = self._rows(f"{rows.RUN} ORDER BY id DESC LIMIT 1")
        return rows.run_of(found[0]) if found else None

    def runs(self) -> list[RunInfo]:
        """Return every start on record, oldest first."""
        return [rows.run_of(row) for row in self._rows(f"{rows.RUN} ORDER BY id")]

    def report(self, state: RankState) -> None:
        """Replace the latest report of a rank."""
        row = (self.deployment, *rows.rank_state_row(state))
        with self._file.write() as connection:
            connection.execute(rows.REPLACE_RANK_STATE, row)

    def rank_states(self, run: str) -> list[RankState]:
        """Return the last report of every rank."""
        return [rows.rank_state_of(row) for row in self._rows(rows.RANK_STATES, run)]

    def append(self, samples: Sequence[LoadSample]) -> int:
        """Add samples."""
        rules.check_samples(self.deployment, samples)
        return self._samples.append(samples)

    def samples(
        self, run: str, *, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) past the cursor ``after``."""
        return self._samples.past(run, after, limit)

    def samples_before(
        self, before_time: float, *, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of every run, taken before ``before_time``."""
        return self._samples.before(before_time, after, limit)

    def sample_counts(self, run: str) -> dict[int, int]:
        """Return how many samples of each rank were stored, those included that were pruned."""
        return self._samples.counts(run)

    def prune(self, before_time: float) -> int:
        """Delete samples taken before ``before_time``, of any run, and return how many.

        The file keeps its size; the room is used again.
        """
        return self._samples.prune(before_time)

    def refused(self) -> dict[str, int]:
        """Return how many records could not be read, by reason."""
        return self._samples.refused()

    def add_rollups(self, rollups: Sequence[Rollup]) -> int:
        """Add roll-ups."""
        return self._samples.add_rollups(rollups)

    def rollups(self, seconds: int, *, after: float = -1.0, limit: int = 10_000) -> list[Rollup]:
        """Return roll-ups of a length that start past ``after``, oldest first."""
        return self._samples.rollups(seconds, after, limit)

    def prune_rollups(self, seconds: int, before_time: float) -> int:
        """Delete roll-ups that ended by ``before_time`` and return how many."""
        return self._samples.prune_rollups(seconds, before_time)

    def acquire_lease(self, holder: str, ttl_s: float, of: LeaseOf = "controller") -> Lease | None:
        """Acquire or renew a lease."""
        with self._change() as change:
            lease = change.acquire_lease(holder, ttl_s, of, self._watch.is_over)
        if lease is not None:
            self._watch.age_s(lease)
        return lease

    def release_lease(self, lease: Lease) -> bool:
        """Release the lease."""
        with self._change() as change:
            return change.release_lease(lease, self._watch.is_over)

    def lease(self, of: LeaseOf = "controller") -> Lease | None:
        """Return the lease that holds now."""
        latest = self._latest_lease(of)
        return None if latest is None or self._watch.is_over(latest) else latest

    def committed(self) -> CommittedPlacement | None:
        """Return the placement that serves."""
        return self._placements.committed()

    def placements(self, limit: int = 100) -> list[CommittedPlacement]:
        """Return the latest committed placements, newest first."""
        return self._placements.placements(limit)

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
        with self._change() as change:
            return change.commit(
                placement, expected=expected, plan_id=plan_id, reason=reason, outcome=outcome
            )

    def next_plan_id(self) -> int:
        """Reserve a plan id."""
        with self._file.write() as connection:
            connection.execute(rows.RESERVE_PLAN_ID, (self.deployment,))
            found = one(connection, rows.LAST_PLAN_ID, self.deployment)
            assert found is not None, "the deployment was registered when the store was opened"
            return int(found[0])

    def publish(self, migration: Migration, *, fence: int | None = None) -> None:
        """Offer a migration to the ranks."""
        with self._change(fence) as change:
            change.publish(migration)

    def published(self) -> Migration | None:
        """Return the open migration."""
        return self._placements.published()

    def withdraw(
        self, plan_id: int, *, outcome: Outcome, reason: str, fence: int | None = None
    ) -> bool:
        """Close an open migration of which nothing was applied."""
        assert outcome != "committed", "a migration that was applied is closed by commit"
        with self._change(fence) as change:
            return change.withdraw(plan_id, outcome=outcome, reason=reason)

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
        with self._change() as change:
            return change.restore(run, placement, control, last_plan_id, reason)

    def add_survivor_report(self, report: SurvivorReport) -> None:
        """Write a survivor report."""
        with self._change() as change:
            change.add_survivor_report(report)

    def survivor_reports(self, run: str, membership: int) -> list[SurvivorReport]:
        """Return what survivors of a group wrote, by rank."""
        return [
            rules.report_from_text(text) for (text,) in self._rows(rows.REPORTS, run, membership)
        ]

    def recover(self, record: Recovery, *, expected_membership: int) -> Recovery | None:
        """Write a record unless one stands; see LoadStore.recover."""
        with self._change() as change:
            return change.recover(record, expected_membership)

    def recovery(self) -> Recovery | None:
        """Return the latest record."""
        found = self._rows(rows.RECOVERY)
        return rules.recovery_from_text(found[0][0]) if found else None

    def add_event(self, kind: str, detail: Details) -> int:
        """Append an event."""
        with self._change() as change:
            return change.add_event(kind, detail)

    def events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return events past the id ``after``."""
        return [rows.event_of(row) for row in self._rows(rows.EVENTS, after, limit)]

    def prune_events(self, keep: int) -> int:
        """Delete all but the latest ``keep`` events."""
        with self._file.write() as connection:
            old = (self.deployment, max(0, keep))
            return connection.execute(rows.PRUNE_EVENTS, old).rowcount

    def submit(self, kind: str, request: Details) -> Task:
        """Queue a task."""
        with self._change() as change:
            return change.submit(kind, request)

    def claim(self, *, fence: int | None = None) -> Task | None:
        """Claim the oldest queued task."""
        # Looked at without the write lock first: a controller asks far more often than it gets.
        if not self._rows("SELECT 1 FROM task WHERE deployment = ? AND state = 'queued' LIMIT 1"):
            rules.check_fence(fence, self._latest_lease())
            return None
        with self._change(fence) as change:
            return change.claim()

    def running(self) -> list[Task]:
        """Return the tasks that were claimed and have not ended."""
        return [rows.task_of(row) for row in self._rows(rows.RUNNING_TASKS)]

    def finish(
        self, task_id: int, state: TaskState, result: Details, *, fence: int | None = None
    ) -> None:
        """End a task."""
        with self._change(fence) as change:
            change.finish(task_id, state, result)

    def task(self, task_id: int) -> Task | None:
        """Return a task."""
        found = self._rows(f"{rows.TASK} AND id = ?", task_id)
        return rows.task_of(found[0]) if found else None

    def control(self) -> Control:
        """Return the switches."""
        found = self._rows("SELECT switches FROM control WHERE deployment = ?")
        return Control(**rules.details_from_text(found[0][0])) if found else Control()

    def set_control(self, control: Control, *, reason: str) -> None:
        """Set the switches."""
        with self._change() as change:
            change.set_control(control)
            change.add_event("control", rules.control_detail(control, reason))

    def candidates(self) -> Candidates:
        """Return what hosts may need next."""
        found = self._rows("SELECT records FROM candidates WHERE deployment = ?")
        return rules.candidates_from_text(found[0][0]) if found else Candidates()

    def suggest(self, candidates: Candidates) -> None:
        """Name what hosts may need next."""
        with self._change() as change:
            row = (self.deployment, rules.candidates_to_text(candidates))
            change.connection.execute("INSERT OR REPLACE INTO candidates VALUES (?, ?)", row)
            change.bump()

    def version(self) -> int:
        """Return a number that grows with each change that a reader may wait for."""
        ((version,),) = self._rows("SELECT version FROM deployment WHERE name = ?")
        return int(version)

    def wait(self, version: int, timeout_s: float) -> int:
        """Return once the version differs from ``version``, or after ``timeout_s``.

        SQLite sends no notification between processes, so this polls every 20 ms, at about 10 us
        each.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (found := self.version()) == version:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(_POLL_S, left_s))
        return found

    def close(self) -> None:
        """Close the file and end every wait; the store cannot be used after."""
        self._file.close()
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def _change(self, fence: int | None = None) -> Iterator[Change]:
        with self._file.write() as connection:
            change = Change(connection, self.deployment, self._clock())
            change.check_fence(fence)
            yield change
        if change.is_bumped:
            with self._changed:
                self._changed.notify_all()

    def _latest_lease(self, of: LeaseOf = "controller") -> Lease | None:
        found = self._rows(rows.LEASE, of)
        return rows.lease_of(found[0]) if found else None

    def _rows(self, query: str, *values: Any) -> list[Any]:
        """All rows of a query whose first parameter is the deployment."""
        return self._file.rows(query, self.deployment, *values)
