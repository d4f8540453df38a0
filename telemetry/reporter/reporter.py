"""The reporter of a rank: the step path hands over samples and state without waiting.

    step path -> inbox -> spool -> store
               (memory)  (disk)

Two threads move the samples on. The first polls the inbox, every ``LONGEST_TICK_S`` or more often,
and writes its content to disk, whatever the store does. The second moves it from disk to the store.
A store that is slow, full or unreachable never slows a step and never fails one: samples wait on
disk (``telemetry.reporter.spool``) and follow when the store is back. Samples without room are
dropped and counted, the oldest first. The caller numbers the samples, so readers detect the gap.

The step path wakes no thread and waits for none: waking a thread is a system call, and the woken
thread competes for the interpreter, or a lock, with the step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Condition, Lock, Thread

from eplb.core.load import LoadSample
from eplb.errors import RankError
from telemetry.reporter.counts import ReporterStats
from telemetry.reporter.drain import AT_ONCE, Drain, Tempo
from telemetry.reporter.spool import DEFAULT_CAPACITY, Spool
from telemetry.store import LoadStore, RankState

# How often the inbox is looked into: after a look in vain the time doubles, after any other it is
# halved. A sample waits for the longest at most until it is taken to the disk. A look costs 20 us.
SHORTEST_TICK_S, LONGEST_TICK_S = 0.02, 0.2


class Reporter:
    """Writes one rank's samples and state to the store, in its own threads.

    Args:
        spool: where samples wait; this reporter closes it. None for one in memory.
        tempo: how often the store is written to.
        seed: of the pauses between tries; another one for each rank.
    """

    def __init__(
        self,
        store: LoadStore,
        *,
        spool: Spool | None = None,
        capacity: int = DEFAULT_CAPACITY,
        tempo: Tempo = AT_ONCE,
        seed: int = 0,
    ) -> None:
        assert capacity > 0, "an inbox without room would drop every sample"
        self._name = f"reporter of {store.deployment!r}"
        self._capacity = capacity
        self._spool = spool or Spool(capacity=capacity)
        self._drain = Drain(store, self._spool, tempo, seed=seed)
        self._inbox: deque[LoadSample] = deque()
        self._offering = Lock()  # held by threads in ``offer`` alone
        self._offered = self._dropped = self._taken = 0
        self._bell: SimpleQueue[None] = SimpleQueue()  # rung to have the inbox looked into
        self._changed = Condition()  # what they wait on who ring it
        self._num_waiters = 0
        self._is_closing = self._is_closed = False
        self._broken: BaseException | None = None  # the exception that ended a thread
        self._lost_at_flush = 0
        self._threads = [
            self._start("inbox", self._take_in),
            self._start("drain", self._drain.run),
        ]

    def offer(self, sample: LoadSample) -> bool:
        """Hand over a sample. Never blocks, never raises; False when a sample was dropped for it.

        That is the oldest one, or after ``close`` this one. A sample on disk may be dropped later
        if the folder is full; ``stats`` counts it.
        """
        with self._offering:
            self._offered += 1
            if self._is_closing:
                self._dropped += 1
                return False
            self._inbox.append(sample)
            is_full = len(self._inbox) > self._capacity
            if is_full and self._taken_from_inbox() is not None:
                self._dropped += 1
        return not is_full

    def state(self, state: RankState) -> None:
        """Hand over the rank's state; only the newest is kept.

        It is written with the next samples, or on its own before long; see ``Tempo``.
        """
        self._drain.state(state)

    def stats(self) -> ReporterStats:
        """Return the counts. Never waits for store or disk, so a step may ask."""
        spool, (errors, store_error) = self._spool.counts(), self._drain.errors()
        errors |= {"disk": spool.errors} if spool.errors else {}
        in_inbox = max(0, self._offered - self._dropped - self._taken)
        return ReporterStats(
            offered=self._offered,
            recovered=spool.recovered,
            stored=spool.stored,
            repeated=spool.repeated,
            replayed=spool.replayed,
            spooled=spool.spooled,
            dropped=self._dropped + spool.dropped,
            refused=spool.refused,
            damaged=spool.torn + spool.damaged,
            waiting=in_inbox + spool.waiting,
            waiting_in_memory=in_inbox + spool.waiting_in_memory,
            bytes_on_disk=spool.bytes_on_disk,
            errors=sum(errors.values()),
            errors_by_kind=errors,
            last_error=self._reason() or store_error or spool.last_error,
        )

    def secure(self, timeout_s: float) -> None:
        """Wait until everything handed over would outlive this process.

        Raises:
            RankError: something would be lost with it: no disk takes it, and no store yet.
        """
        self._wait_until_taken(time.monotonic() + timeout_s)
        stats = self.stats()
        if stats.waiting_in_memory or self._broken is not None:
            raise RankError(
                f"{self._name}: {stats.waiting_in_memory} samples are only in memory after "
                f"{timeout_s:g} s, expected all on disk; last error: {stats.last_error or 'none'}"
            ) from self._broken

    def flush(self, timeout_s: float) -> None:
        """Wait until everything handed over is stored.

        Raises:
            RankError: something was not stored in time, or was lost since the last flush.
        """
        deadline = time.monotonic() + timeout_s
        self._wait_until_taken(deadline)
        self._drain.wait_until_empty(deadline)
        stats, has_state = self.stats(), self._drain.has_state()
        lost = stats.dropped + stats.refused - self._lost_at_flush
        self._lost_at_flush += lost
        if stats.waiting or has_state or lost or self._broken is not None:
            safe = stats.waiting - stats.waiting_in_memory
            raise RankError(
                f"{self._name}: {stats.waiting} samples{' and the state' if has_state else ''} "
                f"not stored within {timeout_s:g} s, {safe} of them on disk; "
                f"{lost} dropped or refused, expected all {stats.offered} stored; "
                f"last error: {stats.last_error or 'none'}"
            ) from self._broken

    def close(self, timeout_s: float) -> None:
        """Flush, then end the threads; what is handed over later is dropped. Twice is once.

        What waits on disk stays there for the next process of this rank.

        Raises:
            RankError: as ``flush``, or a thread is stuck in the store.
        """
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + timeout_s
        try:
            self.flush(timeout_s)
        finally:
            self._end()
            for thread in self._threads:
                thread.join(max(0.1, deadline - time.monotonic()))
            stuck = [thread.name for thread in self._threads if thread.is_alive()]
            if not stuck:
                self._spool.close()
        if stuck:
            raise RankError(
                f"{self._name} did not end within {timeout_s:g} s: found {', '.join(stuck)} "
                "still running, expected the store and the disk to respond"
            )

    def _start(self, what: str, work: Callable[[], None]) -> Thread:
        thread = Thread(target=self._run, args=(work,), name=f"reporter-{what}", daemon=True)
        thread.start()
        return thread

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:
            # Not a failure of the store but a bug: kept for flush and close, which raise it; the
            # step path continues.
            self._broken = exc
            self._end()

    def _take_in(self) -> None:
        """Move samples from the inbox to the spool, until it is time to end."""
        is_closing, tick_s = False, SHORTEST_TICK_S
        while not is_closing:
            with suppress(Empty):
                self._bell.get(timeout=tick_s)
            is_closing = self._is_closing  # first: what was offered before is taken below
            num_taken = self._taken
            while (sample := self._taken_from_inbox()) is not None:
                self._spool.add([sample])
                self._taken += 1
            is_news = self._drain.nudge() or self._taken > num_taken
            tick_s = min(max(tick_s * (0.5 if is_news else 2.0), SHORTEST_TICK_S), LONGEST_TICK_S)
            if self._num_waiters:
                with self._changed:
                    self._changed.notify_all()

    def _taken_from_inbox(self) -> LoadSample | None:
        try:
            return self._inbox.popleft()
        except IndexError:
            return None

    def _wait_until_taken(self, deadline: float) -> None:
        """Wait until what was offered before this call is on the spool."""
        with self._changed:
            self._num_waiters += 1
            self._bell.put(None)
            self._changed.wait_for(
                lambda: self._offered == self._dropped + self._taken or self._broken is not None,
                max(0.0, deadline - time.monotonic()),
            )
            self._num_waiters -= 1

    def _end(self) -> None:
        with self._offering:  # who offers has done so, or is refused from now on
            self._is_closing = True
        self._bell.put(None)
        with self._changed:
            self._changed.notify_all()
        self._drain.end()

    def _reason(self) -> str:
        return "" if self._broken is None else f"{type(self._broken).__name__}: {self._broken}"
