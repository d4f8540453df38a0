"""How a deployment stands, from its store alone: who leads, what serves, what is wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from api.config.tree import Settings
from api.deploy.deployment import secret_of
from api.deploy.first_placement import check_secret, last_start
from api.monitor.health import leadership
from api.monitor.monitor import Monitor
from api.monitor.snapshot import MigrationProgress, PaceView, RankView, WindowScore
from api.monitor.verdict import Around, Grade, verdict
from eplb.errors import ConfigError
from eplb.migration.serialisation import topology_from_dict
from eplb.versions import HOST_CACHE
from telemetry.state.joining import host_caches, serving
from telemetry.state.store import StateStore


@dataclass(frozen=True)
class Status:
    """A deployment at one moment."""

    verdict: Grade
    reason: str  # of the verdict
    deployment: str
    store: str  # without a password
    leader: str  # its process; "": none leads
    lease_left_s: float  # until the leader's lease runs out without a renewal
    turn_age_s: float | None  # since a turn of a controller renewed the lease; None: there was none
    starting: str  # a controller that compiles, and how far it is; "": none does
    run: str | None
    generation: int | None
    step: int
    ranks: tuple[RankView, ...]
    node_of_rank: tuple[int, ...]
    window: WindowScore | None  # the latest complete one
    migration: MigrationProgress | None
    pace: PaceView  # of the next migration
    expert_curve: str  # where the curve is from by which plans measure time
    batch: str  # what acts on each batch beside the placement
    movement: bool
    observe: bool
    versions: Mapping[str, str]  # of what serves, by component
    problems: tuple[str, ...]  # empty: it serves as it should

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong; a pause by an operator is not."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Give it as values of JSON."""
        return {"ok": self.is_ok} | asdict(self)


def check_configured(store: StateStore, settings: Settings, environ: Mapping[str, str]) -> None:
    """Refuse a configuration that is another one than that of the deployment; reads only.

    A store of the demo has nothing to compare with.

    Raises:
        ConfigError: another secret, or another number of ranks.
        StoreError: the store cannot be read.
    """
    if last_start(store) is None:
        return
    check_secret(store, secret_of(settings, environ, makes=False))
    run, given = store.current_run(), settings.topology
    expected = given.nodes * given.ranks_per_node
    if run is None:
        return
    found = topology_from_dict(dict(run.topology)).num_ranks
    if found != expected:
        raise ConfigError(
            f"store: deployment {store.deployment!r} serves with {found} ranks (run {run.run}), "
            f"expected {expected} (topology.nodes x topology.ranks_per_node)"
        )


def read_status(store: StateStore, store_shown: str, now: float | None = None) -> Status:
    """Read how a deployment stands.

    Raises:
        StoreError: the store cannot be read.
    """
    now = time.time() if now is None else now
    monitor = Monitor(store, clock=lambda: now)
    monitor.refresh()
    seen, leads = monitor.snapshot(), leadership(store, now)
    judged = verdict(seen, Around(why_no_leader=leads.why_none))
    complete = [score for score in seen.series if score.is_complete]
    return Status(
        verdict=judged.grade,
        reason=judged.reason,
        deployment=seen.deployment,
        store=store_shown,
        leader=leads.leader,
        lease_left_s=leads.left_s,
        turn_age_s=leads.turn_age_s,
        starting=leads.starting,
        run=seen.run,
        generation=seen.generation,
        step=seen.step,
        ranks=seen.ranks,
        node_of_rank=seen.node_of_rank,
        window=complete[-1] if complete else None,
        migration=seen.migration,
        pace=seen.pace,
        expert_curve=seen.expert_curve,
        batch=seen.batch,
        movement=seen.movement,
        observe=seen.observe,
        versions=_versions(store, now),
        problems=judged.problems,
    )


def _versions(store: StateStore, now: float) -> dict[str, str]:
    found = {one.component: one.version for one in serving(store, now)}
    return found | {
        f"{HOST_CACHE} {one.name}": one.version
        for one in sorted(host_caches(store), key=lambda one: one.name)
    }


def render(status: Status) -> str:
    """Give a status as lines for people."""
    turn = f"last turn {status.turn_age_s or 0.0:.0f} s ago"
    leader = f"{status.leader}, {turn}, lease for {status.lease_left_s:.0f} s more"
    window, moving = status.window, status.migration
    lines = {
        "deployment": f"{status.deployment} in {status.store}",
        "leader": leader if status.leader else status.starting or "none",
        "serves": "nothing yet"
        if status.run is None
        else f"generation {status.generation}, step {status.step}, run {status.run}",
        "imbalance": "no complete window yet"
        if window is None
        else "no tokens in the latest window"
        if window.measured is None
        else f"{window.measured:.2f} in the latest window, {window.contiguous:.2f} unbalanced",
        "migration": "none"
        if moving is None
        else f"plan {moving.plan_id}: {moving.num_moves} moves, {moving.fraction:.0%} done",
        "pace": f"{status.pace.part:g} of the deployment's own; {status.pace.reason}",
        "curve": status.expert_curve,
        "batches": status.batch,
        "switches": f"movement {_on(status.movement)}, observe {_on(status.observe)}",
    }
    # "ranks, host cache 0: eplb 0.2.0 (protocol 2)": one that differs stands apart.
    alike = {
        version: ", ".join(name for name, found in status.versions.items() if found == version)
        for version in status.versions.values()
    }
    lines["versions"] = "; ".join(f"{names}: {version}" for version, names in alike.items())
    lines["versions"] = lines["versions"] or "none"
    text = [f"{status.verdict}: {status.reason}"]
    text += [f"{name:<11}{line}" for name, line in lines.items()]
    if status.ranks:
        text.append("rank  host  state    generation  step      last report")
    for view in status.ranks:
        state = view.phase if view.is_alive else "silent"
        age = "never" if view.age_s is None else f"{view.age_s:.1f} s ago"
        host = status.node_of_rank[view.rank]
        text.append(f"{view.rank:<6}{host:<6}{state:<9}{view.generation:<12}{view.step:<10}{age}")
    text += [f"problem    {one}" for one in status.problems]
    return "\n".join(text)


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"
