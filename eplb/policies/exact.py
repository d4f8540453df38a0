"""The exact policy: optimal placements with proof, for small or offline problems.

Replica counts and positions are solved together by OR-tools' CP-SAT, layer by layer. The objective
is the mean over windows of the busiest rank's load with equal split. Where the effort is not
sufficient for a proof, the layer keeps the best placement found, with its gap to the bound.

    has[e, c]    expert e has c replicas
    on[e, c, r]  ... and one of them is on rank r, which then carries work / c of it

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks, C replica counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import freeze, owned
from eplb.core.jit import IntArray
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.core.zones import keeps_groups
from eplb.errors import ConfigError
from eplb.measure import imbalance
from eplb.packages import needed_for
from eplb.policies.greedy import refined
from eplb.search.relabel import in_place, with_most_kept

EFFORT = 10.0  # for each layer, in CP-SAT's deterministic seconds: of the order of a real one
UNITS = 10**6  # for the mean rank load: the solver computes in integers
# on[e, c, r] of one layer. A layer of 256 experts on 32 ranks would have some 250,000.
MOST_CHOICES = 20_000
Assignment = tuple[int, int, int]  # expert, replicas, rank
Chosen = dict[Assignment, Any]  # the solver's variables


@dataclass(frozen=True, eq=False)
class ExactResult:
    """A placement, and its proven distance from the optimum."""

    placement: Placement
    objective: NDArray[np.float64]  # [L] mean imbalance over the windows, with equal split
    bound: NDArray[np.float64]  # [L] no placement with equal split does better
    is_proved: NDArray[np.bool_]  # [L] the placement is optimal

    def __post_init__(self) -> None:
        freeze(self, objective=owned(self.objective, np.float64))
        freeze(self, bound=owned(self.bound, np.float64), is_proved=owned(self.is_proved, np.bool_))

    @property
    def gap(self) -> NDArray[np.float64]:
        """[L] relative distance of the objective above the bound; 0 where it is optimal."""
        distance: NDArray[np.float64] = np.where(
            self.is_proved, 0.0, self.objective / self.bound - 1.0
        )
        return distance


def solve_exact(problem: Problem, *, effort: float = EFFORT) -> ExactResult:
    """Find the best placement, and prove it.

    Moves are not counted: ``current`` only decides between equal ranks of equally good placements.
    Expert groups stay on nodes as in the other policies.

    Args:
        problem: small; see ``eplb.policies.exact.MOST_CHOICES``.
        effort: for each layer, in CP-SAT's deterministic seconds, which give the same placement on
            every machine.

    Raises:
        ConfigError: a layer with too many choices, or no effort.
    """
    if not effort > 0:
        raise ConfigError(f"effort is {effort}, expected more than 0")
    start = refined(replace(problem, current=None))
    found, bound, is_proved = start.copy(), np.ones(len(start)), np.ones(len(start), dtype=np.bool_)
    for number in range(len(start)):
        layer = layer_of(problem, number, start[number])
        if len(layer.work):
            solved, bound[number], is_proved[number] = _solve(layer, effort, problem.seed)
            found[number] = solved if solved is not None else start[number]
    worse = _imbalance(problem, found) > _imbalance(problem, start)
    found[worse] = start[worse]
    placement = _nearest_to_current(problem, found)
    objective = _imbalance(problem, placement.slot_to_expert)
    return ExactResult(placement, objective, np.minimum(bound, objective), is_proved)


def _imbalance(problem: Problem, held: IntArray | NDArray[np.int32]) -> NDArray[np.float64]:
    """[L] mean over the windows that are not idle in a layer."""
    placement = Placement(held.astype(np.int32), problem.num_experts)
    ratio = imbalance(problem.work, placement, problem.topology)
    is_busy = problem.work.sum(axis=2) > 0
    mean: NDArray[np.float64] = np.ones(placement.num_layers)
    busy = problem.mean_over_windows(is_busy.astype(np.float64))
    np.divide(problem.mean_over_windows(ratio * is_busy), busy, out=mean, where=busy > 0)
    return mean


def _solve(layer: ExactLayer, effort: float, seed: int) -> tuple[IntArray | None, float, bool]:
    """[S] the best placement found, the proven bound, and whether they agree."""
    with needed_for("policy exact"):
        from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    on = {choice: model.new_bool_var("") for choice in layer.choices}
    place_every_expert(model, on, layer)
    speed = layer.topology.rank_speed[layer.ranks]
    everything_on_one = int(UNITS * speed.sum() / speed.min()) + 1
    busiest = [model.new_int_var(0, everything_on_one, "") for _ in layer.work]
    weigh(model, on, busiest, layer)
    break_symmetry(model, on, layer)
    hint(model, on, layer)
    model.minimize(sum(busiest))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # more would race, and the result with them
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    assert status != cp_model.MODEL_INVALID, model.validate()
    assert status != cp_model.INFEASIBLE, "the start is a placement, so there is one"
    bound = max(1.0, solver.best_objective_bound / UNITS / len(layer.work))
    if status == cp_model.UNKNOWN:
        return None, bound, False
    held = np.full(layer.topology.num_slots, EMPTY, dtype=np.int64)
    used = dict.fromkeys(layer.ranks, 0)
    for (expert, _, rank), variable in on.items():
        if solver.value(variable):
            held[layer.topology.first_slot[rank] + used[rank]] = expert
            used[rank] += 1
    return held, bound, status == cp_model.OPTIMAL


def _nearest_to_current(problem: Problem, held: IntArray) -> Placement:
    """Exchange the contents of equal ranks so that as few experts as possible move."""
    if problem.current is None:
        return Placement(held.astype(np.int32), problem.num_experts)
    base = problem.current.slot_to_expert
    nearest = with_most_kept(problem, held, base)
    return Placement(
        in_place(nearest, base, problem.topology).astype(np.int32), problem.num_experts
    )


class ExactLayer(NamedTuple):
    """One layer as input of the solver."""

    work: NDArray[np.float64]  # [T, E] weighed load of windows that are not idle
    start: IntArray  # [S] a good placement
    counts: list[range]  # replica counts of each expert that may be optimal
    ranks: list[int]  # live, with slots
    topology: Topology
    num_groups: int  # 1 unless they stay on nodes

    @property
    def choices(self) -> list[Assignment]:
        """All (expert, replicas, rank)."""
        return [
            (expert, count, rank)
            for expert, counts in enumerate(self.counts)
            for count in counts
            for rank in self.ranks
        ]


def layer_of(problem: Problem, number: int, start: IntArray) -> ExactLayer:
    """One layer of a problem; ``start`` [S] is a placement that the optimum is at least as good as.

    Raises:
        ConfigError: more choices than can be searched.
    """
    topology = problem.topology
    work = problem.weighed[number]
    work = work[work.sum(axis=1) > 0]
    if len(work):  # the plain mean of what remains is the weighted mean
        work = work * (topology.rank_speed[topology.serving].sum() * len(work) / work.sum())
    ranks: list[int] = np.flatnonzero(topology.serving).tolist()
    grouped = keeps_groups(topology, problem.num_groups, problem.num_experts)
    layer = ExactLayer(
        work,
        start,
        _counts(work, start, topology, ranks),
        ranks,
        topology,
        problem.num_groups if grouped else 1,
    )
    if len(layer.choices) > MOST_CHOICES:
        raise ConfigError(
            f"layer {number} has {len(layer.choices)} choices of expert, replicas and rank, "
            f"expected at most {MOST_CHOICES}: the exact policy is for small problems"
        )
    return layer


def _counts(
    work: NDArray[np.float64], start: IntArray, topology: Topology, ranks: list[int]
) -> list[range]:
    """For each expert the replica counts of placements that are no worse than ``start``.

    A replica is never heavier than the busiest rank, which bounds counts from below; the least
    counts of the other experts bound them from above.
    """
    replicas = np.bincount(start[start >= 0], minlength=work.shape[1])
    each = np.where(start >= 0, (work / replicas)[:, start], 0.0)  # [T, S]
    time = np.add.reduceat(each, topology.first_slot[ranks], axis=1) / topology.rank_speed[ranks]
    heaviest = time.max(axis=1).sum() * topology.rank_speed[ranks].max() * (1 + 1e-9)
    least = np.ones(work.shape[1], dtype=np.int64)
    if heaviest > 0:
        least = np.maximum(least, np.ceil(work.sum(axis=0) / heaviest).astype(np.int64))
    spare = int(topology.slots_of_rank[ranks].sum()) - int(least.sum())
    return [range(low, min(len(ranks), low + spare) + 1) for low in least.tolist()]


def place_every_expert(model: Any, on: Chosen, layer: ExactLayer) -> None:
    """Constrain every expert to one count and as many ranks, and ranks to their slots."""
    for expert, counts in enumerate(layer.counts):
        has = {count: model.new_bool_var("") for count in counts}
        model.add_exactly_one(has.values())
        for count in counts:
            model.add(sum(on[expert, count, rank] for rank in layer.ranks) == count * has[count])
    for rank in layer.ranks:
        here = [variable for (_, _, at), variable in on.items() if at == rank]
        model.add(sum(here) <= int(layer.topology.slots_of_rank[rank]))
    if layer.num_groups > 1:
        _keep_groups(model, on, layer)


def _keep_groups(model: Any, on: Chosen, layer: ExactLayer) -> None:
    """Constrain every group to one node, and nodes to equally many groups."""
    num_nodes, node_of_rank = layer.topology.num_nodes, layer.topology.node_of_rank.tolist()
    groups, nodes = range(layer.num_groups), range(num_nodes)
    lives = {(group, node): model.new_bool_var("") for group in groups for node in nodes}
    for group in groups:
        model.add_exactly_one(lives[group, node] for node in nodes)
    for node in nodes:
        model.add(sum(lives[group, node] for group in groups) == layer.num_groups // num_nodes)
    size = len(layer.counts) // layer.num_groups
    for (expert, _, rank), variable in on.items():
        model.add_implication(variable, lives[expert // size, node_of_rank[rank]])


def weigh(model: Any, on: Chosen, busiest: list[Any], layer: ExactLayer) -> None:
    """Constrain ``busiest`` to at least every rank's time, rounded down so that bounds hold."""
    speed = layer.topology.rank_speed
    for work, most in zip(layer.work * UNITS, busiest, strict=True):
        for rank in layer.ranks:
            time = [
                int(work[expert] / count / speed[rank]) * variable
                for (expert, count, at), variable in on.items()
                if at == rank
            ]
            model.add(sum(time) <= most)


def break_symmetry(model: Any, on: Chosen, layer: ExactLayer) -> None:
    """Order equal ranks by their load, and equal experts by their replicas."""
    weight = np.rint(layer.work.sum(axis=0) * UNITS).astype(np.int64).tolist()
    load = {
        rank: sum(weight[e] // count * v for (e, count, at), v in on.items() if at == rank)
        for rank in layer.ranks
    }
    for alike in ranks_alike(layer.topology, layer.ranks, layer.num_groups > 1):
        for first, second in pairwise(alike):
            model.add(load[first] >= load[second])
    if layer.num_groups > 1:
        return  # experts of different groups are not equal, and those of one group seldom are
    replicas = [
        sum(on[e, c, r] for c in counts for r in layer.ranks)
        for e, counts in enumerate(layer.counts)
    ]
    last: dict[bytes, int] = {}
    for expert in range(len(layer.counts)):
        key = layer.work[:, expert].tobytes()
        if key in last:
            model.add(replicas[last[key]] >= replicas[expert])
        last[key] = expert


def ranks_alike(topology: Topology, ranks: list[int], by_node: bool) -> list[list[int]]:
    """Sets of ranks that may exchange all their experts without a change of the objective."""
    alike: dict[tuple[float, ...], list[int]] = {}
    for rank in ranks:
        node = int(topology.node_of_rank[rank]) if by_node else 0
        key = (float(topology.rank_speed[rank]), int(topology.slots_of_rank[rank]), node)
        alike.setdefault(key, []).append(rank)
    return list(alike.values())


def hint(model: Any, on: Chosen, layer: ExactLayer) -> None:
    """Hint ``layer.start`` to the solver, with equal ranks in the order of ``break_symmetry``."""
    start, topology = layer.start, layer.topology
    replicas = np.bincount(start[start >= 0], minlength=len(layer.counts))
    weight = layer.work.sum(axis=0) / replicas
    holds = {rank: set(start[topology.slots_on(rank)].tolist()) - {EMPTY} for rank in layer.ranks}
    filled = dict(holds)
    for alike in ranks_alike(topology, layer.ranks, layer.num_groups > 1):
        heaviest_first = sorted(alike, key=lambda rank: -sum(weight[e] for e in holds[rank]))
        for rank, other in zip(alike, heaviest_first, strict=True):
            filled[rank] = holds[other]
    for (expert, count, rank), variable in on.items():
        model.add_hint(variable, count == replicas[expert] and expert in filled[rank])
