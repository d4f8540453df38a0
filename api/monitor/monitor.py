"""The one reader behind every view: it follows a store and gives Readings.

It reads only what is new (samples and events past its cursors) and folds samples with the same
reader into the same windows as the controller, so a viewer sees what plans use. A sample that
does not fit ends no refresh; the controller reports what was wrong with it.

    StateStore -> refresh() -> windows, scores, decisions, counters -> reading() -> every view
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from shutil import disk_usage

import numpy as np
from numpy.typing import NDArray

from api.monitor import KEPT_SCORES, KEPT_WINDOWS
from api.monitor.anomalies import AnomalyLog
from api.monitor.counts import EventTally, SampleTally, Tally, rank_tally
from api.monitor.decisions import DecisionLog, drop_oldest
from api.monitor.history import KEPT_S, History, HistoryMark, HistoryPoint
from api.monitor.membership import membership_of
from api.monitor.outages import OutageLog
from api.monitor.scores import (
    DriftWatch,
    Holders,
    minute_scores,
    scored,
)
from api.monitor.state import (
    ABSENT,
    GONE,
    JOINING,
    RETIRED,
    DecisionRecord,
    Grade,
    Leadership,
    MigrationProgress,
    PaceView,
    RankView,
    Reading,
    RebalanceMark,
    State,
    WindowScore,
)
from api.monitor.verdict import judged, leadership, tokens_due_s
from api.processes.supervision import ProcessState, ProcessView, SupervisionView
from eplb.clock import Clock
from eplb.core.load import LoadSample
from eplb.core.model import ModelShape
from eplb.decision.expert_times import chosen_curve
from eplb.decision.pace import PaceChange, pace_now
from eplb.errors import HistoryError, StoreError
from eplb.migration.build import Migration
from eplb.migration.membership import leavers
from eplb.migration.recovery import start_of
from eplb.versions import CONTROLLER, HOST_CACHE, NAMES, SERVICE, Announcement
from rebalance.controller.plans.planner_request import cordons_in_force, curve_of
from telemetry.load.drift import Drift
from telemetry.load.folder import Window
from telemetry.load.reader import RunReader, pages
from telemetry.state.clock import StoreClock
from telemetry.state.events import FACTS, Compiling, EnginePlans, Event, PlanEnd
from telemetry.state.holder import is_dead, shown
from telemetry.state.joining import MISSED_BEATS, heartbeats, serving
from telemetry.state.live import LiveState
from telemetry.state.membership import MembershipChange
from telemetry.state.placements import CommittedPlacement
from telemetry.state.proposals import Proposal
from telemetry.state.runs import (
    HAS_ENDED,
    LEAST_SILENCE_S,
    STEP_MS,
    STEP_TIMES,
    WAIT_MS,
    RankState,
    RunBegan,
    RunInfo,
)
from telemetry.state.store import StateStore

PHASES = ("aborted", "idle", "preload", "stage", "swap")  # of a serving rank, least done first
SAMPLES_PER_READ = 2000
KEPT_EVENTS = 1000
KEPT_COMMITS = 1000  # newest commits of a run: as many as the store keeps placements
HANGS_S = 1.0  # a look at the store that takes longer is left out of an answer
OF_PROPOSALS = ("proposal", "commit", "restore")  # events after which others are open
VERSIONS_S = 5.0  # after which the versions are read again: 5 ms with 320 ranks


class Monitor:
    """Follow one deployment. Any thread may call any method.

    Args:
        history: of all runs that the store has, which then are read too; outages that are found in
            them are recorded in the store. None: none is kept.
        clock: seconds since the epoch, of every age; None: the store's.
        supervision: what the process that supervises others knows; by default none does.
        folder: the state folder; None: not known here.
        latest: number of latest samples of each rank that are read at first; None: all.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        history: History | None = None,
        clock: Clock | None = None,
        supervision: Callable[[], SupervisionView] = SupervisionView,
        folder: Path | None = None,
        latest: int | None = None,
    ) -> None:
        self._folder, self._latest = folder, latest
        self.store, self.anomalies = store, AnomalyLog()
        self.clock, self.supervision = clock or StoreClock(store), supervision
        self._lock = threading.RLock()
        self._last_event = 0
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        # Commits of the current run with their times, by generation.
        self._commits: dict[int, tuple[PlanEnd, float]] = {}
        self._history, self._decisions = history, DecisionLog(history)
        self._event_tally = EventTally()
        self._earlier = Tally()  # counters of the ranks of earlier runs
        self._drift = DriftWatch()
        self._outages = OutageLog()
        self._paced: tuple[PaceChange, float] | None = None  # the latest judgement, and its time
        self._versions: Mapping[str, str] = {}
        self._versions_at = -VERSIONS_S
        self._beats: list[Announcement] = []
        self._live, self._groups = LiveState(), tuple[str, ...]()
        self._change: MembershipChange | None = None  # the latest operation on the ranks
        self._epoch, self._ready = 0, list[int]()
        self._committed: CommittedPlacement | None = None
        self._published: Migration | None = None
        self._controller = Leadership("", 0.0, "")
        self._compiling_since: tuple[Compiling, float] | None = None  # the latest of its kind
        self._engine_plans = ""  # why an engine's own balancer plans, by the latest event
        self._is_read = self._has_proposals = False  # _has_proposals: new since the last read
        self._has_failed, self._answers_since = False, -inf  # when the store answered again
        self._proposals: list[Proposal] = []
        self._full, self._full_until = "", -inf  # why the store takes no changes, and until when
        self._audit_waiting, self._free_bytes = 0, _free_bytes(folder)
        self._follow(None)

    def _follow(self, info: RunInfo | None) -> None:
        """Start on another run, with nothing read of it."""
        if info is not None:  # first: a start that cannot be read leaves the monitor where it is
            self._reader = RunReader(
                self.store, info, keep=KEPT_WINDOWS, clock=self.clock, latest=self._latest
            )
        self._info = info
        self._states: list[RankState] = []
        self._first_step_of: dict[int, int] = {}  # generation -> first step that it served
        self._samples = SampleTally()
        self._step_at: tuple[int, float | None] = (-1, None)  # highest step, when it was seen anew
        self._windows: dict[int, Window] = {}  # index -> window, oldest first
        self._scores: dict[int, WindowScore] = {}  # index -> score, oldest first
        self._time_of: dict[int, float] = {}  # window -> time of its newest sample
        self._num_pruned: int | None = None  # stored samples of the run that are never read
        if info is None:
            return
        self._outages.begin_run(is_start=info.run == start_of(info.run))
        self._model, self._topology = self._reader.model, self._reader.topology
        self._holders = Holders(self.store, self._topology)
        self._scale = self._topology  # ranks of the latest window

    def refresh(self) -> None:
        """Read what is new in the store.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._lock:
            had_failed, self._has_failed = self._has_failed, True  # until all is read
            if isinstance(self.clock, StoreClock):
                self.clock.follow()
            info, self._groups = self.store.current_run(), tuple(self.store.groups())
            self._read_events()
            if info is not None and (self._info is None or info.run != self._info.run):
                if self._history is not None:
                    self._read_runs_before(info)
                self._follow(info)
            self._read_small()
            self._look_for_room()
            self._outages.clamp(self.clock())
            if self._info is not None:
                self._states = self.store.rank_states(self._info.run)
                self._note_steps()
                self._read_samples()
            if self._history is not None:
                self._history.age(self.clock())
                for outage in self._outages.found:
                    self.store.add_outage(outage)
                self._read_events()
            elif self._outages.token_time is None and not self._is_read:
                self._read_tokens_before()
            if had_failed:
                self._answers_since = self.clock()
            self._is_read, self._has_failed = True, False

    def _read_small(self) -> None:
        """Read what is small, whole."""
        now = self.clock()
        self._live = self.store.live()
        self._change, self._epoch = self.store.membership_change(), self.store.epoch()
        self._ready = [one.rank for one in self.store.joiners()]
        self._committed = self.store.committed()
        self._published = self.store.published()
        self._controller = leadership(self.store, now)
        if self._has_proposals:
            self._has_proposals, self._proposals = False, self.store.proposals()
        self._audit_waiting = len(self.store.audit_lines())
        self._free_bytes = _free_bytes(self._folder)
        beats = heartbeats(self.store, now)
        self._beats = sorted(beats, key=lambda one: (one.component, one.name))
        if not 0 <= now - self._versions_at < VERSIONS_S:  # below 0: the clock was set back
            self._versions_at = now
            found = {one.component: one.version for one in serving(self.store, now)}
            caches = [one for one in self._beats if one.component == HOST_CACHE]
            self._versions = found | {f"{HOST_CACHE} {one.name}": one.version for one in caches}

    def _look_for_room(self) -> None:
        """Note whether the store takes changes: nobody can report to one that is full.

        One that was full counts as such until somebody has written to it again.
        """
        now, full = self.clock(), self.store.backend.why_full()
        if full:
            self._full, self._full_until = full, now
            self._answers_since = now
        elif self._full and (
            any(state.time > self._full_until for state in self._states)
            or now - self._full_until > LEAST_SILENCE_S
        ):
            self._full = ""

    def _read_runs_before(self, latest: RunInfo) -> None:
        """Read what the store has of the runs from the one that was followed to the latest."""
        assert self._history is not None, "without a history no run but the latest is read"
        runs = self.store.runs()
        known = self._info
        for info in runs:
            if info.run == latest.run or (known is not None and info.time < known.time):
                continue
            if known is None or info.run != known.run:
                try:
                    self._follow(info)
                except HistoryError:
                    continue  # its samples are in no window of any reader
            self._read_samples()
            of_run = rank_tally(self.store.rank_states(info.run))
            of_run[("samples_stored",)] = sum(self.store.sample_counts(info.run).values())
            self._earlier.update(of_run)
        if known is None:
            since = self.clock() - KEPT_S
            self._history.note_minutes(minute_scores(self.store, runs, since))

    def _read_tokens_before(self) -> None:
        """Read when the latest of the earlier runs that served counted its last token."""
        for info in reversed(self.store.runs()):
            # Most often the latest samples have tokens, and no other need be read.
            for begin in (self.store.backend.cursor_before(info.run, SAMPLES_PER_READ), 0):
                query = partial(self.store.samples, info.run)
                for _, samples in pages(query, begin, SAMPLES_PER_READ):
                    for sample in samples:
                        self._outages.note_sample(sample, inf)
                if self._outages.token_time is not None or not begin:
                    break
            if self._outages.token_time is not None:
                self._outages.begin_run()
                return

    def _note_steps(self) -> None:
        """Note when the steps were seen to advance; the first sight of them proves nothing."""
        step = max((state.step for state in self._states), default=-1)
        known, _ = self._step_at
        if step != known:
            self._step_at = (step, self.clock() if known >= 0 else None)

    def _read_events(self) -> None:
        while new := self.store.events(after=self._last_event, limit=KEPT_EVENTS):
            for event in new:
                self._last_event = event.id
                self._events.append(event)
                if event.fact is None and event.kind in FACTS:  # its words are shown all the same
                    unreadable = StoreError(f"expected the fields of {FACTS[event.kind].__name__}")
                    self.store.backend.unreadable.count("event", event.id, unreadable)
                self._note(event)

    def _note(self, event: Event) -> None:
        self._event_tally.note(event, ended=self._decisions.note(event))
        self._has_proposals |= event.kind in OF_PROPOSALS
        match event.fact:
            case RunBegan():  # marks are placed by steps, and those of another run are others
                self._commits.clear()
                self._engine_plans = ""
            case EnginePlans(reason=why):
                self._engine_plans = why
            case PlanEnd() as end if event.kind == "commit" and end.plan_id > 0:
                assert end.generation is not None, "a commit has a generation"
                self._commits.setdefault(end.generation, (end, event.time))
                drop_oldest(self._commits, KEPT_COMMITS)
            case Compiling() as compiling:
                self._compiling_since = compiling, event.time
            case PaceChange() as change:
                self._paced = change, event.time
        self._outages.note_event(event)

    def _read_samples(self) -> None:
        # Windows are scored before the folder drops them: a page is half of what it keeps.
        page = min(SAMPLES_PER_READ, max(1, self._topology.num_ranks * KEPT_WINDOWS // 2))
        limit_s = tokens_due_s(self._sample_every_s())
        num_stored = 0
        if self._num_pruned is None:
            num_stored = sum(self.store.sample_counts(self._reader.run.run).values())
        for accepted in self._reader.read(page):
            for sample in accepted:
                self._outages.note_sample(sample, limit_s)
                self._note_sample(sample)
            self._score_windows()
        self._score_windows()
        if self._num_pruned is None:
            self._num_pruned = max(0, num_stored - self._reader.num_read)

    def _note_sample(self, sample: LoadSample) -> None:
        known = self._first_step_of.get(sample.generation, sample.first_step)
        self._first_step_of[sample.generation] = min(known, sample.first_step)
        drop_oldest(self._first_step_of, KEPT_COMMITS)
        index = self._reader.folder.index_of(sample)
        self._samples.note(sample, index)
        self._time_of[index] = max(sample.time, self._time_of.get(index, sample.time))

    def _score_windows(self) -> None:
        """Score what is new or changed; a late sample changes an old window."""
        held = self._reader.folder.windows()
        oldest, newest = (held[0].index, held[-1].index) if held else (0, 0)
        in_migration = self._samples.windows_in_migration(oldest)
        # The newest windows are still filling: ranks report at their own times. One that stays
        # incomplete after two more have begun has a silent rank, and is shown as such.
        settled = [one for one in held if one.is_complete or one.index < newest - 1]
        for window in settled:
            if self._windows.get(window.index) is not window:
                score = self._scores[window.index] = scored(
                    window,
                    self._holders,
                    index=window.index,
                    is_complete=window.is_complete,
                    is_migrating=window.index in in_migration,
                    time=self._time_of.get(window.index),
                )
                if self._history is not None:
                    self._history.note(window.run, score)
        self._windows = {window.index: window for window in settled}
        if settled:
            latest = settled[-1]
            self._scale = self._holders.topology(latest.received, latest.generations)
        kept = sorted(self._scores)[-KEPT_SCORES:]
        self._scores = {index: self._scores[index] for index in kept}
        self._time_of = {at: when for at, when in self._time_of.items() if at >= oldest}

    def windows(self, last: int) -> list[Window]:
        """Return the latest windows with their matrices, oldest first."""
        with self._lock:
            return list(self._windows.values())[-last:] if last > 0 else []

    def points(self, since: float, until: float, most: int) -> list[HistoryPoint]:
        """Return imbalance over a range of time, of all runs; nothing where none is kept."""
        with self._lock:
            return [] if self._history is None else self._history.points(since, until, most)

    def history_marks(self, since: float, until: float) -> list[HistoryMark]:
        """Return what happened in a range of time."""
        with self._lock:
            return [] if self._history is None else self._history.marks(since, until)

    def drift(self, seen: Reading) -> Drift | None:
        """Return how far the load is from the one that the serving placement was planned on.

        None: it is not known, or a look at the store hangs.
        """
        if not self._lock.acquire(timeout=HANGS_S):
            return None
        try:
            return self._drift.update(seen, self.windows(KEPT_WINDOWS))
        finally:
            self._lock.release()

    def judged(self, seen: Reading) -> Reading:
        """Judge a reading, and note what is wrong."""
        found = judged(seen)
        self.anomalies.note(found)
        return found

    def reading(self) -> Reading:
        """Put together what the last ``refresh`` found; the first one is made where none was.

        Raises:
            StoreError: nothing was read yet, and the store cannot be read.
        """
        with self._lock:
            if not self._is_read:
                self.refresh()
            found = self.unread()
        return self.judged(found)

    def unread(self) -> Reading:
        """Put together what is known without a look at the store; it is not judged."""
        with self._lock:
            of_ranks = rank_tally(self._states)
            series = tuple(self._scores.values())
            rebalances = self._decisions.rebalances()
            return Reading(
                state=self._state(of_ranks, series, rebalances),
                series=series,
                marks=self._marks(),
                rebalances=rebalances,
                events=tuple(self._events),
                latest=next(reversed(self._windows.values()), None),
                scale=self._scale if self._info else None,
                counts=self._event_tally.counts(of_ranks, self._earlier),
                open_migration=self._published,
                is_read=self._is_read,
                answered_s=self._answered_s(self.clock()),
            )

    def _state(
        self,
        of_ranks: Tally,
        series: Sequence[WindowScore],
        rebalances: Sequence[DecisionRecord],
    ) -> State:
        info, now = self._info, self.clock()
        model, topology = (self._model, self._topology) if info else (None, None)
        answered_s = self._answered_s(now)
        ranks = tuple(self._rank_views(now, answered_s)) if info else ()
        supervision = self.supervision()
        if topology is not None:
            hosts = {str(host) for host in topology.host_of_rank.tolist()}
            found = (
                _beat_view(one, now, answered_s)
                for one in self._beats
                if one.name in hosts or one.component in (CONTROLLER, SERVICE)
            )
            processes = (*supervision.processes, *found)
            supervision = replace(supervision, processes=processes)
        token_time, stepped = self._outages.token_time, self._step_at[1]
        oldest = _oldest_progress(self._states, now, answered_s)
        control, effective = self._live.control, self._live.effective
        placement = None if self._committed is None else self._committed.placement
        return State(
            verdict=Grade.BLIND,  # until it is judged
            reason="",
            problems=(),
            unread="",
            store_full=self._full,
            deployment=self.store.deployment,
            groups=self._groups,
            time=now,
            run=info.run if info else None,
            started=info.time if info else None,
            step=max((view.step for view in ranks), default=0),
            generation=None if placement is None else placement.generation,
            controller=replace(self._controller, compiling=self._compiling(now)),
            versions=self._versions,
            num_layers=model.num_layers if model else 0,
            layer_ids=model.layer_ids if model else (),
            num_experts=model.num_experts if model else 0,
            num_slots=topology.num_slots if topology else 0,
            ranks=ranks,
            node_of_rank=tuple(topology.node_of_rank.tolist()) if topology else (),
            membership=None
            if topology is None
            else membership_of(
                topology, placement, self._change, self._epoch, self._live, self._ready, now
            ),
            silent_ranks=tuple(
                view.rank for view in ranks if not view.is_alive and view.phase not in ABSENT
            ),
            uncounted_ranks=self._samples.uncounted(),
            engine_plans=self._engine_plans,
            death=self._outages.death,
            supervision=supervision,
            progress_age_s=oldest[0],
            progress_of=oldest[1],
            progress_thread=oldest[2],
            step_age_s=None if stepped is None else max(0.0, now - stepped),
            last_score=next((one for one in reversed(series) if one.is_complete), None),
            token_age_s=None if token_time is None else max(0.0, now - token_time),
            token_time=token_time,
            sample_age_s=self._samples.age_s(now),
            sample_every_s=self._sample_every_s(),
            phase=_slowest_phase(self._states),
            migration=_progress_of(self._published, self._states, model),
            pace=self._pace(float(effective.get("step_time_budget", 0.0))),
            expert_curve=self._expert_curve(self._live.text("curve")),
            bytes_by_source={k[1]: n for k, n in of_ranks.items() if k[0] == "bytes_by_source"},
            experts_moved=of_ranks[("experts_moved",)],
            swap_pauses_ms=tuple(
                float(pause_ms)
                for state in self._states
                for pause_ms in state.detail.get("swap_pauses_ms", ())
            ),
            decisions=self._decisions.decisions(),
            last_rebalance=rebalances[0] if rebalances else None,
            samples_stored=self._reader.num_read + (self._num_pruned or 0) if info else 0,
            samples_lost=of_ranks[("samples_lost",)],
            movement=control.movement,
            observe=control.observe,
            until=self._live.until.get("movement"),
            stage=self._live.text("stage"),
            open_proposals=sum(
                one.state == "open" and one.expires > now for one in self._proposals
            ),
            switched=self._live.changes.get("movement"),
            free_bytes=self._free_bytes,
            audit_waiting=self._audit_waiting,
        )

    def _answered_s(self, now: float) -> float:
        """For how long the store has answered again; also after its clock was set back."""
        return abs(now - self._answers_since)

    def _compiling(self, now: float) -> str:
        compiling, since = self._compiling_since or (None, now)
        if compiling is None or compiling.state != "begun":
            return ""
        if self._controller.leader != shown(compiling.holder):
            return ""  # it may have ended meanwhile
        since_s = max(0.0, now - since)
        return f"the controller has been compiling kernels for {since_s:.0f} s: plans take longer"

    def _pace(self, budget: float) -> PaceView:
        """The pace of the next migration, as the controller would give it now."""
        latest, changed = (None, None) if self._paced is None else self._paced
        is_measured = any(STEP_TIMES in one.detail for one in self._states)
        part, reason = pace_now(budget, latest, is_measured=is_measured)
        return PaceView(part, reason, budget, latest, changed)

    def _expert_curve(self, asked: str) -> str:
        """Where the controller has the curve of the experts' time from, as it would now."""
        measured = [one.expert_times for one in self._states]
        known = [one for one in measured if one is not None]
        _, source = chosen_curve(curve_of(asked), known)
        return source

    def received(self) -> NDArray[np.int64] | None:
        """[L, R] tokens that each rank received over all samples read so far; None without one."""
        with self._lock:
            return self._samples.received(self._topology.num_ranks) if self._info else None

    def _sample_every_s(self) -> float:
        """About how long a rank takes to its next sample: its window, and its way to the store."""
        if self._info is None:
            return 0.0
        step_ms = max((float(one.detail.get(STEP_MS) or 0) for one in self._states), default=0.0)
        window_s = self._info.window_seconds or self._info.window_steps * step_ms / 1e3
        return window_s + max((state.report_every_s for state in self._states), default=0.0)

    def _rank_views(self, now: float, answered_s: float) -> Iterator[RankView]:
        state_of = {state.rank: state for state in self._states}
        change, alive = self._change, self._topology.alive
        wanted = None if change is None else change.should_serve
        cordons = cordons_in_force(self._live.text("cordons"), leavers(wanted, self._topology))
        for rank in range(self._topology.num_ranks):
            state, cordon = state_of.get(rank), cordons.get(rank)
            if state is None:
                phase = "silent" if alive[rank] else _absent(rank, change)
                yield RankView(rank, 0, 0, phase, False, None, None, "", cordon=cordon)
                continue
            age_s = max(0.0, now - state.time)
            yield RankView(
                rank=rank,
                step=state.step,
                generation=state.generation,
                phase=state.phase,
                is_alive=min(age_s, answered_s) <= state.silent_after_s,
                age_s=age_s,
                step_ms=state.detail.get(STEP_MS),
                wait_ms=state.detail.get(WAIT_MS),
                has_ended=bool(state.detail.get(HAS_ENDED)),
                frozen=state.frozen,
                ahead_s=state.clock_offset_s,
                silent_after_s=state.silent_after_s,
                cordon=cordon,
            )

    def _marks(self) -> tuple[RebalanceMark, ...]:
        return tuple(
            RebalanceMark(at, end.plan_id, self._first_step_of.get(at), when, end.reason)
            for at, (end, when) in sorted(self._commits.items())
        )


def _absent(rank: int, change: MembershipChange | None) -> str:
    """Return the phase of a rank that does not serve."""
    if change is None or rank in change.should_serve:
        is_new = change is not None and not change.ended and rank not in change.before
        return JOINING if is_new else GONE
    return RETIRED


def _free_bytes(folder: Path | None) -> int | None:
    """Return the room on the disk of a folder; None: there is none yet."""
    with suppress(OSError):
        return None if folder is None else disk_usage(folder).free
    return None


def _slowest_phase(states: Iterable[RankState]) -> str:
    """Return the phase of the rank that is furthest behind on the newest plan; idle if none is."""
    at_work = [state for state in states if state.plan_id]
    if not at_work:
        return "idle"
    newest = max(state.plan_id for state in at_work)
    phases = [state.phase for state in at_work if state.plan_id == newest]
    return min(phases, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))


def _progress_of(
    migration: Migration | None, states: Iterable[RankState], model: ModelShape | None
) -> MigrationProgress | None:
    """Return how far the ranks are with the open migration."""
    if migration is None:
        return None
    at_work = [state for state in states if state.plan_id == migration.plan_id]
    applied, total = min((one.applied for one in at_work), default=0), len(migration.transactions)
    # Experts staged, where ranks count them, else whole transactions on the slowest rank.
    to_stage = sum(int(one.detail.get("to_stage", 0)) for one in at_work)
    if to_stage and any("staged" in one.detail for one in at_work):
        staged = sum(int(one.detail.get("staged", 0)) for one in at_work) / to_stage
    else:
        prepared = min((one.prepared for one in at_work), default=0)
        staged = prepared / total if total else 1.0
    staged = min(1.0, staged)
    return MigrationProgress(
        plan_id=migration.plan_id,
        base_generation=migration.base.generation,
        target_generation=migration.target.generation,
        num_transactions=total,
        applied=applied,
        num_moves=len(migration.moves),
        staged_part=staged,
        layers=tuple(
            model.layer_ids[layer] if model else layer
            for txn in migration.transactions
            for layer in txn.layers
        ),
        fraction=(staged + applied / total) / 2 if total else 1.0,
    )


def _beat_view(announced: Announcement, now: float, answered_s: float) -> ProcessView:
    """Give a process by its heartbeat; whoever supervises it is not known here."""
    age_s = max(0.0, now - announced.time)
    has_exited = is_dead(announced.process)
    is_silent = has_exited or min(age_s, answered_s) > MISSED_BEATS * announced.every_s
    name, of = NAMES[announced.component], announced.name
    where = f"{name} of host {of}" if of.isdigit() else f"{name}, {shown(of)}"
    return ProcessView(
        name=where,
        kind=announced.component.replace(" ", "_"),
        state=ProcessState.DOWN if is_silent else ProcessState.RUNNING,
        report_age_s=age_s,
        is_late=is_silent,
        restarts=0,
        reason="",
        has_exited=has_exited,
    )


def _oldest_progress(
    states: Iterable[RankState], now: float, answered_s: float
) -> tuple[float | None, str, str]:
    """Give the longest time without progress of a step or busy thread, where it is, and which."""
    ages = [
        (
            max(0.0, min(now - state.time, answered_s) - state.report_every_s)
            + state.progress_age_s,
            f"rank {state.rank}, {state.progress_of or 'the step'}",
            state.progress_thread,
        )
        for state in states
    ]
    return max(ages, key=lambda age: age[0], default=(None, "", ""))
