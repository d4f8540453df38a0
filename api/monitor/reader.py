"""Reads a store in the background, so that history is kept and answers wait for no store.

    store -> every second, or when it changes -> Monitor.refresh -> Reading

A store that fails or hangs ends nothing: the latest reading stays, and its age is part of the
verdict. Before the first reading, what is known without the store is answered, as blind.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from api.monitor.monitor import Monitor
from api.monitor.state import Reading
from eplb.clock import Clock
from eplb.errors import EplbError

PERIOD_S = 1.0
LEAST_S = 0.2  # between two readings, however often the store changes
UNREAD_S = 5.0  # without a reading: the store does not answer
STOP_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


class BackgroundReader:
    """Reads on its own thread between ``start`` and ``stop``, else whenever it is asked.

    Args:
        monitor: follows the store; this object refreshes it.
        clock: of the age of a reading.
    """

    def __init__(self, monitor: Monitor, *, clock: Clock = time.monotonic) -> None:
        self.monitor, self._clock = monitor, clock
        self._lock = threading.Lock()
        self._latest: Reading | None = None
        self._unread = monitor.unread()  # what is known while nothing was read
        # Set after the first look at the store, also one that failed.
        self._has_looked = threading.Event()
        self._listeners: frozenset[Callable[[], None]] = frozenset()  # replaced, never changed
        self._read_at, self._failure = clock(), ""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether the store is read in the background."""
        return self._thread is not None

    @property
    def latest(self) -> Reading | None:
        """The latest reading as it was judged then; None: the store was not read yet."""
        return self._latest

    @contextmanager
    def listening(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have a function called after each reading. One thread alone may add listeners."""
        self._listeners |= {wake}
        try:
            yield
        finally:
            self._listeners -= {wake}

    def wake_listeners(self) -> None:
        """Call every listener."""
        for wake in self._listeners:
            wake()

    def start(self) -> None:
        """Begin to read in the background."""
        self._stopped.clear()
        self._latest = None  # it was read before the thread began, so it may be old
        self._has_looked.clear()
        self._read_at = self._clock()
        self._thread = threading.Thread(target=self._run, name="eplb-reader", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Have the thread end, without a wait for it."""
        self._stopped.set()

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the thread; one that hangs in the store is a daemon, and is left behind."""
        self.end()
        if self._thread is not None:
            self._thread.join(deadline_s)
            self._thread = None

    def reading(self) -> Reading:
        """Return the latest reading, which the first look of the thread is waited for; without a
        thread, read now.

        Raises:
            StoreError: there is no thread, and the store cannot be read.
        """
        if not self.is_running:
            return self._read()
        self._has_looked.wait(UNREAD_S)
        with self._lock:
            latest, age_s, why = self._latest, self._clock() - self._read_at, self._failure
        if latest is not None and not why and age_s <= UNREAD_S:
            return latest
        why = f"the store has not been read for {age_s:.0f} s: {why or 'it does not answer'}"
        known = latest
        if known is None:
            state, now = self._unread.state, self.monitor.clock()
            processes = replace(state.processes, supervision=self.monitor.supervision())
            state = replace(state, store=replace(state.store, time=now), processes=processes)
            known = replace(self._unread, state=state)
        state = replace(known.state, store=replace(known.state.store, unread=why))
        return self.monitor.judged(replace(known, state=state))

    def _read(self) -> Reading:
        self.monitor.refresh()
        found = self.monitor.reading()
        with self._lock:
            self._latest, self._read_at, self._failure = found, self._clock(), ""
        self._has_looked.set()
        self.wake_listeners()
        return found

    def _run(self) -> None:
        version = 0
        while not self._stopped.is_set():
            try:
                self._read()
                version = self.monitor.store.wait(version, PERIOD_S)
            except EplbError as exc:
                self._failed(f"{type(exc).__name__}: {exc}")
                self._stopped.wait(PERIOD_S)
            except Exception as exc:  # logged, and a reason of the verdict
                log.exception("the reader of the store failed")
                self._failed(repr(exc))
                self._stopped.wait(PERIOD_S)
            self._stopped.wait(LEAST_S)

    def _failed(self, why: str) -> None:
        with self._lock:
            self._failure = why
        self._has_looked.set()
