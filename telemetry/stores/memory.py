"""A store in the memory of one process: the shipped fake, for tests, simulations and one process.

It keeps every promise of LoadStore except survival.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import inf
from threading import Condition
from typing import TypeVar

from eplb.clock import Clock
from eplb.core.load import LoadSample
from eplb.errors import StoreError
from eplb.migration.build import Migration
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery, SurvivorReport
from eplb.versions import Announcement
from telemetry.live import LiveState
from telemetry.proposals import Content, Proposal, standing
from telemetry.records.rank_state_codec import rank_state_from_text, rank_state_to_text
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
from telemetry.stores.memory_ledger import MemoryLedger
from telemetry.stores.memory_tables import RollupTable, SampleTable

T = TypeVar("T")


class MemoryStore(DecidingStore):
    """LoadStore over plain lists and dictionaries; one lock guards them all.

    Args:
        clock: seconds since the epoch.
        monotonic: for how long leases stand; if not given, ``clock`` where that is.
    """

    def __init__(
        self,
        deployment: str,
        *,
        clock: Clock | None = None,
        monotonic: Clock | None = None,
    ) -> None:
        self.deployment = deployment
        self._changed = Condition()
        self._is_closed = False
        self._watch = LeaseWatch(monotonic or clock)
        self.ledger = MemoryLedger(clock or time.time)
        self._rank_states: dict[tuple[str, int], RankState] = {}
        self._samples = SampleTable()
        self._rollups = RollupTable()
        self._candidates = Candidates()
        self._reports: dict[tuple[str, int, int], SurvivorReport] = {}  # by run, membership, rank

    def current_run(self) -> RunInfo | None:
        """Return the latest start."""
        with self._use():
            return next(reversed(self.ledger.runs.values()), None)

    def runs(self) -> list[RunInfo]:
        """Return every start on record, oldest first."""
        with self._use():
            return list(self.ledger.runs.values())

    def report(self, state: RankState) -> None:
        """Replace the latest report of a rank."""
        state = rank_state_from_text(rank_state_to_text(state))
        with self._use():
            self._rank_states[state.run, state.rank] = state

    def rank_states(self, run: str) -> list[RankState]:
        """Return the last report of every rank."""
        with self._use():
            states = [state for state in self._rank_states.values() if state.run == run]
        return sorted(states, key=lambda state: state.rank)

    def append(self, samples: Sequence[LoadSample]) -> int:
        """Add samples."""
        commit_rules.check_samples(self.deployment, samples)
        with self._use():
            return self._samples.append(samples)

    def samples(
        self, run: str, *, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) past the cursor ``after``."""
        with self._use():
            return self._samples.past(run, after)[:limit]

    def samples_before(
        self, before_time: float, *, since: float = -inf, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) of every run, taken from ``since`` to ``before_time``."""
        with self._use():
            return self._samples.between(since, before_time, after)[:limit]

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

    def committed(self) -> CommittedPlacement | None:
        """Return the placement that serves."""
        with self._use():
            return self.ledger.latest()

    def placement(self, generation: int) -> CommittedPlacement | None:
        """Return the placement of a generation."""
        with self._use():
            return self.ledger.placements.get(generation)

    def placements(
        self, limit: int = 100, *, before: int | None = None
    ) -> list[CommittedPlacement]:
        """Return committed placements, newest first."""
        with self._use():
            newest_first = reversed(self.ledger.placements.items())
            most = inf if before is None else before
            older = (one for generation, one in newest_first if generation < most)
            return list(islice(older, limit))

    def published(self) -> Migration | None:
        """Return the open migration."""
        with self._use():
            return self.ledger.published

    def proposals(self) -> list[Proposal]:
        """Return all proposals, oldest first."""
        with self._use():
            now, committed = self.ledger.time, self.ledger.committed()
            return [standing(one, now, committed) for one in self.ledger.proposals()]

    def proposal_content(self, proposal_id: int) -> Content | None:
        """Return the rest of a proposal."""
        with self._use():
            return self.ledger.contents.get(proposal_id)

    def add_survivor_report(self, report: SurvivorReport) -> None:
        """Write a survivor report."""
        with self._use():
            self._reports[report.run, report.membership, report.rank] = report
            self.ledger.wake()

    def survivor_reports(self, run: str, membership: int) -> list[SurvivorReport]:
        """Return what survivors of a group wrote, by rank."""
        with self._use():
            found = [
                reports for key, reports in self._reports.items() if key[:2] == (run, membership)
            ]
        return sorted(found, key=lambda reports: reports.rank)

    def recovery(self) -> Recovery | None:
        """Return the latest record."""
        with self._use():
            return self.ledger.latest_recovery

    def add_event(self, kind: str, detail: Details) -> int:
        """Append an event."""
        with self._use():
            return self.ledger.add_event(kind, detail)

    def events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return events past the id ``after``."""
        with self._use():
            return self.ledger.events.past(after)[:limit]

    def latest_events(self, *, before: int | None = None, limit: int = 1000) -> list[Event]:
        """Return events newest first."""
        with self._use():
            older = [
                e for e in reversed(self.ledger.events.past(0)) if before is None or e.id < before
            ]
            return older[:limit]

    def prune_events(self, keep: int) -> int:
        """Forget all but the latest ``keep`` events."""
        with self._use():
            return self.ledger.events.prune(keep)

    def tasks(self, state: TaskState, *, after: int = 0, limit: int = 1000) -> list[Task]:
        """Return tasks in a state, oldest first."""
        with self._use():
            return [task for task in self.ledger.tasks[max(0, after) :] if task.state == state][
                :limit
            ]

    def task(self, task_id: int) -> Task | None:
        """Return a task."""
        with self._use():
            return self.ledger.task(task_id)

    def live(self) -> LiveState:
        """Return the live settings."""
        with self._use():
            return self.ledger.live_state

    def candidates(self) -> Candidates:
        """Return what hosts may need next."""
        with self._use():
            return self._candidates

    def suggest(self, candidates: Candidates) -> None:
        """Name what hosts may need next."""
        with self._use():
            self._candidates = candidates
            self.ledger.wake()

    def announced(self) -> list[Announcement]:
        """Return what was announced, oldest first."""
        with self._use():
            return self.ledger.announced()

    def version(self) -> int:
        """Return a number that grows with each change that a reader may wait for."""
        with self._use():
            return self.ledger.version

    def wait(self, version: int, timeout_s: float) -> int:
        """Return once the version differs from ``version``, or after ``timeout_s``."""
        with self._use():
            self._changed.wait_for(
                lambda: self._is_closed or self.ledger.version != version, timeout_s
            )
            self._check_open()
            return self.ledger.version

    def close(self) -> None:
        """End every wait; the store cannot be used after."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _decide(self, what: str, decision: Callable[[Ledger], T]) -> T:
        with self._use():
            return decision(self.ledger)

    def _latest_lease(self, of: LeaseOf) -> Lease | None:
        with self._use():
            return self.ledger.latest_lease(of)

    @contextmanager
    def _use(self) -> Iterator[None]:
        with self._changed:
            self._check_open()
            before = self.ledger.version
            yield
            if self.ledger.version != before:
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"the memory store of {self.deployment!r} is closed")
