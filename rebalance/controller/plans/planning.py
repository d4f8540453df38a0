"""The controller's plans: on which windows, with which track record, in which slots.

Policies do not see spare slots, so placements are compacted before a plan.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import Any, NamedTuple

import numpy as np

from eplb.clock import Clock
from eplb.core.constraints import Constraints
from eplb.core.cost import CostModel, Decision
from eplb.core.dispatch import DispatchRule
from eplb.core.jit import FloatArray
from eplb.core.load import FEWEST_WINDOWS, LoadHistory, blocks
from eplb.core.placement import Placement, check_fits, undrained
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.decision.expert_times import ExpertTimes, chosen_curve
from eplb.decision.explanation import finite
from eplb.decision.score import objective_for
from eplb.declared import declared_fields
from eplb.errors import ConfigError, EplbError, PlacementError, StoreError
from eplb.fitting import Coverage, FittingCordons, arrivals
from eplb.measure import imbalance
from eplb.migration.spares import compact
from eplb.migration.survivors import relieved
from eplb.planner import Plan, plan, plan_to
from eplb.search.legality import violations_of
from rebalance.controller.load import ServingGroup
from rebalance.controller.plans.planner_request import curve_of
from rebalance.controller.plans.track_record import Judged, TrackRecord
from rebalance.controller.settings import ControllerSettings
from telemetry.load.drift import LOOK_BACK, remembered, windows_since_change
from telemetry.load.folder import Window, apart, history, weighted
from telemetry.log_context import set_log_fields
from telemetry.state.codec import from_json, to_json
from telemetry.state.events import PhaseFigures, PlanDecision
from telemetry.state.store import StateStore
from telemetry.state.tasks import Refusal

# A change of load after which the serving placement is far worse is believed at weaker proof: until
# it is found, each window costs as much as several plans.
SUSPECTED = 0.2  # chance of such a split in a load without a change
FAR_WORSE = 4.0  # standard deviations between the windows before it

log = logging.getLogger(__name__)


class TaskRefused(EplbError):
    """A task that the controller refuses.

    Args:
        refusal: the reason.
        why: the reason, one sentence.
    """

    def __init__(self, refusal: Refusal, why: str) -> None:
        super().__init__(why)
        self.refusal = refusal


class Planning:
    """Makes plans, and holds them to what they promise.

    Args:
        store: with earlier plans and their events, which are read with the first plan.
        clock: for how long a plan takes.
    """

    def __init__(self, store: StateStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._track: TrackRecord | None = None
        self._curve_source = ""
        self._refused_times: set[str] = set()  # errors that are logged already
        # Run, and first window after the latest change that weak proof showed. It is remembered:
        # once the placement is another, no window shows it any more.
        self._believed = ("", -1)
        self.how: dict[str, Any] = {}  # how the latest plan was made: its time, its windows

    def past(
        self, group: ServingGroup, settings: ControllerSettings, serving: Placement, last: int = 0
    ) -> Past | None:
        """The latest complete windows, none from before a sudden change of load; None without any.

        Where the change led back to a load that was seen before, windows of both loads stay.

        Args:
            group: whose windows. In one that serves both phases, with ``decode_weight``, a change
                is one of either phase, and their mix may change.
            settings: how many windows, and the weight of decode.
            serving: the placement that serves.
            last: another number of windows.
        """
        last, decode_weight = last or settings.plan_windows, settings.request.decode_weight
        complete = group.complete_windows()
        windows = complete[-max(last, LOOK_BACK) :]
        if not windows:
            return None
        unseen = self._record().unseen(complete, serving)
        under = {window.index for window in complete[len(complete) - unseen :]}
        changes: list[tuple[Window, list[Window]]] = []  # the first window after each, of its part
        parts = _parts(group, windows, decode_weight)
        for part in parts:
            seen = _sum_windows(part)
            found = windows_since_change(seen)
            if found < seen.num_windows:
                changes.append((part[-found], part))
            since = min(sum(window.index in under for window in part), seen.num_windows)
            if since <= FEWEST_WINDOWS or serving.num_slots != group.topology.num_slots:
                continue  # with other slots the plan is refused, and the reason is noted
            starts = blocks(seen.tokens.sum(axis=(1, 2)))
            alike = seen.joined(starts)  # a window with few tokens stands out by its noise alone
            latest = alike.tokens[starts >= seen.num_windows - since]
            balance = imbalance(latest, serving, group.topology).mean(axis=1)
            if suspected := suspected_change(alike, balance):
                self._believed = group.run.run, part[starts[-suspected]].index
        every = ((window, part) for part in parts for window in part)
        changes += [one for one in every if (group.run.run, one[0].index) == self._believed]
        first = None
        if changes:
            first, part = max(changes, key=lambda change: change[0].index)
            num_new = sum(window.index >= first.index for window in part)
            earlier = remembered(_sum_windows(part), num_new, last=last)
            stay = {part[place].index for place in earlier}
            windows = [one for one in windows if one.index >= first.index or one.index in stay]
        return Past(
            _history(group, windows[-last:], decode_weight),
            _history(group, windows[-1:], decode_weight),
            windows[-1].last_step,
            -1 if first is None else first.first_step,
        )

    def plan(
        self,
        group: ServingGroup,
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
        unseen = _unseen(group, past, settings, track.unseen(group.complete_windows(), current))
        topology = settings.request.topology(group.topology)
        if settings.spare_slots:
            current, topology = _compacted(current, topology, settings.spare_slots)
        groups = group.model.num_expert_groups
        cordons = settings.request.cordoned(current, topology, groups)
        coverage = settings.request.coverage(past, current, cordons, group.model)
        begun = self._clock()
        proposal = plan(
            past,
            cordons.topology,
            model=group.model,
            current=current,
            budget=settings.budget,
            policy=policy,
            cost=self._cost(group, settings),
            unseen=unseen,
            record=track.record,
            objective=settings.request.objective,
            constraints=coverage.constraints,
            dispatch=DispatchRule(settings.request.dispatch),
        )
        took_s = round(self._clock() - begun, 4)
        asked = _describe_request(settings, coverage)
        self.how = {"plan_seconds": took_s, "windows": past.num_windows, "asked": asked}
        self.how["expert_curve"] = self._curve_source
        return proposal

    def rollback(
        self,
        group: ServingGroup,
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
            found = f"{why}: found no placement of generation {generation} in the store"
            raise TaskRefused(Refusal.NO_SUCH_PLACEMENT, found)
        past = self.past(group, settings, current, last)
        if past is None:
            found = f"{why}: found no complete window of load, expected one for its price"
            raise TaskRefused(Refusal.NO_LOAD, found)
        return self.plan_back(group, settings, past.history, current, earlier.placement, why)

    def plan_back(
        self,
        group: ServingGroup,
        settings: ControllerSettings,
        past: LoadHistory,
        current: Placement,
        earlier: Placement,
        why: str,
    ) -> Plan:
        """Plan the way to an earlier placement, priced on ``past``.

        Raises:
            PlacementError: the ranks of this run cannot serve it, or are kept from it by cordons.
        """
        topology = settings.request.topology(group.topology)
        check_fits(earlier, topology)
        if settings.spare_slots:
            earlier, _ = _compacted(earlier, topology, settings.spare_slots)
            current, topology = _compacted(current, topology, settings.spare_slots)
        cordons = settings.request.cordoned(current, topology, group.model.num_expert_groups)
        if arrives := arrivals(cordons.cordoned, current, earlier, topology):
            raise PlacementError(f"{why}: {arrives}; expected it uncordoned first")
        # Other constraints bind the planner, not an operator: what served may serve again.
        problem = Problem(
            past,
            cordons.topology,
            group.model,
            current,
            settings.budget,
            self._cost(group, settings),
            dispatch=DispatchRule(settings.request.dispatch),
        )
        self.how = {
            "windows": past.num_windows,
            "asked": _describe_request(settings, Coverage(Constraints())),
        }
        if settings.request.objective == "auto":
            problem = replace(problem, objective=objective_for(problem)[0])
        else:
            problem = replace(problem, objective=settings.request.objective)
        broken = _against(problem, settings, current, cordons, earlier)
        return plan_to(problem, earlier, why=why + broken)

    def judge(
        self, group: ServingGroup, serving: Placement, settings: ControllerSettings
    ) -> Judged | None:
        """Hold what serves to what its plan promised; None: there is nothing to judge now."""
        topology = self._cordons(group, serving, settings).topology

        def problem_of(windows: Sequence[Window]) -> Problem:
            past = _history(group, windows, settings.request.decode_weight)
            return Problem(past, topology, group.model, cost=self._cost(group, settings))

        return self._record().judge(group.complete_windows(), serving, problem_of)

    def _cost(self, group: ServingGroup, settings: ControllerSettings) -> CostModel:
        """The cost model, with the curve of the user, of the ranks, or the constant."""
        asked, cost = settings.request, settings.cost
        if asked.curve:
            cost = replace(cost, curve=curve_of(asked.curve))
        curve, source = chosen_curve(cost.curve, self._read_expert_times(group))
        if source != self._curve_source:
            log.info("curve of the experts' time: %s: %s", source, curve)
            self._curve_source = source
        return replace(cost, curve=curve)

    def _read_expert_times(self, group: ServingGroup) -> list[ExpertTimes]:
        """What ranks measured; a report that cannot be read is one of a rank without figures."""
        found = []
        for state in self._store.rank_states(group.run.run):
            try:
                times = state.expert_times
            except StoreError as exc:
                if str(exc) not in self._refused_times:
                    self._refused_times.add(str(exc))
                    log.warning("%s; the curve is made without this rank", exc)
                continue
            if times is not None:
                found.append(times)
        return found

    def is_judging(self, serving: Placement) -> bool:
        """Whether a plan serves that has not had its windows yet."""
        return self._record().is_judging(serving)

    def is_draining(
        self, group: ServingGroup, serving: Placement, settings: ControllerSettings
    ) -> bool:
        """Whether a rank that is to hold nothing, and can, holds experts."""
        if not settings.request.cordons:
            return False
        return bool(undrained(serving, self._cordons(group, serving, settings).topology))

    def why_not_drained(
        self,
        group: ServingGroup,
        serving: Placement,
        settings: ControllerSettings,
        leaving: Collection[int],
    ) -> str:
        """Why a rank that is to leave cannot be drained; "": all can."""
        topology = settings.request.topology(group.topology)
        if settings.spare_slots:
            serving, topology = _compacted(serving, topology, settings.spare_slots)
        groups = group.model.num_expert_groups
        cordons = settings.request.cordoned(serving, topology, groups)
        stuck = tuple(f"rank {rank} " for rank in leaving if not cordons.topology.drained[rank])
        return next((one for one in cordons.unmet if stuck and one.startswith(stuck)), "")

    @staticmethod
    def _cordons(
        group: ServingGroup, serving: Placement, settings: ControllerSettings
    ) -> FittingCordons:
        """Cordons by all slots of ``serving``, spare ones included."""
        topology = settings.request.topology(group.topology)
        groups = group.model.num_expert_groups
        return settings.request.cordoned(serving, topology, groups)

    def published(self, proposal: Plan, base: Placement, target: Placement) -> None:
        """Hold a published plan to its promise."""
        self._record().published(proposal, base, target)

    def taken_back(self) -> None:
        """Hold no plan so far to its promise: the way to an earlier placement is published."""
        self._record().taken_back()

    def forget(self) -> None:
        """Read promises from the store again, because a write may have reached it unseen."""
        self._track = None

    def _record(self) -> TrackRecord:
        self._track = self._track or TrackRecord(self._store)
        return self._track


class Past(NamedTuple):
    """The load that a plan looks at."""

    history: LoadHistory
    latest: LoadHistory  # of the newest window alone
    upto: int  # its last step
    changed_at: int  # first step after the latest sudden change; -1: there is none


def _parts(
    group: ServingGroup, windows: Sequence[Window], decode_weight: float
) -> list[list[Window]]:
    """The windows of each phase, where they are weighed apart; none of them is empty."""
    if not decode_weight:
        return [list(windows)]
    return [part for part in apart(group.folder, windows) if part]


def suspected_change(seen: LoadHistory, balance: FloatArray) -> int:
    """Windows since a change of load that weak proof shows, and that costs much; 0: there is none.

    Args:
        seen: the load.
        balance: imbalance of its latest windows under the placement that serves, which was planned
            on none of them.
    """
    # The second look at the load takes time, and is for a latest window that stands out.
    if len(balance) <= FEWEST_WINDOWS or balance[-1] <= balance[:FEWEST_WINDOWS].max():
        return 0
    num_new = windows_since_change(seen, false_alarm=SUSPECTED)
    old, new = balance[:-num_new], balance[-num_new:]
    if len(old) < FEWEST_WINDOWS or not np.isfinite(balance).all():
        return 0
    deviation = float(old.std(ddof=1)) * (1 / len(old) + 1 / len(new)) ** 0.5
    return num_new if new.mean() - old.mean() > FAR_WORSE * deviation else 0


def _compacted(
    serving: Placement, topology: Topology, spare_slots: int
) -> tuple[Placement, Topology]:
    """What serves as policies see it; ranks that refilled into their spares have them again."""
    return compact(relieved(serving, topology, spare_slots), topology, spare_slots)


def _sum_windows(windows: Sequence[Window]) -> LoadHistory:
    """Windows with all their tokens; at least one."""
    found = history(windows, last=len(windows))
    assert found is not None, "there is a window"
    return found


def _history(group: ServingGroup, windows: Sequence[Window], decode_weight: float) -> LoadHistory:
    """Complete windows as a plan looks at them."""
    if not decode_weight:
        return _sum_windows(windows)
    found = weighted(apart(group.folder, windows), decode_weight)
    assert found is not None, "there is a window"
    return found


def _unseen(
    group: ServingGroup, past: LoadHistory, settings: ControllerSettings, windows: int
) -> int:
    """How many of the latest windows of ``past`` are among the latest ``windows`` of the group."""
    complete = group.complete_windows()
    since = complete[-windows].first_step if windows else inf
    number = sum(1 for _ in takewhile(lambda first: first >= since, reversed(past.first_step)))
    is_cut = past.first_step[0] > complete[-settings.plan_windows :][0].first_step
    if number < past.num_windows or is_cut:
        return number  # a change of load restarts the count
    return windows


def _describe_request(settings: ControllerSettings, coverage: Coverage) -> dict[str, Any]:
    """Return what the planner was asked, as details of an event: request, budget and cost."""
    declared = {
        name: getattr(part, name)
        for part in (settings.budget, settings.cost)
        for name in declared_fields(type(part))
    }
    return settings.request.recorded(coverage) | declared


def _against(
    problem: Problem,
    settings: ControllerSettings,
    current: Placement,
    cordons: FittingCordons,
    placement: Placement,
) -> str:
    """Name the constraints that a placement breaks, as the end of a reason; "": it breaks none."""
    assert problem.model is not None, "the controller plans for the model of a run"
    try:
        coverage = settings.request.coverage(problem.history, current, cordons, problem.model)
        constrained = replace(problem, constraints=coverage.constraints)
        broken = violations_of(constrained, placement)
    except ConfigError as exc:
        return f", not compared with the constraints: {exc}"
    if not broken:
        return ""
    return f", against the constraints of {len(broken)} layers, the first: {broken[min(broken)]}"


def decided(proposal: Plan) -> PlanDecision:
    """Describe a plan as the decision that it is."""
    return PlanDecision(
        decision=proposal.decision.value,
        reason=proposal.reason,
        policy=proposal.policy,
        objective=proposal.problem.objective,
        imbalance_before=finite(round(proposal.before, 4)),
        imbalance_after=round(proposal.after, 4),
        expected_gain=round(proposal.expected_gain, 4),
        moves=proposal.num_moves,
        bytes=proposal.num_moves * proposal.expert_bytes,
        cost_s=round(cost_s_of(proposal), 4),
        generation=proposal.base_generation,
        target_generation=proposal.target.generation,
        phases=_phases(proposal),
    )


def summary(proposal: Plan) -> dict[str, Any]:
    """Return the same as JSON-ready values."""
    return from_json(to_json(decided(proposal)), "a plan")


def _phases(proposal: Plan) -> tuple[PhaseFigures, ...] | None:
    """The imbalance of each phase, where there are several."""
    parts = proposal.problem.parts
    if len(parts) == 1:
        return None
    return tuple(
        PhaseFigures(
            phase=found.phase,
            windows=len(part),
            before=finite(round(found.before, 4)),
            after=finite(round(found.after, 4)),
        )
        for found, part in zip(proposal.by_phase, parts, strict=True)
    )


def cost_s_of(proposal: Plan) -> float:
    """Serving time that the plan's moves and swaps take; 0 for a plan that changes nothing."""
    if proposal.decision is Decision.KEEP:
        return 0.0
    cost, num_ranks = proposal.problem.cost, int(proposal.topology.alive.sum())
    moves_s = proposal.num_moves * cost.move_seconds(proposal.expert_bytes) / num_ranks
    return cost.seconds_per_rebalance + moves_s
