"""Explains a plan: why an expert has its replica count, and why on these ranks.

For an operator who sees a busy rank during an incident and must decide whether to trust the plan.
Loads are means over the windows, in units of the mean rank load.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.dispatch_rules.plans import as_dispatched
from eplb.errors import ConfigError
from eplb.explanation.figures import Explanation, LayerExplanation, RankLoad
from eplb.explanation.wording import layer_sentences, sentences
from eplb.measure.balance import imbalance, rank_load
from eplb.migration.moves import LINKS, Move, link_of


class Explained(Protocol):
    """The properties of a plan (``eplb.decision.outcome.Plan``) that are explained."""

    @property
    def decision(self) -> Enum:
        """MOVE, RESPLIT or KEEP."""

    @property
    def reason(self) -> str:
        """Reason of the decision."""

    @property
    def problem(self) -> Problem:
        """The planning problem."""

    @property
    def topology(self) -> Topology:
        """Ranks and slots."""

    @property
    def base(self) -> Placement:
        """The serving placement."""

    @property
    def target(self) -> Placement:
        """The target placement."""

    @property
    def moves(self) -> Sequence[Move]:
        """Moves from base to target."""

    @property
    def lower_bound(self) -> NDArray[np.float64]:
        """[L] lower bound of the cost of any placement."""

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights."""


def explain(plan: Explained, layer: int, expert: int) -> Explanation:
    """Explain why an expert has its replicas, why on these ranks, and which moves it needs.

    Args:
        plan: any plan, also one that keeps the serving placement.
        layer: as the placement counts, from 0.
        expert: a logical expert.

    Raises:
        ConfigError: no such layer or expert.
    """
    view = _view(plan, layer)
    if not 0 <= expert < len(view.work):
        raise ConfigError(f"expert {expert} of layer {layer}, expected 0..{len(view.work) - 1}")
    load, total = float(view.work[expert]), float(view.work.sum())
    before = _ranks_with(plan.base, layer, expert, plan.topology)
    after = _ranks_with(plan.target, layer, expert, plan.topology)
    freed = set(np.flatnonzero(plan.base.slot_to_expert[layer] == expert).tolist())
    moves = tuple(m for m in view.moves if m.expert == expert or m.dst_slot in freed)
    without, with_more = marginal(plan, layer, expert)
    held = plan.target.slot_to_expert[layer] == expert
    found = Explanation(
        layer=layer,
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
        bytes_by_link=_bytes(plan, moves),
        imbalance_before=view.before,
        imbalance_after=view.after,
        bound=float(plan.lower_bound[layer]),
    )
    return found.with_sentences(sentences(found, plan.topology, view.rank_loads))


def explain_layer(plan: Explained, layer: int) -> LayerExplanation:
    """Explain the changes of a plan to one layer.

    Raises:
        ConfigError: no such layer.
    """
    view = _view(plan, layer)
    was, will_be = plan.base.replica_count[layer], plan.target.replica_count[layer]
    by_heat: list[int] = np.argsort(-view.work, kind="stable").tolist()
    busiest = max(view.rank_loads, key=lambda at: at.before)
    held = plan.base.slot_to_expert[layer, plan.topology.slots_on(busiest.rank)].tolist()
    found = LayerExplanation(
        layer=layer,
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
        bytes_by_link=_bytes(plan, view.moves),
    )
    return found.with_sentences(layer_sentences(found))


def marginal(plan: Explained, layer: int, expert: int) -> tuple[float | None, float | None]:
    """The layer's imbalance with one replica fewer, and with one more, at equal split.

    One fewer empties the slot with the least loss. One more goes into an empty slot, or replaces a
    redundant replica, with the most gain; nothing else moves. None where there is no such change:
    it is the only replica, or every rank has one already.
    """
    topology, held = plan.topology, plan.target.slot_to_expert[layer]
    work = np.ascontiguousarray(plan.problem.scaled[layer])  # [T, E]
    count = plan.target.replica_count[layer]
    mine = np.flatnonzero(held == expert)
    fewer, more = [], []
    if len(mine) > 1:
        fewer = [_imbalance(work, _with(held, slot, EMPTY), topology) for slot in mine.tolist()]
    taken = set(topology.rank_of_slot[mine].tolist())
    spare = (held == EMPTY) | (count[np.maximum(held, 0)] > 1)
    room = plan.problem.room[layer]
    for slot in np.flatnonzero(spare & (held != expert)).tolist():
        rank = int(topology.rank_of_slot[slot])
        may_use = topology.alive[rank] and slot - topology.first_slot[rank] < room[rank]
        if may_use and rank not in taken:
            more.append(_imbalance(work, _with(held, slot, expert), topology))
    return min(fewer, default=None), min(more, default=None)


def _with(held: NDArray[np.int32], slot: int, expert: int) -> NDArray[np.int32]:
    changed = held.copy()
    changed[slot] = expert
    return changed


def _imbalance(work: NDArray[np.float64], held: NDArray[np.int32], topology: Topology) -> float:
    """Imbalance of a layer at equal split, mean over windows of work [T, E]."""
    placement = Placement(held[None], work.shape[1])
    return float(imbalance(work[:, None], placement, topology).mean())


class _View(NamedTuple):
    """One layer of a plan under its load."""

    work: NDArray[np.float64]  # [E] mean over windows, in units of the mean rank load
    rank_loads: tuple[RankLoad, ...]  # live ranks
    before: float  # imbalance
    after: float
    moves: tuple[Move, ...]


def _view(plan: Explained, layer: int) -> _View:
    if not 0 <= layer < plan.base.num_layers:
        raise ConfigError(f"layer {layer}, expected 0..{plan.base.num_layers - 1}")
    problem, topology = plan.problem, plan.topology
    work = problem.scaled.mean(axis=1)  # [L, E]
    pair = tuple(as_dispatched(problem, it) for it in (plan.base, plan.target))
    was, will_be = (rank_load(work, it, topology)[layer] / topology.rank_speed for it in pair)
    before, after = (float(imbalance(problem.work, it, topology)[:, layer].mean()) for it in pair)
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


def _bytes(plan: Explained, moves: tuple[Move, ...]) -> dict[str, int]:
    links = [link_of(move, plan.topology) for move in moves]
    return {link: links.count(link) * plan.expert_bytes for link in LINKS}
