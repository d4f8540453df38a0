"""Settings of the controller, and those of them that are read from the store in each turn."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

from eplb.core.cost import CostModel
from eplb.core.load import Phase
from eplb.core.problem import Budget
from eplb.decision.rollout import STAGES, Stage
from eplb.decision.triggers import TriggerRules
from eplb.errors import ConfigError
from eplb.migration.build import Pace
from eplb.policies.table import policy_named
from rebalance.controller.plans.planner_request import PlannerRequest
from telemetry.load.pruning import Retention
from telemetry.state.live import SWITCHES, LiveSettings
from telemetry.state.store import StateStore

OF_COST = (
    "pay_back_s",
    "expert_part",
    "bytes_per_s",
    "seconds_per_rebalance",
    "far_moves",
    "node_traffic",
    "dead_zone",
)
OF_BUDGET = ("max_moves", "target_imbalance")
_OF_REQUEST = tuple(one.name for one in fields(PlannerRequest))
_OF_TRIGGERS = tuple(one.name for one in fields(TriggerRules))

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ControllerSettings:
    """Settings of the controller."""

    policy: str = "auto"
    plan_windows: int = 16  # complete windows that a plan looks at, fewer after a change of load
    cost: CostModel = field(default_factory=CostModel)
    budget: Budget = field(default_factory=Budget)
    pace: Pace = field(default_factory=Pace)
    seed: int = 0
    migration_deadline_s: float = 60.0  # an open migration older than this is withdrawn
    phase: Phase | None = None  # plans are made on the load of this phase alone; None: of all
    retention: Retention = field(default_factory=Retention)  # plans look back minutes at most
    lease_ttl_s: float = (
        10.0  # longer than a plan takes; no controller leads for so long after a death
    )
    back_off_s: float = 10.0  # from a failed migration to the next plan; twice with each further
    task_expiry_s: float = 300.0  # a request that was queued for longer is refused; 0: none is
    # Imbalance by which a plan must have made its first windows worse to be taken back; 0: never.
    rollback_loss: float = 0.0
    keep_every_windows: int = 8  # an unchanged KEEP is written down once in so many windows
    request: PlannerRequest = field(default_factory=PlannerRequest)
    triggers: TriggerRules = field(default_factory=TriggerRules)
    stage: Stage = "all"  # of the rollout
    stage_layers: int = 4  # that move in the stage "layers"
    stage_loss: float = 0.0  # imbalance that a plan may make worse before a step back; 0: any
    # Part by which a migration may lengthen the p95 of step time; 0: the pace is fixed.
    step_time_budget: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.step_time_budget < inf:
            raise ConfigError(
                f"step_time_budget is {self.step_time_budget}, expected a number, 0 or more"
            )
        if self.stage not in STAGES:
            raise ConfigError(f"stage is {self.stage!r}, expected one of: {', '.join(STAGES)}")

    @property
    def spare_slots(self) -> int:
        """EMPTY slots that every rank keeps in each layer; no policy plans on them."""
        return self.pace.spare_slots

    def with_live(self, live: LiveSettings) -> ControllerSettings:
        """Return these settings with the live values in their place.

        Raises:
            ConfigError: a value that cannot be used.
        """
        values: dict[str, Any] = live.set_values()
        cost = {name: values.pop(name) for name in OF_COST if name in values}
        budget = {name: values.pop(name) for name in OF_BUDGET if name in values}
        asked = {name: values.pop(name) for name in _OF_REQUEST if name in values}
        rules = {name: values.pop(name) for name in _OF_TRIGGERS if name in values}
        if "max_moves" in budget:
            budget["max_moves"] = budget["max_moves"] or None
        own = {name: value for name, value in values.items() if name not in SWITCHES}
        policy_named(own.get("policy", self.policy))
        return replace(
            self,
            cost=replace(self.cost, **cost),
            budget=replace(self.budget, **budget),
            request=replace(self.request, **asked),
            triggers=replace(self.triggers, **rules),
            **own,
        )


class LiveReader:
    """Reads a controller's settings: its static ones, with the live values of the store."""

    def __init__(self, store: StateStore, static: ControllerSettings) -> None:
        self._store, self._static = store, static
        self._live = LiveSettings()
        self.settings = static  # as of the latest ``read``

    def read(self) -> None:
        """Take over the live values, and end those whose time has passed.

        Values that cannot be used leave the settings as they are.

        Raises:
            ConfigError: a live value that cannot be used; once for each change.
            StoreError: the store failed.
        """
        state = self._store.expire_live()
        if state.live != self._live:
            self._live = state.live
            self.settings = self._static.with_live(state.live)
            log.info("live settings of revision %d: %s", state.revision, state.live.set_values())
