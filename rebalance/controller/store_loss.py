"""A store that lost its contents (FLUSHALL, a server back without its files) is written anew.

Every rank knows what was lost that balancing cannot go on without: its run, the placement that
serves, the switches, and how far plan ids have come. Each looks after every look for news; the
first to find no placement writes all of it at once, the others find it there. Samples, tasks,
events and the history of placements are gone.
"""

from __future__ import annotations

import logging
from typing import Protocol

from eplb.core.placement import Placement
from telemetry.store import Control, LoadStore, RankState, RunInfo

log = logging.getLogger(__name__)


class Serving(Protocol):
    """A rank, as far as it can say what the store must hold."""

    def settled(self) -> tuple[Placement, int]:
        """Return what is committed as far as this rank knows, and the newest plan id it saw."""

    def describe(self) -> RankState:
        """Return how this rank stands."""


class StoreLoss:
    """What one rank remembers of the store; called by its watcher alone."""

    def __init__(self, store: LoadStore, serving: Serving) -> None:
        self._store, self._serving = store, serving
        self._run: RunInfo | None = None
        self._control: Control | None = None

    def is_restored(self, control: Control) -> bool:
        """Write the store anew if it was lost; say whether what was just read of it is void.

        Args:
            control: the switches as they were read last.

        Raises:
            StoreError: the store failed.
        """
        if self._store.committed() is not None:
            self._control = control
            if self._run is None:
                self._run = self._own_run()
            return False
        if self._run is None or self._control is None:
            return False  # nothing was committed yet that could be lost
        state, (placement, plan_id) = self._serving.describe(), self._serving.settled()
        reason = f"rank {state.rank} found no placement in the store: the store lost its contents"
        if self._store.restore(
            self._run, placement, self._control, last_plan_id=plan_id, reason=reason
        ):
            log.error("generation=%d %s; state restored", placement.generation, reason)
        return True

    def _own_run(self) -> RunInfo | None:
        name = self._serving.describe().run
        return next((info for info in self._store.runs() if info.run == name), None)
