"""The one reader behind every view: it follows a store and gives a Snapshot.

It reads only what is new (samples and events past its cursors) and folds samples with the same
reader into the same windows as the controller, so a viewer sees what plans use. A sample that
does not fit ends no refresh; the controller reports what was wrong with it.

    StateStore -> refresh() -> windows, scores, marks, decisions -> snapshot() -> terminal, HTTP
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from api.monitor.history import KEPT_S, History, HistoryMark, HistoryPoint
from api.monitor.rebalances import Rebalance, RebalanceLog
from api.monitor.scores import (
    Holders,
    contiguous_load,
    layer_imbalance,
    mean_imbalance,
    minute_scores,
    relative,
)
from api.monitor.snapshot import (
    Death,
    Decision,
    RankView,
    RebalanceMark,
    Snapshot,
    WindowScore,
    batch_faults,
    batch_parts,
    bytes_by_source,
    decision_of,
    detail_sum,
    expert_curve,
    pace_view,
    progress_of,
    slowest_phase,
    swap_pauses_ms,
)
from api.monitor.tally import Carried, RunTally, SampleTally, oldest_progress, scrubbed_slots
from api.processes.supervision import SupervisionView
from eplb.clock import Clock
from eplb.core.load import LoadSample
from eplb.core.topology import Topology
from eplb.decision.pace import PaceChange
from eplb.errors import HistoryError
from eplb.fitting.cordons import Cordon
from rebalance.controller.plans.planner_request import read_cordons
from telemetry.load.folder import Window
from telemetry.load.reader import RunReader
from telemetry.state.events import Event, PlanEnd, pace_change, plan_end
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore

SAMPLES_PER_READ = 2000
KEPT_WINDOWS = 64  # with their matrices; 58 x 256 of them are 8 MB
KEPT_SCORES = 4096
KEPT_EVENTS = 500
KEPT_DECISIONS = 50


class Monitor:
    """Follow one deployment. Any thread may call any method.

    Args:
        history: of all runs that the store has, which then are read too; None: none is kept.
        clock: seconds since the epoch; gives how long a rank has been silent.
        supervision: what the process that supervises others knows; by default none does.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        history: History | None = None,
        clock: Clock = time.time,
        supervision: Callable[[], SupervisionView] = SupervisionView,
    ) -> None:
        self._store, self._clock = store, clock
        self._supervision = supervision
        self._lock = threading.RLock()
        self._last_event = 0
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._decisions: deque[Decision] = deque(maxlen=KEPT_DECISIONS)
        # Of the current run, with their times, by generation.
        self._commits: dict[int, tuple[PlanEnd, float]] = {}
        self._history, self._carried = history, Carried()
        self._rebalances = RebalanceLog(history)
        self._tally = RunTally()
        self._death: Death | None = None
        self._paced: tuple[PaceChange, float] | None = None  # the latest judgement, and its time
        self._live = store.live()
        self._committed = store.committed()
        self._published = store.published()
        self._follow(None)

    def _follow(self, info: RunInfo | None) -> None:
        """Start on another run, with nothing read of it."""
        if info is not None:  # first: a start that cannot be read leaves the monitor where it is
            self._reader = RunReader(self._store, info, keep=KEPT_WINDOWS, clock=self._clock)
        self._info = info
        self._states: list[RankState] = []
        self._first_step_of: dict[int, int] = {}  # generation -> first step that it served
        self._samples = SampleTally()
        self._step_at: tuple[int, float | None] = (-1, None)  # highest step, when it was seen anew
        self._windows: dict[int, Window] = {}  # by index, oldest first
        self._scores: dict[int, WindowScore] = {}  # by index, oldest first
        self._time_of: dict[int, float] = {}  # window -> time of its newest sample
        if info is None:
            return
        self._model, self._topology = self._reader.model, self._reader.topology
        self._holders = Holders(self._store, self._topology)
        self._scale = self._topology  # of the latest window

    def refresh(self) -> None:
        """Read what is new in the store.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._lock:
            info = self._store.current_run()
            if info is not None and (self._info is None or info.run != self._info.run):
                if self._history is not None:
                    self._read_runs_before(info)
                self._follow(info)
            self._read_events()
            self._live = self._store.live()
            self._committed = self._store.committed()
            self._published = self._store.published()
            if self._info is not None:
                self._states = self._store.rank_states(self._info.run)
                self._note_steps()
                self._read_samples()
            if self._history is not None:
                self._history.age(self._clock())

    def _read_runs_before(self, latest: RunInfo) -> None:
        """Read what the store has of the runs from the one that was followed to the latest."""
        assert self._history is not None, "without a history no run but the latest is read"
        runs = self._store.runs()
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
            counts = self._store.sample_counts(info.run)
            self._carried = self._carried.plus(
                self._store.rank_states(info.run), sum(counts.values())
            )
        if known is None:
            since = self._clock() - KEPT_S
            self._history.note_minutes(minute_scores(self._store, runs, since))

    def _note_steps(self) -> None:
        """Note when the steps were seen to advance; the first sight of them proves nothing."""
        step = max((state.step for state in self._states), default=-1)
        known, _ = self._step_at
        if step != known:
            self._step_at = (step, self._clock() if known >= 0 else None)

    def _read_events(self) -> None:
        while new := self._store.events(after=self._last_event, limit=KEPT_EVENTS):
            for event in new:
                self._last_event = event.id
                self._events.append(event)
                self._note(event)

    def _note(self, event: Event) -> None:
        self._tally.note(event)
        self._rebalances.note(event)
        if event.kind == "run":  # marks are placed by steps, and those of another run are others
            self._commits.clear()
        elif event.kind == "plan":
            self._decisions.append(decision_of(event))
        elif event.kind == "commit" and (end := plan_end(event)) is not None:
            assert end.generation is not None, "a commit has a generation"
            self._commits.setdefault(end.generation, (end, event.time))
        elif (change := pace_change(event)) is not None:
            self._paced = change, event.time
        if event.kind == "recovery" or (
            event.kind == "error" and event.detail.get("where") == "ranks"
        ):
            why = event.detail.get("message") or event.detail.get("reason")
            self._death = Death(event.time, str(why or "a rank died"))

    def _read_samples(self) -> None:
        # Windows are scored before the folder drops them: a page is half of what it keeps.
        page = min(SAMPLES_PER_READ, max(1, self._topology.num_ranks * KEPT_WINDOWS // 2))
        for accepted in self._reader.read(page):
            for sample in accepted:
                self._note_sample(sample)
            self._score_windows()
        self._score_windows()

    def _note_sample(self, sample: LoadSample) -> None:
        known = self._first_step_of.get(sample.generation, sample.first_step)
        self._first_step_of[sample.generation] = min(known, sample.first_step)
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
                score = self._score(window, window.index in in_migration)
                self._scores[window.index] = score
                if self._history is not None:
                    self._history.note(window.run, score)
        self._windows = {window.index: window for window in settled}
        if settled:
            self._scale = self._topology_of(settled[-1])
        kept = sorted(self._scores)[-KEPT_SCORES:]
        self._scores = {index: self._scores[index] for index in kept}
        self._time_of = {at: when for at, when in self._time_of.items() if at >= oldest}

    def _topology_of(self, window: Window) -> Topology:
        """The ranks, of which those that held no expert count as drained."""
        return self._holders.topology(window.received, window.generations)

    def _score(self, window: Window, is_in_migration: bool) -> WindowScore:
        topology = self._topology_of(window)
        return WindowScore(
            index=window.index,
            first_step=window.first_step,
            last_step=window.last_step,
            measured=mean_imbalance(window.received, topology),
            contiguous=mean_imbalance(contiguous_load(window.tokens, topology), topology),
            generation=max(window.generations, default=0),
            is_complete=window.is_complete,
            is_migrating=is_in_migration or len(window.generations) > 1,
            time=self._time_of.get(window.index),
        )

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

    def rebalances(self) -> tuple[Rebalance, ...]:
        """Return the migrations of all runs, newest first."""
        with self._lock:
            return self._rebalances.latest()

    def snapshot(self) -> Snapshot:
        """Put together what the last ``refresh`` found."""
        with self._lock:
            info, now = self._info, self._clock()
            latest = next(reversed(self._windows.values()), None)
            ranks = self._rank_views(now)
            age_s, stuck = oldest_progress(self._states, now)
            stepped = self._step_at[1]
            return Snapshot(
                deployment=self._store.deployment,
                run=info.run if info else None,
                time=now,
                started=info.time if info else None,
                step=max((view.step for view in ranks), default=0),
                generation=self._committed.placement.generation if self._committed else None,
                num_layers=self._model.num_layers if info else 0,
                layer_ids=self._model.layer_ids if info else (),
                num_experts=self._model.num_experts if info else 0,
                num_slots=self._topology.num_slots if info else 0,
                ranks=ranks,
                node_of_rank=tuple(self._topology.node_of_rank.tolist()) if info else (),
                progress_age_s=age_s,
                progress_of=stuck,
                series=tuple(self._scores.values()),
                heatmap=relative(latest.received, self._scale.serving) if latest else None,
                layer_imbalance=layer_imbalance(latest.received, self._scale) if latest else None,
                expert_heat=relative(latest.tokens) if latest else None,
                marks=self._marks(),
                phase=slowest_phase(self._states),
                migration=progress_of(self._published, self._states),
                bytes_by_source=bytes_by_source(self._states),
                experts_moved=detail_sum(self._states, "experts_moved"),
                swap_pauses_ms=swap_pauses_ms(self._states),
                decisions=self._rebalances.followed(self._decisions),
                events=tuple(self._events),
                samples_stored=self._reader.num_read if info else 0,
                samples_lost=detail_sum(self._states, "samples_lost"),
                movement=self._live.control.movement,
                observe=self._live.control.observe,
                until=self._live.until.get("movement"),
                pace=pace_view(
                    float(self._live.effective.get("step_time_budget", 0.0)),
                    self._paced,
                    self._states,
                ),
                expert_curve=expert_curve(self._live.text("curve"), self._states),
                batch=batch_parts(self._states),
                batch_faults=batch_faults(self._states),
                scrubbed_slots=scrubbed_slots(self._states),
                digest_failures=sum(state.digest_failures for state in self._states),
                mover_failures=sum(state.mover_failures for state in self._states),
                store_errors=detail_sum(self._states, "store_errors"),
                uncounted_ranks=self._samples.uncounted(),
                sample_age_s=self._samples.age_s(now),
                token_time=self._samples.token_time,
                sample_every_s=self._sample_every_s(),
                step_age_s=None if stepped is None else max(0.0, now - stepped),
                death=self._death,
                earlier=self._carried,
                supervision=self._supervision(),
                **self._tally.shown(),
            )

    def received(self) -> NDArray[np.int64] | None:
        """[L, R] tokens that each rank received over all samples read so far; None without one."""
        with self._lock:
            return self._samples.received(self._topology.num_ranks) if self._info else None

    def _sample_every_s(self) -> float:
        """About how long a rank takes to its next sample: its window, and its way to the store."""
        if self._info is None:
            return 0.0
        step_ms = max((float(one.detail.get("step_ms") or 0) for one in self._states), default=0.0)
        window_s = self._info.window_seconds or self._info.window_steps * step_ms / 1e3
        return window_s + max((state.report_every_s for state in self._states), default=0.0)

    def _rank_views(self, now: float) -> tuple[RankView, ...]:
        if self._info is None:
            return ()
        state_of = {state.rank: state for state in self._states}
        cordons = read_cordons(self._live.text("cordons"))
        return tuple(
            self._rank_view(rank, state_of.get(rank), now, cordons.get(rank))
            for rank in range(self._topology.num_ranks)
        )

    def _rank_view(
        self, rank: int, state: RankState | None, now: float, cordon: Cordon | None
    ) -> RankView:
        if state is None:
            return RankView(rank, 0, 0, "silent", False, None, None, "", cordon=cordon)
        age_s = max(0.0, now - state.time)
        return RankView(
            rank=rank,
            step=state.step,
            generation=state.generation,
            phase=state.phase,
            is_alive=age_s <= state.silent_after_s,
            age_s=age_s,
            step_ms=state.detail.get("step_ms"),
            frozen=state.frozen,
            ahead_s=max(0.0, state.time - now),
            silent_after_s=state.silent_after_s,
            cordon=cordon,
        )

    def _marks(self) -> tuple[RebalanceMark, ...]:
        return tuple(
            RebalanceMark(
                generation,
                end.plan_id,
                self._first_step_of.get(generation),
                when,
                end.reason,
            )
            for generation, (end, when) in sorted(self._commits.items())
        )
