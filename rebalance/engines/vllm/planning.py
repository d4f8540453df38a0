"""One plan for vLLM's policy call: from the figures of the call to a map and its shares.

Shapes:  L MoE layers, E experts, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import eplb
from eplb.core.problem import Budget
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.vllm.replica_lists import Ints

# vLLM reports a stall of 0.91 s for a rebalance of 58 layers on 32 GPUs (pull request 43219), in
# which each rank receives about 22 GB.
BYTES_PER_S = 24e9
ANY_GAIN_S = 1e9  # pay-back time of the first plan: vLLM's first map knows no load at all


@dataclass(frozen=True)
class Call:
    """The arguments of vLLM's ``rebalance_experts``, in numpy."""

    load: Ints  # [L, E] tokens of the window, of all ranks
    held: Ints  # [L, S] the map that serves
    num_groups: int
    num_nodes: int
    num_ranks: int

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.load.shape[1])


def why_not_planned(call: Call, num_replicas: int) -> str:
    """The reason why a call is left to vLLM's own policy, or "". Alike on all ranks."""
    num_layers, num_slots = call.held.shape
    if len(call.load) != num_layers:
        return f"load of {len(call.load)} layers and a map of {num_layers}"
    if num_slots != num_replicas:
        return f"the map has {num_slots} physical experts and {num_replicas} are asked for"
    if (call.held < 0).any():
        return "the map has empty physical experts (-1), as elastic expert parallelism leaves them"
    if num_slots % call.num_ranks or call.num_ranks % call.num_nodes:
        return f"{num_slots} physical experts, {call.num_ranks} ranks and {call.num_nodes} nodes"
    return ""


def planned(
    call: Call, settings: PluginSettings, expert_bytes: int, *, is_first: bool
) -> tuple[Ints, NDArray[np.float64], str]:
    """[L, S] the map to serve, [L, S] its shares, and the reason.

    Args:
        call: which ``why_not_planned`` has nothing against.
        settings: limits of the plan.
        expert_bytes: of one expert; 0: unknown.
        is_first: the map in ``call`` is not from a plan, so any number of experts may move.

    Raises:
        EplbError: no plan can be made.
    """
    num_layers, num_slots = call.held.shape
    topology = eplb.Topology.uniform(
        call.num_nodes, call.num_ranks // call.num_nodes, num_slots // call.num_ranks
    )
    groups = call.num_groups if call.num_groups % call.num_nodes == 0 else 1
    model = eplb.ModelShape(
        tuple(range(num_layers)),
        call.num_experts,
        1,
        1,
        1,
        num_expert_groups=groups if call.num_experts % groups == 0 else 1,
        expert_bytes=expert_bytes or 17_000_000,
    )
    engine = settings.engine
    budget = Budget(
        max_moves=None if is_first else int(engine.max_moved * num_layers * num_slots),
        target_imbalance=settings.target_imbalance,
        time_ms=engine.plan_time_ms,
    )
    current = eplb.Placement(call.held.astype(np.int32), call.num_experts, 1)
    found = eplb.plan(
        call.load,
        topology,
        model=model,
        current=current,
        budget=budget,
        cost=eplb.CostModel(
            pay_back_s=ANY_GAIN_S if is_first else settings.pay_back_s, bytes_per_s=BYTES_PER_S
        ),
        dispatch=eplb.DispatchRule.WEIGHTED if engine.shares else eplb.DispatchRule.EVEN,
        # Any number may move at first: a search for few moves would take three times as long.
        policy="fresh" if is_first else "auto",
    )
    reason = f"decision={found.decision.value} reason={found.reason!r}"
    target = found.target
    return target.slot_to_expert.astype(np.int64), target.slot_share, reason
