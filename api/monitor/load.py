"""Load: the windows of the run that is followed with their scores, and what was served before.

samples --> windows of this run --> scores --> history, over all runs
    '-----> outages: when the newest token came, and the times without any
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from api.monitor import KEPT_SCORES, KEPT_WINDOWS
from api.monitor.counts import SampleTally, Tally, rank_tally
from api.monitor.decisions import drop_oldest
from api.monitor.history import KEPT_S, History
from api.monitor.outages import OutageLog
from api.monitor.scores import DriftWatch, Holders, minute_scores, scored
from api.monitor.state import LoadState, StartState, WindowScore
from api.monitor.verdict import tokens_due_s
from eplb.clock import Clock
from eplb.core.load import LoadSample
from eplb.core.topology import Topology
from eplb.errors import HistoryError
from eplb.migration.recovery import start_of
from telemetry.load.folder import Window
from telemetry.load.reader import RunReader, pages
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

SAMPLES_PER_READ = 2000
KEPT_GENERATIONS = 1000  # of a run, whose first step is known


class RunLoad:
    """The windows of one run. Its owner serialises calls.

    Args:
        clock: seconds since the epoch.
        latest: number of latest samples of each rank that are read at first; None: all.

    Raises:
        HistoryError: its samples cannot be read.
    """

    def __init__(
        self, store: StateStore, info: RunInfo, *, clock: Clock, latest: int | None
    ) -> None:
        self.reader = RunReader(store, info, keep=KEPT_WINDOWS, clock=clock, latest=latest)
        self.samples = SampleTally()
        self.windows: dict[int, Window] = {}  # index -> window, oldest first
        self.scores: dict[int, WindowScore] = {}  # index -> score, oldest first
        self.first_step_of: dict[int, int] = {}  # generation -> first step that it served
        self.scale: Topology = self.reader.topology  # ranks of the latest window
        self._store, self._holders = store, Holders(store, self.reader.topology)
        self._time_of: dict[int, float] = {}  # window -> time of its newest sample
        self._num_pruned: int | None = None  # stored samples of the run that are never read

    @property
    def num_stored(self) -> int:
        """Samples of the run that were stored."""
        return self.reader.num_read + (self._num_pruned or 0)

    def read(self, outages: OutageLog, limit_s: float, history: History | None) -> None:
        """Read the samples that are new.

        Args:
            outages: are told of each sample.
            limit_s: without a step for so long, a deployment is stopped.
            history: is told of each score; None: none is kept.

        Raises:
            StoreError: the store cannot be read.
        """
        # Windows are scored before the folder drops them: a page is half of what it keeps.
        ranks = self.reader.topology.num_ranks
        page, num_stored = min(SAMPLES_PER_READ, max(1, ranks * KEPT_WINDOWS // 2)), 0
        if self._num_pruned is None:
            num_stored = sum(self._store.sample_counts(self.reader.run.run).values())
        for accepted in self.reader.read(page):
            for sample in accepted:
                outages.note_sample(sample, limit_s)
                self._note(sample)
            self._score(history)
        self._score(history)
        if self._num_pruned is None:
            self._num_pruned = max(0, num_stored - self.reader.num_read)

    def _note(self, sample: LoadSample) -> None:
        known = self.first_step_of.get(sample.generation, sample.first_step)
        self.first_step_of[sample.generation] = min(known, sample.first_step)
        drop_oldest(self.first_step_of, KEPT_GENERATIONS)
        index = self.reader.folder.index_of(sample)
        self.samples.note(sample, index)
        self._time_of[index] = max(sample.time, self._time_of.get(index, sample.time))

    def _score(self, history: History | None) -> None:
        """Score what is new or changed; a late sample changes an old window."""
        held = self.reader.folder.windows()
        oldest, newest = (held[0].index, held[-1].index) if held else (0, 0)
        in_migration = self.samples.windows_in_migration(oldest)
        # The newest windows are still filling: ranks report at their own times. One that stays
        # incomplete after two more have begun has a silent rank, and is shown as such.
        settled = [one for one in held if one.is_complete or one.index < newest - 1]
        for window in settled:
            if self.windows.get(window.index) is not window:
                score = self.scores[window.index] = scored(
                    window,
                    self._holders,
                    index=window.index,
                    is_complete=window.is_complete,
                    is_migrating=window.index in in_migration,
                    time=self._time_of.get(window.index),
                )
                if history is not None:
                    history.note(window.run, score)
        self.windows = {window.index: window for window in settled}
        if settled:
            latest = settled[-1]
            self.scale = self._holders.topology(latest.received, latest.generations)
        kept = sorted(self.scores)[-KEPT_SCORES:]
        self.scores = {index: self.scores[index] for index in kept}
        self._time_of = {at: when for at, when in self._time_of.items() if at >= oldest}


class LoadFold:
    """Follows the load of a deployment from run to run. Its owner serialises calls.

    Args:
        history: of all runs that the store has, which then are read too; None: none is kept.
        latest: number of latest samples of each rank that are read at first; None: all.
    """

    def __init__(self, store: StateStore, history: History | None, latest: int | None) -> None:
        self._store, self.history, self._latest = store, history, latest
        self.run: RunLoad | None = None  # None: no run has begun
        self.outages, self.drift = OutageLog(), DriftWatch()
        self.earlier = Tally()  # counters of the ranks of earlier runs
        self._in_earlier: set[str] = set()  # those runs: a look that fails is made again
        self._has_minutes = history is None

    @property
    def info(self) -> RunInfo | None:
        """The run that is followed; None: none has begun."""
        return None if self.run is None else self.run.reader.run

    @property
    def topology(self) -> Topology | None:
        """Ranks of that run."""
        return None if self.run is None else self.run.reader.topology

    @property
    def series(self) -> tuple[WindowScore, ...]:
        """Scores of that run, oldest first."""
        return () if self.run is None else tuple(self.run.scores.values())

    def windows(self, last: int) -> list[Window]:
        """Give the latest windows with their matrices, oldest first."""
        if self.run is None or last <= 0:
            return []
        return list(self.run.windows.values())[-last:]

    def received(self) -> NDArray[np.int64] | None:
        """[L, R] tokens that each rank received over all samples of the run; None without one."""
        if self.run is None:
            return None
        return self.run.samples.received(self.run.reader.topology.num_ranks)

    def follow(self, latest: RunInfo, every_s: float, clock: Clock) -> None:
        """Follow another run; where a history is kept, those between are read first.

        Args:
            latest: the run.
            every_s: time between two samples of a rank of the run before.
            clock: seconds since the epoch.

        Raises:
            HistoryError: its samples cannot be read; what was followed stays.
            StoreError: the store cannot be read.
        """
        if self.history is not None:
            self._read_before(latest, self.history, every_s, clock)
        self._begin(latest, clock)

    def _begin(self, info: RunInfo, clock: Clock) -> None:
        """Start on another run, with nothing read of it."""
        self.run = RunLoad(self._store, info, clock=clock, latest=self._latest)
        self.outages.begin_run(is_start=info.run == start_of(info.run))

    def _read_before(self, latest: RunInfo, history: History, every_s: float, clock: Clock) -> None:
        """Read what the store has of the runs from the one that was followed to the latest."""
        runs, known = self._store.runs(), self.info
        for info in runs:
            if info.run == latest.run or (known is not None and info.time < known.time):
                continue
            if known is None or info.run != known.run:
                try:
                    self._begin(info, clock)
                except HistoryError:
                    continue  # its samples are in no window of any reader
                every_s = info.window_seconds
            self.read(every_s)
            if info.run in self._in_earlier:
                continue
            of_run = rank_tally(self._store.rank_states(info.run))
            of_run[("samples_stored",)] = sum(self._store.sample_counts(info.run).values())
            self.earlier.update(of_run)
            self._in_earlier.add(info.run)
        if not self._has_minutes:
            history.note_minutes(minute_scores(self._store, runs, clock() - KEPT_S))
            self._has_minutes = True

    def read(self, every_s: float) -> None:
        """Read the samples of the run that are new.

        Args:
            every_s: time between two samples of a rank.

        Raises:
            StoreError: the store cannot be read.
        """
        if self.run is not None:
            self.run.read(self.outages, tokens_due_s(every_s), self.history)

    def read_tokens_before(self) -> None:
        """Read when the latest of the earlier runs that served counted its last token.

        Raises:
            StoreError: the store cannot be read.
        """
        store, outages = self._store, self.outages
        for info in reversed(store.runs()):
            # Most often the latest samples have tokens, and no other need be read.
            for begin in (store.backend.cursor_before(info.run, SAMPLES_PER_READ), 0):
                query = partial(store.samples, info.run)
                for _, samples in pages(query, begin, SAMPLES_PER_READ):
                    for sample in samples:
                        outages.note_sample(sample, inf)
                if outages.token_time is not None or not begin:
                    break
            if outages.token_time is not None:
                outages.begin_run()
                return

    def age(self, now: float) -> None:
        """Age the history, and store the outages that were found in it.

        Raises:
            StoreError: the store cannot be written.
        """
        if self.history is not None:
            self.history.age(now)
            for outage in self.outages.found:
                self._store.add_outage(outage)

    def start(self) -> StartState:
        """Put together which start is followed, and its sizes."""
        if self.run is None:
            return StartState(
                run=None,
                started=None,
                num_layers=0,
                layer_ids=(),
                num_experts=0,
                num_slots=0,
                node_of_rank=(),
            )
        reader = self.run.reader
        model, topology = reader.model, reader.topology
        return StartState(
            run=reader.run.run,
            started=reader.run.time,
            num_layers=model.num_layers,
            layer_ids=model.layer_ids,
            num_experts=model.num_experts,
            num_slots=topology.num_slots,
            node_of_rank=tuple(topology.node_of_rank.tolist()),
        )

    def state(
        self, series: Sequence[WindowScore], num_lost: int, every_s: float, now: float
    ) -> LoadState:
        """Put together how even, how old and how many.

        Args:
            series: scores of the run, oldest first.
            num_lost: samples that its ranks lost.
            every_s: time between two samples of a rank.
            now: seconds since the epoch.
        """
        token_time, run = self.outages.token_time, self.run
        return LoadState(
            last_score=next((one for one in reversed(series) if one.is_complete), None),
            token_age_s=None if token_time is None else max(0.0, now - token_time),
            token_time=token_time,
            sample_age_s=None if run is None else run.samples.age_s(now),
            sample_every_s=every_s,
            samples_stored=0 if run is None else run.num_stored,
            samples_lost=num_lost,
            uncounted_ranks=() if run is None else run.samples.uncounted(),
        )
