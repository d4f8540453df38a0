"""The controller's process. It may be killed and restarted at any moment."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from api.processes.children import Parent, ProgressReports
from api.processes.supervision import REPORT_PERIOD_S
from eplb.clock import Clock
from eplb.errors import StoreError
from rebalance.build.controller import build_controller
from rebalance.controller.lease import new_holder
from rebalance.controller.loop import ControllerSettings
from telemetry import open_store
from telemetry.state.events import STARTING
from telemetry.state.store import StateStore

RETRY_S = 0.5
START_EVENT_S = 5.0  # from one event of a start to the next

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ControllerJob:
    """What a controller is started with."""

    store: str = field(repr=False)  # URL; may hold a password
    deployment: str
    settings: ControllerSettings
    # Of the lease: a supervisor restarts a controller only once it has exited, so one name will do.
    holder: str | None = None
    poll_s: float = 0.2  # a change of the store wakes it earlier

    def opened_store(self) -> StateStore:
        """Open its store."""
        return open_store(self.store, self.deployment)


def run_controller(parent: Parent, job: ControllerJob) -> None:
    """Run the controller until stopped, as a child."""
    is_stopping = threading.Event()
    parent.receive_commands(lambda _: is_stopping.set())
    turns = ProgressReports(parent)

    def has_to_stop() -> bool:  # called once in each cycle of the controller
        turns.report()
        return is_stopping.is_set()

    keep_planning(
        job,
        has_to_stop,
        lambda: parent.send("ready"),
        lambda words: parent.send("warning", words),
        lambda words: parent.send("starting", words),
    )


class StartReports:
    """Reports how far a controller's start is, while it compiles the planner's kernels.

    Args:
        store: gets an event now and then, for ``eplb status`` and the page.
        holder: the controller's.
        report: gets a sentence more often, for the supervisor.
    """

    def __init__(
        self,
        store: StateStore,
        holder: str,
        report: Callable[[str], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._store, self._holder, self._report, self._clock = store, holder, report, clock
        self._functions: set[str] = set()
        self._begun = clock()
        self._reported = self._stored = -math.inf

    def compiling(self, function: str) -> None:
        """Record that the compiler works on a function."""
        self._functions.add(function)
        now = self._clock()
        work = (
            f"compiling the planner's kernels: {len(self._functions)} functions in "
            f"{now - self._begun:.0f} s"
        )
        if now - self._reported >= REPORT_PERIOD_S:
            self._reported = now
            self._report(work)
        if now - self._stored >= START_EVENT_S:
            self._stored = now
            try:
                self._store.add_event(STARTING, {"holder": self._holder, "work": work})
            except StoreError as exc:
                log.warning("event not stored: %s", exc)


def keep_planning(
    job: ControllerJob,
    has_to_stop: Callable[[], bool],
    ready: Callable[[], None],
    warn: Callable[[str], None],
    starting: Callable[[str], None],
) -> None:
    """Run the controller until stopped; a failing store is retried.

    Args:
        has_to_stop: called once in each cycle.
        ready: called once, when it can lead.
        warn: reports that the store failed.
        starting: reports the progress of its start.
    """
    with closing(job.opened_store()) as store:
        holder = job.holder or new_holder()
        on_compile = StartReports(store, holder, starting).compiling
        controller = build_controller(
            job.settings, store, job.deployment, holder=holder, on_compile=on_compile
        )
        ready()
        while not has_to_stop():
            try:
                controller.run(has_to_stop, poll_s=job.poll_s)
            except StoreError as exc:
                warn(f"the controller cannot use the store, trying again: {exc}")
                threading.Event().wait(RETRY_S)
