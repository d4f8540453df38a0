"""``eplb controller`` and ``eplb host-cache``: one process each, in the foreground, until a signal.

A service manager (systemd, an orchestrator) starts them again; ``eplb serve`` supervises a
controller itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from threading import Event

from api.deploy.checkpoint import check_same_checkpoint
from api.deploy.checks.tls import check_link_certificate
from api.deploy.deployment import Deployment
from api.deploy.first_placement import check_belongs
from api.deploy.model import check_checkpoint
from api.interrupts import StopSignals
from api.processes.controller import ControllerJob, keep_planning
from eplb.errors import ConfigError, StoreError
from eplb.versions import HOST_CACHE, Announcement
from telemetry.state.joining import check_versions

POLL_S = 0.25
Say = Callable[[str], None]

log = logging.getLogger(__name__)


def controller_job(deployment: Deployment, holder: str | None = None) -> ControllerJob:
    """What a controller of a deployment is started with."""
    return ControllerJob(
        deployment.store_url,
        deployment.name,
        deployment.controller,
        holder,
    )


def run_controller(deployment: Deployment, say: Say) -> None:
    """Plan until a signal; one controller of all leads, the others stand by.

    Raises:
        ConfigError: the store is of another deployment.
        StoreError: it cannot be used at the start.
    """
    stop = StopSignals()
    with closing(deployment.opened_store()) as store:
        check_belongs(store, deployment)
    ready = f"eplb controller: ready for {deployment.name} in {deployment.store_shown}"
    keep_planning(
        controller_job(deployment),
        lambda: stop.received > 0,
        lambda: say(ready),
        log.warning,
        lambda work: log.info("the controller is starting: %s", work),
    )


def run_host_cache(deployment: Deployment, host: int, say: Say) -> None:
    """Give records to the ranks of a host until a signal.

    Raises:
        ConfigError: there is no source of records, or a certificate cannot be used.
        CheckpointError: a weight file is missing, or is of another model, or the checkpoint is
            another one than the deployment serves.
        MigrationError: another process has the host's place, or a port, or there is no memory.
    """
    # Imported here: it loads torch.
    from rebalance.build.host_cache import build_host_cache

    check_link_certificate(deployment, host)
    _compare(deployment, host)
    stop, given = StopSignals(), deployment.settings
    model, weights = deployment.model, given.model.checkpoint
    if weights is None and not deployment.has_links:
        raise ConfigError(
            "model.checkpoint is none and host_cache.other_hosts is off, expected a source of "
            "expert records"
        )
    check_checkpoint(given.model, model)
    schema = deployment.schema
    settings, address = deployment.host_cache, deployment.host_cache_address
    with closing(build_host_cache(settings, address(host), model, schema, weights, host=host)):
        _announce(deployment, host)
        records = model.num_layers * model.num_experts
        say(
            f"eplb host-cache: host {host} of {deployment.name}: ready: {records} records of "
            f"{schema.record_bytes:,} bytes, mode {settings.mode}"
        )
        while not stop.received:
            Event().wait(POLL_S)


def _compare(deployment: Deployment, host: int) -> None:
    """Refuse a version that the ranks cannot work with, another secret, and another checkpoint.

    A cache needs the store for nothing else: ranks compare versions, keys and digests again when
    they connect, and may do so while the store is down.
    """
    try:
        with closing(deployment.opened_store()) as store:
            check_versions(store, Announcement(HOST_CACHE, str(host)))
            check_belongs(store, deployment)
            check_same_checkpoint(store, deployment.checkpoint)
    except StoreError as exc:
        log.warning("host %d: not compared with what the deployment serves: %s", host, exc)


def _announce(deployment: Deployment, host: int) -> None:
    try:
        with closing(deployment.opened_store()) as store:
            store.announce(Announcement(HOST_CACHE, str(host)))
    except StoreError as exc:
        log.warning("host %d: its version is not announced: %s", host, exc)
