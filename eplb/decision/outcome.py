"""The plan: target placement, decision with its reason, moves, and the explanation of each.

Figures are computed on demand.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import whole
from eplb.core.cost import Decision
from eplb.core.load import Phase
from eplb.core.model import position_in
from eplb.core.placement import EMPTY, Placement, moves_per_layer
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.decision.explanation import (
    Explanation,
    LayerExplanation,
    RankLoad,
    finite,
    layer_sentences,
    sentences,
)
from eplb.decision.score import as_dispatched, booked_and_effective, score_of
from eplb.errors import ConfigError
from eplb.measure import bound_of, imbalance, live_shares, rank_load
from eplb.migration.build import LINKS, Move, link_of, moves_between
from eplb.policies.incremental import BalanceCurve
from eplb.shares.traffic import crossing


@dataclass(frozen=True)
class PhaseBalance:
    """Imbalance of one phase's windows, mean over layers."""

    phase: Phase
    before: float  # under the base
    after: float  # under the target


@dataclass(frozen=True, eq=False)
class Plan:
    """The target placement, the decision with its reason, and the moves.

    ``before`` and ``after`` are means over layers of the mean imbalance over the history's windows:
    what the placement would have had then, not a forecast of the next window. With
    ``objective="time"`` they are times, see ``eplb.decision.score.measured``; a price on
    tokens that cross nodes is added, see ``eplb.decision.score.score_of``.
    """

    problem: Problem
    base: Placement  # the serving placement; contiguous when there was none
    target: Placement  # generation + 1 when it moves, else ``base`` itself
    before_per_layer: NDArray[np.float64]  # [L]
    after_per_layer: NDArray[np.float64]  # [L] scores of ``target``: a KEEP's are those before
    proposal: Placement  # what was compared with the base; a KEEP did not take it
    decision: Decision
    reason: str
    curve: BalanceCurve  # (moves, mean score over layers) at equal split
    policy: str
    expected_gain: float = 0.0  # on windows to come; see ``eplb/decision/alternatives.py``

    @property
    def topology(self) -> Topology:
        """The topology that the plan was made for."""
        return self.problem.topology

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights; 0 when no model was given."""
        return self.problem.expert_bytes

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
        """Mean imbalance of the target; for a KEEP, that of the serving placement."""
        return float(self.after_per_layer.mean())

    @cached_property
    def proposed(self) -> float:
        """Mean imbalance of the proposal; of a KEEP, of the rejected placement."""
        return float(score_of(self.problem, self.proposal).mean())

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
        return tuple(
            PhaseBalance(
                self.problem.phases[part[0]],
                *(float(self.problem.mean_of_part(each, part)) for each in pair),
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
        """[L] lower bound of the cost of any placement; see ``eplb.measure``."""
        return bound_of(self.problem)

    @cached_property
    def gap(self) -> NDArray[np.float64]:
        """[L] relative distance of the target above the lower bound; 0 is optimal."""
        return np.asarray(self.after_per_layer / self.lower_bound - 1.0)

    def explain(self, layer: int, expert: int) -> Explanation:
        """Explain why an expert has its replicas, why on these ranks, and which moves it needs.

        As ``eplb.explain``; ``str()`` of the result gives text, ``to_dict()`` JSON.
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
        return self.bytes_of(self.moves)

    def bytes_of(self, moves: Sequence[Move]) -> dict[str, int]:
        """``bytes_by_link`` of some moves."""
        count = Counter(link_of(move, self.topology) for move in moves)
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
            "proposed": self.proposed,
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


def explain(plan: Plan, layer: int, expert: int) -> Explanation:
    """Explain why an expert has its replicas, why on these ranks, and which moves it needs.

    Args:
        plan: any plan, also one that keeps the serving placement.
        layer: its number in the model; without a model, as the placement counts, from 0.
        expert: a logical expert.

    Raises:
        ConfigError: no such layer or expert.
    """
    number, layer = layer, position_in(plan.problem.layer_ids, layer)
    view = _view(plan, layer)
    expert = whole("expert", expert)
    if not 0 <= expert < len(view.work):
        raise ConfigError(f"expert {expert} of layer {number}, expected 0..{len(view.work) - 1}")
    load, total = float(view.work[expert]), float(view.work.sum())
    before = _ranks_with(plan.base, layer, expert, plan.topology)
    after = _ranks_with(plan.target, layer, expert, plan.topology)
    freed = set(np.flatnonzero(plan.base.slot_to_expert[layer] == expert).tolist())
    moves = tuple(m for m in view.moves if m.expert == expert or m.dst_slot in freed)
    without, with_more = marginal(plan, layer, expert)
    held = plan.target.slot_to_expert[layer] == expert
    found = Explanation(
        layer=number,
        expert=expert,
        num_experts=len(view.work),
        decision=plan.decision.value,
        reason=plan.reason,
        part_of_load=load / total if total else 0.0,
        place=1 + int((view.work > load).sum()),
        load=load,
        ranks_before=before,
        ranks_after=after,
        shares_after=tuple(
            as_dispatched(plan.problem, plan.target).slot_share[layer, held].tolist()
        ),
        with_one_less=without,
        with_one_more=with_more,
        rank_loads=tuple(at for at in view.rank_loads if at.rank in {*before, *after}),
        moves=moves,
        bytes_by_link=plan.bytes_of(moves),
        imbalance_before=view.before,
        imbalance_after=view.after,
        bound=float(plan.lower_bound[layer]),
    )
    return replace(found, sentences=sentences(found, plan.topology, view.rank_loads))


def explain_layer(plan: Plan, layer: int) -> LayerExplanation:
    """Explain the changes of a plan to one layer, by its number in the model.

    Raises:
        ConfigError: no such layer.
    """
    number, layer = layer, position_in(plan.problem.layer_ids, layer)
    view = _view(plan, layer)
    was, will_be = plan.base.replica_count[layer], plan.target.replica_count[layer]
    by_heat: list[int] = np.argsort(-view.work, kind="stable").tolist()
    busiest = max(view.rank_loads, key=lambda at: at.before)
    held = plan.base.slot_to_expert[layer, plan.topology.slots_on(busiest.rank)].tolist()
    found = LayerExplanation(
        layer=number,
        decision=plan.decision.value,
        reason=plan.reason,
        before=view.before,
        after=view.after,
        bound=float(plan.lower_bound[layer]),
        rank_loads=view.rank_loads,
        busiest_experts=tuple(e for e in by_heat if e in held),
        more=tuple((e, int(was[e]), int(will_be[e])) for e in by_heat if will_be[e] > was[e]),
        fewer=tuple((e, int(was[e]), int(will_be[e])) for e in by_heat if will_be[e] < was[e]),
        moves=view.moves,
        bytes_by_link=plan.bytes_of(view.moves),
    )
    return replace(found, sentences=layer_sentences(found))


def marginal(plan: Plan, layer: int, expert: int) -> tuple[float | None, float | None]:
    """The layer's imbalance with one replica fewer, and with one more, at equal split.

    One fewer empties the slot with the least loss. One more goes into an empty slot, or replaces a
    redundant replica, with the most gain; nothing else moves. None where there is no such change:
    it is the only replica, or every rank has one already.
    """
    topology, held = plan.topology, plan.target.slot_to_expert[layer]
    count = plan.target.replica_count[layer]
    mine = np.flatnonzero(held == expert)
    fewer, more = [], []
    if len(mine) > 1:
        fewer = [_imbalance_of(plan, layer, _with(held, slot, EMPTY)) for slot in mine.tolist()]
    taken = set(topology.rank_of_slot[mine].tolist())
    spare = (held == EMPTY) | (count[np.maximum(held, 0)] > 1)
    room = plan.problem.room[layer]
    for slot in np.flatnonzero(spare & (held != expert)).tolist():
        rank = int(topology.rank_of_slot[slot])
        may_use = topology.alive[rank] and slot - topology.first_slot[rank] < room[rank]
        if may_use and rank not in taken:
            more.append(_imbalance_of(plan, layer, _with(held, slot, expert)))
    return min(fewer, default=None), min(more, default=None)


def _with(held: NDArray[np.int32], slot: int, expert: int) -> NDArray[np.int32]:
    changed = held.copy()
    changed[slot] = expert
    return changed


def _imbalance_of(plan: Plan, layer: int, held: NDArray[np.int32]) -> float:
    """Imbalance of a layer at equal split of experts by slot [S], mean over windows."""
    problem, placement = plan.problem, Placement(held[None], plan.problem.num_experts)
    windows = imbalance(problem.work[:, layer : layer + 1], placement, plan.topology)
    return float(problem.mean_over_windows(windows)[0])


class _View(NamedTuple):
    """One layer of a plan under its load."""

    work: NDArray[np.float64]  # [E] mean over windows, in units of the mean rank load
    rank_loads: tuple[RankLoad, ...]  # live ranks
    before: float  # imbalance
    after: float
    moves: tuple[Move, ...]


def _view(plan: Plan, layer: int) -> _View:
    problem, topology = plan.problem, plan.topology
    work = problem.mean_scaled
    pair = tuple(as_dispatched(problem, it) for it in (plan.base, plan.target))
    was, will_be = (rank_load(work, it, topology)[layer] / topology.rank_speed for it in pair)
    before, after = (
        float(problem.mean_over_windows(imbalance(problem.work, it, topology)[:, layer]))
        for it in pair
    )
    loads = tuple(
        RankLoad(rank, float(was[rank]), float(will_be[rank]))
        for rank in np.flatnonzero(topology.alive).tolist()
    )
    moves = tuple(move for move in plan.moves if move.layer == layer)
    return _View(work[layer], loads, before, after, moves)


def _ranks_with(
    placement: Placement, layer: int, expert: int, topology: Topology
) -> tuple[int, ...]:
    slots = np.flatnonzero(placement.slot_to_expert[layer] == expert)
    return tuple(topology.rank_of_slot[slots].tolist())
