"""The store interface: the only shared memory of ranks, controller, API and simulator.

All processes communicate through a LoadStore. Ranks append samples and report their state. The
controller folds samples, publishes a migration and watches it. The ranks commit the serving
placement after the swap. ``telemetry/stores/memory.py`` is the shipped fake,
``telemetry/stores/sqlite/store.py`` the embedded default; one contract test covers every store.

Placements and migrations are compare-and-set: a decision on an old generation is rejected. The
holder of the lease is the only controller: writes of a previous holder are rejected.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Protocol

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.decision.expert_times import ExpertTimes
from eplb.decision.pace import StepTimes
from eplb.errors import ConfigError, StoreError
from eplb.migration.build import Migration
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery, SurvivorReport
from eplb.versions import Announcement
from telemetry.live import Control as Control
from telemetry.live import LiveSettings, LiveState, Value
from telemetry.proposals import Approval, Content, Proposal
from telemetry.records.typed_json import from_record
from telemetry.retention.rollup import Rollup

Details = Mapping[str, Any]  # JSON-ready values
Outcome = Literal["committed", "aborted", "rejected"]
TaskState = Literal["queued", "running", "done", "failed"]
LeaseOf = Literal["controller", "deployment"]
STEP_TIMES = "step_times"  # of a rank's details: eplb.decision.pace.StepTimes
EXPERT_TIMES = "expert_times"  # the same: eplb.decision.expert_times.ExpertTimes
BATCH = "batch"  # of a rank's details: which parts act on its batches; missing: none
BATCH_FAULTS = "batch_faults"  # of a rank's details: what these parts counted, by kind
REPORT_EVERY_S = "report_every_s"  # of a rank's details: its longest time between two reports
MISSED_REPORTS, LEAST_SILENCE_S = 3, 10.0  # after which a rank counts as silent


@dataclass(frozen=True)
class RunInfo:
    """One start of the serving processes: what a reader needs to understand its samples."""

    run: str
    time: float  # seconds since the epoch
    model: Details  # eplb.migration.serialisation.model_to_dict
    topology: Details  # eplb.migration.serialisation.topology_to_dict
    window_steps: int
    window_seconds: float = 0.0  # 0: windows are of steps


@dataclass(frozen=True)
class RankState:
    """The latest report of a rank."""

    run: str
    rank: int
    time: float
    step: int
    generation: int
    phase: str  # of the phase machine: idle, preload, stage, swap, aborted
    plan_id: int  # 0 when it works on no migration
    applied: int  # transactions of that migration that serve on this rank
    sequence: int  # samples written so far
    weights_version: int  # of the weights that serve
    prepared: int = 0  # transactions of that migration that are staged and verified
    frozen: str = ""  # why migrations are disabled on this rank; "": they are not
    digest_failures: int = 0  # records and live slots with wrong bytes
    mover_failures: int = 0
    progress_age_s: float = 0.0  # since the last progress of the thread with the least
    progress_of: str = ""  # that thread, and its work
    detail: Details = field(default_factory=dict)  # for display: bytes_by_source, swap pauses, ...

    @property
    def report_every_s(self) -> float:
        """Longest time between two reports by this rank's own settings; 0: it does not tell."""
        return float(self.detail.get(REPORT_EVERY_S, 0.0))

    @property
    def step_times(self) -> StepTimes | None:
        """Times of its steps around its latest migration; None: its release reports none.

        Raises:
            StoreError: a figure is missing, unknown, or of another type.
        """
        found = self.detail.get(STEP_TIMES)
        if found is None:
            return None
        return from_record(StepTimes, found, f"rank {self.rank}: {STEP_TIMES} of its report")

    @property
    def expert_times(self) -> ExpertTimes | None:
        """Time of its experts by their rows; None: its release or this rank measured none.

        Raises:
            StoreError: a figure is missing, unknown, of another type, or no time.
        """
        found = self.detail.get(EXPERT_TIMES)
        if found is None:
            return None
        where = f"rank {self.rank}: {EXPERT_TIMES} of its report"
        try:
            return from_record(ExpertTimes, found, where)
        except (ConfigError, TypeError) as exc:
            raise StoreError(f"{where}: {exc}") from exc

    @property
    def silent_after_s(self) -> float:
        """Age of a report at which its rank counts as silent."""
        return max(LEAST_SILENCE_S, MISSED_REPORTS * self.report_every_s)


@dataclass(frozen=True)
class Event:
    """An event, for operators and the audit."""

    id: int  # only grows
    time: float
    kind: str
    detail: Details


@dataclass(frozen=True)
class TaskResult:
    """What came of a task."""

    error: str = ""  # why it failed
    plan_id: int = 0  # of the migration that was published for it; 0: none
    detail: Details = field(default_factory=dict)  # for display, by the kind of task
    refusal: str = ""  # one of telemetry.refusals.Refusal; "": none is known


@dataclass(frozen=True)
class Task:
    """A request that the controller works off, e.g. a rebalance asked for over HTTP."""

    id: int
    time: float
    kind: str
    request: Details
    state: TaskState
    result: TaskResult = TaskResult()


@dataclass(frozen=True)
class Lease:
    """The right to act as the deployment's one controller, or to run it at all, for a while.

    ``token`` is the fencing token: it grows with each new holder and is never given out again, not
    by a store that lost its contents either (``telemetry.stores.commit_rules.first_token``). A
    controller passes it with each write; once another controller holds the lease, that is refused.
    """

    holder: str
    token: int  # 1 or more
    expires: float  # seconds since the epoch, by the store's clock, for display; see lease_watch
    ttl_s: float  # without being renewed; 0: given up
    since: float  # when this holder took it, by the store's clock
    renewals: int  # grows with each change
    of: LeaseOf = "controller"


@dataclass(frozen=True)
class CommittedPlacement:
    """One line of the history of placements."""

    placement: Placement
    time: float
    plan_id: int  # 0: not from a plan
    reason: str


class RunStore(Protocol):
    """Starts of the serving processes, and the last report of each rank."""

    @property
    def deployment(self) -> str:
        """Name of the deployment of this store object."""

    def begin_run(self, info: RunInfo) -> None:
        """Record a start of the serving processes; the same again changes nothing.

        It announces this program's version as that of the ranks.

        Raises:
            StoreError: another start has this name; its samples would pass for repeats.
        """

    def current_run(self) -> RunInfo | None:
        """Return the latest start, or None before the first."""

    def runs(self) -> list[RunInfo]:
        """Return every start on record, oldest first."""

    def report(self, state: RankState) -> None:
        """Replace the latest report of a rank."""

    def rank_states(self, run: str) -> list[RankState]:
        """Return the last report of every rank of a run, by rank."""


class SampleStore(Protocol):
    """Samples of ranks, in order of arrival."""

    def append(self, samples: Sequence[LoadSample]) -> int:
        """Add samples and return how many were new; a repeated (run, rank, sequence) is not."""

    def samples(
        self, run: str, *, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return (cursor, sample) in order of arrival, those past the cursor ``after``.

        A record that cannot be read is left out and counted in ``refused``. Only when there is
        nothing more past the cursor is the result empty.
        """

    def samples_before(
        self, before_time: float, *, since: float = -inf, after: int = 0, limit: int = 10_000
    ) -> list[tuple[int, LoadSample]]:
        """Return what ``prune(before_time)`` would forget, of every run; else as ``samples``.

        Args:
            since: samples taken before that are left out, and not read.
        """

    def sample_counts(self, run: str) -> dict[int, int]:
        """Return how many samples of each rank were stored, those included that were pruned."""

    def prune(self, before_time: float) -> int:
        """Forget samples taken before ``before_time``, of any run, and return how many."""

    def refused(self) -> dict[str, int]:
        """Return how many stored records this object could not read, by reason.

        Reasons: "damaged", and "version" for one written by a version that is not known here. A
        record that is read again is not counted again.
        """


class RollupStore(Protocol):
    """What is kept of samples that were pruned."""

    def add_rollups(self, rollups: Sequence[Rollup]) -> int:
        """Add roll-ups, all or none, and return how many were new.

        Of one (run, phase, seconds, start) the first stands.
        """

    def rollups(self, seconds: int, *, after: float = -1.0, limit: int = 10_000) -> list[Rollup]:
        """Return roll-ups of that length that start past ``after``, of every run, oldest first."""

    def prune_rollups(self, seconds: int, before_time: float) -> int:
        """Forget roll-ups of that length that ended by ``before_time``, and return how many."""


class LeaseStore(Protocol):
    """Who acts as the one controller, and who owns the deployment."""

    def acquire_lease(self, holder: str, ttl_s: float, of: LeaseOf = "controller") -> Lease | None:
        """Acquire a lease, or renew one's own; None while another holder has it.

        Renewing keeps the token as long as no other holder had the lease in between, even if it had
        expired. A takeover gets a greater token. Two processes must not share a name.
        ``telemetry/stores/lease_watch.py`` decides when another holder's lease is over.

        Raises:
            ConfigError: a holder without a name, or a time to live that is not positive.
        """

    def release_lease(self, lease: Lease) -> bool:
        """Release the lease; False if it has expired, was released or has another holder."""

    def lease(self, of: LeaseOf = "controller") -> Lease | None:
        """Return the lease that holds now, as far as this object has seen, or None."""

    def latest_lease(self, of: LeaseOf = "controller") -> Lease | None:
        """Return the lease that was given out last, also where it is over; None before any."""


class PlacementStore(Protocol):
    """Committed placements, and the open migration."""

    def committed(self) -> CommittedPlacement | None:
        """Return the placement that serves, or None before the first."""

    def placement(self, generation: int) -> CommittedPlacement | None:
        """Return the placement that was committed as this generation, or None."""

    def placements(
        self, limit: int = 100, *, before: int | None = None
    ) -> list[CommittedPlacement]:
        """Return committed placements below the generation ``before``, newest first; None: all."""

    def commit(
        self,
        placement: Placement,
        *,
        expected: int | None,
        plan_id: int = 0,
        reason: str,
        outcome: Outcome = "committed",
    ) -> bool:
        """Make ``placement`` the committed one and close the migration ``plan_id``, atomically.

        Every rank calls this after a swap; the first writes. Returns False when this very
        placement is committed already. A migration with another plan id that is still open is
        rejected, because its base serves no longer.

        Args:
            expected: the generation that this placement follows; None for the first of all.

        Raises:
            StaleGeneration: something else is committed, or generations do not grow; or survivors
                of a death dropped the migration ``plan_id``, and a dead rank's last write is late.
        """

    def next_plan_id(self) -> int:
        """Reserve a plan id that was never given out before."""

    def publish(
        self, migration: Migration, *, fence: int | None = None, approval: Approval | None = None
    ) -> None:
        """Offer a migration to the ranks.

        Args:
            fence: the token of the writer's lease, run out or not; None for a writer that needs
                none.
            approval: of the proposal that it carries out, which is approved in the same change.

        Raises:
            StaleGeneration: its base is not the committed placement, or another is still open.
            ProposalEnded: the proposal is not open any more, or there is none.
            FencedOut: ``fence`` is not the newest token: another controller has taken the lease
                since, or the store never gave this token out. Nothing is changed.
        """

    def published(self) -> Migration | None:
        """Return the open migration, or None."""

    def withdraw(
        self, plan_id: int, *, outcome: Outcome, reason: str, fence: int | None = None
    ) -> bool:
        """Close an open migration of which nothing was applied; False when it was not open.

        Raises:
            FencedOut: as ``publish``.
        """


class ProposalStore(Protocol):
    """Plans that wait for an approval; see ``telemetry/proposals.py``."""

    def propose(
        self, proposal: Proposal, content: Content, *, fence: int | None = None
    ) -> Proposal:
        """Store a proposal and return it with its id; the oldest are forgotten.

        Raises:
            StaleGeneration: its base is not the committed placement.
            FencedOut: as ``publish``.
        """

    def reject(self, proposal_id: int, *, by: str, reason: str) -> Proposal:
        """End an open proposal without carrying it out.

        Raises:
            ProposalEnded: it is not open any more, or there is none.
        """

    def proposals(self) -> list[Proposal]:
        """Return all that are kept, oldest first, each in the state that it has now."""

    def proposal_content(self, proposal_id: int) -> Content | None:
        """Return the rest of a proposal; None: there is no such proposal."""


class RecoveryStore(Protocol):
    """What survivors know after a death, and after a store lost its contents."""

    def add_survivor_report(self, report: SurvivorReport) -> None:
        """Write a survivor report, which replaces an earlier one of the same run and membership."""

    def survivor_reports(self, run: str, membership: int) -> list[SurvivorReport]:
        """Return what survivors of a group wrote, by rank."""

    def recover(self, record: Recovery, *, expected_membership: int) -> Recovery | None:
        """Write the record that follows the group ``expected_membership``, unless there is one.

        If the record applies no transaction of the open migration, that migration is aborted with
        it, so that it cannot be committed any more.

        Returns:
            The first writer's record. None: a newer generation than the record's is committed, so
            read and decide again.

        Raises:
            StaleGeneration: another run recovered, or this group's successor has broken too.
        """

    def recovery(self) -> Recovery | None:
        """Return the latest record, or None before the first death."""

    def restore(
        self,
        run: RunInfo,
        placement: Placement,
        live: LiveState,
        *,
        last_plan_id: int,
        reason: str,
    ) -> bool:
        """Restore the state that a rank knows in a store that lost its contents, atomically.

        Of all callers one writes. False: a placement is committed, or another run is current;
        nothing is changed.

        Args:
            placement: what serves; the next commit follows its generation.
            live: the settings as the caller has read them last.
            last_plan_id: the newest that the caller has seen; later ids are well above it.
        """


class EventStore(Protocol):
    """What happened, for people and for the audit."""

    def add_event(self, kind: str, detail: Details) -> int:
        """Append an event and return its id."""

    def events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return events past the id ``after``, oldest first."""

    def latest_events(self, *, before: int | None = None, limit: int = 1000) -> list[Event]:
        """Return events below the id ``before``, newest first; None: from the newest on."""

    def prune_events(self, keep: int) -> int:
        """Forget all but the latest ``keep`` events, and return how many; ids are not reused."""


class TaskStore(Protocol):
    """Requests that the controller works off."""

    def submit(self, kind: str, request: Details) -> Task:
        """Queue a task."""

    def claim(self, *, fence: int | None = None) -> Task | None:
        """Claim the oldest queued task, which is then running; None if there is none.

        Raises:
            FencedOut: as ``publish``.
        """

    def tasks(self, state: TaskState, *, after: int = 0, limit: int = 1000) -> list[Task]:
        """Return tasks in a state past the id ``after``, oldest first."""

    def finish(
        self, task_id: int, state: TaskState, result: TaskResult, *, fence: int | None = None
    ) -> None:
        """End a task with its result.

        Raises:
            FencedOut: as ``publish``.
        """

    def cancel(self, task_id: int, *, reason: str) -> bool:
        """Fail a task that is still queued; False for one that was claimed, ended or is unknown.

        A task is claimed or cancelled, never both.
        """

    def task(self, task_id: int) -> Task | None:
        """Return a task, or None when there is no such task."""


class LiveStore(Protocol):
    """Live settings, the switches that every process obeys among them."""

    def live(self) -> LiveState:
        """Return the live settings."""

    def change_live(
        self,
        changes: Mapping[str, Value | None],
        *,
        expected: int | None = None,
        reason: str,
        lasts_s: float | None = None,
    ) -> LiveState:
        """Set live values, and return what applies then; the change is an event.

        Args:
            changes: by name; None: the static value applies again.
            expected: the revision that the caller has read; None: whatever it is now.
            reason: stored with the change.
            lasts_s: after which the values are removed; None: they stay.

        Raises:
            ConfigError: an unknown setting, or a value of another type or out of range.
            StaleRevision: another change came first.
        """

    def expire_live(self) -> LiveState:
        """Remove live values whose time has passed by the store's clock; each end is an event.

        A controller calls this in each turn. Until then such a value applies: every process, those
        of earlier releases too, follows the same switches.
        """

    def set_static(self, static: LiveSettings, *, reason: str) -> LiveState:
        """Set with what the deployment was started; live values stay, and win.

        Not those of a switch that lets weights move: the start may forbid it.
        """

    def control(self) -> Control:
        """Return the switches that apply."""

    def set_control(self, control: Control, *, reason: str) -> None:
        """Set both switches as live values, at whatever revision."""


class ControlStore(LiveStore, Protocol):
    """Live settings, and hints to the hosts."""

    def candidates(self) -> Candidates:
        """Return what hosts may need next, as the controller sees it; at first nothing."""

    def suggest(self, candidates: Candidates) -> None:
        """Set the records that hosts may need next; the latest call counts.

        It is no event: it changes often, and only reading ahead depends on it.
        """


class WaitStore(Protocol):
    """Waiting for a change."""

    def version(self) -> int:
        """Return a number that grows with each change that a reader may wait for.

        That is every event, a claimed task, survivor report and candidates; not a sample, a rank's
        report or a plan id.
        """

    def wait(self, version: int, timeout_s: float) -> int:
        """Return once the version differs from ``version``, or after ``timeout_s``."""


class VersionStore(Protocol):
    """Versions of the processes of a deployment."""

    def announce(self, mine: Announcement) -> None:
        """Record the version of a process; of each component the latest 256 names are kept."""

    def announced(self) -> list[Announcement]:
        """Return what was announced, oldest first, by processes that have ended too."""


class ReporterStore(RunStore, SampleStore, Protocol):
    """What the reporter of a rank writes to."""


class ElectionStore(LeaseStore, EventStore, Protocol):
    """What candidates for the one controller write to."""


def events_backwards(store: EventStore, kinds: Container[str]) -> Iterator[Event]:
    """Give events of some kinds, newest first, a page at a time as long as more are asked for."""
    before = None
    while page := store.latest_events(before=before):
        yield from (event for event in page if event.kind in kinds)
        before = page[-1].id


class LoadStore(
    RunStore,
    SampleStore,
    RollupStore,
    LeaseStore,
    PlacementStore,
    ProposalStore,
    RecoveryStore,
    EventStore,
    TaskStore,
    ControlStore,
    WaitStore,
    VersionStore,
    Protocol,
):
    """One deployment's memory: the interfaces above, each of which a consumer may take alone.

    Every method raises StoreError when the store itself fails (disk full, read-only, damaged).
    Methods may be called from any thread.
    """

    def close(self) -> None:
        """Release files and threads; what was acknowledged stays."""
