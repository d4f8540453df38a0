"""The policy under vLLM's key ``default``: one plan for all ranks, from rank 0.

vLLM calls its policy on every rank and needs the same map on each. Rank 0 plans and broadcasts the
map with the lists of replicas on the group that vLLM's own asynchronous worker uses, in the same
thread and order. A call that this planner has no answer to goes to vLLM's own policy, by figures
that are alike on all ranks; a plan that fails keeps the map that serves.

Shapes:  L MoE layers, E experts, P physical experts.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import eplb
from rebalance.engines.common.gauge import set_part
from rebalance.engines.common.messages import Outcome
from rebalance.engines.vllm.decisions import Decision
from rebalance.engines.vllm.planning import Call, planned, why_not_planned
from rebalance.engines.vllm.replica_lists import Ints, repetitions

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
            given = (weight, num_replicas, num_groups, num_nodes, num_ranks)
            if not process.is_on("policy") or old is None:
                return _by_vllm(own, *given, old)
            held = np.array(old.cpu().numpy(), dtype=np.int64)
            load = np.array(weight.cpu().numpy(), dtype=np.int64)
            call = Call(load, held, num_groups, num_nodes, num_ranks)
            refusal = why_not_planned(call, num_replicas)
            if refusal:
                log.warning("vLLM's own policy plans this time: %s", refusal)
                return _by_vllm(own, *given, old)
            if not load.any():  # profiling, or nothing was served: alike on all ranks
                return torch.from_numpy(held)
            return torch.from_numpy(_decided(process, call))

    return EplbPlannerPolicy


def _by_vllm(own: Any, *arguments: Any) -> torch.Tensor:
    """The answer of vLLM's own policy."""
    held: torch.Tensor = own.rebalance_experts(*arguments)
    return held


def _decided(process: PluginProcess, call: Call) -> Ints:
    """[L, P] the map that rank 0 decided, with its lists noted for the commit."""
    group = process.group
    message = torch.from_numpy(np.stack([call.held, np.zeros_like(call.held)]))
    if group.rank_in_group == 0:
        message.copy_(torch.from_numpy(_proposed(process, call)))
    if group.world_size > 1:
        dist.broadcast(message, src=group.ranks[0], group=group.cpu_group)
    held, repeats = message.numpy()
    process.decisions.add(Decision(call.held, held.copy(), repeats.copy(), call.num_experts))
    return np.array(held)


def _proposed(process: PluginProcess, call: Call) -> Ints:
    """[2, L, P] map and repetitions of rank 0. Never raises: the serving map is always legal."""
    standing = process.decisions.of_map(call.held, call.num_experts)
    kept = np.zeros_like(call.held) if standing is None else standing.repeats
    question, standing_map = process.asked(call.held), np.stack([call.held, kept])
    if why := process.why_kept:
        log.info("decision=KEEP reason=%r", why)
        process.answered(Outcome(question, kept=why))
        return standing_map
    began = time.monotonic()
    try:
        held, plan = planned(
            call, process.settings, process.expert_bytes, is_first=standing is None
        )
        repeats = np.zeros_like(held)
        if process.is_on("shares"):
            repeats = repetitions(held, plan.target.slot_share)
    except Exception as exc:
        # The engine's pass or its worker would fail with it.
        log.exception("no plan: the map that serves is kept")
        set_part("vllm", "policy", is_on=False)
        process.answered(Outcome(question, error=f"{type(exc).__name__}: {exc}"))
        return standing_map
    set_part("vllm", "policy", is_on=True)
    is_kept = plan.decision is eplb.Decision.KEEP
    wanted = standing_map if is_kept else np.stack([held, repeats])
    moves = not np.array_equal(wanted, standing_map)
    log.info(
        "decision=%s reason=%r moved=%d seconds=%.3f",
        plan.decision.value,
        plan.reason,
        (wanted[0] != call.held).sum(),
        time.monotonic() - began,
    )
    if moves and not question.is_dry:
        process.will_move(question)
        return wanted
    figures = {"moves": moves, "reason": plan.reason}
    figures |= {"before": float(plan.before), "after": float(plan.after)}
    process.answered(Outcome(question, figures))
    return standing_map
