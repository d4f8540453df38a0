"""Planners of other projects, re-implemented from their published behaviour, for comparison.

Engines that plan greedily after every window differ in the load that represents the past: the last
window alone (SGLang's recorder starts anew after each plan), the sum of a sliding window (vLLM,
TensorRT-LLM), or a moving average (omni-infer, 0.6 of it the past). ``register_peers`` adds all
planners to the policy table, for ``eplb simulate --policy`` and benchmarks.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, history_of_figures
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.policies.table import Policy, greedy_policy, register_policy
from simulations.peers.engines import deepseek_slots
from simulations.peers.flashlb import FlashlbWhenDue, flashlb
from simulations.peers.swift import swift_balancer

KEPT = 0.6  # part of the moving average when a window comes


def greedy_on_last(problem: Problem) -> Placement:
    """Greedy on the latest window."""
    return greedy_policy(replace(problem, history=problem.history.latest(1)))


def greedy_on_average(problem: Problem) -> Placement:
    """Greedy on a moving average of the windows, each by the part of its tokens."""
    average = moving_average(problem.history)
    return greedy_policy(replace(problem, history=history_of_figures(average)))


def moving_average(history: LoadHistory) -> NDArray[np.float64]:
    """[L, E] tokens of a window, the older the less."""
    weight = (1 - KEPT) * KEPT ** np.arange(history.num_windows)[::-1]
    weight[0] /= 1 - KEPT  # the average begins with the first window
    average: NDArray[np.float64] = np.tensordot(weight, history.tokens, axes=1)
    return average


def compile_peers() -> None:
    """Compile all kernels of the peers' planners: one plan for a few experts each."""
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
    tokens = np.array([[[8, 4, 2, 1]], [[8, 4, 2, 2]]])  # [T, L, E]
    deepseek_slots(tokens[0], ranks)
    flashlb(Problem(LoadHistory(tokens), ranks))


PEERS: dict[str, Policy] = {
    "flashlb": flashlb,  # a plan after every window
    "flashlb_when_due": FlashlbWhenDue(),
    "greedy_on_average": greedy_on_average,
    "greedy_on_last": greedy_on_last,
    "greedy_on_sum": greedy_policy,  # greedy on the sum of all windows
    "swift_balancer": swift_balancer,
}


def register_peers() -> None:
    """Add the peers to ``eplb.policies.table``; calling it again changes nothing."""
    for name, policy in PEERS.items():
        register_policy(name, policy)
