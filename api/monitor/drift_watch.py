"""How far the load has moved since the placement that serves was planned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from api.monitor.snapshot import Snapshot
from eplb.core.load import LoadHistory
from telemetry.load.drift import Drift, drift
from telemetry.load.folder import Window, history
from telemetry.state.events import Event, PlanEnd, read_event

COMPARED_WINDOWS = 4  # the latest ones
PLANNED_WINDOWS = 4  # windows of a plan whose event does not name them


class DriftWatch:
    """Keeps the load that the serving placement was planned on, for as long as it serves.

    It is found among the windows at hand, so a process that begins to watch long after a commit
    does not know it, and gives None until the next one. The same holds for a first placement,
    which was planned on no load.
    """

    def __init__(self) -> None:
        self._serves: tuple[str | None, int | None] = (None, None)  # run and generation
        self._planned_on: LoadHistory | None = None
        self._planned_window = -1  # the newest of those

    def update(self, seen: Snapshot, windows: Sequence[Window]) -> Drift | None:
        """Give the drift of the latest windows; None while either side is not known.

        Args:
            seen: tells what serves, and the events that led to it.
            windows: those with their matrices, oldest first.
        """
        if (seen.run, seen.generation) != self._serves:
            self._serves, self._planned_on = (seen.run, seen.generation), None
        if self._planned_on is None:
            self._find(seen, windows)
        since = [window for window in windows if window.index > self._planned_window]
        latest = history(since, last=COMPARED_WINDOWS)
        if self._planned_on is None or latest is None:
            return None
        return drift(self._planned_on, latest)

    def _find(self, seen: Snapshot, windows: Sequence[Window]) -> None:
        event = _plan_behind(seen)
        if event is None:
            return
        newest = int(event.detail["window"])
        looked_at = int(event.detail.get("windows", PLANNED_WINDOWS))
        upto = [window for window in windows if window.index <= newest and window.is_complete]
        if upto and upto[-1].index == newest:
            self._planned_on = history(upto, last=looked_at)
            self._planned_window = newest


def _plan_behind(seen: Snapshot) -> Event | None:
    """The decision that led to the placement that serves, while it is among the kept events."""
    found: Event | None = None
    for event in seen.events:
        if event.kind == "run":
            found = None
        is_move = event.kind == "plan" and event.detail.get("decision") in ("MOVE", "RESPLIT")
        if is_move and "window" in event.detail:
            found = event
        if event.kind == "commit":
            end = read_event(event, PlanEnd)
            if end.generation == seen.generation:
                return found if end.plan_id > 0 else None
    return None


def largest_layer(found: Drift) -> float:
    """The drift of the layer that moved most."""
    return float(np.max(found.per_layer))
