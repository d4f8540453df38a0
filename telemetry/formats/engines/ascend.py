"""vllm-ascend: the expert map as JSON. Its tables of load are tensors [layers, experts].

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

from eplb.errors import HistoryError
from telemetry.formats.bounded import int_array, member, whole_number
from telemetry.formats.types import (
    PlacementFile,
    ReadOptions,
    WriteOptions,
    Written,
    placement_of,
    rows_in_order,
)

MAX_LAYERS = 4096


def of_map(record: Any, path: Path, options: ReadOptions) -> PlacementFile:
    """The placement of an expert map that was read already."""
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
        places = [("layer_id", entry, row)]
        places += [("device_id", device, place) for place, device in enumerate(devices)]
        if wrong := [name for name, named, place in places if named.get(name, place) != place]:
            notes = (f"entries are taken by their place: a {wrong[0]} differs from it",)
        tables.append(table)
    held = np.array(tables)
    num_layers, num_devices, each = held.shape
    flat = held.reshape(num_layers, num_devices * each)
    layers = rows_in_order(num_layers)
    return placement_of(flat, layers, options, num_ranks=num_devices, notes=notes)


def write_map(file: PlacementFile, options: WriteOptions) -> Written:
    """Write an expert map that passes the engine's checks."""
    devices, held = file.num_ranks or 1, file.placement.slot_to_expert
    tables = held.reshape(file.placement.num_layers, devices, -1)
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
    return record.encode(), ()
