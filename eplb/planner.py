"""The planner's front door: load in, a plan with its reasons out.

    history -> policy -> budget -> shares -> gate -> MOVE, RESPLIT or KEEP

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from eplb.core.constraints import Constraints
from eplb.core.kernels import BoolArray
from eplb.core.load import LoadHistory, as_history
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.problem import Budget, Objective, Problem
from eplb.core.scenarios import Scenarios, as_scenarios
from eplb.core.topology import Topology
from eplb.decision.allowance import Offer, moves_per_layer, within_budget
from eplb.decision.alternatives import (
    Option,
    choose,
    no_worse_than,
    score_of,
    with_shares,
    without_losses,
)
from eplb.decision.gate import CostModel, Decision
from eplb.decision.outcome import Plan, lost_tokens
from eplb.decision.promises import Record
from eplb.dispatch_rules.plans import rule_in_words, settled
from eplb.dispatch_rules.rules import DispatchRule
from eplb.policies.frontier import Curve
from eplb.policies.greedy import frame_of, step_ms
from eplb.policies.incremental import repaired
from eplb.policies.legality import complaints_of, unfit_layers
from eplb.policies.table import contiguous_policy, policy_named
from eplb.shares.traffic import nearer

__all__ = ["Plan", "plan", "plan_for"]

# Policies that plan shares as well. The others are there to be compared with: equal split.


def plan(
    history: LoadHistory | ArrayLike,
    topology: Topology,
    *,
    model: ModelShape | None = None,
    current: Placement | None = None,
    budget: Budget | None = None,
    policy: str = "auto",
    objective: Objective = "tokens",
    constraints: Constraints | None = None,
    scenarios: Scenarios | ArrayLike | None = None,
    cost: CostModel | None = None,
    seed: int = 0,
    dispatch: DispatchRule = DispatchRule.WEIGHTED,
    unseen: int | None = None,
    record: Record | None = None,
) -> Plan:
    """Find a placement for this load, and decide whether to move to it.

    Args:
        history: LoadHistory, or tokens [L, E] or [T, L, E]; torch tensors too. Windows that some
            rank did not report are left out.
        topology: ranks, their slots, and which are alive.
        model: adds expert groups, bytes and costs; without it every expert costs the same.
        current: what serves now; without it the plan is fresh and moves from contiguous.
        budget: limits on moves and thinking; layers whose current placement cannot serve are
            exempt from the limit on moves.
        policy: one of ``eplb.policies.table.POLICIES``.
        objective: "tokens" evens tokens out; "time" the time that the curve in ``cost`` says they
            take, a window being as many steps as the history says, one for plain arrays.
        constraints: what every plan must keep to.
        scenarios: windows that may come, beside those of the past; arrays [K, L, E] weigh as much
            as a window of the past each.
        cost: what a move must earn, not asked when nothing serves yet, or cannot; and the curve.
        seed: for policies that draw.
        dispatch: how the engine chooses among replicas. The plan is made and judged for that, and
            has shares only where the rule follows them.
        unseen: how many of the latest windows came after those that ``current`` was planned on;
            None: all of them. Gains are judged on these.
        record: what earlier plans promised and gave; None: nothing is known of them.

    Raises:
        ConfigError: an unknown policy, constraints that contradict each other, inputs that
            describe different systems, or a dispatch rule that cannot serve on these ranks.
        PlacementError: fewer live slots than experts or constraints need.
        HistoryError: load that cannot be planned on.
    """
    windows = as_history(history)
    problem = Problem(
        windows,
        topology,
        model,
        current,
        budget or Budget(),
        cost or CostModel(),
        seed,
        objective,
        constraints or Constraints(),
        None if scenarios is None else as_scenarios(scenarios, windows.num_windows),
        dispatch,
        unseen,
        record or Record(),
    )
    return plan_for(problem, policy)


def plan_for(problem: Problem, policy: str) -> Plan:
    """``plan`` for a problem that is put together already."""
    current = problem.current
    base = current if current is not None else contiguous_policy(problem)
    complaints = complaints_of(problem, base) if current is not None else {}
    forced = np.zeros(base.num_layers, dtype=np.bool_)
    forced[list(complaints)] = True
    serving = Option(base, score_of(problem, base))
    splits = policy_named(policy).resplits and problem.dispatch.uses_shares
    proposed, curve = _proposed(problem, policy, serving, forced)
    if splits:
        proposed = with_shares(problem, proposed)
        if current is None:
            proposed = no_worse_than(problem, serving, proposed)
        else:
            proposed = without_losses(problem, serving, proposed, forced)
    assert not unfit_layers(problem, proposed.placement).any(), "policies keep to ranks and slots"
    why_not = complaints[min(complaints)] if complaints else None
    lost = lost_tokens(problem, base) if why_not else 0.0
    if lost:
        why_not = f"{why_not}; {lost:.1%} of the tokens are for experts without a live slot"
    decision, reason, taken, expected = choose(problem, serving, proposed, why_not, splits)
    target = base if decision is Decision.KEEP else _next(base, taken.placement)
    return Plan(
        problem=problem,
        base=base,
        target=target,
        before_per_layer=serving.score,
        after_per_layer=taken.score,
        decision=decision,
        reason=reason + rule_in_words(problem, target) + _cut_short(problem),
        curve=curve,
        policy=policy,
        expected_gain=expected,
    )


def _cut_short(problem: Problem) -> str:
    """The note in ``plan.reason`` where ``time_ms`` allows no step of the search; else empty."""
    limit = problem.budget.time_ms
    windows = int(problem.complete.sum())
    least = step_ms(problem.topology, windows, is_fresh=problem.current is None)
    if limit is None or limit >= least:
        return ""
    return f"; cut short: time_ms is {limit:g}, a step of one layer takes {least:.2g}"


def _proposed(
    problem: Problem, policy: str, serving: Option, forced: BoolArray
) -> tuple[Option, Curve]:
    """What the policy aims at within the budget, and the curve that leads there."""
    entry = policy_named(policy)
    if entry.resplits and problem.dispatch.by_rank:
        return _for_rule(problem, policy, serving)
    placement, curve = entry.propose(problem)
    if problem.cost.node_traffic and entry.resplits:
        placement = nearer(problem, placement)
    proposed = Option(placement, score_of(problem, placement))
    if curve is not None:
        return proposed, curve
    # What cannot be served at all is left whatever it gains.
    before = np.where(np.isfinite(serving.score), serving.score, proposed.score)
    offer = Offer(serving.placement, placement, before, proposed.score, forced)
    chosen, curve = within_budget(offer, problem.max_moves)
    if chosen.all() or problem.current is None:
        return proposed, curve
    bought = offer.base.with_layers(placement, np.flatnonzero(chosen).tolist())
    if problem.dispatch.by_rank:  # draws go through all layers: a mix has draws of its own
        return Option(bought, score_of(problem, bought)), curve
    return Option(bought, np.where(chosen, proposed.score, serving.score)), curve


def _for_rule(problem: Problem, policy: str, serving: Option) -> tuple[Option, Curve]:
    """A plan for a rule under which each source rank uses one replica of an expert.

    What serves was made for the rule, and looks uneven by an equal split: it is evened out as it
    is, and only a fresh plan starts from one for an equal split.
    """
    if problem.current is None:
        start, _ = policy_named(policy).propose(problem)
    else:
        base = problem.current.slot_to_expert.astype(np.int64)
        held = repaired(problem, frame_of(problem), base).astype(np.int32)
        start = Placement(held, problem.num_experts, problem.current.generation + 1)
    placement = settled(problem, start)
    score = score_of(problem, placement)
    moves = int(moves_per_layer(serving.placement, placement).sum())
    return Option(placement, score), (
        (0, float(serving.score.mean())),
        (moves, float(score.mean())),
    )


def _next(base: Placement, proposed: Placement) -> Placement:
    generation = base.generation + 1
    return proposed if proposed.generation == generation else proposed.with_generation(generation)
