"""What the search is given: the load of a problem as it balances it, and the bonds it keeps to.

Two objectives. ``tokens``: a rank takes as long as it has tokens. ``time``: each replica takes what
a measured curve says for its tokens of a step, and the shared experts come on top on every rank;
a replica with few tokens then costs as much as one with many, so fewer replicas may be faster.

Shapes:  T windows, K scenarios, L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.constraints import pins_of, ready_ranks, spread_of
from eplb.core.kernels import Bonds, Demand, FloatArray, IntArray
from eplb.core.problem import Problem
from eplb.core.scenarios import without_noise
from eplb.errors import ConfigError, PlacementError
from eplb.packing.zones import Zones

TAIL = 0.05  # of the score is the mean over the worst windows; more made held-out windows worse
TAIL_SIZE = 0.125  # which are so many of all


def summed(problem: Problem) -> FloatArray:
    """[L, E] work of the windows and the scenarios together, each scenario by its weight."""
    total: FloatArray = problem.work.sum(axis=0)
    scenarios = problem.scenarios
    if scenarios is None:
        return total
    weight = scenarios.weight / (1 - scenarios.weight.sum())
    # A scenario's size says nothing of how likely it is: all are scaled to the past's.
    extra = _costed(problem, scenarios.windows)
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
        raw: the windows as they were, their noise left in, and no scenarios.
    """
    drawn = problem.history.tokens[problem.complete].sum(axis=2).astype(np.float64)
    windows = problem.work if raw else without_noise(problem.work, drawn)
    steps = problem.history.steps_per_window[problem.complete].astype(np.float64)
    weight = np.full(len(windows), 1.0 / len(windows))
    if problem.scenarios is not None and not raw:
        likely = problem.scenarios.weight
        windows = np.concatenate([windows, _costed(problem, problem.scenarios.windows)])
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


def _costed(problem: Problem, windows: FloatArray) -> FloatArray:
    return windows if problem.model is None else windows * problem.model.expert_cost


def _shared_time(problem: Problem, tokens: FloatArray, points: FloatArray) -> FloatArray:
    """[L, T] time of a rank's shared experts, which see its own part of a step's tokens."""
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


def bonds_of(problem: Problem, zones: Zones) -> Bonds:
    """What each layer must keep to.

    Raises:
        ConfigError: constraints that name what is not there, or contradict each other.
    """
    topology, constraints = problem.topology, problem.constraints
    domain = topology.failure_domain.astype(np.int64)
    ready = ready_ranks(constraints, topology)
    if not constraints.binds_experts:
        nobody = np.zeros((0, 0), dtype=np.int64)
        return Bonds(zones.of_expert, nobody, np.zeros((0, 0, 0), dtype=np.bool_), domain, ready)
    return full_bonds(problem, zones)


def full_bonds(problem: Problem, zones: Zones) -> Bonds:
    """The same written out for every layer and expert, also where nothing is asked.

    Raises:
        ConfigError: constraints that name what is not there, or contradict each other.
    """
    topology, constraints = problem.topology, problem.constraints
    load = summed(problem)
    bonds = Bonds(
        zones.of_expert,
        spread_of(constraints, load),
        pins_of(constraints, topology, load.shape),
        topology.failure_domain.astype(np.int64),
        ready_ranks(constraints, topology),
    )
    _refuse_contradictions(problem, zones, bonds)
    return bonds


def least_replicas(problem: Problem, zones: Zones, bonds: Bonds) -> IntArray:
    """[L, E] replicas that bonds need of each expert."""
    if not len(bonds.spread):
        return np.ones(zones.of_expert.shape, dtype=np.int64)
    pins = bonds.pinned.sum(axis=1)
    on_ready = (bonds.pinned & bonds.ready[None, :, None]).sum(axis=1)
    least: IntArray = np.maximum(bonds.spread, pins + ((pins > 0) & (on_ready == 0)))
    short = np.flatnonzero(least.sum(axis=1) > zones.num_slots.sum(axis=1))
    if short.size:
        layer = int(short[0])
        raise PlacementError(
            f"layer {layer}: constraints ask for {least[layer].sum()} replicas, "
            f"expected at most {zones.num_slots[layer].sum()}, the slots that may be used"
        )
    return np.ascontiguousarray(least, dtype=np.int64)


def _refuse_contradictions(problem: Problem, zones: Zones, bonds: Bonds) -> None:
    room, topology = problem.room, problem.topology
    over = np.argwhere(bonds.pinned.sum(axis=2) > room)
    if over.size:
        layer, rank = over[0]
        raise ConfigError(
            f"constraints: layer {layer} pins {bonds.pinned[layer, rank].sum()} experts to rank "
            f"{rank}, expected at most {room[layer, rank]}, the slots that may be used there"
        )
    ready_room = room[:, bonds.ready].sum(axis=1)
    for layer in np.flatnonzero(ready_room < problem.num_experts)[:1]:
        raise PlacementError(
            f"layer {layer}: {ready_room[layer]} slots on ranks that are ready for "
            f"{problem.num_experts} experts, expected one for each: a joining rank may hold no "
            "sole copy"
        )
    zone = zones.ranks.zone
    strays = np.argwhere(bonds.pinned & (zones.of_expert[:, None] != zone[:, None]))
    if strays.size:
        layer, rank, expert = strays[0]
        raise ConfigError(
            f"constraints: layer {layer} pins expert {expert} to rank {rank}, but its expert "
            f"group is kept on node {zones.of_expert[layer, expert]}"
        )
    for number in range(int(zone.max()) + 1):
        usable = (zone == number) & (room > 0)  # [L, R]
        domains = np.array([len(set(topology.failure_domain[row].tolist())) for row in usable])
        wrong = np.argwhere((bonds.spread > domains[:, None]) & (zones.of_expert == number))
        if wrong.size:
            layer, expert = wrong[0]
            raise ConfigError(
                f"constraints: layer {layer} expert {expert} must be in "
                f"{bonds.spread[layer, expert]} failure domains, expected at most "
                f"{domains[layer]}, which is where it may live"
            )
