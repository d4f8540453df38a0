"""Restores a store that lost its contents (FLUSHALL, a server restarted without its files).

Every rank knows the state that balancing needs: the run, the serving placement, the switches, and
the highest plan id. Each rank checks after every poll. The first to find no placement restores all
of it in one change; the others find it there. Samples, tasks, events and the history of placements
are lost.
"""

from __future__ import annotations

import logging
from typing import Protocol

from eplb.core.placement import Placement
from telemetry.state.live import LiveState
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore

log = logging.getLogger(__name__)


class Serving(Protocol):
    """A rank's state, as far as the store must hold it."""

    def settled(self) -> tuple[Placement, int]:
        """Return the committed placement and the newest plan id, as known to this rank."""

    def describe(self) -> RankState:
        """Return how this rank stands."""


class StoreLoss:
    """One rank's copy of the store's state; called by its watcher alone."""

    def __init__(self, store: StateStore, serving: Serving) -> None:
        self._store, self._serving = store, serving
        self._run: RunInfo | None = None
        self._live: LiveState | None = None

    def is_restored(self, live: LiveState) -> bool:
        """Restore the store if it was lost; return whether the data just read from it is invalid.

        Args:
            live: the live settings as they were read last.

        Raises:
            StoreError: the store failed.
        """
        if self._store.committed() is not None:
            self._live = live
            if self._run is None:
                self._run = self._own_run()
            return False
        if self._run is None or self._live is None:
            return False  # nothing was committed yet that could be lost
        state, (placement, plan_id) = self._serving.describe(), self._serving.settled()
        reason = f"rank {state.rank} found no placement in the store: the store lost its contents"
        if self._store.restore(
            self._run, placement, self._live, last_plan_id=plan_id, reason=reason
        ):
            log.error("generation=%d %s; state restored", placement.generation, reason)
        return True

    def _own_run(self) -> RunInfo | None:
        name = self._serving.describe().run
        return next((info for info in self._store.runs() if info.run == name), None)
