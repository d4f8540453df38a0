"""The entry point of the planner: from load to a plan with its reasons.

    history -> policy -> budget -> shares -> gate -> MOVE, RESPLIT or KEEP

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from eplb.core.constraints import Constraints
from eplb.core.cost import CostModel, Decision
from eplb.core.demand import Scenarios, as_scenarios
from eplb.core.dispatch import DispatchRule
from eplb.core.jit import BoolArray
from eplb.core.load import LoadHistory, as_history
from eplb.core.model import ModelShape
from eplb.core.placement import Placement, check_sources, moves_per_layer, with_shares_of
from eplb.core.problem import AskedObjective, Budget, Problem, Record
from eplb.core.topology import Topology
from eplb.core.zones import keeps_groups
from eplb.decision.alternatives import (
    ROUNDING,
    Choice,
    Option,
    choose,
    cost_of,
    may_cost_less,
    no_worse_than,
    option_of,
    ordered,
    with_shares,
    without_losses,
)
from eplb.decision.outcome import Plan, lost_tokens
from eplb.decision.score import objective_for, rule_note
from eplb.errors import ConfigError, PlacementError
from eplb.policies.greedy import best_fresh, sum_serves
from eplb.policies.incremental import BalanceCurve, thinned
from eplb.policies.table import contiguous_policy, policy_named
from eplb.search.by_rule import LARGEST_PRICE, balanced_for_rule, starts_for_rule
from eplb.search.legality import illegal_layers, violations_of
from eplb.search.local_search import step_ms
from eplb.search.relabel import in_place
from eplb.shares.traffic import with_less_crossing

__all__ = ["Plan", "plan", "plan_for", "plan_to"]

ON_WINDOWS = ("auto", "fresh")  # policies that search on each window
FEW_SLOTS = 32  # of a layer, up to which plans by tokens are compared with those over fewer
EASY = ("greedy", "fresh")  # policies that ``auto`` is never worse than, by the price of its moves


def plan(
    history: LoadHistory | ArrayLike,
    topology: Topology,
    *,
    model: ModelShape | None = None,
    current: Placement | None = None,
    budget: Budget | None = None,
    policy: str = "auto",
    objective: AskedObjective = "auto",
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
            rank did not report are not used.
        topology: ranks, their slots, and which are alive.
        model: adds expert groups, bytes and costs; without it every expert costs the same.
        current: the serving placement; without it the plan is fresh and moves from contiguous.
        budget: limits on moves and search time; layers whose current placement cannot serve are
            exempt from the limit on moves.
        policy: a name in ``eplb.policies.table.POLICIES``.
        objective: "tokens" balances tokens; "time" balances their time by the curve in ``cost``,
            where a window has the steps that the history gives, one for plain arrays. "auto"
            chooses by tokens a step: "time" while reading an expert's weights takes longer than its
            products, else "tokens", which is also for windows of one step, plain arrays, and a
            ``cost`` with the constant curve.
        constraints: met by every plan.
        scenarios: possible future windows beside those of the past; in arrays [K, L, E] each has
            the weight of one past window.
        cost: cost and pay-back time of moves, not used when no placement serves or can serve; and
            the curve.
        seed: for policies that draw.
        dispatch: how the engine chooses among replicas. The plan is made and judged for that rule,
            and has shares only where the rule uses them.
        unseen: how many of the latest windows came after those that ``current`` was planned on;
            None: all of them. Gains are judged on these.
        record: promised and realised gains of earlier plans; None: no plans so far.

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
        Budget() if budget is None else budget,
        CostModel() if cost is None else cost,
        seed,
        "tokens" if objective == "auto" else objective,
        Constraints() if constraints is None else constraints,
        None if scenarios is None else as_scenarios(scenarios, windows.num_windows),
        dispatch,
        unseen,
        Record() if record is None else record,
    )
    if objective != "auto":
        return plan_for(problem, policy)
    chosen, why = objective_for(problem)
    if chosen != problem.objective:
        problem = replace(problem, objective=chosen)
    found = plan_for(problem, policy)
    return replace(found, reason=f"{found.reason}; objective {chosen}: {why}") if why else found


def plan_for(problem: Problem, policy: str) -> Plan:
    """``plan`` for a complete ``Problem``."""
    current = problem.current
    base = contiguous_policy(problem) if current is None else current
    violations = violations_of(problem, base) if current is not None else {}
    forced = np.zeros(base.num_layers, dtype=np.bool_)
    forced[list(violations)] = True
    serving = option_of(problem, base)
    # Layers up to this are not searched.
    least = np.maximum(problem.budget.target_imbalance, 1.0 + problem.noise)
    is_searched = policy in ON_WINDOWS and (current is None or bool((serving.score > least).any()))
    if is_searched and sum_serves(problem):
        problem = replace(problem, on_sum=True)
    proposed, curve = _compared(problem, policy, serving, forced)
    assert not illegal_layers(problem, proposed.placement).any(), "policies keep to ranks and slots"
    why_not = violations[min(violations)] if violations else None
    lost = lost_tokens(problem, base) if why_not else 0.0
    if lost:
        why_not = f"{why_not}; {lost:.1%} of the tokens are for experts without a live slot"
    choice = choose(problem, serving, proposed, why_not, _splits(problem, policy))
    made = _plan_of(problem, serving, choice, curve, policy)
    return replace(made, reason=made.reason + _time_limit_note(problem))


def plan_to(problem: Problem, wanted: Placement, *, why: str) -> Plan:
    """The plan to a placement that was chosen elsewhere, an earlier one for example.

    It is priced as any other plan, and the gate does not decide on it. Experts that stay on a rank
    keep their slots, so slots may differ from those of ``wanted``; experts by rank and shares do
    not.

    Args:
        problem: with a current placement.
        wanted: experts and shares, in slots of the problem's topology.
        why: the first words of the plan's reason.

    Raises:
        ConfigError: no current placement.
        PlacementError: ``wanted`` is of another system, or cannot serve on these ranks or within
            the constraints.
    """
    base = problem.current
    if base is None:
        raise ConfigError(f"{why}: found no current placement, expected one to move from")
    found, expected = wanted.slot_to_expert.shape, base.slot_to_expert.shape
    if (*found, wanted.num_experts) != (*expected, base.num_experts):
        raise PlacementError(
            f"{why}: found {found[0]} layers of {found[1]} slots and {wanted.num_experts} experts, "
            f"expected {expected[0]} layers of {expected[1]} slots and {base.num_experts} experts "
            "as in the placement that serves"
        )
    check_sources(wanted, problem.topology)
    violations = violations_of(problem, wanted)
    if violations:
        raise PlacementError(f"{why}: it cannot serve: {violations[min(violations)]}")
    topology = problem.topology
    held = in_place(wanted.slot_to_expert.astype(np.int64), base.slot_to_expert, topology)
    target = with_shares_of(wanted, topology, held.astype(np.int32), topology)
    serving = option_of(problem, base)
    chosen = option_of(problem, target.with_generation(base.generation + 1))
    choice = ordered(problem, serving, chosen, why)
    return _plan_of(problem, serving, choice, ((0, float(serving.score.mean())),), "ordered")


def _plan_of(
    problem: Problem, serving: Option, choice: Choice, curve: BalanceCurve, policy: str
) -> Plan:
    decision, reason, taken, expected = choice
    base, is_kept = serving.placement, decision is Decision.KEEP
    target = base if is_kept else taken.placement.with_generation(base.generation + 1)
    return Plan(
        problem=problem,
        base=base,
        target=target,
        before_per_layer=serving.score,
        after_per_layer=serving.score if is_kept else taken.score,
        proposal=taken.placement,
        decision=decision,
        reason=reason + rule_note(problem, target),
        curve=curve,
        policy=policy,
        expected_gain=expected,
    )


def _compared(
    problem: Problem, policy: str, serving: Option, forced: BoolArray
) -> tuple[Option, BalanceCurve]:
    """The policy's placement, no worse than easy plans, nor for a slot more than it needs."""
    proposed, curve = _proposed(problem, policy, serving, forced)
    by_rank, is_anew = problem.dispatch.by_rank, problem.current is None
    if policy == "auto" and (not is_anew or by_rank or problem.on_sum):
        proposed, curve = _with_easy_layers(problem, serving, proposed, curve, forced)
    fewer = _with_fewer_slots(problem)
    if fewer is None or not (policy == "fresh" or (policy == "auto" and is_anew)):
        return proposed, curve
    other, _ = _compared(fewer, policy, serving, forced)
    gain = cost_of(problem, serving, proposed) - cost_of(problem, serving, other)
    if by_rank or problem.max_moves is not None:  # layers depend on each other
        gain[:] = gain.sum()
    return proposed.with_layers(other, gain > ROUNDING), curve


def _proposed(
    problem: Problem, policy: str, serving: Option, forced: BoolArray
) -> tuple[Option, BalanceCurve]:
    """The policy's placement within the budget, with its best shares; and moves against balance.

    Layers that it does not improve are the serving ones.
    """
    entry, by_rank = policy_named(policy), problem.dispatch.by_rank
    if by_rank and policy == "auto" and problem.current is not None:
        return _improved_for_rule(problem, serving)
    placement, curve = entry.propose(problem)
    if by_rank and entry.resplits:
        placement, curve = balanced_for_rule(problem, placement), None
    elif problem.cost.node_traffic and entry.resplits:
        placement = with_less_crossing(problem, placement)
    proposed = option_of(problem, placement)
    if curve is None:
        chosen, curve = _within_budget(problem, serving, proposed, forced)
        if problem.current is not None and not chosen.all():
            proposed = serving.with_layers(proposed, chosen)
            if by_rank:  # draws depend on all layers: a mix of layers has its own draws
                proposed = option_of(problem, proposed.placement)
    if not _splits(problem, policy):
        return proposed, curve
    proposed = with_shares(problem, proposed)
    if problem.current is None:
        return no_worse_than(problem, serving, proposed), curve
    return without_losses(problem, serving, proposed, forced), curve


def _with_fewer_slots(problem: Problem) -> Problem | None:
    """The problem without one slot of each rank; None where a plan for it cannot be better.

    By time a replica costs a reading of weights, and the search takes few away. By tokens a slot
    more makes a plan worse by chance alone, where there are few. Of plans on the sum the windows
    would choose the one that fits their chance, which makes the next ones worse.
    """
    room = np.maximum(problem.room - 1, 0)
    is_of_use = problem.objective == "time" or problem.topology.num_slots <= FEW_SLOTS
    if not is_of_use or problem.on_sum or room.sum(axis=1).min() < problem.num_experts:
        return None
    if problem.constraints.binds_experts:
        return None
    if problem.groups_stay and not keeps_groups(
        problem.topology, problem.num_groups, problem.num_experts, room
    ):
        return None
    return replace(problem, constraints=replace(problem.constraints, slots=room))


def _splits(problem: Problem, policy: str) -> bool:
    """Whether a plan of the policy has shares of its own."""
    return policy_named(policy).resplits and problem.dispatch.uses_shares


def _improved_for_rule(problem: Problem, serving: Option) -> tuple[Option, BalanceCurve]:
    """The serving placement improved for a rule under which each rank uses one replica.

    The best of two starts by imbalance and the price of the moves.
    """
    starts = starts_for_rule(problem, best_fresh)
    options = [option_of(problem, balanced_for_rule(problem, start)) for start in starts]
    # Without the floor of ``cost_of``: below it the start that fills all slots is better.
    price = np.minimum(problem.price, LARGEST_PRICE)
    moved = [moves_per_layer(serving.placement, option.placement) for option in options]
    costs = [
        (option.score + price * num).mean() for option, num in zip(options, moved, strict=True)
    ]
    best = int(np.argmin(costs))
    found, moves = options[best], int(moved[best].sum())
    return found, ((0, float(serving.score.mean())), (moves, float(found.score.mean())))


def _with_easy_layers(
    problem: Problem, serving: Option, proposed: Option, curve: BalanceCurve, forced: BoolArray
) -> tuple[Option, BalanceCurve]:
    """``proposed``, with layers of a greedy or a fresh plan where these cost less by the price.

    Only layers in which such a plan could be worth its moves are planned again. Plans are compared
    as a whole where layers depend on each other: within a limit on moves, and under SGLang's rule,
    whose draws continue from layer to layer. A fresh plan is compared with greedy under rules by
    rank, and where the sum is searched, which the windows then score; elsewhere its search starts
    from greedy.
    """
    is_chained = problem.dispatch is DispatchRule.SGLANG_STATIC
    for policy in EASY if problem.current is not None else EASY[:1]:
        spare = may_cost_less(problem, serving, proposed)
        if problem.max_moves is not None:
            spare = np.full(len(spare), spare.max())
        elif is_chained:
            spare = np.full(len(spare), spare.sum())
        layers = np.flatnonzero(spare > ROUNDING)
        if not layers.size:
            break
        part, base = problem.of_layers(layers), serving.of_layers(layers)
        easy, _ = _compared(part, policy, base, forced[layers])
        other = proposed.with_part(easy, layers)
        now, then = (cost_of(problem, serving, it) for it in (proposed, other))
        if is_chained or problem.max_moves is not None:
            now, then = np.full(len(now), now.sum()), np.full(len(now), then.sum())
        if (better := then < now - ROUNDING).any():
            proposed = proposed.with_layers(other, better)
            moves = int(moves_per_layer(serving.placement, proposed.placement).sum())
            fewer = (point for point in curve if point[0] < moves)
            curve = (*fewer, (moves, float(proposed.score.mean())))
    return proposed, curve


def _within_budget(
    problem: Problem, serving: Option, proposed: Option, forced: BoolArray
) -> tuple[BoolArray, BalanceCurve]:
    """[L] the layers within the budget of moves, by gain per move, and a point for each of them.

    For policies without support for budgets; ``eplb/policies/incremental.py`` applies its own, step
    by step. A layer without gain is not selected unless it cannot serve as it is, ``forced`` [L].
    """
    moves = moves_per_layer(serving.placement, proposed.placement)
    # A layer that cannot serve is replaced whatever its gain.
    before = np.where(np.isfinite(serving.score), serving.score, proposed.score)
    gain = before - proposed.score
    order = np.lexsort((-gain / np.maximum(moves, 1), ~forced))
    chosen = np.zeros(len(moves), dtype=np.bool_)
    spent, total = 0, float(before.sum())
    points = [(0, total / len(moves))]
    for layer in order.tolist():
        fits = problem.max_moves is None or spent + moves[layer] <= problem.max_moves
        if not (fits and gain[layer] > 0) and not forced[layer]:
            continue
        chosen[layer] = True
        spent += int(moves[layer])
        total -= float(gain[layer])
        points.append((spent, total / len(moves)))
    return chosen, thinned(points)


def _time_limit_note(problem: Problem) -> str:
    """The note in ``plan.reason`` where ``time_ms`` allows no step of the search; else empty."""
    limit = problem.budget.time_ms
    windows = int(problem.complete.sum())
    least = step_ms(problem.topology, windows, is_fresh=problem.current is None)
    if limit is None or limit >= least:
        return ""
    return f"; cut short: time_ms is {limit:g}, a step of one layer takes {least:.2g}"
