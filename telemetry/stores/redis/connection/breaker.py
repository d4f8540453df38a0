"""A circuit breaker: stops requests to a server that does not respond.

    closed --N failures in a row--> open --cool-down--> half open --success--> closed
                                     ^                      |
                                     +-------failure--------+

Closed, every call may go. Open, none may. Half open, one may, and the others wait for its outcome.
"""

from __future__ import annotations

import time
from threading import Lock
from typing import Literal

from eplb.clock import Clock

BreakerState = Literal["closed", "open", "half open"]


class Breaker:
    """Counts failures in a row; all threads of a store share one."""

    def __init__(self, failures: int, cool_down_s: float, *, clock: Clock = time.monotonic) -> None:
        self._most, self._cool_down_s, self._clock = failures, cool_down_s, clock
        self._lock = Lock()
        self._failures = 0  # in a row
        self._open_until: float | None = None
        self._is_probing = False

    @property
    def state(self) -> BreakerState:
        """Where it stands."""
        with self._lock:
            if self._open_until is None:
                return "closed"
            return "open" if self._clock() < self._open_until else "half open"

    def is_probe(self) -> bool | None:
        """Whether a call that starts now is the one probe; None when it must not start."""
        with self._lock:
            if self._open_until is None:
                return False
            if self._is_probing or self._clock() < self._open_until:
                return None
            self._is_probing = True
            return True

    def succeed(self) -> None:
        """Count a success, which closes it."""
        with self._lock:
            self._failures, self._open_until, self._is_probing = 0, None, False

    def fail(self) -> None:
        """Count a failure, which may open it."""
        with self._lock:
            self._failures += 1
            self._is_probing = False
            if self._failures >= self._most:
                self._open_until = self._clock() + self._cool_down_s

    def abandon(self) -> None:
        """Cancel a call that has no outcome."""
        with self._lock:
            self._is_probing = False
