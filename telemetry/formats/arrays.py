"""Plain tables of counts: ``.npy``, ``.npz``, ``.csv``, JSON, and the chunks of an UltraEP trace.

Rows are MoE layers in order unless the file numbers them: ``layer_ids`` in JSON and ``.npz``, a
first column ``layer`` in CSV.

Shapes:  T windows, L MoE layers, E experts, n records.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, as_history
from eplb.errors import HistoryError
from telemetry.formats.bounded import (
    int_array,
    member,
    read_json,
    read_text_bytes,
    to_json,
    whole_number,
)
from telemetry.formats.npz import read_arrays, read_npy
from telemetry.formats.types import (
    Layers,
    LoadFile,
    ReadOptions,
    StepSums,
    as_layers,
    resolve,
    rows_in_order,
    summed_windows,
)

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
    if ids is not None and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise HistoryError(f"layer_ids has shape {ids.shape} of {ids.dtype}, expected integers [L]")
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
    num_records = len(layers) if layers.ndim == 1 else -1
    known = next((row for batch in parts.values() for row in batch.values()), loads[:1].ravel())
    if (
        loads.ndim != 2
        or batches.shape != (num_records,)
        or loads.shape != (num_records, len(known))
    ):
        raise HistoryError(
            f"{where}: layers {layers.shape}, microbatches {batches.shape}, loads {loads.shape}, "
            "expected one of each record"
        )
    if any(one.dtype.kind not in "iu" for one in (layers, batches, loads)):
        raise HistoryError(f"{where}: found other values than whole numbers")
    if loads.size and (loads.min() < 0 or loads.max() > 2**48):
        raise HistoryError(f"{where}: {loads.min()}..{loads.max()} tokens of an expert")
    for layer, batch, row in zip(layers.tolist(), batches.tolist(), loads, strict=True):
        of_batch = parts.setdefault(batch, {})
        if layer in of_batch or not 0 <= layer < 2**16 or not 0 <= batch < 2**62:
            raise HistoryError(
                f"{where}: layer {layer} of micro-batch {batch} twice or out of range"
            )
        of_batch[layer] = row
