"""Every format by name: how it is detected, read and written.

A format is detected by the name and the structure of a file; of an array, by its values too
(``intake``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from eplb.core.bounded_json import decode_json
from eplb.errors import ConfigError, HistoryError
from telemetry import file_of
from telemetry.formats import own, routing
from telemetry.formats.bounded import (
    MAGIC,
    MAX_TEXT_BYTES,
    check_regular,
    read_arrays,
    read_json,
    read_npy,
    reading,
)
from telemetry.formats.engines import ascend, lmdeploy, omni, sglang, trtllm, vllm
from telemetry.formats.intake import accept, compare, join, order_of, reading_of
from telemetry.formats.torch_file import load_torch
from telemetry.formats.types import Layers, LoadFile, PlacementFile, ReadOptions
from telemetry.state.store import names_store
from telemetry.written_files import write_atomically

Found = LoadFile | PlacementFile
STORE_SUFFIXES = {".sqlite", ".db"}
ARRAY_SUFFIXES = {".npy", ".pt", ".pth"}
SUFFIXES = ARRAY_SUFFIXES | {".json", ".jsonl", ".csv", ".npz", ".bin", ".raw", ".b64"}
FOLDERS = {"trtllm-statistics", "eplb-trace", "ultra-ep"}  # whose files are no loads alone
ONE_DUMP = "meta_info.json, manifest.json, or files of load of one kind"
MOST_STEPS = 4096  # windows of a file, before those of its folder are summed


@dataclass(frozen=True, eq=False)
class WriteOptions:
    """What a writer may need beside what is written."""

    num_ranks: int | None = None
    num_hidden: int | None = None  # layers of the model, dense ones included
    current: PlacementFile | None = None  # the map that serves
    layer_updates_per_iter: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)


LOADS: dict[str, Callable[[Path, ReadOptions], LoadFile]] = {
    "sglang-counts": sglang.read_counts,
    "sglang-routing": lambda path, options: routing.read_sglang([path], options),
    "vllm-load": vllm.read_load,
    "trtllm-statistics": trtllm.read_statistics,
    "lmdeploy": lmdeploy.read_counts,
    "routing": routing.read_npz,
    "npz": own.read_npz,
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
# Of what an .npy file or torch.save holds, which is loaded once: its kind is known only then.
VALUES: dict[str, Callable[[Any, Path, ReadOptions], Found]] = {
    "sglang-dump": sglang.of_dump,
    "sglang": sglang.of_location,
    "vllm-routing": routing.of_vllm,
    "ascend-tensor": own.of_array,
    "lmdeploy": lmdeploy.of_counts,
    "omni": omni.of_pattern,
    "expert-map": omni.of_map,
    "npy": own.of_array,
}
FORMATS = sorted({*LOADS, *PLACEMENTS, *VALUES})
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
        return accept(own.read_store(place, options), "store", options)
    path = file_of(place) or Path(place)
    if name is not None and name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}, expected one of: {', '.join(FORMATS)}")
    as_what = f"a whole file of format {name}" if name else "a whole file of load or a placement"
    with reading(path, as_what):
        if not path.exists():
            raise FileNotFoundError
        if path.is_dir() and (name := name or _format_of_folder(path)) not in FOLDERS:
            return _accepted_folder(path, options, name)
    with reading(path, as_what):
        known_name, found = _read_file(path, options, name)
        return accept(found, known_name, options)


def read_dump(paths: list[Path], options: ReadOptions) -> LoadFile:
    """Read the files of all ranks of one dump of SGLang's recorder."""
    with reading(paths[0], "a dump"):
        found = accept(sglang.read_rank_files(paths, options), "sglang-dump", options)
    assert isinstance(found, LoadFile), "as it was given"
    return found


def _read_file(path: Path, options: ReadOptions, name: str | None) -> tuple[str, Found]:
    """The format of a file, and what it holds as the format defines it."""
    if path.is_file() and (name in VALUES or (name is None and path.suffix in ARRAY_SUFFIXES)):
        value = _array_or_torch(path)
        if value is not None:
            kind = name or _format_of_value(value, path, options)
            return kind, VALUES[kind](value, path, options)
    kind = name or _format_of(path)
    if kind not in LOADS | PLACEMENTS:
        raise HistoryError(f"no array and no file of torch.save, expected {kind}")
    return kind, (LOADS | PLACEMENTS)[kind](path, options)


def _accepted_folder(path: Path, options: ReadOptions, name: str | None) -> Found:
    """A folder of files of one kind."""
    every = [one for one in sorted(path.iterdir(), key=order_of) if not one.name.startswith(".")]
    paths = [one for one in every if one.suffix.lower() in SUFFIXES and one.is_file()]
    if not paths:
        raise HistoryError(f"{len(every)} files, none of a known kind, expected {ONE_DUMP}")
    unread = [one.name for one in every if one not in paths]
    notes = (f"{len(unread)} files are not read: {', '.join(unread[:4])}",) if unread else ()
    kind, found = _read_folder(paths, options, name)
    found = replace(found, notes=(*found.notes, *notes))
    return accept(found, kind, options)


def _read_folder(paths: list[Path], options: ReadOptions, name: str | None) -> tuple[str, LoadFile]:
    whole = replace(options, max_windows=MOST_STEPS)
    if all(sglang.DUMP_FILE.fullmatch(one.name) for one in paths):
        dumps, notes = sglang.dumps_in(paths, strict=options.strict)
        parts = [
            sglang.read_rank_files(files, whole) if len(files) > 1 else _load_of(files[0], whole)[1]
            for files in dumps
        ]
        joined = join([str(number) for number in range(len(parts))], parts, strict=options.strict)
        found = joined if len(parts) > 1 else parts[0]
        return "sglang-dump", replace(found, notes=(*found.notes, *notes))
    kinds = {one.suffix.lower() for one in paths}
    if kinds == {".csv"} and (summed := own.read_long(paths, options)) is not None:
        return "csv", summed
    if kinds <= {".bin", ".raw", ".b64"}:
        return "sglang-routing", routing.read_sglang(paths, options)
    if (
        kinds == {".npy"}
        and (name or _format_of_value(read_npy(paths[0]), paths[0], options)) == "vllm-routing"
    ):
        ids, _ = routing.read_vllm_requests(paths)
        return "vllm-routing", routing.of_vllm(ids.transpose(1, 0, 2), paths[0], options)
    read_parts = [_load_of(one, whole, name or None) for one in paths]
    for one, (kind, _) in zip(paths, read_parts, strict=True):
        if kind != read_parts[0][0]:
            raise HistoryError(
                f"{one.name} is {kind}, {paths[0].name} is {read_parts[0][0]}, expected files of "
                "one kind"
            )
    kind, parts = read_parts[0][0], [part for _, part in read_parts]
    if kind == "lmdeploy":
        parts.sort(key=lambda part: int(part.history.last_step[0]))
        steps = [f"step {part.history.last_step[0]}" for part in parts]
        return kind, lmdeploy.differences(join(steps, parts, strict=options.strict))
    return kind, join([one.name for one in paths], parts, strict=options.strict)


def _load_of(path: Path, options: ReadOptions, name: str | None = None) -> tuple[str, LoadFile]:
    with reading(path, "load"):
        kind, found = _read_file(path, options, name)
        if not isinstance(found, LoadFile):
            raise HistoryError(f"a placement, expected load: give {path.name} alone")
    return kind, found


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
    _compare_written(file, options)
    data, notes = PLACEMENT_WRITERS[name](file, options)
    if name != "eplb" and _has_uneven_shares(file):
        notes = (*notes, "shares of replicas are lost: the engine splits by its own rule")
    return data, notes


def write_load(file: LoadFile, name: str, path: Path, options: WriteOptions) -> tuple[str, ...]:
    """Write load in a format, and return what is lost.

    Raises:
        ConfigError: an unknown format, or the file cannot be written.
    """
    _compare_written(file, options)
    file = replace(file, num_ranks=file.num_ranks or options.num_ranks)
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


def _compare_written(file: LoadFile | PlacementFile, options: WriteOptions) -> None:
    stated = ReadOptions(num_ranks=options.num_ranks, num_hidden=options.num_hidden)
    compare(stated, num_ranks=file.num_ranks, num_hidden=file.layers.num_hidden)
    if file.layers.axis == "model":
        Layers(file.layers.ids, "model", options.num_hidden)  # checks that all are below


def _has_uneven_shares(file: PlacementFile) -> bool:
    placement = file.placement
    count = np.take_along_axis(
        placement.replica_count, np.maximum(placement.slot_to_expert, 0), axis=1
    )
    is_used = placement.slot_to_expert >= 0
    return not np.allclose(placement.slot_share[is_used], 1.0 / count[is_used])


def _array_or_torch(path: Path) -> Any:
    """What a file of numpy or of torch holds; None: it is neither, by its first bytes."""
    check_regular(path)
    with path.open("rb") as file:
        first = file.read(len(MAGIC))
    if first == MAGIC:
        return read_npy(path)
    return load_torch(path) if path.suffix in ARRAY_SUFFIXES or first[:2] == b"PK" else None


def _format_of_value(value: Any, path: Path, options: ReadOptions) -> str:
    if isinstance(value, np.ndarray):
        kind = reading_of(value, options)
        return "ascend-tensor" if kind == "npy" and path.suffix != ".npy" else kind
    if isinstance(value, dict) and {lmdeploy.COUNTS, lmdeploy.TOTAL} <= value.keys():
        return "lmdeploy"
    if isinstance(value, dict) and sglang.MAP in value:
        return "sglang"
    return "sglang-dump"


def _format_of(path: Path) -> str:
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
    if suffix in (".json", ".jsonl"):
        return _format_of_json(path)
    raise ConfigError(
        f"{path}: the name tells no format, expected --format with one of: {', '.join(FORMATS)}"
    )


def _format_of_folder(path: Path) -> str:
    if (path / "meta_info.json").exists():
        return "trtllm-statistics"
    if (path / own.MANIFEST).exists() and (path / own.COUNTS_FILE).exists():
        return "eplb-trace"
    if any(path.glob("*manifest.json")):
        return "ultra-ep"
    if (store := path / "store.sqlite").exists():
        raise HistoryError(f"the state folder of a deployment, expected its store: {store}")
    return ""


def _format_of_json(path: Path) -> str:
    if path.suffix.lower() == ".jsonl":
        with path.open("rb") as file:
            first = file.readline(vllm.MAX_LINE_BYTES)
        record = decode_json(first, max_bytes=MAX_TEXT_BYTES)
    else:
        record = read_json(path)
    if isinstance(record, list):
        return "lmdeploy" if lmdeploy.FILE.fullmatch(path.name) else "counts"
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
