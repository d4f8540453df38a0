"""vllm-ascend: the expert map as JSON, and tables of load.

Entry i of the list is the i-th MoE layer. A device holds an expert once at most, and an expert that
stays on a device must keep its slot there: else the engine reverts the layer without an error.

Source: vllm-ascend 182b75ea, ``eplb_utils.py`` and ``examples/eplb/eplb_strategy.py``.

Shapes:  L MoE layers, E experts, R devices, P slots of all devices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import as_history
from eplb.core.placement import Placement
from eplb.errors import HistoryError
from telemetry.formats.bounded import int_array, member, read_json, whole_number
from telemetry.formats.repairs import filled, kept_in_place, ranks_of, without_duplicates
from telemetry.formats.torch_file import load_torch
from telemetry.formats.types import (
    LoadFile,
    PlacementFile,
    ReadOptions,
    refuse_dense_rows,
    resolve,
    rows_in_order,
)

MAX_LAYERS = 4096


def read_tensor(path: Path, options: ReadOptions) -> LoadFile:
    """Read a tensor ``[layers, experts]`` that ``torch.save`` wrote."""
    return of_tensor(load_torch(path), options)


def of_tensor(tokens: Any, options: ReadOptions) -> LoadFile:
    """The load of a tensor that was read already."""
    if not isinstance(tokens, np.ndarray) or tokens.ndim not in (2, 3):
        shape = getattr(tokens, "shape", type(tokens).__name__)
        raise HistoryError(f"found {shape}, expected a tensor [layers, experts]")
    history = as_history(tokens.astype(np.float64) if tokens.dtype == np.float16 else tokens)
    _, layers, notes = resolve(rows_in_order(history.num_layers), options)
    return LoadFile(history, layers, notes=notes)


def read_map(path: Path, options: ReadOptions) -> PlacementFile:
    """Read an expert map."""
    record = read_json(path)
    count = member(record, "moe_layer_count", int, "the file")
    entries = member(record, "layer_list", list, "the file")
    if whole_number(count, "moe_layer_count", 1, MAX_LAYERS) != len(entries):
        raise HistoryError(f"layer_list has {len(entries)} entries, moe_layer_count is {count}")
    notes: tuple[str, ...] = ()
    tables: list[NDArray[np.int64]] = []
    for row, entry in enumerate(entries):
        devices = member(entry, "device_list", list, f"layer_list[{row}]")
        experts = [
            member(device, "device_expert", list, f"layer_list[{row}] device {place}")
            for place, device in enumerate(devices)
        ]
        table = int_array(experts, 2, f"layer_list[{row}]")
        if tables and table.shape != tables[0].shape:
            raise HistoryError(
                f"layer_list[{row}] has {table.shape[0]} devices x {table.shape[1]} slots, "
                f"expected {tables[0].shape[0]} x {tables[0].shape[1]}"
            )
        if entry.get("layer_id", row) != row:
            notes = ("entries are taken by their place: a layer_id differs from it",)
        tables.append(table)
    held = np.array(tables)
    num_layers, num_devices, each = held.shape
    num_slots = num_devices * each
    if held.min() < 0 or held.max() >= num_slots:
        raise HistoryError(f"experts {held.min()}..{held.max()} in {num_slots} slots")
    num_experts = options.experts_in(num_slots, int(held.max()))
    flat = held.reshape(num_layers, num_slots).astype(np.int32)
    rows, layers, further = resolve(rows_in_order(num_layers), options)
    placement = Placement(flat[rows], num_experts)
    return PlacementFile(placement, layers, num_devices, notes=(*notes, *further))


def write_map(
    file: PlacementFile, num_ranks: int | None, current: PlacementFile | None = None
) -> tuple[bytes, tuple[str, ...]]:
    """Write an expert map that passes the engine's checks.

    Args:
        file: what is written, repaired where the format cannot express it.
        num_ranks: devices.
        current: the map that serves; experts that stay on a device keep their slots.
    """
    devices = ranks_of(file, num_ranks, "the map lists devices")
    refuse_dense_rows(file.layers, "entries of vllm-ascend")
    file, notes = filled(file, devices)
    file, further = without_duplicates(file, devices)
    notes = (*notes, *further)
    if current is not None:
        file, further = kept_in_place(file, current, devices)
        notes = (*notes, *further)
    if file.layers.axis == "model":
        notes = (*notes, f"entries are MoE layers in order: entry 0 is layer {file.layers.ids[0]}")
    tables = file.placement.slot_to_expert.reshape(file.placement.num_layers, devices, -1)
    entries: list[dict[str, Any]] = [
        {
            "layer_id": row,
            "device_count": devices,
            "device_list": [
                {"device_id": device, "device_expert": experts}
                for device, experts in enumerate(table)
            ],
        }
        for row, table in enumerate(tables.tolist())
    ]
    text = ",\n  ".join(map(json.dumps, entries))
    record = f'{{"moe_layer_count": {len(entries)}, "layer_list": [\n  {text}\n]}}\n'
    return record.encode(), notes
