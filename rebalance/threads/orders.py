"""What a step hands over to the rank's other threads; ``rebalance.rank.watcher`` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from eplb.core.placement import Placement
from eplb.migration.build import Migration
from telemetry.state.events import Outcome
from telemetry.state.runs import Details


class Orders(Protocol):
    """Takes work off the step path. No call waits for the work."""

    def has_mover(self) -> bool:
        """Say whether the mover's thread lives."""

    def bring(self, migration: Migration) -> None:
        """Have the mover bring a migration's bytes."""

    def do(self, job: Callable[[], None]) -> None:
        """Have the mover's thread do something, after what it was given before."""

    def report_event(self, kind: str, detail: Details) -> None:
        """Have an event written to the store."""

    def commit(
        self, migration: Migration, serving: Placement, outcome: Outcome, reason: str
    ) -> None:
        """Have it written to the store that ``serving`` is what serves after ``migration``."""
