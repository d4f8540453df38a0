"""The placement that a deployment starts from: written by its first process, kept by all others.

``eplb serve`` and ``eplb launch`` may start in any order and on any host: the store's
compare-and-set lets one of them write. Live settings that were set stay: a start with another
configuration replaces the static layer alone.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from api.config.live import overriding
from api.deploy.deployment import Deployment
from api.deploy.model import check_same_checkpoint
from api.monitor.verdict import CLOCK_TOLERANCE_S
from eplb.clock import Clock
from eplb.core.model import ModelShape
from eplb.core.placement import Placement, check_fits
from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, StaleGeneration
from eplb.migration.spares import compact
from eplb.planner import plan as make_plan
from rebalance.weights.link.secret import Secret
from telemetry.state.events import Event
from telemetry.state.runs import Details
from telemetry.state.store import StateStore

LOST_GENERATIONS = 1000  # skipped where the generations before are unknown
START_EVENT = "deployment"  # a process of the deployment started
CLOCK_EXPECTED = f"at most {CLOCK_TOLERANCE_S:g} s: synchronise it (NTP)"

log = logging.getLogger(__name__)


def contiguous_placement(model: ModelShape, topology: Topology) -> Placement:
    """Give the placement without knowledge of load; spread evenly, it leaves spares EMPTY."""
    idle = np.ones((model.num_layers, model.num_experts), dtype=np.int64)
    return make_plan(idle, topology, policy="contiguous").base


def ensure_first_placement(
    store: StateStore,
    deployment: Deployment,
    by: str,
    *,
    lost_after: int | None = None,
    clock: Clock = time.time,
) -> tuple[Placement, bool]:
    """Have the store name a placement that ranks can start from; also, whether it was written here.

    Args:
        store: of the deployment.
        deployment: that starts.
        by: the process, for the history.
        lost_after: the generation that served last, if it is known: a store that has none now lost
            its contents, and generations must grow.
        clock: of this host, compared with that of the store.

    Raises:
        ConfigError: the store is of another deployment: another secret, model or topology.
        CheckpointError: the checkpoint is another one than at the first start.
        StoreError: the store cannot be used.
    """
    check_belongs(store, deployment)
    check_same_checkpoint(store, deployment.settings.model, recorded_by=by)
    wrote = False
    if store.committed() is None:
        first = contiguous_placement(deployment.model, deployment.topology)
        generation = 0 if lost_after is None else lost_after + LOST_GENERATIONS
        reason = f"first placement: unbalanced, experts in order ({by})"
        try:
            wrote = store.commit(first.with_generation(generation), expected=None, reason=reason)
        except StaleGeneration as exc:  # another process was first
            log.info("the first placement was written by another process: %s", exc)
    committed = store.committed()
    if committed is None:
        raise ConfigError("the store lost the first placement at once, expected it to be kept")
    _check_placement(committed.placement, deployment)
    if store.live().static != deployment.static:
        state = store.set_static(
            deployment.static, reason=f"start with another configuration ({by})"
        )
        for one in overriding(state):
            log.warning("live setting: %s; eplb config --live changes it", one)
    record_start(store, deployment, by, clock)
    return committed.placement, wrote


def record_start(
    store: StateStore, deployment: Deployment, by: str, clock: Clock = time.time
) -> None:
    """Record that a process of a deployment starts; warn if its clock is off."""
    detail = {"by": by, "secret": deployment.secret.fingerprint}
    offset_s, error_s = clock_offset(store, START_EVENT, detail, clock)
    if abs(offset_s) > CLOCK_TOLERANCE_S + error_s:
        # Not refused: ages and load go by the store's clock.
        log.warning(
            "clock: %s, expected %s: logs of this host are dated by it",
            offset_text(offset_s),
            CLOCK_EXPECTED,
        )


def clock_offset(
    store: StateStore, kind: str, detail: Details, clock: Clock
) -> tuple[float, float]:
    """Write an event; seconds by which this host is ahead of the store, and how wrong that may be.

    The store gives its time with the event.
    """
    before = clock()
    number = store.add_event(kind, detail)
    after = clock()
    (event,) = store.events(after=number - 1, limit=1)
    return (before + after) / 2 - event.time, (after - before) / 2


def offset_text(offset_s: float) -> str:
    """Say how far this host's clock is off."""
    side = "ahead of" if offset_s > 0 else "behind"
    return f"this host's is {abs(offset_s):.3f} s {side} the store's"


def check_belongs(store: StateStore, deployment: Deployment) -> None:
    """Refuse a store that another deployment of this name uses; reads only.

    Raises:
        ConfigError: it has another secret, or a placement of another model or topology.
        StoreError: the store cannot be used.
    """
    check_secret(store, deployment.secret)
    committed = store.committed()
    if committed is not None:
        _check_placement(committed.placement, deployment)


def check_secret(store: StateStore, secret: Secret) -> None:
    """Refuse another secret than the one that the deployment of a store was started with.

    Raises:
        ConfigError: it is another one.
        StoreError: the store cannot be read.
    """
    latest = last_start(store)
    if latest is not None and latest.detail.get("secret") != secret.fingerprint:
        raise ConfigError(
            f"store: deployment {store.deployment!r} was started with a secret of fingerprint "
            f"{latest.detail.get('secret')} by {latest.detail.get('by')}, found "
            f"{secret.fingerprint} here, expected one secret on all hosts, or another "
            "deployment.name"
        )


def last_start(store: StateStore) -> Event | None:
    """The latest start of a process of the deployment; None: it was not started by commands."""
    return next(store.events_backwards({START_EVENT}), None)


def _check_placement(placement: Placement, deployment: Deployment) -> None:
    found = (placement.num_layers, placement.num_experts, placement.num_slots)
    model, topology = deployment.model, deployment.topology
    expected = (model.num_layers, model.num_experts, topology.num_slots)
    if found != expected:
        raise ConfigError(
            f"store: deployment {deployment.name!r} has a placement of (layers, experts, slots) "
            f"{found}, expected {expected} by the configuration: it is of another deployment, or "
            "its model or topology has changed; give a new deployment.name"
        )
    try:
        check_fits(placement, topology)
        if deployment.spare_slots:
            compact(placement, topology, deployment.spare_slots)
    except EplbError as exc:
        raise ConfigError(
            f"store: the placement of deployment {deployment.name!r} does not fit its topology: "
            f"{exc}"
        ) from exc
