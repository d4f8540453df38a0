"""Limits of a link: a budget of bytes a second, and the back-off of a peer that failed.

Pulls at full speed delay serving: 88 MB from a peer in every step added 52 % to the slowest steps,
8 MB in every step (19 GB/s) added 0.3 % (measured on 4 x H200). So bytes are pulled in small
chunks, at a steady rate. Only ``ByteBudget`` waits: other callers get the time of the next attempt.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from eplb.errors import MigrationError

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 * 2**20  # between two looks at a budget, and worked into the digest at once
NOW = -math.inf  # a time that has always passed
FIRST_BACK_OFF_S = 1.0  # doubled at every failure that follows another


class TokenBucket:
    """A rate in bytes per second, with a burst of at most ``burst_bytes`` after idle time."""

    def __init__(
        self, bytes_per_second: float, burst_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._rate, self._burst, self._clock = bytes_per_second, burst_bytes, clock
        self._bytes, self._at = float(burst_bytes), clock()

    def ready_at(self, num_bytes: int) -> float:
        """When ``num_bytes`` may go; a time that has passed means now.

        More than the burst may go once the bucket is full, and is paid for afterwards.
        """
        self._refill()
        missing = min(num_bytes, self._burst) - self._bytes
        return NOW if missing <= 0 else self._at + missing / self._rate

    def take(self, num_bytes: int) -> None:
        """Spend ``num_bytes``."""
        self._refill()
        self._bytes -= num_bytes

    def change_rate(self, bytes_per_second: float) -> None:
        """Refill at another rate from now on; what was spent before stays spent."""
        self._refill()
        self._rate = bytes_per_second

    def _refill(self) -> None:
        now = self._clock()
        if math.isinf(self._rate):
            self._bytes = float(self._burst)
        else:
            grown = self._bytes + (now - self._at) * self._rate
            self._bytes = min(float(self._burst), grown)
        self._at = now


class ByteBudget:
    """A budget of bytes a second for one direction, shared by threads. Each pays, then moves."""

    def __init__(self, bytes_per_second: float, is_closing: threading.Event) -> None:
        self._bucket = TokenBucket(bytes_per_second, CHUNK_BYTES, time.monotonic)
        self._lock, self._is_closing = threading.Lock(), is_closing

    def spend(self, num_bytes: int, deadline: float) -> None:
        """Wait until ``num_bytes`` may go.

        Raises:
            MigrationError: not before the deadline, or this side is closing.
        """
        while True:
            now = time.monotonic()
            with self._lock:
                ready_at = self._bucket.ready_at(num_bytes)
                if ready_at <= now:
                    self._bucket.take(num_bytes)
                    return
            if ready_at >= deadline:
                raise MigrationError("bandwidth budget exhausted until after the deadline")
            if self._is_closing.wait(ready_at - now):
                raise MigrationError("this process is closing its connections")


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
