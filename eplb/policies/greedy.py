"""Greedy packing with redundant experts: a fresh plan, independent of the current placement.

Three steps per layer: each spare slot replicates the expert with the largest load per replica;
replicas are packed heaviest first onto the rank that then ends earliest; swaps from the busiest
rank follow while they gain. With expert groups, whole groups are first packed onto nodes, and the
three steps run inside each node, which limits a token's traffic to few nodes.

Shapes:  L MoE layers, E experts, S slots, R ranks, N nodes.
Source of the idea: DeepSeek's published balancer (deepseek-ai/EPLB).
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.kernels import (
    BoolArray,
    ConstraintArrays,
    Demand,
    FloatArray,
    IntArray,
    keep_in_place,
    replicate,
)
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.errors import PlacementError
from eplb.measure.noise import sampling_noise
from eplb.packing.heaviest_first import pack
from eplb.packing.zones import Zones, nodes_of_groups, zone_bound, zones_for
from eplb.search.demand import (
    constraint_arrays,
    demand_of,
    demand_of_sum,
    full_constraint_arrays,
    least_replicas,
    summed,
    time_of,
)
from eplb.search.descent import COPIES_ALWAYS, COPIES_LAST, COPIES_NEVER, Rules
from eplb.search.enforce import enforce
from eplb.search.local_search import Task, improve
from eplb.search.perturbation import NO_PERTURBATION, Perturbation

GOOD_ENOUGH = 1.0025  # swaps stop here: windows differ by more than could still be gained
REFINED = 1.0005
FINEST_GAIN = 1e-5  # score that a change of the search must gain
WINDOWS_GAIN = 5e-4  # the same over several windows, where less only fits their noise
STEPS_PER_SLOT = 2  # a limit that the search does not reach in practice
STUCK = 1.002  # a layer that ends above its bound by this factor is perturbed
PATIENT, NO_END = 8, 1_000_000  # perturbations of a layer in a row without gain
FREE_STEP = 0.4  # time of a step when moves are not counted, relative to one when they are
MOST_MS = 200.0  # of search, unless the budget sets a limit


class Frame(NamedTuple):
    """Zones, constraints and nodes, which all searches of one problem use."""

    zones: Zones
    constraints: ConstraintArrays
    node: IntArray  # [R]


def frame_of(problem: Problem, zones: Zones | None = None) -> Frame:
    """Zones and constraints of a problem; zones by its load unless they are given."""
    if zones is None:
        zones = zones_for(summed(problem), problem.topology, problem.num_groups, problem.room)
        if problem.constraints.pinned and problem.current is not None:
            # A cordoned rank keeps its experts, so each group stays on the node that it is on.
            with_groups_kept(problem, problem.current, zones)
    node = problem.topology.node_of_rank.astype(np.int64)
    return Frame(zones, constraint_arrays(problem, zones), node)


def with_groups_kept(problem: Problem, current: Placement, zones: Zones) -> BoolArray:
    """Put each expert group into the zone of its node in ``current``, in place.

    Returns:
        [L] layers whose groups are not on single nodes, which stay as they are.
    """
    ungrouped = np.zeros(current.num_layers, dtype=np.bool_)
    if not problem.groups_stay:
        return ungrouped
    topology, num_groups = problem.topology, problem.num_groups
    for layer, held in enumerate(current.slot_to_expert):
        node_of_group = nodes_of_groups(held, topology, num_groups, problem.num_experts)
        ungrouped[layer] = node_of_group is None
        if node_of_group is not None:
            zones.of_expert[layer] = np.repeat(node_of_group, problem.num_experts // num_groups)
    return ungrouped


def greedy(problem: Problem) -> IntArray:
    """[L, S] a fresh plan on the sum of the windows."""
    frame = frame_of(problem)
    return _greedy(problem, frame)


def refined(problem: Problem) -> IntArray:
    """[L, S] greedy, then a search over the single windows that may change replica counts."""
    frame, demand = frame_of(problem), demand_of(problem)
    if len(demand.weight) > 1:
        held = _greedy(problem, frame)
        # Below the noise of all windows together a search would fit noise.
        target = np.maximum(REFINED, 1.0 + history_noise(problem))
        rules = rules_for(problem, demand, target, WINDOWS_GAIN, COPIES_LAST)
        stuck = target
    else:
        held = _packed(problem, frame)  # without swaps, because the search makes them first
        bound = zone_bound(np.ascontiguousarray(problem.scaled[:, 0]), frame.zones)
        rules = rules_for(problem, demand, REFINED * bound, FINEST_GAIN, COPIES_LAST)
        stuck = STUCK * bound
    perturbation = Perturbation(_patience(problem), problem.seed, stuck, COPIES_ALWAYS)
    descend(problem, frame, demand, held, rules, perturbation)
    return held


def _patience(problem: Problem) -> int:
    """Perturbations in a row without gain: no limit where the budget limits the time."""
    time_ms = problem.budget.time_ms
    return PATIENT if time_ms is None or time_ms == inf else NO_END


def history_noise(problem: Problem) -> FloatArray:
    """[L] imbalance above 1 that chance makes in the sum of all windows, mean over phases."""
    tokens = problem.history.tokens[problem.complete].sum(axis=2, dtype=np.float64)
    num_ranks = int(problem.topology.serving.sum())

    def noise_of(part: NDArray[np.intp]) -> FloatArray:
        drawn = tokens[part].sum(axis=0)
        return np.array([sampling_noise(float(routed), num_ranks) for routed in drawn])

    return problem.over_parts(noise_of)


def rules_for(
    problem: Problem, demand: Demand, target: FloatArray, min_gain: float, copies: int
) -> Rules:
    """Rules of a search with the problem's budget of time."""
    most = STEPS_PER_SLOT * problem.topology.num_slots
    every = NO_END * len(target)
    time_ms = MOST_MS if problem.budget.time_ms is None else problem.budget.time_ms
    if time_ms < inf:
        each = step_ms(problem.topology, len(demand.weight), problem.current is None)
        every = min(every, int(time_ms * problem.part / each))
    return Rules(target, min_gain, copies, most, every, problem.cost.far_moves)


def step_ms(topology: Topology, num_windows: int, is_fresh: bool) -> float:
    """Time of a search step on an idle core in ms, fitted to measurements of 96 to 2,048 slots."""
    of_one = 0.003 + 1.2e-5 * topology.num_slots + 3e-5 * topology.num_ranks
    return of_one * (0.8 + 0.2 * num_windows) * (FREE_STEP if is_fresh else 1.0)


def descend(
    problem: Problem,
    frame: Frame,
    demand: Demand,
    held: IntArray,
    rules: Rules,
    perturbation: Perturbation = NO_PERTURBATION,
) -> None:
    """Improve ``held`` in place; moves are free."""
    free, ranks = np.zeros((0, held.shape[1]), dtype=np.int64), frame.zones.ranks
    task = Task(demand, held, free, ranks, frame.node, frame.constraints, rules, perturbation)
    improve(task, problem.budget.num_threads)


def packed_by_time(problem: Problem) -> IntArray:
    """[L, S] no replicas but those that constraints require, packed by the time of each."""
    frame, demand = frame_of(problem), demand_of(problem)
    work = np.ascontiguousarray(
        (time_of(demand.tokens, demand) * demand.rate[:, None]).mean(axis=2)
    )
    count = least_replicas(problem, frame.zones, frame.constraints)
    held = pack(work, count, frame.zones.of_expert, frame.zones.ranks)
    return enforced(problem, frame, held, demand) if problem.constraints.binds_experts else held


def enforced(problem: Problem, frame: Frame, held: IntArray, demand: Demand) -> IntArray:
    """``held`` repaired in place where it violates constraints.

    Raises:
        PlacementError: no placement was found that meets all constraints.
    """
    constraints = full_constraint_arrays(problem, frame.zones)
    failed = enforce(demand, held, frame.zones.ranks, constraints)
    for layer in np.flatnonzero(failed >= 0)[:1]:
        raise PlacementError(
            f"layer {layer}: no slot for expert {failed[layer]} meets all constraints, "
            "expected fewer constraints or more slots"
        )
    return held


def in_place(
    held: IntArray, base: NDArray[np.int32], topology: Topology, room: IntArray | None = None
) -> IntArray:
    """[L, S] the same plan, with every expert that stays on a rank in its current slot.

    Args:
        held: experts by slot.
        base: the serving placement.
        topology: where slots are.
        room: [L, R] slots that a layer may use; default: all of serving ranks.
    """
    zones = zones_for(np.zeros((len(held), 1)), topology, 1, room)
    return keep_in_place(held, base.astype(np.int64), zones.ranks)


def _greedy(problem: Problem, frame: Frame) -> IntArray:
    held, demand = _packed(problem, frame), demand_of_sum(problem)
    target = np.full(len(held), GOOD_ENOUGH)
    rules = rules_for(problem, demand, target, FINEST_GAIN, COPIES_NEVER)
    descend(problem, frame, demand, held, rules)
    return held


def _packed(problem: Problem, frame: Frame) -> IntArray:
    """Replicas, heaviest first, without swaps."""
    zones, demand = frame.zones, demand_of_sum(problem)
    work = np.ascontiguousarray(demand.tokens[:, :, 0])
    least = least_replicas(problem, zones, frame.constraints)
    count = replicate(work, zones.of_expert, zones.num_slots, zones.num_ranks, least)
    held = pack(work, count, zones.of_expert, zones.ranks)
    if problem.constraints.binds_experts:
        enforced(problem, frame, held, demand)
    return held
