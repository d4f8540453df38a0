"""The reporter of a rank: the step path hands over samples and state without waiting.

    step path -> inbox -> spool -> store
               (memory)  (disk)

Two threads move the samples on. The first polls the inbox, every ``LONGEST_TICK_S`` or more often,
and writes its content to disk, whatever the store does. The second moves it from disk to the store.
A store that is slow, full or unreachable never slows a step and never fails one: samples wait on
disk (``telemetry.load.spool``) and follow when the store is back. Samples without room are
dropped and counted, the oldest first. The caller numbers the samples, so readers detect the gap.

The step path wakes no thread and waits for none: waking a thread is a system call, and the woken
thread competes for the interpreter, or a lock, with the step.

After a failure the store is retried after a pause that doubles up to ``LONGEST_PAUSE_S``. Each
pause is drawn at random so that ranks do not reconnect all at once. The pause also bounds the time
until a recovery is detected.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Condition, Lock, Thread
from typing import Annotated

from eplb.core.load import LoadSample
from eplb.declared import Setting
from eplb.errors import EplbError, RankError, StoreError
from telemetry.load.spool import DEFAULT_CAPACITY, ReporterStats, Spool
from telemetry.state.clock import StoreClock
from telemetry.state.runs import CLOCK_OFFSET_S, RankState
from telemetry.state.store import StateStore

# How often the inbox is looked into: after a look in vain the time doubles, after any other it is
# halved. A sample waits for the longest at most until it is taken to the disk. A look costs 20 us.
SHORTEST_TICK_S, LONGEST_TICK_S = 0.02, 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # after a failure of the store
BATCH = 64  # samples of a backlog, and new ones, in one write
SUSPICIOUS = 3  # so many failures in a row are no accident: the samples are tried one by one then
REST = 3.0  # pause after a write of backlog, as a multiple of the processor time that it took

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tempo:
    """Write intervals of a rank.

    A write of several samples costs hardly more than one of a single sample, so many ranks on one
    store do well to let some gather; on disk they are safe meanwhile.
    """

    store_interval: Annotated[
        float,
        Setting("least time between two writes of a rank to the store", unit="s", at_most=3600),
    ] = 0.0
    state_interval: Annotated[
        float, Setting("how long a rank's state may wait for samples", unit="s", at_most=3600)
    ] = 0.1


AT_ONCE = Tempo()


class Reporter:
    """Writes one rank's samples and state to the store, in its own threads.

    Args:
        spool: where samples wait; this reporter closes it. None for one in memory.
        tempo: how often the store is written to.
        clock: follows the store's while this reporter writes; samples and states are to be dated by
            it. None: of this process.
        seed: of the pauses between tries; another one for each rank.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        spool: Spool | None = None,
        capacity: int = DEFAULT_CAPACITY,
        tempo: Tempo = AT_ONCE,
        clock: StoreClock | None = None,
        seed: int = 0,
    ) -> None:
        assert capacity > 0, "an inbox without room would drop every sample"
        self._name = f"reporter of {store.deployment!r}"
        self._store, self._spool, self._tempo = store, spool or Spool(capacity=capacity), tempo
        self.clock = clock or StoreClock(store)
        self._capacity, self._random = capacity, random.Random(seed)
        self._inbox: deque[LoadSample] = deque()
        self._offering = Lock()  # held by threads in ``offer`` alone
        self._offered = self._dropped = self._taken = 0
        self._bell: SimpleQueue[None] = SimpleQueue()  # an entry has the inbox looked into
        self._changed = Condition()  # never held while the store or the disk works
        self._num_waiters = 0  # threads in ``secure`` and ``flush``
        self._state: RankState | None = None  # the newest
        self._seen: RankState | None = None  # the newest at the last look
        self._written: RankState | None = None  # the one that the store has
        self._is_idle = False  # the second thread waits for work
        self._is_ending = self._is_closed = False
        self._broken: BaseException | None = None  # the exception that ended a thread
        self._lost_at_flush = 0
        self._num_failures = 0  # of the store, in a row
        self._strikes: Counter[int] = Counter()  # of samples that failed where another was stored
        # Failed writes by type of error, replaced as a whole at each; the latest, "" before it.
        self._errors: Mapping[str, int] = {}
        self._last_error = ""
        self._threads = [
            Thread(target=self._run, args=(work,), name=f"reporter-{name}", daemon=True)
            for name, work in (("inbox", self._take_in), ("drain", self._drain))
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, sample: LoadSample) -> bool:
        """Hand over a sample. Never blocks, never raises; False when a sample was dropped for it.

        That is the oldest one, or after ``close`` this one. A sample on disk may be dropped later
        if the folder is full; ``stats`` counts it.
        """
        with self._offering:
            self._offered += 1
            if self._is_ending:
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
        self._state = state

    def stats(self) -> ReporterStats:
        """Return the counts. Never waits for store or disk, so a step may ask."""
        # The inbox first: a sample that passes to the spool meanwhile is seen twice, never nowhere.
        in_inbox = max(0, self._offered - self._dropped - self._taken)
        spool, errors, broken = self._spool.stats(), self._errors, self._broken
        reason = "" if broken is None else f"{type(broken).__name__}: {broken}"
        return replace(
            spool,
            offered=self._offered,
            dropped=self._dropped + spool.dropped,
            waiting=in_inbox + spool.waiting,
            waiting_in_memory=in_inbox + spool.waiting_in_memory,
            errors=sum(errors.values()) + spool.errors,
            errors_by_kind={**errors, **spool.errors_by_kind},
            last_error=reason or self._last_error or spool.last_error,
        )

    def secure(self, timeout_s: float) -> None:
        """Wait until everything handed over would outlive this process.

        Raises:
            RankError: something would be lost with it: no disk takes it, and no store yet.
        """
        self._wait_for(self._is_inbox_taken, time.monotonic() + timeout_s)
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
        self._wait_for(self._is_inbox_taken, deadline)
        self._wait_for(lambda: not self._has_work() or self._is_ending, deadline)
        stats, has_state = self.stats(), self._has_state()
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

    def _wait_for(self, predicate: Callable[[], bool], deadline: float) -> None:
        with self._changed:
            self._num_waiters += 1
            self._bell.put(None)
            self._changed.notify_all()
            self._changed.wait_for(predicate, max(0.0, deadline - time.monotonic()))
            self._num_waiters -= 1

    def _is_inbox_taken(self) -> bool:
        return self._offered == self._dropped + self._taken or self._broken is not None

    def _has_state(self) -> bool:
        return self._state is not self._written

    def _has_work(self) -> bool:
        return self._spool.has_waiting or self._has_state()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:
            # Not a failure of the store but a bug: kept for flush and close, which raise it; the
            # step path continues.
            self._broken = exc
            self._end()

    def _end(self) -> None:
        """Make both threads end soon, whatever waits."""
        with self._offering:  # who offers has done so, or is refused from now on
            self._is_ending = True
        self._bell.put(None)
        with self._changed:
            self._changed.notify_all()

    # -- the first thread: from the inbox to the spool

    def _take_in(self) -> None:
        is_ending, tick_s = False, SHORTEST_TICK_S
        while not is_ending:
            with suppress(Empty):
                self._bell.get(timeout=tick_s)
            is_ending = self._is_ending  # first: what was offered before it is taken below
            num_taken, state = self._taken, self._state
            while (sample := self._taken_from_inbox()) is not None:
                self._spool.add([sample])
                self._taken += 1
            is_news = state is not self._seen or self._taken > num_taken
            self._seen = state
            tick_s = min(max(tick_s * (0.5 if is_news else 2.0), SHORTEST_TICK_S), LONGEST_TICK_S)
            if self._num_waiters or (self._is_idle and self._has_work()):
                with self._changed:
                    self._changed.notify_all()

    def _taken_from_inbox(self) -> LoadSample | None:
        try:
            return self._inbox.popleft()
        except IndexError:
            return None

    # -- the second thread: from the spool to the store

    def _drain(self) -> None:
        while self._wait_for_work():
            started = time.thread_time()
            try:
                self._write()
            except StoreError as exc:
                self._note_failure(exc)
                continue
            self._num_failures = 0
            # In a backlog, yield the interpreter to the step path; else let samples gather.
            worked_s = time.thread_time() - started
            rest_s = REST * worked_s if self._spool.has_backlog else self._tempo.store_interval
            with self._changed:
                self._changed.notify_all()
                if rest_s:
                    self._changed.wait_for(lambda: self._num_waiters > 0 or self._is_ending, rest_s)

    def _wait_for_work(self) -> bool:
        """Wait for something to write; False when it is time to end."""
        with self._changed:
            self._is_idle = True
            self._changed.wait_for(lambda: self._has_work() or self._is_ending)
            if not self._spool.has_waiting:
                # A state alone may wait for samples, so that it costs no transaction of its own.
                self._changed.wait_for(
                    lambda: self._spool.has_waiting or self._num_waiters > 0 or self._is_ending,
                    self._tempo.state_interval,
                )
            self._is_idle = False
            return not self._is_ending

    def _note_failure(self, error: StoreError) -> None:
        """Count a failure, and leave the store alone for a while; new samples do not end this."""
        if self._num_failures == 0:  # once for each time that the store is in trouble
            log.warning("load store failed, retrying: %s", error)
        kind = type(error).__name__
        self._errors = {**self._errors, kind: self._errors.get(kind, 0) + 1}
        self._last_error = str(error)
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_failures, 16))
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_ending, longest_s * self._random.uniform(0.5, 1.0)
            )
        self._num_failures += 1

    def _write(self) -> None:
        """Write a batch and the newest state.

        Raises:
            StoreError: the store failed; what it does not have goes back to the spool.
        """
        try:
            self.clock.follow()
            self._write_batch()
            state = self._state
            if state is not None and state is not self._written:
                offset = {CLOCK_OFFSET_S: round(self.clock.offset_s, 3)}
                self._store.report(replace(state, detail={**state.detail, **offset}))
                self._written = state
        finally:
            self._spool.give_back()

    def _write_batch(self) -> None:
        if self._num_failures >= SUSPICIOUS:
            batch = self._spool.lend(2)
            ends = sorted({min(batch), max(batch)}) if batch else []  # new ones are behind old ones
            self._write_singly({position: batch[position] for position in ends})
            return
        batch = self._spool.lend(BATCH)
        try:
            if batch:
                self._append(batch)
        except StoreError:
            raise
        except EplbError:  # one of them cannot be stored, ever; the others are not to wait for it
            self._write_singly(batch)

    def _write_singly(self, batch: Mapping[int, LoadSample]) -> None:
        """Write samples one by one, and refuse those that are at fault themselves.

        Sure is that only where they are called impossible. A sample that fails again and again
        while another is stored has the same end, or it would hold up all others for good.
        """
        failed: dict[int, StoreError] = {}
        for position, sample in batch.items():
            try:
                self._append({position: sample})
            except StoreError as exc:
                failed[position] = exc
            except EplbError as exc:
                self._refuse(position, exc)
        if len(failed) < len(batch):
            self._strikes.update(list(failed))
            self._num_failures = SUSPICIOUS - 1  # the store is there: no long pause
        for position, error in failed.items():
            if self._strikes[position] < SUSPICIOUS:
                raise error
            self._refuse(position, error)

    def _append(self, batch: Mapping[int, LoadSample]) -> None:
        num_new = self._store.append(list(batch.values()))
        self._spool.settle(batch, num_new=num_new)

    def _refuse(self, position: int, why: EplbError) -> None:
        log.warning("sample rejected: %s", why)
        self._spool.refuse(position, why)
        del self._strikes[position]
