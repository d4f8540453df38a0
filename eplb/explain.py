"""Why an expert has so many replicas and sits where it sits: a plan in plain words with figures.

For a person who looks at a busy rank during an incident and has to decide whether to trust the
plan. Loads are means over the windows, in units of a fair rank's load: 1.00 is the mean.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.balance import imbalance, rank_load
from eplb.errors import ConfigError
from eplb.gate import Decision
from eplb.load import LoadHistory, as_history
from eplb.migration import Move, Source
from eplb.placement import Placement
from eplb.plan import Plan
from eplb.problem import Problem
from eplb.topology import Topology

MOST_LISTED = 8  # of anything in one sentence; the rest are counted


@dataclass(frozen=True)
class RankLoad:
    """One rank's load before and after the plan, by the time it needs for it."""

    rank: int
    before: float
    after: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.before:.2f} -> {self.after:.2f}"


@dataclass(frozen=True)
class Explanation:
    """All that bears on one expert of one layer; ``str()`` says it in words."""

    layer: int
    expert: int
    part_of_load: float  # of the layer's tokens
    place: int  # 1 for the layer's hottest expert
    load: float  # of all its replicas together, in fair ranks' loads
    ranks_before: tuple[int, ...]  # of its replicas
    ranks_after: tuple[int, ...]
    rank_loads: tuple[RankLoad, ...]  # of every rank that holds it before or after
    moves: tuple[Move, ...]  # that bring it somewhere, or put another expert in its place
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.sentences)


@dataclass(frozen=True)
class LayerExplanation:
    """What a plan does to one layer; ``str()`` says it in words."""

    layer: int
    before: float  # imbalance
    after: float
    bound: float
    rank_loads: tuple[RankLoad, ...]  # of every live rank
    more: tuple[int, ...]  # experts that gain replicas, hottest first
    fewer: tuple[int, ...]  # experts that lose replicas, hottest first
    moves: tuple[Move, ...]
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def explain(
    plan: Plan, layer: int, expert: int, *, history: LoadHistory | ArrayLike
) -> Explanation:
    """Say why an expert has its replicas, and why on these ranks.

    Args:
        plan: any plan, also one that keeps what serves.
        layer: as the placement counts, from 0.
        expert: a logical expert.
        history: the load that was planned on.

    Raises:
        ConfigError: no such layer or expert, or a history of another system.
    """
    view = _view(plan, layer, history)
    if not 0 <= expert < len(view.work):
        raise ConfigError(f"expert {expert} of layer {layer}, expected 0..{len(view.work) - 1}")
    load, total = float(view.work[expert]), float(view.work.sum())
    place = 1 + int((view.work > load).sum())
    before = _ranks_with(plan.base, layer, expert, plan.topology)
    after = _ranks_with(plan.target, layer, expert, plan.topology)
    touched = tuple(at for at in view.rank_loads if at.rank in {*before, *after})
    freed = set(np.flatnonzero(plan.base.slot_to_expert[layer] == expert).tolist())
    moves = tuple(m for m in view.moves if m.expert == expert or m.dst_slot in freed)
    part = load / total if total else 0.0
    fastest = float(plan.topology.rank_speed[plan.topology.alive].max())
    sentences = (
        f"Layer {layer}, expert {expert}: {part:.1%} of the layer's tokens, number {place} of "
        f"{len(view.work)}; {load:.2f} times what a rank carries on average.",
        _why_so_many(load, fastest, len(before), len(after)),
        *_why_there(before, after, view.rank_loads),
        f"Load of its ranks: {_listed(touched)}.",
        f"Moves that touch it: {_listed([_in_words(move, plan.topology) for move in moves])}.",
        _of_the_layer(plan, view),
    )
    return Explanation(layer, expert, part, place, load, before, after, touched, moves, sentences)


def explain_layer(plan: Plan, layer: int, *, history: LoadHistory | ArrayLike) -> LayerExplanation:
    """Say what a plan does to a layer, and why.

    Raises:
        ConfigError: no such layer, or a history of another system.
    """
    view = _view(plan, layer, history)
    was, will_be = plan.base.replica_count[layer], plan.target.replica_count[layer]
    by_heat = np.argsort(-view.work, kind="stable")
    more = tuple(by_heat[(will_be > was)[by_heat]].tolist())
    fewer = tuple(by_heat[(will_be < was)[by_heat]].tolist())
    busiest = max(view.rank_loads, key=lambda at: at.before)
    then = max(view.rank_loads, key=lambda at: at.after)
    held = plan.base.slot_to_expert[layer, plan.topology.slots_on(busiest.rank)].tolist()
    hottest = [f"expert {e}" for e in by_heat.tolist() if e in held]
    sentences = (
        _of_the_layer(plan, view),
        f"Busiest before is rank {busiest.rank} at {busiest.before:.2f}, with {_listed(hottest)}; "
        f"busiest after is rank {then.rank} at {then.after:.2f}.",
        f"More replicas: {_listed([f'expert {e} ({was[e]} -> {will_be[e]})' for e in more])}.",
        f"Fewer replicas: {_listed([f'expert {e} ({was[e]} -> {will_be[e]})' for e in fewer])}.",
        f"Weights that move: {len(view.moves)}.",
    )
    bound = float(plan.lower_bound[layer])
    return LayerExplanation(
        layer, view.before, view.after, bound, view.rank_loads, more, fewer, view.moves, sentences
    )


class _View(NamedTuple):
    """One layer of a plan under its load."""

    layer: int
    work: NDArray[np.float64]  # [E] mean over windows, in fair ranks' loads
    rank_loads: tuple[RankLoad, ...]  # live ranks
    before: float  # imbalance
    after: float
    moves: tuple[Move, ...]


def _view(plan: Plan, layer: int, history: LoadHistory | ArrayLike) -> _View:
    # The problem checks that history, placement and topology describe one system.
    problem = Problem(as_history(history), plan.topology, current=plan.base)
    if not 0 <= layer < plan.base.num_layers:
        raise ConfigError(f"layer {layer}, expected 0..{plan.base.num_layers - 1}")
    work = problem.scaled.mean(axis=1)  # [L, E]
    speed = plan.topology.rank_speed
    was, will_be = (
        rank_load(work, placement, plan.topology)[layer] / speed
        for placement in (plan.base, plan.target)
    )
    before, after = (
        float(imbalance(problem.work, placement, plan.topology)[:, layer].mean())
        for placement in (plan.base, plan.target)
    )
    loads = tuple(
        RankLoad(rank, float(was[rank]), float(will_be[rank]))
        for rank in np.flatnonzero(plan.topology.alive).tolist()
    )
    moves = tuple(move for move in plan.moves if move.layer == layer)
    return _View(layer, work[layer], loads, before, after, moves)


def _ranks_with(
    placement: Placement, layer: int, expert: int, topology: Topology
) -> tuple[int, ...]:
    slots = np.flatnonzero(placement.slot_to_expert[layer] == expert)
    return tuple(topology.rank_of_slot[slots].tolist())


def _why_so_many(load: float, fastest: float, before: int, after: int) -> str:
    change = (
        f"Replicas: {before} -> {after}" if before != after else f"Replicas: {after}, as before"
    )
    alone = load / fastest
    if alone <= 1.0:
        return f"{change}. One would do: it fills no rank."
    least = int(np.ceil(alone - 1e-9))
    return (
        f"{change}. One alone would hold its rank at {alone:.2f} or more, so even ranks need "
        f"at least {least}; with {after}, each brings {load / after:.2f} at equal split."
    )


def _why_there(
    before: tuple[int, ...], after: tuple[int, ...], loads: Sequence[RankLoad]
) -> list[str]:
    """Which ranks it keeps, leaves and joins, and how busy those were."""
    by_load = sorted(loads, key=lambda at: (at.before, at.rank))
    idle_place = {at.rank: place for place, at in enumerate(by_load, start=1)}
    was = {at.rank: at.before for at in loads}
    words = [f"Ranks before: {_listed(before)}; after: {_listed(after)}."]
    joined = [
        f"rank {rank} was number {idle_place[rank]} of {len(loads)} from the least busy "
        f"({was[rank]:.2f})"
        for rank in after
        if rank not in before
    ]
    left = [
        f"rank {rank} carried {was[rank]:.2f}" if rank in was else f"rank {rank} is dead"
        for rank in before
        if rank not in after
    ]
    words += [f"New there: {_listed(joined)}."] if joined else []
    return words + ([f"Gone from there: {_listed(left)}."] if left else [])


def _in_words(move: Move, topology: Topology) -> str:
    rank_of_slot = topology.rank_of_slot
    to = f"expert {move.expert} to rank {rank_of_slot[move.dst_slot]} (slot {move.dst_slot})"
    if move.source in (Source.SAME_RANK, Source.PEER):
        return f"{to} from rank {rank_of_slot[move.src_slot]} (slot {move.src_slot})"
    return f"{to} from {move.source.name.lower()}"


def _of_the_layer(plan: Plan, view: _View) -> str:
    bound = f"no equal split of these slots does better than {plan.lower_bound[view.layer]:.2f}"
    if plan.decision is Decision.KEEP:
        return (
            f"Layer {view.layer}: imbalance {view.before:.2f}, and {bound}. "
            f"The plan keeps what serves: {plan.reason}."
        )
    return f"Layer {view.layer}: imbalance {view.before:.2f} -> {view.after:.2f}; {bound}."


def _listed(things: Sequence[object]) -> str:
    if not things:
        return "none"
    words = ", ".join(str(thing) for thing in things[:MOST_LISTED])
    rest = len(things) - MOST_LISTED
    return f"{words} and {rest} more" if rest > 0 else words
