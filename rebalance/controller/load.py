"""Load intake: the run that serves now, its samples folded into windows, and rejected samples.

No sample stops the controller. Samples that cannot be counted are counted by reason and reported to
the store: the first at once, later ones at most once a minute.
"""

from __future__ import annotations

import logging

from eplb.clock import Clock
from telemetry.load.counts import Outcome, Outcomes
from telemetry.load.folder import Window
from telemetry.load.reader import RunReader
from telemetry.state.events import EXCLUDED, FAILED, Failure, SampleCounts
from telemetry.state.store import StateStore

REPORT_EVERY_S = 60.0
# What should not happen; repeated and late samples are what an outage of the store leaves.
BAD: tuple[Outcome, ...] = ("future", "stale", "malformed")
UNREADABLE = "unreadable"

log = logging.getLogger(__name__)


class ServingGroup(RunReader):
    """The ranks that serve now, and their load as far as it was folded."""

    def complete_windows(self) -> list[Window]:
        """Return the windows that every rank reported, oldest first."""
        return [window for window in self.folder.windows() if window.is_complete]


class Arrivals:
    """Follows the latest run of a store.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, store: StateStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._group: ServingGroup | None = None
        self._skipped: dict[str, int] = {}

    def follow(self) -> ServingGroup | None:
        """Fold what is new of the run that serves now; None before the first one."""
        info = self._store.current_run()
        if info is not None and (self._group is None or self._group.run.run != info.run):
            self._group = ServingGroup(self._store, info, clock=self._clock)
            self._unreadable_before = self._num_unreadable()
            self._reported = self._counts(self._group.folder.outcomes)  # assumed without a report
            self._reported_at = -REPORT_EVERY_S
        if self._group is not None:
            for _ in self._group.read():
                pass  # plans are made of the folder's windows, not of single samples
        return self._group

    def report_skipped(self) -> None:
        """Write an event about records other than samples that cannot be read, if any are new."""
        skipped = self._store.skipped()
        if skipped == self._skipped:
            return
        self._skipped = skipped
        counts = ", ".join(f"{number} in {kind}" for kind, number in skipped.items())
        message = f"records of the store are damaged, or of an unknown version: {counts}"
        self._store.add_event(FAILED, Failure("store", message))

    def report_rejected(self) -> None:
        """Write an event about rejected samples, if there are new ones and a report is due."""
        assert self._group is not None, "reported for a run"
        outcomes, now = self._group.folder.outcomes, self._clock()
        counts = self._counts(outcomes)
        news = {name: counts[name] - reported for name, reported in self._reported.items()}
        is_news = any(number for name, number in news.items() if name != "accepted")
        if not is_news or now - self._reported_at < REPORT_EVERY_S:
            return
        self._reported, self._reported_at = counts, now
        bad = [name for name in (*BAD, UNREADABLE) if news[name]]
        if not bad:
            self._store.add_event(EXCLUDED, SampleCounts(counts))
            return
        reasons = {str(outcome): why for outcome, why in outcomes.reasons.items()}
        reasons[UNREADABLE] = "damaged, or of an unknown version"
        message = "; ".join(f"{news[name]} {name}: {reasons[name]}" for name in bad)
        log.warning("samples rejected: %s", message)
        self._store.add_event(FAILED, Failure("load", message, counts))

    def _counts(self, outcomes: Outcomes) -> dict[str, int]:
        counts = {str(outcome): number for outcome, number in outcomes.counts.items()}
        return counts | {UNREADABLE: self._num_unreadable() - self._unreadable_before}

    def _num_unreadable(self) -> int:
        return sum(self._store.refused().values())
