"""The planner's front door: load in, a plan with its reasons out.

    history -> policy -> target -> budget -> gate -> MOVE, RESPLIT or KEEP

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.allowance import moves_per_layer, within_budget
from eplb.balance import imbalance, lower_bound
from eplb.errors import PlacementError
from eplb.gate import CostModel, Decision, Outlook, decide
from eplb.load import LoadHistory, as_history
from eplb.migration import Move, Source, moves_between
from eplb.model import ModelShape
from eplb.noise import noise_under
from eplb.placement import EMPTY, Placement, check_fits
from eplb.policies import contiguous_policy, policy_named
from eplb.problem import Budget, Problem
from eplb.topology import Topology

LINKS = ("same_rank", "node", "network", "host")


@dataclass(frozen=True, eq=False)
class Plan:
    """What to aim at, why, and what it takes.

    ``before`` and ``after`` are means over layers of the mean imbalance over the history's
    windows: what the placement would have been then, no promise for the next window.
    """

    base: Placement  # what serves now; contiguous when nothing did
    target: Placement  # generation + 1 when it moves, else ``base`` itself
    before_per_layer: NDArray[np.float64]  # [L]
    after_per_layer: NDArray[np.float64]  # [L] of the planned placement, even if it is not taken
    lower_bound: NDArray[np.float64]  # [L] no equal split beats it, with these slots
    decision: Decision
    reason: str
    curve: tuple[tuple[int, float], ...]  # (moves, imbalance), best layers first
    policy: str
    topology: Topology
    expert_bytes: int  # 0 when no model was given

    @property
    def before(self) -> float:
        """Mean imbalance of the base."""
        return float(self.before_per_layer.mean())

    @property
    def after(self) -> float:
        """Mean imbalance of the planned placement."""
        return float(self.after_per_layer.mean())

    @property
    def base_generation(self) -> int:
        """The generation that this plan was made for; stale once another is committed."""
        return self.base.generation

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Every weight that moves, with its source."""
        return tuple(moves_between(self.base, self.target, self.topology))

    @property
    def num_moves(self) -> int:
        """Weights that move, without listing them."""
        return int(moves_per_layer(self.base, self.target).sum())

    @cached_property
    def bytes_by_link(self) -> dict[str, int]:
        """Bytes over each kind of link; zeros when no model gave the size of an expert."""
        count = Counter(_link(move, self.topology) for move in self.moves)
        return {link: count[link] * self.expert_bytes for link in LINKS}

    @cached_property
    def hash(self) -> str:
        """Hex digest: two plans with one hash lead from the same base to the same target."""
        digest = hashlib.blake2b(digest_size=16)
        for placement in (self.base, self.target):
            digest.update(f"{placement.generation} {placement.hash} ".encode())
        return digest.hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Give the plan without its placements, JSON-ready."""
        return {
            "decision": self.decision.value,
            "reason": self.reason,
            "policy": self.policy,
            "base_generation": self.base_generation,
            "target_generation": self.target.generation,
            "before": self.before,
            "after": self.after,
            "before_per_layer": self.before_per_layer.tolist(),
            "after_per_layer": self.after_per_layer.tolist(),
            "lower_bound": self.lower_bound.tolist(),
            "num_moves": self.num_moves,
            "bytes_by_link": self.bytes_by_link,
            "curve": [list(point) for point in self.curve],
            "hash": self.hash,
        }


def plan(
    history: LoadHistory | ArrayLike,
    topology: Topology,
    *,
    model: ModelShape | None = None,
    current: Placement | None = None,
    budget: Budget | None = None,
    policy: str = "auto",
    cost: CostModel | None = None,
    seed: int = 0,
) -> Plan:
    """Find a placement for this load, and decide whether to move to it.

    Args:
        history: LoadHistory, or tokens [L, E] or [T, L, E]; torch tensors too. Windows that some
            rank did not report are left out.
        topology: ranks, their slots, and which are alive.
        model: adds expert groups, bytes and costs; without it every expert costs the same.
        current: what serves now; without it the plan is fresh and moves from contiguous.
        budget: limits on moves; layers whose current placement cannot serve are exempt.
        policy: one of ``eplb.policies.POLICIES``.
        cost: what a move must earn; not asked when nothing serves yet, or cannot.
        seed: for policies that draw.

    Raises:
        ConfigError: an unknown policy, or inputs that describe different systems.
        PlacementError: fewer live slots than experts.
        HistoryError: load that cannot be planned on.
    """
    problem = Problem(
        as_history(history),
        topology,
        model,
        current,
        budget or Budget(),
        cost or CostModel(),
        seed,
    )
    base = current if current is not None else contiguous_policy(problem)
    proposed = policy_named(policy)(problem)
    before = imbalance_per_layer(problem, base)
    after = imbalance_per_layer(problem, proposed)
    proposed, after, curve = within_budget(problem, base, proposed, before, after)
    decision, reason = _decided(problem, base, proposed, before, after)
    target = base if decision is Decision.KEEP else proposed.with_generation(base.generation + 1)
    return Plan(
        base=base,
        target=target,
        before_per_layer=before,
        after_per_layer=after,
        lower_bound=lower_bound(problem.scaled.mean(axis=1), topology),
        decision=decision,
        reason=reason,
        curve=curve,
        policy=policy,
        topology=topology,
        expert_bytes=model.expert_bytes if model is not None else 0,
    )


def imbalance_per_layer(problem: Problem, placement: Placement) -> NDArray[np.float64]:
    """[L] mean over the windows of this placement's imbalance."""
    ratio: NDArray[np.float64] = imbalance(problem.work, placement, problem.topology).mean(axis=0)
    return ratio


def _decided(
    problem: Problem,
    base: Placement,
    proposed: Placement,
    before: NDArray[np.float64],
    after: NDArray[np.float64],
) -> tuple[Decision, str]:
    check_fits(proposed, problem.topology)
    received = _received_per_rank(base, proposed, problem.topology)
    num_moves = int(received.sum())
    try:
        check_fits(base, problem.topology)
    except PlacementError as exc:
        return Decision.MOVE, f"the current placement cannot serve: {exc}"
    change = f"imbalance {before.mean():.3f} -> {after.mean():.3f}"
    if problem.current is None and proposed.hash != base.hash:
        return Decision.MOVE, f"no current placement: {change}"
    # The base was not planned on these windows; the proposed placement was, and hides their noise.
    noise = float(noise_under(problem, base).mean())
    outlook = Outlook(
        float(before.mean()), float(after.mean()), noise, num_moves, int(received.max())
    )
    decision, reason = decide(outlook, problem.cost)
    if decision is Decision.MOVE and num_moves == 0:
        return Decision.RESPLIT, reason
    return decision, reason


def _received_per_rank(base: Placement, target: Placement, topology: Topology) -> NDArray[np.int64]:
    new = (base.slot_to_expert != target.slot_to_expert) & (target.slot_to_expert != EMPTY)
    received: NDArray[np.int64] = np.bincount(
        topology.rank_of_slot, new.sum(axis=0), topology.num_ranks
    ).astype(np.int64)
    return received


def _link(move: Move, topology: Topology) -> str:
    if move.source is Source.SAME_RANK:
        return "same_rank"
    if move.source is not Source.PEER:
        return "host"
    same_node = topology.node_of_slot[move.src_slot] == topology.node_of_slot[move.dst_slot]
    return "node" if same_node else "network"
