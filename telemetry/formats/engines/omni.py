"""omni-infer's placement patterns, and expert maps of vLLM and vllm-ascend: tables by expert.

    pattern      [devices, layers, experts], 1 where the device holds the expert. The order of slots
                 is not in it: it is that of the experts. Devices may hold different numbers.
    expert map   [layers, ranks, experts] or, of one layer, [ranks, experts]: the expert's slot on
                 the rank, -1 where it has none.

Rows are MoE layers in order.

Source: omni-infer c8bc2bbb, ``omni_placement``; vllm 0.33.0, ``determine_expert_map``.

Shapes:  L MoE layers, R ranks, E experts, C slots of a rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.errors import HistoryError
from telemetry.formats.bounded import whole_array
from telemetry.formats.types import (
    PlacementFile,
    ReadOptions,
    check_cells,
    placement_of,
    rows_in_order,
)


def is_pattern(values: NDArray[Any]) -> bool:
    """Whether an array [R, L, E] is 0 and 1 alone, with a device for each expert of each layer."""
    is_table = values.ndim == 3 and len(values) > 1 and values.size > 0
    return is_table and bool(((values == 0) | (values == 1)).all() and values.any(axis=0).all())


def is_map(values: NDArray[Any]) -> bool:
    """Whether each rank's slots in an array [.., R, E] are 0, 1, 2, ..., and -1 elsewhere."""
    if values.ndim not in (2, 3) or not values.size or values.min() != -1:
        return False
    in_order = np.sort(values, axis=-1)[..., ::-1]
    count = (values >= 0).sum(axis=-1)
    descending = count[..., None] - 1 - np.arange(values.shape[-1])
    return bool((in_order == np.maximum(descending, -1)).all())


def is_map_of_slots(values: NDArray[Any]) -> bool:
    """Whether each layer of an array [L, S] or [L, R, C] has the numbers 0..n - 1, all of them."""
    if values.ndim not in (2, 3) or not values.size or values.min() != 0 or not values.max():
        return False
    rows = values.reshape(len(values), -1)
    num_experts = int(values.max()) + 1
    if num_experts > rows.shape[1] or (rows > 0).sum() < (num_experts - 1) * len(rows):
        return False
    return all(len(np.unique(row)) == num_experts for row in rows)


def of_pattern(values: Any, path: Path, options: ReadOptions) -> PlacementFile:
    """The placement of a pattern that was read already; slots are in the order of experts."""
    table = whole_array(values, (None, None, None), "the pattern", high=1)
    is_placed = table.transpose(1, 0, 2) == 1
    slot = np.where(is_placed, is_placed.cumsum(axis=2) - 1, -1)
    note = "the order of slots is not in a pattern: experts are in order on each device"
    return _placement(slot, options, (note,))


def of_map(values: Any, path: Path, options: ReadOptions) -> PlacementFile:
    """The placement of an expert map that was read already."""
    given = values[None] if getattr(values, "ndim", 0) == 2 else values
    table = whole_array(given, (None, None, None), "the expert map", low=-1, high=2**20)
    if not is_map(table):
        raise HistoryError("slots of a rank, expected 0, 1, 2, ... once each, and -1 elsewhere")
    return _placement(table, options, ())


def _placement(
    slot: NDArray[np.integer], options: ReadOptions, notes: tuple[str, ...]
) -> PlacementFile:
    """From the slots [L, R, E] of experts; slots that a rank has fewer of are empty."""
    num_layers, num_ranks, num_experts = slot.shape
    each = int(slot.max()) + 1
    check_cells("the map", (num_layers, num_ranks, each), slot.nbytes)
    experts = np.full((num_layers, num_ranks, each + 1), -1)  # one more takes what is not there
    layer, rank, expert = np.indices(slot.shape)
    experts[layer, rank, slot] = expert
    experts = experts[:, :, :each]
    if empty := int((experts < 0).sum()):
        notes = (*notes, f"ranks hold different numbers of experts: {empty} slots are empty")
    return placement_of(
        experts.reshape(num_layers, -1),
        rows_in_order(num_layers),
        options,
        is_full=False,
        num_experts=num_experts,
        num_ranks=num_ranks,
        notes=notes,
    )
