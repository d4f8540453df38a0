"""Migrations that ended without a commit, one after the other, and how long the next plan waits.

What made one fail usually makes the next fail too: a rank that cannot stage, a disk that is full.
The count is read from the events of the store, so a new leader continues it.
"""

from __future__ import annotations

from eplb.clock import Clock
from rebalance.controller.open_migration import SWITCHED_OFF
from telemetry.state.events import OUTCOME_OF_EVENT, Event, plan_end
from telemetry.state.store import StateStore

LONGEST_S = 600.0  # unless the first wait is longer
MOST_READ = 32  # ends of migrations that a new leader looks back on


def back_off(num_failed: int, first_s: float) -> float:
    """Return the seconds from the latest of so many failures to the next plan."""
    if num_failed == 0:
        return 0.0
    return min(first_s * 2.0 ** (min(num_failed, MOST_READ) - 1), max(first_s, LONGEST_S))


class Failures:
    """Counts failed migrations since the last commit.

    Args:
        store: whose events tell how migrations ended.
        clock: of seconds since the epoch, as of the store.
    """

    def __init__(self, store: StateStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._seen: int | None = None  # id of the newest event that was read
        self._num_failed, self._failed_at, self._reason = 0, 0.0, ""

    def held_back(self, first_s: float) -> str:
        """Return why no plan is published now; "" if one may be.

        Args:
            first_s: the wait after one failure; it doubles with each further one.
        """
        self._read()
        now = self._clock()
        self._failed_at = min(self._failed_at, now)  # a clock that was set back: wait from now on
        left_s = self._failed_at + back_off(self._num_failed, first_s) - now
        if self._num_failed == 0 or left_s <= 0:
            return ""
        times = "time" if self._num_failed == 1 else "times in a row"
        return (
            f"migrations failed {self._num_failed} {times}, the latest: {self._reason}; "
            f"{left_s:.0f} s of back-off left"
        )

    def _read(self) -> None:
        """Count the ends of migrations that came since the last call."""
        if self._seen is None:
            self._seen = 0
            for event in reversed(self._since_commit()):
                self._count(event)
        while page := self._store.events(after=self._seen):
            for event in page:
                self._count(event)

    def _since_commit(self) -> list[Event]:
        """Return the latest ends of migrations, newest first, back to a commit."""
        found = []
        for event in self._store.events_backwards(OUTCOME_OF_EVENT):
            found.append(event)
            if OUTCOME_OF_EVENT[event.kind] == "committed" or len(found) == MOST_READ:
                break
        return found

    def _count(self, event: Event) -> None:
        self._seen = event.id
        end = plan_end(event)
        if end is None or end.reason == SWITCHED_OFF:
            return  # no plan's, or an operator's order
        if OUTCOME_OF_EVENT[event.kind] == "committed":
            self._num_failed = 0
        else:
            self._num_failed += 1
            self._failed_at, self._reason = event.time, end.reason
