"""Back-off after failures of a host or a rank; it doubles with each further failure."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

FIRST_BACK_OFF_S = 1.0  # doubled at every failure that follows another

log = logging.getLogger(__name__)


class BackOff:
    """Suspends requests to one host or rank after failures. Thread-safe.

    Args:
        name: of the host or rank, for messages.
        most_s: upper limit of one back-off.
        clock: monotonic seconds.
    """

    def __init__(
        self, name: str, most_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._most_s, self._clock = name, most_s, clock
        self._lock = threading.Lock()
        self._rest_s, self._until, self._why = 0.0, -math.inf, ""

    def reason(self) -> str:
        """Return why requests are suspended; "" if they are not."""
        with self._lock:
            left_s = self._until - self._clock()
            return f"in back-off for {left_s:.1f} s more after: {self._why}" if left_s > 0 else ""

    def record_failure(self, why: str) -> None:
        """Start a back-off, twice as long as the one before."""
        with self._lock:
            now = self._clock()
            if now < self._until:
                return  # the same failure, seen by another thread
            self._rest_s = min(self._most_s, max(FIRST_BACK_OFF_S, 2 * self._rest_s))
            self._until, self._why = now + self._rest_s, why
        log.warning("%s: in back-off for %.3g s after: %s", self._name, self._rest_s, why)

    def record_success(self) -> None:
        """Reset the back-off after a successful request."""
        with self._lock:
            self._rest_s = 0.0
