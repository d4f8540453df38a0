"""A plan for an engine's map.

Shapes:  T windows, L layers, E experts, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from eplb.core.cost import CostModel
from eplb.core.dispatch import DispatchRule
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Budget
from eplb.core.topology import Topology
from eplb.errors import PlacementError
from eplb.planner import Plan, plan
from rebalance.engines.common.tap import IntArray


@dataclass(frozen=True)
class System:
    """What experts are balanced over, in slots that all ranks have alike."""

    num_ranks: int
    num_nodes: int
    num_groups: int  # expert groups of the model; 1 is used where nodes cannot hold them whole
    expert_bytes: int

    def topology(self, num_slots: int) -> Topology:
        """Ranks and their slots."""
        ranks, nodes = self.num_ranks, self.num_nodes
        return Topology.uniform(nodes, ranks // nodes, num_slots // ranks)

    def model(self, layers: Iterable[int], num_experts: int, top_k: int = 1) -> ModelShape:
        """Layers by their numbers, experts and their groups."""
        groups = self.num_groups
        fits = groups % self.num_nodes == 0 and num_experts % groups == 0
        return ModelShape(
            tuple(layers),
            num_experts,
            top_k,
            hidden=1,
            intermediate=1,
            num_expert_groups=groups if fits else 1,
            expert_bytes=self.expert_bytes,
        )


def planned(
    windows: IntArray,
    current: Placement,
    system: System,
    rule: DispatchRule,
    *,
    max_moved: float | None,
    pay_back_s: float,
    target_imbalance: float,
    time_ms: float | None = None,
    bytes_per_s: float = CostModel.bytes_per_s,
    policy: str = "auto",
) -> Plan:
    """Plan for the rule by which the engine chooses among replicas.

    Args:
        windows: [L, E] or [T, L, E] tokens.
        current: the map that serves, with the shares by which it is dispatched.
        system: ranks and model.
        rule: the engine's.
        max_moved: part of all slots that may move; None: any number, for any gain, as where no plan
            has made the map yet.
        pay_back_s: as ``CostModel``. An engine that moves weights holds passes up for it.
        target_imbalance: that is good enough.
        time_ms: search time, counted in steps; None: as ``Budget``.
        bytes_per_s: at which a rank receives.
        policy: as ``eplb.planner.plan``.

    Raises:
        EplbError: load, map and ranks do not describe one system, or the plan has empty slots,
            which no engine's map can have.
    """
    num_layers, num_slots = current.slot_to_expert.shape
    is_free = max_moved is None
    found = plan(
        windows,
        system.topology(num_slots),
        model=system.model(range(num_layers), current.num_experts),
        current=current,
        budget=Budget(
            max_moves=None if max_moved is None else int(max_moved * num_layers * num_slots),
            target_imbalance=target_imbalance,
            time_ms=time_ms,
        ),
        cost=CostModel(
            pay_back_s=math.inf if is_free else pay_back_s,
            bytes_per_s=bytes_per_s,
        ),
        dispatch=rule,
        policy=policy,
    )
    if (found.target.slot_to_expert == EMPTY).any():
        raise PlacementError("the plan has an empty slot, expected an expert in each")
    return found
