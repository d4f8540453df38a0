"""Starts of the serving processes, the last report of each rank, and versions of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from eplb.decision.expert_times import ExpertTimes
from eplb.decision.pace import StepTimes
from eplb.errors import StoreError
from eplb.versions import RANKS, Announcement, announcement_from_dict
from telemetry.state.backend import HEAD, Change, Reader, Table, Value, text_of
from telemetry.state.codec import as_stored, from_json, from_record, known_fields, to_json
from telemetry.state.membership import LATEST_CHANGE, note_run
from telemetry.state.part import RECOVERY, STARTED, Part, Records, epoch_in

Details = Mapping[str, Any]  # JSON-ready values
STEP_TIMES = "step_times"  # rank detail: eplb.decision.pace.StepTimes
STEP_MS = "step_ms"  # rank detail: median time of its latest steps
WAIT_MS = "wait_ms"  # the same: of that, the host's wait for exchanges with other ranks
EXPERT_TIMES = "expert_times"  # the same: eplb.decision.expert_times.ExpertTimes
GROUP_STAYS = "group_stays"  # rank detail: why its group cannot change; "": it can
CLOCK_OFFSET_S = "clock_offset_s"  # rank detail: time by which its host's clock is ahead
REPORT_EVERY_S = "report_every_s"  # rank detail: longest time between two reports
HAS_ENDED = "has_ended"  # rank detail: it has left its serving loop as it was asked
PROGRESS_THREAD = "progress_thread"  # rank detail: the thread that ``progress_of`` begins with
STEP_THREAD = "step"  # such a thread: the one that serves
RUN_BEGAN = "run"  # kind of an event: serving processes started, or go on as another group
MISSED_REPORTS, LEAST_SILENCE_S = 3, 10.0  # after which a rank counts as silent
KEPT_ANNOUNCEMENTS = 256  # announcements kept of each component, one a host or start

ANNOUNCED = Table("announced")  # component and name -> version
GROUPS = Table("groups")  # deployment of an EP group -> the engine that has it, "" for the only one


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
class RunBegan:
    """Detail of the event of a start."""

    run: str
    window_steps: int


@dataclass(frozen=True)
class RankFigures:
    """What a rank reports beside its state; None: it does not."""

    step_ms: float | None = None  # median time of its latest steps
    wait_ms: float | None = None  # of that, the host's wait for exchanges with other ranks
    has_ended: bool | None = None  # it has left its serving loop as it was asked
    swap_pauses_ms: tuple[float, ...] | None = None  # the latest
    staged: int | None = None  # experts of the open migration that are staged
    to_stage: int | None = None  # of so many
    experts_moved: int | None = None  # into its slots
    samples_lost: int | None = None
    store_errors: int | None = None
    bytes_by_source: Mapping[str, int] | None = None  # of those experts
    scrubbed: Mapping[str, int] | None = None  # live slots that were checked, by result
    first_token: float | None = None  # seconds since the epoch


@dataclass(frozen=True)
class RankState:
    """The latest report of a rank."""

    run: str
    rank: int
    time: float  # seconds since the epoch, by the store's clock
    step: int
    generation: int
    phase: str  # phase of the migration: idle, preload, stage, swap, aborted
    plan_id: int  # 0 when it works on no migration
    applied: int  # transactions of that migration that serve on this rank
    sequence: int  # samples written so far
    weights_version: int  # version of the weights that serve
    prepared: int = 0  # transactions of that migration that are staged and verified
    frozen: str = ""  # why migrations are disabled on this rank; "": they are not
    digest_failures: int = 0  # records and live slots with wrong bytes
    mover_failures: int = 0
    progress_age_s: float = 0.0  # since the last progress of the thread with the least
    progress_of: str = ""  # that thread, and its work
    # What ``RankFigures`` names, and what only people read.
    detail: Details = field(default_factory=dict)

    @cached_property
    def figures(self) -> RankFigures:
        """What it reports beside its state; nothing where a figure is of another type."""
        try:
            return from_record(
                RankFigures, known_fields(RankFigures, self.detail), f"report of rank {self.rank}"
            )
        except StoreError:
            return RankFigures()

    @property
    def report_every_s(self) -> float:
        """Longest time between two reports by this rank's own settings; 0: it does not tell."""
        return self._seconds(REPORT_EVERY_S)

    @property
    def progress_thread(self) -> str:
        """The thread with the least progress; "": the rank does not tell."""
        return str(self.detail.get(PROGRESS_THREAD, ""))

    @property
    def clock_offset_s(self) -> float:
        """Seconds by which the clock of its host is ahead of the store's; below 0: behind."""
        return self._seconds(CLOCK_OFFSET_S)

    @property
    def step_times(self) -> StepTimes | None:
        """Times of its steps around its latest migration; None: it reports none.

        Raises:
            StoreError: a figure is missing, unknown, or of another type.
        """
        step_times: StepTimes | None = self._figures(StepTimes, STEP_TIMES)
        return step_times

    @property
    def expert_times(self) -> ExpertTimes | None:
        """Time of its experts by their rows; None: it measured none.

        Raises:
            StoreError: a figure is missing, unknown, of another type, or no time.
        """
        expert_times: ExpertTimes | None = self._figures(ExpertTimes, EXPERT_TIMES)
        return expert_times

    @property
    def silent_after_s(self) -> float:
        """Age of a report at which its rank counts as silent."""
        return max(LEAST_SILENCE_S, MISSED_REPORTS * self.report_every_s)

    def _seconds(self, name: str) -> float:
        seconds = self.detail.get(name)
        return float(seconds) if isinstance(seconds, (int, float)) else 0.0

    def _figures(self, cls: type[Any], name: str) -> Any:
        figures = self.detail.get(name)
        if figures is None:
            return None
        try:
            return from_record(cls, figures, f"rank {self.rank}: {name} of its report")
        except TypeError as exc:
            raise StoreError(f"rank {self.rank}: {name} of its report: {exc}") from exc


RUNS = Records(RunInfo, Table("runs", is_ordered=True), "the record of start")  # by its number
RANK_STATES = Records(RankState, Table("ranks"), "report of rank")  # by rank, for each run


class RunsPart(Part):
    """Starts, reports of ranks, and versions of processes."""

    def begin_run(self, info: RunInfo) -> None:
        """Record a start of the serving processes; the same again changes nothing.

        It announces this program's version as that of the ranks.

        Raises:
            StoreError: another start has this name; its samples would pass for repeats.
        """
        info = _stored(info)

        def decision(change: Change) -> None:
            for known in RUNS.scan(change):
                if known == info:
                    return
                if known.run == info.run:
                    raise StoreError(
                        f"run {info.run!r} is recorded as started at {known.time}, found another "
                        f"start of that name at {info.time}, expected a new name"
                    )
            # What an earlier start left alive has a smaller number, so it changes nothing any more.
            has_begun = change.get(HEAD, STARTED) or RECOVERY.get(change)
            change.put(HEAD, STARTED, str(epoch_in(change) + 1 if has_begun else 0))
            begin(change, info)

        self.backend.decide(f"run {info.run!r}", decision)

    def current_run(self) -> RunInfo | None:
        """Return the latest start, or None before the first."""
        return latest_run_in(self.backend)

    def runs(self) -> list[RunInfo]:
        """Return every start on record, oldest first."""
        return RUNS.scan(self.backend)

    def set_groups(self, engine: str, groups: Sequence[str]) -> None:
        """Record the EP groups of an engine, each a deployment with a run of its own.

        Args:
            engine: its name among those that share the deployment.
            groups: names of deployments, in place of those of an earlier start; none: the engine
                is one group, and the deployment has its run.
        """

        def decision(change: Change) -> None:
            stored = change.scan(GROUPS)
            known = dict(change.unreadable.readable(stored, text_of, "group"))
            for name, its in known.items():
                if its == engine and name not in groups:
                    change.delete(GROUPS, name)
            for name in groups:
                if known.get(name) != engine:
                    change.put(GROUPS, name, engine)

        self.backend.decide(f"groups of engine {engine!r}", decision)

    def groups(self) -> list[str]:
        """Return the deployments of the EP groups of this one; none: it is one group itself."""
        return [name for name, _ in self.backend.scan(GROUPS)]

    def report(self, state: RankState) -> None:
        """Replace the latest report of a rank."""
        self.backend.put(RANK_STATES.of(state.run).table, state.rank, to_json(state))

    def rank_states(self, run: str) -> list[RankState]:
        """Return the last report of every rank of a run, by rank."""
        return RANK_STATES.of(run).scan(self.backend)

    def announce(self, mine: Announcement) -> Announcement | None:
        """Record the version of a process, and return the announcement that it replaces.

        Of each component the latest 256 names are kept.
        """

        def decision(change: Change) -> Announcement | None:
            before = add_announcement(change, mine)
            if before is None:  # a process that joins may wait for it; a heartbeat wakes none
                change.wake()
            return before

        return self.backend.decide(f"version of {mine.component} {mine.name!r}", decision)

    def retire(self, mine: Announcement) -> None:
        """Remove the announcement of a process that was ended on purpose."""

        def decision(change: Change) -> None:
            change.delete(ANNOUNCED, _key_of(mine))

        self.backend.decide(f"end of {mine.component} {mine.name!r}", decision)

    def announced(self) -> list[Announcement]:
        """Return what was announced, oldest first, by processes that have ended too."""
        return _announcements(self.backend)


def group_name(deployment: str, group: str) -> str:
    """Return the deployment of an EP group; "": the deployment has one group."""
    return f"{deployment}/{group}" if group else deployment


def latest_run_in(reader: Reader) -> RunInfo | None:
    """Return the latest start, or None before the first."""
    return RUNS.newest(reader)


def alive_in(change: Change) -> list[bool]:
    """Return which ranks serve in the latest start; empty: there was none."""
    latest = latest_run_in(change)
    return [] if latest is None else list(latest.topology["alive"])


def begin(change: Change, info: RunInfo) -> None:
    """Record a start with its event, and what it means for a membership operation."""
    if LATEST_CHANGE.get(change) is not None and (before := alive_in(change)):
        note_run(change, info.topology["alive"], len(before))
    add_run(change, _stored(info))
    change.append(RUN_BEGAN, to_json(RunBegan(info.run, info.window_steps)))


def _stored(info: RunInfo) -> RunInfo:
    return replace(info, model=as_stored(info.model), topology=as_stored(info.topology))


def add_run(change: Change, info: RunInfo) -> None:
    """Record a start, and announce this program's version as that of its ranks."""
    RUNS.put(change, change.next("run"), info)
    add_announcement(change, Announcement(RANKS, info.run))


def add_announcement(change: Change, mine: Announcement) -> Announcement | None:
    """Write an announcement in place of an earlier one of that component and name; return that."""
    before, others = None, list[Announcement]()
    for known in _announcements(change):
        if _key_of(known) == _key_of(mine):
            before = known
        elif known.component == mine.component:
            others.append(known)
    for old in others[: len(others) + 1 - KEPT_ANNOUNCEMENTS]:
        change.delete(ANNOUNCED, _key_of(old))
    since = change.time if before is None else before.since
    text = to_json(asdict(replace(mine, time=change.time, since=since)))
    change.put(ANNOUNCED, _key_of(mine), text)
    return before


def _key_of(announced: Announcement) -> str:
    return f"{announced.component} {announced.name}"


def _announcements(reader: Reader) -> list[Announcement]:
    records = reader.scan(ANNOUNCED)
    readable = reader.unreadable.readable(records, _announcement_of, "announcement")
    return sorted((read for _, read in readable), key=lambda read: (read.time, read.name))


def _announcement_of(text: Value) -> Announcement:
    # Announcements of any version are read: a process that joins refuses others by name.
    try:
        return announcement_from_dict(from_json(text, "an announcement"))
    except (ValueError, TypeError, OverflowError) as exc:
        raise StoreError(f"an announcement cannot be read: {exc}") from exc
