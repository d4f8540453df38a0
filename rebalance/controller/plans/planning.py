"""The controller's plans: on which windows, with which track record, in which slots.

Policies do not see spare slots, so placements are compacted before a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from eplb.clock import Clock
from eplb.core.constraints import Constraints
from eplb.core.load import LoadHistory
from eplb.core.placement import Placement, check_fits
from eplb.core.problem import Problem
from eplb.decision.coverage import Coverage
from eplb.decision.gate import Decision
from eplb.dispatch_rules.rules import DispatchRule
from eplb.errors import EplbError
from eplb.explanation.figures import finite
from eplb.migration.spares import compact
from eplb.planner import Plan, plan, plan_to
from rebalance.controller.load import Group
from rebalance.controller.plans.track_record import Judged, Promises, TrackRecord
from rebalance.controller.settings import OF_BUDGET, OF_COST, ControllerSettings
from telemetry.drift.detector import LOOK_BACK, windows_since_change
from telemetry.log_context import set_log_fields
from telemetry.windows.folder import Window, history


class Planning:
    """Makes plans, and holds them to what they promise.

    Args:
        store: with earlier plans and their events, which are read with the first plan.
        clock: for how long a plan takes.
    """

    def __init__(self, store: Promises, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._track: TrackRecord | None = None
        self.how: dict[str, Any] = {}  # how the latest plan was made: its time, its windows

    def plan(
        self,
        group: Group,
        settings: ControllerSettings,
        past: LoadHistory,
        current: Placement,
        policy: str,
    ) -> Plan:
        """Plan on ``past``, from the placement that serves.

        Raises:
            EplbError: as ``eplb.plan``.
        """
        set_log_fields(generation=current.generation)
        track = self._record()
        unseen = track.unseen(group.complete_windows(), current)
        if past.num_windows < settings.plan_windows:
            unseen = min(unseen, past.num_windows)  # a change of load restarts the count
        topology = settings.request.topology(group.topology)
        if settings.spare_slots:
            current, topology = compact(current, topology, settings.spare_slots)
        groups = group.model.num_expert_groups
        coverage = settings.request.coverage(past, topology, groups)
        begun = self._clock()
        proposal = plan(
            past,
            topology,
            model=group.model,
            current=current,
            budget=settings.budget,
            policy=policy,
            cost=settings.cost,
            seed=settings.seed,
            unseen=unseen,
            record=track.record,
            objective=settings.request.objective,
            constraints=coverage.constraints,
            scenarios=settings.request.scenarios(past),
            dispatch=DispatchRule(settings.request.dispatch),
        )
        took_s = round(self._clock() - begun, 4)
        asked = _asked(settings, coverage)
        self.how = {"plan_seconds": took_s, "windows": past.num_windows, "asked": asked}
        return proposal

    def rollback(
        self,
        group: Group,
        settings: ControllerSettings,
        generation: int,
        current: Placement,
        why: str,
        *,
        last: int,
    ) -> Plan:
        """Plan the way to the placement of an earlier generation, priced on the last windows.

        Raises:
            EplbError: the store does not have it, there is no load yet, or as ``plan_back``.
        """
        earlier = self._store.placement(generation)
        if earlier is None:
            raise EplbError(f"{why}: found no placement of generation {generation} in the store")
        past = planned_on(group.complete_windows(), last)
        if past is None:
            raise EplbError(f"{why}: found no complete window of load, expected one for its price")
        return self.plan_back(group, settings, past.history, current, earlier.placement, why)

    def plan_back(
        self,
        group: Group,
        settings: ControllerSettings,
        past: LoadHistory,
        current: Placement,
        earlier: Placement,
        why: str,
    ) -> Plan:
        """Plan the way to an earlier placement, priced on ``past``.

        Raises:
            PlacementError: the ranks of this run cannot serve it.
        """
        topology = settings.request.topology(group.topology)
        check_fits(earlier, topology)
        if settings.spare_slots:
            earlier, _ = compact(earlier, topology, settings.spare_slots)
            current, topology = compact(current, topology, settings.spare_slots)
        # Constraints on domains bind the planner, not an operator: what served may serve again.
        problem = Problem(
            past,
            topology,
            group.model,
            current,
            settings.budget,
            settings.cost,
            objective=settings.request.objective,
            dispatch=DispatchRule(settings.request.dispatch),
        )
        self.how = {"windows": past.num_windows, "asked": _asked(settings, Coverage(Constraints()))}
        return plan_to(problem, earlier, why=why)

    def judge(
        self, group: Group, serving: Placement, settings: ControllerSettings
    ) -> Judged | None:
        """Hold what serves to what its plan promised; None: there is nothing to judge now."""
        topology = settings.request.topology(group.topology)
        return self._record().judge(group.complete_windows(), serving, topology)

    def is_judging(self, serving: Placement) -> bool:
        """Whether a plan serves that has not had its windows yet."""
        return self._record().is_judging(serving)

    def published(self, proposal: Plan, base: Placement, target: Placement) -> None:
        """Hold a published plan to its promise."""
        self._record().published(proposal, base, target)

    def taken_back(self) -> None:
        """Hold no plan so far to its promise: the way to an earlier placement is published."""
        self._record().taken_back()

    def _record(self) -> TrackRecord:
        self._track = self._track or TrackRecord(self._store)
        return self._track


class Past(NamedTuple):
    """The load that a plan looks at."""

    history: LoadHistory
    upto: int  # its last step
    changed_at: int  # first step after the latest sudden change; -1: there is none


def planned_on(windows: Sequence[Window], last: int) -> Past | None:
    """The latest complete windows, none from before a sudden change of load; None without any."""
    seen = history(windows, last=max(last, LOOK_BACK))
    if seen is None:
        return None
    since = windows_since_change(seen)
    changed_at = int(seen.first_step[-since]) if since < seen.num_windows else -1
    return Past(seen.latest(min(last, since)), int(seen.last_step[-1]), changed_at)


def _asked(settings: ControllerSettings, coverage: Coverage) -> dict[str, Any]:
    """Return what the planner was asked, as details of an event: request, budget and cost."""
    cost = {name: getattr(settings.cost, name) for name in OF_COST}
    budget = {name: getattr(settings.budget, name) for name in OF_BUDGET}
    return settings.request.recorded(coverage) | budget | cost


def summary(proposal: Plan) -> dict[str, Any]:
    """Return a plan as the detail of an event."""
    return {
        "decision": proposal.decision.value,
        "reason": proposal.reason,
        "policy": proposal.policy,
        "imbalance_before": finite(round(proposal.before, 4)),
        "imbalance_after": round(proposal.after, 4),
        "expected_gain": round(proposal.expected_gain, 4),
        "moves": proposal.num_moves,
        "bytes": proposal.num_moves * proposal.expert_bytes,
        "cost_s": round(cost_s_of(proposal), 4),
        "generation": proposal.base_generation,
        "target_generation": proposal.target.generation,
    }


def cost_s_of(proposal: Plan) -> float:
    """Serving time that the plan's moves and swaps take; 0 for a plan that changes nothing."""
    if proposal.decision is Decision.KEEP:
        return 0.0
    cost, num_ranks = proposal.problem.cost, int(proposal.topology.alive.sum())
    moves_s = proposal.num_moves * cost.move_seconds(proposal.expert_bytes) / num_ranks
    return cost.seconds_per_rebalance + moves_s
