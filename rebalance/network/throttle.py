"""How fast staging may go: a budget of bytes for each kind of link, and a hold for the engine.

Pulls that run flat out make serving late: 88 MB from a peer in every step added 52 % to the slowest
steps, 8 MB in every step (19 GB/s) added 0.3 % (measured on 4 x H200). So bytes are pulled in small
chunks, at a steady rate. Nothing here waits: it says when to look again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

NOW = -math.inf  # a time that has always passed


class TokenBucket:
    """So many bytes a second, and at most ``burst_bytes`` at once after a time of silence."""

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

    def _refill(self) -> None:
        now = self._clock()
        if math.isinf(self._rate):
            self._bytes = float(self._burst)
        else:
            grown = self._bytes + (now - self._at) * self._rate
            self._bytes = min(float(self._burst), grown)
        self._at = now


class Hold:
    """An engine's wish that nothing be staged now: during prefill, or a transfer of its KV cache.

    ``pause`` and ``resume`` may be called from any thread. A hold that is forgotten ends by itself,
    because a migration that never ends would hold back every later one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._until = NOW

    def pause(self, deadline_s: float) -> None:
        """Stage nothing until ``resume``, or for ``deadline_s``; a second call starts anew."""
        with self._lock:
            self._until = self.clock() + deadline_s

    def resume(self) -> None:
        """Let staging go on."""
        with self._lock:
            self._until = NOW

    def ready_at(self) -> float:
        """When staging may go on; a time that has passed means now."""
        with self._lock:
            if self._until != NOW and self.clock() >= self._until:
                log.warning(
                    "staging resumed: the pause reached its deadline without resume_staging"
                )
                self._until = NOW
            return self._until
