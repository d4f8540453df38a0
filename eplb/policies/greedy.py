"""Greedy packing with redundant experts: a fresh plan, independent of the current placement.

Three steps per layer: each spare slot replicates the expert with the largest load per replica;
replicas are packed heaviest first onto the rank that then ends earliest; swaps from the busiest
rank follow while they gain. With expert groups, whole groups are first packed onto nodes, and the
three steps run inside each node, which limits a token's traffic to few nodes.

Shapes:  L MoE layers, E experts, S slots, R ranks, N nodes.
Source of the idea: DeepSeek's published balancer (deepseek-ai/EPLB).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from eplb.core.constraints import Constraints, least_replicas
from eplb.core.demand import Demand, time_of
from eplb.core.jit import FloatArray, IntArray
from eplb.core.placement import Placement
from eplb.core.problem import Problem, scale
from eplb.core.zones import replicate, zone_bound
from eplb.measure import imbalance
from eplb.search.legality import enforce
from eplb.search.local_search import (
    COPIES_ALWAYS,
    COPIES_LAST,
    COPIES_NEVER,
    FINEST_GAIN,
    WINDOWS_GAIN,
    improve,
    rules_for,
    searched_score,
)
from eplb.search.packing import pack

GOOD_ENOUGH = 1.0025  # swaps stop here: windows differ by more than could still be gained
REFINED = 1.0005
RISK = 0.67  # standard deviations over windows that count for replicas: the upper quartile
STUCK = 1.002  # a layer that ends above its bound by this factor is perturbed
FINEST_TIME_GAIN = 1e-4
FEWEST_JUDGED = 4  # blocks of windows: a half of one window is its sum, and shows nothing
SAMPLED = 16  # layers, at most, of which halves of the windows judge each other
SURE = 2.0  # standard errors
ROUNDING = 1e-9
# The judged plans are fresh ones: pins and limits hold for the serving placement.
ANEW: dict[str, Any] = {"current": None, "constraints": Constraints()}


def greedy(problem: Problem) -> IntArray:
    """[L, S] a fresh plan on the sum of the windows."""
    return _swapped(problem, _packed(problem, problem.total))


def _swapped(problem: Problem, held: IntArray) -> IntArray:
    demand, target = problem.total_demand, np.full(len(held), GOOD_ENOUGH)
    rules = rules_for(problem, demand, target, FINEST_GAIN, COPIES_NEVER)
    improve(problem, problem.frame, demand, held, rules)
    return held


def refined(problem: Problem) -> IntArray:
    """[L, S] greedy, then a search over the single windows that may change replica counts."""
    demand = problem.demand
    if len(demand.weight) > 1:
        # The busiest rank of a window is decided by what its experts get at most, not on average.
        topology, work = problem.topology, problem.scaled.transpose(1, 0, 2)  # [T, L, E]
        variance = problem.mean_over_windows(np.square(work - problem.mean_scaled))
        fair = problem.work.sum(axis=(0, 2)) / topology.rank_speed[topology.serving].sum()
        risk = problem.total + RISK * np.sqrt(variance) * fair[:, None]
        held, min_gain = _swapped(problem, _packed(problem, risk)), WINDOWS_GAIN
        target = stuck = np.full(len(held), REFINED)
    else:
        # No swaps: the search makes them first.
        held, min_gain = _packed(problem, problem.total), FINEST_GAIN
        summed = np.ascontiguousarray(scale(problem.total, problem.topology))
        bound = zone_bound(summed, problem.frame.zones)
        target, stuck = REFINED * bound, STUCK * bound
    rules = rules_for(problem, demand, target, min_gain, COPIES_LAST, stuck)
    improve(problem, problem.frame, demand, held, rules)
    return held


def sum_serves(problem: Problem) -> bool:
    """Whether a plan on the sum of the windows serves unseen ones no worse than one on each.

    Windows differ by chance and by what lasts, as experts that are busy together. Only the second
    is worth more than the sum, and a plan on few windows fits the first. So each half of the
    windows judges plans on the other half, of a sample of layers: the windows are planned on
    where these are better by more than SURE standard errors.
    """
    starts = problem.blocks_of(np.arange(len(problem.tokens)))
    is_plain = problem.objective == "tokens" and len(problem.parts) == 1 and not problem.scenarios
    if len(starts) < FEWEST_JUDGED or not is_plain or problem.dispatch.by_rank:
        return False
    kept, cut = np.flatnonzero(problem.complete), starts[(len(starts) + 1) // 2]
    num_layers = problem.history.num_layers
    layers = np.linspace(0, num_layers - 1, min(SAMPLED, num_layers)).astype(int)
    worse = []
    for seen, unseen in ((kept[:cut], kept[cut:]), (kept[cut:], kept[:cut])):
        seen_part, judge = (
            replace(problem, history=problem.history.of_windows(half), **ANEW).of_layers(layers)
            for half in (seen, unseen)
        )
        on_windows, on_sum = (
            judge.mean_over_windows(
                imbalance(
                    judge.work, Placement(refined(it).astype(np.int32), it.num_experts), it.topology
                )
            )
            for it in (seen_part, replace(seen_part, on_sum=True))
        )
        worse.append(on_windows - on_sum)
    found = np.mean(worse, axis=0) if len(layers) > 1 else np.concatenate(worse)
    return bool(found.mean() > -SURE * found.std(ddof=1) / len(found) ** 0.5 - ROUNDING)


def best_fresh(problem: Problem) -> IntArray:
    """[L, S] the best fresh plan by the problem's objective.

    A plan by time is never slower than the plan by tokens: for each layer the faster one is used.
    """
    if problem.objective == "tokens":
        return refined(problem)
    found = refined(replace(problem, objective="tokens"))
    score, demand = searched_score(problem, found), problem.demand
    target = np.ones(len(found))
    rules = rules_for(problem, demand, target, FINEST_TIME_GAIN, COPIES_ALWAYS)
    for held in (found.copy(), _packed_by_time(problem)):
        improve(problem, problem.frame, demand, held, rules)
        reached = searched_score(problem, held)
        found = np.where((reached < score)[:, None], held, found)
        score = np.minimum(reached, score)
    return found


def _packed(problem: Problem, heat: FloatArray) -> IntArray:
    """[L, S] replicas by heat [L, E], packed by load, heaviest first, without swaps."""
    zones, work = problem.frame.zones, np.ascontiguousarray(problem.total)
    least = least_replicas(*problem.frame)
    heat = np.ascontiguousarray(heat)
    count = replicate(heat, zones.of_expert, zones.num_slots, zones.num_ranks, least)
    return _legally_packed(problem, work, count, problem.total_demand)


def _packed_by_time(problem: Problem) -> IntArray:
    """[L, S] no replicas but those that constraints require, packed by the time of each."""
    demand = problem.demand
    time = time_of(demand.tokens, demand) * demand.rate[:, None]
    work = np.ascontiguousarray(time @ demand.weight)
    return _legally_packed(problem, work, least_replicas(*problem.frame), demand)


def _legally_packed(
    problem: Problem, work: FloatArray, count: IntArray, demand: Demand
) -> IntArray:
    zones = problem.frame.zones
    held = pack(work, count, zones.of_expert, zones.ranks)
    if problem.constraints.binds_experts:
        enforce(problem, problem.frame, held, demand)
    return held
