"""A rank's way to the reference checker."""

from __future__ import annotations

import queue
import threading
from multiprocessing.connection import Connection

from api.worker_checker import SampledStep

CLOSE_DEADLINE_S = 20.0
MAX_WAITING = 4  # sampled steps; more are left out and counted


class CheckFeed:
    """Hands sampled steps to the checker from a thread, so that a slow one never slows a step."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.num_left_out = 0  # steps that the checker was too slow for
        self._waiting: queue.Queue[SampledStep | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._feed, name="check-feed", daemon=True)
        self._thread.start()

    def offer(self, sampled: SampledStep) -> None:
        """Hand a step over, or leave it out when the checker is behind."""
        try:
            self._waiting.put_nowait(sampled)
        except queue.Full:
            self.num_left_out += 1

    def close(self) -> None:
        """Send what waits, and tell the checker that nothing follows."""
        self._waiting.put(None, timeout=CLOSE_DEADLINE_S)
        self._thread.join(CLOSE_DEADLINE_S)
        self._pipe.close()

    def _feed(self) -> None:
        while (sampled := self._waiting.get()) is not None:
            try:
                self._pipe.send(sampled)
            except OSError:  # the checker is gone; the parent says so
                return
