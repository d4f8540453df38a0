"""What a plan is: what to aim at, why, and what it takes. Figures nobody asks for are not made.

Shapes:  L MoE layers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.allowance import moves_per_layer
from eplb.balance import lower_bound
from eplb.frontier import Curve
from eplb.gate import Decision
from eplb.group_packing import is_exact
from eplb.hierarchical import zone_bound, zones_for
from eplb.migration import Move, Source, moves_between
from eplb.placement import Placement
from eplb.problem import Problem
from eplb.topology import Topology

LINKS = ("same_rank", "node", "network", "host")


@dataclass(frozen=True, eq=False)
class Plan:
    """What to aim at, why, and what it takes.

    ``before`` and ``after`` are means over layers of the mean imbalance over the history's
    windows: what the placement would have been then, no promise for the next window. With
    ``objective="time"`` they are times, see ``eplb.timing.measured``.
    """

    problem: Problem
    base: Placement  # what serves now; contiguous when nothing did
    target: Placement  # generation + 1 when it moves, else ``base`` itself
    before_per_layer: NDArray[np.float64]  # [L]
    after_per_layer: NDArray[np.float64]  # [L] of the planned placement, even if it is not taken
    decision: Decision
    reason: str
    curve: Curve  # (moves, mean score over layers): one window's score is its imbalance
    policy: str

    @property
    def topology(self) -> Topology:
        """Where the plan was made for."""
        return self.problem.topology

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights; 0 when no model was given."""
        return self.problem.model.expert_bytes if self.problem.model is not None else 0

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
    def lower_bound(self) -> NDArray[np.float64]:
        """[L] no placement in these slots has a lower mean imbalance, however tokens are split.

        The mean over windows of a maximum is at least the maximum of the mean window; idle windows
        count as 1. Where expert groups stay on nodes and all packings can be tried, it is that of
        the best packing. For ``objective="time"`` it is 1: splitting an expert saves no work.
        """
        problem = self.problem
        if problem.objective == "time":
            return np.ones(len(self.before_per_layer))
        busy = (problem.scaled > 0).any(axis=2)  # [L, T]
        mean = problem.scaled.mean(axis=1)
        if problem.groups_stay and is_exact(problem.num_groups, self.topology.num_nodes):
            zones = zones_for(mean, self.topology, problem.num_groups, problem.room)
            # In units of a fair rank's mean load, which idle windows make smaller.
            part = np.maximum(busy.mean(axis=1), 1e-300)[:, None]
            bound = zone_bound(mean / part, zones)
        else:
            bound = lower_bound(mean, self.topology)
        bounded: NDArray[np.float64] = 1.0 + busy.mean(axis=1) * (bound - 1.0)
        return bounded

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
            "objective": self.problem.objective,
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


def _link(move: Move, topology: Topology) -> str:
    if move.source is Source.SAME_RANK:
        return "same_rank"
    if move.source is not Source.PEER:
        return "host"
    same_node = topology.node_of_slot[move.src_slot] == topology.node_of_slot[move.dst_slot]
    return "node" if same_node else "network"
