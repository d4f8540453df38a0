"""Readers and writers against literals of each format that no other test here has."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from eplb.core.load import LoadHistory
from eplb.core.placement import Placement
from telemetry.formats.table import (
    WriteOptions,
    read_load,
    read_placement,
    write_load,
    write_placement,
)
from telemetry.formats.types import LoadFile, PlacementFile, ReadOptions, as_layers, rows_in_order
from tests.support.formats.seeds import ASCEND_JSON, npy, npz, torch_file

NONE = ReadOptions()
LOAD = [[5, 1, 0], [3, 3, 1]]  # of layers 3 and 4
HELD = [[0, 1, 2, 0], [2, 1, 0, 1]]
IDS = np.array([[[0, 1], [2, 1]], [[0, 2], [2, 0]]])  # [tokens, layers, top-k]
COUNTED = [[[1, 1, 0], [0, 1, 1]], [[1, 0, 1], [1, 0, 1]]]  # a window of one token each


def saved(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "data", "ids"),
    [
        ("c.json", b'{"counts": [[5, 1, 0], [3, 3, 1]], "layer_ids": [3, 4]}', (3, 4)),
        ("c.json", b"[[5, 1, 0], [3, 3, 1]]", (0, 1)),
        ("c.json", b'{"logical_count": [[0, 0, 0], [5, 1, 0], [3, 3, 1]]}', (1, 2)),
        ("c.npy", npy(np.array(LOAD)), (0, 1)),
        ("c.npz", npz(load=np.array(LOAD), layer_ids=np.array([3, 4])), (3, 4)),
        ("c.pt", torch_file(np.array(LOAD)), (0, 1)),
    ],
    ids=["counts", "counts, bare", "sglang-counts", "npy", "npz", "ascend-tensor"],
)
def test_load_is_read_as_described(
    tmp_path: Path, name: str, data: bytes, ids: tuple[int, ...]
) -> None:
    found = read_load(saved(tmp_path, name, data), NONE)

    assert found.history.tokens.tolist() == [LOAD]
    assert found.layers.ids == ids


@pytest.mark.parametrize(
    ("name", "data", "given"),
    [
        ("r.b64", base64.b64encode(IDS.astype("<i4").tobytes()), {"num_layers": 2, "top_k": 2}),
        ("r.bin", IDS.astype("<i4").tobytes(), {"num_layers": 2, "top_k": 2}),
        ("r.npy", npy(IDS.astype(np.int16)), {}),
        ("r.npz", npz(expert_ids=np.tile(IDS.transpose(1, 0, 2), (1, 8, 1))), {}),
    ],
    ids=["sglang-routing, base64", "sglang-routing", "vllm-routing", "routing"],
)
def test_routing_is_counted_as_described(
    tmp_path: Path, name: str, data: bytes, given: dict[str, Any]
) -> None:
    found = read_load(saved(tmp_path, name, data), ReadOptions(window_tokens=1, **given))

    assert found.history.tokens.tolist()[:2] == COUNTED


def test_sglang_location_is_read_from_json_and_from_a_torch_file(tmp_path: Path) -> None:
    text = b'{"physical_to_logical_map": [[0, 1, 2, 0], [2, 1, 0, 1]]}'
    in_torch = torch_file({"physical_to_logical_map": np.array(HELD)})

    for place in (saved(tmp_path, "l.json", text), saved(tmp_path, "l.pt", in_torch)):
        found = read_placement(place, NONE)
        assert found.placement.slot_to_expert.tolist() == HELD
        assert (found.placement.num_experts, found.layers.axis) == (3, "hidden")


def test_ascend_map_is_written_as_described(tmp_path: Path) -> None:
    held = np.array([[7, 2, 0, 3, 5, 6, 1, 4, 7, 2]], dtype=np.int32)
    file = PlacementFile(Placement(held, 8), rows_in_order(1))
    write_placement(file, "ascend", tmp_path / "m.json", WriteOptions(2))

    assert json.loads((tmp_path / "m.json").read_text()) == json.loads(ASCEND_JSON)


def test_counts_are_written_as_described(tmp_path: Path) -> None:
    file = LoadFile(LoadHistory(np.array([LOAD])), as_layers([3, 4]))
    write_load(file, "counts", tmp_path / "c", WriteOptions())

    expected = {"counts": [LOAD], "layer_ids": [3, 4]}
    assert json.loads((tmp_path / "c").read_text()) == expected


def test_vllm_lines_are_written_as_described(tmp_path: Path) -> None:
    file = LoadFile(LoadHistory(np.array([LOAD])), rows_in_order(2), None, 2, 1, "m")
    write_load(file, "vllm-load", tmp_path / "d.jsonl", WriteOptions())
    meta, stats = map(json.loads, (tmp_path / "d.jsonl").read_text().splitlines())

    both = {"version": 1, "num_ranks": 2}
    sizes = {"num_groups": 1, "num_nodes": 1, "num_layers": 2, "num_redundant_experts": 0}
    assert meta == both | sizes | {"record_type": "eplb_load_meta", "model": "m"}
    counted = {"expert_load": LOAD, "p2l_map": [[0, 1, 2], [0, 1, 2]]}
    assert stats == both | counted | {"record_type": "eplb_load_stats", "step": 0}


def test_own_placement_is_read_and_written_as_described(tmp_path: Path) -> None:
    record = {
        "schema": "eplb-placement/1",
        "model": "m",
        "layer_axis": "model",
        "layer_ids": [3, 4],
        "num_hidden": 5,
        "num_experts": 3,
        "num_ranks": 2,
        "generation": 7,
        "provenance": {"source": "x"},
        "slot_to_expert": HELD,
        "slot_share": [[0.25, 1.0, 1.0, 0.75], [1.0, 0.5, 1.0, 0.5]],
    }
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    whole = record | {"sha256": hashlib.sha256(text.encode()).hexdigest()}
    place = saved(tmp_path, "p.json", json.dumps(whole).encode())

    found = read_placement(place, NONE)
    write_placement(found, "eplb", tmp_path / "o.json", WriteOptions())

    assert found.placement.slot_to_expert.tolist() == HELD
    assert found.placement.slot_share.tolist() == record["slot_share"]
    assert (found.layers.ids, found.num_ranks, found.placement.generation) == ((3, 4), 2, 7)
    assert json.loads((tmp_path / "o.json").read_text()) == whole


def test_own_trace_is_read_and_written_as_described(tmp_path: Path) -> None:
    steps = {"first_step": np.array([10]), "last_step": np.array([19])}
    counts = save({"counts": np.array([LOAD])} | steps)
    manifest = {
        "schema": "eplb-trace/1",
        "model": "m",
        "layer_axis": "model",
        "layer_ids": [3, 4],
        "num_hidden": None,
        "num_experts": 3,
        "num_windows": 1,
        "phase": "decode",
        "num_ranks": 2,
        "num_nodes": 1,
        "missing_ranks": [[]],
        "provenance": {"source": "x"},
        "sha256": hashlib.sha256(counts).hexdigest(),
    }
    (folder := tmp_path / "trace").mkdir()
    saved(folder, "counts.safetensors", counts)
    saved(folder, "manifest.json", json.dumps(manifest).encode())

    found = read_load(str(folder), NONE)
    write_load(found, "eplb-trace", tmp_path / "again", WriteOptions(provenance={"source": "x"}))

    assert found.history.tokens.tolist() == [LOAD]
    assert (found.layers.ids, found.history.phase) == ((3, 4), "decode")
    assert (found.history.first_step.tolist(), found.history.last_step.tolist()) == ([10], [19])
    assert json.loads((tmp_path / "again" / "manifest.json").read_text()) == manifest
    assert (tmp_path / "again" / "counts.safetensors").read_bytes() == counts
