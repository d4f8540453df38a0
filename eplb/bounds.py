"""What no placement can beat: the lower bound that comes with every plan.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

import numpy as np

from eplb.balance import lower_bound, smallest_largest_replica
from eplb.demand import demand_of, time_of
from eplb.group_packing import is_exact
from eplb.hierarchical import zone_bound, zones_for
from eplb.kernels import FloatArray
from eplb.problem import Problem


def bound_of(problem: Problem) -> FloatArray:
    """[L] nothing in these slots has a lower mean over the windows, however tokens are split.

    The mean over windows of a maximum is at least the maximum of the mean window, and of an
    expert's replicas one gets at least the mean of them; idle windows count as 1. Where expert
    groups stay on nodes and all packings can be tried, it is that of the best packing.
    """
    topology = problem.topology
    if problem.objective == "time":
        return _time_bound(problem)
    busy = (problem.scaled > 0).any(axis=2)  # [L, T]
    mean = problem.scaled.mean(axis=1)
    if problem.groups_stay and is_exact(problem.num_groups, topology.num_nodes):
        zones = zones_for(mean, topology, problem.num_groups, problem.room)
        # In units of a fair rank's mean load, which idle windows make smaller.
        part = np.maximum(busy.mean(axis=1), 1e-300)[:, None]
        bound = zone_bound(mean / part, zones)
    else:
        bound = lower_bound(mean, topology)
    bounded: FloatArray = 1.0 + busy.mean(axis=1) * (bound - 1.0)
    return bounded


def _time_bound(problem: Problem) -> FloatArray:
    """[L] what the largest replica takes on the fastest rank, window by window.

    It may be below 1: whether all ranks together can be as fast as their fair part depends on the
    curve, and is not proved here.
    """
    topology, demand = problem.topology, demand_of(problem, raw=True)
    num_slots = int(topology.slots_of_rank[topology.alive].sum())
    num_ranks = int((topology.alive & (topology.slots_of_rank > 0)).sum())
    fastest = topology.rank_speed[topology.alive].max()
    bound = np.zeros(len(demand.tokens))
    for window in range(demand.tokens.shape[2]):
        tokens = np.ascontiguousarray(demand.tokens[:, :, window])
        largest = time_of(smallest_largest_replica(tokens, num_slots, num_ranks), demand)
        rate = demand.rate[:, window]
        time = (largest * rate + demand.extra[:, window]) / fastest
        bound += np.where(rate > 0, time, 1.0)
    mean: FloatArray = bound / demand.tokens.shape[2]
    return mean
