"""The score of a placement on a problem's windows: what plans are compared and judged by.

Shapes:  T windows, L MoE layers, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.clock import figure_text
from eplb.core.cost import Objective
from eplb.core.demand import time_of
from eplb.core.dispatch import DispatchRule, effective_shares
from eplb.core.jit import FloatArray
from eplb.core.kernels import Curve
from eplb.core.load import fluctuation
from eplb.core.placement import Placement
from eplb.core.problem import Problem, weighted_mean
from eplb.measure import imbalance, live_shares, rank_load, rank_sum, slot_load
from eplb.shares.traffic import crossing

NOTED_DIFFERENCE = 0.03  # between booked and effective imbalance, from which the reason names both
MOST_IMBALANCE = 64.0  # upper end of the search for the dead zone


def objective_for(problem: Problem) -> tuple[Objective, str]:
    """Choose the objective for the problem's batch size, and return the reason; "": no choice.

    Up to the tokens at which reading an expert's weights takes as long as its products, by the
    curve, the number of experts that a rank reads decides its time, beyond that its tokens do
    (measured: benchmarks/reports/2026-11-24-objective.md).
    """
    steps = problem.history.steps_per_window[problem.complete]
    # Windows of one step, or without steps; and the constant, of a device that this may not be.
    if steps.max() == 1 or not problem.cost.curve:
        return "tokens", ""
    tokens = problem.routed.mean(axis=1)  # [T]
    each = weighted_mean(tokens / steps, problem.timed_demand.weight)
    rows = float(each) / int(problem.topology.usable_slots.sum())
    most = ridge(problem.cost.timed.curve)
    objective: Objective = "time" if rows < most else "tokens"
    side = "below" if objective == "time" else "not below"
    return objective, f"{figure_text(rows)} rows a slot in a step, {side} {figure_text(most)}"


def ridge(curve: Curve) -> float:
    """Tokens of an expert at which reading its weights takes as long as its products."""
    last, longest = curve[-1]
    return curve[0][1] / (longest / last)


def score_of(problem: Problem, placement: Placement) -> FloatArray:
    """[L] score of a plan: imbalance or time, plus the price of tokens that cross nodes.

    See ``eplb.decision.score.measured`` and ``CostModel.node_traffic``.
    """
    score = measured(problem, placement)
    if problem.cost.node_traffic:
        score = score + problem.cost.node_traffic * crossing(problem, placement)
    return score


def part_in_time(problem: Problem, old: Placement, new: Placement) -> float:
    """Part of the imbalance between two placements that is time at this batch, 0 to 1."""
    gain = measured(problem, old, "tokens").mean() - measured(problem, new, "tokens").mean()
    if not gain > 0:
        return 1.0
    saved = measured(problem, old, "time").mean() - measured(problem, new, "time").mean()
    return float(min(max(saved / gain, 0.0), 1.0))


def dead_zone(problem: Problem) -> float:
    """Imbalance up to which removing all of it saves less than a rebalance costs, at this batch.

    The time of a busiest rank whose replicas have r times the mean tokens is read from the curve.
    """
    demand = problem.timed_demand
    slots = int(problem.topology.usable_slots.sum())
    tokens = demand.tokens.sum(axis=1).mean(axis=0)  # [T] of a layer in a step
    mean = float(weighted_mean(tokens, demand.weight)) / slots  # of a replica
    ratio = np.linspace(1.0, MOST_IMBALANCE, 6301)
    # Of a replica, with its part of what its rank takes beside replicas.
    beside = problem.cost.timed.rank_us * int(problem.topology.serving.sum()) / slots
    time = beside + time_of(ratio * mean, demand)
    least = problem.priced.gain_worth(problem.cost.seconds_per_rebalance)
    wasted = np.flatnonzero(time / max(time[0], 1e-300) - 1.0 <= least)
    return float(ratio[wasted[-1]])


def measured(
    problem: Problem, placement: Placement, objective: Objective | None = None
) -> FloatArray:
    """[L] mean over past windows of the imbalance that the placement would have had, by weight.

    For the objective "time", of the slowest rank's time, over the time of a rank if all experts
    were split evenly at no cost. Shares are the effective ones of the engine's dispatch rule.

    Args:
        problem: the windows.
        placement: need not be the one that serves.
        objective: default: the problem's.
    """
    placement = as_dispatched(problem, placement)
    if (objective or problem.objective) == "tokens":
        return problem.mean_over_windows(imbalance(problem.work, placement, problem.topology))
    topology, demand = problem.topology, problem.timed_demand
    tokens = demand.tokens.transpose(2, 0, 1)  # [T, L, E]
    share, lost = live_shares(placement, topology)
    busy = rank_sum(time_of(slot_load(tokens, placement, share), demand), topology)  # [T, L, R]
    rate, extra = demand.rate.T, demand.extra.T  # [T, L]
    time = (busy * rate[..., None] + extra[..., None]) / topology.rank_speed
    slowest = np.where(rate > 0, time[..., topology.serving].max(axis=-1), 1.0)
    slowest[(tokens * lost).any(axis=-1)] = np.inf
    return weighted_mean(slowest, demand.weight)


def noise_under(problem: Problem, placement: Placement) -> NDArray[np.float64]:
    """[L] imbalance above 1 of one window of this history by chance.

    Args:
        problem: the windows, and the ranks that are alive.
        placement: not planned on these windows; one that was would fit their noise.
    """
    serving = problem.topology.serving
    load = rank_load(problem.scaled.transpose(1, 0, 2), placement, problem.topology)[..., serving]

    def noise_of(part: NDArray[np.intp]) -> FloatArray:
        by_chance = problem.noise_of_windows(part, int(serving.sum()))
        return np.maximum(by_chance, fluctuation(load[part], problem.routed[part].sum(axis=1)))

    return problem.over_parts(noise_of)


def as_dispatched(problem: Problem, placement: Placement) -> Placement:
    """The same experts, with the effective shares of their slots under the engine's rule.

    Raises:
        ConfigError: the engine cannot serve such a placement.
    """
    if problem.dispatch is DispatchRule.WEIGHTED:
        return placement
    starts = problem.tokens_of_rank
    share = effective_shares(placement, problem.topology, problem.dispatch, starts)
    # A sum of parts may exceed 1 by a rounding error.
    return placement.with_shares(np.clip(share, 0.0, 1.0))


def booked_and_effective(problem: Problem, placement: Placement) -> tuple[float, float]:
    """Mean imbalance by the placement's shares (booked), and by the engine's rule (effective)."""
    pair = (placement, as_dispatched(problem, placement))
    booked, effective = (
        float(problem.mean_over_windows(imbalance(problem.work, it, problem.topology)).mean())
        for it in pair
    )
    return booked, effective


def rule_note(problem: Problem, placement: Placement) -> str:
    """The note in a plan's reason where booked and effective imbalance differ."""
    if problem.dispatch is DispatchRule.WEIGHTED:
        return ""
    booked, effective = booked_and_effective(problem, placement)
    if not abs(effective - booked) > NOTED_DIFFERENCE:
        return ""
    return (
        f"; booked imbalance {booked:.3f} is {effective:.3f} "
        f"under dispatch rule {problem.dispatch.value}"
    )
