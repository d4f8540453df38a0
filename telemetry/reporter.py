"""The thread through which a rank reports: the step path hands over and goes on.

A store that is slow, full or gone never slows a step and never fails one. Samples wait in a
bounded queue; when it overflows the oldest is dropped and counted, and since the caller numbers
the samples, whoever reads them sees the gap.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from threading import Condition, Thread

from eplb.errors import RankError, StoreError
from eplb.load import LoadSample
from telemetry.store import LoadStore, RankState

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReporterStats:
    """What became of the samples handed over so far."""

    offered: int
    stored: int  # acknowledged by the store; repeats that it knew already are among them
    dropped: int  # overflowed, or offered after close
    waiting: int
    errors: int  # failed attempts to write
    last_error: str  # "" before the first


class Reporter:
    """Writes one rank's samples and state to the store, in a thread of its own.

    ``offer`` and ``state`` hold a lock for microseconds, never while the store works.
    """

    def __init__(
        self, store: LoadStore, *, capacity: int = 256, state_interval_s: float = 0.1
    ) -> None:
        assert capacity > 0, "a queue without room would drop every sample"
        self._store = store
        self._capacity = capacity
        self._state_interval_s = state_interval_s
        self._changed = Condition()
        self._queue: deque[LoadSample] = deque()
        self._in_flight: list[LoadSample] = []
        self._state: RankState | None = None  # the newest one that is not written yet
        self._num_flushing = 0
        self._is_closing = False
        self._broken: BaseException | None = None  # what ended the thread against our will
        self._offered = self._stored = self._dropped = self._errors = 0
        self._dropped_at_flush = 0
        self._last_error = ""
        self._thread = Thread(target=self._run, name=f"reporter-{store.deployment}", daemon=True)
        self._thread.start()

    def offer(self, sample: LoadSample) -> bool:
        """Hand over a sample. Never blocks, never raises; False when a sample was dropped for it.

        That is the oldest one, or after ``close`` this one.
        """
        with self._changed:
            self._offered += 1
            if self._is_closing or self._broken is not None:
                self._dropped += 1
                return False
            self._queue.append(sample)
            num_dropped = self._trim()
            self._changed.notify_all()
        return num_dropped == 0

    def state(self, state: RankState) -> None:
        """Hand over what the rank says of itself; only the newest is kept.

        It is written with the next samples, or on its own after ``state_interval_s`` at most.
        """
        with self._changed:
            is_first = self._state is None
            self._state = state
            if is_first:
                self._changed.notify_all()

    def stats(self) -> ReporterStats:
        """Return the counts, all of one moment."""
        with self._changed:
            return ReporterStats(
                self._offered,
                self._stored,
                self._dropped,
                self._num_waiting(),
                self._errors,
                self._last_error,
            )

    def flush(self, timeout_s: float) -> None:
        """Wait until everything handed over is stored.

        Raises:
            RankError: something was not stored in time, or was dropped since the last flush.
        """
        with self._changed:
            self._num_flushing += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_idle() or self._broken is not None, timeout_s)
            self._num_flushing -= 1
            waiting, is_idle = self._num_waiting(), self._is_idle()
            dropped = self._dropped - self._dropped_at_flush
            self._dropped_at_flush = self._dropped
            if not is_idle or dropped or self._broken is not None:
                raise RankError(
                    f"reporter of {self._store.deployment!r}: {waiting} samples"
                    f"{'' if self._state is None else ' and the state'} not stored within "
                    f"{timeout_s:g} s, {dropped} dropped, expected all {self._offered} stored; "
                    f"last error: {self._last_error or 'none'}"
                ) from self._broken

    def close(self, timeout_s: float) -> None:
        """Flush, then end the thread; what is handed over later is dropped. Twice is once.

        Raises:
            RankError: as ``flush``, or the thread is stuck in the store.
        """
        with self._changed:
            if self._is_closing:
                return
        deadline = time.monotonic() + timeout_s
        try:
            self.flush(timeout_s)
        finally:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._thread.join(max(0.1, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise RankError(
                f"reporter of {self._store.deployment!r} did not end within {timeout_s:g} s, "
                "expected the store to answer"
            )

    def _run(self) -> None:
        try:
            backoff_s = _FIRST_BACKOFF_S
            while self._take_batch():
                error = self._write()
                if error is None:
                    backoff_s = _FIRST_BACKOFF_S
                    continue
                if backoff_s == _FIRST_BACKOFF_S:  # once for each time that the store is in trouble
                    log.warning("the load store failed, trying again: %s", error)
                with self._changed:
                    self._put_back(error)
                    # New samples do not cut this short: a store in trouble is not to be hammered.
                    self._changed.wait_for(lambda: self._is_closing, backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
        except BaseException as exc:
            # No store failure but a fault of ours or the caller's: kept for flush and close, which
            # raise it; the step path goes on.
            with self._changed:
                self._broken = exc
                self._last_error = f"{type(exc).__name__}: {exc}"
                self._changed.notify_all()

    def _take_batch(self) -> bool:
        """Wait for something to write and take it; False when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._state or self._is_closing)
            if not self._queue:
                # A state alone may wait for samples, so that it costs no transaction of its own.
                self._changed.wait_for(self._is_urgent, self._state_interval_s)
            if self._is_closing:
                return False
            self._in_flight = list(self._queue)
            self._queue.clear()
            return True

    def _is_urgent(self) -> bool:
        return bool(self._queue) or self._num_flushing > 0 or self._is_closing

    def _write(self) -> StoreError | None:
        """Write what is in flight, and the newest state; return the store's failure, if any."""
        try:
            if self._in_flight:
                self._store.append(self._in_flight)
                self._acknowledge(len(self._in_flight))
            state = self._state
            if state is not None:
                self._store.report(state)
        except StoreError as exc:
            return exc
        with self._changed:
            if self._state is state:
                self._state = None
            self._changed.notify_all()
        return None

    def _acknowledge(self, num_samples: int) -> None:
        with self._changed:
            self._stored += num_samples
            self._in_flight = []
            self._changed.notify_all()

    def _put_back(self, error: StoreError) -> None:
        self._errors += 1
        self._last_error = str(error)
        # Even if the store wrote the batch before it failed: it tells repeats by their sequence.
        self._queue.extendleft(reversed(self._in_flight))
        self._in_flight = []
        self._trim()

    def _trim(self) -> int:
        """Drop the oldest samples that the queue has no room for."""
        num_over = max(0, len(self._queue) - self._capacity)
        for _ in range(num_over):
            self._queue.popleft()
        self._dropped += num_over
        return num_over

    def _num_waiting(self) -> int:
        return len(self._queue) + len(self._in_flight)

    def _is_idle(self) -> bool:
        return not self._num_waiting() and self._state is None
