"""The policy under vLLM's key ``default``: one plan for all ranks, from rank 0.

vLLM calls its policy on every rank and needs the same map on each. Rank 0 plans and broadcasts the
map with the lists of replicas on the group that vLLM's own asynchronous worker uses, in the same
thread and order. A plan that fails keeps the map that serves; after several, or a long time without
a store, all ranks leave the call to vLLM's own policy, until a plan is made again.

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
from rebalance.controller.plans.planning import summary
from rebalance.engines.common.fsck.rank_check import FAULTS_STOP_MOVES
from rebalance.engines.common.messages import MoveOutcome, PlanQuestion
from rebalance.engines.common.start import set_part
from rebalance.engines.common.tap import IntArray
from rebalance.engines.vllm.decisions import MapDecision, ServedMap, planned, repetitions

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
            served = process.model_of(held)
            if not load.any():  # profiling, or nothing was served: alike on all ranks
                return torch.from_numpy(held)
            decided = _decided(process, served, load, held)
            if decided is None:  # handed back, on all ranks: each has the same load
                planned = own.rebalance_experts(
                    weight, num_replicas, num_groups, num_nodes, num_ranks, old
                )
                wanted = np.array(planned.cpu().numpy(), dtype=np.int64)
                decided = Decided(np.stack([wanted, np.zeros_like(wanted)]))
            return torch.from_numpy(_noted(served, held, decided, load.shape[1]))

    return EplbPlannerPolicy


class RankState(NamedTuple):
    """What a rank tells the others before each decision; the largest figure holds on all ranks."""

    num_faults: int = 0  # slots, factors and layers of this rank that are known to be wrong
    engine_plans: int = 0  # whether vLLM's own policy has to plan; rank 0 knows


def agree_on_state(group: Any, own: RankState) -> RankState:
    """The state of all ranks: of each figure the largest. The first collective of a decision."""
    if group.world_size == 1:
        return own
    figures = torch.tensor(own, dtype=torch.int64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=group.cpu_group)
    return RankState(*figures.tolist())


class Decided(NamedTuple):
    """A map for all ranks."""

    map_and_repeats: IntArray  # [2, L, P]
    is_planned: bool = True  # False: that of the start, from which a plan may move any number


def _decided(
    process: PluginProcess, served: ServedMap | None, load: IntArray, held: IntArray
) -> Decided | None:
    """The map that rank 0 decided, or that repairs a fault; None: vLLM's own policy plans."""
    group, question = process.group, PlanQuestion("interval")
    plan: tuple[IntArray, dict[str, Any]] | None = None
    if group.rank_in_group == 0:  # first: what comes of it decides who plans
        question = process.asked(served)
        plan = _planned(process, served, load, held, question)
    why = process.why_engine_plans
    state = agree_on_state(group, RankState(process.num_faults, int(bool(why))))
    repaired = None
    if state.num_faults or process.left_behind:
        repaired = process.mend(served, held)
    process.stop_moves(process.left_behind or (FAULTS_STOP_MOVES if state.num_faults else ""))
    process.hand_back(why, is_so=bool(state.engine_plans))
    is_left = bool(state.engine_plans) and not process.stopped
    message = torch.from_numpy(_serving(served, held))
    if plan is not None:
        wanted, figures = plan
        is_kept = is_left or bool(process.why_kept) or question.is_dry
        is_begun = not (is_kept or np.array_equal(wanted, message.numpy()))
        outcome = MoveOutcome(question, figures, kept=process.why_kept, is_begun=is_begun)
        process.answer(served, outcome)
        if is_begun:
            message.copy_(torch.from_numpy(wanted))
    if repaired is not None:
        return Decided(np.stack([repaired, np.zeros_like(repaired)]), is_planned=False)
    if is_left:
        return None
    if group.world_size > 1:
        dist.broadcast(message, src=group.ranks[0], group=group.cpu_group)
    return Decided(message.numpy())


def _noted(
    served: ServedMap | None, held: IntArray, decided: Decided, num_experts: int
) -> IntArray:
    """[L, P] a map that is decided for a model, noted with its lists for the commit."""
    wanted, repeats = decided.map_and_repeats
    if served is not None:
        # A KEEP leaves the map of the start as it is: the plan after it may still move any number.
        is_changed = not np.array_equal(wanted, held)
        is_planned = decided.is_planned and (served.is_planned or is_changed)
        served.latest = MapDecision(wanted.copy(), repeats.copy(), num_experts, is_planned)
    return np.array(wanted)


def _serving(served: ServedMap | None, held: IntArray) -> IntArray:
    """[2, L, P] the map that serves, and its repetitions."""
    return np.stack([held, np.zeros_like(held)]) if served is None else served.serving


def _planned(
    process: PluginProcess,
    served: ServedMap | None,
    load: IntArray,
    held: IntArray,
    question: PlanQuestion,
) -> tuple[IntArray, dict[str, Any]] | None:
    """[2, L, P] map and repetitions by rank 0's plan, and its figures; None: it failed.

    It never raises: the engine's pass or its worker would fail with it, and other ranks wait.
    """
    began, wanted = time.monotonic(), _serving(served, held)
    try:
        is_first = served is None or not served.is_planned
        plan = planned(load, wanted, process.system, process.settings, is_first=is_first)
        if plan.decision is not eplb.Decision.KEEP:
            target = plan.target.slot_to_expert.astype(np.int64)
            repeats = np.zeros_like(held)
            if process.is_on("shares"):
                repeats = repetitions(target, plan.target.slot_share)
            wanted = np.stack([target, repeats])
        elapsed_s = round(time.monotonic() - began, 4)
        moves = int((wanted[0] != held).sum())
        figures = summary(plan) | {"moves": moves, "plan_seconds": elapsed_s}
    except Exception as exc:
        process.num_failed_plans += 1
        error = f"{type(exc).__name__}: {exc}"
        log.warning("no plan, number %d in a row: %s", process.num_failed_plans, error)
        log.debug("no plan", exc_info=True)
        set_part("vllm", "policy", is_on=False)
        process.answer(served, MoveOutcome(question, error=error))
        return None
    process.num_failed_plans = 0
    set_part("vllm", "policy", is_on=not process.is_handed_back)
    log.info(
        "decision=%s reason=%r moved=%d seconds=%.3f kept=%r",
        plan.decision.value,
        plan.reason,
        moves,
        elapsed_s,
        process.why_kept,
    )
    return wanted, figures
