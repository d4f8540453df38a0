"""Descriptions of placements, and what differs between two, layer by layer.

Shapes:  L MoE layers, S slots, R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.declared import Meaning
from telemetry.state.placements import CommittedPlacement

LEAST_SHARE = 1e-9  # smallest share that counts as changed


@dataclass(frozen=True)
class PlacementLine:
    """One line of the history of placements."""

    generation: int
    time: float
    plan_id: int
    reason: str
    hash: str
    num_replicas: Annotated[list[int], Meaning("[L] slots in use beyond one for each expert")]


@dataclass(frozen=True)
class PlacementAnswer(PlacementLine):
    """A committed placement."""

    num_experts: int
    slot_to_expert: Annotated[list[list[int]], Meaning("[L, S], -1 is an empty slot")]
    slot_share: Annotated[list[list[float]], Meaning("[L, S] part of its expert's tokens")]


def line_of(found: CommittedPlacement) -> PlacementLine:
    """Describe a placement without its slots."""
    kept = found.placement
    in_use = (kept.slot_to_expert >= 0).sum(axis=1)
    replicas = (in_use - kept.num_experts).tolist()
    return PlacementLine(
        kept.generation, found.time, found.plan_id, found.reason, kept.hash, replicas
    )


def answer_of(found: CommittedPlacement) -> PlacementAnswer:
    """Describe a placement with its slots."""
    kept = found.placement
    slots, shares = kept.slot_to_expert.tolist(), kept.slot_share.tolist()
    return PlacementAnswer(
        **vars(line_of(found)),
        num_experts=kept.num_experts,
        slot_to_expert=slots,
        slot_share=shares,
    )


@dataclass(frozen=True)
class RankChange:
    """Experts that one rank gained and lost in a layer."""

    rank: int
    added: Annotated[list[int], Meaning("experts that it did not hold", example=[17])]
    removed: Annotated[list[int], Meaning("experts that it holds no more", example=[4])]


@dataclass(frozen=True)
class ShareChange:
    """An expert that stays on a rank, which gets another part of its tokens."""

    rank: int
    expert: int
    before: Annotated[float, Meaning("part before", example=0.5)]
    after: Annotated[float, Meaning("part after", example=0.25)]


@dataclass(frozen=True)
class LayerDiff:
    """What differs in one layer."""

    layer: Annotated[int, Meaning("the model's layer number")]
    bytes: Annotated[int, Meaning("bytes of the experts that ranks did not hold")]
    ranks: Annotated[list[RankChange], Meaning("ranks with a change alone")]
    shares: list[ShareChange]


@dataclass(frozen=True)
class PlacementDiff:
    """What differs between two placements."""

    base: PlacementLine
    target: PlacementLine
    changed_layers: Annotated[int, Meaning("layers that differ, over all pages")]
    moves: Annotated[int, Meaning("experts on ranks that did not hold them, over all pages")]
    bytes: Annotated[
        int, Meaning("moves x bytes of an expert; so much is read, if it is not cached")
    ]
    layers: list[LayerDiff]
    next: Annotated[int | None, Meaning("give as `after` to continue; null: there are no more")]


def layer_diffs(
    base: Placement, target: Placement, model: ModelShape, topology: Topology
) -> list[LayerDiff]:
    """Compare two placements that the topology can serve; layers that are alike are left out."""
    return [_layer_diff(base, target, model, topology, layer) for layer in _changed(base, target)]


def _layer_diff(
    base: Placement, target: Placement, model: ModelShape, topology: Topology, layer: int
) -> LayerDiff:
    before, after = (_by_rank(one, topology, layer) for one in (base, target))  # [R, E]
    added, removed = (after > -1) & (before < 0), (before > -1) & (after < 0)
    stays = (before > -1) & (after > -1)
    changes = [
        RankChange(
            rank, np.flatnonzero(added[rank]).tolist(), np.flatnonzero(removed[rank]).tolist()
        )
        for rank in np.flatnonzero((added | removed).any(axis=1)).tolist()
    ]
    shares = [
        ShareChange(rank, expert, *(round(float(of[rank, expert]), 6) for of in (before, after)))
        for rank, expert in np.argwhere(stays & (np.abs(after - before) > LEAST_SHARE)).tolist()
    ]
    num_bytes = int(added.sum()) * model.expert_bytes
    return LayerDiff(model.layer_ids[layer], num_bytes, changes, shares)


def _changed(base: Placement, target: Placement) -> list[int]:
    """Layers with a slot of another expert, or another share, overall or of one node's tokens."""
    is_changed = (base.slot_to_expert != target.slot_to_expert).any(axis=1)
    is_changed |= (np.abs(base.slot_share - target.slot_share) > LEAST_SHARE).any(axis=1)
    by_source = [one.source_share for one in (base, target)]
    if any(one is not None for one in by_source):
        # A side without shares per source has the same share from every node.
        of_base = base.slot_share[None] if by_source[0] is None else by_source[0]
        of_target = target.slot_share[None] if by_source[1] is None else by_source[1]
        is_changed |= (np.abs(of_base - of_target) > LEAST_SHARE).any(axis=(0, 2))
    return [int(layer) for layer in np.flatnonzero(is_changed)]


def _by_rank(placement: Placement, topology: Topology, layer: int) -> NDArray[np.float64]:
    """[R, E] part of an expert's tokens that a rank gets; -1: it does not hold the expert."""
    held, share = placement.slot_to_expert[layer], placement.slot_share[layer]
    used = np.flatnonzero(held != EMPTY)
    place = topology.rank_of_slot[used], held[used]
    table = np.full((topology.num_ranks, placement.num_experts), -1.0)
    table[place] = 0.0
    np.add.at(table, place, share[used])
    return table
