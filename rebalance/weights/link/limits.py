"""Rate of staging: a bandwidth budget for each kind of link, and the engine's pause.

Pulls at full speed delay serving: 88 MB from a peer in every step added 52 % to the slowest steps,
8 MB in every step (19 GB/s) added 0.3 % (measured on 4 x H200). So bytes are pulled in small
chunks, at a steady rate. Only ``Budget`` waits: other callers get the time of the next attempt.
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


class Budget:
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


class Hold:
    """Pauses of staging that an engine requests, during prefills or KV transfers.

    Thread-safe. Staging stands still while any of them lasts. A pause without a resume ends at its
    deadline, because a migration that never ends would block every later one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._until: dict[object, float] = {}  # deadline of each pause, by whose it is

    def pause(self, deadline_s: float, of: object = None) -> None:
        """Pause staging until ``resume`` or for ``deadline_s``; a second call restarts it.

        Args:
            of: whose pause it is; each one's ends by itself.
        """
        with self._lock:
            self._until[of] = self.clock() + deadline_s

    def resume(self, of: object = None) -> None:
        """End one's pause; nothing where it has ended already."""
        with self._lock:
            self._until.pop(of, None)

    def ready_at(self) -> float:
        """When staging may continue; a time in the past means now."""
        with self._lock:
            now = self.clock()
            for of in [of for of, until in self._until.items() if now >= until]:
                log.warning(
                    "staging resumed: the pause reached its deadline without resume_staging"
                )
                del self._until[of]
            return max(self._until.values(), default=NOW)
