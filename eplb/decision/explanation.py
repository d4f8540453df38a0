"""The explanation of a plan for one expert or one layer, as figures and as sentences.

For an operator who sees a busy rank during an incident and must decide whether to trust the plan.
Loads are means over the windows, in units of the mean rank load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import numpy as np

from eplb.core.topology import Topology
from eplb.migration.build import Move, Source

MOST_LISTED = 8  # things in one sentence; the rest are counted
EVEN = 0.005  # shares that differ by less are equal


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

    layer: int  # its number in the model
    expert: int
    num_experts: int
    decision: str  # on the whole plan
    reason: str
    part_of_load: float  # its part of the layer's tokens
    place: int  # 1 for the layer's hottest expert
    load: float  # all its replicas together, in units of the mean rank load
    ranks_before: tuple[int, ...]  # ranks that hold a replica
    ranks_after: tuple[int, ...]
    shares_after: tuple[float, ...]  # replica by replica
    with_one_less: float | None  # the layer's imbalance with one replica fewer; None: it has one
    with_one_more: float | None  # None: no rank can take one
    rank_loads: tuple[RankLoad, ...]  # every rank that holds it before or after
    moves: tuple[Move, ...]  # this expert's, and those of others into its slots
    bytes_by_link: dict[str, int]  # zeros when no model gave the size of an expert
    imbalance_before: float  # the layer's
    imbalance_after: float
    bound: float  # the layer's lower bound
    sentences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return _json_ready(self)


@dataclass(frozen=True, kw_only=True)
class LayerExplanation:
    """The changes of a plan to one layer; ``str()`` gives them as text."""

    layer: int  # its number in the model
    decision: str  # on the whole plan
    reason: str
    before: float  # imbalance
    after: float
    bound: float
    rank_loads: tuple[RankLoad, ...]  # every live rank
    busiest_experts: tuple[int, ...]  # on the rank that was busiest, hottest first
    more: tuple[tuple[int, int, int], ...]  # (expert, replicas before, after), hottest first
    fewer: tuple[tuple[int, int, int], ...]
    moves: tuple[Move, ...]
    bytes_by_link: dict[str, int]
    sentences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.sentences)

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
        {**asdict(move), "layer": explanation.layer, "source": move.source.name.lower()}
        for move in explanation.moves
    ]
    return fields


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
