"""``eplb controller`` and ``eplb host-cache``: one process each, in the foreground, until a signal.

Whatever starts them again supervises them by their reports (``api/processes/commands.py``): a
service manager, ``eplb serve`` for its controller, ``eplb demo`` for its host caches.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import closing
from threading import Event
from typing import Any, Literal

from api.deploy.deployment import Deployment
from api.deploy.first_placement import check_belongs
from api.deploy.model import check_checkpoint, check_same_checkpoint
from api.interrupts import StopSignals
from api.processes.commands import Notifier, once_reached, set_title, settle
from eplb.clock import Clock
from eplb.errors import StoreError
from eplb.precompile import warmed_up_meanwhile
from eplb.versions import CONTROLLER, HOST_CACHE, Announcement
from rebalance.assembly.controller import build_controller
from rebalance.controller.lease import new_holder
from rebalance.controller.loop import Controller
from rebalance.weights.cache.address import place_of_records
from telemetry.state.events import COMPILE, Compiling
from telemetry.state.joining import Heartbeat, check_alone, check_versions
from telemetry.state.store import StateStore

POLL_S = 0.25
RETRY_S = 0.5  # after the store failed
SAY_PERIOD_S = 5.0  # between two lines while kernels are compiled
Say = Callable[[str], None]

log = logging.getLogger(__name__)


class CompileReports:
    """Reports how far the compilation of kernels is.

    Args:
        say: gets a line every few seconds, and one at the end.
        record: gets the state, ``begun`` or ``done``, and figures.
    """

    def __init__(
        self,
        say: Say,
        record: Callable[..., None] = lambda state, **figures: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._say, self._record, self._clock = say, record, clock
        self._functions: set[str] = set()
        self._begun, self._said = clock(), -math.inf

    def note(self, function: str) -> None:
        """Record that the compiler works on a function; "": all are compiled."""
        now = self._clock()
        if not function and not self._functions:
            return  # they were on disk
        if not self._functions:
            self._begun = now
            self._record("begun")
        self._functions |= {function} - {""}
        count, seconds = len(self._functions), now - self._begun
        if not function:
            self._record("done", functions=count, seconds=seconds)
            self._say(f"compiled the kernels: {count} functions in {seconds:.0f} s")
        elif now - self._said >= SAY_PERIOD_S:
            self._said = now
            self._say(f"compiling the kernels: {count} functions in {seconds:.0f} s")


def run_controller(deployment: Deployment, say: Say) -> None:
    """Plan until a signal; one controller of all leads, the others stand by.

    A store that fails is retried.

    Raises:
        ConfigError: the store is of another deployment.
    """
    stop, notifier, holder = StopSignals(), Notifier(), new_holder()
    set_title("controller")

    def has_to_stop() -> bool:  # called once in each cycle of the controller
        notifier.alive()
        return stop.received > 0

    def built() -> tuple[StateStore, Controller]:
        store = deployment.opened_store()
        try:
            check_belongs(store, deployment)
            settings, name = deployment.controller, deployment.name
            return store, build_controller(settings, store, name, holder=holder)
        except BaseException:
            store.close()
            raise

    made = once_reached(built, stop, notifier, lambda line: say(f"eplb controller: {line}"))
    if made is None:
        return
    store, controller = made
    with closing(store):
        say(f"eplb controller: ready for {deployment.name} in {deployment.store_shown}")
        notifier.ready()
        settle()

        def record(state: Literal["begun", "done"], **figures: Any) -> None:
            try:
                store.add_event(COMPILE, Compiling(holder, state, **figures))
            except StoreError as exc:
                log.warning("event not stored: %s", exc)

        reports = CompileReports(log.info, record)
        with (  # the heartbeat ends first: the compiler may take seconds to
            warmed_up_meanwhile(deployment.controller.policy, reports.note),
            Heartbeat(deployment.opened_store, CONTROLLER, holder),
        ):
            while not has_to_stop():
                try:
                    controller.run(has_to_stop, poll_s=POLL_S)
                except StoreError as exc:
                    log.warning("the controller cannot use the store, trying again: %s", exc)
                    Event().wait(RETRY_S)


def run_host_cache(deployment: Deployment, host: int, say: Say) -> None:
    """Give records to the ranks of a host until a signal.

    They are those of a checkpoint, until a serving engine with a plug-in offers its own.

    Raises:
        CheckpointError: a weight file is missing, or is of another model, or the checkpoint is
            another one than the deployment serves.
        MigrationError: another process has the host's place, or a port, or there is no memory.
    """
    # Imported here: it loads torch.
    from rebalance.assembly.host_cache import build_engine_records, build_host_cache

    stop, notifier, given = StopSignals(), Notifier(), deployment.settings
    set_title(f"host cache {host}")
    heart = Heartbeat(deployment.opened_store, HOST_CACHE, str(host))
    _join_store(deployment, heart.mine)
    weights = given.model.checkpoint
    settings, server = deployment.host_cache, None
    ready = "records that an engine offers"
    if weights is not None:
        model = deployment.model
        check_checkpoint(given.model, model)
        schema, address = deployment.schema, deployment.host_cache_address(host)
        server = build_host_cache(settings, address, model, schema, weights)
        ready = f"{model.num_layers * model.num_experts} records of {schema.record_bytes:,} bytes"
    place = place_of_records(deployment.name, deployment.secret)
    with closing(build_engine_records(settings, place, server=server)) as records:
        say(
            f"eplb host-cache: host {host} of {deployment.name}: ready: {ready}, "
            f"room for {settings.records or 'all'}"
        )
        notifier.ready()
        settle()
        with heart:
            while not stop.received:
                Event().wait(POLL_S)
                records.check()  # takes the cache's lock: in a deadlock no progress is reported
                notifier.alive()


def _join_store(deployment: Deployment, mine: Announcement) -> None:
    """Refuse a version that ranks cannot work with, a second machine, another secret or checkpoint.

    A cache needs the store for nothing else: ranks compare versions, keys and digests again when
    they connect, and may do so while the store is down.
    """
    try:
        with closing(deployment.opened_store()) as store:
            check_versions(store, mine)
            check_belongs(store, deployment)
            check_same_checkpoint(store, deployment.settings.model)
            check_alone(store, mine)
    except StoreError as exc:
        log.warning("host %s: not compared with what the deployment serves: %s", mine.name, exc)
