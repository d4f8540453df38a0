"""A rank's connection to the reference checker."""

from __future__ import annotations

import queue
import threading
from multiprocessing.connection import Connection

from api.demo.workers.checker import SampledStep

CLOSE_DEADLINE_S = 20.0
MAX_WAITING = 4  # sampled steps; more are dropped and counted


class CheckerClient:
    """Sends sampled steps to the checker on a thread, so that a slow checker delays no step."""

    def __init__(self) -> None:
        self._pipe: Connection | None = None
        self._sending = threading.Lock()
        self.num_dropped = 0  # steps dropped because the checker was slow or down
        self._waiting: queue.Queue[SampledStep | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="check-feed", daemon=True)
        self._thread.start()

    def offer(self, sampled: SampledStep) -> None:
        """Queue a step, or drop it when the queue is full."""
        try:
            self._waiting.put_nowait(sampled)
        except queue.Full:
            self.num_dropped += 1

    def connect(self, pipe: Connection) -> None:
        """Send to this checker from now on: the first one, or a restarted one."""
        with self._sending:  # a send to one that exited ends at once
            self._close_pipe()
            self._pipe = pipe

    def close(self) -> None:
        """Send the queued steps, and then the end of the stream."""
        self._waiting.put(None, timeout=CLOSE_DEADLINE_S)
        self._thread.join(CLOSE_DEADLINE_S)
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _send_all(self) -> None:
        while (sampled := self._waiting.get()) is not None:
            if not self._is_sent(sampled):
                self.num_dropped += 1

    def _is_sent(self, sampled: SampledStep) -> bool:
        with self._sending:
            try:
                if self._pipe is not None:
                    self._pipe.send(sampled)
                return self._pipe is not None
            except OSError:  # the parent reports that the checker exited, and starts another
                return False
