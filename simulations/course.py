"""One policy over time: the placement that serves, and the plan after each window.

The planner, its gate, the cut at sudden changes and the record of kept promises are those of the
controller, so that what is simulated is what would run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from eplb.core.cost import CostModel, Decision
from eplb.core.dispatch import DispatchRule, effective_shares
from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.problem import Budget, Problem, Record
from eplb.core.topology import Topology
from eplb.decision.expectation import ENOUGH, Promise, realised
from eplb.planner import Plan, plan
from telemetry.load.drift import planning_history


@dataclass(frozen=True)
class Terms:
    """What plans are made with, beside the load."""

    topology: Topology
    model: ModelShape | None = None
    budget: Budget = field(default_factory=Budget)
    cost: CostModel = field(default_factory=CostModel)
    seed: int = 0
    past_windows: int = 16  # a plan looks back this far
    cut_at_change: bool = True  # plans forget the load before a sudden change
    dispatch: DispatchRule = DispatchRule.WEIGHTED


class Course:
    """Plans after windows, and takes each plan that the gate lets through.

    Args:
        first: the placement that serves at the start.
    """

    def __init__(self, terms: Terms, policy: str, first: Placement) -> None:
        self._terms, self._policy = terms, policy
        self.serving = first
        self._record, self._since = Record(), -1
        self._promise: Promise | None = None

    def plan_after(self, window: int, seen: LoadHistory) -> Plan:
        """Plan after a window, and serve the plan from the next one.

        Args:
            window: its number, from 0.
            seen: the windows up to it; the latest ones are enough.
        """
        terms = self._terms
        self._judge(window, seen)
        past = seen.latest(min(terms.past_windows, seen.num_windows))
        if terms.cut_at_change:
            past = planning_history(seen, last=terms.past_windows)
        unseen = window - self._since
        if past.num_windows < terms.past_windows:
            unseen = min(unseen, past.num_windows)  # a change of load begins the count anew
        found = plan(
            past,
            terms.topology,
            model=terms.model,
            current=self.serving,
            budget=terms.budget,
            policy=self._policy,
            cost=terms.cost,
            seed=terms.seed,
            dispatch=terms.dispatch,
            unseen=unseen,
            record=self._record,
        )
        if found.decision is Decision.MOVE:
            base, target = as_served(found.base, terms), as_served(found.target, terms)
            gain, objective = found.before - found.after, found.problem.objective
            self._promise = Promise(base, target, gain, objective)
            self._since = window
        if found.decision is not Decision.KEEP:
            self.serving = found.target
        return found

    def _judge(self, window: int, seen: LoadHistory) -> None:
        """Hold the latest plan to its promise once enough windows came under it."""
        if self._promise is None or window - self._since < ENOUGH:
            return
        terms, came = self._terms, seen.latest(window - self._since)
        judged = Problem(came, terms.topology, terms.model, cost=terms.cost)
        given = realised(judged, self._promise)
        self._record = self._record.with_plan(self._promise.gain, given)
        self._promise = None


def as_served(placement: Placement, terms: Terms) -> Placement:
    """The same experts, with the shares that the engine's rule gives to their slots."""
    if terms.dispatch is DispatchRule.WEIGHTED:
        return placement
    share = effective_shares(placement, terms.topology, terms.dispatch).clip(0.0, 1.0)
    return Placement(placement.slot_to_expert, placement.num_experts, placement.generation, share)
