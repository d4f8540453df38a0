"""A drop-in for the ``rebalance_experts`` of DeepSeek's balancer (deepseek-ai/EPLB, eplb.py).

Same arguments, shapes, dtypes and meaning. Differences: it never puts two replicas of an expert on
one rank, invalid arguments raise ConfigError, and numpy arrays work as well as torch tensors.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import on_host
from eplb.core.load import as_history
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.policies.table import greedy_policy

Array = TypeVar("Array")  # a numpy array, or a torch tensor, which is never imported here


def rebalance_experts(
    weight: Array, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Array, Array, Array]:
    """Place ``num_replicas`` replicas of the experts on GPUs so that load is even.

    Args:
        weight: [L, E] load of every expert; a numpy array or a torch tensor.
        num_replicas: slots per layer, a multiple of ``num_gpus``, at least E.
        num_groups: the model's expert groups. When they divide by nodes, each stays on one node,
            and experts must divide by groups; otherwise experts may go anywhere.
        num_nodes: servers; the network is fast within each.
        num_gpus: ranks, a multiple of ``num_nodes`` where groups stay on nodes.

    Returns:
        physical_to_logical_map [L, num_replicas], logical_to_physical_map [L, E, most replicas]
        padded with -1, expert_count [L, E]; int64, torch tensors on the CPU if ``weight`` is one.

    Raises:
        ConfigError: numbers that contradict each other.
        HistoryError: weights that are negative or not finite.
    """
    history = as_history(on_host(weight))
    num_layers, num_experts = history.num_layers, history.num_experts
    _check(num_experts, num_replicas, num_groups, num_nodes, num_gpus)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1  # planned globally, without groups and nodes
    topology = Topology.uniform(num_nodes, num_gpus // num_nodes, num_replicas // num_gpus)
    layers = tuple(range(num_layers))
    model = ModelShape(layers, num_experts, 1, 1, 1, num_expert_groups=num_groups)
    # In order as far as ranks are equal, so that two plans for nearly the same load are alike.
    placement = greedy_policy(Problem(history, topology, model))
    if (placement.slot_to_expert == EMPTY).any():
        raise ConfigError(
            f"{num_replicas} replicas of {num_experts} experts leave slots empty when no GPU "
            f"of {num_gpus} may hold an expert twice, expected fewer replicas"
        )
    maps = (placement.slot_to_expert, placement.expert_to_slots, placement.replica_count)
    first, second, third = (_like(weight, array.astype(np.int64)) for array in maps)
    return first, second, third


def _check(
    num_experts: int, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> None:
    if min(num_groups, num_nodes, num_gpus) < 1:
        raise ConfigError(
            f"found {num_groups} groups, {num_nodes} nodes, {num_gpus} GPUs, "
            "expected at least one of each"
        )
    if num_replicas < num_experts:
        raise ConfigError(
            f"{num_replicas} replicas for {num_experts} experts, expected at least one for each"
        )
    stays = num_groups % num_nodes == 0
    for what, number, parts, by, matters in (
        ("replicas", num_replicas, num_gpus, "GPUs", True),
        ("GPUs", num_gpus, num_nodes, "nodes", stays),
        ("experts", num_experts, num_groups, "groups", stays),
    ):
        if matters and number % parts:
            raise ConfigError(f"{number} {what} on {parts} {by}, expected a multiple of {parts}")


def _like(weight: Any, array: NDArray[np.int64]) -> Any:
    """The array as the type of ``weight``: a torch tensor or a numpy array."""
    if hasattr(weight, "detach"):
        return weight.detach().cpu().long().new_tensor(array)
    return array
