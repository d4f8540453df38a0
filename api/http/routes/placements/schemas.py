"""Documents of the routes of placements.

Shapes:  L MoE layers, S slots.
"""

from __future__ import annotations

from pydantic import Field

from api.http.schemas import Answer


class PlacementLine(Answer):
    """One line of the history of placements."""

    generation: int
    time: float
    plan_id: int
    reason: str
    hash: str
    num_replicas: list[int] = Field(description="[L] slots in use beyond one for each expert")


class PlacementsPage(Answer):
    """Placements, newest first."""

    placements: list[PlacementLine]
    next: int | None = Field(description="give as `before` to continue; null: there are no more")


class PlacementAnswer(PlacementLine):
    """A committed placement."""

    num_experts: int
    slot_to_expert: list[list[int]] = Field(description="[L, S], -1 is an empty slot")
    slot_share: list[list[float]] = Field(description="[L, S] part of its expert's tokens")


class RankChange(Answer):
    """Experts that one rank gained and lost in a layer."""

    rank: int
    added: list[int] = Field(description="experts that it did not hold", examples=[[17]])
    removed: list[int] = Field(description="experts that it holds no more", examples=[[4]])


class ShareChange(Answer):
    """An expert that stays on a rank, which gets another part of its tokens."""

    rank: int
    expert: int
    before: float = Field(examples=[0.5])
    after: float = Field(examples=[0.25])


class LayerDiff(Answer):
    """What differs in one layer."""

    layer: int = Field(description="index in the placement, from 0")
    layer_id: int = Field(description="as the model numbers it")
    bytes: int = Field(description="of the experts that ranks did not hold")
    ranks: list[RankChange] = Field(description="those with a change alone")
    shares: list[ShareChange]


class PlacementDiff(Answer):
    """What differs between two placements."""

    base: PlacementLine
    target: PlacementLine
    changed_layers: int = Field(description="over all pages, as the next two")
    moves: int = Field(description="experts on ranks that did not hold them")
    bytes: int = Field(description="moves x bytes of an expert; read by this much, if not cached")
    layers: list[LayerDiff]
    next: int | None = Field(description="for `after`, of the next page; null: there is none")
