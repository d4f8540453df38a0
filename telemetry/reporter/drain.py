"""The thread that moves samples from a spool to the store, and writes the rank's state.

After a failure the store is retried after a pause that doubles up to ``LONGEST_PAUSE_S``. Each
pause is drawn at random so that ranks do not reconnect all at once. The pause also bounds the time
until a recovery is detected.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Condition

from eplb.core.load import LoadSample
from eplb.errors import EplbError, StoreError
from telemetry.reporter.spool import Spool
from telemetry.store import LoadStore, RankState

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
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

    write_s: float = 0.0  # least time from one write to the next
    state_s: float = 0.1  # how long a state may wait for samples to go with


AT_ONCE = Tempo()


class Drain:
    """Moves samples from a spool to a store. ``run`` has its own thread, the rest any."""

    def __init__(self, store: LoadStore, spool: Spool, tempo: Tempo, *, seed: int) -> None:
        self._store, self._spool, self._tempo = store, spool, tempo
        self._random = random.Random(seed)
        self._changed = Condition()  # never held while the store or the disk works
        self._state: RankState | None = None  # the newest
        self._seen: RankState | None = None  # the newest at the last nudge
        self._written: RankState | None = None  # the one that the store has
        self._num_waiters = 0
        self._is_idle = self._is_ended = False
        self._num_failures = 0  # in a row
        self._strikes: Counter[int] = Counter()  # of samples that failed where another was stored
        self._errors: dict[str, int] = {}
        self._last_error = ""

    def state(self, state: RankState) -> None:
        """Set the rank's newest state without waking ``run``; see telemetry.reporter.reporter."""
        self._state = state

    def has_state(self) -> bool:
        """Return whether a state waits to be written."""
        return self._state is not self._written

    def nudge(self) -> bool:
        """Wake ``run`` if it waits for work and there is some; return whether the state is new."""
        if self._is_idle and self._has_work():
            self._wake()
        state = self._state
        is_new, self._seen = state is not self._seen, state
        return is_new

    def errors(self) -> tuple[dict[str, int], str]:
        """Return how many writes failed, by type of error, and the last one; "" before it."""
        with self._changed:
            return dict(self._errors), self._last_error

    def wait_until_empty(self, deadline: float) -> None:
        """Return once everything is stored, ``run`` has ended, or the deadline has come."""
        with self._changed:
            self._num_waiters += 1
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._has_work() or self._is_ended,
                max(0.0, deadline - time.monotonic()),
            )
            self._num_waiters -= 1

    def end(self) -> None:
        """Make ``run`` return soon, whatever waits."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def run(self) -> None:
        """Store what comes, until ``end``."""
        try:
            while self._wait_for_work():
                started = time.thread_time()
                error = self._write()
                if error is None:
                    self._num_failures = 0
                    self._rest(time.thread_time() - started)
                    continue
                self._note(error)
                self._pause()
                self._num_failures += 1
        finally:
            self.end()

    def _wait_for_work(self) -> bool:
        """Wait for something to write; False when it is time to end."""
        with self._changed:
            self._is_idle = True
            self._changed.wait_for(lambda: self._has_work() or self._is_ended)
            if not self._spool.has_waiting:
                # A state alone may wait for samples, so that it costs no transaction of its own.
                self._changed.wait_for(self._is_urgent, self._tempo.state_s)
            self._is_idle = False
            return not self._is_ended

    def _has_work(self) -> bool:
        return self._spool.has_waiting or self.has_state()

    def _is_urgent(self) -> bool:
        return self._spool.has_waiting or self._num_waiters > 0 or self._is_ended

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _write(self) -> StoreError | None:
        """Write a batch and the newest state; return the store's failure, if any."""
        try:
            self._write_batch()
            state = self._state
            if state is not None and state is not self._written:
                self._store.report(state)
                self._written = state
        except StoreError as exc:
            return exc
        finally:
            self._spool.give_back()
        self._wake()
        return None

    def _write_batch(self) -> None:
        if self._num_failures >= SUSPICIOUS:
            batch = self._spool.lease(2)
            ends = sorted({min(batch), max(batch)}) if batch else []  # new ones are behind old ones
            self._write_singly({position: batch[position] for position in ends})
            return
        batch = self._spool.lease(BATCH)
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

    def _refuse(self, position: int, why: EplbError) -> None:
        log.warning("sample rejected: %s", why)
        self._spool.refuse(position, why)
        del self._strikes[position]

    def _append(self, batch: Mapping[int, LoadSample]) -> None:
        num_new = self._store.append(list(batch.values()))
        self._spool.settle(batch, num_new=num_new)

    def _note(self, error: StoreError) -> None:
        if self._num_failures == 0:  # once for each time that the store is in trouble
            log.warning("load store failed, retrying: %s", error)
        kind = type(error).__name__
        with self._changed:
            self._errors[kind] = self._errors.get(kind, 0) + 1
            self._last_error = str(error)

    def _pause(self) -> None:
        """Leave a failed store alone for a while; new samples do not cut this short."""
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_failures, 16))
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_ended, longest_s * self._random.uniform(0.5, 1.0)
            )

    def _rest(self, worked_s: float) -> None:
        """Wait for further samples; in a backlog, yield the interpreter to the step path."""
        rest_s = REST * worked_s if self._spool.has_backlog else self._tempo.write_s
        if rest_s:
            with self._changed:
                self._changed.wait_for(lambda: self._num_waiters > 0 or self._is_ended, rest_s)
