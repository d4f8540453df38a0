"""The one reader behind every view: it follows a store and gives Readings.

It reads only what is new (samples and events past its cursors) and folds samples with the same
reader into the same windows as the controller, so a viewer sees what plans use. A sample that
does not fit ends no refresh; the controller reports what was wrong with it.

    StateStore -> refresh() -> folds, one a question -> reading() -> every view

    what happened         EventFeed     journal.py
    the store itself      StoreFold     place.py
    ranks and groups      RankFold      ranks.py
    load and outages      LoadFold      load.py
    plans                 PlanFold      plans.py
    controllers, caches   ProcessFold   processes.py
    counters of metrics   EventTally    counts.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from api.monitor import KEPT_WINDOWS
from api.monitor.anomalies import AnomalyLog
from api.monitor.counts import EventTally, Tally, rank_tally
from api.monitor.history import History, HistoryMark, HistoryPoint
from api.monitor.journal import EventFeed
from api.monitor.load import LoadFold
from api.monitor.place import StoreFold
from api.monitor.plans import PlanFold
from api.monitor.processes import ProcessFold
from api.monitor.ranks import RankFold
from api.monitor.state import Grade, Reading, State
from api.monitor.verdict import judged
from api.processes.supervision import SupervisionView
from eplb.clock import Clock
from telemetry.load.drift import Drift
from telemetry.load.folder import Window
from telemetry.state.clock import StoreClock
from telemetry.state.store import StateStore

HANGS_S = 1.0  # a look at the store that takes longer is left out of an answer


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
        self.store, self.anomalies = store, AnomalyLog()
        self.clock, self.supervision = clock or StoreClock(store), supervision
        self._lock = threading.RLock()
        self._journal, self._place = EventFeed(store), StoreFold(folder)
        self._ranks, self._processes = RankFold(), ProcessFold()
        self._load, self._plans = LoadFold(store, history, latest), PlanFold(history)
        self._tally = EventTally()

    def refresh(self) -> None:
        """Read what is new in the store.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._lock:
            had_failed = self._place.begin_look()
            if isinstance(self.clock, StoreClock):
                self.clock.follow()
            info = self.store.current_run()
            self._read_events()
            known = self._load.info
            if info is not None and (known is None or info.run != known.run):
                self._load.follow(info, self._sample_every_s(), self.clock)
                self._ranks.begin_run()
            self._read_small()
            self._load.outages.clamp(self.clock())
            if (known := self._load.info) is not None:
                self._ranks.read_reports(self.store, known.run, self.clock())
                self._load.read(self._sample_every_s())
            if self._load.history is not None:
                self._load.age(self.clock())
                self._read_events()
            elif self._load.outages.token_time is None and not self._place.is_read:
                self._load.read_tokens_before()
            self._place.end_look(self.clock(), had_failed=had_failed)

    def _read_small(self) -> None:
        """Read what is small, whole."""
        now = self.clock()
        self._place.read(self.store)
        self._ranks.read(self.store)
        self._plans.read(self.store)
        self._processes.read(self.store, now)
        full = self.store.backend.why_full()
        self._place.look_for_room(full, self._ranks.states, self.clock())

    def _read_events(self) -> None:
        for event in self._journal.news():
            self._tally.note(event, ended=self._plans.note(event))
            self._load.outages.note_event(event)

    def _sample_every_s(self) -> float:
        return self._ranks.sample_every_s(self._load.info)

    def windows(self, last: int) -> list[Window]:
        """Return the latest windows with their matrices, oldest first."""
        with self._lock:
            return self._load.windows(last)

    def points(self, since: float, until: float, most: int) -> list[HistoryPoint]:
        """Return imbalance over a range of time, of all runs; nothing where none is kept."""
        with self._lock:
            history = self._load.history
            return [] if history is None else history.points(since, until, most)

    def history_marks(self, since: float, until: float) -> list[HistoryMark]:
        """Return what happened in a range of time."""
        with self._lock:
            history = self._load.history
            return [] if history is None else history.marks(since, until)

    def drift(self, seen: Reading) -> Drift | None:
        """Return how far the load is from the one that the serving placement was planned on.

        None: it is not known, or a look at the store hangs.
        """
        if not self._lock.acquire(timeout=HANGS_S):
            return None
        try:
            return self._load.drift.update(seen, self._load.windows(KEPT_WINDOWS))
        finally:
            self._lock.release()

    def received(self) -> NDArray[np.int64] | None:
        """[L, R] tokens that each rank received over all samples read so far; None without one."""
        with self._lock:
            return self._load.received()

    def judged(self, seen: Reading) -> Reading:
        """Judge a reading, and note what is wrong."""
        with_verdict = judged(seen)
        self.anomalies.note(with_verdict)
        return with_verdict

    def reading(self) -> Reading:
        """Put together what the last ``refresh`` found; the first one is made where none was.

        Raises:
            StoreError: nothing was read yet, and the store cannot be read.
        """
        with self._lock:
            if not self._place.is_read:
                self.refresh()
            unjudged = self.unread()
        return self.judged(unjudged)

    def unread(self) -> Reading:
        """Put together what is known without a look at the store; it is not judged."""
        with self._lock:
            now, run = self.clock(), self._load.run
            of_ranks = rank_tally(self._ranks.states)
            return Reading(
                state=self._state(of_ranks, now),
                series=self._load.series,
                marks=self._plans.marks({} if run is None else run.first_step_of),
                rebalances=self._plans.decisions.rebalances(),
                events=tuple(self._journal.latest),
                latest=next(iter(self._load.windows(1)), None),
                scale=None if run is None else run.scale,
                counts=self._tally.counts(of_ranks, self._load.earlier),
                open_migration=self._plans.published,
                is_read=self._place.is_read,
                answered_s=self._place.answered_s(now),
            )

    def _state(self, of_ranks: Tally, now: float) -> State:
        live, states, topology = self._place.live, self._ranks.states, self._load.topology
        answered_s, run = self._place.answered_s(now), self._load.run
        compiling = self._plans.compiling(self._processes.leadership.leader, now)
        return State(
            verdict=Grade.BLIND,  # until it is judged
            reason="",
            problems=(),
            store=self._place.state(self.store.deployment, now),
            start=self._load.start(),
            group=self._ranks.state(
                topology,
                self._plans.placement,
                live,
                self._load.outages.death,
                now,
                answered_s,
            ),
            progress=self._ranks.progress(now, answered_s),
            processes=self._processes.state(
                self.supervision(), topology, compiling, now, answered_s
            ),
            load=self._load.state(
                self._load.series, of_ranks[("samples_lost",)], self._sample_every_s(), now
            ),
            plans=self._plans.state(states, live, None if run is None else run.reader.model),
            moved=self._ranks.moved(of_ranks),
            orders=self._place.orders(self._plans.open_proposals(now)),
        )
