"""Settings of the controller, and those of them that are read from the store in each turn."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from eplb.core.cost import CostModel
from eplb.core.problem import Budget
from eplb.core.topology import Topology
from eplb.decision.triggers import Stage, TriggerRules
from eplb.declared import Setting, check_fields
from eplb.migration.build import Pace
from eplb.migration.membership import leavers
from eplb.policies.table import policy_named
from eplb.settings.tree import applied
from rebalance.controller.plans.planner_request import (
    PlannerRequest,
    cordons_in_force,
    written_cordons,
)
from telemetry.load.pruning import Retention
from telemetry.state.live import Value
from telemetry.state.store import StateStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ControllerSettings:
    """Settings of the controller: how it plans, and which plans it carries out."""

    policy: Annotated[
        str,
        Setting("placement policy", section="planner", min_length=1, check=policy_named, live=True),
    ] = "auto"
    plan_windows: Annotated[
        int,
        Setting(
            "complete load windows that a plan uses, fewer after a change of load",
            section="planner",
            at_least=1,
            at_most=64,
            live=True,
        ),
    ] = 16
    cost: CostModel = field(default_factory=CostModel)
    budget: Budget = field(default_factory=Budget)
    pace: Pace = field(default_factory=Pace)
    retention: Retention = field(default_factory=Retention)  # plans look back minutes at most
    lease_ttl_s: Annotated[
        float,
        Setting(
            "time to live of the controller's lease, for which no controller "
            "leads after a death; longer than a plan takes",
            above=0,
            at_most=3600,
        ),
    ] = 10.0
    migration_deadline_s: Annotated[
        float,
        Setting("age at which an open migration is withdrawn", above=0, at_most=3600, live=True),
    ] = 60.0
    keep_every_windows: int = 8  # between two events of the same KEEP; fewer events say no more
    back_off_s: Annotated[
        float,
        Setting(
            "wait after a migration that failed, twice as long after each further one, 600 s at "
            "most",
            at_most=3600,
            live=True,
        ),
    ] = 10.0
    task_expiry_s: Annotated[
        float, Setting("age at which a queued request is refused; 0: never", live=True)
    ] = 300.0
    rollback_loss: Annotated[
        float,
        Setting(
            "imbalance by which a plan has made its first windows worse, at which it is taken "
            "back; 0: never",
            live=True,
        ),
    ] = 0.0
    request: PlannerRequest = field(default_factory=PlannerRequest)
    triggers: TriggerRules = field(default_factory=TriggerRules)
    stage: Annotated[
        Stage,
        Setting(
            "how much of a plan is carried out; the demo's default is `all`; see Staged rollout in "
            "operations.md",
            live=True,
        ),
    ] = "all"
    stage_layers: Annotated[
        int,
        Setting(
            "layers that a plan changes in the stage `layers`", unit="layers", at_least=1, live=True
        ),
    ] = 4
    stage_loss: Annotated[
        float,
        Setting(
            "imbalance by which a plan has made its first windows worse, at which the stage goes "
            "one step back; 0: never",
            live=True,
        ),
    ] = 0.0
    step_time_budget: Annotated[
        float,
        Setting(
            "part by which a migration may lengthen the 95th percentile of step time, 0.05 is 5 %; "
            "above it the next one has half the pace; 0: the pace is fixed",
            live=True,
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def spare_slots(self) -> int:
        """EMPTY slots that every rank keeps in each layer; no policy plans on them."""
        return self.pace.spare_slots


class LiveReader:
    """Reads a controller's settings: its static ones, with the live values of the store.

    Ranks that should not serve any more are drained as if an operator had ordered it.
    """

    def __init__(self, store: StateStore, static: ControllerSettings) -> None:
        self._store, self._static = store, static
        self._read: tuple[Mapping[str, Value], tuple[int, ...]] = {}, ()
        self.settings = static  # as of the latest ``read``

    def read(self, topology: Topology) -> None:
        """Take over the live values and drains, and end values whose time has passed.

        Values that cannot be used leave the settings as they are.

        Args:
            topology: of the run.

        Raises:
            ConfigError: a live value that cannot be used; once for each change.
            StoreError: the store failed.
        """
        state = self._store.expire_live()
        leaving = leavers(self._store.wanted_ranks(), topology)
        if (state.live, leaving) != self._read:
            self._read = state.live, leaving
            settings = applied(self._static, state.live)
            cordons = written_cordons(cordons_in_force(settings.request.cordons, leaving))
            self.settings = replace(settings, request=replace(settings.request, cordons=cordons))
            log.info(
                "live settings of revision %d: %s; ranks to leave: %s",
                state.revision,
                state.live,
                leaving,
            )
