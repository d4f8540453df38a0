"""What an engine's file cannot express: repaired where the placement stays complete, and reported.

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
from telemetry.formats.types import Layers, PlacementFile, WriteOptions

Notes = tuple[str, ...]
UNKNOWN = {  # what stands in the file of a target, where rows that are numbered so do not tell it
    ("sglang", "ordinal"): "rows of SGLang are all hidden layers",
    ("trtllm", "ordinal"): "layers of TensorRT-LLM have the model's numbers",
    ("trtllm", "hidden"): "layers of TensorRT-LLM have the model's numbers",
    ("vllm", "hidden"): "rows of vLLM are MoE layers alone",
    ("ascend", "hidden"): "entries of vllm-ascend are MoE layers alone",
}


def unknown_layers(layers: Layers, target: str) -> str:
    """Why the file of a target cannot be written for these layers; "": it can."""
    if not (why := UNKNOWN.get((target, layers.axis), "")):
        return ""
    what = "whether a row is a dense layer" if layers.axis == "hidden" else "layer numbers"
    return (
        f"{why}, and the input does not tell {what}: expected --layer-ids, --first-moe-layer or "
        "--model"
    )


def as_target_takes(
    file: PlacementFile, target: str, options: WriteOptions
) -> tuple[PlacementFile, Notes]:
    """The placement as the file of an engine can have it, and what was repaired.

    An empty slot gets the expert with the fewest replicas among those that its rank lacks, the
    lowest first. For vllm-ascend so does the second of two replicas on a rank; and experts that
    stay on a rank keep the slots of the placement that serves.

    Raises:
        ConfigError: the layers or the ranks are not known, or ranks have unlike numbers of slots.
        PlacementError: a rank has more slots than there are experts, or the placement that serves
            has another shape.
    """
    if why := unknown_layers(file.layers, target):
        raise ConfigError(why)
    held, notes = file.placement.slot_to_expert, tuple[str, ...]()
    empty = np.argwhere(held == EMPTY)
    num_ranks, num_slots = options.num_ranks or file.num_ranks, file.placement.num_slots
    if num_ranks is None:
        if target != "sglang" or empty.size:
            raise ConfigError(
                f"a file for {target} has as many slots on each rank, none empty, and the input "
                "does not tell the ranks: expected --ranks"
            )
        return file, ()
    if num_slots % num_ranks:
        raise ConfigError(f"{num_slots} slots on {num_ranks} ranks, expected equally many on each")
    topology = Topology.uniform(1, num_ranks, num_slots // num_ranks)
    if empty.size:
        file = _replaced(file, empty, topology)
        notes = (f"{len(empty)} empty slots are filled with replicas: the format has none",)
    if target == "ascend":
        if (second := _second_replicas(file.placement, topology)).size:
            file = _replaced(file, second, topology)
            note = "second replicas on one rank are replaced: the format has no place for them"
            notes = (*notes, f"{len(second)} {note}")
        if options.current is not None:
            file, further = _kept_in_place(file, options.current, topology)
            notes = (*notes, *further)
    if target in ("ascend", "vllm") and file.layers.axis == "model":
        notes = (*notes, f"rows are MoE layers in order: row 0 is layer {file.layers.ids[0]}")
    return replace(file, num_ranks=num_ranks), notes


def _second_replicas(placement: Placement, topology: Topology) -> NDArray[np.int64]:
    """[n, 2] layer and slot of each replica but the first of an expert on a rank."""
    second = []
    for layer, rank, expert in duplicate_replicas(placement, topology).tolist():
        on_rank = topology.slots_on(rank)
        places = np.flatnonzero(placement.slot_to_expert[layer, on_rank] == expert)
        second += [(layer, slot + on_rank.start) for slot in places[1:]]
    return np.array(second)


def _kept_in_place(
    file: PlacementFile, current: PlacementFile, topology: Topology
) -> tuple[PlacementFile, Notes]:
    held, base = file.placement.slot_to_expert, current.placement.slot_to_expert
    if held.shape != base.shape or file.layers.ids != current.layers.ids:
        raise PlacementError(
            f"the current placement has shape {base.shape}, expected {held.shape} of its layers"
        )
    moved = in_place(held.astype(np.int64), base, topology).astype(np.int32)
    if not (changed := int((moved != held).sum())):
        return file, ()
    note = f"{changed} slots are reordered: experts that stay keep their slots"
    return _with(file, moved), (note,)


def _replaced(file: PlacementFile, slots: NDArray[np.int64], topology: Topology) -> PlacementFile:
    """The placement with other experts in these slots [n, 2], each new to its rank."""
    held = file.placement.slot_to_expert.copy()
    num_experts = file.placement.num_experts
    held[tuple(slots.T)] = EMPTY
    for layer, slot in slots.tolist():
        row, rank = held[layer], int(topology.rank_of_slot[slot])
        count = np.bincount(row[row != EMPTY], minlength=num_experts).astype(np.float64)
        on_rank = row[topology.slots_on(rank)]
        count[on_rank[on_rank != EMPTY]] = np.inf
        if not np.isfinite(count).any():
            raise PlacementError(
                f"layer {layer}: rank {rank} has {len(on_rank)} slots for {num_experts} experts, "
                "expected fewer slots than experts"
            )
        held[layer, slot] = int(count.argmin())
    return _with(file, held)


def _with(file: PlacementFile, held: NDArray[np.int32]) -> PlacementFile:
    placement = Placement(held, file.placement.num_experts, file.placement.generation)
    return replace(file, placement=placement)
