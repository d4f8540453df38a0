"""The policy under vLLM's key ``default``: one plan for all ranks, from rank 0.

vLLM calls its policy on every rank and needs the same map on each. Rank 0 plans and broadcasts the
map with the lists of replicas on the group that vLLM's own asynchronous worker uses, in the same
thread and order. A plan that fails keeps the map that serves.

Shapes:  L MoE layers, E experts, P physical experts.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import eplb
from rebalance.engines.common.fsck.rank_check import FAULTS_STOP_MOVES
from rebalance.engines.common.messages import MoveOutcome
from rebalance.engines.common.start import set_part
from rebalance.engines.common.tap import IntArray
from rebalance.engines.vllm.decisions import MapDecision, planned, repetitions

if TYPE_CHECKING:
    from rebalance.engines.vllm.process import PluginProcess

log = logging.getLogger(__name__)


def policy_class(process: PluginProcess, own: Any) -> type:
    """Make the class for vLLM's policy table.

    Args:
        process: the plug-in in this process; its policy applies while ``process.is_on("policy")``.
        own: vLLM's policy, which answers in all other cases.
    """

    class EplbPlannerPolicy(own):  # type: ignore[misc]
        """Plans with eplb; vLLM's own policy where the plug-in is off."""

        @classmethod
        def rebalance_experts(
            cls,
            weight: torch.Tensor,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            """As ``AbstractEplbPolicy.rebalance_experts``."""
            old = old_global_expert_indices
            if not process.is_on("policy") or old is None:
                found: torch.Tensor = own.rebalance_experts(
                    weight, num_replicas, num_groups, num_nodes, num_ranks, old
                )
                return found
            held = np.array(old.cpu().numpy(), dtype=np.int64)
            load = np.array(weight.cpu().numpy(), dtype=np.int64)
            if not load.any():  # profiling, or nothing was served: alike on all ranks
                return torch.from_numpy(held)
            return torch.from_numpy(_decided(process, load, held))

    return EplbPlannerPolicy


class RankState(NamedTuple):
    """What a rank tells the others before each decision; the largest figure holds on all ranks."""

    num_faults: int = 0  # slots, factors and layers of this rank that are known to be wrong


def agree_on_state(group: Any, own: RankState) -> RankState:
    """The state of all ranks: of each figure the largest. The first collective of a decision."""
    if group.world_size == 1:
        return own
    figures = torch.tensor(own, dtype=torch.int64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=group.cpu_group)
    return RankState(*figures.tolist())


def _decided(process: PluginProcess, load: IntArray, held: IntArray) -> IntArray:
    """[L, P] the map that rank 0 decided, with its lists noted for the commit."""
    group, num_experts = process.group, load.shape[1]
    state = agree_on_state(group, RankState(num_faults=process.num_faults))
    mended = process.mend(held) if state.num_faults or process.left_behind else None
    process.stop_moves(process.left_behind or (FAULTS_STOP_MOVES if state.num_faults else ""))
    if mended is not None:
        even = np.zeros_like(held)
        process.decisions.add(MapDecision(held, mended, even, num_experts, is_planned=False))
        return mended
    message = torch.from_numpy(np.stack([held, np.zeros_like(held)]))
    if group.rank_in_group == 0:
        message.copy_(torch.from_numpy(_proposed(process, load, held)))
    if group.world_size > 1:
        dist.broadcast(message, src=group.ranks[0], group=group.cpu_group)
    wanted, repeats = message.numpy()
    standing = process.decisions.of_map(held, num_experts)
    # A KEEP leaves the map of the start as it is: the plan after it may still move any number.
    is_planned = (standing is not None and standing.is_planned) or not np.array_equal(wanted, held)
    made = MapDecision(held, wanted.copy(), repeats.copy(), num_experts, is_planned)
    process.decisions.add(made)
    return np.array(wanted)


def _proposed(process: PluginProcess, load: IntArray, held: IntArray) -> IntArray:
    """[2, L, P] map and repetitions of rank 0. Never raises: the serving map is always legal."""
    standing = process.decisions.of_map(held, load.shape[1])
    kept = np.zeros_like(held) if standing is None else standing.repeats
    question, standing_map = process.asked(held), np.stack([held, kept])
    began = time.monotonic()
    try:
        is_first = standing is None or not standing.is_planned
        plan = planned(load, held, process.system, process.settings, is_first=is_first)
        target = plan.target.slot_to_expert.astype(np.int64)
        repeats = np.zeros_like(held)
        if process.is_on("shares"):
            repeats = repetitions(target, plan.target.slot_share)
    except Exception as exc:
        # The engine's pass or its worker would fail with it.
        log.exception("no plan: the map that serves is kept")
        set_part("vllm", "policy", is_on=False)
        process.answered(MoveOutcome(question, error=f"{type(exc).__name__}: {exc}"))
        return standing_map
    set_part("vllm", "policy", is_on=True)
    is_kept = plan.decision is eplb.Decision.KEEP
    wanted = standing_map if is_kept else np.stack([target, repeats])
    moves = not np.array_equal(wanted, standing_map)
    why_kept = process.why_kept
    log.info(
        "decision=%s reason=%r moved=%d seconds=%.3f kept=%r",
        plan.decision.value,
        plan.reason,
        (wanted[0] != held).sum(),
        time.monotonic() - began,
        why_kept,
    )
    if moves and not (why_kept or question.is_dry):
        process.will_move(question)
        return wanted
    figures = {
        "decision": plan.decision.value,
        "num_moves": int((wanted[0] != held).sum()),
        "before": float(plan.before),
        "after": float(plan.after),
        "reason": plan.reason,
    }
    process.answered(MoveOutcome(question, figures, kept=why_kept))
    return standing_map
