"""Explains a plan: why an expert has its replica count, and why on these ranks.

For an operator who sees a busy rank during an incident and must decide whether to trust the plan.
Loads are means over the windows, in units of the mean rank load.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.decision.score import as_dispatched
from eplb.errors import ConfigError
from eplb.measure.balance import imbalance, rank_load
from eplb.migration.transactions import LINKS, Move, Source, link_of


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
        bytes_by_link=_bytes_by_link(plan, moves),
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
        bytes_by_link=_bytes_by_link(plan, view.moves),
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
        fewer = [_imbalance_of(work, _with(held, slot, EMPTY), topology) for slot in mine.tolist()]
    taken = set(topology.rank_of_slot[mine].tolist())
    spare = (held == EMPTY) | (count[np.maximum(held, 0)] > 1)
    room = plan.problem.room[layer]
    for slot in np.flatnonzero(spare & (held != expert)).tolist():
        rank = int(topology.rank_of_slot[slot])
        may_use = topology.alive[rank] and slot - topology.first_slot[rank] < room[rank]
        if may_use and rank not in taken:
            more.append(_imbalance_of(work, _with(held, slot, expert), topology))
    return min(fewer, default=None), min(more, default=None)


def _with(held: NDArray[np.int32], slot: int, expert: int) -> NDArray[np.int32]:
    changed = held.copy()
    changed[slot] = expert
    return changed


def _imbalance_of(work: NDArray[np.float64], held: NDArray[np.int32], topology: Topology) -> float:
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


def _bytes_by_link(plan: Explained, moves: tuple[Move, ...]) -> dict[str, int]:
    links = [link_of(move, plan.topology) for move in moves]
    return {link: links.count(link) * plan.expert_bytes for link in LINKS}


@dataclass(frozen=True)
class RankLoad:
    """The load of one rank before and after the plan, as time in units of the mean rank load."""

    rank: int
    before: float
    after: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.before:.2f} -> {self.after:.2f}"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The explanation of one expert of one layer; ``str()`` gives it as text."""

    layer: int
    expert: int
    num_experts: int
    decision: str  # of the whole plan
    reason: str
    part_of_load: float  # of the layer's tokens
    place: int  # 1 for the layer's hottest expert
    load: float  # of all its replicas together, in units of the mean rank load
    ranks_before: tuple[int, ...]  # of its replicas
    ranks_after: tuple[int, ...]
    shares_after: tuple[float, ...]  # of its tokens, replica by replica
    with_one_less: float | None  # the layer's imbalance with one replica fewer; None: it has one
    with_one_more: float | None  # None: no rank can take one
    rank_loads: tuple[RankLoad, ...]  # of every rank that holds it before or after
    moves: tuple[Move, ...]  # of this expert, or of another expert into one of its slots
    bytes_by_link: dict[str, int]  # of these moves; zeros when no model gave the size
    imbalance_before: float  # of the layer
    imbalance_after: float
    bound: float  # of the layer
    sentences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def with_sentences(self, sentences: Sequence[str]) -> Explanation:
        """The same explanation with its text."""
        return replace(self, sentences=tuple(sentences))

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return _json_ready(self)


@dataclass(frozen=True, kw_only=True)
class LayerExplanation:
    """The changes of a plan to one layer; ``str()`` gives them as text."""

    layer: int
    decision: str  # of the whole plan
    reason: str
    before: float  # imbalance
    after: float
    bound: float
    rank_loads: tuple[RankLoad, ...]  # of every live rank
    busiest_experts: tuple[int, ...]  # of the rank that was busiest, hottest first
    more: tuple[tuple[int, int, int], ...]  # (expert, replicas before, after), hottest first
    fewer: tuple[tuple[int, int, int], ...]
    moves: tuple[Move, ...]
    bytes_by_link: dict[str, int]
    sentences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def with_sentences(self, sentences: Sequence[str]) -> LayerExplanation:
        """The same explanation with its text."""
        return replace(self, sentences=tuple(sentences))

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return _json_ready(self)


def finite(figure: float) -> float | None:
    """A figure for JSON: None for infinity, the imbalance of a placement that cannot serve."""
    return figure if isfinite(figure) else None


def _json_ready(explanation: Explanation | LayerExplanation) -> dict[str, Any]:
    fields = asdict(explanation)
    fields |= {name: finite(it) for name, it in fields.items() if isinstance(it, float)}
    fields["moves"] = [
        {**asdict(move), "source": move.source.name.lower()} for move in explanation.moves
    ]
    return fields


MOST_LISTED = 8  # of anything in one sentence; the rest are counted
EVEN = 0.005  # shares that differ by less are equal


def sentences(
    found: Explanation, topology: Topology, rank_loads: Sequence[RankLoad]
) -> tuple[str, ...]:
    """The sentences of an expert's explanation.

    Args:
        found: the figures.
        topology: speeds, and where slots are.
        rank_loads: of every live rank of the layer.
    """
    moves = [_move_text(move, topology) for move in found.moves]
    return (
        f"Layer {found.layer}, expert {found.expert}: {found.part_of_load:.1%} of the layer's "
        f"tokens, number {found.place} of {found.num_experts} by load; {found.load:.2f} times the "
        "mean load of a rank.",
        _why_so_many(found, topology),
        *_why_there(found, rank_loads),
        f"Load of its ranks: {listed(found.rank_loads)}.",
        f"Moves that touch it: {listed(moves)}{_bytes_text(found.bytes_by_link)}.",
        _of_the_layer(found, found.imbalance_before, found.imbalance_after),
    )


def layer_sentences(found: LayerExplanation) -> tuple[str, ...]:
    """The sentences of a layer's explanation."""
    busiest = max(found.rank_loads, key=lambda at: at.before)
    then = max(found.rank_loads, key=lambda at: at.after)
    hottest = [f"expert {expert}" for expert in found.busiest_experts]
    more, fewer = (
        [f"expert {expert} ({was} -> {will_be})" for expert, was, will_be in changed]
        for changed in (found.more, found.fewer)
    )
    return (
        _of_the_layer(found, found.before, found.after),
        f"Busiest before is rank {busiest.rank} at {busiest.before:.2f}, with {listed(hottest)}; "
        f"busiest after is rank {then.rank} at {then.after:.2f}.",
        f"More replicas: {listed(more)}.",
        f"Fewer replicas: {listed(fewer)}.",
        f"Weights that move: {len(found.moves)}{_bytes_text(found.bytes_by_link)}.",
    )


def _why_so_many(found: Explanation, topology: Topology) -> str:
    before, after = len(found.ranks_before), len(found.ranks_after)
    change = f"{before} -> {after}" if before != after else f"{after}, as before"
    words = [f"Replicas: {change}."]
    alone = found.load / float(topology.rank_speed[topology.alive].max())
    if alone <= 1.0:
        words.append("One is enough: its load is at most the mean of a rank.")
    else:
        least = int(np.ceil(alone - 1e-9))
        words.append(
            f"A single one would load its rank to {alone:.2f} or more: balance needs {least}."
        )
    if found.with_one_less is not None:
        words.append(f"With one fewer the layer would be at {found.with_one_less:.2f}.")
    if found.with_one_more is not None:
        words.append(f"With one more, and nothing else moved, at {found.with_one_more:.2f}.")
    shares = found.shares_after
    if shares and max(shares) - min(shares) > EVEN:
        words.append(f"Shares of its tokens: {listed([f'{share:.0%}' for share in shares])}.")
    return " ".join(words)


def _why_there(found: Explanation, loads: Sequence[RankLoad]) -> list[str]:
    """Ranks that the expert keeps, leaves and gets, with their loads."""
    by_load = sorted(loads, key=lambda at: (at.before, at.rank))
    idle_place = {at.rank: place for place, at in enumerate(by_load, start=1)}
    was = {at.rank: at.before for at in loads}
    before, after = found.ranks_before, found.ranks_after
    words = [f"Ranks before: {listed(before)}; after: {listed(after)}."]
    joined = [
        f"rank {rank} was number {idle_place[rank]} of {len(loads)} from the least busy "
        f"({was[rank]:.2f})"
        for rank in after
        if rank not in before
    ]
    left = [
        f"rank {rank} had load {was[rank]:.2f}" if rank in was else f"rank {rank} is dead"
        for rank in before
        if rank not in after
    ]
    words += [f"Added: {listed(joined)}."] if joined else []
    return words + ([f"Removed: {listed(left)}."] if left else [])


def _move_text(move: Move, topology: Topology) -> str:
    rank_of_slot = topology.rank_of_slot
    to = f"expert {move.expert} to rank {rank_of_slot[move.dst_slot]} (slot {move.dst_slot})"
    if move.source in (Source.SAME_RANK, Source.PEER):
        return f"{to} from rank {rank_of_slot[move.src_slot]} (slot {move.src_slot})"
    return f"{to} from {move.source.name.lower()}"


def _bytes_text(by_link: dict[str, int]) -> str:
    """``; 44.0 MB over the network``; empty where no bytes move."""
    names = {"same_rank": "within a rank", "node": "within a node", "network": "over the network"}
    names |= {"host": "from the host"}
    parts = [f"{size / 1e6:.1f} MB {names[link]}" for link, size in by_link.items() if size]
    return f"; {listed(parts)}" if parts else ""


def _of_the_layer(found: Explanation | LayerExplanation, before: float, after: float) -> str:
    bound = f"the lower bound of any placement in these slots is {found.bound:.2f}"
    if found.decision == "KEEP":
        return (
            f"Layer {found.layer}: imbalance {before:.2f}; {bound}. "
            f"The plan keeps the serving placement: {found.reason}."
        )
    return f"Layer {found.layer}: imbalance {before:.2f} -> {after:.2f}; {bound}."


def listed(things: Sequence[object]) -> str:
    """Text of the first MOST_LISTED things, and the number of the others."""
    if not things:
        return "none"
    words = ", ".join(str(thing) for thing in things[:MOST_LISTED])
    rest = len(things) - MOST_LISTED
    return f"{words} and {rest} more" if rest > 0 else words
