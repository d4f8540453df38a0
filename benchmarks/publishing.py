"""Publishes migrations continuously, on a thread whose failure is reported.

Benchmarks that move experts all the time use this instead of a controller: whenever the store has
no open migration, the next one is published on the committed placement.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from eplb.core.placement import Placement
from eplb.errors import EplbError
from eplb.migration.build import Migration
from telemetry.state.store import StateStore

CLOSE_DEADLINE_S = 15.0  # a store of SQLite lets a writer wait for 10 s

NextMigration = Callable[[Placement], Migration | None]


class Publisher:
    """Publishes the next migration as soon as the one before is committed.

    Args:
        store: its own; closed with it.
        next_migration: makes a migration of the committed placement; None: it is not due yet.
        poll_s: how often to ask where nothing changes.
    """

    def __init__(self, store: StateStore, next_migration: NextMigration, *, poll_s: float) -> None:
        self._store, self._next_migration, self._poll_s = store, next_migration, poll_s
        self._is_wanted, self._is_closing = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self.num_published = 0
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def want(self, is_wanted: bool) -> None:
        """Publish from now on, or no more; meanwhile the store is left alone."""
        if is_wanted:
            self._is_wanted.set()
        else:
            self._is_wanted.clear()

    def check(self) -> None:
        """Raise what ended the thread, if anything did; to be called at every step.

        Raises:
            EplbError: the thread has stopped, so the measurement is not valid any more.
        """
        if self._failure is not None:
            why = f"{type(self._failure).__name__}: {self._failure}"
            raise EplbError(
                f"the publisher stopped after {self.num_published} migrations: {why}"
            ) from self._failure

    def close(self) -> None:
        """End the thread.

        Raises:
            EplbError: it had ended before, or does not end in time.
        """
        self._is_closing.set()
        self._is_wanted.set()  # it may be waiting for this
        self._thread.join(CLOSE_DEADLINE_S)
        self.check()
        if self._thread.is_alive():
            raise EplbError(f"the publisher did not end within {CLOSE_DEADLINE_S:.0f} s")
        self._store.close()

    def _run(self) -> None:
        try:
            self._publish_until_closed()
        except BaseException as exc:  # whatever it is, check() raises it where the steps are
            self._failure = exc

    def _publish_until_closed(self) -> None:
        version = -1
        while self._is_wanted.wait() and not self._is_closing.is_set():
            version = self._store.wait(version, self._poll_s)
            # The open plan first: if there is none, what is committed after that is the base.
            is_open = self._store.published() is not None
            committed = self._store.committed()
            if is_open or committed is None:
                continue
            migration = self._next_migration(committed.placement)
            if migration is not None:
                self._store.publish(migration)
                self.num_published += 1
