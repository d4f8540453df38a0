"""The controller's process. It may be killed and restarted at any moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from api.processes.children import Parent, ProgressReports
from eplb.errors import StoreError
from rebalance.build.controller import build_controller
from rebalance.controller.loop import ControllerSettings
from telemetry import open_store
from telemetry.records.sample_codec import SAMPLE_VERSION
from telemetry.store import LoadStore

RETRY_S = 0.5


@dataclass(frozen=True)
class ControllerJob:
    """What a controller is started with."""

    store: str = field(repr=False)  # URL; may hold a password
    deployment: str
    settings: ControllerSettings
    # Of the lease: a supervisor restarts a controller only once it has exited, so one name will do.
    holder: str | None = None
    poll_s: float = 0.2
    sample_version: int = SAMPLE_VERSION

    def opened_store(self) -> LoadStore:
        """Open its store."""
        return open_store(self.store, self.deployment, sample_version=self.sample_version)


def run_controller(parent: Parent, job: ControllerJob) -> None:
    """Run the controller until stopped, as a child."""
    is_stopping = threading.Event()
    parent.receive_commands(lambda _: is_stopping.set())
    turns = ProgressReports(parent)

    def has_to_stop() -> bool:  # called once in each cycle of the controller
        turns.report()
        return is_stopping.is_set()

    keep_planning(
        job, has_to_stop, lambda: parent.send("ready"), lambda words: parent.send("warning", words)
    )


def keep_planning(
    job: ControllerJob,
    has_to_stop: Callable[[], bool],
    ready: Callable[[], None],
    warn: Callable[[str], None],
) -> None:
    """Run the controller until stopped; a failing store is retried.

    Args:
        has_to_stop: called once in each cycle.
        ready: called once, when it can lead.
        warn: reports that the store failed.
    """
    with closing(job.opened_store()) as store:
        controller = build_controller(job.settings, store, job.deployment, holder=job.holder)
        ready()
        while not has_to_stop():
            try:
                controller.run(has_to_stop, poll_s=job.poll_s)
            except StoreError as exc:
                warn(f"the controller cannot use the store, trying again: {exc}")
                threading.Event().wait(RETRY_S)
