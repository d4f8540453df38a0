"""Formats of no engine: plain tables of counts, those of this project, and a deployment's store.

    tables             ``.npy``, ``.npz``, ``.csv``, JSON, and the chunks of an UltraEP trace
    eplb-placement/1   JSON: schema, layers, experts by slot, shares, sha256 of all else, provenance
    eplb-trace/1       a folder: manifest.json and counts.safetensors, whose sha256 it names

The last two express all that ``PlacementFile`` and ``LoadFile`` hold, and are read back identical.
Rows of a table are MoE layers in order unless the file numbers them: ``layer_ids`` in JSON and
``.npz``, a first column ``layer`` in CSV.

Shapes:  T windows, L MoE layers, E experts, P slots, n records.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
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
    check_whole,
    int_array,
    member,
    read_arrays,
    read_json,
    read_npy,
    read_text_bytes,
    to_json,
    whole_number,
)
from telemetry.formats.types import (
    Axis,
    Layers,
    LoadFile,
    PlacementFile,
    ReadOptions,
    StepSums,
    as_layers,
    resolve,
    rows_in_order,
    summed_windows,
)
from telemetry.load.folder import history
from telemetry.load.reader import RunReader
from telemetry.state.store import StateStore

ULTRA_EP = "ultra_ep_trace_v1"
MAX_CHUNKS = 100_000
FIGURE = re.compile(r"\d{1,18}")


def read_array(path: Path, options: ReadOptions) -> LoadFile:
    """Read a ``.npy`` file [L, E] or [T, L, E]."""
    return _load_file(read_npy(path), None, options)


def read_npz(path: Path, options: ReadOptions) -> LoadFile:
    """Read ``load`` [L, E] or [T, L, E] of an ``.npz`` file, and its ``layer_ids``."""
    arrays, names = read_arrays(path, ("load", "layer_ids"))
    if "load" not in arrays:
        raise HistoryError(f"the file holds {names}, expected load")
    ids = arrays.get("layer_ids")
    if ids is not None:
        check_whole(ids, (None,), "layer_ids")
    return _load_file(arrays["load"], None if ids is None else ids.tolist(), options)


def read_counts(path: Path, options: ReadOptions) -> LoadFile:
    """Read ``{"counts": [[...]], "layer_ids": [...]}``, or the nested lists alone."""
    record = read_json(path)
    if isinstance(record, list):
        return _load_file(int_array(record, (2, 3), "the file"), None, options)
    counts = int_array(member(record, "counts", list, "the file"), (2, 3), "counts")
    ids = record.get("layer_ids")
    found = None if ids is None else int_array(ids, 1, "layer_ids").tolist()
    return _load_file(counts, found, options)


def write_counts(file: LoadFile) -> tuple[bytes, tuple[str, ...]]:
    """Write counts as JSON, with layer numbers where they are known."""
    record: dict[str, Any] = {}
    if file.layers.axis == "model":
        record["layer_ids"] = list(file.layers.ids)
    return to_json(record | {"counts": file.history.tokens.tolist()}), ()


def read_csv(path: Path, options: ReadOptions) -> LoadFile:
    """Read a row of whole numbers for each layer; a header line is allowed.

    The first column is the layer's number where the header's first cell is ``layer``.
    """
    lines = [line for line in read_text_bytes(path).decode().splitlines() if line.strip()]
    cells = [[cell.strip() for cell in line.split(",")] for line in lines]
    if not cells:
        raise HistoryError("no line, expected a row for each layer")
    has_header = not all(map(FIGURE.fullmatch, cells[0]))
    has_ids = has_header and cells[0][0].lower() == "layer"
    rows = cells[1:] if has_header else cells
    for number, row in enumerate(rows, start=1 + has_header):
        if len(row) != len(cells[0]) or not all(map(FIGURE.fullmatch, row)):
            raise HistoryError(
                f"row {number} is no list of {len(cells[0])} whole numbers, expected one"
            )
    if not rows or len(rows[0]) <= has_ids:
        raise HistoryError("no row of counts, expected one for each layer")
    table = np.array([[int(cell) for cell in row] for row in rows], dtype=np.int64)
    ids = table[:, 0].tolist() if has_ids else None
    return _load_file(table[:, has_ids:], ids, options)


def _load_file(counts: NDArray[Any], ids: list[int] | None, options: ReadOptions) -> LoadFile:
    if counts.ndim not in (2, 3) or not counts.size:
        raise HistoryError(
            f"shape {counts.shape}, expected [layers, experts] or with windows first"
        )
    given = counts[None] if counts.ndim == 2 else counts
    history = as_history(given)
    layers = rows_in_order(history.num_layers)
    if ids is not None:
        layers = as_layers(ids)
        if len(ids) != history.num_layers:
            raise HistoryError(f"{len(ids)} layer ids for {history.num_layers} layers")
    return loaded(history, layers, options)


def loaded(history: LoadHistory, layers: Layers, options: ReadOptions) -> LoadFile:
    """Windows with their layers resolved, summed to the number of windows that is asked for."""
    rows, found, notes = resolve(layers, options)
    tokens, first, last = history.tokens[:, rows], history.first_step, history.last_step
    if history.num_windows > options.max_windows:
        tokens, each = summed_windows(tokens, options.max_windows)
        ends = np.minimum(np.arange(1, len(tokens) + 1) * each, history.num_windows) - 1
        first, last = first[::each], last[ends]
        notes = (*notes, f"{history.num_windows} windows are summed into {len(tokens)}")
    return LoadFile(LoadHistory(tokens, first, last, history.phase), found, notes=notes)


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
    found = loaded(sums.history(), as_layers(ids), options)
    if len(whole) == len(parts):
        return found
    note = f"{len(parts) - len(whole)} of {len(parts)} micro-batches lack layers and are not used"
    return LoadFile(found.history, found.layers, notes=(*found.notes, note))


def _take_chunk(
    parts: dict[int, dict[int, NDArray[Any]]],
    layers: NDArray[Any],
    batches: NDArray[Any],
    loads: NDArray[Any],
    where: str,
) -> None:
    known = next((len(row) for batch in parts.values() for row in batch.values()), None)
    check_whole(loads, (None, known), f"{where}: pre_logical_loads")
    check_whole(layers, (len(loads),), f"{where}: layers", high=2**16 - 1)
    check_whole(batches, (len(loads),), f"{where}: microbatches", high=2**62 - 1)
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
    layers = _layers_from_dict(manifest, load_of.num_layers)
    if any(ranks):
        rows, layers, notes = resolve(layers, options)
        steps = (load_of.first_step, load_of.last_step)
        kept = LoadHistory(load_of.tokens[:, rows], *steps, phase, ranks)
        found = LoadFile(kept, layers, notes=notes)
    else:
        found = loaded(load_of, layers, options)
    counts = [manifest.get(name) for name in ("num_ranks", "num_nodes")]
    num_ranks, num_nodes = (
        None if one is None else whole_number(one, "ranks or nodes", 1, 65_536) for one in counts
    )
    model = _text(manifest.get("model"))
    return replace(found, num_ranks=num_ranks, num_nodes=num_nodes, model=model)


def read_store(url: str, options: ReadOptions) -> LoadFile:
    """Read the latest windows of a deployment's store, and the placement that serves.

    Raises:
        StoreError: there is no such store, or the deployment never ran.
    """
    path = file_of(url)
    if path is not None and not path.is_file():
        raise StoreError(f"there is no store at {path}, expected the file of a deployment")
    with closing(open_store(url, options.deployment)) as store:
        return load_of_store(store, options)


def load_of_store(store: StateStore, options: ReadOptions) -> LoadFile:
    """As ``read_store``, of a store that is open."""
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
    stored = Layers(tuple(model.layer_ids), "model")
    found = loaded(complete, stored, options)
    committed = store.committed()
    current = None
    rows, layers, _ = resolve(stored, options)
    if committed is not None:
        serving = committed.placement
        kept = Placement(
            serving.slot_to_expert[rows],
            serving.num_experts,
            serving.generation,
            serving.slot_share[rows],
        )
        current = PlacementFile(kept, layers, topology.num_ranks)
    return LoadFile(
        found.history,
        layers,
        current,
        topology.num_ranks,
        topology.num_nodes,
        notes=found.notes,
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
