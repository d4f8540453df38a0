"""The store's time of day, as each process of a deployment estimates it.

Clocks of hosts differ and jump. What processes write of a time (a sample, a report) and what
readers compare with it (an age, a window) is therefore by one clock, the store's: a process asks
for it now and then, and its own monotonic clock carries the answer on. How far its own clock of the
day is off is a figure to show, and moves nothing.
"""

from __future__ import annotations

import time

from eplb.clock import Clock
from telemetry.state.store import StateStore

MEASURED_EVERY_S = 5.0  # a jump of the store's clock is followed within that time
LONGEST_LOOK_S = 0.5  # an answer that took longer counts only where there is none yet


class StoreClock:
    """Seconds since the epoch by the store's clock; before the first answer, by the process's own.

    One thread measures; any thread may read, and none waits for the store to do so.

    Args:
        wall: the process's own clock of the day.
        monotonic: carries the answer on.
    """

    def __init__(
        self, store: StateStore, *, wall: Clock = time.time, monotonic: Clock = time.monotonic
    ) -> None:
        self._store, self._wall, self._monotonic = store, wall, monotonic
        self._lead_s: float | None = None  # the store's time less the monotonic clock's
        self._measured_at = 0.0

    def __call__(self) -> float:
        """Return the time."""
        lead_s = self._lead_s
        return self._wall() if lead_s is None else self._monotonic() + lead_s

    @property
    def offset_s(self) -> float:
        """Seconds by which the process's own clock is ahead of the store's; below 0: behind."""
        return self._wall() - self()

    def follow(self) -> None:
        """Ask the store for its time, unless that was done a moment ago.

        Raises:
            StoreError: the store does not answer.
        """
        begun = self._monotonic()
        if self._lead_s is not None and begun - self._measured_at < MEASURED_EVERY_S:
            return
        now = self._store.backend.now()
        ended = self._monotonic()
        self._measured_at = ended
        if self._lead_s is None or ended - begun <= LONGEST_LOOK_S:
            self._lead_s = now - (begun + ended) / 2
