"""The figures of an explanation for one expert or one layer, and its sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from eplb.migration.build import Move


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
