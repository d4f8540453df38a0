"""The two objectives: the time of a placement by the cost model, and the better of two plans.

A plan for ``objective="time"`` is never slower than the plan for tokens by its own cost model:
both are made, and the faster one is used for each layer.

Shapes:  T windows, L MoE layers, S slots, R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eplb.core.kernels import FloatArray, IntArray
from eplb.core.placement import Placement
from eplb.core.problem import Objective, Problem
from eplb.decision.gate import GROUPED_GEMM_H200, Curve
from eplb.decision.promises import Promise
from eplb.dispatch_rules.plans import as_dispatched
from eplb.measure.balance import imbalance, live_shares, rank_sum, slot_load
from eplb.policies.greedy import descend, frame_of, packed_by_time, refined, rules_for
from eplb.policies.incremental import Improved, incremental, score_of
from eplb.search.demand import demand_of, time_of
from eplb.search.descent import COPIES_ALWAYS

FINEST_GAIN = 1e-4
MOST_IMBALANCE = 64.0  # upper end of the search for the dead zone


def objective_for(problem: Problem) -> tuple[Objective, str]:
    """Choose the objective for the problem's batch size, and return the reason.

    Up to the tokens at which reading an expert's weights takes as long as its products, by the
    curve, the number of experts that a rank reads decides its time, beyond that its tokens do
    (measured: benchmarks/reports/2026-11-24-objective.md).
    """
    history = problem.history
    steps = history.steps_per_window[problem.complete]
    if steps.max() == 1:
        return "tokens", "windows of one step, or without steps"
    if problem.cost.curve == GROUPED_GEMM_H200:  # of a device that this one may not be
        return "tokens", "no curve of the experts' time was given or measured"
    tokens = history.tokens[problem.complete].sum(axis=2).mean(axis=1)  # [T]
    rows = float((tokens / steps).mean()) / int(problem.topology.usable_slots.sum())
    most = ridge(problem.cost.curve)
    objective: Objective = "time" if rows < most else "tokens"
    side = "below" if objective == "time" else "not below"
    return objective, f"{rows:.3g} rows a slot in a step, {side} {most:.3g}"


def ridge(curve: Curve) -> float:
    """Tokens of an expert at which reading its weights takes as long as its products."""
    last, longest = curve[-1]
    return curve[0][1] / (longest / last)


def best_fresh(problem: Problem) -> IntArray:
    """[L, S] the best fresh plan by the problem's objective."""
    by_tokens = refined(replace(problem, objective="tokens"))
    if problem.objective == "tokens":
        return by_tokens
    found, score = by_tokens, score_of(problem, by_tokens)
    for start in (by_tokens, packed_by_time(problem)):
        held = start.copy()
        frame, demand = frame_of(problem), demand_of(problem)
        target = np.ones(len(held))
        rules = rules_for(problem, demand, target, FINEST_GAIN, COPIES_ALWAYS)
        descend(problem, frame, demand, held, rules)
        reached = score_of(problem, held)
        found = np.where((reached < score)[:, None], held, found)
        score = np.minimum(reached, score)
    return found


def best_improved(problem: Problem, current: Placement) -> Improved:
    """``current`` improved within the budget, by the problem's objective."""
    improved = incremental(problem, current)
    if problem.objective == "tokens":
        return improved
    by_tokens = incremental(replace(problem, objective="tokens"), current)
    is_faster = score_of(problem, by_tokens.held).mean() < score_of(problem, improved.held).mean()
    return by_tokens if is_faster else improved


def part_in_time(problem: Problem, old: Placement, new: Placement) -> float:
    """Part of the imbalance between two placements that is time at this batch, 0 to 1."""
    timed, plain = replace(problem, objective="time"), replace(problem, objective="tokens")
    gain = measured(plain, old).mean() - measured(plain, new).mean()
    if not gain > 0:
        return 1.0
    saved = measured(timed, old).mean() - measured(timed, new).mean()
    return float(min(max(saved / gain, 0.0), 1.0))


def dead_zone(problem: Problem) -> float:
    """Imbalance up to which removing all of it saves less than a rebalance costs, at this batch.

    The time of a busiest rank whose replicas have r times the mean tokens is read from the curve.
    """
    demand = demand_of(replace(problem, objective="time"), raw=True)
    slots = int(problem.topology.usable_slots.sum())
    mean = demand.tokens.sum(axis=1).mean() / slots  # of a replica in a step
    ratio = np.linspace(1.0, MOST_IMBALANCE, 6301)
    time = time_of(ratio * mean, demand)
    least = problem.cost.gain_worth(problem.cost.seconds_per_rebalance)
    wasted = np.flatnonzero(time / max(time[0], 1e-300) - 1.0 <= least)
    return float(ratio[wasted[-1]])


def realised(problem: Problem, promise: Promise) -> float:
    """Reduction of the promise's score on the problem's windows against the placement before."""
    judged = replace(problem, objective=promise.objective)
    before, after = (measured(judged, one).mean() for one in (promise.base, promise.target))
    return float(before - after)


def measured(problem: Problem, placement: Placement) -> FloatArray:
    """[L] mean over past windows of the imbalance that the placement would have had.

    For ``objective="time"``: of the slowest rank's time, over the time of a rank if all experts
    were split evenly at no cost. Shares are the effective ones of the engine's dispatch rule.
    """
    placement = as_dispatched(problem, placement)
    if problem.objective == "tokens":
        ratio: FloatArray = imbalance(problem.work, placement, problem.topology).mean(axis=0)
        return ratio
    topology, demand = problem.topology, demand_of(problem, raw=True)
    tokens = demand.tokens.transpose(2, 0, 1)  # [T, L, E]
    share, lost = live_shares(placement, topology)
    busy = rank_sum(time_of(slot_load(tokens, placement, share), demand), topology)  # [T, L, R]
    rate, extra = demand.rate.T, demand.extra.T  # [T, L]
    time = (busy * rate[..., None] + extra[..., None]) / topology.rank_speed
    slowest = np.where(rate > 0, time[..., topology.serving].max(axis=-1), 1.0)
    slowest[(tokens * lost).any(axis=-1)] = np.inf
    mean: FloatArray = slowest.mean(axis=0)
    return mean
