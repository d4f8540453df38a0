"""The placement that a deployment starts from: written by its first process, kept by all others.

``eplb serve`` and ``eplb launch`` may start in any order and on any host: the store's
compare-and-set lets one of them write. Live settings that were set stay: a start with another
configuration replaces the static layer alone. The first start of ``eplb launch`` with other ranks
or slots takes the placement over for them.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from api.config.live import overriding
from api.deploy.deployment import Deployment
from api.deploy.model import check_same_checkpoint
from api.monitor.verdict import CLOCK_TOLERANCE_S
from eplb.clock import Clock
from eplb.core.model import ModelShape
from eplb.core.placement import Placement, check_fits
from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, StaleGeneration, StoreError
from eplb.migration.resize import taken_over
from eplb.migration.serialisation import model_to_dict, topology_from_dict, topology_to_dict
from eplb.migration.spares import compact
from eplb.planner import plan as make_plan
from rebalance.controller.plans.planner_request import (
    read_cordons,
    read_pins,
    written_cordons,
    written_pins,
)
from rebalance.weights.link.secret import Secret
from telemetry.state.events import read_event
from telemetry.state.joining import serving_ranks
from telemetry.state.live import LiveState, Value
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

LOST_GENERATIONS = 1000  # skipped where the generations before are unknown
START_EVENT = "deployment"  # a process of the deployment started
CLOCK_EXPECTED = f"at most {CLOCK_TOLERANCE_S:g} s: synchronise it (NTP)"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """Detail of the event of a start: what started, and with which secret."""

    by: str
    secret: str  # its fingerprint


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
    is_of_ranks: bool = False,
    clock: Clock = time.time,
) -> tuple[Placement, str]:
    """Have the store name a placement that ranks can start from; also, what was done for that.

    Args:
        store: of the deployment.
        deployment: that starts.
        by: the process, for the history.
        lost_after: the generation that served last, if it is known: a store that has none now lost
            its contents, and generations must grow.
        is_of_ranks: whether ranks start from it. At their first start a placement of other ranks or
            slots is taken over for them.
        clock: of this host, compared with that of the store.

    Raises:
        ConfigError: the store is of another deployment: another secret or model. Or ranks start
            again whose deployment has other ranks now.
        CheckpointError: the checkpoint is another one than at the first start.
        StoreError: the store cannot be used, or ranks of the other topology still serve.
    """
    check_belongs(store, deployment)
    check_same_checkpoint(store, deployment.settings.model, recorded_by=by)
    did = "found a placement"
    if store.committed() is None:
        first = contiguous_placement(deployment.model, deployment.topology)
        generation = 0 if lost_after is None else lost_after + LOST_GENERATIONS
        reason = f"first placement: unbalanced, experts in order ({by})"
        try:
            if store.commit(first.with_generation(generation), expected=None, reason=reason):
                did = "wrote the first placement"
        except StaleGeneration as exc:  # another process was first
            log.info("the first placement was written by another process: %s", exc)
    committed = store.committed()
    if committed is None:
        raise ConfigError("the store lost the first placement at once, expected it to be kept")
    placement = committed.placement
    if is_of_ranks and lost_after is None:
        placement, resized = _resize(store, placement, deployment, by, clock)
        did = resized or did
    elif is_of_ranks and (why := misfit(placement, deployment)):
        raise ConfigError(
            f"store: deployment {deployment.name!r} has other ranks now, expected "
            f"{_shown(deployment.topology)} as at the start of this process: {why}"
        )
    if store.live().static != deployment.static:
        set_static(store, deployment, f"start with another configuration ({by})")
    record_start(store, deployment, by, clock)
    return placement, did


def set_static(store: StateStore, deployment: Deployment, reason: str) -> None:
    """Store the static layer of the live settings; warn of each live value that wins over it."""
    for one in overriding(store.set_static(deployment.static, reason=reason)):
        log.warning("live setting: %s; eplb config --live changes it", one)


def _resize(
    store: StateStore, placement: Placement, deployment: Deployment, by: str, clock: Clock
) -> tuple[Placement, str]:
    """Take the placement of other ranks over, once those have ended; also, a sentence about it."""
    from rebalance.assembly.rank import new_run_name  # loads torch

    run, now = store.current_run(), deployment.topology
    before = topology_from_dict(dict(run.topology)) if run is not None else now
    has_served = before.num_slots == placement.num_slots
    is_same = np.array_equal(before.slots_of_rank, now.slots_of_rank) or not has_served
    if is_same and not misfit(placement, deployment):
        return placement, ""
    if serving_ranks(store, clock()):
        raise StoreError(
            f"store: {_shown(before)} of deployment {deployment.name!r} still serve, expected "
            f"none before its placement is taken over for {_shown(now)}"
        )
    if has_served:
        try:
            made, num_kept = taken_over(placement, before, now, deployment.spare_slots)
        except EplbError as exc:
            raise ConfigError(f"the deployment cannot have {_shown(now)}: {exc}") from exc
        did = (
            f"placement of {_shown(before)} taken over for {_shown(now)}: {num_kept} of "
            f"{placement.replica_count.sum()} replicas kept"
        )
    else:
        made = contiguous_placement(deployment.model, now).with_generation(placement.generation + 1)
        did = f"first placement of {_shown(now)}: the one of {placement.num_slots} slots in all "
        did += "never served"
    shapes = model_to_dict(deployment.model), topology_to_dict(now)
    given = deployment.settings.telemetry
    windows = given.window_steps, given.window_seconds
    store.commit(
        made,
        expected=placement.generation,
        reason=f"{did} ({by})",
        run=RunInfo(new_run_name(), store.backend.now(), *shapes, *windows),
        dropped=partial(_without_gone, now.num_ranks),
    )
    return made, did


def _without_gone(num_ranks: int, state: LiveState) -> dict[str, Value | None]:
    """Live pins and cordons without the ranks that are gone, where they name such."""
    pins = read_pins(str(state.live.get("pins", "")))
    stay = {one: tuple(rank for rank in ranks if rank < num_ranks) for one, ranks in pins.items()}
    cordons = read_cordons(str(state.live.get("cordons", "")))
    left: dict[str, Value | None] = {}
    if stay != pins:
        left["pins"] = written_pins({one: ranks for one, ranks in stay.items() if ranks})
    if any(rank >= num_ranks for rank in cordons):
        kept = {rank: one for rank, one in cordons.items() if rank < num_ranks}
        left["cordons"] = written_cordons(kept)
    # Where the configuration has none either, no live value is needed to say so.
    return {name: text or ("" if state.static.get(name) else None) for name, text in left.items()}


def _shown(topology: Topology) -> str:
    slots = sorted(set(topology.slots_of_rank.tolist()))
    return f"{topology.num_ranks} ranks x {', '.join(map(str, slots))} slots"


def record_start(
    store: StateStore, deployment: Deployment, by: str, clock: Clock = time.time
) -> None:
    """Record that a process of a deployment starts; warn if its clock is off."""
    started = Started(by, deployment.secret.fingerprint)
    offset_s, error_s = clock_offset(store, START_EVENT, started, clock)
    if abs(offset_s) > CLOCK_TOLERANCE_S + error_s:
        # Not refused: ages and load go by the store's clock.
        log.warning(
            "clock: %s, expected %s: logs of this host are dated by it",
            offset_text(offset_s),
            CLOCK_EXPECTED,
        )


def clock_offset(store: StateStore, kind: str, detail: object, clock: Clock) -> tuple[float, float]:
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
        ConfigError: it has another secret, or a placement of another model.
        StoreError: the store cannot be used.
    """
    check_secret(store, deployment.secret)
    committed = store.committed()
    if committed is None or deployment.is_of_engine:
        return
    model = deployment.model
    found = (committed.placement.num_layers, committed.placement.num_experts)
    if found != (model.num_layers, model.num_experts):
        raise ConfigError(
            f"store: deployment {deployment.name!r} has a placement of (layers, experts) {found}, "
            f"expected {(model.num_layers, model.num_experts)} by the configuration: it is of "
            "another deployment, or its model has changed; give a new deployment.name"
        )


def check_secret(store: StateStore, secret: Secret) -> None:
    """Refuse another secret than the one that the deployment of a store was started with.

    Raises:
        ConfigError: it is another one.
        StoreError: the store cannot be read.
    """
    latest = last_start(store)
    if latest is not None and latest.secret != secret.fingerprint:
        raise ConfigError(
            f"store: deployment {store.deployment!r} was started with a secret of fingerprint "
            f"{latest.secret} by {latest.by}, found "
            f"{secret.fingerprint} here, expected one secret on all hosts, or another "
            "deployment.name"
        )


def last_start(store: StateStore) -> Started | None:
    """The latest start of a process of the deployment; None: it was not started by commands."""
    latest = next(store.events_backwards({START_EVENT}), None)
    return None if latest is None else read_event(latest, Started)


def misfit(placement: Placement, deployment: Deployment) -> str:
    """Why the ranks of a deployment cannot serve a placement; "": they can."""
    try:
        check_fits(placement, deployment.topology)
        if deployment.spare_slots:
            compact(placement, deployment.topology, deployment.spare_slots)
    except EplbError as exc:
        return str(exc)
    return ""
