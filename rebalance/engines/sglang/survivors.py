"""The map of the survivors, where the engine serves on after a death (elastic expert parallelism).

Every rank asks ``elasticity_aware.rebalance_experts`` for a map over the ranks that are active. The
engine's own answer does not know the map that serves: nearly every expert is loaded again. This one
keeps what survivors hold, gives the experts that nobody holds a slot, and then moves what pays.

Each rank computes it from the same map and the same counts; no clock is read, so all get one map.
Whoever returns gets the map of the others from the engine before it asks for one.

Shapes:  L rows of the engine's map, E experts, S slots, R ranks, X replicas.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from eplb.core.dispatch import DispatchRule
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import EplbError
from eplb.migration.survivors import survive
from eplb.planner import plan
from rebalance.engines.common.tap import IntArray
from rebalance.engines.sglang import engine

OF_DEAD = 0  # the expert that the engine names in slots of ranks that are not active

Maps = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

log = logging.getLogger(__name__)


def survivors_map(
    held: IntArray, weight: IntArray, alive: IntArray, rule: DispatchRule
) -> Placement:
    """Plan for the ranks that are left; slots of the others are EMPTY.

    Args:
        held: [L, S] the map that serves.
        weight: [L, E] tokens.
        alive: [R] not 0 for a rank that is active.
        rule: by which the engine chooses among replicas.

    Raises:
        EplbError: the ranks that are left have fewer slots than experts.
    """
    num_slots, num_experts = held.shape[1], weight.shape[1]
    whole = Topology.uniform(1, len(alive), num_slots // len(alive))
    left = survive(Placement(held.astype(np.int32), num_experts), whole, np.flatnonzero(alive == 0))
    made = plan(weight, left.topology, current=left.target, dispatch=rule).target.slot_to_expert
    # A plan leaves no expert twice on a rank, as the engine does; its slots are never empty.
    return Placement(np.where(made == EMPTY, left.target.slot_to_expert, made), num_experts)


def rebalance_experts(
    original: Callable[..., Maps],
    weight: torch.Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    enable_hierarchical: bool,
    active_ranks: torch.Tensor,
) -> Maps:
    """In place of the engine's function while a rank is missing; the same arguments and answer.

    Where no map fits, on all ranks alike, the engine's own answer is given.
    """
    alive = active_ranks[:num_gpus].cpu().numpy()
    given = weight, num_replicas, num_groups, num_nodes, num_gpus, enable_hierarchical, active_ranks
    if alive.all():
        return original(*given)
    held = engine.metadata().physical_to_logical_map_cpu.numpy()
    try:
        made = survivors_map(held, weight.cpu().numpy(), alive, engine.rule_of_replicas())
    except EplbError as exc:
        log.warning("the engine's own map of the survivors serves: %s", exc)
        return original(*given)
    moved = int(((made.slot_to_expert != held) & (made.slot_to_expert != EMPTY)).sum())
    log.info("map of %d ranks of %d: %d slots change", int((alive != 0).sum()), num_gpus, moved)
    slots = np.where(made.slot_to_expert == EMPTY, OF_DEAD, made.slot_to_expert)
    maps = slots, made.expert_to_slots, made.replica_count
    first, second, third = (torch.from_numpy(one.astype(np.int64)) for one in maps)
    return first, second, third
