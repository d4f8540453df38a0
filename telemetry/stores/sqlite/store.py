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
from math import inf
from pathlib import Path
from threading import Condition
from typing import Any, TypeVar

from eplb.clock import Clock
from eplb.core.load import LoadSample
from eplb.migration.build import Migration
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery, SurvivorReport
from eplb.versions import Announcement
from telemetry.live import LiveState
from telemetry.proposals import (
    Content,
    Proposal,
    content_from_bytes,
    proposal_from_text,
    standing,
)
from telemetry.records.live_codec import live_from_text
from telemetry.records.rank_state_codec import rank_state_from_text, rank_state_to_text
from telemetry.records.sample_codec import SAMPLE_VERSION
from telemetry.retention.rollup import Rollup
from telemetry.store import (
    CommittedPlacement,
    Details,
    Event,
    Lease,
    LeaseOf,
    RankState,
    RunInfo,
    Task,
    TaskState,
)
from telemetry.stores import commit_rules
from telemetry.stores.deciding_store import DecidingStore, Ledger
from telemetry.stores.lease_watch import LeaseWatch
from telemetry.stores.sqlite import queries
from telemetry.stores.sqlite.change import Change
from telemetry.stores.sqlite.file import SqliteFile
from telemetry.stores.sqlite.placements import PlacementReader
from telemetry.stores.sqlite.samples import SampleTables

_POLL_S = 0.02

T = TypeVar("T")
MAX_ID = 2**63 - 1  # of a row, by SQLite


class SqliteStore(DecidingStore):
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
        clock: Clock | None = None,
        monotonic: Clock | None = None,
        sample_version: int = SAMPLE_VERSION,
    ) -> None:
        self.deployment = deployment
        self._clock = clock or time.time
        self._watch = LeaseWatch(monotonic or clock)
        self._file = SqliteFile(Path(path), deployment, busy_timeout_s)
        self._changed = Condition()  # notified by this object's own changes
        self._placements = PlacementReader(self._file, deployment)
        self._samples = SampleTables(self._file, deployment, sample_version)

    def current_run(self) -> RunInfo | None:
        """Return the latest start."""
        found = self._rows(f"{queries.RUN} ORDER BY id DESC LIMIT 1")
        return queries.run_of(found[0]) if found else None

    def runs(self) -> list[RunInfo]:
        """Return every start on record, oldest first."""
        return [queries.run_of(row) for row in self._rows(f"{queries.RUN} ORDER BY id")]

    def report(self, state: RankState) -> None:
        """Replace the latest report of a rank."""
        row = (self.deployment, state.run, state.rank, rank_state_to_text(state))
        with self._file.write() as connection:
            connection.execute(queries.REPLACE_RANK_STATE, row)

    def rank_states(self, run: str) -> list[RankState]:
        """Return the last report of every rank."""
        return [rank_state_from_text(text) for (text,) in self._rows(queries.RANK_STATES, run)]

    def append(self, samples: Sequence[LoadSample]) -> int:
        """Add samples."""
        commit_rules.check_samples(self.deployment, samples)
        return self._samples.append(samples)

    def samples(
        self, run: str, *, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) past the cursor ``after``."""
        return self._samples.past(run, after, limit)

    def samples_before(
        self, before_time: float, *, since: float = -inf, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of every run, taken from ``since`` to ``before_time``."""
        return self._samples.between(since, before_time, after, limit)

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

    def committed(self) -> CommittedPlacement | None:
        """Return the placement that serves."""
        return self._placements.committed()

    def placement(self, generation: int) -> CommittedPlacement | None:
        """Return the placement of a generation."""
        return self._placements.placement(generation)

    def placements(
        self, limit: int = 100, *, before: int | None = None
    ) -> list[CommittedPlacement]:
        """Return committed placements, newest first."""
        return self._placements.placements(limit, MAX_ID if before is None else before)

    def published(self) -> Migration | None:
        """Return the open migration."""
        return self._placements.published()

    def proposals(self) -> list[Proposal]:
        """Return all proposals, oldest first."""
        found = [proposal_from_text(text) for (text,) in self._rows(queries.PROPOSALS)]
        latest = self._rows(queries.LATEST_HASH)  # after them: a base never serves again
        committed = (latest[0][0], latest[0][1]) if latest else None
        return [standing(one, self._clock(), committed) for one in found]

    def proposal_content(self, proposal_id: int) -> Content | None:
        """Return the rest of a proposal."""
        found = self._rows(queries.PROPOSAL_CONTENT, proposal_id)
        return content_from_bytes(found[0][0]) if found else None

    def add_survivor_report(self, report: SurvivorReport) -> None:
        """Write a survivor report."""
        with self._change() as change:
            key = (self.deployment, report.run, report.membership, report.rank)
            change.connection.execute(
                queries.REPLACE_REPORT, (*key, commit_rules.report_to_text(report))
            )
            change.wake()

    def survivor_reports(self, run: str, membership: int) -> list[SurvivorReport]:
        """Return what survivors of a group wrote, by rank."""
        return [
            commit_rules.report_from_text(text)
            for (text,) in self._rows(queries.REPORTS, run, membership)
        ]

    def recovery(self) -> Recovery | None:
        """Return the latest record."""
        found = self._rows(queries.RECOVERY)
        return commit_rules.recovery_from_text(found[0][0]) if found else None

    def add_event(self, kind: str, detail: Details) -> int:
        """Append an event."""
        with self._change() as change:
            return change.add_event(kind, detail)

    def events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return events past the id ``after``."""
        return [queries.event_of(row) for row in self._rows(queries.EVENTS, after, limit)]

    def latest_events(self, *, before: int | None = None, limit: int = 1000) -> list[Event]:
        """Return events newest first."""
        past_all = MAX_ID if before is None else before
        return [queries.event_of(row) for row in self._rows(queries.LATEST_EVENTS, past_all, limit)]

    def prune_events(self, keep: int) -> int:
        """Delete all but the latest ``keep`` events."""
        with self._file.write() as connection:
            old = {"deployment": self.deployment, "keep": max(0, keep)}
            return connection.execute(queries.PRUNE_EVENTS, old).rowcount

    def tasks(self, state: TaskState, *, after: int = 0, limit: int = 1000) -> list[Task]:
        """Return tasks in a state, oldest first."""
        return [queries.task_of(row) for row in self._rows(queries.TASKS, state, after, limit)]

    def task(self, task_id: int) -> Task | None:
        """Return a task."""
        found = self._rows(f"{queries.TASK} AND id = ?", task_id)
        return queries.task_of(found[0]) if found else None

    def live(self) -> LiveState:
        """Return the live settings."""
        found = self._rows(queries.LIVE)
        return live_from_text(found[0][0]) if found else LiveState()

    def candidates(self) -> Candidates:
        """Return what hosts may need next."""
        found = self._rows("SELECT records FROM candidates WHERE deployment = ?")
        return commit_rules.candidates_from_text(found[0][0]) if found else Candidates()

    def suggest(self, candidates: Candidates) -> None:
        """Name what hosts may need next."""
        with self._change() as change:
            row = (self.deployment, commit_rules.candidates_to_text(candidates))
            change.connection.execute("INSERT OR REPLACE INTO candidates VALUES (?, ?)", row)
            change.wake()

    def announced(self) -> list[Announcement]:
        """Return what was announced, oldest first."""
        return commit_rules.announcements_from_texts(
            text for (text,) in self._rows(queries.ANNOUNCED)
        )

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

    def claim(self, *, fence: int | None = None) -> Task | None:
        """Claim the oldest queued task."""
        # Looked at without the write lock first: a controller asks far more often than it gets.
        if not self.tasks("queued", limit=1):
            commit_rules.check_fence(fence, self._latest_lease("controller"))
            return None
        return super().claim(fence=fence)

    def _decide(self, what: str, decision: Callable[[Ledger], T]) -> T:
        with self._change() as change:
            return decision(change)

    @contextmanager
    def _change(self) -> Iterator[Change]:
        with self._file.write() as connection:
            change = Change(connection, self.deployment, self._clock())
            yield change
        if change.is_bumped:
            with self._changed:
                self._changed.notify_all()

    def _latest_lease(self, of: LeaseOf) -> Lease | None:
        found = self._rows(queries.LEASE, of)
        return queries.lease_of(found[0]) if found else None

    def _rows(self, query: str, *values: Any) -> list[Any]:
        """All rows of a query whose first parameter is the deployment."""
        return self._file.rows(query, self.deployment, *values)
