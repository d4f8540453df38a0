"""SGLang: dumps of the expert distribution recorder, and ``--init-expert-location``.

Rows are all hidden layers of the model, dense ones included, in dumps and in locations. A dump of
the modes stat and stat_approx is one file, whose steps stand in a circular buffer: their order is
not known. In the modes per_pass and per_token each rank writes a file of its own part; the path is
then the folder of one dump, and passes are summed over its files.

Source: sglang 0.5.23, ``python/sglang/srt/eplb/expert_distribution.py`` and ``expert_location.py``.

Shapes:  n passes, T windows, L hidden layers, E experts, P physical slots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, as_history
from eplb.core.placement import Placement
from eplb.errors import HistoryError
from telemetry.formats.bounded import (
    check_whole,
    int_array,
    member,
    read_json,
    to_json,
    whole_number,
)
from telemetry.formats.repairs import filled
from telemetry.formats.torch_file import load_torch
from telemetry.formats.types import (
    Layers,
    LoadFile,
    PlacementFile,
    ReadOptions,
    StepSums,
    check_cells,
    model_layers,
    resolve,
    rows_as_hidden,
    summed_windows,
    to_logical,
)

MAP = "physical_to_logical_map"
COUNT = "logical_count"
MAX_RANK_FILES = 4096
RANK_FILE = re.compile(r"expert_distribution_recorder_(?P<time>[\d.]+)_(?P<rank>\d+)\.pt")
CIRCULAR = "steps stand in a circular buffer: which window is the newest is not known"


def read_dump(path: Path, options: ReadOptions) -> LoadFile:
    """Read a recorder's ``.pt`` file, or the folder of a dump of one file a rank."""
    if path.is_dir():
        return read_rank_files(_rank_files(path), options)
    return of_dump(load_torch(path), path, options)


def of_dump(found: Any, path: Path, options: ReadOptions) -> LoadFile:
    """The load of a recorder's file that was read already."""
    if isinstance(found, dict) and COUNT in found:
        return _stat(found[COUNT], options, (CIRCULAR,))
    if isinstance(found, dict) and "records" in found:
        note = f"of one rank alone, {path.name}: the folder of all ranks' files gives their sum"
        return read_rank_files([path], options, {path: found}, (note,))
    raise HistoryError(f"no {COUNT} and no records, expected a dump of SGLang's recorder")


def read_counts(path: Path, options: ReadOptions) -> LoadFile:
    """Read ``{"logical_count": ...}`` as ``--init-expert-location`` takes it."""
    counts = member(read_json(path), COUNT, list, "the file")
    return _stat(int_array(counts, (2, 3), COUNT), options, ())


def _stat(counts: Any, options: ReadOptions, notes: tuple[str, ...]) -> LoadFile:
    if not isinstance(counts, np.ndarray) or counts.dtype.kind not in "if" or not counts.size:
        raise HistoryError(f"{COUNT} is no table of numbers, expected [steps, layers, experts]")
    steps = counts[None] if counts.ndim == 2 else counts
    if steps.ndim != 3:
        raise HistoryError(f"{COUNT} has shape {counts.shape}, expected [steps, layers, experts]")
    if steps.dtype.kind == "f":
        steps = as_history(steps).tokens
    last_filled = _last_filled(steps)
    if last_filled < len(steps):
        notes = (*notes, f"{len(steps) - last_filled} of {len(steps)} steps are not filled yet")
        steps = steps[:last_filled]
    tokens, each = summed_windows(steps, options.max_windows)
    first = np.arange(len(tokens)) * each
    last = np.minimum(first + each, len(steps)) - 1
    return _load_file(tokens, (first, last), options, notes)


def _last_filled(steps: NDArray[Any]) -> int:
    """Number of steps up to the last one with tokens; at least 1."""
    for last in range(len(steps), 0, -1):
        if steps[last - 1].any():
            return last
    return 1


def _load_file(
    tokens: NDArray[np.int64],
    steps: tuple[NDArray[np.int64], NDArray[np.int64]],
    options: ReadOptions,
    notes: tuple[str, ...],
    held: NDArray[np.int32] | None = None,
) -> LoadFile:
    """Windows [T, L, E] of steps first..last, without the rows of dense layers."""
    num_layers, num_experts = tokens.shape[1:]
    idle = np.asarray(~tokens.any(axis=(0, 2)))
    rows, layers, further = resolve(rows_as_hidden(num_layers), options, idle=idle)
    kept = tokens if len(rows) == num_layers else tokens[:, rows]
    current = None
    if held is not None:
        current = PlacementFile(Placement(held[rows], num_experts), layers)
    return LoadFile(LoadHistory(kept, *steps), layers, current, notes=notes + further)


def _rank_files(folder: Path) -> list[Path]:
    """Files of the one dump in a folder, by rank."""
    found = {path: name for path in folder.iterdir() if (name := RANK_FILE.fullmatch(path.name))}
    by_rank: dict[int, list[Path]] = {}
    for path, name in found.items():
        by_rank.setdefault(int(name["rank"][:9]), []).append(path)
    if not found or len(found) > MAX_RANK_FILES:
        raise HistoryError(
            f"{len(found)} files expert_distribution_recorder_TIME_RANK.pt, "
            f"expected 1..{MAX_RANK_FILES}"
        )
    twice = [rank for rank, paths in by_rank.items() if len(paths) > 1]
    if twice:
        raise HistoryError(f"several files of rank {min(twice)}, expected those of one dump")
    missing = sorted(set(range(max(by_rank) + 1)) - by_rank.keys())
    if missing:
        raise HistoryError(f"no file of rank {missing[0]}, expected ranks 0..{max(by_rank)}")
    return [by_rank[rank][0] for rank in sorted(by_rank)]


def read_rank_files(
    paths: list[Path],
    options: ReadOptions,
    loaded: dict[Path, Any] | None = None,
    notes: tuple[str, ...] = (),
) -> LoadFile:
    """Read the files of all ranks of one dump, by rank, and sum their passes."""
    held: NDArray[np.int64] | None = None
    sums: dict[int, NDArray[np.int64]] = {}  # by pass
    seen: dict[int, int] = {}
    for rank, path in enumerate(paths):
        record = loaded[path] if loaded else load_torch(path)
        last = member(record, f"last_{MAP}", np.ndarray, path.name)
        table = _checked_map(last, f"{path.name}: the map")
        if held is not None and not np.array_equal(held, table):
            raise HistoryError(f"{path.name} has another map than rank 0, expected one dump")
        held = table
        for number, slots in _passes(record, table, path.name):
            if rank and number not in sums:
                raise HistoryError(f"{path.name} has pass {number}, which rank 0 lacks")
            sums[number] = sums.get(number, 0) + slots
            seen[number] = seen.get(number, 0) + 1
    if held is None or not sums:
        raise HistoryError("no records, expected passes")
    short = [number for number, count in seen.items() if count != len(paths)]
    if short:
        raise HistoryError(
            f"pass {min(short)} is in {seen[min(short)]} of {len(paths)} files, expected all, once"
        )
    num_experts = options.experts_in(held.shape[1], int(held.max()))
    folded = StepSums(options.max_windows)
    for number in sorted(sums):
        folded.add(number, to_logical(sums[number], held, num_experts, f"pass {number}"))
    only_last = (
        "the map is the last one: passes before a rebalance within this recording would be wrong"
    )
    summed = folded.history()
    steps = (summed.first_step, summed.last_step)
    current = held.astype(np.int32)
    found = _load_file(summed.tokens, steps, options, (*notes, only_last), current)
    num_ranks = len(paths) if len(paths) > 1 else None
    return replace(found, num_ranks=num_ranks)


def _checked_map(table: NDArray[Any], where: str) -> NDArray[np.int64]:
    """[L, P] experts of slots; every slot holds one."""
    num_slots = table.shape[-1] if table.ndim else 0
    check_whole(table, (None, None), where, high=num_slots - 1)
    if not table.size:
        raise HistoryError(f"{where} has shape {table.shape}, expected layers and slots")
    found: NDArray[np.int64] = table.astype(np.int64)
    return found


def _passes(
    record: Any, held: NDArray[np.int64], where: str
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Number and tokens [L, P] of each forward pass of one rank."""
    for index, one in enumerate(member(record, "records", list, where)):
        place = f"{where} record {index}"
        number = whole_number(member(one, "forward_pass_id", int, place), place, 0, 2**62)
        key = one.get("gatherer_key", "primary")
        if key != "primary":
            continue  # a second gatherer counts the same tokens of a draft model or of a phase
        slots = one.get("global_physical_count")
        if slots is None:
            slots = _counted(member(one, "topk_ids_of_layer", np.ndarray, place), held, place)
        check_whole(slots, held.shape, f"{place}: global_physical_count")
        yield number, slots.astype(np.int64)


def _counted(ids: NDArray[Any], held: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """[L, P] from the slots of single tokens [L, tokens, 8], padded with -1: older releases."""
    num_layers, num_slots = held.shape
    shape = (num_layers, None, None)
    check_whole(ids, shape, f"{where}: topk_ids_of_layer", low=-1, high=num_slots - 1)
    check_cells(num_layers, num_slots, held.nbytes)
    counts = [
        np.bincount(row.ravel().astype(np.int64) + 1, minlength=num_slots + 1)[1:] for row in ids
    ]
    return np.array(counts, dtype=np.int64)


# -- expert locations


def read_location(path: Path, options: ReadOptions) -> PlacementFile:
    """Read ``{"physical_to_logical_map": ...}``, as JSON or as a ``.pt`` file."""
    return of_location(load_torch(path) if path.suffix == ".pt" else read_json(path), options)


def of_location(record: Any, options: ReadOptions) -> PlacementFile:
    """The placement of a map that was read already."""
    table = member(record, MAP, (list, np.ndarray), "the file")
    given = table if isinstance(table, np.ndarray) else int_array(table, 2, MAP)
    held = _checked_map(given, MAP)
    num_experts = options.experts_in(held.shape[1], int(held.max()))
    rows, layers, notes = resolve(rows_as_hidden(len(held)), options)
    placement = Placement(held[rows].astype(np.int32), num_experts)
    return PlacementFile(placement, layers, notes=notes)


def write_location(
    file: PlacementFile, num_ranks: int | None, num_hidden: int | None
) -> tuple[bytes, tuple[str, ...]]:
    """Write the map of all hidden layers, and no other key: the engine refuses any other.

    Rows of dense layers hold experts in order: the engine asks for a full row and never uses it.
    """
    file, notes = filled(file, num_ranks)
    held = file.placement.slot_to_expert
    layers = file.layers
    if layers.axis == "hidden":
        return to_json({MAP: held.tolist()}), notes
    layers = model_layers(layers, "rows of SGLang are all hidden layers")
    total = num_hidden if num_hidden is not None else layers.num_hidden
    if total is None:
        total = layers.ids[-1] + 1
        notes = (*notes, f"{total} hidden layers are assumed, up to the last MoE layer")
    Layers(layers.ids, "model", total)  # checks that all are below
    in_order = np.arange(file.placement.num_slots) % file.placement.num_experts
    rows = np.tile(in_order, (total, 1))
    rows[list(layers.ids)] = held
    dense = total - len(layers.ids)
    if dense:
        notes = (*notes, f"{dense} rows of dense layers hold experts in order")
    return to_json({MAP: rows.tolist()}), notes
