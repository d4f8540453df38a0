"""Input of the search: the load of a problem by its objective, and its constraints as arrays.

Two objectives. ``tokens``: the time of a rank is proportional to its tokens. ``time``: the time of
a replica is that of a measured curve at its tokens per step, and every rank also computes the
shared experts; there a replica with few tokens costs as much as one with many, so fewer replicas
may be faster.

Shapes:  T windows, K scenarios, L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.constraints import pins_of, ready_ranks, spread_of
from eplb.core.kernels import ConstraintArrays, Demand, FloatArray, IntArray
from eplb.core.problem import Problem
from eplb.core.scenarios import without_noise
from eplb.errors import ConfigError, PlacementError
from eplb.packing.zones import Zones

TAIL = 0.05  # weight of the worst windows in the score; more made held-out windows worse
TAIL_SIZE = 0.125  # part of all windows that counts as the worst


def summed(problem: Problem) -> FloatArray:
    """[L, E] work of the windows and the scenarios together, each scenario by its weight."""
    total: FloatArray = problem.work.sum(axis=0)
    scenarios = problem.scenarios
    if scenarios is None:
        return total
    weight = scenarios.weight / (1 - scenarios.weight.sum())
    # The size of a scenario is unrelated to its probability: all are scaled to the past's.
    extra = _times_cost(problem, scenarios.windows)
    size = total.sum(axis=1) / np.maximum(extra.sum(axis=2), 1e-300)  # [K, L]
    added: FloatArray = total + (extra * (weight[:, None] * size)[:, :, None]).sum(axis=0)
    return added


def demand_of_sum(problem: Problem) -> Demand:
    """All windows and scenarios as one window, by tokens whatever the objective."""
    return _demand(problem, summed(problem)[None], np.ones(1), np.ones(1))


def demand_of(problem: Problem, *, raw: bool = False) -> Demand:
    """Load and weights by the problem's objective.

    Args:
        problem: the windows and scenarios.
        raw: the windows as recorded, without noise reduction and without scenarios.
    """
    drawn = problem.history.tokens[problem.complete].sum(axis=2).astype(np.float64)
    windows = problem.work
    if not raw:
        windows = np.empty(windows.shape)
        for part in problem.parts:
            windows[part] = without_noise(problem.work[part], drawn[part])
    steps = problem.history.steps_per_window[problem.complete].astype(np.float64)
    weight = np.full(len(windows), 1.0 / len(windows))
    if problem.scenarios is not None and not raw:
        likely = problem.scenarios.weight
        windows = np.concatenate([windows, _times_cost(problem, problem.scenarios.windows)])
        weight = np.concatenate([weight * (1 - likely.sum()), likely])
        steps = np.concatenate([steps, np.full(len(likely), steps.mean())])
    return _demand(problem, windows, steps, weight, by_time=problem.objective == "time")


def _demand(
    problem: Problem,
    windows: FloatArray,
    steps: FloatArray,
    weight: FloatArray,
    by_time: bool = False,
) -> Demand:
    # A copy in any case: the kernels are compiled once, for arrays that may be written.
    tokens = np.array(windows.transpose(1, 2, 0), order="C")  # [L, E, T]
    together = problem.topology.rank_speed[problem.topology.serving].sum()
    points = np.zeros((0, 2))
    shared = np.zeros((len(tokens), len(steps)))
    total = tokens.sum(axis=1)
    if by_time:
        points = np.array(problem.cost.curve, dtype=np.float64)
        tokens /= steps
        shared = _shared_time(problem, tokens, points)
        total = _times(tokens, points).sum(axis=1) + shared * problem.topology.serving.sum()
    rate = np.divide(together, total, out=np.zeros(total.shape), where=total > 0)
    tail = TAIL if len(weight) > 1 else 0.0
    return Demand(
        tokens,
        rate,
        shared * rate,
        weight,
        tail,
        TAIL_SIZE,
        np.ascontiguousarray(points[:, 0]),
        np.ascontiguousarray(points[:, 1]),
    )


def _times_cost(problem: Problem, windows: FloatArray) -> FloatArray:
    return windows if problem.model is None else windows * problem.model.expert_cost


def _shared_time(problem: Problem, tokens: FloatArray, points: FloatArray) -> FloatArray:
    """[L, T] time of a rank's shared experts, which process the rank's own tokens of a step."""
    if problem.model is None:
        return np.zeros((len(tokens), tokens.shape[2]))
    own = tokens.sum(axis=1) / problem.model.top_k / problem.topology.alive.sum()
    return problem.model.num_shared_experts * _times(own, points)


def time_of(tokens: FloatArray, demand: Demand) -> FloatArray:
    """Time of replicas that get so many tokens a step, by the demand's curve."""
    return _times(tokens, np.stack([demand.curve_tokens, demand.curve_time], axis=1))


def _times(tokens: FloatArray, points: FloatArray) -> FloatArray:
    """``curve_at`` of an array."""
    busy = np.interp(tokens, points[:, 0], points[:, 1])
    (before, last), (below, top) = points[-2:, 0], points[-2:, 1]
    beyond = top + (tokens - last) * (top - below) / (last - before)
    times: FloatArray = np.where(tokens > last, beyond, busy) * -np.expm1(-tokens)
    return times


def constraint_arrays(problem: Problem, zones: Zones) -> ConstraintArrays:
    """Constraints of each layer; arrays without layers where single experts are not constrained.

    Raises:
        ConfigError: constraints on unknown experts or ranks, or that contradict each other.
    """
    topology, constraints = problem.topology, problem.constraints
    domain = topology.failure_domain.astype(np.int64)
    ready = ready_ranks(constraints, topology)
    if not constraints.binds_experts:
        none = np.zeros((0, 0), dtype=np.int64)
        return ConstraintArrays(
            zones.of_expert, none, np.zeros((0, 0, 0), dtype=np.bool_), domain, ready
        )
    return full_constraint_arrays(problem, zones)


def full_constraint_arrays(problem: Problem, zones: Zones) -> ConstraintArrays:
    """Constraints of every layer and expert, also of those without any.

    Raises:
        ConfigError: constraints on unknown experts or ranks, or that contradict each other.
    """
    topology, constraints = problem.topology, problem.constraints
    load = summed(problem)
    arrays = ConstraintArrays(
        zones.of_expert,
        spread_of(constraints, load),
        pins_of(constraints, topology, load.shape),
        topology.failure_domain.astype(np.int64),
        ready_ranks(constraints, topology),
    )
    _check_contradictions(problem, zones, arrays)
    return arrays


def least_replicas(problem: Problem, zones: Zones, arrays: ConstraintArrays) -> IntArray:
    """[L, E] fewest replicas of each expert that meet the constraints."""
    if not len(arrays.spread):
        return np.ones(zones.of_expert.shape, dtype=np.int64)
    pins = arrays.pinned.sum(axis=1)
    on_ready = (arrays.pinned & arrays.ready[None, :, None]).sum(axis=1)
    least: IntArray = np.maximum(arrays.spread, pins + ((pins > 0) & (on_ready == 0)))
    short = np.flatnonzero(least.sum(axis=1) > zones.num_slots.sum(axis=1))
    if short.size:
        layer = int(short[0])
        raise PlacementError(
            f"layer {layer}: constraints ask for {least[layer].sum()} replicas, "
            f"expected at most {zones.num_slots[layer].sum()}, the slots that may be used"
        )
    return np.ascontiguousarray(least, dtype=np.int64)


def _check_contradictions(problem: Problem, zones: Zones, arrays: ConstraintArrays) -> None:
    room, topology = problem.room, problem.topology
    over = np.argwhere(arrays.pinned.sum(axis=2) > room)
    if over.size:
        layer, rank = over[0]
        raise ConfigError(
            f"constraints: layer {layer} pins {arrays.pinned[layer, rank].sum()} experts to rank "
            f"{rank}, expected at most {room[layer, rank]}, the slots that may be used there"
        )
    ready_room = room[:, arrays.ready].sum(axis=1)
    for layer in np.flatnonzero(ready_room < problem.num_experts)[:1]:
        raise PlacementError(
            f"layer {layer}: {ready_room[layer]} slots on ranks that are ready for "
            f"{problem.num_experts} experts, expected one for each: a joining rank may hold no "
            "sole copy"
        )
    zone = zones.ranks.zone
    outside_zone = np.argwhere(arrays.pinned & (zones.of_expert[:, None] != zone[:, None]))
    if outside_zone.size:
        layer, rank, expert = outside_zone[0]
        raise ConfigError(
            f"constraints: layer {layer} pins expert {expert} to rank {rank}, but its expert "
            f"group is kept on node {zones.of_expert[layer, expert]}"
        )
    for number in range(int(zone.max()) + 1):
        usable = (zone == number) & (room > 0)  # [L, R]
        domains = np.array([len(set(topology.failure_domain[row].tolist())) for row in usable])
        wrong = np.argwhere((arrays.spread > domains[:, None]) & (zones.of_expert == number))
        if wrong.size:
            layer, expert = wrong[0]
            raise ConfigError(
                f"constraints: layer {layer} expert {expert} must be in "
                f"{arrays.spread[layer, expert]} failure domains, expected at most "
                f"{domains[layer]}, the domains with slots that it may use"
            )
