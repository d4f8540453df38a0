"""Formats of no engine: plain tables of counts, those of this project, and a deployment's store.

    tables             ``.npy``, ``.npz``, ``.csv``, JSON, and the chunks of an UltraEP trace
    eplb-placement/1   JSON: schema, layers, experts by slot, shares, sha256 of all else, provenance
    eplb-trace/1       a folder: manifest.json and counts.safetensors, whose sha256 it names

The last two express all that ``PlacementFile`` and ``LoadFile`` hold, and are read back identical.
Rows of a table are MoE layers in order unless the file numbers them: ``layer_ids`` in JSON and
``.npz``, a column ``layer`` in CSV.

Shapes:  T windows, L MoE layers, E experts, P slots, n records.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from eplb.core.load import LoadHistory, history_of_figures
from eplb.errors import ConfigError, HistoryError, PlacementError, StoreError
from telemetry import file_of, open_store
from telemetry.formats.bounded import (
    MOST_EXACT,
    int_array,
    member,
    read_arrays,
    read_json,
    read_text_bytes,
    to_json,
    whole_array,
    whole_number,
)
from telemetry.formats.types import (
    Axis,
    Layers,
    LoadFile,
    PlacementFile,
    ReadOptions,
    WriteOptions,
    Written,
    as_layers,
    check_cells,
    history_of,
    numbered_layers,
    placement_of,
    whole_steps,
)
from telemetry.load.folder import history
from telemetry.load.reader import RunReader
from telemetry.state.store import StateStore

ULTRA_EP = "ultra_ep_trace_v1"
MAX_CHUNKS = 100_000
WHOLE = re.compile(r"[+]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?")  # 162554.0 and 9e2 too
LONG = {"layer", "expert", "count"}
NAMES = {f"{name}_{end}": name for name in ("layer", "expert") for end in ("id", "idx", "index")}
NAMES |= dict.fromkeys(("counts", "tokens", "num_tokens", "token_count", "load"), "count")
LABEL = re.compile(r"(?:[A-Za-z]+[ _-]?)?(?:id[ _-]?)?(\d{1,6})")


def read_npz(path: Path, options: ReadOptions) -> LoadFile:
    """Read ``load`` [L, E] or [T, L, E] of an ``.npz`` file, and its ``layer_ids``."""
    arrays, names = read_arrays(path, ("load", "layer_ids"))
    if "load" not in arrays:
        raise HistoryError(f"the file holds {names}, expected load")
    ids, place = arrays.get("layer_ids"), f"{path.name}: "
    return _load_file(arrays["load"], ids, names.split(", "), place)


def of_counts(record: Any, path: Path, options: ReadOptions) -> LoadFile:
    """The load of ``{"counts": [[...]], "layer_ids": [...]}``, or of an array or lists alone."""
    if isinstance(record, np.ndarray):
        return _load_file(record, None)
    if isinstance(record, list):
        return _load_file(int_array(record, (2, 3), "the file"), None)
    counts = int_array(member(record, "counts", list, "the file"), (2, 3), "counts")
    ids = record.get("layer_ids")
    ids = None if ids is None else int_array(ids, 1, "layer_ids")
    return _load_file(counts, ids, sorted(record))


def _load_file(
    counts: NDArray[Any], ids: Any, names: Sequence[str] = (), place: str = ""
) -> LoadFile:
    """The load of counts [L, E] or [T, L, E]; ``names`` are those of all that the file holds."""
    if counts.ndim not in (2, 3) or not counts.size:
        raise HistoryError(
            f"shape {counts.shape}, expected [layers, experts] or with windows first"
        )
    is_float = counts.dtype.kind == "f"
    notes: tuple[str, ...] = ()
    windows = counts[None] if counts.ndim == 2 else counts
    if is_float and not (float(counts.max()) < MOST_EXACT and not np.mod(counts, 1).any()):
        notes = ("loads are fractions: they are scaled to whole numbers",)
        history = history_of_figures(windows.astype(np.float64))
    else:  # that they are no routing ids was decided before, or by the user
        history = LoadHistory(windows.astype(np.int64) if is_float else windows)
    if unread := ", ".join(sorted(set(names) - {"load", "counts", "layer_ids"}))[:80]:
        notes = (*notes, f"{place}not read: {unread}")
    return LoadFile(history, numbered_layers(ids, history.num_layers), notes=notes)


def write_counts(file: LoadFile, options: WriteOptions) -> dict[str, bytes]:
    """Write counts as JSON, with layer numbers where they are known."""
    record: dict[str, Any] = {}
    if file.layers.axis == "model":
        record["layer_ids"] = list(file.layers.ids)
    return {"": to_json(record | {"counts": file.history.tokens.tolist()})}


def read_csv(path: Path, options: ReadOptions) -> LoadFile:
    """Read a row of whole numbers for each layer, or a row for each layer and expert.

    Without a header, rows are layers and columns experts, both in order. A header names experts by
    their numbers, and may begin with ``layer``; or it names layer, expert and count alone.
    """
    names, counts = _csv_cells(path)
    if not names:
        _check_no_labels(counts)
        return _load_file(counts, None)
    if set(names) >= LONG:
        return _long_table(counts, names, options)
    if set(names) >= {"layer", "expert"}:
        raise HistoryError(
            f"header {', '.join(names)[:80]} without a count, expected layer, expert and count: "
            "count the rows of each layer and expert"
        )
    has_ids = names[0] == "layer"
    order = _experts_of(names[has_ids:])
    return _load_file(counts[:, has_ids:][:, order], counts[:, 0] if has_ids else None)


def read_long(paths: Sequence[Path], options: ReadOptions) -> LoadFile | None:
    """The sum of tables in long form, a file for each rank; None: they are tables in rows."""
    parts = [_csv_cells(path) for path in paths]
    if not any(set(names) >= LONG for names, _ in parts):
        return None
    for path, (names, _) in zip(paths, parts, strict=True):
        if names != parts[0][0] or "rank" in names:
            raise HistoryError(f"{path.name} has {', '.join(names)[:80]}, expected a file a rank")
    rows = np.concatenate(
        [np.insert(rows, 0, rank, axis=1) for rank, (_, rows) in enumerate(parts)]
    )
    file = _long_table(rows, ["rank", *parts[0][0]], options)
    return replace(file, notes=(*file.notes, f"{len(paths)} files are summed: one of each rank"))


def _csv_cells(path: Path) -> tuple[list[str], NDArray[np.int64]]:
    """Names of the columns, none without a header, and the numbers below."""
    lines = read_text_bytes(path).decode("utf-8-sig").splitlines()
    cells = [[cell.strip() for cell in row] for row in csv.reader(lines) if "".join(row).strip()]
    has_header = bool(cells) and not all(map(WHOLE.fullmatch, cells[0]))
    names = [NAMES.get(name.lower(), name.lower()) for name in cells[0]] if has_header else []
    table = []
    for number, row in enumerate(cells[has_header:], start=1 + has_header):
        if len(row) != len(cells[0]):
            raise HistoryError(f"row {number} has {len(row)} cells, expected {len(cells[0])}")
        table.append([_whole_cell(cell, number, at) for at, cell in enumerate(row, start=1)])
    if not table:
        raise HistoryError("no row of counts, expected one for each layer")
    return names, np.array(table, dtype=np.int64)


def _whole_cell(cell: str, row: int, column: int) -> int:
    value = Decimal(cell) if WHOLE.fullmatch(cell) and len(cell) < 40 else None
    if value is None or value != value.to_integral_value() or value >= 10**18:
        raise HistoryError(
            f"row {row}, column {column} is {cell[:20]!r}, expected a whole number from 0, and "
            "commas between cells"
        )
    return int(value)


def _experts_of(labels: list[str]) -> NDArray[np.int64]:
    """Columns in order of the experts that a header names."""
    numbers = [int(name[1]) if (name := LABEL.fullmatch(label)) else -1 for label in labels]
    if sorted(numbers) != list(range(len(labels))):
        wrong = next(
            label
            for label, n in zip(labels, numbers, strict=True)
            if n < 0 or n >= len(labels) or numbers.count(n) > 1
        )
        raise HistoryError(
            f"column {wrong[:20]!r} of the header, expected the experts 0..{len(labels) - 1}, each "
            "once, behind one column 'layer' or none"
        )
    return np.argsort(numbers)


def _check_no_labels(counts: NDArray[np.int64]) -> None:
    """Refuse numbers of experts or layers among the counts of a table without a header."""
    if len(counts) < 2:
        return
    first_row, first_column, rest = counts[0], counts[:, 0], counts[:, 1:].sum(axis=1)
    if first_row.size > 1 and (np.diff(first_row) == 1).all():
        raise HistoryError(
            f"row 1 is {first_row[0]}, {first_row[1]}, ...: numbers of experts or of layers, "
            "expected counts, or 'layer' as the first cell of a header"
        )
    is_rising = (np.diff(first_column) == 1).all()
    if is_rising and (len(counts) > 2 or rest.min() == rest.max() > 0):
        raise HistoryError(
            f"column 1 is {first_column[0]}, {first_column[1]}, ...: numbers of layers, expected "
            "counts, or a header that begins with 'layer'"
        )


def _long_table(counts: NDArray[np.int64], names: list[str], options: ReadOptions) -> LoadFile:
    """The sums of rows with layer, expert and count; rows of several ranks have a column rank."""
    if len(set(names)) != len(names) or not set(names) <= LONG | {"rank"}:
        raise HistoryError(
            f"header {', '.join(names)[:80]}, expected layer, expert and count, and at most rank"
        )
    column = dict(zip(names, counts.T, strict=True))
    layer, expert = column["layer"], column["expert"]
    cells = np.stack((column.get("rank", np.zeros_like(layer)), layer, expert))
    places, times = np.unique(cells, axis=1, return_counts=True)
    if times.max() > 1:
        _, of_layer, of_expert = places[:, times.argmax()].tolist()
        raise HistoryError(f"layer {of_layer}, expert {of_expert} stand in two rows, expected one")
    if expert.min() == 1 and options.num_experts is None:
        raise ConfigError(
            f"experts 1..{expert.max()}, none is 0: expected numbers from 0, or --experts where "
            "expert 0 has no token"
        )
    num_experts = options.experts_in("a row", int(expert.max()))
    ids, place_of = np.unique(layer, return_inverse=True)
    check_cells("the table", (len(ids), num_experts), counts.nbytes)
    summed = np.zeros((len(ids), num_experts), dtype=np.int64)
    np.add.at(summed, (place_of, expert), column["count"])
    file = _load_file(summed, ids)
    lacking = summed.size - len(np.unique(np.stack((layer, expert)), axis=1)[0])
    note = f"{lacking} of {summed.size} pairs of layer and expert are not in the table: taken as 0"
    return replace(file, notes=(*file.notes, note)) if lacking else file


def read_ultra_ep(folder: Path, options: ReadOptions) -> LoadFile:
    """Read the manifest and the chunks of one trace; layers have the model's numbers.

    A micro-batch of which a layer was dropped is not used.
    """
    manifests = sorted(folder.glob("*manifest.json"))
    if len(manifests) != 1:
        raise HistoryError(f"{len(manifests)} manifests, expected the one of a trace")
    manifest = read_json(manifests[0])
    if member(manifest, "schema", str, "the manifest") != ULTRA_EP:
        raise HistoryError(f"schema {manifest['schema'][:40]!r}, expected {ULTRA_EP}")
    num_chunks = whole_number(manifest.get("chunks"), "chunks of the manifest", 1, MAX_CHUNKS)
    chunks = sorted(folder.glob("*.npz"))
    if len(chunks) != num_chunks:
        raise HistoryError(f"{len(chunks)} chunks, expected {num_chunks} as in the manifest")
    rows: dict[tuple[int, int], NDArray[Any]] = {}  # by micro-batch and layer
    size: int | None = None
    for chunk in chunks:
        names = ("layers", "microbatches", "pre_logical_loads")
        arrays, held = read_arrays(chunk, names)
        if len(arrays) != len(names):
            raise HistoryError(f"{chunk.name} holds {held}, expected {', '.join(names)}")
        layers, batches, loads = (arrays[name] for name in names)
        loads = whole_array(loads, (None, size), f"{chunk.name}: pre_logical_loads")
        size = loads.shape[1]
        layers = whole_array(layers, (len(loads),), f"{chunk.name}: layers", high=2**16 - 1)
        batches = whole_array(batches, (len(loads),), f"{chunk.name}: microbatches", high=2**62 - 1)
        for batch, layer, row in zip(batches.tolist(), layers.tolist(), loads, strict=True):
            if (batch, layer) in rows:
                raise HistoryError(f"{chunk.name}: layer {layer} of micro-batch {batch} twice")
            rows[batch, layer] = row
    ids = sorted({layer for _, layer in rows})
    seen = Counter(batch for batch, _ in rows)
    whole, notes = whole_steps(seen, len(ids), "micro-batches lack layers", options)
    tokens = np.array([[rows[batch, layer] for layer in ids] for batch in whole])
    return LoadFile(history_of(tokens, whole, whole), as_layers(ids), notes=notes)


PLACEMENT, TRACE = "eplb-placement/1", "eplb-trace/1"
COUNTS_FILE, MANIFEST = "counts.safetensors", "manifest.json"
MAX_COUNTS_BYTES = 2 * 2**30
AXES: tuple[Axis, ...] = ("model", "hidden", "ordinal")


def write_placement(file: PlacementFile, options: WriteOptions) -> Written:
    """Write a placement; nothing is lost."""
    placement = file.placement
    record: dict[str, Any] = {
        "schema": PLACEMENT,
        "model": file.model,
        **_layers_to_dict(file.layers),
        "num_experts": placement.num_experts,
        "num_ranks": file.num_ranks,
        "generation": placement.generation,
        "provenance": dict(file.provenance),
        "slot_to_expert": placement.slot_to_expert.tolist(),
    }
    if not placement.has_equal_shares:
        record["slot_share"] = placement.slot_share.tolist()
    if placement.source_share is not None:
        record["source_share"] = placement.source_share.tolist()
    return to_json(record | {"sha256": _digest(record)}), ()


def of_placement(record: Any, path: Path, options: ReadOptions) -> PlacementFile:
    """The placement of a record that was read already, whose hash is checked."""
    if member(record, "schema", str, "the file") != PLACEMENT:
        raise HistoryError(f"schema {record['schema'][:40]!r}, expected {PLACEMENT}")
    found = member(record, "sha256", str, "the file")
    rest = {key: value for key, value in record.items() if key != "sha256"}
    if found != _digest(rest):
        raise PlacementError("sha256 does not match: the file was changed after it was written")
    held = int_array(member(record, "slot_to_expert", list, "the file"), 2, "slot_to_expert")
    num_experts = whole_number(record.get("num_experts"), "num_experts", 1, held.shape[1])
    shares: dict[str, Any] = {}
    for name in ("slot_share", "source_share"):
        if name in record:
            table = np.asarray(member(record, name, list, "the file"), dtype=np.float64)
            if table.shape[-2:] != held.shape:
                raise HistoryError(f"{name} has shape {table.shape}, expected {held.shape}")
            shares[name] = table
    return placement_of(
        held,
        _layers_from_dict(record, len(held)),
        options,
        is_full=False,
        num_experts=num_experts,
        generation=whole_number(record.get("generation"), "generation", 0, 2**62),
        shares=shares,
        num_ranks=_size(record, "num_ranks"),
        model=_text(record.get("model")),
        provenance=member(record, "provenance", dict, "the file"),
    )


def write_trace(file: LoadFile, options: WriteOptions) -> dict[str, bytes]:
    """The files of a trace by name."""
    load_of = file.history
    counts = save(
        {"counts": load_of.tokens, "first_step": load_of.first_step, "last_step": load_of.last_step}
    )
    manifest = {
        "schema": TRACE,
        "model": file.model,
        **_layers_to_dict(file.layers),
        "num_experts": load_of.num_experts,
        "num_windows": load_of.num_windows,
        "phase": load_of.phase,
        "num_ranks": file.num_ranks,
        "num_nodes": file.num_nodes,
        "missing_ranks": [sorted(missing) for missing in load_of.missing_ranks],
        "provenance": dict(options.provenance),
        "sha256": hashlib.sha256(counts).hexdigest(),
    }
    return {COUNTS_FILE: counts, MANIFEST: to_json(manifest)}


def read_trace(folder: Path, options: ReadOptions) -> LoadFile:
    """Read a trace, and check its hash."""
    manifest = read_json(folder / MANIFEST)
    if member(manifest, "schema", str, "the manifest") != TRACE:
        raise HistoryError(f"schema {manifest['schema'][:40]!r}, expected {TRACE}")
    data = read_text_bytes(folder / COUNTS_FILE, MAX_COUNTS_BYTES)
    if hashlib.sha256(data).hexdigest() != member(manifest, "sha256", str, "the manifest"):
        raise HistoryError(f"{COUNTS_FILE} does not match the sha256 of the manifest")
    try:
        arrays = load(data)
    except SafetensorError as exc:
        raise HistoryError(f"{COUNTS_FILE} is no safetensors file: {exc}") from exc
    if arrays.keys() != {"counts", "first_step", "last_step"}:
        raise HistoryError(f"{COUNTS_FILE} holds {sorted(arrays)[:4]}, expected counts and steps")
    if any(one.dtype.kind not in "iu" for one in arrays.values()):
        raise HistoryError(f"{COUNTS_FILE}: found other values than whole numbers")
    phase = manifest.get("phase")
    if phase not in ("prefill", "decode", "mixed"):
        raise HistoryError("phase of the manifest, expected prefill, decode or mixed")
    missing = member(manifest, "missing_ranks", list, "the manifest")
    ranks = tuple(
        frozenset(int_array(one, 1, "missing_ranks").tolist() if one else ()) for one in missing
    )
    load_of = LoadHistory(arrays["counts"], arrays["first_step"], arrays["last_step"], phase, ranks)
    num_ranks, num_nodes = (_size(manifest, name) for name in ("num_ranks", "num_nodes"))
    layers, model = _layers_from_dict(manifest, load_of.num_layers), _text(manifest.get("model"))
    return LoadFile(load_of, layers, None, num_ranks, num_nodes, model)


def read_store(url: str, options: ReadOptions) -> LoadFile:
    """Read the latest windows of a deployment's store, and the placement that serves.

    Raises:
        StoreError: there is no such store, or the deployment never ran.
    """
    path = file_of(url)
    if path is not None and not path.is_file():
        raise StoreError(f"there is no store at {path}, expected the file of a deployment")
    with closing(open_store(url, options.deployment)) as store:
        return _load_of_store(store, options)


def _load_of_store(store: StateStore, options: ReadOptions) -> LoadFile:
    info = store.current_run()
    if info is None:
        raise StoreError(f"deployment {options.deployment!r} has no run, expected one")
    reader = RunReader(store, info, keep=options.max_windows)
    for _ in reader.read():
        pass  # the latest windows are what is exported
    model, topology, windows = reader.model, reader.topology, reader.folder.windows()
    complete = history(windows, last=options.max_windows)
    if complete is None:
        raise HistoryError(f"none of {len(windows)} windows is complete, expected one")
    layers = Layers(tuple(model.layer_ids), "model")
    committed = store.committed()
    current = None
    if committed is not None:
        current = PlacementFile(committed.placement, layers, topology.num_ranks)
    return LoadFile(
        complete,
        layers,
        current,
        topology.num_ranks,
        topology.num_nodes,
        shape=model,
        window_s=info.window_seconds or None,
    )


def _layers_to_dict(layers: Layers) -> dict[str, Any]:
    return {
        "layer_axis": layers.axis,
        "layer_ids": list(layers.ids),
        "num_hidden": layers.num_hidden,
    }


def _layers_from_dict(record: Mapping[str, Any], num_layers: int) -> Layers:
    axis = member(record, "layer_axis", str, "the file")
    if axis not in AXES:
        raise HistoryError(f"layer_axis {axis[:20]!r}, expected one of: {', '.join(AXES)}")
    ids = int_array(member(record, "layer_ids", list, "the file"), 1, "layer_ids").tolist()
    if len(ids) != num_layers:
        raise HistoryError(f"{len(ids)} layer ids for {num_layers} layers")
    return Layers(tuple(ids), next(one for one in AXES if one == axis), _size(record, "num_hidden"))


def _size(record: Mapping[str, Any], name: str) -> int | None:
    """A number of the record; None: it is not known."""
    value = record.get(name)
    return None if value is None else whole_number(value, name, 1, 65_536)


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _text(value: Any) -> str:
    return value[:200] if isinstance(value, str) else ""
