"""The plan: target placement, decision with its reason, and moves. Figures are computed on demand.

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

from eplb.core.cost import Decision
from eplb.core.load import Phase
from eplb.core.placement import Placement, moves_per_layer
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.decision.explanation import Explanation, explain, finite
from eplb.decision.score import booked_and_effective
from eplb.measure.balance import imbalance, live_shares
from eplb.measure.bounds import bound_of
from eplb.migration.build import Move, moves_between
from eplb.migration.transactions import LINKS, link_of
from eplb.policies.incremental import BalanceCurve
from eplb.shares.traffic import crossing


@dataclass(frozen=True)
class PhaseBalance:
    """Imbalance of one phase's windows, mean over layers."""

    phase: Phase
    before: float  # of the base
    after: float  # of the target


@dataclass(frozen=True, eq=False)
class Plan:
    """The target placement, the decision with its reason, and the moves.

    ``before`` and ``after`` are means over layers of the mean imbalance over the history's windows:
    what the placement would have had then, not a forecast of the next window. With
    ``objective="time"`` they are times, see ``eplb.decision.score.measured``; a price on
    tokens that cross nodes is added, see ``eplb.decision.alternatives.score_of``.
    """

    problem: Problem
    base: Placement  # the serving placement; contiguous when there was none
    target: Placement  # generation + 1 when it moves, else ``base`` itself
    before_per_layer: NDArray[np.float64]  # [L]
    after_per_layer: NDArray[np.float64]  # [L] of the planned placement, even if it is not taken
    decision: Decision
    reason: str
    curve: BalanceCurve  # (moves, mean score over layers) at equal split
    policy: str
    expected_gain: float = 0.0  # on windows to come; see ``eplb/decision/expectation.py``

    @property
    def topology(self) -> Topology:
        """The topology that the plan was made for."""
        return self.problem.topology

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights; 0 when no model was given."""
        return self.problem.model.expert_bytes if self.problem.model is not None else 0

    @property
    def before(self) -> float:
        """Mean imbalance of the base; infinite where some tokens have no live slot."""
        return float(self.before_per_layer.mean())

    @cached_property
    def lost(self) -> float:
        """Part of the tokens that are for experts without a live slot in the base."""
        return lost_tokens(self.problem, self.base)

    @property
    def after(self) -> float:
        """Mean imbalance of the planned placement."""
        return float(self.after_per_layer.mean())

    @property
    def base_generation(self) -> int:
        """The generation that this plan was made for; stale once another is committed."""
        return self.base.generation

    @property
    def shares(self) -> NDArray[np.float64]:
        """[L, S] part of its expert's tokens that each slot of the target gets."""
        return self.target.slot_share

    @property
    def booked(self) -> float:
        """Mean imbalance of the target by its shares."""
        return self._by_rule[0]

    @property
    def effective(self) -> float:
        """Mean imbalance of the target under the engine's dispatch rule."""
        return self._by_rule[1]

    @cached_property
    def _by_rule(self) -> tuple[float, float]:
        return booked_and_effective(self.problem, self.target)

    @cached_property
    def by_phase(self) -> tuple[PhaseBalance, ...]:
        """Imbalance of each phase by the shares of base and target; one entry for a single phase.

        A KEEP has the base as its target.
        """
        pair = [
            imbalance(self.problem.work, it, self.topology).mean(axis=1)
            for it in (self.base, self.target)
        ]
        before, after = pair
        return tuple(
            PhaseBalance(
                self.problem.phases[part[0]], float(before[part].mean()), float(after[part].mean())
            )
            for part in self.problem.parts
        )

    @cached_property
    def crossing(self) -> tuple[float, float]:
        """Part of the tokens that crosses nodes, before and after; mean over layers."""
        before, after = (crossing(self.problem, it).mean() for it in (self.base, self.target))
        return float(before), float(after)

    @cached_property
    def lower_bound(self) -> NDArray[np.float64]:
        """[L] lower bound of the cost of any placement; see ``eplb.measure.bounds``."""
        return bound_of(self.problem)

    @cached_property
    def gap(self) -> NDArray[np.float64]:
        """[L] relative distance of the planned placement above the lower bound; 0 is optimal."""
        return np.asarray(self.after_per_layer / self.lower_bound - 1.0)

    def explain(self, layer: int, expert: int) -> Explanation:
        """Explain why an expert has its replicas, why on these ranks, and which moves it needs.

        ``str()`` of the result gives text, ``to_dict()`` JSON.

        Raises:
            ConfigError: no such layer or expert.
        """
        return explain(self, layer, expert)

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
        count = Counter(link_of(move, self.topology) for move in self.moves)
        return {link: count[link] * self.expert_bytes for link in LINKS}

    @cached_property
    def hash(self) -> str:
        """Hex digest: two plans with one hash lead from the same base to the same target."""
        digest = hashlib.blake2b(digest_size=16)
        for placement in (self.base, self.target):
            digest.update(f"{placement.generation} {placement.hash} ".encode())
        return digest.hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The plan without its placements as JSON-ready values."""
        return {
            "decision": self.decision.value,
            "reason": self.reason,
            "policy": self.policy,
            "objective": self.problem.objective,
            "base_generation": self.base_generation,
            "target_generation": self.target.generation,
            "before": finite(self.before),
            "after": self.after,
            "dispatch": self.problem.dispatch.value,
            "booked": finite(self.booked),
            "effective": finite(self.effective),
            "lost": self.lost,
            "before_per_layer": [finite(score) for score in self.before_per_layer.tolist()],
            "after_per_layer": self.after_per_layer.tolist(),
            "lower_bound": self.lower_bound.tolist(),
            "gap": self.gap.tolist(),
            "num_moves": self.num_moves,
            "bytes_by_link": self.bytes_by_link,
            "curve": [list(point) for point in self.curve],
            "hash": self.hash,
        }


def lost_tokens(problem: Problem, placement: Placement) -> float:
    """Part of the work, over layers and windows, of experts without a live slot."""
    _, uncovered = live_shares(placement, problem.topology)
    total = float(problem.work.sum())
    return float((problem.work * uncovered).sum()) / total if total else 0.0
