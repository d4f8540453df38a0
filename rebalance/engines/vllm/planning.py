"""One plan for vLLM's policy call: from the figures of the call to a map and its shares.

Shapes:  L MoE layers, E experts, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import eplb
from rebalance.engines.common import planning as common
from rebalance.engines.common.planning import Limits, System
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.vllm.replica_lists import Ints

# vLLM reports a stall of 0.91 s for a rebalance of 58 layers on 32 GPUs (pull request 43219), in
# which each rank receives about 22 GB.
BYTES_PER_S = 24e9


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
) -> tuple[Ints, eplb.Plan]:
    """[L, S] the map to serve, and the plan that it is from.

    Args:
        call: which ``why_not_planned`` has nothing against.
        settings: limits of the plan.
        expert_bytes: of one expert; 0: unknown.
        is_first: the map in ``call`` is not from a plan, so any number of experts may move.

    Raises:
        EplbError: no plan can be made.
    """
    engine = settings.engine
    limits = Limits(
        settings.cost.pay_back_s,
        settings.budget.target_imbalance,
        engine.max_moved,
        is_free=is_first,
        time_ms=engine.plan_time_ms,
        bytes_per_s=BYTES_PER_S,
        # Any number may move at first: a search for few moves would take three times as long.
        policy="fresh" if is_first else "auto",
    )
    found = common.planned(
        call.load,
        eplb.Placement(call.held.astype(np.int32), call.num_experts, 1),
        System(call.num_ranks, call.num_nodes, call.num_groups, expert_bytes),
        limits,
        eplb.DispatchRule.WEIGHTED if engine.shares else eplb.DispatchRule.EVEN,
    )
    held = found.target.slot_to_expert.astype(np.int64)
    common.check_target(held, call.held, call.num_experts)
    return held, found
