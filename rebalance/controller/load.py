"""Load intake: the run that serves now, its samples folded into windows, and rejected samples.

No sample stops the controller. Samples that cannot be counted are counted by reason and reported to
the store: the first at once, later ones at most once a minute.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from eplb.clock import Clock
from eplb.core.load import Phase
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.migration.serialisation import model_from_dict, topology_from_dict
from telemetry.store import LoadStore, RunInfo
from telemetry.windows.folder import Window, WindowFolder
from telemetry.windows.intake import Intake, Outcome
from telemetry.windows.run_windows import folder_of

REPORT_EVERY_S = 60.0
# What should not happen; repeated and late samples are what an outage of the store leaves.
BAD: tuple[Outcome, ...] = ("future", "stale", "malformed")
UNREADABLE = "unreadable"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """The ranks that serve now, and their load as far as it was folded."""

    run: RunInfo
    model: ModelShape
    topology: Topology
    folder: WindowFolder
    intake: Intake
    phase: Phase | None = None  # planned on alone; None: all phases together

    def complete_windows(self) -> list[Window]:
        """Return the windows that every rank reported, oldest first."""
        return [window for window in self.folder.windows(self.phase) if window.is_complete]


class Arrivals:
    """Follows the latest run of a store.

    Args:
        phase: see Group.
        clock: seconds since the epoch.
    """

    def __init__(self, store: LoadStore, phase: Phase | None, clock: Clock) -> None:
        self._store, self._phase, self._clock = store, phase, clock
        self._group: Group | None = None

    def follow(self) -> Group | None:
        """Fold what is new of the run that serves now; None before the first one."""
        info = self._store.current_run()
        if info is not None and (self._group is None or self._group.run.run != info.run):
            self._begin(info)
        if self._group is not None:
            self._fold(self._group)
        return self._group

    def _begin(self, info: RunInfo) -> None:
        topology = topology_from_dict(dict(info.topology))
        model = model_from_dict(dict(info.model))
        folder = folder_of(info, model, topology)
        intake = Intake(folder, (self._store.deployment, info.run))
        self._group = Group(info, model, topology, folder, intake, self._phase)
        self._cursor = 0
        self._unreadable_before = self._num_unreadable()
        self._reported = self._counts(intake)  # what a reader may assume without a report
        self._reported_at = -REPORT_EVERY_S

    def _fold(self, group: Group) -> None:
        while arrived := self._store.samples(group.run.run, after=self._cursor):
            group.intake.take([sample for _, sample in arrived], self._clock())
            self._cursor = arrived[-1][0]

    def report_rejected(self) -> None:
        """Write an event about rejected samples, if there are new ones and a report is due."""
        assert self._group is not None, "reported for a run"
        counts, now = self._counts(self._group.intake), self._clock()
        news = {name: counts[name] - reported for name, reported in self._reported.items()}
        is_news = any(number for name, number in news.items() if name != "accepted")
        if not is_news or now - self._reported_at < REPORT_EVERY_S:
            return
        self._reported, self._reported_at = counts, now
        bad = [name for name in (*BAD, UNREADABLE) if news[name]]
        if not bad:
            self._store.add_event("samples", {"samples": counts})
            return
        reasons = self._group.intake.reasons() | {UNREADABLE: "damaged, or of an unknown version"}
        message = "; ".join(f"{news[name]} {name}: {reasons[name]}" for name in bad)
        log.warning("samples rejected: %s", message)
        self._store.add_event("error", {"where": "load", "message": message, "samples": counts})

    def _counts(self, intake: Intake) -> dict[str, int]:
        counts = {str(outcome): number for outcome, number in intake.counts().items()}
        return counts | {UNREADABLE: self._num_unreadable() - self._unreadable_before}

    def _num_unreadable(self) -> int:
        return sum(self._store.refused().values())
