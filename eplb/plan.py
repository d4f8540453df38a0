"""The planner's front door: load in, a plan with its reasons out.

    history -> policy -> target -> budget -> gate -> MOVE, RESPLIT or KEEP

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.allowance import Offer, within_budget
from eplb.constraints import Constraints
from eplb.frontier import Curve
from eplb.gate import CostModel, Decision, Outlook, decide
from eplb.legal import complaints_of, unfit_layers, why_it_cannot_serve
from eplb.load import LoadHistory, as_history
from eplb.model import ModelShape
from eplb.noise import noise_under
from eplb.outcome import Plan
from eplb.placement import EMPTY, Placement
from eplb.policies import contiguous_policy, propose
from eplb.problem import Budget, Objective, Problem
from eplb.timing import measured
from eplb.topology import Topology
from eplb.windows import Scenarios, as_scenarios

__all__ = ["Plan", "plan", "plan_for"]


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
        policy: one of ``eplb.policies.POLICIES``.
        objective: "tokens" evens tokens out; "time" the time that the curve in ``cost`` says they
            take, a window being as many steps as the history says, one for plain arrays.
        constraints: what every plan must keep to.
        scenarios: windows that may come, beside those of the past; arrays [K, L, E] weigh as much
            as a window of the past each.
        cost: what a move must earn, not asked when nothing serves yet, or cannot; and the curve.
        seed: for policies that draw.

    Raises:
        ConfigError: an unknown policy, constraints that contradict each other, or inputs that
            describe different systems.
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
    )
    return plan_for(problem, policy)


def plan_for(problem: Problem, policy: str) -> Plan:
    """``plan`` for a problem that is put together already."""
    current = problem.current
    base = current if current is not None else contiguous_policy(problem)
    proposal = propose(policy, problem)
    proposed, curve = proposal.placement, proposal.curve
    before, after = measured(problem, base), measured(problem, proposed)
    if curve is None:
        forced = np.zeros(base.num_layers, dtype=np.bool_)
        forced[list(complaints_of(problem, base))] = True
        offer = Offer(base, proposed, before, after, forced)
        proposed, after, curve = _bought(problem, offer)
    assert not unfit_layers(problem, proposed).any(), "policies keep to ranks and slots"
    decision, reason = _decided(problem, base, proposed, before, after)
    return Plan(
        problem=problem,
        base=base,
        target=base if decision is Decision.KEEP else _next(base, proposed),
        before_per_layer=before,
        after_per_layer=after,
        decision=decision,
        reason=reason,
        curve=curve,
        policy=policy,
    )


def _bought(problem: Problem, offer: Offer) -> tuple[Placement, NDArray[np.float64], Curve]:
    """Placement, imbalance and curve of the layers that the budget buys."""
    chosen, curve = within_budget(offer, problem.max_moves)
    if chosen.all() or problem.current is None:
        return offer.proposed, offer.after, curve
    placement = offer.base.with_layers(offer.proposed, np.flatnonzero(chosen).tolist())
    return placement, np.where(chosen, offer.after, offer.before), curve


def _next(base: Placement, proposed: Placement) -> Placement:
    generation = base.generation + 1
    return proposed if proposed.generation == generation else proposed.with_generation(generation)


def _decided(
    problem: Problem,
    base: Placement,
    proposed: Placement,
    before: NDArray[np.float64],
    after: NDArray[np.float64],
) -> tuple[Decision, str]:
    received = _received_per_rank(base, proposed, problem.topology)
    num_moves = int(received.sum())
    change = f"imbalance {before.mean():.3f} -> {after.mean():.3f}"
    if problem.current is None:
        if num_moves:
            return Decision.MOVE, f"no current placement: {change}"
    elif (why := why_it_cannot_serve(problem, base)) is not None:
        return Decision.MOVE, f"the current placement cannot serve: {why}"
    # The base was not planned on these windows; the proposed placement was, and hides their noise.
    noise = float(noise_under(problem, base).mean())
    outlook = Outlook(
        float(before.mean()), float(after.mean()), noise, num_moves, int(received.max())
    )
    decision, reason = decide(outlook, problem.cost)
    if decision is Decision.MOVE and num_moves == 0:
        return Decision.RESPLIT, reason
    return decision, reason


def _received_per_rank(base: Placement, target: Placement, topology: Topology) -> NDArray[np.int64]:
    new = (base.slot_to_expert != target.slot_to_expert) & (target.slot_to_expert != EMPTY)
    received: NDArray[np.int64] = np.bincount(
        topology.rank_of_slot, new.sum(axis=0), topology.num_ranks
    ).astype(np.int64)
    return received
