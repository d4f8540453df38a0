"""Heuristic packing with redundant experts: the fresh plan, made without regard to the past.

Three steps per layer: each spare slot replicates the expert with the largest load per replica;
replicas are packed heaviest first onto the rank that then ends earliest; swaps off the busiest
rank follow while they help. With expert groups, whole groups are first packed to nodes, and the
three steps stay inside each node, which keeps a token's traffic to few nodes.

Shapes:  L MoE layers, E experts, S slots, R ranks, N nodes.
Source of the idea: DeepSeek's published balancer (deepseek-ai/EPLB).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.hierarchical import Zones, zones_for
from eplb.kernels import FloatArray, IntArray, keep_in_place, pack, replicate
from eplb.problem import Problem, scale
from eplb.search import COPIES_LAST, COPIES_NEVER, Rules, improve
from eplb.topology import Topology

GOOD_ENOUGH = 1.005  # swaps stop here: more costs time, and the next window differs by more
REFINED = 1.0005
FINEST_GAIN = 1e-5  # imbalance that a move of the search must gain
WINDOWS_GAIN = 5e-4  # the same over several windows, where less only fits their noise
STEPS_PER_SLOT = 2  # a bound that the search does not reach in practice


def greedy(problem: Problem) -> IntArray:
    """[L, S] a fresh plan on the sum of the windows."""
    total = problem.work.sum(axis=0)
    return fresh_slots(total, problem.topology, problem.num_groups)


def refined(problem: Problem) -> IntArray:
    """[L, S] greedy, then a search over the single windows, in which copies may move too."""
    total = problem.work.sum(axis=0)
    zones = zones_for(total, problem.topology, problem.num_groups)
    held = _packed(total, zones)
    min_gain = FINEST_GAIN if len(problem.work) == 1 else WINDOWS_GAIN
    rules = Rules(
        np.full(len(held), REFINED),
        min_gain,
        COPIES_LAST,
        STEPS_PER_SLOT * problem.topology.num_slots,
    )
    improve(problem.scaled, held, zones.of_expert, zones.ranks, rules)
    return held


def fresh_slots(
    work: NDArray[np.float64], topology: Topology, num_groups: int, good_enough: float = GOOD_ENOUGH
) -> IntArray:
    """[L, S] replicate, pack and swap for work [L, E]; -1 for slots that stay empty."""
    zones = zones_for(work, topology, num_groups)
    held = _packed(work, zones)
    rules = Rules(
        np.full(len(held), good_enough),
        FINEST_GAIN,
        COPIES_NEVER,
        STEPS_PER_SLOT * topology.num_slots,
    )
    one_window = np.ascontiguousarray(scale(work, topology)[:, None])
    improve(one_window, held, zones.of_expert, zones.ranks, rules)
    return held


def _packed(work: FloatArray, zones: Zones) -> IntArray:
    work = np.ascontiguousarray(work, dtype=np.float64)
    count = replicate(work, zones.of_expert, zones.num_slots, zones.num_ranks)
    return pack(work, count, zones.of_expert, zones.ranks)


def in_place(held: IntArray, base: NDArray[np.int32], topology: Topology) -> IntArray:
    """[L, S] the same plan, with every expert that stays on a rank in the slot it has there."""
    return keep_in_place(held, base.astype(np.int64), topology.first_slot)
