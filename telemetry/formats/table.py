"""Every format by name: how it is detected, read and written.

A format is detected by the name and the structure of a file; of an array, by its values too
(``intake``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from eplb.errors import ConfigError, HistoryError
from telemetry import file_of
from telemetry.formats import own, routing
from telemetry.formats.bounded import (
    MAGIC,
    check_regular,
    read_arrays,
    read_json,
    read_npy,
    reading,
)
from telemetry.formats.engines import ascend, lmdeploy, omni, sglang, trtllm, vllm
from telemetry.formats.intake import accept, compare, join, order_of, reading_of
from telemetry.formats.repairs import as_target_takes
from telemetry.formats.torch_file import load_torch
from telemetry.formats.types import (
    Layers,
    LoadFile,
    PlacementFile,
    ReadOptions,
    WriteOptions,
    Written,
)
from telemetry.state.store import names_store
from telemetry.written_files import write_atomically

Found = LoadFile | PlacementFile
Writer = TypeVar("Writer")
STORE_SUFFIXES = {".sqlite", ".db"}
ARRAY_SUFFIXES = {".npy", ".pt", ".pth"}
RAW_SUFFIXES = {".bin", ".raw", ".b64"}
SUFFIXES = ARRAY_SUFFIXES | RAW_SUFFIXES | {".json", ".jsonl", ".csv", ".npz"}
OF_REQUESTS = {"vllm-routing", "sglang-routing"}  # files of one recording, in order
WHOLE_FOLDERS = {"trtllm-statistics", "eplb-trace", "ultra-ep"}
ONE_DUMP = "meta_info.json, manifest.json, or files of load of one kind"
MOST_STEPS = 4096  # windows of a file, before those of its folder are summed


READERS: dict[str, Callable[[Path, ReadOptions], Found]] = {
    "sglang-routing": lambda path, options: routing.read_raw([path], options),
    "vllm-load": vllm.read_load,
    "trtllm-statistics": trtllm.read_statistics,
    "trtllm": trtllm.read_config,
    "routing": lambda path, options: routing.as_load(
        routing.read_trace(path, options.layout), path, options
    ),
    "npz": own.read_npz,
    "csv": own.read_csv,
    "ultra-ep": own.read_ultra_ep,
    "eplb-trace": own.read_trace,
    "store": lambda path, options: own.read_store(str(path), options),
}
# Of what JSON, an .npy file or torch.save holds, which is loaded once: its kind is known only then.
VALUES: dict[str, Callable[[Any, Path, ReadOptions], Found]] = {
    "sglang-dump": sglang.of_dump,
    "sglang-counts": sglang.of_dump,
    "sglang": sglang.of_location,
    "vllm": vllm.of_mapping,
    "vllm-routing": routing.of_request,
    "ascend": ascend.of_map,
    "ascend-tensor": own.of_array,
    "lmdeploy": lmdeploy.of_counts,
    "omni": omni.of_pattern,
    "expert-map": omni.of_map,
    "npy": own.of_array,
    "counts": own.of_counts,
    "eplb": own.of_placement,
}
KEYS = {  # by which JSON and what torch.save holds are known
    sglang.MAP: "sglang",
    sglang.COUNT: "sglang-dump",
    "records": "sglang-dump",
    "moe_layer_count": "ascend",
    "schema": "eplb",
    "counts": "counts",
}
# Of files that are no loads alone; None: they are, after all.
FOLDERS: dict[str, Callable[[list[Path], ReadOptions], LoadFile | None]] = {
    "csv": own.read_long,
    "sglang-routing": routing.read_raw,
    "vllm-routing": lambda paths, options: routing.as_load(
        routing.read_requests(paths), paths[0], options
    ),
}
FORMATS = sorted({*READERS, *VALUES})
PLACEMENT_WRITERS: dict[str, Callable[[PlacementFile, WriteOptions], Written]] = {
    "sglang": sglang.write_location,
    "vllm": vllm.write_mapping,
    "trtllm": trtllm.write_config,
    "ascend": ascend.write_map,
    "eplb": own.write_placement,
}
LOAD_WRITERS: dict[str, Callable[[LoadFile, WriteOptions], Mapping[str, bytes]]] = {
    "counts": own.write_counts,
    "vllm-load": vllm.write_load,
    "eplb-trace": own.write_trace,
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
        if path.is_dir() and (name := name or _format_of_folder(path)) not in WHOLE_FOLDERS:
            return _read_folder(path, options, name)
        kind, file = read_file(path, options, name)
        return accept(file, kind, options, is_named=name is not None)


def read_file(path: Path, options: ReadOptions, name: str | None = None) -> tuple[str, Found]:
    """The format of a file, and what it holds as the format defines it: rows may be no MoE layers.

    Raises:
        HistoryError, ConfigError, PlacementError: as ``read``.
    """
    with reading(path, f"a whole file of format {name}" if name else "load or a placement"):
        value = _value_in(path, name)
        kind = name or (
            _format_of(path) if value is None else _format_of_value(value, path, options)
        )
        if value is not None and kind in VALUES:
            return kind, VALUES[kind](value, path, options)
        if kind not in READERS:
            raise HistoryError(f"no array, no JSON and no file of torch.save, expected {kind}")
        return kind, READERS[kind](path, options)


def read_files(paths: list[Path], options: ReadOptions, name: str | None = None) -> LoadFile:
    """Read files of one recording, as those of a folder: of ranks, of stages, or in order of time.

    Raises:
        HistoryError, ConfigError: as ``read``, or they are of several kinds.
    """
    with reading(paths[0].parent, "files of load of one kind"):
        kind, file = _joined(paths, options, name)
        accepted = accept(file, kind, options, is_named=name is not None)
    assert isinstance(accepted, LoadFile), "as it was given"
    return accepted


def _read_folder(path: Path, options: ReadOptions, name: str | None) -> LoadFile:
    every = [one for one in sorted(path.iterdir(), key=order_of) if not one.name.startswith(".")]
    paths = [one for one in every if one.suffix.lower() in SUFFIXES and one.is_file()]
    if not paths:
        raise HistoryError(f"{len(every)} files, none of a known kind, expected {ONE_DUMP}")
    unread = [one.name for one in every if one not in paths]
    notes = (f"{len(unread)} files are not read: {', '.join(unread[:4])}",) if unread else ()
    file = read_files(paths, options, name or None)
    return replace(file, notes=(*file.notes, *notes))


def _joined(paths: list[Path], options: ReadOptions, name: str | None) -> tuple[str, LoadFile]:
    whole = replace(options, max_windows=MOST_STEPS)
    if all(sglang.DUMP_FILE.fullmatch(one.name) for one in paths):
        dumps, notes = sglang.dumps_in(paths, strict=options.strict)
        parts = [
            sglang.read_rank_files(files, whole) if len(files) > 1 else _load_of(files[0], whole)[1]
            for files in dumps
        ]
        names = [str(number) for number in range(len(parts))]
        file = join(names, parts, options) if len(parts) > 1 else parts[0]
        return "sglang-dump", replace(file, notes=(*file.notes, *notes))
    kind = name or kind_of(paths[0], options)
    suffixes = {one.suffix.lower() for one in paths}
    if kind in FOLDERS and (len(suffixes) == 1 or suffixes <= RAW_SUFFIXES):
        file_of_all = FOLDERS[kind](paths, options)
        if file_of_all is not None:
            return kind, file_of_all
    parts = []
    for one in paths:
        other, part = _load_of(one, whole, name)
        if other != kind:
            raise HistoryError(
                f"{one.name} is {other}, {paths[0].name} is {kind}, expected files of one kind"
            )
        parts.append(part)
    file = join([one.name for one in paths], parts, options)
    return kind, lmdeploy.differences(file) if kind == "lmdeploy" else file


def _load_of(path: Path, options: ReadOptions, name: str | None = None) -> tuple[str, LoadFile]:
    kind, file = read_file(path, options, name)
    if not isinstance(file, LoadFile):
        raise HistoryError(f"{path} is a placement, expected load: give {path.name} alone")
    return kind, file


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
        ConfigError, PlacementError: as ``placement_bytes``.
    """
    data, notes = placement_bytes(file, name, options)
    write_atomically(path, data)
    return notes


def placement_bytes(file: PlacementFile, name: str, options: WriteOptions) -> Written:
    """Give a placement as the bytes of a format, and what was repaired or is lost.

    Raises:
        ConfigError: an unknown format, or what the format needs is not known.
        PlacementError: the format cannot express it, and no repair can.
    """
    write = _named(PLACEMENT_WRITERS, name, "placements are")
    _compare_written(file, options)
    if name == "eplb":
        return write(file, options)
    repaired, notes = as_target_takes(file, name, options)
    data, further = write(repaired, options)
    if not own.has_even_shares(file.placement):
        further = (*further, "shares of replicas are lost: the engine splits by its own rule")
    return data, (*notes, *further)


def write_load(file: LoadFile, name: str, path: Path, options: WriteOptions) -> tuple[str, ...]:
    """Write load in a format, and return what is lost.

    Raises:
        ConfigError: an unknown format, or the file cannot be written.
    """
    write = _named(LOAD_WRITERS, name, "load is")
    _compare_written(file, options)
    files = write(replace(file, num_ranks=file.num_ranks or options.num_ranks), options)
    if "" not in files:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"{path} cannot be made: {exc.strerror}") from exc
    for part, data in files.items():
        write_atomically(path / part, data)  # the file itself is ""
    return (vllm.ONE_SLOT,) if name == "vllm-load" else ()


def _named(writers: Mapping[str, Writer], name: str, what: str) -> Writer:
    if name not in writers:
        known = ", ".join(sorted(writers))
        raise ConfigError(f"{what} not written as {name!r}, expected one of: {known}")
    return writers[name]


def _compare_written(file: LoadFile | PlacementFile, options: WriteOptions) -> None:
    stated = ReadOptions(num_ranks=options.num_ranks, num_hidden=options.num_hidden)
    compare(stated, num_ranks=file.num_ranks, num_hidden=file.layers.num_hidden)
    if file.layers.axis == "model":
        Layers(file.layers.ids, "model", options.num_hidden)  # checks that all are below


def _value_in(path: Path, name: str | None) -> Any:
    """What a file of JSON, of numpy or of torch holds; None: it is none, or is read otherwise."""
    suffix = path.suffix.lower()
    is_value = name in VALUES if name else suffix in ARRAY_SUFFIXES | {".json", ".jsonl"}
    if not is_value or path.is_dir():
        return None
    check_regular(path)
    with path.open("rb") as file:
        first = file.readline(vllm.MAX_LINE_BYTES)
    if first.startswith(MAGIC):
        return read_npy(path)
    if suffix == ".jsonl" and vllm.MAPPING.encode() not in first:
        return None
    if suffix in ARRAY_SUFFIXES or first[:2] == b"PK":
        return load_torch(path)
    return read_json(path)


def kind_of(path: Path, options: ReadOptions) -> str:
    """The format of a file, by its name and what it holds.

    Raises:
        HistoryError, ConfigError: it is of none, or of one of several.
    """
    with reading(path, "load or a placement"):
        value = _value_in(path, None)
        return _format_of(path) if value is None else _format_of_value(value, path, options)


def _format_of_value(value: Any, path: Path, options: ReadOptions) -> str:
    if isinstance(value, np.ndarray):
        kind = reading_of(value, options)
        return "ascend-tensor" if kind == "npy" and path.suffix != ".npy" else kind
    if isinstance(value, list) and path.suffix not in ARRAY_SUFFIXES:
        return "lmdeploy" if lmdeploy.FILE.fullmatch(path.name) else "counts"
    keys = value if isinstance(value, dict) else {}
    if record_type := keys.get("record_type"):
        return "vllm" if record_type == vllm.MAPPING else "vllm-load"
    if lmdeploy.TOTAL in keys and isinstance(keys.get(lmdeploy.COUNTS), np.ndarray):
        return "lmdeploy"
    for key, kind in KEYS.items():
        if key in keys:
            return "sglang-counts" if isinstance(keys.get(sglang.COUNT), list) else kind
    shown = ", ".join(map(str, keys))[:80] or f"a {type(value).__name__}"
    raise HistoryError(f"found {shown}, expected one of the keys {', '.join(KEYS)}")


def _format_of(path: Path) -> str:
    check_regular(path)
    suffix = path.suffix.lower()
    if suffix in STORE_SUFFIXES:
        return "store"
    if suffix in (".yaml", ".yml", ".csv"):
        return "csv" if suffix == ".csv" else "trtllm"
    if suffix in RAW_SUFFIXES:
        return "sglang-routing"
    if suffix == ".npz":
        _, names = read_arrays(path, ())
        return "routing" if "expert_ids" in names.split(", ") else "npz"
    if suffix == ".jsonl":
        return "vllm-load"
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
