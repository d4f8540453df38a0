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

from eplb.core.load import LoadHistory, as_history
from eplb.core.placement import Placement
from eplb.errors import HistoryError, PlacementError, StoreError
from telemetry import file_of, open_store
from telemetry.formats.bounded import (
    check_regular,
    int_array,
    member,
    read_arrays,
    read_json,
    read_text_bytes,
    to_json,
    whole_array,
    whole_number,
)
from telemetry.formats.routing import layers_of, unread_keys
from telemetry.formats.types import (
    Axis,
    Layers,
    LoadFile,
    PlacementFile,
    ReadOptions,
    StepSums,
    as_layers,
    check_cells,
    cut_unlike,
    resolve,
)
from telemetry.load.folder import history
from telemetry.load.reader import RunReader
from telemetry.state.store import StateStore

ULTRA_EP = "ultra_ep_trace_v1"
MAX_CHUNKS = 100_000
WHOLE = re.compile(r"[+]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?")  # 162554.0 and 9e2 too
LAYER_NAMES = {"layer", "layer_id", "layer_idx", "layer_index"}
EXPERT_NAMES = {"expert", "expert_id", "expert_idx", "expert_index"}
COUNT_NAMES = {"count", "counts", "tokens", "num_tokens", "token_count", "load"}
LABEL = re.compile(r"(?:[A-Za-z]+[ _-]?)?(?:id[ _-]?)?(\d{1,6})")


def of_array(values: Any, path: Path, options: ReadOptions) -> LoadFile:
    """The load of an array [L, E] or [T, L, E] that was read already."""
    if not isinstance(values, np.ndarray):
        raise HistoryError(f"found {type(values).__name__}, expected a tensor [layers, experts]")
    return _load_file(values, None)


def read_npz(path: Path, options: ReadOptions) -> LoadFile:
    """Read ``load`` [L, E] or [T, L, E] of an ``.npz`` file, and its ``layer_ids``."""
    arrays, names = read_arrays(path, ("load", "layer_ids"))
    if "load" not in arrays:
        raise HistoryError(f"the file holds {names}, expected load")
    found = _load_file(arrays["load"], arrays.get("layer_ids"))
    return replace(found, notes=(*found.notes, *unread_keys(path)))


def read_counts(path: Path, options: ReadOptions) -> LoadFile:
    """Read ``{"counts": [[...]], "layer_ids": [...]}``, or the nested lists alone."""
    record = read_json(path)
    if isinstance(record, list):
        return _load_file(int_array(record, (2, 3), "the file"), None)
    counts = int_array(member(record, "counts", list, "the file"), (2, 3), "counts")
    ids = record.get("layer_ids")
    found = _load_file(counts, None if ids is None else int_array(ids, 1, "layer_ids"))
    unread = ", ".join(sorted(record.keys() - {"counts", "layer_ids"}))[:80]
    return replace(found, notes=(*found.notes, *([f"not read: {unread}"] if unread else [])))


def write_counts(file: LoadFile) -> tuple[bytes, tuple[str, ...]]:
    """Write counts as JSON, with layer numbers where they are known."""
    record: dict[str, Any] = {}
    if file.layers.axis == "model":
        record["layer_ids"] = list(file.layers.ids)
    return to_json(record | {"counts": file.history.tokens.tolist()}), ()


def read_csv(path: Path, options: ReadOptions) -> LoadFile:
    """Read a row of whole numbers for each layer, or a row for each layer and expert.

    Without a header, rows are layers and columns experts, both in order. A header names experts by
    their numbers, and may begin with ``layer``; or it names layer, expert and count alone.
    """
    names, counts = _csv_cells(path)
    if not names:
        _check_no_labels(counts)
        return _load_file(counts, None)
    if _is_long(names):
        return _long_table(counts, names, options)
    has_ids = names[0] in LAYER_NAMES
    order = _experts_of(names[has_ids:])
    return _load_file(counts[:, has_ids:][:, order], counts[:, 0].tolist() if has_ids else None)


def read_long(paths: Sequence[Path], options: ReadOptions) -> LoadFile | None:
    """The sum of tables in long form, a file for each rank; None: they are tables in rows."""
    parts = [_csv_cells(path) for path in paths]
    if not any(_is_long(names) for names, _ in parts):
        return None
    names = parts[0][0]
    for path, (others, _) in zip(paths, parts, strict=True):
        if others != names or "rank" in others:
            raise HistoryError(f"{path.name} has {', '.join(others)[:80]}, expected a file a rank")
    ranks = [np.full((len(rows), 1), rank) for rank, (_, rows) in enumerate(parts)]
    rows = np.concatenate(
        [np.hstack((rows, rank)) for (_, rows), rank in zip(parts, ranks, strict=True)]
    )
    found = _long_table(rows, [*names, "rank"], options)
    return replace(found, notes=(f"{len(paths)} files are summed: one of each rank",))


def _is_long(names: list[str]) -> bool:
    return {"layer", "expert", "count"} <= {_role(name) for name in names}


def _csv_cells(path: Path) -> tuple[list[str], NDArray[np.int64]]:
    """Names of the columns, none without a header, and the numbers below."""
    lines = read_text_bytes(path).decode("utf-8-sig").splitlines()
    cells = [[cell.strip() for cell in row] for row in csv.reader(lines) if "".join(row).strip()]
    if not cells:
        raise HistoryError("no line, expected a row for each layer")
    first, has_header = cells[0], not all(map(WHOLE.fullmatch, cells[0]))
    rows = cells[has_header:]
    for number, row in enumerate(rows, start=1 + has_header):
        if len(row) != len(first):
            raise HistoryError(f"row {number} has {len(row)} cells, expected {len(first)}")
    table = [
        [_whole_cell(cell, number, column) for column, cell in enumerate(row, start=1)]
        for number, row in enumerate(rows, start=1 + has_header)
    ]
    if not table:
        raise HistoryError("no row of counts, expected one for each layer")
    names = [name.lower() for name in first] if has_header else []
    return names, np.array(table, dtype=np.int64)


def _whole_cell(cell: str, row: int, column: int) -> int:
    value = Decimal(cell) if WHOLE.fullmatch(cell) and len(cell) < 40 else None
    if value is None or value != value.to_integral_value() or value >= 10**18:
        raise HistoryError(
            f"row {row}, column {column} is {cell[:20]!r}, expected a whole number from 0"
        )
    return int(value)


def _role(name: str) -> str:
    roles = {"layer": LAYER_NAMES, "expert": EXPERT_NAMES, "count": COUNT_NAMES}
    return next((role for role, names in roles.items() if name in names), name)


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
    index = np.arange(len(counts))
    rest = counts[:, 1:].sum(axis=1)
    if len(counts) > 1 and np.array_equal(counts[0], np.arange(counts.shape[1])):
        raise HistoryError(
            "row 1 is 0, 1, 2, ...: numbers of experts, expected counts, or 'layer' as the first "
            "cell of a header"
        )
    is_rising = len(counts) > 1 and np.array_equal(counts[:, 0] - counts[0, 0], index)
    if is_rising and (len(counts) > 2 or rest.min() == rest.max() > 0):
        raise HistoryError(
            f"column 1 is {counts[0, 0]}, {counts[1, 0]}, ...: numbers of layers, expected counts, "
            "or a header that begins with 'layer'"
        )


def _long_table(counts: NDArray[np.int64], names: list[str], options: ReadOptions) -> LoadFile:
    """The sums of rows with layer, expert and count; rows of several ranks have a column rank."""
    roles = [_role(name) for name in names]
    known = ["layer", "expert", "count", "rank"]
    if len(set(roles)) != len(roles) or not set(roles) <= set(known):
        raise HistoryError(
            f"header {', '.join(names)[:80]}, expected layer, expert and count, and at most rank"
        )
    layer, expert, tokens = (counts[:, roles.index(role)] for role in known[:3])
    rank = counts[:, roles.index("rank")] if "rank" in roles else np.zeros_like(layer)
    _, times = np.unique(np.stack((rank, layer, expert)), axis=1, return_counts=True)
    if times.max() > 1:
        place = np.unique(np.stack((rank, layer, expert)), axis=1)[:, times.argmax()].tolist()
        raise HistoryError(f"layer {place[1]}, expert {place[2]} stand in two rows, expected one")
    num_experts = options.num_experts or int(expert.max()) + 1
    if expert.max() >= num_experts:
        raise HistoryError(f"a row of expert {expert.max()}, expected 0..{num_experts - 1}")
    ids, place_of = np.unique(layer, return_inverse=True)
    check_cells(len(ids), num_experts, counts.nbytes)
    summed = np.zeros((len(ids), num_experts), dtype=np.int64)
    np.add.at(summed, (place_of, expert), tokens)
    return _load_file(summed, ids.tolist())


def _load_file(counts: NDArray[Any], ids: Any) -> LoadFile:
    if counts.ndim not in (2, 3) or not counts.size:
        raise HistoryError(
            f"shape {counts.shape}, expected [layers, experts] or with windows first"
        )
    is_whole = counts.dtype.kind != "f" or not np.mod(counts, 1).any()
    notes = () if is_whole else ("loads are fractions: they are scaled to whole numbers",)
    given = counts.astype(np.float64) if counts.dtype == np.float16 else counts
    history = as_history(given[None] if counts.ndim == 2 else given)
    return LoadFile(history, layers_of(ids, history.num_layers), notes=notes)


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
    parts: dict[int, dict[int, NDArray[Any]]] = {}
    for chunk in chunks:
        names = ("layers", "microbatches", "pre_logical_loads")
        arrays, held = read_arrays(chunk, names)
        if len(arrays) != len(names):
            raise HistoryError(f"{chunk.name} holds {held}, expected {', '.join(names)}")
        layer, batch, loads = (arrays[name] for name in names)
        _take_chunk(parts, layer, batch, loads, chunk.name)
    ids = sorted({row for layers in parts.values() for row in layers})
    whole = [index for index in sorted(parts) if len(parts[index]) == len(ids)]
    sums = StepSums(options.max_windows)
    for index in whole:
        sums.add(index, np.array([parts[index][row] for row in ids], dtype=np.int64))
    lost = f"{len(parts) - len(whole)} of {len(parts)} micro-batches lack layers"
    notes = cut_unlike(lost, options.strict) if len(whole) < len(parts) else ()
    return LoadFile(sums.history(), as_layers(ids), notes=notes)


def _take_chunk(
    parts: dict[int, dict[int, NDArray[Any]]],
    layers: NDArray[Any],
    batches: NDArray[Any],
    loads: NDArray[Any],
    where: str,
) -> None:
    known = next((len(row) for batch in parts.values() for row in batch.values()), None)
    loads = whole_array(loads, (None, known), f"{where}: pre_logical_loads")
    layers = whole_array(layers, (len(loads),), f"{where}: layers", high=2**16 - 1)
    batches = whole_array(batches, (len(loads),), f"{where}: microbatches", high=2**62 - 1)
    for layer, batch, row in zip(layers.tolist(), batches.tolist(), loads, strict=True):
        of_batch = parts.setdefault(batch, {})
        if layer in of_batch:
            raise HistoryError(f"{where}: layer {layer} of micro-batch {batch} twice")
        of_batch[layer] = row


PLACEMENT, TRACE = "eplb-placement/1", "eplb-trace/1"
COUNTS_FILE, MANIFEST = "counts.safetensors", "manifest.json"
MAX_COUNTS_BYTES = 2 * 2**30
AXES: tuple[Axis, ...] = ("model", "hidden", "ordinal")


def write_placement(file: PlacementFile) -> tuple[bytes, tuple[str, ...]]:
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
    if not np.array_equal(placement.slot_share, _even(placement).slot_share):
        record["slot_share"] = placement.slot_share.tolist()
    if placement.source_share is not None:
        record["source_share"] = placement.source_share.tolist()
    return to_json(record | {"sha256": _digest(record)}), ()


def read_placement(path: Path, options: ReadOptions) -> PlacementFile:
    """Read a placement, and check its hash."""
    record = read_json(path)
    if member(record, "schema", str, "the file") != PLACEMENT:
        raise HistoryError(f"schema {record['schema'][:40]!r}, expected {PLACEMENT}")
    found = member(record, "sha256", str, "the file")
    rest = {key: value for key, value in record.items() if key != "sha256"}
    if found != _digest(rest):
        raise PlacementError("sha256 does not match: the file was changed after it was written")
    held = int_array(member(record, "slot_to_expert", list, "the file"), 2, "slot_to_expert")
    if held.min() < -1 or held.max() >= 2**31:
        raise HistoryError(f"slot_to_expert has {held.min()}..{held.max()}, expected -1 or more")
    num_experts = whole_number(record.get("num_experts"), "num_experts", 1, held.shape[1])
    ranks = record.get("num_ranks")
    layers = _layers_from_dict(record, len(held))
    rows, layers, notes = resolve(layers, options)
    shares: dict[str, Any] = {}
    for name, ndim in (("slot_share", 2), ("source_share", 3)):
        if name in record:
            table = np.asarray(member(record, name, list, "the file"), dtype=np.float64)
            if table.ndim != ndim or table.shape[-2:] != held.shape:
                raise HistoryError(f"{name} has shape {table.shape}, expected {held.shape}")
            shares[name] = table[..., rows, :]
    generation = whole_number(record.get("generation"), "generation", 0, 2**62)
    placement = Placement(held[rows].astype(np.int32), num_experts, generation, **shares)
    return PlacementFile(
        placement,
        layers,
        None if ranks is None else whole_number(ranks, "num_ranks", 1, 65_536),
        _text(record.get("model")),
        notes,
        member(record, "provenance", dict, "the file"),
    )


def write_trace(file: LoadFile, provenance: Mapping[str, Any]) -> dict[str, bytes]:
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
        "provenance": dict(provenance),
        "sha256": hashlib.sha256(counts).hexdigest(),
    }
    return {COUNTS_FILE: counts, MANIFEST: to_json(manifest)}


def read_trace(folder: Path, options: ReadOptions) -> LoadFile:
    """Read a trace, and check its hash."""
    manifest = read_json(folder / MANIFEST)
    if member(manifest, "schema", str, "the manifest") != TRACE:
        raise HistoryError(f"schema {manifest['schema'][:40]!r}, expected {TRACE}")
    check_regular(folder / COUNTS_FILE)
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
    counts = [manifest.get(name) for name in ("num_ranks", "num_nodes")]
    num_ranks, num_nodes = (
        None if one is None else whole_number(one, "ranks or nodes", 1, 65_536) for one in counts
    )
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
    hidden = record.get("num_hidden")
    total = None if hidden is None else whole_number(hidden, "num_hidden", 1, 2**16)
    return Layers(tuple(ids), next(one for one in AXES if one == axis), total)


def _even(placement: Placement) -> Placement:
    return Placement(placement.slot_to_expert, placement.num_experts)


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _text(value: Any) -> str:
    return value[:200] if isinstance(value, str) else ""
