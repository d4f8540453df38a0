"""The CP-SAT model of the exact policy: variables and constraints of one layer.

    has[e, c]    expert e has c replicas
    on[e, c, r]  ... and one of them is on rank r, which then carries work / c of it

Shapes:  T windows, E experts, S slots, R ranks, C replica counts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.kernels import IntArray
from eplb.core.placement import EMPTY
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.packing.zones import keeps_groups

UNITS = 10**6  # of the mean rank load: the solver computes in integers
# on[e, c, r] of one layer. A layer of 256 experts on 32 ranks would have some 250,000.
MOST_CHOICES = 20_000

Choice = tuple[int, int, int]  # expert, replicas, rank
Chosen = dict[Choice, Any]  # the solver's variables


class Layer(NamedTuple):
    """One layer as input of the solver."""

    work: NDArray[np.float64]  # [T, E] of windows that are not idle
    start: IntArray  # [S] a good placement
    counts: list[range]  # replica counts of each expert that may be optimal
    ranks: list[int]  # live, with slots
    topology: Topology
    num_groups: int  # 1 unless they stay on nodes

    @property
    def choices(self) -> list[Choice]:
        """All (expert, replicas, rank)."""
        return [
            (expert, count, rank)
            for expert, counts in enumerate(self.counts)
            for count in counts
            for rank in self.ranks
        ]


def layer_of(problem: Problem, number: int, start: IntArray) -> Layer:
    """One layer of a problem; ``start`` [S] is a placement that the optimum is at least as good as.

    Raises:
        ConfigError: more choices than can be searched.
    """
    topology = problem.topology
    work = problem.scaled[number]
    ranks: list[int] = np.flatnonzero(topology.serving).tolist()
    grouped = keeps_groups(topology, problem.num_groups, problem.num_experts)
    layer = Layer(
        work[work.sum(axis=1) > 0],
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


def place_every_expert(model: Any, on: Chosen, layer: Layer) -> None:
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


def _keep_groups(model: Any, on: Chosen, layer: Layer) -> None:
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


def weigh(model: Any, on: Chosen, busiest: list[Any], layer: Layer) -> None:
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


def break_symmetry(model: Any, on: Chosen, layer: Layer) -> None:
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


def hint(model: Any, on: Chosen, layer: Layer) -> None:
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
