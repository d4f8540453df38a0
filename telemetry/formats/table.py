"""Every format by name: how it is detected, read and written.

A format is detected by the name and the structure of a file, and never by the numbers in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eplb.core.bounded_json import decode_json
from eplb.errors import ConfigError, HistoryError
from telemetry import file_of
from telemetry.formats import own, routing
from telemetry.formats.bounded import (
    MAX_TEXT_BYTES,
    check_regular,
    npy_kind,
    read_arrays,
    read_json,
    reading,
    write_atomically,
)
from telemetry.formats.engines import ascend, sglang, trtllm, vllm
from telemetry.formats.torch_file import load_torch
from telemetry.formats.types import LoadFile, PlacementFile, ReadOptions
from telemetry.state.store import names_store

Found = LoadFile | PlacementFile
STORE_SUFFIXES = {".sqlite", ".db"}


@dataclass(frozen=True, eq=False)
class WriteOptions:
    """What a writer may need beside what is written."""

    num_ranks: int | None = None
    num_hidden: int | None = None  # layers of the model, dense ones included
    current: PlacementFile | None = None  # the map that serves
    layer_updates_per_iter: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)


LOADS: dict[str, Callable[[Path, ReadOptions], LoadFile]] = {
    "sglang-dump": sglang.read_dump,
    "sglang-counts": sglang.read_counts,
    "sglang-routing": routing.read_sglang,
    "vllm-load": vllm.read_load,
    "vllm-routing": routing.read_vllm,
    "trtllm-statistics": trtllm.read_statistics,
    "ascend-tensor": ascend.read_tensor,
    "routing": routing.read_npz,
    "npz": own.read_npz,
    "npy": own.read_array,
    "csv": own.read_csv,
    "counts": own.read_counts,
    "ultra-ep": own.read_ultra_ep,
    "eplb-trace": own.read_trace,
    "store": lambda path, options: own.read_store(str(path), options),
}
PLACEMENTS: dict[str, Callable[[Path, ReadOptions], PlacementFile]] = {
    "sglang": sglang.read_location,
    "vllm": vllm.read_mapping,
    "trtllm": trtllm.read_config,
    "ascend": ascend.read_map,
    "eplb": own.read_placement,
}
Written = tuple[bytes, tuple[str, ...]]
PLACEMENT_WRITERS: dict[str, Callable[[PlacementFile, WriteOptions], Written]] = {
    "sglang": lambda it, given: sglang.write_location(it, given.num_ranks, given.num_hidden),
    "vllm": lambda it, given: vllm.write_mapping(it, given.num_ranks),
    "trtllm": lambda it, given: trtllm.write_config(
        it, given.num_ranks, given.layer_updates_per_iter
    ),
    "ascend": lambda it, given: ascend.write_map(it, given.num_ranks, given.current),
    "eplb": lambda it, given: own.write_placement(it),
}
LOAD_WRITERS: dict[str, Callable[[LoadFile], Written]] = {
    "counts": own.write_counts,
    "vllm-load": vllm.write_load,
}


def read(place: str, options: ReadOptions, name: str | None = None) -> Found:
    """Read a file, a folder or a store, whatever it holds.

    Args:
        place: a path, or the URL of a store.
        options: what the user states about it.
        name: of the format; None: detected.

    Raises:
        HistoryError, PlacementError: it is damaged, or holds something else.
        ConfigError: an unknown format, or a statement that is missing or does not fit.
    """
    if names_store(place) and file_of(place) is None:
        return own.read_store(place, options)
    path = file_of(place) or Path(place)
    if name is not None and name not in LOADS | PLACEMENTS:
        known = ", ".join(sorted({*LOADS, *PLACEMENTS}))
        raise ConfigError(f"unknown format {name!r}, expected one of: {known}")
    with reading(path, name or "a file of load or of a placement"):
        if not path.exists():
            raise FileNotFoundError
        if name is None and path.suffix == ".pt" and path.is_file():
            return _read_pt(path, options)
        known_name = name or _format_of(path)
    with reading(path, known_name):
        return (LOADS | PLACEMENTS)[known_name](path, options)


def read_load(place: str, options: ReadOptions, name: str | None = None) -> LoadFile:
    """Read load; see ``read``."""
    found = read(place, options, name)
    if not isinstance(found, LoadFile):
        raise HistoryError(f"{place} holds a placement, expected load")
    return found


def read_placement(place: str, options: ReadOptions, name: str | None = None) -> PlacementFile:
    """Read a placement; see ``read``. Of load with its map, the last map."""
    found = read(place, options, name)
    if isinstance(found, PlacementFile):
        return found
    if found.current is None:
        raise HistoryError(f"{place} holds load without a map, expected a placement")
    return found.current


def write_placement(
    file: PlacementFile, name: str, path: Path, options: WriteOptions
) -> tuple[str, ...]:
    """Write a placement in a format, and return what was repaired or is lost.

    Raises:
        ConfigError: an unknown format, or what the format needs is not known.
        PlacementError: the format cannot express it, and no repair can.
    """
    data, notes = placement_bytes(file, name, options)
    write_atomically(path, data)
    return notes


def placement_bytes(file: PlacementFile, name: str, options: WriteOptions) -> Written:
    """Give a placement as the bytes of a format, and what was repaired or is lost.

    Raises:
        ConfigError, PlacementError: as ``write_placement``.
    """
    if name not in PLACEMENT_WRITERS:
        known = ", ".join(sorted(PLACEMENT_WRITERS))
        raise ConfigError(f"placements are not written as {name!r}, expected one of: {known}")
    data, notes = PLACEMENT_WRITERS[name](file, options)
    if name != "eplb" and _has_uneven_shares(file):
        notes = (*notes, "shares of replicas are lost: the engine splits by its own rule")
    return data, notes


def write_load(file: LoadFile, name: str, path: Path, options: WriteOptions) -> tuple[str, ...]:
    """Write load in a format, and return what is lost.

    Raises:
        ConfigError: an unknown format, or the file cannot be written.
    """
    if name == "eplb-trace":
        files = own.write_trace(file, options.provenance)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"{path} cannot be made: {exc.strerror}") from exc
        for part, data in files.items():
            write_atomically(path / part, data)
        return ()
    if name not in LOAD_WRITERS:
        known = ", ".join(sorted([*LOAD_WRITERS, "eplb-trace"]))
        raise ConfigError(f"load is not written as {name!r}, expected one of: {known}")
    data, notes = LOAD_WRITERS[name](file)
    write_atomically(path, data)
    return notes


def _has_uneven_shares(file: PlacementFile) -> bool:
    placement = file.placement
    count = np.take_along_axis(
        placement.replica_count, np.maximum(placement.slot_to_expert, 0), axis=1
    )
    is_used = placement.slot_to_expert >= 0
    return not np.allclose(placement.slot_share[is_used], 1.0 / count[is_used])


def _read_pt(path: Path, options: ReadOptions) -> Found:
    """A ``.pt`` file is loaded once: its kind is known only then."""
    loaded = load_torch(path)
    if isinstance(loaded, np.ndarray):
        return ascend.of_tensor(loaded, options)
    if isinstance(loaded, dict) and sglang.MAP in loaded:
        return sglang.of_location(loaded, options)
    return sglang.of_dump(loaded, path, options)


def _format_of(path: Path) -> str:
    if path.is_dir():
        return _format_of_folder(path)
    check_regular(path)
    suffix = path.suffix.lower()
    if suffix in STORE_SUFFIXES:
        return "store"
    if suffix in (".yaml", ".yml", ".csv"):
        return "csv" if suffix == ".csv" else "trtllm"
    if suffix in (".bin", ".raw", ".b64"):
        return "sglang-routing"
    if suffix == ".npz":
        _, names = read_arrays(path, ())
        return "routing" if "expert_ids" in names.split(", ") else "npz"
    if suffix == ".npy":
        shape, dtype = npy_kind(path)
        return "vllm-routing" if dtype == np.int16 and len(shape) == 3 else "npy"
    if suffix in (".json", ".jsonl"):
        return _format_of_json(path)
    known = ", ".join(sorted({*LOADS, *PLACEMENTS}))
    raise ConfigError(f"{path}: the name tells no format, expected --format with one of: {known}")


def _format_of_folder(path: Path) -> str:
    if (path / "meta_info.json").exists():
        return "trtllm-statistics"
    if (path / own.MANIFEST).exists() and (path / own.COUNTS_FILE).exists():
        return "eplb-trace"
    if any(path.glob("*manifest.json")):
        return "ultra-ep"
    if any(path.glob("expert_distribution_recorder_*.pt")):
        return "sglang-dump"
    if (store := path / "store.sqlite").exists():
        raise HistoryError(f"the state folder of a deployment, expected its store: {store}")
    raise HistoryError(
        "a folder without meta_info.json, manifest.json or expert_distribution_recorder_*.pt"
    )


def _format_of_json(path: Path) -> str:
    if path.suffix.lower() == ".jsonl":
        with path.open("rb") as file:
            first = file.readline(vllm.MAX_LINE_BYTES)
        record = decode_json(first, max_bytes=MAX_TEXT_BYTES)
    else:
        record = read_json(path)
    if isinstance(record, list):
        return "counts"
    keys = record if isinstance(record, dict) else {}
    if record_type := keys.get("record_type"):
        return "vllm" if record_type == vllm.MAPPING else "vllm-load"
    by_key = {
        sglang.MAP: "sglang",
        sglang.COUNT: "sglang-counts",
        "moe_layer_count": "ascend",
        "schema": "eplb",
        "counts": "counts",
    }
    for key, name in by_key.items():
        if key in keys:
            return name
    raise HistoryError(f"JSON with none of the keys {', '.join([*by_key, 'record_type'])}")
