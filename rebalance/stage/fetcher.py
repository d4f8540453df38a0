"""Fetches single records outside of migrations, and waits until staging has no copies under way.

Staging memory is reused only after ``settle`` has found that nothing writes to it. If that fails,
it is never used again, and migrations stay disabled on this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Generator

from eplb.clock import Clock
from eplb.errors import MigrationError
from rebalance.protocol import phases
from rebalance.stage.lanes import Pull
from rebalance.stage.stager import Stager
from rebalance.threads.cancellation import IsWanted
from rebalance.threads.waiting import SharedPhase, Wait, drive
from rebalance.threads.watchdog import Heartbeat

log = logging.getLogger(__name__)


class Fetcher:
    """Used by the mover's thread alone."""

    def __init__(self, rank: int, stager: Stager, beat: Heartbeat, clock: Clock) -> None:
        self._rank, self._stager, self._beat, self._clock = rank, stager, beat, clock
        self.is_drained = True  # False once copies could not be ended: they may still be writing

    def fetch(self, pull: Pull, shared: SharedPhase, is_wanted: IsWanted) -> bool:
        """Fetch and verify one record, while no migration is staged.

        Returns:
            Whether it is there; False if it is not wanted any more. Afterwards nothing writes to
            its destination, unless ``is_drained`` is False.

        Raises:
            MigrationError: no source has it.
        """
        if not self.is_drained:
            raise MigrationError("cancelled copies may still be writing to staging")
        is_there, failure = False, None

        def work() -> Generator[Wait, None, None]:
            nonlocal is_there, failure
            try:
                is_there = yield from self._stager.stage([pull], is_wanted)
            except Exception as exc:
                failure = exc  # raised below, once nothing writes any more
            yield from self.settle(shared)

        drive(work(), shared, self._clock)
        self._stager.meter.restart()  # it counts what a migration has staged: this was none
        if failure is not None:
            raise failure
        return is_there and self.is_drained

    def settle(self, shared: SharedPhase) -> Generator[Wait, None, None]:
        """Wait until nothing writes. Where that cannot be had, no plan is adopted any more."""
        self._beat.busy("waiting for ordered copies to end")
        try:
            yield from self._stager.drain()
            self._release()
        except Exception as exc:
            # Too late or a broken device: what may still be written must not be used again.
            log.exception("rank %d: staging copies did not end", self._rank)
            self.is_drained = False
            shared.update(phases.freeze, f"rank {self._rank}: staging copies did not end: {exc}")

    def _release(self) -> None:
        """End the leases. A dead host holds none."""
        try:
            self._stager.host.release()
        except MigrationError as exc:
            log.warning("rank %d: %s", self._rank, exc)
