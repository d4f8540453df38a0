"""What a format cannot express: repaired where the placement stays complete, and reported.

Shapes:  L MoE layers, P slots, R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement, duplicate_replicas
from eplb.core.topology import Topology
from eplb.errors import ConfigError, PlacementError
from eplb.search.relabel import in_place
from telemetry.formats.types import PlacementFile

Notes = tuple[str, ...]


def ranks_of(file: PlacementFile, num_ranks: int | None, why: str) -> int:
    """Number of ranks, as stated or in the file.

    Raises:
        ConfigError: neither, or a number that does not divide the slots.
    """
    known = num_ranks or file.num_ranks
    if known is None:
        raise ConfigError(f"{why}, and the input does not tell the ranks: expected --ranks")
    check_divides(file, known)
    return known


def check_divides(file: PlacementFile, num_ranks: int) -> None:
    """Every engine's file has as many slots on each rank.

    Raises:
        ConfigError: it would not.
    """
    if num_ranks < 1 or file.placement.num_slots % num_ranks:
        raise ConfigError(
            f"{file.placement.num_slots} slots on {num_ranks} ranks, expected equally many on each"
        )


def filled(file: PlacementFile, num_ranks: int | None) -> tuple[PlacementFile, Notes]:
    """The placement with an expert in every slot.

    An empty slot gets the expert with the fewest replicas among those that its rank lacks, the
    lowest first.

    Raises:
        ConfigError: there are empty slots, and the ranks are not known.
    """
    known = num_ranks or file.num_ranks
    if known is not None:
        check_divides(file, known)
    empty = np.argwhere(file.placement.slot_to_expert == EMPTY)
    if not empty.size:
        return file, ()
    held = _replaced(file, empty, ranks_of(file, num_ranks, "empty slots are to be filled"))
    note = f"{len(empty)} empty slots are filled with replicas: the format has no empty slots"
    return _with(file, held), (note,)


def without_duplicates(file: PlacementFile, num_ranks: int) -> tuple[PlacementFile, Notes]:
    """The placement with no expert twice on one rank; as ``filled`` replaces the second one.

    Raises:
        PlacementError: a rank has more slots than there are experts.
    """
    topology = Topology.uniform(1, num_ranks, file.placement.num_slots // num_ranks)
    duplicates = duplicate_replicas(file.placement, topology)
    if not duplicates.size:
        return file, ()
    second = []
    for layer, rank, expert in duplicates.tolist():
        row = file.placement.slot_to_expert[layer]
        on_rank = topology.slots_on(rank)
        second += [
            (layer, slot + on_rank.start) for slot in np.flatnonzero(row[on_rank] == expert)[1:]
        ]
    held = _replaced(file, np.array(second), num_ranks)
    note = (
        f"{len(second)} second replicas on one rank are replaced: the format has no place for them"
    )
    return _with(file, held), (note,)


def kept_in_place(
    file: PlacementFile, current: PlacementFile, num_ranks: int
) -> tuple[PlacementFile, Notes]:
    """The placement with every expert that stays on a rank in the slot that it has now.

    Raises:
        PlacementError: the current placement has another shape.
    """
    held, base = file.placement.slot_to_expert, current.placement.slot_to_expert
    if held.shape != base.shape or file.layers.ids != current.layers.ids:
        raise PlacementError(
            f"the current placement has shape {base.shape}, expected {held.shape} of its layers"
        )
    topology = Topology.uniform(1, num_ranks, file.placement.num_slots // num_ranks)
    moved = in_place(held.astype(np.int64), base, topology).astype(np.int32)
    changed = int((moved != held).sum())
    if not changed:
        return file, ()
    return _with(file, moved), (
        f"{changed} slots are reordered: experts that stay keep their slots",
    )


def _replaced(file: PlacementFile, slots: NDArray[np.int64], num_ranks: int) -> NDArray[np.int32]:
    """[L, P] with other experts in these slots [n, 2], each new to its rank."""
    held = file.placement.slot_to_expert.copy()
    num_experts = file.placement.num_experts
    each = file.placement.num_slots // num_ranks
    for layer, slot in slots.tolist():
        held[layer, slot] = EMPTY
    for layer, slot in slots.tolist():
        row = held[layer]
        count = np.bincount(row[row != EMPTY], minlength=num_experts).astype(np.float64)
        begin = slot // each * each
        on_rank = row[begin : begin + each]
        count[on_rank[on_rank != EMPTY]] = np.inf
        if not np.isfinite(count).any():
            raise PlacementError(
                f"layer {layer}: rank {slot // each} has {each} slots for {num_experts} experts, "
                "expected fewer slots than experts"
            )
        held[layer, slot] = int(count.argmin())
    return held


def _with(file: PlacementFile, held: NDArray[np.int32]) -> PlacementFile:
    placement = Placement(held, file.placement.num_experts, file.placement.generation)
    return replace(file, placement=placement)
