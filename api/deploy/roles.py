"""``eplb controller`` and ``eplb host-cache``: one process each, in the foreground, until a signal.

Whatever starts them again supervises them by their reports (``api/processes/commands.py``): a
service manager, ``eplb serve`` for its controller, ``eplb demo`` for its host caches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

from api.deploy.deployment import Deployment
from api.deploy.first_placement import check_belongs
from api.deploy.model import check_checkpoint, check_same_checkpoint
from api.deploy.waits import Reread, WaitReports, has_served
from api.interrupts import StopSignals
from api.processes.commands import Notifier, once_reached, set_title, settle
from api.terminal.progress import CompileReports
from eplb.errors import CheckpointError, ConfigError, StoreError
from eplb.precompile import warmed_up_meanwhile
from eplb.versions import CONTROLLER, HOST_CACHE, Announcement
from rebalance.assembly.controller import build_controller
from rebalance.controller.lease import new_holder
from rebalance.controller.loop import Controller
from rebalance.weights.cache.address import place_of_records
from telemetry.state.events import COMPILE, WAITING, Compiling, OfHost
from telemetry.state.joining import Heartbeat, check_alone, check_versions
from telemetry.state.store import StateStore

if TYPE_CHECKING:
    from rebalance.weights.cache.server import HostCacheServer

POLL_S = 0.25
RETRY_S = 0.5  # after the store failed
Say = Callable[[str], None]

log = logging.getLogger(__name__)


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


def run_host_cache(
    deployment: Deployment, host: int, say: Say, reread: Reread | None = None
) -> None:
    """Give records to the ranks of a host until a signal.

    They are those of a checkpoint, until a serving engine with a plug-in offers its own. With a
    supervisor, and once the deployment has served, a refused start is tried again when the files of
    the checkpoint or the configuration have changed: ranks wait for the cache meanwhile.

    Args:
        deployment: of the ranks.
        host: number of this one.
        say: prints a line for operators.
        reread: None: what is refused is refused for good.

    Raises:
        CheckpointError: a weight file is missing, or is of another model, or the checkpoint is
            another one than the deployment serves.
        MigrationError: another process has the host's place, or a port, or there is no memory.
    """
    # Imported here: it loads torch.
    from rebalance.assembly.host_cache import build_engine_records

    stop, notifier = StopSignals(), Notifier()
    set_title(f"host cache {host}")
    while True:
        heart = Heartbeat(deployment.opened_store, HOST_CACHE, str(host))
        files = reread.files_of(deployment) if reread is not None else None
        try:
            server, ready = _opened_cache(deployment, host, heart.mine)
            break
        except (ConfigError, CheckpointError) as exc:
            if reread is None or files is None or not notifier.is_heard:
                raise
            if not has_served(deployment):
                raise
            say(f"eplb host-cache: {exc}; trying again once {files} changes")
            waits = WaitReports(
                f"host cache of host {host}", partial(_note_wait, deployment, host), notifier, say
            )
            changed = reread.wait_for_start(str(exc), files, waits, stop, notifier.alive)
            if changed is None:
                return
            deployment = changed
    settings, place = deployment.host_cache, place_of_records(deployment.name, deployment.secret)
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


def _opened_cache(
    deployment: Deployment, host: int, mine: Announcement
) -> tuple[HostCacheServer | None, str]:
    """The cache of a checkpoint, None without one; and what it is ready with."""
    # Imported here: it loads torch.
    from rebalance.assembly.host_cache import build_host_cache

    _join_store(deployment, mine)
    weights = deployment.settings.model
    if weights.checkpoint is None:
        return None, "records that an engine offers"
    model = deployment.model
    check_checkpoint(weights, model)
    schema, address = deployment.schema, deployment.host_cache_address(host)
    server = build_host_cache(deployment.host_cache, address, model, schema, weights.checkpoint)
    count = model.num_layers * model.num_experts
    return server, f"{count} records of {schema.record_bytes:,} bytes"


def _note_wait(deployment: Deployment, host: int, line: str) -> None:
    """Store what a host cache waits for, as the verdict shows it."""
    try:
        with closing(deployment.opened_store()) as store:
            store.add_event(WAITING, OfHost(host, line, "host cache"))
    except StoreError as exc:
        log.warning("event not stored: %s", exc)


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
