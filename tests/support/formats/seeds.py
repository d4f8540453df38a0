"""A small valid input of each format, written here from the formats' descriptions.

None is written by the project's own writers, the formats of this project excepted.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from eplb.core.load import LoadHistory
from eplb.core.placement import Placement
from telemetry.formats import own
from telemetry.formats.types import (
    LoadFile,
    PlacementFile,
    ReadOptions,
    WriteOptions,
    rows_in_order,
)

Files = Mapping[str, bytes]  # "" is the file itself; names: a folder
STEPS = np.array([[[5, 1, 0, 2], [3, 3, 1, 1]], [[4, 2, 1, 1], [2, 4, 2, 0]]], dtype=np.int32)
MAP = np.array([[0, 1, 2, 3, 0, 1], [0, 2, 0, 1, 0, 3]], dtype=np.int64)
PHYSICAL = np.array([[3, 1, 0, 2, 2, 0], [1, 1, 2, 3, 1, 0]], dtype=np.int32)
ROUTING = np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[0, 3], [1, 2]], [[2, 0], [0, 1]]])
RAW = ReadOptions(num_layers=2, top_k=2)
STORAGE = {"int32": "IntStorage", "int64": "LongStorage", "float32": "FloatStorage"}
STORAGE |= {"float64": "DoubleStorage", "int16": "ShortStorage", "uint8": "ByteStorage"}
PATTERN = np.array([[[1, 1, 0, 1], [1, 0, 1, 1]], [[0, 1, 1, 1], [0, 1, 1, 1]]])
SLOTS = np.array([[[0, 1, -1, -1], [-1, -1, 1, 0]], [[-1, 0, 1, -1], [1, -1, -1, 0]]])
LONG = b"layer_id,expert_id,count\n" + b"".join(
    b"%d,%d,%d\n" % (layer + 3, expert, count)
    for layer, row in enumerate(STEPS[0])
    for expert, count in enumerate(row)
)
LMDEPLOY = {
    "counts": STEPS[0].astype(np.int64),
    "balancedness": np.array([0.4, 0.6], dtype=np.float32),
    "total_tokens": STEPS[0].sum(axis=1).astype(np.int64),
    "step": 9,
    "rank": 0,
}


class Program:
    """A program of protocol 2, as ``torch.save`` writes it."""

    def __init__(self) -> None:
        self.tensors: list[bytes] = []

    def value(self, value: Any) -> bytes:
        """Instructions that push a value."""
        if value is None or isinstance(value, bool):
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, str):
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        if isinstance(value, list):
            return b"](" + b"".join(map(self.value, value)) + b"e"
        if isinstance(value, dict):
            pairs = b"".join(self.value(key) + self.value(one) for key, one in value.items())
            return b"}(" + pairs + b"u"
        return self.tensor(value)

    def tensor(self, array: np.ndarray[Any, Any]) -> bytes:
        """Instructions that push a tensor over a new storage."""
        key = str(len(self.tensors))
        array = np.ascontiguousarray(array)
        self.tensors.append(array.tobytes())
        kind = f"ctorch\n{STORAGE[array.dtype.name]}\n".encode()
        persistent = self.value("storage") + kind + self.value(key) + self.value("cpu")
        strides = np.array(array.strides) // array.itemsize
        shape, steps = (
            b"(" + b"".join(self.value(int(one)) for one in axes) + b"t"
            for axes in (array.shape, strides)
        )
        storage = b"(" + persistent + self.value(array.size) + b"tQ"
        hooks = b"ccollections\nOrderedDict\n)R"
        inner = b"(" + storage + self.value(0) + shape + steps + b"\x89" + hooks + b"t"
        return b"ctorch._utils\n_rebuild_tensor_v2\n" + inner + b"R"


def torch_file(value: Any) -> bytes:
    """The archive of ``torch.save``, without torch."""
    program = Program()
    code = b"\x80\x02" + program.value(value) + b"."
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("dump/data.pkl", code)
        archive.writestr("dump/byteorder", b"little")
        for key, data in enumerate(program.tensors):
            archive.writestr(f"dump/data/{key}", data)
        archive.writestr("dump/version", b"3\n")
    return buffer.getvalue()


def per_pass(rank: int) -> dict[str, Any]:
    """One rank's part of a dump by pass."""
    return {
        "records": [
            {
                "forward_pass_id": number,
                "rank": rank,
                "gatherer_key": "primary",
                "global_physical_count": PHYSICAL,
            }
            for number in (7, 8)
        ],
        "last_physical_to_logical_map": MAP,
    }


def per_token() -> dict[str, Any]:
    """One rank's dump by token, of a release without counts."""
    record = {
        "forward_pass_id": 7,
        "rank": 0,
        "gatherer_key": "primary",
        "input_ids": [5, 6],
        "positions": [0, 1],
        "extend_seq_lens": [2],
        "forward_mode": 1,
        "topk_ids_of_layer": np.array([[[0, 4, -1]] * 2, [[5, 1, -1]] * 2], dtype=np.int32),
        "misc_objects": [{"layer_id": 0, "num_tokens_per_rank": [2, 0]}],
    }
    return {"records": [record], "last_physical_to_logical_map": MAP}


def npy(array: np.ndarray[Any, Any]) -> bytes:
    """A ``.npy`` file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npz(**arrays: Any) -> bytes:
    """A ``.npz`` file."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _lines(*records: Mapping[str, Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


VLLM_META = {
    "record_type": "eplb_load_meta",
    "version": 1,
    "model": "m",
    "num_ranks": 2,
    "num_groups": 1,
    "num_nodes": 1,
    "num_layers": 2,
    "num_redundant_experts": 0,
}
VLLM_STATS = {
    "record_type": "eplb_load_stats",
    "version": 1,
    "step": 7,
    "num_ranks": 2,
    "expert_load": [[10, 1, 5, 2], [2, 8, 5, 3]],
    "p2l_map": [[0, 1, 2, 3], [0, 1, 2, 3]],
}
VLLM_MAPPING = {
    "record_type": "eplb_initial_mapping",
    "version": 1,
    "num_redundant_experts": 1,
    "num_slots": 4,
    "initial_global_assignments": {"0": [0, 1, 2, 0], "1": [1, 2, 0, 1]},
}
TRT_YAML = b"""\
initial_global_assignments:
  3: [0, 1, 2, 3, 4, 5, 6, 7, 0, 3]
  4: [7, 1, 2, 3, 4, 5, 6, 0, 7, 7]
layer_updates_per_iter: 0
num_slots: 10
"""
ASCEND_JSON = b"""\
{"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 2, "device_list": [
  {"device_id": 0, "device_expert": [7,2,0,3,5]}, {"device_id": 1, "device_expert": [6,1,4,7,2]}]}]}
"""
TRT_COUNTS = {
    "100_3": np.array([4, 2, 0, 1, 3, 2, 2, 2]),
    "100_4": np.array([1, 1, 1, 1, 2, 2, 4, 4]),
    "101_3": np.array([0, 2, 4, 1, 3, 2, 2, 2]),
    "101_4": np.array([2, 2, 2, 2, 2, 2, 2, 2]),
}


def write_seed(folder: Path, files: Files) -> str:
    """Write a format's files; return the path that a reader gets."""
    (name, data), *rest = files.items()
    if not rest and name.startswith("."):
        (folder / f"in{name}").write_bytes(data)
        return str(folder / f"in{name}")
    for part, held in files.items():
        (folder / part).write_bytes(held)
    return str(folder)


def seeds() -> dict[str, tuple[Files, ReadOptions]]:
    """Format, its files and what is stated about them."""
    none = ReadOptions()
    counts = LoadFile(LoadHistory(STEPS.astype(np.int64)), rows_in_order(2))
    placement = PlacementFile(Placement(MAP.astype(np.int32), 4), rows_in_order(2), 3)
    manifest = {"schema": "ultra_ep_trace_v1", "chunks": 1, "trace_id": "t"}
    chunk = npz(
        metadata=np.asarray("{}"),
        layers=np.array([3, 4, 3, 4], dtype=np.int32),
        virtual_layers=np.array([0, 1, 0, 1], dtype=np.int32),
        microbatches=np.array([0, 0, 1, 1]),
        pre_logical_loads=STEPS.reshape(4, 4),
        post_physical_loads=STEPS.reshape(4, 4),
    )
    stat = {"rank": 0, "logical_count": STEPS, "average_utilization_rate_over_window": None}
    rank_files = {
        f"expert_distribution_recorder_1.5_{rank}.pt": torch_file(per_pass(rank)) for rank in (0, 1)
    }
    ranks = {f"rank{rank}.safetensors": save(TRT_COUNTS) for rank in (0, 1)}
    meta = {"meta_info.json": b'{"num_experts": 8, "num_experts_per_token": 2}'}
    raw = ROUTING.astype("<i4").tobytes()
    return {
        "sglang-dump": ({".pt": torch_file(stat)}, none),
        "sglang-dump/per_pass": (rank_files, none),
        "sglang-dump/per_token": ({".pt": torch_file(per_token())}, none),
        "sglang": ({".json": b'{"physical_to_logical_map": [[0,1,2,3,0,1],[0,2,0,1,0,3]]}'}, none),
        "sglang-counts": ({".json": b'{"logical_count": [[5,1,0,2],[3,3,1,1]]}'}, none),
        "sglang-routing": ({".bin": raw}, RAW),
        "vllm-load": ({".jsonl": _lines(VLLM_META, VLLM_STATS)}, none),
        "vllm": ({".json": _lines(VLLM_MAPPING)}, none),
        "vllm-routing": ({".npy": npy(ROUTING.astype(np.int16))}, none),
        "trtllm-statistics": (meta | ranks, none),
        "trtllm": ({".yaml": TRT_YAML}, none),
        "ascend": ({".json": ASCEND_JSON}, none),
        "ascend-tensor": ({".pt": torch_file(STEPS[0].astype(np.int64))}, none),
        "lmdeploy": ({".pt": torch_file(LMDEPLOY)}, none),
        "omni": ({".npy": npy(PATTERN)}, none),
        "expert-map": ({".pt": torch_file(SLOTS)}, none),
        "csv/long": ({".csv": LONG}, none),
        "ultra-ep": ({"t.manifest.json": json.dumps(manifest).encode(), "c.npz": chunk}, none),
        "counts": ({".json": b'{"counts": [[5,1],[3,3]], "layer_ids": [3, 4]}'}, none),
        "npy": ({".npy": npy(STEPS)}, none),
        "npz": ({".npz": npz(load=STEPS, layer_ids=np.array([3, 4]))}, none),
        "routing": (
            {".npz": npz(expert_ids=np.tile(ROUTING.transpose(1, 0, 2), (1, 8, 1)))},
            ReadOptions(window_tokens=8),
        ),
        "csv": ({".csv": b"layer,0,1\n3,5,1\n4,2,4\n"}, none),
        "eplb": ({".json": own.write_placement(placement, WriteOptions())[0]}, none),
        "eplb-trace": (own.write_trace(counts, WriteOptions(provenance={"source": "x"})), none),
    }
