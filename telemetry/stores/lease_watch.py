"""Decides when a lease is over, by the watcher's monotonic clock.

A lease ends when its holder releases it, when it was not renewed for its time to live by the
*watcher's own* monotonic clock, or at once when the holder is a process of the same host that has
exited. The time in a lease is for display: a wall clock that is set back by an hour would leave
the deployment without a leader for that hour, and one that is set forward would take the lease
from a live leader. The price: a new watcher waits for one time to live before a takeover.
"""

from __future__ import annotations

import time
from threading import Lock

from eplb.clock import Clock
from telemetry.store import Lease, LeaseOf
from telemetry.stores.holder import is_dead

_Mark = tuple[str, int, int]


class LeaseWatch:
    """Remembers since when each lease of a deployment stands as it is."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock, self._lock = clock or time.monotonic, Lock()
        self._seen: dict[LeaseOf, tuple[_Mark, float]] = {}

    def is_over(self, lease: Lease) -> bool:
        """Return whether another may take this lease, the last one that was given out."""
        return self.age_s(lease) >= lease.ttl_s or is_dead(lease.holder)

    def age_s(self, lease: Lease) -> float:
        """Note a lease; return how long it was seen unchanged."""
        mark, now = (lease.holder, lease.token, lease.renewals), self._clock()
        with self._lock:
            if lease.of not in self._seen or self._seen[lease.of][0] != mark:
                self._seen[lease.of] = mark, now
            return now - self._seen[lease.of][1]
